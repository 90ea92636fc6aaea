"""`evaluate`: the metrics of a model on labelled images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.api.data import data_name, eval_images, is_recorded
from vitral.api.engines import Engine, SlurmOptions
from vitral.api.inference import Ensemble, Sources, open_ensemble, resolve_preprocessing
from vitral.api.inspection import model_facts, most_confident_mistakes, reliabilities
from vitral.api.parts import Parts, concat_parts, parts_of
from vitral.api.prediction import check_numbers, none_readable_message
from vitral.atomic import checked_output, write_text
from vitral.checkpoints.card import Card
from vitral.data.catalog import imagenet_outputs, real_labels
from vitral.data.images import UnreadableImage
from vitral.data.sources import Split
from vitral.display import SummaryRepr, displayed, score_summary
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics, wilson_interval
from vitral.evaluation.calibration import FOLDS, calibrate, probabilities
from vitral.evaluation.mapping import class_mapping, objectnet_accuracy, real_accuracy
from vitral.evaluation.predict import Precision, Predictions, TestTimeAugmentation
from vitral.events import EventHandler, Note, ignore_events
from vitral.report.evaluation import TemperatureAdvice, evaluation_page
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
    # The softmax temperature that suits these same images best, which is not that of the model's card; None if none
    # gives better probabilities than 1, and for multi-label models.
    temperature: float | None = None
    tempered_ece: float | None = None  # calibration error with such temperatures, cross-fitted on these images
    new: dict[str, Any] | None = None  # metrics of images that are new since the run, if it held out others
    page: str = ""  # the file that was written

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of top-1 accuracy (Wilson's, by the number of images); None without it."""
        top1 = self.metrics.get("top1")
        return None if top1 is None else wilson_interval(top1, self.metrics["n"])

    def summary(self) -> dict[str, str]:
        return {**score_summary(self.metrics), "data": self.data, "source": self.source}

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": self.interval}


