"""A recipe: every choice of a training run as plain, strict data. No torch here.

A `Recipe` that exists is valid: types, ranges and contradictions are checked when it is made. It is read from TOML
(`from_toml`), printed with a comment per field (`to_toml`), and changed by `key=value` words (`with_overrides`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from vitral.architecture import ModelConfig, ResNetConfig, Size, as_size
from vitral.errors import UserError
from vitral.names import parse
from vitral.recipe_parts import (
    Balance,
    DataRecipe,
    Learning,
    Loss,
    MaskedRecipe,
    OptimRecipe,
    Parallel,
    Precision,
    RegularizationRecipe,
    ScheduleRecipe,
    ShapeRecipe,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    model: Annotated[str, "name, with @size for another image size; with init, the weights decide"] = "ViT-Ti/16"
    init: Annotated[str, "weights to start from (file, run folder or name); empty: from scratch"] = ""
    image: Annotated[int, "image size in pixels; 0: the model's own"] = 0
    epochs: Annotated[float, "length of the run; 0 where steps are given"] = 100.0
    steps: Annotated[int, "length of the run; 0 where epochs are given"] = 0
    batch: Annotated[int, "images a step, over all devices"] = 256
    micro_batch: Annotated[int, "images a device holds at once; 0: as many as fit"] = 0
    seed: Annotated[int, "of weights, order, augmentation and dropout"] = 0
    trainable: Annotated[str, "what learns: full, head, last:K, bias or lora:R"] = "full"
    objective: Annotated[Learning, "classes, or masked: patches that were hidden (labels are not used)"] = "classes"
    loss: Annotated[Loss, "softmax (one label an image) or sigmoid (several)"] = "softmax"
    balance: Annotated[Balance, "against uneven classes: none, weights, sampler or logit-adjust"] = "none"
    ema_decay: Annotated[
        float, "exponential moving average (EMA) of the weights: decay per step, such as 0.9999; 0: off"
    ] = 0.0
    precision: Annotated[Precision, "auto (bfloat16 where a GPU has it, never on a CPU), float32 or bfloat16"] = "auto"
    compile: Annotated[bool, "compile the model; slow to start, faster after"] = False
    cuda_graph: Annotated[
        bool, "on one GPU: record the whole step once and replay it, which small models gain from"
    ] = True
    grad_checkpointing: Annotated[
        bool, "recompute activations in the backward pass: less memory, a third more time"
    ] = False
    parallel: Annotated[Parallel, "on several devices: ddp (copies) or fsdp (shards)"] = "ddp"
    workers: Annotated[int, "processes that load images, per device; -1: chosen"] = -1
    evaluate_every: Annotated[int, "steps; 0: each epoch, but at most ten times a run"] = 0
    save_every: Annotated[int, "steps between checkpoints; 0: with each evaluation"] = 0
    keep: Annotated[int, "states to keep while it runs; with two, a damaged one costs little"] = 2
    patience: Annotated[int, "evaluations without a better result before the run stops; 0: never"] = 0
    shape: ShapeRecipe = field(default_factory=ShapeRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    regularization: RegularizationRecipe = field(default_factory=RegularizationRecipe)
    masked: MaskedRecipe = field(default_factory=MaskedRecipe)

    def __post_init__(self) -> None:
        for key, value in values(self).items():
            _check_type(key, value)
        _check_ranges(values(self))
        _check_sense(self)


class Key(NamedTuple):
    """One field of a recipe, whatever part it is in."""

    hint: Any
    doc: str
    default: Any


@cache
def keys() -> dict[str, Key]:
    """Every key as it is written on a command line ("optim.lr"), in the order of the TOML file."""
    top, parts = _keys_of(Recipe), {name: kind for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind)}
    inside = [(f"{part}.{name}", key) for part, kind in parts.items() for name, key in _keys_of(kind).items()]
    return {name: key for name, key in top.items() if name not in parts} | dict(inside)


def _keys_of(kind: Any) -> dict[str, Key]:
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: Key(*_typed(hints[item.name]), item.default) for item in fields(kind)}


def _typed(hint: Any) -> tuple[Any, str]:
    return get_args(hint) if get_origin(hint) is Annotated else (hint, "")


def values(recipe: Recipe) -> dict[str, Any]:
    """The value of every key, flat."""
    nested = asdict(recipe)
    return {key: nested[key] if "." not in key else nested[key.split(".")[0]][key.split(".")[1]] for key in keys()}


def from_dict(description: Mapping[str, Any]) -> Recipe:
    """A recipe from its keys, nested as `asdict` has them, or flat: what is missing takes its default, what is unknown
    is refused."""
    flat: dict[str, Any] = {}
    for name, value in description.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    for key in flat:
        _check_known(key)
    return _changed(Recipe(), {key: _as_written(keys()[key].hint, value) for key, value in flat.items()})


def from_toml(text: str) -> Recipe:
    """A recipe from the text of a TOML file."""
    try:
        return from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the recipe is not valid TOML ({error}): `vitral show` prints one to start from.") from error


def to_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML, one commented line per key."""
    lines, section = [], ""
    parts = get_type_hints(Recipe)
    for key, value in values(recipe).items():
        part, _, name = key.rpartition(".")
        if part != section:
            section = part
            lines += ["", f"[{part}]  # {parts[part].__doc__}"]
        line = f"{name} = {_toml(_as_written(keys()[key].hint, value))}"
        lines.append(f"{line:<40}  # {keys()[key].doc}")
    return "\n".join(lines) + "\n"


