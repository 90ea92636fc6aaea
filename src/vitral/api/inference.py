"""What verbs compute with: one model or several, one view of each image or several, and large lists of images in parts.

Parts are contiguous pieces that processes of an engine compute, each in a file beside the output. They begin where a
batch of a single process begins, so that every batch has the same images and the merged output is the same to the last
bit.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.api.checkpoints import Source, in_precision, load_source, source_name
from vitral.api.engines import ENGINES, Work, sbatch_options
from vitral.atomic import atomic_write, write_text
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.loader import default_workers
from vitral.data.preprocess import parse_preprocess
from vitral.data.sources import Split
from vitral.display import displayed
from vitral.errors import PartsWritten, UserError
from vitral.evaluation.mapping import class_order, read_table
from vitral.evaluation.predict import (
    VIEWS,
    Precision,
    Predictions,
    TestTimeAugmentation,
    ViewPreprocess,
    averaging,
    mean_predictions,
    predict_split,
    view_pipeline,
)
from vitral.events import EventHandler, Note
from vitral.export.exported import PixelLogits, is_exported, open_exported
from vitral.kernels.packed import pack
from vitral.models.build import Model, resolve_device

Sources = Source | list[Any]  # in Python also several; a list of one type is no list of a union
_RUNS = ("fold-*", "seed-*")  # runs of one `vitral train`
Arrays = tuple[np.ndarray, ...]
_OPTIONS = ("parts", "part", "engine", "slurm", "parallel", "on_event")


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
        """The precision where it is not float32, and what is averaged, in a sentence each."""
        precision = (f"Computed in {self.precision}.",) if self.precision != "float32" else ()
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
        results = []
        for number, member in enumerate(self.members, 1):
            text = preprocess if len(self.members) == 1 or member.card.preprocess is None else ""
            count = f" ({number} of {len(self.members)})" if len(self.members) > 1 else ""
            how = prepared(member.card, text, on_event)
            if isinstance(member.model, PixelLogits):
                check_normalization(how, member.card)
            results.append(self._predict(member, split, how, batch, f"{task}{count}", on_event))
        return mean_predictions(results, sigmoid=self.card.multilabel) if len(results) > 1 else results[0]

    def _predict(
        self, member: Member, split: Split, how: Preprocess, batch: int, task: str, on_event: EventHandler
    ) -> Predictions:
        """The logits of one model; divided by its temperature where they are averaged."""
        temperature = member.card.temperature if self.averages else 1.0
        options = {
            "batch": batch,
            "device": member.device,
            "precision": self.precision,
            "normalized": not isinstance(member.model, PixelLogits),
            "workers": reading_workers(member.device),
            "task": task,
            "on_event": on_event,
        }
        if self.tta is None:
            indices, logits, valid = predict_split(member.model, split, how, **options)
            logits = logits if temperature == 1.0 else logits / np.float32(temperature)
        else:
            views = ViewPreprocess(view_pipeline(how.pipeline, self.tta), how.mean, how.std)
            sigmoid = member.card.multilabel
            function = averaging(member.model, self.tta, temperature=temperature, sigmoid=sigmoid)
            indices, logits, valid = predict_split(member.model, split, views, function=function, **options)
        return Predictions(indices, logits if len(self.members) == 1 else logits[:, member.order], valid)


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
    """Load the models to average; raises UserError where one has no head, or they are of different classes.

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
                f"{source_name(each)} has outputs of another kind (softmax or sigmoid): average alike ones."
            )
        if members and card.architecture.classes != members[0].card.architecture.classes:
            classes_of = f"{card.architecture.classes} classes and the first {members[0].card.architecture.classes}"
            raise UserError(f"{source_name(each)} has {classes_of}: average models of the same classes.")
        order = class_order(names, own, source_name(each)) if own or names else np.arange(card.architecture.classes)
        members.append(Member(each, model, card, resolved, order))
    return Ensemble(tuple(members), named_card(members[0].card, classes), tta, precision)


