"""Models for inference: one or an ensemble, with one or several views of each image."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from torch import Tensor

from vitral.api.checkpoints import Source, load_source, source_name
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.loader import default_workers
from vitral.data.preprocess import parse_preprocess
from vitral.data.sources import Split
from vitral.display import displayed
from vitral.errors import UserError
from vitral.evaluation.mapping import class_order, read_table
from vitral.evaluation.predict import (
    VIEWS,
    Precision,
    Predictions,
    Preprocessing,
    TestTimeAugmentation,
    ViewPreprocess,
    averaging,
    mean_predictions,
    predict_split,
    view_pipeline,
)
from vitral.evaluation.recheck import MAX_RECOMPUTED, MIN_IMAGES, Recheck, in_bfloat16, sample_of
from vitral.events import EventHandler, Note, Progress
from vitral.export.exported import PixelLogits, is_exported, open_exported
from vitral.kernels.packed import pack, pack_int8
from vitral.models.build import Model, resolve_device, use_fp8
from vitral.models.vit import ViT

Sources = Source | list[Any]  # in Python also several; a list of one type is no list of a union
_RUNS = ("fold-*", "seed-*")  # runs of one `vitral train`
AnyModel = TypeVar("AnyModel", bound=Model | PixelLogits)


@dataclass(frozen=True)
class Member:
    """A model of an ensemble, which may be the only one."""

    source: Source
    model: Model | PixelLogits
    card: Card
    device: str
    order: np.ndarray  # (classes,) int64: its outputs in the order of the first model


@dataclass(frozen=True)
class Ensemble:
    """Models whose probabilities are averaged. `card` is the first one's, with the class names that are shown."""

    members: tuple[Member, ...]
    card: Card
    tta: TestTimeAugmentation | None = None
    precision: Precision = "float32"
    recheck: Recheck | None = None  # of models in FP8

    @property
    def averages(self) -> bool:
        return len(self.members) > 1 or self.tta is not None

    @property
    def name(self) -> str:
        return " + ".join(source_name(member.source) for member in self.members)

    @property
    def temperature(self) -> float:
        """What the logits of `predict` are divided by; in those of an average the models' temperatures are applied."""
        return 1.0 if self.averages else self.card.temperature

    def notes(self) -> tuple[str, ...]:
        """The precision if it is not float32, its effect if known, and what is averaged, in a sentence each."""
        precision = (f"Computed in {self.precision}.",) if self.precision != "float32" else ()
        precision += (str(self.recheck),) if self.recheck else ()
        if not self.averages:
            return precision
        models = [f"{len(self.members)} models"] if len(self.members) > 1 else []
        views = [f"{VIEWS[self.tta]} views of each image ({self.tta})"] if self.tta else []
        averaged = (
            f"Probabilities are averaged over {' and '.join([*models, *views])}, each at its model's temperature."
        )
        return (*precision, averaged)

    def predict(
        self, split: Split, *, preprocess: str = "", batch: int, task: str = "evaluating", on_event: EventHandler
    ) -> Predictions:
        """Compute logits in the order of the first model's classes.

        `preprocess` is what the user gives; of several models, it is for those that do not state theirs.
        """
        options = {"preprocess": preprocess, "batch": batch, "on_event": on_event}
        found = self._compute(split, task=task, **options)
        if self.recheck is None:
            return found
        rows = np.flatnonzero(found.valid & self.recheck.doubtful(found.logits))
        if len(rows):
            doubtful, task = split.select(found.indices[rows]), "computing doubtful images again"
            options["on_event"] = _only_progress(on_event)
            again = self._compute(doubtful, task=task, fp8=False, **options)
            found.logits[rows[again.indices[again.valid]]] = again.logits[again.valid]
        return found

    def checked(self, split: Split, *, preprocess: str = "", batch: int, on_event: EventHandler) -> Ensemble:
        """The same models, ready to predict these images: in FP8, how much it changes was measured on a sample.

        Models that have several labels per image, or one output, are not checked. Where FP8 would take longer than
        bfloat16, it is switched off, and reported.
        """
        if self.precision != "fp8":
            return self
        models = [member.model for member in self.members if isinstance(member.model, ViT) and member.model.fp8]
        if models and (self.card.multilabel or self.card.architecture.classes < 2):
            return self
        if models:
            found = self._compare(split, preprocess=preprocess, batch=batch, on_event=on_event)
            if isinstance(found, Recheck):
                return replace(self, recheck=found)
            on_event(Note(f"computed in bfloat16: {found}"))
        for model in models:
            model.fp8 = False
        return replace(self, precision="bfloat16")

    def _compare(self, split: Split, *, preprocess: str, batch: int, on_event: EventHandler) -> Recheck | str:
        """What FP8 changes, measured on a sample; or why it is not used."""
        if len(split) < MIN_IMAGES:
            return f"below {MIN_IMAGES:,} images, checking FP8 on a sample takes longer than FP8 saves"
        sample, task = split.select(sample_of(len(split))), "comparing FP8 with bfloat16"
        options = {"preprocess": preprocess, "batch": batch, "task": task, "on_event": _only_progress(on_event)}
        fp8, bfloat16 = self._compute(sample, **options), self._compute(sample, **options, fp8=False)
        usable = fp8.valid & bfloat16.valid & np.isfinite(fp8.logits + bfloat16.logits).all(axis=1)
        if not usable.any():
            return "no image of the sample that FP8 is checked on can be read"
        recheck = Recheck.of(fp8.logits[usable], bfloat16.logits[usable])
        if recheck.recomputed > MAX_RECOMPUTED:
            return f"FP8 leaves {recheck.recomputed:.0%} of {recheck.images} sampled images in doubt, too many to gain"
        return recheck

    def _compute(
        self, split: Split, *, preprocess: str, batch: int, task: str, on_event: EventHandler, fp8: bool = True
    ) -> Predictions:
        """The models' average; without `fp8`, those in FP8 are computed in bfloat16."""
        results = []
        for number, member in enumerate(self.members, 1):
            preprocessing, function = self._function(member, preprocess, on_event)
            if isinstance(member.model, ViT) and not fp8:
                function = in_bfloat16(member.model, function)
            indices, logits, valid = predict_split(
                member.model,
                split,
                preprocessing,
                function=function,
                batch=batch,
                device=member.device,
                precision=self.precision,
                normalized=not isinstance(member.model, PixelLogits),
                workers=reading_workers(member.device),
                task=f"{task} ({number} of {len(self.members)})" if len(self.members) > 1 else task,
                on_event=on_event,
            )
            results.append(Predictions(indices, logits if len(self.members) == 1 else logits[:, member.order], valid))
        return mean_predictions(results, sigmoid=self.card.multilabel) if len(results) > 1 else results[0]

    def _function(
        self, member: Member, preprocess: str, on_event: EventHandler
    ) -> tuple[Preprocessing, Callable[[Tensor], Tensor]]:
        """A model's preprocessing, and the function from images to its logits, divided by its temperature if they are
        averaged."""
        text = preprocess if len(self.members) == 1 or member.card.preprocess is None else ""
        preprocessing = resolve_preprocessing(member.card, text, on_event)
        if isinstance(member.model, PixelLogits):
            check_normalization(preprocessing, member.card)
        model, temperature = member.model, member.card.temperature if self.averages else 1.0
        if self.tta is not None:
            pipeline = view_pipeline(preprocessing.pipeline, self.tta)
            views = ViewPreprocess(pipeline, preprocessing.mean, preprocessing.std)
            return views, averaging(model, self.tta, temperature=temperature, sigmoid=member.card.multilabel)
        return preprocessing, model if temperature == 1.0 else lambda images: model(images).float() / temperature