def with_overrides(recipe: Recipe, words: Iterable[str]) -> Recipe:
    """The recipe with `key=value` words applied, such as "optim.lr=0.01" or "data.mean=0.5,0.5,0.5"."""
    changes = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals:
            raise UserError(f'"{word}" is not key=value: write for example optim.lr=0.01.')
        _check_known(key)
        changes[key] = _read(keys()[key].hint, text.strip())
    return _changed(recipe, changes)


def with_dev(recipe: Recipe, dev: float) -> Recipe:
    """The recipe with another share of train to choose on."""
    return replace(recipe, data=replace(recipe.data, dev=dev))


def recipe_hash(recipe: Recipe) -> str:
    """Twelve hexadecimal digits that two recipes share only if every value is equal."""
    written = {key: _as_written(keys()[key].hint, value) for key, value in values(recipe).items()}
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:12]


def architecture_of(recipe: Recipe, classes: int) -> ModelConfig:
    """The model to build from scratch; with `init`, the weights decide instead."""
    named = parse(recipe.model, classes=classes)
    changes: dict[str, Any] = {name: value for name, value in asdict(recipe.shape).items() if value}
    changes.pop("head_bias", None)  # a start value, not a shape
    start = changes.pop("start")
    head = changes.pop("head", "linear")
    if recipe.image:
        changes["image"] = as_size(recipe.image)
    if isinstance(named, ResNetConfig):
        if set(changes) - {"image"} or start != "paper":
            raise UserError(f"{recipe.model} has no shape to change: leave out the shape keys, or name a ViT.")
        return replace(named, **changes)
    if "width" in changes:
        changes.setdefault("mlp", 4 * changes["width"])
    if head == "tanh" and recipe.objective == "classes":
        changes["representation"] = changes.get("width", named.width)
    if changes.get("pool", "token") != "token":
        changes["class_token"] = False
    regularization = recipe.regularization
    rates = {name: getattr(regularization, name) for name in ("dropout", "attention_dropout", "stochastic_depth")}
    return replace(named, **changes, **rates)


def pipelines(recipe: Recipe, image: Size) -> tuple[str, str]:
    """The train and test pipelines with the model's image size filled in."""
    height, width = image
    size = str(height) if height == width else f"{height}, {width}"
    filled = {"{size}": size, "{larger}": str(round(min(image) * 8 / 7)), "{wider}": str(round(min(image) * 7 / 6))}
    train, test = recipe.data.train_transform, recipe.data.eval_transform
    for word, pixels in filled.items():
        train, test = train.replace(word, pixels), test.replace(word, pixels)
    return train, test


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    changes = dict(changes)
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(key) and other not in changes:  # a run has one length: naming it in one unit clears the other
            changes[other] = 0
    top: dict[str, Any] = {key: value for key, value in changes.items() if "." not in key}
    for part in {key.split(".")[0] for key in changes if "." in key}:
        inside = {key.split(".")[1]: value for key, value in changes.items() if key.startswith(f"{part}.")}
        top[part] = replace(getattr(recipe, part), **inside)
    return replace(recipe, **top)


def _read(hint: Any, text: str) -> Any:
    """The value that a word on a command line stands for; a text that does not fit stays text and is refused later."""
    if get_origin(hint) is tuple:
        return tuple(_read(get_args(hint)[0], item.strip()) for item in text.strip("[]()").split(",") if item.strip())
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        with suppress(ValueError):
            return hint(text)  # a whole number is never a float on its way: those have 53 bits
        with suppress(ValueError):
            number = float(text)
            return int(number) if number.is_integer() else number  # 1e3 is a whole number, too
    return text


