"""`fewshot` and `dedupe`: evaluation of frozen features, and copies of test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitral.api.checkpoints import Source, load_source, source_name
from vitral.api.data import open_to_probe
from vitral.api.engines import Engine
from vitral.api.ensembles import compute_device, prepared, reading_workers
from vitral.api.parts import Arrays, parts_of
from vitral.api.slurm import SlurmOptions
from vitral.atomic import checked_output
from vitral.checkpoints.hub import located
from vitral.cost import cost
from vitral.data.loader import default_workers
from vitral.data.sources import Split, open_data, with_test_split
from vitral.data.workers import CHUNK as SIGNATURE_BLOCK
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.duplicates import (
    FEATURE_BLOCK,
    DedupeResult,
    find_duplicates,
    merge_duplicates,
    write_exclusions,
)
from vitral.evaluation.predict import SplitFeatures, cached_features
from vitral.evaluation.probes import FewShotResult, knn, linear_probe
from vitral.evaluation.probes import fewshot as ridge_fewshot
from vitral.events import EventHandler

ProbeMethod = Literal["ridge", "knn", "linear"]


@dataclass(frozen=True, repr=False)
class ProbeResult(SummaryRepr):
    """Accuracy of classifiers on frozen features: few-shot rows, and those trained on all of train where asked for."""

    source: str
    data: str
    split: str  # the split that was tested on
    features: int
    train: int
    test: int
    shots: tuple[FewShotResult, ...]
    knn: float | None
    linear: float | None
    flops: float  # of the features, in one forward pass of each image
    kept: str  # the file of cached features
    notes: tuple[str, ...]  # about the data, and the shots that some classes have too few images for
    seeds: int = 1
    l2: float | Literal["choose"] = 1024.0

    def summary(self) -> dict[str, str]:
        rows = {f"{row.shots}-shot": f"{row.mean:.2%}" for row in self.shots}
        rows |= {} if self.knn is None else {"knn": f"{self.knn:.2%}"}
        rows |= {} if self.linear is None else {"linear": f"{self.linear:.2%}"}
        return {"n": f"{self.test:,}", **rows, "data": self.data}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [{**asdict(row), "mean": row.mean, "interval": row.interval} for row in self.shots]
        return {**asdict(self), "shots": rows}


def fewshot(
    source: Source,
    data: str | Path,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float | Literal["choose"] = 1024.0,
    methods: Sequence[ProbeMethod] = ("ridge",),
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler | None = None,
) -> ProbeResult:
    """Evaluate frozen features with a few images per class, as the paper does.

    The classifier is ridge regression in closed form. Features are computed once and cached.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        data: what `vitral train` takes.
        shots: numbers of training images per class.
        seeds: draws of those images, over which mean and 95 % interval are computed.
        l2: strength of the regularisation, or choose: by cross-validation on the few images.
        methods: ridge (few-shot); knn and linear use all of train.
        preprocess: how pixels are prepared, where it differs from what the weights state.
        batch: images per batch.
        device: cpu, cuda or mps; chosen when not given.
        on_event: handler of progress events.

    Returns:
        The accuracy for each number of shots and by each method.

    Raises:
        UserError: where an argument is wrong, or the data has no images to train or to test on.
    """
    if seeds < 1 or batch < 1 or not shots or min(shots) < 1:
        raise UserError("shots, seeds and batch must be at least 1.")
    opened = open_to_probe(data, None if isinstance(source, tuple) else located(source))
    held_out = opened.eval_split
    if held_out is None or not len(opened.train):
        raise UserError(f"{data} has no images to learn from, or none to test on: name a data set with both.")
    if opened.train.multilabel:
        raise UserError("few-shot classification needs one label per image.")
    model, card = load_source(source, on_event)
    how, resolved = prepared(card, preprocess, on_event), compute_device(source, device)

    def features(split: Split, handler: EventHandler) -> SplitFeatures:
        workers = reading_workers(resolved)
        return cached_features(model, split, how, batch=batch, device=resolved, workers=workers, on_event=handler)

    with displayed(on_event) as handler:
        train, test = features(opened.train, handler), features(held_out, handler)
    (train_x, train_y), (test_x, test_y) = train.readable(), test.readable()
    classes = len(opened.train.classes)
    few: list[FewShotResult] = []
    if "ridge" in methods:
        few = ridge_fewshot(train_x, train_y, test_x, test_y, classes=classes, shots=tuple(shots), seeds=seeds, l2=l2)
    near = knn(train_x, train_y, test_x, classes=classes).argmax(1) if "knn" in methods else None
    lines = linear_probe(train_x, train_y, classes=classes).logits(test_x).argmax(1) if "linear" in methods else None
    return ProbeResult(
        source=source_name(source),
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
        seeds=seeds,
        l2=l2,
    )


def dedupe(
    train: str | Path,
    *,
    against: Sequence[str | Path],
    output: str | Path = "",
    weights: Source = "",
    preprocess: str = "",
    device: str = "",
    parts: int = 1,
    part: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    on_event: EventHandler | None = None,
) -> DedupeResult:
    """Find training images that are copies of test images.

    Re-encoded, resized, slightly cropped and mirrored copies are found by perceptual hashes and a comparison of pixels.
    `vitral train ... --set data.exclude=FILE` excludes the images listed in a file.

    Args:
        train: the training images: what `vitral train` takes.
        against: data sets whose test images must not be trained on.
        output: .txt file to list the copies in.
        weights: a model whose features find copies that the hashes miss; slower.
        preprocess: how pixels are prepared for it, where it differs from what the weights state.
        device: cpu, cuda or mps for the model; chosen when not given.
        parts: number of parts to compute the images in, each a command of its own; they are kept beside the output
            until all are there, and the output is the same as of one process.
        part: single parts to compute, such as 3/16, and no output.
        engine: where parts are computed: local, on the GPUs or the cores of this machine, or slurm, as an array of
            jobs.
        slurm: options of sbatch for the jobs as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: parts at a time; one per GPU when not given.
        on_event: handler of progress events.

    Returns:
        The pairs of training and test images that are copies.

    Raises:
        UserError: where an argument is wrong.
        PartsWritten: with `part`, once these parts are written.
    """
    divided = parts_of(dedupe, locals())
    if preprocess and not weights:
        raise UserError("preprocess is for the images of a model: name its weights, too, or leave it out.")
    resolved = compute_device(weights, device)
    target = checked_output(output, (".txt",), "--output") if output else None
    opened = open_data(train, held_out=0.0)
    others = [_tested(name) for name in against]
    model, card = load_source(weights, on_event) if weights else (None, None)
    how = prepared(card, preprocess, on_event) if card is not None else None
    with displayed(on_event) as handler:

        def compute(images: Split) -> Arrays:
            duplicates = find_duplicates(
                images,
                others,
                model=model,
                preprocess=how,
                device=resolved,
                workers=default_workers("cuda"),
                on_event=handler,
            )
            return (np.frombuffer(duplicates.to_json().encode(), np.uint8),)

        block = SIGNATURE_BLOCK if model is None else FEATURE_BLOCK
        results = divided.compute(opened.train, block, compute, handler)
    duplicates = merge_duplicates([DedupeResult.from_json(array.tobytes().decode()) for _, (array,) in results])
    if target is not None:
        write_exclusions(target, duplicates)
        divided.finish()
    return duplicates


def _too_few(labels: np.ndarray, classes: int, shots: int) -> str:
    short = int((np.bincount(labels, minlength=classes) < shots).sum())
    return f"{short:,} of {classes:,} classes have fewer than {shots:,} training images: all of these were used."


def _tested(name: str | Path) -> Split:
    """The images that a data set is tested on; all of them where it has one split."""
    opened = with_test_split(open_data(name, held_out=0.0))
    return opened.train if opened.eval_split is None else opened.eval_split