def evaluate(
    source: Sources,
    data: str | Path,
    *,
    output: str | Path = "",
    split: str = "",
    classes: str | Path = "",
    ensemble: Sequence[str | Path] = (),
    tta: TestTimeAugmentation | None = None,
    real: str | Path = "",
    preprocess: str = "",
    precision: Precision = "float32",
    batch: int = 32,
    device: str = "",
    parts: int = 1,
    part: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    on_event: EventHandler | None = None,
) -> EvalResult:
    """Evaluate a model on labelled images: accuracy, per class, calibration.

    Args:
        source: a run folder, weights, an exported file, hf:owner/name or timm:name. For the folder of several folds or
            seeds, and in Python for a list of models, probabilities are averaged.
        data: any data that `vitral train` accepts; its val or test split is evaluated, or all of it if it has neither.
            Images that a run was trained on are excluded, and images added since then are scored separately.
        output: page to write, a .html file: confusions, calibration, the most confident mistakes.
        split: name of the split to evaluate, such as test if there is also val.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        ensemble: additional models to average with, each with its own preprocessing and temperature.
        tta: test-time augmentation, the views of each image to average over: the image and its mirror image (flip),
            four corners and the centre (five-crop), or these and their mirror images (ten-crop).
        real: file of ImageNet's ReaL labels (real.json).
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        precision: float32, bfloat16, fp8 (NVIDIA GPUs of the Hopper generation or newer) or int8 (linear layers of a
            Vision Transformer on a CPU); the last two are faster and approximate.
        batch: images per batch.
        device: cpu, cuda or mps; chosen automatically by default.
        parts: number of parts to divide the images into, each computed by a separate command. Parts are stored next to
            the output until all are complete; the output is the same as with one part.
        part: compute only these parts, such as 3/16, and write no output.
        engine: where parts are computed: local, on the GPUs or cores of this machine, or slurm, as a job array.
        slurm: options of sbatch as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: number of concurrent parts; one per GPU by default.
        on_event: handler of progress events.

    Returns:
        The metrics, which images were evaluated, and those that cannot be read.

    Raises:
        UserError: if an argument is wrong, or the classes of the data and the model do not match.
        PartsWritten: with `part`, once these parts are written.
    """
    divided = parts_of(evaluate, locals())
    check_numbers(batch=batch)
    page = checked_output(output, (".html",), "--output") if output else None
    loading = {"classes": classes, "tta": tta, "precision": precision, "device": device}
    models = open_ensemble(source, ensemble, **loading, on_event=on_event)
    card = models.members[0].card
    scored, is_new, notes, held_out = eval_images([member.source for member in models.members], data, split)
    objectnet = data_name(data).partition(":")[0] == "objectnet"
    if objectnet and not preprocess:
        members = (replace(one, card=_objectnet_card(one.card, on_event)) for one in models.members)
        models = replace(models, members=tuple(members))
    mapping, rule = np.empty(0, np.int64), ""
    if not objectnet:
        table = Path(classes) if classes else None
        mapping, rule = class_mapping(scored.classes, card.class_names, card.architecture.classes, table)
    with displayed(on_event) as handler:
        models = models.checked(scored, preprocess=preprocess, batch=batch, on_event=handler)
        notes = (*notes, *models.notes())

        def compute(images: Split) -> Predictions:
            return models.predict(images, preprocess=preprocess, batch=batch, on_event=handler)

        predictions = Predictions(*concat_parts(divided.compute(scored, batch, compute, handler)))
    unreadable = _unreadable(scored, predictions, card)
    if objectnet:
        rule = "A prediction is correct if it is one of the ImageNet classes of the object."
        metrics = _objectnet_metrics(str(data), scored, predictions)
        result = EvalResult(models.name, data_name(data), metrics, None, unreadable, (*notes, rule))
        return result if page is None else _with_page(result, page, models, divided)
    names = models.card.class_names or tuple(_output_names(scored.classes, mapping, card.architecture.classes))

    def measured(chosen: np.ndarray, temperature: float | None) -> dict[str, Any]:
        """The metrics of the predictions that are chosen, (n,) bool; without a temperature it is cross-fitted."""
        logits, truth = predictions.logits[chosen], scored.labels[predictions.indices[chosen]]
        if scored.multilabel:
            labels = np.zeros((len(truth), len(names)), np.uint8)
            labels[:, mapping] = truth
            return multilabel_metrics(probabilities(logits, sigmoid=True), labels, names).as_dict()
        options = {"sigmoid": card.multilabel, "temperature": temperature}
        return classification_metrics(logits, mapping[truth], names, **options).as_dict()

    added = predictions.valid & is_new[predictions.indices]
    if (added == predictions.valid).all():  # nothing to keep them apart from: what was held out cannot be read
        added = np.zeros_like(added)
    old = predictions.valid & ~added
    logits, indices = predictions.logits[old], predictions.indices[old]
    single_label = not (scored.multilabel or card.multilabel)
    fitted_here = single_label and models.temperature != 1.0 and held_out
    metrics = measured(old, None if fitted_here else models.temperature)
    tempered = _tempered(logits, mapping[scored.labels[indices]]) if single_label else dict[str, Any]()
    if fitted_here:
        notes = (*notes, f"Its temperature was fitted on these images: calibrated numbers are over {FOLDS} folds.")
    if models.averages and held_out and any(member.card.temperature != 1.0 for member in models.members):
        notes = (*notes, "Temperatures were fitted on these images: loss and calibration error are optimistic.")
    if any(member.card.temperature != 1.0 and not is_recorded(member.source) for member in models.members):
        notes = (
            *notes,
            "The file does not record which images its model was trained on and its temperature fitted on: scores of "
            "such images are too good. Evaluate the run folder to leave them out.",
        )
    new = None
    if added.any():
        new = measured(added, models.temperature)
        score = ", ".join(f"{name} {value}" for name, value in score_summary(new).items())
        notes = (*notes, f"The new images are scored apart: {score}.")
    keys = [scored.keys[index] for index in indices]
    result = EvalResult(
        source=models.name,
        data=data_name(data),
        metrics=metrics,
        real=real_accuracy(logits, keys, _read_real(Path(real))) if real else None,
        unreadable=unreadable,
        notes=(*notes, rule),
        new=new,
        **tempered,
    )
    if page is None:
        return result
    shown_parts: dict[str, Any] = {}
    if not scored.multilabel:
        labels, shown = mapping[scored.labels[indices]], replace(models.card, temperature=models.temperature)
        preprocessing = resolve_preprocessing(card, preprocess, ignore_events)
        shown_parts["mistakes"] = most_confident_mistakes(scored, indices, logits, labels, names, shown, preprocessing)
        shown_parts["reliability"] = reliabilities(logits, labels, shown)
    return _with_page(result, page, models, divided, **shown_parts)