def _as_written(hint: Any, value: Any) -> Any:
    """One spelling per value: 1 is 1.0 where a float is meant, and a list is a tuple."""
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_as_written(get_args(hint)[0], item) for item in value)
    return float(value) if hint is float and type(value) is int else value


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{value} is not valid UTF-8, which recipes are written in: rename it.") from error
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _check_known(key: str) -> None:
    if key in keys():
        return
    leaf = key.rpartition(".")[2]
    near = [known for known in keys() if known.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(key, keys(), n=2, cutoff=0.6)
    near = near or [known for known in keys() if known.startswith(f"{key.split('.')[0]}.")]
    hint = f"did you mean {' or '.join(near)}?" if near else "`vitral show` prints every key."
    raise UserError(f'unknown key "{key}" in the recipe: {hint}')


def _check_type(key: str, value: Any) -> None:
    hint, _, default = keys()[key]
    if not _fits(hint, value):
        example = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
        raise UserError(f"{key} must be {_wanted(hint)}, for example {key}={example or '...'}, not {value!r}.")


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], item) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return "numbers with commas between"
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]


_POSITIVE = {
    "masked.share",
    "batch",
    "optim.lr",
    "optim.head_lr",
    "schedule.timescale",
    "data.held_out",
    "optim.layer_decay",
    "keep",
}
_ANY_SIGN = {"workers", "shape.head_bias"}
_SHARES = {
    "ema_decay",
    "data.dev",
    "masked.token",
    "masked.random",
    "data.held_out",
    "optim.beta1",
    "optim.beta2",
    "optim.momentum",
}  # and all of `regularization`


def _check_ranges(flat: Mapping[str, Any]) -> None:
    for key, value in flat.items():
        if type(value) not in (int, float) or key in _ANY_SIGN:
            continue
        if value < 0 or (value == 0 and key in _POSITIVE):
            raise UserError(f"{key} must be {'above' if key in _POSITIVE else 'at least'} 0, not {value}.")
        if value >= 1 and (key in _SHARES or key.startswith("regular.")):
            raise UserError(f"{key} must be below 1, not {value}.")
    if flat["optim.layer_decay"] > 1:
        raise UserError(f"optim.layer_decay must be at most 1, not {flat['optim.layer_decay']}.")


def _check_sense(recipe: Recipe) -> None:
    if bool(recipe.epochs) == bool(recipe.steps):
        raise UserError("a run has one length: set either epochs or steps above 0, and the other to 0.")
    if recipe.micro_batch > recipe.batch:
        raise UserError(
            f"micro_batch={recipe.micro_batch} is more than batch={recipe.batch}: lower it, or set it to 0."
        )
    if not re.fullmatch(r"full|head|bias|(last|lora):[1-9]\d*", recipe.trainable):
        raise UserError(
            f'trainable="{recipe.trainable}" is not one of full, head, bias, last:K (such as last:2), lora:R (lora:8).'
        )
    if len(recipe.schedule.drops) != len(recipe.schedule.factors):
        raise UserError("schedule.drops and schedule.factors belong together: give as many of one as of the other.")
    if recipe.schedule.kind == "multistep" and not recipe.schedule.drops:
        raise UserError(
            'schedule.kind="multistep" needs schedule.drops and schedule.factors, such as 0.3,0.6 and 0.1,0.01.'
        )
    if len(recipe.data.mean) != len(recipe.data.std) or not all(part > 0 for part in recipe.data.std):
        raise UserError("data.mean and data.std need one number per channel each, and std numbers above 0.")
    if recipe.loss == "sigmoid" and (recipe.balance == "logit-adjust" or recipe.regularization.label_smoothing):
        raise UserError(
            'loss="sigmoid" goes neither with balance="logit-adjust" nor with regularization.label_smoothing.'
        )
    if recipe.shape.head not in ("", "linear", "tanh"):
        raise UserError(f'shape.head="{recipe.shape.head}" is not one of linear, tanh.')
    if recipe.objective == "masked":
        _check_masked(recipe)
    if recipe.init and recipe.shape != ShapeRecipe():
        raise UserError("the weights in init have a shape already: leave out the shape keys, or train from scratch.")


def _check_masked(recipe: Recipe) -> None:
    if recipe.masked.share > 1 or recipe.masked.token + recipe.masked.random > 1:
        raise UserError("masked.share must be at most 1, and masked.token and masked.random together at most 1.")
    data = recipe.data
    if recipe.trainable != "full" or recipe.balance != "none" or data.mixup or data.cutmix or data.augment:
        raise UserError(
            'objective="masked" needs trainable="full", balance="none" and neither mixup, cutmix nor data.augment.'
        )