def load_predictor(
    source: Source, device: str, on_event: EventHandler | None = None
) -> tuple[Model | PixelLogits, Card]:
    """Load a source, which may be an exported file, and its card."""
    if not is_exported(source):
        return load_source(source, on_event)
    exported = open_exported(str(source), device=device or "cpu")
    return PixelLogits(exported), exported.card


def check_normalization(how: Preprocess, card: Card) -> None:
    """Refuse another normalisation than that inside an exported file."""
    assert card.preprocess is not None
    if (how.mean, how.std) != (card.preprocess.mean, card.preprocess.std):
        raise UserError("an exported file normalises pixels by itself: give --preprocess its own mean and std.")


def _runs_in(source: Source, on_event: EventHandler | None) -> list[Source]:
    """The runs of a folder that holds several folds or seeds; otherwise the source itself."""
    folder = None if isinstance(source, tuple) else Path(source).expanduser()
    if folder is None or not folder.is_dir() or (folder / "model.safetensors").exists():
        return [source]
    found = (sorted(folder.glob(pattern), key=lambda run: (len(run.name), run.name)) for pattern in _RUNS)
    runs = next(filter(None, found), [])  # fold-2 before fold-10
    for run in runs:
        if not (run / "model.safetensors").is_file():
            raise UserError(f"{run} is not finished: resume it, or name single runs of {folder}.")
    if runs and on_event is not None:
        on_event(Note(f"averaging {', '.join(run.name for run in runs)} of {folder}"))
    return list(runs) or [source]


def named_card(card: Card, classes: str | Path) -> Card:
    """The card with the class names of a file, where one is given."""
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


def prepared(card: Card, text: str, on_event: EventHandler | None = None) -> Preprocess:
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


