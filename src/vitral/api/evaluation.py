"""`evaluate`: the metrics of a model on labelled images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.api.checkpoints import Source, load_source, source_name
from vitral.api.held_out import eval_images
from vitral.api.prediction import check_head, check_numbers, compute_device, none_read, prepared, reading_workers
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.catalog.imagenet import imagenet_outputs, real_labels
from vitral.data.images import UnreadableImage
from vitral.data.sources import Split
from vitral.display import SummaryRepr, displayed, score_summary
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics, objectnet_accuracy, real_accuracy
from vitral.evaluation.calibration import FOLDS, calibrate, probabilities
from vitral.evaluation.mapping import class_mapping
from vitral.evaluation.predict import Predictions, predict_split
from vitral.events import EventHandler, Note
from vitral.serving import unread


@dataclass(frozen=True, repr=False)
class EvalResult(SummaryRepr):
    """The metrics of a model on a data set."""

    source: str
    data: str
    metrics: dict[str, Any]
    real: tuple[float, int] | None  # accuracy by the ReaL labels, and how many images have one
    unreadable: tuple[UnreadableImage, ...]
    notes: tuple[str, ...]
    # The softmax temperature that suits these same images best, which is not that of the model's card; None where none
    # gives better probabilities than 1, and for multi-label models.
    temperature: float | None = None
    tempered_ece: float | None = None  # calibration error with such temperatures, cross-fitted on these images
    new: dict[str, Any] | None = None  # metrics of images that are new since the run, where others were held out by it

    def summary(self) -> dict[str, str]:
        return {**score_summary(self.metrics), "data": self.data, "source": self.source}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def evaluate(
    source: Source,
    data: str | Path,
    *,
    split: str = "",
    classes: str | Path = "",
    real: str | Path = "",
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler | None = None,
) -> EvalResult:
    """Evaluate a model on labelled images: accuracy, per class, calibration.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        data: what `vitral train` takes; its val or test split is evaluated, or all of it where it has neither. Images
            that a run was trained on are left out, and those that are new since then are scored apart.
        split: name of the split to evaluate, such as test where there is val as well.
        classes: file that names the model's outputs in order, one line each.
        real: file of ImageNet's ReaL labels (real.json).
        preprocess: how pixels are prepared, where the weights do not state it.
        batch: images per batch.
        device: cpu, cuda or mps; chosen when not given.
        on_event: handler of progress events.

    Returns:
        The metrics, which images were evaluated, and those that cannot be read.

    Raises:
        UserError: where an argument is wrong, or the classes of the data and the model do not match.
    """
    check_numbers(batch=batch)
    model, card = load_source(source, on_event)
    check_head(source, card)
    scored, is_new, notes, held_out = eval_images(source, data, split)
    objectnet = str(data).partition(":")[0] == "objectnet"
    how = _objectnet_preprocess(card) if objectnet and not preprocess else prepared(card, preprocess)
    mapping, rule = np.empty(0, np.int64), ""
    if not objectnet:
        table = Path(classes) if classes else None
        mapping, rule = class_mapping(scored.classes, card.class_names, card.architecture.classes, table)
    resolved = compute_device(source, device)
    with displayed(on_event) as handler:
        predictions = predict_split(
            model, scored, how, batch=batch, device=resolved, workers=reading_workers(resolved), on_event=handler
        )
    unreadable = _unreadable(scored, predictions, card)
    if objectnet:
        return _objectnet(source_name(source), str(data), scored, predictions, unreadable, notes)
    names = card.class_names or tuple(_output_names(scored.classes, mapping, card.architecture.classes))
    added = predictions.valid & is_new[predictions.indices]
    if (added == predictions.valid).all():  # nothing to keep them apart from: what was held out cannot be read
        added = np.zeros_like(added)
    old = predictions.valid & ~added
    logits, indices = predictions.logits[old], predictions.indices[old]
    single_label = not (scored.multilabel or card.multilabel)
    fitted_here = single_label and card.temperature != 1.0 and held_out
    temperature = None if fitted_here else card.temperature
    metrics = _metrics(logits, scored, indices, mapping, names, card, temperature)
    tempered = _tempered(logits, mapping[scored.labels[indices]]) if single_label else {}
    if fitted_here:
        notes = (*notes, f"Its temperature was fitted on these images: calibrated numbers are over {FOLDS} folds.")
    new = None
    if added.any():
        positions = predictions.indices[added]
        new = _metrics(predictions.logits[added], scored, positions, mapping, names, card, card.temperature)
        score = ", ".join(f"{name} {value}" for name, value in score_summary(new).items())
        notes = (*notes, f"The new images are scored apart: {score}.")
    keys = [scored.keys[index] for index in indices]
    return EvalResult(
        source=source_name(source),
        data=str(data),
        metrics=metrics,
        real=real_accuracy(logits, keys, _read_real(Path(real))) if real else None,
        unreadable=unreadable,
        notes=(*notes, rule),
        new=new,
        **tempered,
    )


def real_scores(
    folders: Sequence[str], data: str | Path, classes: int, device: str, on_event: EventHandler
) -> tuple[tuple[float, ...], int]:
    """ImageNet's accuracy by the ReaL labels of each run, and how many images have one; part of the paper's protocol.

    Nothing is returned for other data, and for a copy of ImageNet without real.json, which a note says.
    """
    if str(data).partition(":")[0] != "imagenet":
        return (), 0
    labels = real_labels(str(data), classes)
    if labels is None:
        on_event(Note("ReaL accuracy is not reported: put real.json into the folder of a complete ImageNet."))
        return (), 0
    try:
        scores = [evaluate(folder, data, real=labels, device=device, on_event=on_event).real for folder in folders]
    except UserError as error:  # the runs are done, and their results stay
        on_event(Note(f"ReaL accuracy is not reported: {error}"))
        return (), 0
    return tuple(score[0] for score in scores if score), scores[0][1] if scores[0] else 0


def _metrics(
    logits: np.ndarray,
    split: Split,
    indices: np.ndarray,
    mapping: np.ndarray,
    names: Sequence[str],
    card: Card,
    temperature: float | None,
) -> dict[str, Any]:
    """The metrics of logits (n, classes) of the images at these indices; without a temperature it is cross-fitted."""
    if split.multilabel:
        labels = np.zeros((len(indices), len(names)), np.uint8)
        labels[:, mapping] = split.labels[indices]
        return multilabel_metrics(probabilities(logits, sigmoid=True), labels, names).as_dict()
    labels = mapping[split.labels[indices]]
    return classification_metrics(logits, labels, names, sigmoid=card.multilabel, temperature=temperature).as_dict()


def _tempered(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The temperature fields of an `EvalResult`, from logits (n, classes) and labels (n,)."""
    best = calibrate(logits, labels)
    return {} if best.temperature == 1.0 else {"temperature": best.temperature, "tempered_ece": best.ece}