def _with_page(result: EvalResult, path: Path, models: Ensemble, divided: Parts, **parts: Any) -> EvalResult:
    """Write the page of an evaluation; `parts` are further arguments of `evaluation_page`."""
    title = Path(models.name).name if len(models.members) == 1 else f"{len(models.members)} models"
    advice = None
    if result.temperature is not None and result.tempered_ece is not None and models.temperature == 1.0:
        advice = TemperatureAdvice(result.temperature, result.tempered_ece)
    text = evaluation_page(
        f"{title} on {Path(result.data).name}",
        result.metrics,
        facts={**model_facts(models.card), "weights": models.name, "data": result.data},
        notes=result.notes,
        advice=advice,
        sigmoid=models.card.multilabel,
        left_out=result.unreadable,
        **parts,
    )
    write_text(path, text)
    divided.finish()
    return replace(result, page=str(path))


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


def _tempered(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The temperature fields of an `EvalResult`, from logits (n, classes) and labels (n,)."""
    best = calibrate(logits, labels)
    return {} if best.temperature == 1.0 else {"temperature": best.temperature, "tempered_ece": best.ece}


def _objectnet_card(card: Card, on_event: EventHandler | None) -> Card:
    """With BiT's protocol scaled to the model's image size (short side 512, crop 480 at 480), the weights' mean and
    std."""
    side = card.architecture.image[0]
    pipeline = f"decode|resize_small({round(side * 512 / 480)})|central_crop({side})"
    return replace(card, preprocess=replace(resolve_preprocessing(card, "", on_event), pipeline=pipeline))


def _objectnet_metrics(data: str, split: Split, predictions: Predictions) -> dict[str, Any]:
    labels, logits = split.labels[predictions.indices[predictions.valid]], predictions.logits[predictions.valid]
    score = objectnet_accuracy(logits, labels, imagenet_outputs(data, split.classes))
    return {"top1": score.top1, "top5": score.top5, "n": score.n}


def _unreadable(split: Split, predictions: Predictions, card: Card) -> tuple[UnreadableImage, ...]:
    """The images that cannot be read, with the reasons; raises if that is all of them."""
    missing = predictions.indices[~predictions.valid]
    unreadable = tuple(unread(split, int(index), card.architecture.channels) for index in missing)
    if not predictions.valid.any():
        raise UserError(f"{none_readable_message(unreadable[0])}: see `vitral check`.")
    return unreadable


def _output_names(classes: Sequence[str], mapping: np.ndarray, count: int) -> list[str]:
    """Names for the outputs of a model without names: the data's, and numbers if the data has no such class."""
    names = [str(i) for i in range(count)]
    for name, output in zip(classes, mapping, strict=True):
        names[output] = name
    return names


def _read_real(path: Path) -> list[list[int]]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} does not contain ReaL labels, a JSON list of lists: check the path.") from error