def _only_progress(on_event: EventHandler) -> EventHandler:
    """Without the notes, for images that are computed a second time."""
    return lambda event: on_event(event) if isinstance(event, Progress) else None


def open_ensemble(
    source: Sources,
    ensemble: Sequence[str | Path] = (),
    *,
    classes: str | Path = "",
    tta: TestTimeAugmentation | None = None,
    precision: Precision = "float32",
    device: str = "",
    packed: bool = False,
    on_event: EventHandler | None = None,
) -> Ensemble:
    """Load the models to average; raises UserError if one has no head, or they are of different classes.

    A source may be the folder of a `vitral train` with several folds or seeds. With `packed`, weights are packed on a
    CPU, which is faster and changes the last bits of a float32.
    """
    if tta is not None and tta not in VIEWS:
        raise UserError(f'tta="{tta}" is not one of {", ".join(VIEWS)}.')
    given = [*(source if isinstance(source, list) else [source]), *ensemble]
    sources = [each for one in given for each in _runs_in(one, on_event)]
    members: list[Member] = []
    names: tuple[str, ...] = ()
    for each in sources:
        model, card = load_predictor(each, device, on_event)
        check_head(each, card)
        resolved = compute_device(each, device)
        loaded_here = not isinstance(each, tuple) and not isinstance(model, PixelLogits)
        model = in_precision(model, precision, each, resolved, on_event)
        if packed and resolved.split(":")[0] == "cpu" and loaded_here and precision != "bfloat16":
            pack(model)
        own = card.class_names or named_card(card, classes).class_names
        names = names if members else own
        if members and card.multilabel != members[0].card.multilabel:
            raise UserError(
                f"{source_name(each)} has other outputs (softmax or sigmoid): average models of the same kind."
            )
        if members and card.architecture.classes != members[0].card.architecture.classes:
            classes_of = f"{card.architecture.classes} classes and the first {members[0].card.architecture.classes}"
            raise UserError(f"{source_name(each)} has {classes_of}: average models of the same classes.")
        order = class_order(names, own, source_name(each)) if own or names else np.arange(card.architecture.classes)
        members.append(Member(each, model, card, resolved, order))
    return Ensemble(tuple(members), named_card(members[0].card, classes), tta, precision)