def _objectnet_preprocess(card: Card) -> Preprocess:
    """BiT's protocol scaled to the model's image size (short side 512, crop 480 at 480), the weights' mean and std."""
    side = card.architecture.image[0]
    pipeline = f"decode|resize_small({round(side * 512 / 480)})|central_crop({side})"
    return replace(prepared(card, ""), pipeline=pipeline)


def _objectnet(
    source: str,
    data: str,
    split: Split,
    predictions: Predictions,
    unreadable: tuple[UnreadableImage, ...],
    notes: tuple[str, ...],
) -> EvalResult:
    mapping = imagenet_outputs(data, split.classes)
    indices = predictions.indices[predictions.valid]
    score = objectnet_accuracy(predictions.logits[predictions.valid], split.labels[indices], mapping)
    rule = "A prediction is correct where it is one of the ImageNet classes of the object."
    metrics = {"top1": score.top1, "top5": score.top5, "n": score.n}
    return EvalResult(source, data, metrics, None, unreadable, (*notes, rule))


def _unreadable(split: Split, predictions: Predictions, card: Card) -> tuple[UnreadableImage, ...]:
    """The images that cannot be read, with the reasons; raises where that is all of them."""
    missing = predictions.indices[~predictions.valid]
    unreadable = tuple(unread(split, int(index), card.architecture.channels) for index in missing)
    if not predictions.valid.any():
        raise UserError(f"{none_read(unreadable[0])}: see `vitral check`.")
    return unreadable


def _output_names(classes: Sequence[str], mapping: np.ndarray, count: int) -> list[str]:
    """Names for the outputs of a model without names: the data's, and numbers where the data has no such class."""
    names = [str(i) for i in range(count)]
    for name, output in zip(classes, mapping, strict=True):
        names[output] = name
    return names


def _read_real(path: Path) -> list[list[int]]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} does not hold ReaL labels, a JSON list of lists: check the path.") from error
