"""`fewshot` and `dedupe`: what frozen features and hashes tell, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitral.api.checkpoints import load
from vitral.api.data import open_to_probe
from vitral.atomic import checked_output
from vitral.checkpoints.weights import located
from vitral.cost import cost
from vitral.data.loader import default_workers
from vitral.data.sources import Split, open_data, with_test_split
from vitral.errors import UserError
from vitral.evaluation.duplicates import DedupeResult, find_duplicates, write_exclusions
from vitral.evaluation.features import SplitFeatures, cached_features
from vitral.evaluation.fewshot import FewShotResult
from vitral.evaluation.fewshot import fewshot as ridge_fewshot
from vitral.evaluation.probes import knn, linear_probe
from vitral.events import EventHandler, ignore_events
from vitral.models.device import resolve_device

Method = Literal["ridge", "knn", "linear"]


@dataclass(frozen=True)
class Probing:
    """How far frozen features go: few-shot rows, and classifiers on all of train where they were asked for."""

    source: str
    data: str
    split: str  # what was tested on
    features: int
    train: int
    test: int
    shots: tuple[FewShotResult, ...]
    knn: float | None
    linear: float | None
    flops: float  # of the features, in one forward pass of each image
    kept: str  # where the features are, for the next time
    notes: tuple[str, ...]  # what to know of the data, and the shots that some classes are too small for

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "mean": row.mean, "interval": row.interval} for row in self.shots]
        return {**asdict(self), "shots": rows}


def fewshot(
    source: str | Path,
    data: str | Path,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float | Literal["choose"] = 1024.0,
    methods: Sequence[Method] = ("ridge",),
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> Probing:
    """The paper's few-shot accuracy: least squares on the features of a few images a class, in closed form.

    `l2="choose"` takes the strength by cross-validation on the few training images. "knn" and "linear" classify with
    all of train instead. Images are prepared as the weights say unless `preprocess` says otherwise.
    """
    from vitral.api.prediction import prepared

    if seeds < 1 or batch < 1 or not shots or min(shots) < 1:
        raise UserError("shots, seeds and batch must be at least 1.")
    place = resolve_device(device)
    opened = open_to_probe(data, located(str(source)))
    held_out = opened.eval_split
    if held_out is None or not len(opened.train):
        raise UserError(f"{data} has no images to learn from, or none to test on: name a data set with both.")
    if opened.train.multilabel:
        raise UserError("few-shot classification needs one label an image.")
    model, card = load(source)
    wish = prepared(card, preprocess)

    def features(split: Split) -> SplitFeatures:
        workers = default_workers(place.split(":")[0])
        return cached_features(model, split, wish, batch=batch, device=place, workers=workers, on_event=on_event)

    train, test = features(opened.train), features(held_out)
    (train_x, train_y), (test_x, test_y) = train.readable(), test.readable()
    classes = len(opened.train.classes)
    few: list[FewShotResult] = []
    if "ridge" in methods:
        few = ridge_fewshot(train_x, train_y, test_x, test_y, classes=classes, shots=tuple(shots), seeds=seeds, l2=l2)
    near = knn(train_x, train_y, test_x, classes=classes).argmax(1) if "knn" in methods else None
    lines = linear_probe(train_x, train_y, classes=classes).logits(test_x).argmax(1) if "linear" in methods else None
    return Probing(
        source=str(source),
        data=str(data),
        split=held_out.name,
        features=train_x.shape[1],
        train=len(train_y),
        test=len(test_y),
        shots=tuple(few),
        knn=None if near is None else float(np.mean(near == test_y)),
        linear=None if lines is None else float(np.mean(lines == test_y)),
        flops=2.0 * cost(card.architecture).macs * (len(train_y) + len(test_y)),
        kept=str(train.path or ""),
        notes=(
            *opened.messages,
            *(_too_few(train_y, classes, row.shots) for row in few if row.drawn < row.shots * classes),
        ),
    )


def dedupe(
    train: str | Path,
    against: Sequence[str | Path],
    *,
    output: str | Path = "",
    weights: str | Path = "",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> DedupeResult:
    """Images of `train` that test images of other data sets are copies of; to `output` as a list to leave out.

    Perceptual hashes and a closer look find copies; with `weights` the model's features look, too, at images prepared
    as the weights say unless `preprocess` says otherwise. `data.exclude` of a recipe takes the list.
    """
    from vitral.api.prediction import prepared

    place = resolve_device(device)
    if preprocess and not weights:
        raise UserError("preprocess is for the images of a model: name its weights, too, or leave it out.")
    target = checked_output(output, (".txt",), "--output") if output else None
    opened = open_data(train, held_out=0.0)
    others = [_tested(name) for name in against]
    model, card = load(weights) if weights else (None, None)
    wish = prepared(card, preprocess) if card is not None else None
    found = find_duplicates(
        opened.train,
        others,
        model=model,
        preprocess=wish,
        device=place,
        workers=default_workers("cuda"),
        on_event=on_event,
    )
    if target is not None:
        write_exclusions(target, found)
    return found


def _too_few(labels: np.ndarray, classes: int, shots: int) -> str:
    short = int((np.bincount(labels, minlength=classes) < shots).sum())
    return f"{short:,} of {classes:,} classes have fewer than {shots:,} images to learn from: all of theirs were taken."


def _tested(name: str | Path) -> Split:
    """What a data set is tested on; all of it where it has one split."""
    opened = with_test_split(open_data(name, held_out=0.0))
    return opened.train if opened.eval_split is None else opened.eval_split