def in_precision(
    model: AnyModel, precision: Precision, source: Source, device: str, on_event: EventHandler | None = None
) -> AnyModel:
    """The model as it is computed in a precision on a device: in int8 and FP8 a copy if it is the user's own;
    raises UserError if it cannot be."""
    if precision not in get_args(Precision):
        raise UserError(f'precision="{precision}" is not one of {", ".join(get_args(Precision))}.')
    if precision == "float32":
        return model
    if isinstance(model, PixelLogits):
        raise UserError(f"{source_name(source)} is exported in a fixed precision: omit precision.")
    if precision == "bfloat16":
        return model
    if precision == "int8" and device.split(":")[0] != "cpu":
        raise UserError(f"int8 is computed on a CPU, not on {device}: choose device cpu, or another precision.")
    model = copy.deepcopy(model) if isinstance(source, tuple) else model
    if precision == "fp8":
        use_fp8(model.to(device).eval(), on_event, freeze=True)
        return model
    if not (isinstance(model, ViT) and pack_int8(model.blocks)):
        raise UserError(
            f"{source_name(source)} cannot be computed in int8: its blocks have no linear layers that are large enough "
            "to gain, or this PyTorch has no oneDNN. Omit precision."
        )
    with displayed(on_event) as handler:
        handler(
            Note(
                "the blocks' linear layers are computed in int8, which is approximate: `vitral evaluate` with and "
                "without --precision int8 measures the effect on labelled images. A file of `vitral export "
                "--format onnx-int8` is faster, and checked"
            )
        )
    return model


def load_predictor(
    source: Source, device: str, on_event: EventHandler | None = None
) -> tuple[Model | PixelLogits, Card]:
    """Load a source, which may be an exported file, and its card."""
    if not is_exported(source):
        return load_source(source, on_event)
    exported = open_exported(str(source), device=device or "cpu")
    return PixelLogits(exported), exported.card


def check_normalization(preprocessing: Preprocess, card: Card) -> None:
    """Refuse another normalisation than that inside an exported file."""
    assert card.preprocess is not None
    if (preprocessing.mean, preprocessing.std) != (card.preprocess.mean, card.preprocess.std):
        raise UserError("an exported file normalises pixels by itself: give --preprocess its own mean and std.")


def _runs_in(source: Source, on_event: EventHandler | None) -> list[Source]:
    """The runs of a folder that holds several folds or seeds; otherwise the source itself."""
    folder = None if isinstance(source, tuple) else Path(source).expanduser()
    if folder is None or not folder.is_dir() or (folder / "model.safetensors").exists():
        return [source]
    candidates = (sorted(folder.glob(pattern), key=lambda run: (len(run.name), run.name)) for pattern in _RUNS)
    runs = next(filter(None, candidates), [])  # fold-2 before fold-10
    for run in runs:
        if not (run / "model.safetensors").is_file():
            raise UserError(f"{run} is not finished: resume it, or name single runs of {folder}.")
    if runs and on_event is not None:
        on_event(Note(f"averaging {', '.join(run.name for run in runs)} of {folder}"))
    return list(runs) or [source]


def named_card(card: Card, classes: str | Path) -> Card:
    """The card with the class names of a file, if one is given."""
    if not classes:
        return card
    return replace(card, class_names=tuple(read_table(Path(classes), card.architecture.classes)[-1][1]))


def compute_device(source: Source, device: str) -> str:
    """The device to compute on: where a loaded model already is, unless `device` names another."""
    if is_exported(source):
        return "cpu"  # where its inputs and outputs are, whatever it computes on
    if isinstance(source, tuple) and not device:
        return str(next(source[0].parameters()).device)
    return resolve_device(device)


def reading_workers(resolved: str) -> int:
    return default_workers(resolved.split(":")[0])


def check_head(source: Source, card: Card) -> None:
    if not card.architecture.classes:
        raise UserError(
            f"{source_name(source)} has no classification head: fine-tune it first, or evaluate its features with "
            "`vitral fewshot`."
        )


def resolve_preprocessing(card: Card, text: str, on_event: EventHandler | None = None) -> Preprocess:
    """The preprocessing that the user gives, else the card's, else what every verb assumes, which is reported."""
    if text:
        return Preprocess(*parse_preprocess(text, card.architecture.channels))
    if card.preprocess is not None:
        return card.preprocess
    assumed = Preprocess.assumed(card.architecture.image, card.architecture.channels)
    with displayed(on_event) as handler:
        handler(
            Note(
                "the weights do not state their preprocessing: mean and std 0.5 are assumed "
                f'(else --preprocess "{assumed.pipeline}|normalise(MEAN, STD)" or another)'
            )
        )
    return assumed
