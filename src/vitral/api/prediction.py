"""`predict`, `classifier`, `evaluate`, `embed` and `check`: a model and images to answers; the card says all else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral.api.checkpoints import load
from vitral.api.data import open_as_trained
from vitral.atomic import atomic_write, checked_output
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.catalog.imagenet import imagenet_outputs
from vitral.data.check import CheckReport
from vitral.data.check import check as check_data
from vitral.data.images import encode_png
from vitral.data.loader import default_workers, read_pixels
from vitral.data.preprocess import parse_deterministic, parse_preprocess
from vitral.data.sources import DataSet, Split, open_data, open_images
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics, objectnet_accuracy, real_accuracy
from vitral.evaluation.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    calibration_error,
    fit_temperature,
    probabilities,
    reliability,
)
from vitral.evaluation.mapping import class_mapping
from vitral.evaluation.predict import EmbeddingPool, Predictions, embed_split, predict_split
from vitral.events import EventHandler, ignore_events
from vitral.kernels.packed import pack
from vitral.models.build import Model
from vitral.models.device import resolve_device
from vitral.recipe import from_toml
from vitral.serving.classifier import Classifier, NamedClassifier
from vitral.serving.results import Results, Unreadable, results, unread, write_results


def predict(
    source: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    output: str | Path = "",
    top: int = 5,
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> Results:
    """The likeliest classes of image files, or of all images in folders; to `output` as CSV or JSON too.

    Images that cannot be read are listed with the reason; nothing is written where that is all of them.
    """
    _check_numbers(batch=batch, top=top)
    target = checked_output(output, (".csv", ".json"), "--output") if output else None
    split = open_images([images] if isinstance(images, str | Path) else images)
    model, card = _predictor(source, device)
    _check_head(source, card)
    found = _predictions(model, split, prepared(card, preprocess), batch, device, on_event)
    kind = {"sigmoid": card.multilabel, "channels": card.architecture.channels}
    named = results(found, split, card.class_names, top=top, **kind)
    if target is not None:
        if not named.rows:
            raise UserError(f"{none_read(named.unreadable[0])}: nothing was written.")
        write_results(target, named)
    return named


def none_read(first: Unreadable) -> str:
    """The beginning of a sentence about images of which not one could be read."""
    return f"none of these images can be read, {first.path} first ({first.reason})"


def classifier(source: str | Path, *, top: int = 5, preprocess: str = "", device: str = "") -> NamedClassifier:
    """For programs that see one picture at a time: `classify = classifier(source)`, then `classify(picture)` gives the
    likeliest classes and their probabilities. A picture is uint8 pixels (h, w, c), a path, or the bytes of a file.

    On an NVIDIA GPU it computes in half precision, where `predict` does not.
    """
    _check_numbers(top=top)
    place, _ = _place(device)
    model, card = load(source)
    _check_head(source, card)
    wish, channels, classes = prepared(card, preprocess), card.architecture.channels, card.architecture.classes
    pipeline = parse_deterministic(wish.pipeline)
    likeliest = Classifier(
        model,
        torch.device(place),
        size=pipeline.size,
        channels=channels,
        mean=wish.mean,
        std=wish.std,
        top=min(top, classes),
        sigmoid=card.multilabel,
    )
    return NamedClassifier(likeliest, pipeline, channels, card.class_names or tuple(map(str, range(classes))))


@dataclass(frozen=True)
class Evaluation:
    """How a model did on a data set."""

    source: str
    data: str
    metrics: dict[str, Any]
    real: tuple[float, int] | None  # accuracy by the ReaL labels, and how many images have one
    unreadable: tuple[Unreadable, ...]
    notes: tuple[str, ...]
    # Logits divided by it would have the best likelihood on these very images. None where none is best, as if every
    # answer is right, and for models whose classes are a yes or no each.
    temperature: float | None = None
    tempered_ece: float | None = None  # the calibration error after it; fitted on the same images, it is optimistic


def evaluate(
    source: str | Path,
    data: str | Path,
    *,
    split: str = "",
    classes: str | Path = "",
    real: str | Path = "",
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> Evaluation:
    """Accuracy of a run or of weights on the test split of a data set, or on all of it where it has no split.

    `split` names another one of its splits (test, where val is there too), `classes` is a file that names the model's
    outputs in order, `real` holds the ReaL labels of ImageNet.
    """
    _check_numbers(batch=batch)
    model, card = load(source)
    _check_head(source, card)
    scored, notes = _test_split(Path(source).expanduser(), data, split)
    if str(data).partition(":")[0] == "objectnet":
        wish = prepared(card, preprocess) if preprocess else _objectnet_preprocess(card)
        found = _predictions(model, scored, wish, batch, device, on_event)
        return _objectnet(str(source), str(data), scored, found, _left_out(scored, found, card), notes)
    table = Path(classes) if classes else None
    mapping, rule = class_mapping(scored.classes, card.class_names, card.architecture.classes, table)
    found = _predictions(model, scored, prepared(card, preprocess), batch, device, on_event)
    lost = _left_out(scored, found, card)
    logits, places = found.logits[found.valid], found.indices[found.valid]
    names = card.class_names or tuple(_output_names(scored.classes, mapping, card.architecture.classes))
    tempered: dict[str, float] = {}
    if scored.multilabel:
        labels = np.zeros((len(places), len(names)), np.uint8)
        labels[:, mapping] = scored.labels[places]
        metrics = multilabel_metrics(probabilities(logits, sigmoid=True), labels, names).as_dict()
    else:
        labels = mapping[scored.labels[places]]
        metrics = classification_metrics(logits, labels, names, sigmoid=card.multilabel).as_dict()
        tempered = {} if card.multilabel else _tempered(logits, labels)
    keys = [scored.keys[place] for place in places]
    return Evaluation(
        source=str(source),
        data=str(data),
        metrics=metrics,
        real=real_accuracy(logits, keys, _read_real(Path(real))) if real else None,
        unreadable=lost,
        notes=(*notes, rule),
        **tempered,
    )


def _tempered(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """(n, k), (n,) -> the fields of an `Evaluation` about the temperature; none where it lies at a bound."""
    temperature = fit_temperature(logits, labels)
    if not MIN_TEMPERATURE < temperature < MAX_TEMPERATURE:
        return {}
    error = calibration_error(reliability(logits / temperature, labels))
    return {"temperature": temperature, "tempered_ece": error}


def _objectnet_preprocess(card: Card) -> Preprocess:
    """BiT's protocol, at the model's own size: short side to 512 and a crop of 480 where the model takes 480; mean and
    std are what the weights state."""
    side = card.architecture.image[0]
    pipeline = f"decode|resize_small({round(side * 512 / 480)})|central_crop({side})"
    return replace(prepared(card, ""), pipeline=pipeline)


def _objectnet(
    source: str, data: str, split: Split, found: Predictions, lost: tuple[Unreadable, ...], notes: tuple[str, ...]
) -> Evaluation:
    mapping = imagenet_outputs(data, split.classes)
    places = found.indices[found.valid]
    score = objectnet_accuracy(found.logits[found.valid], split.labels[places], mapping)
    rule = "An answer is right where it is one of the ImageNet classes that the object stands for."
    metrics = {"top1": score.top1, "top5": score.top5, "n": score.n}
    return Evaluation(source, data, metrics, None, lost, (*notes, rule))


def _left_out(split: Split, found: Predictions, card: Card) -> tuple[Unreadable, ...]:
    """The images that could not be read, with the reasons; there must be others."""
    lost = tuple(unread(split, int(place), card.architecture.channels) for place in found.indices[~found.valid])
    if not found.valid.any():
        raise UserError(f"{none_read(lost[0])}: see `vitral check`.")
    return lost


def embed(
    source: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    output: str | Path = "",
    pool: EmbeddingPool = "features",
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> tuple[list[str], np.ndarray]:
    """Paths and their features (n, d), without images that cannot be read; to `output` as npz (paths, features) too."""
    _check_numbers(batch=batch)
    target = checked_output(output, (".npz",), "--output") if output else None
    split = open_images([images] if isinstance(images, str | Path) else images)
    model, card = _predictor(source, device)
    place, workers = _place(device)
    found = embed_split(
        model,
        split,
        prepared(card, preprocess),
        batch=batch,
        pool=pool,
        device=place,
        workers=workers,
        on_event=on_event,
    )
    paths = [split.keys[place] for place in found.indices[found.valid]]
    if not paths:
        raise UserError(f"{none_read(unread(split, 0, card.architecture.channels))}: nothing was written.")
    features = found.features[found.valid]
    if target is not None:
        with atomic_write(target) as aside, aside.open("wb") as stream:
            np.savez(stream, paths=np.array(paths), features=features)
    return paths, features


def check(data: str | Path, *, on_event: EventHandler = ignore_events) -> CheckReport:
    """What is wrong with a data set: unreadable and odd files, duplicates, leaks, uneven classes."""
    return check_data(data, workers=default_workers("cuda"), on_event=on_event)


def write_pictures(data: str | Path, folder: Path, *, count: int) -> list[Path]:
    """Some held-out images as PNG files, one after the other through the classes, named by their class."""
    split = open_data(data).eval_split
    if split is None or split.multilabel:
        raise UserError(f"{data} has no held-out images with one label each.")
    places = [np.flatnonzero(split.labels == label) for label in range(len(split.classes))]
    chosen = [int(own[turn]) for turn in range(count) for own in places if turn < len(own)][:count]
    paths = []
    for number, place in enumerate(chosen):
        path = folder / f"{split.classes[split.labels[place]]}-{number}.png"
        with atomic_write(path) as aside:
            aside.write_bytes(encode_png(read_pixels(split, place, 3)))
        paths.append(path)
    return paths


def _predictions(
    model: Model, split: Split, preprocess: Preprocess, batch: int, device: str, on_event: EventHandler
) -> Predictions:
    place, workers = _place(device)
    return predict_split(model, split, preprocess, batch=batch, device=place, workers=workers, on_event=on_event)


def _predictor(source: str | Path, device: str) -> tuple[Model, Card]:
    """A model that only answers, and its card. A CPU gets it packed, which changes the last bits of a float32: a run's
    own numbers, which `evaluate` repeats exactly, come from a plain one."""
    model, card = load(source)
    place, _ = _place(device)
    if place.split(":")[0] == "cpu":
        pack(model)
    return model, card


def _place(device: str) -> tuple[str, int]:
    """Where to compute, and how many processes read images for it."""
    place = resolve_device(device)
    return place, default_workers(place.split(":")[0])


def _check_head(source: str | Path, card: Card) -> None:
    if not card.architecture.classes:
        raise UserError(
            f"{source} has no head that classifies: fine-tune it first, or measure its features with `vitral fewshot`."
        )


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, not {number}.")


def prepared(card: Card, text: str) -> Preprocess:
    """What the user says, else what the card says; a guess would be silently wrong."""
    if text:
        return Preprocess(*parse_preprocess(text, card.architecture.channels))
    if card.preprocess is None:
        side = card.architecture.image[0]
        example = f"decode|resize_small({round(side * 8 / 7)})|central_crop({side})|value_range(-1, 1)"
        raise UserError(
            "these weights do not say how their images were prepared: add what their makers say, such as "
            f'--preprocess "{example}".'
        )
    return card.preprocess


def _test_split(source: Path, data: str | Path, split: str) -> tuple[Split, tuple[str, ...]]:
    """The images to score: never those that a run was trained on, where its folder tells."""
    folder = source if source.is_dir() else source.parent
    recipe, facts = folder / "recipe.toml", folder / "data.json"
    if recipe.is_file() and facts.is_file():
        stated = json.loads(facts.read_text("utf-8"))
        same = open_as_trained(data, from_toml(recipe.read_text("utf-8")), stated["train"])
        scored = _scored(same, split, stated["evaluated"]) if same is not None else None
        if scored is not None:
            held = f"the {len(scored):,} held-out images of its {scored.name} split"
            return scored, (f"The model was trained on this data: only {held} are scored.",)
    opened = open_data(data, held_out=0.0)
    scored = _scored(opened, split)
    if scored is None:
        return opened.train, (f"All {len(opened.train):,} images are scored.",)
    return scored, (f"The {len(scored):,} images of the {scored.name} split are scored.",)


def _scored(data: DataSet, split: str, measured: str = "") -> Split | None:
    """The split asked for; without a wish the one with the fingerprint that a run measured, else the first."""
    parts = list(data.splits[1:])
    found = [part for part in parts if split in ("", part.name)]
    if split and not found:
        known = " or ".join(f"--split {part.name}" for part in parts)
        raise UserError(
            f'{data.source} has no split "{split}" to score: {f"use {known}" if known else "leave it out"}.'
        )
    if not split and measured:
        found = [part for part in parts if part.fingerprint() == measured] or found
    return found[0] if found else None


def _output_names(classes: Sequence[str], mapping: np.ndarray, count: int) -> list[str]:
    """Names for outputs of a model that has none: the data's, and numbers where the data has no such class."""
    names = [str(i) for i in range(count)]
    for name, place in zip(classes, mapping, strict=True):
        names[place] = name
    return names


def _read_real(path: Path) -> list[list[int]]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} does not hold ReaL labels, a JSON list of lists: check the path.") from error