@dataclass(kw_only=True)
class Parts(Work):
    """How a verb's images are divided; one part where the user does not ask for more."""

    verb: list[str]  # its words on the command line, without those about parts
    count: int
    only: tuple[int, ...]  # the parts to compute, from 0; all of them where there are none
    engine: str
    weights: list[list[Any]]  # name, size and time of each file of weights
    unit = "parts"
    _compute: Callable[[int], Arrays] | None = None
    _failures: dict[str, str] = field(default_factory=dict)

    def compute(
        self, split: Split, block: int, compute: Callable[[Split], Arrays], on_event: EventHandler
    ) -> list[tuple[int, Arrays]]:
        """Compute arrays of the images, in parts: of each the index of its first image, and its arrays.

        Blocks of so many images, those of a batch, stay together. Raises UserError where a part has failed or the
        folder has the parts of another command, and PartsWritten where the user asked for single parts.
        """
        if self.count == 1 and not self.only:
            return [(0, compute(split))]
        blocks = -(-len(split) // block)
        edges = [min(number * blocks // self.count * block, len(split)) for number in range(self.count + 1)]
        self._compute = lambda number: compute(split.select(np.arange(edges[number], edges[number + 1])))
        self._check_folder(split)
        numbers = [number for number in range(self.count) if edges[number] < edges[number + 1]]  # few images: fewer
        chosen = [number for number in numbers if not self.only or number in self.only]
        items = [f"{number + 1}/{self.count}" for number in chosen]
        if missing := [item for item in items if not self.is_done(item)]:
            ENGINES[self.engine](self, missing, on_event)
        missing = [item for item in items if not self.is_done(item)]
        if self.only:  # what is missing, another process has claimed
            raise PartsWritten(f"{len(items) - len(missing)} of {self.count} parts are written: {self.folder}")
        if missing:
            reason = self._failures.get(missing[0], "see above")
            raise UserError(f"{len(missing)} parts are missing, {missing[0]} first ({reason}): give the command again.")
        return [(edges[number], self._read(item)) for number, item in zip(chosen, items, strict=True)]

    def finish(self) -> None:
        """Remove the parts, once the output is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_done(self, item: str) -> bool:
        return self._file(item).is_file()

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        assert self._compute is not None
        arrays = self._compute(int(item.partition("/")[0]) - 1)
        with atomic_write(self._file(item)) as temporary, temporary.open("wb") as stream:
            np.savez(stream, *arrays)

    def outcome(self, item: str) -> str:
        return f"part {item}{f' failed: {self._failures[item]}' if item in self._failures else ''}"

    def fail(self, item: str, reason: str, log: str) -> None:
        self._failures[item] = f"{reason}; log: {log}"

    def words(self, items: Sequence[str]) -> list[str]:
        return [*self.verb, "--part", *items]

    def _file(self, item: str) -> Path:
        return self.folder / f"part-{item.replace('/', '-of-')}.npz"

    def _read(self, item: str) -> Arrays:
        with np.load(self._file(item)) as arrays:
            return tuple(arrays[name] for name in arrays.files)

    def _check_folder(self, split: Split) -> None:
        """Note what the parts in the folder are of, or refuse those of another command, other weights or images."""
        about = {"command": self.verb, "parts": self.count, "weights": self.weights, "images": split.fingerprint()}
        path = self.folder / "parts.json"
        if not path.is_file():
            write_text(path, json.dumps(about, indent=2))
        elif json.loads(path.read_text("utf-8")) != about:
            raise UserError(f"{self.folder} has parts of another command, of other weights or images: remove it first.")


def parts_of(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> Parts:
    """The parts that the arguments of a verb, a function called as its command, ask for."""
    part, count, output = arguments["part"], arguments["parts"], str(arguments["output"])
    slurm = sbatch_options(arguments["slurm"])
    only, counts = [], {count} if count != 1 or not part else set[int]()
    for text in part:
        number, separator, of = str(text).partition("/")
        if not (separator and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise UserError(f'--part takes NUMBER/COUNT, such as 3/16, not "{text}".')
        only.append(int(number) - 1)
        counts.add(int(of))
    if len(counts) > 1 or min(counts) < 1:
        raise UserError("--parts takes a number of at least 1, and every --part the same one after its slash.")
    count = counts.pop()
    words, weights = [], []
    if count > 1 or only:
        if not output:
            raise UserError("parts are written beside the output: name it with --output.")
        words = _words(verb, arguments)
        models = [arguments.get(name, ()) for name in ("source", "ensemble", "weights")]
        weights = [mark for model in models for word in _several(model) for mark in _marks(Path(word).expanduser())]
    options = {name: arguments[name] for name in ("engine", "parallel", "device")}
    parts = {"verb": words, "count": count, "only": tuple(only), "weights": weights, "slurm": slurm}
    return Parts(folder=Path(f"{output}.parts"), **parts, **options)


def joined(results: Sequence[tuple[int, Arrays]]) -> Arrays:
    """The arrays of all parts together; the first of each are indices into its images."""
    shifted = [(indices + start, *others) for start, (indices, *others) in results]
    return shifted[0] if len(shifted) == 1 else tuple(map(np.concatenate, zip(*shifted, strict=True)))


def _words(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The command that calls a verb with these arguments; what has its default is left out."""
    positional, options = [], []
    for name, parameter in inspect.signature(verb).parameters.items():
        value = arguments[name]
        if name in _OPTIONS or (type(value) is type(parameter.default) and value == parameter.default):
            continue
        values = _several(value)
        if not all(isinstance(each, str | Path | int | float) for each in values):
            raise UserError(f"parts are computed by commands, which cannot take {name} from memory: name files.")
        if name == "source" and len(values) > 1:
            raise UserError("in parts, one model is the source and the others are in ensemble: name them so.")
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional += map(str, values)
        else:
            options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return [verb.__name__, *positional, *options]


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _marks(path: Path) -> list[list[Any]]:
    """Name, size and time of each file of weights at a path."""
    files = sorted([*path.glob("*.safetensors"), *path.glob("*/*.safetensors")]) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
