"""Reading, writing and using recipes: TOML, dicts, `key=value` overrides, and what a recipe builds. No torch here.

The keys, their types and the checks are in `recipe_schema.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from vitral.architecture import ModelConfig, ResNetConfig, RopeConfig, Size, as_size
from vitral.errors import UserError
from vitral.names import parse
from vitral.recipe_schema import Recipe, keys, values

Overrides = Sequence[str] | Mapping[str, Any]  # ["optim.lr=0.01"] or {"optim.lr": 0.01}
_FLIPS = {"flip", "flip()", "flip_lr", "hflip", "horizontal_flip"}  # steps of a transform
Sweep = Sequence[str] | Mapping[str, Sequence[Any]]  # ["optim.lr=0.003,0.01"] or {"optim.lr": [0.003, 0.01]}
# Names of timm, transformers and torchvision, without their section, for keys that mean the same.
_FOREIGN_KEYS = {
    **dict.fromkeys(("drop_path", "drop_path_rate"), "regularization.stochastic_depth"),
    "drop_rate": "regularization.dropout",
    **dict.fromkeys(("attn_drop_rate", "attention_probs_dropout_prob"), "regularization.attention_dropout"),
    **dict.fromkeys(("smoothing", "label_smoothing_factor"), "regularization.label_smoothing"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("opt", "optimizer"), "optim.name"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm"), "optim.clip"),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler", "lr_scheduler_type"), "schedule.kind"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "schedule.warmup"),
    **{"wd": "optim.weight_decay", "input_size": "image", "num_train_epochs": "epochs"},
}


def from_dict(settings: Mapping[str, Any]) -> Recipe:
    """Make a recipe from its keys, nested ({"optim": {"lr": 0.01}}) or flat ({"optim.lr": 0.01}); missing keys take
    their defaults. Raises UserError for an unknown key or an invalid value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    for key in flat:
        _check_key(key)
    return _replaced(Recipe(), {key: _canonical(keys()[key].hint, value) for key, value in flat.items()})


def from_toml(text: str) -> Recipe:
    """Make a recipe from the text of a TOML file; missing keys take their defaults."""
    try:
        return from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the recipe is not valid TOML ({error}): `vitral show` prints one to start from.") from error


def from_file(path: Path) -> Recipe:
    """Read a recipe from a TOML file; an error names the file."""
    try:
        return from_toml(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text in UTF-8: `vitral show` prints a recipe to start from.") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def to_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML, one line per key with its description as a comment."""
    lines, current = [], ""
    sections = get_type_hints(Recipe)
    for key, value in values(recipe).items():
        section, _, name = key.rpartition(".")
        if section != current:
            current = section
            lines += ["", f"[{section}]  # {sections[section].__doc__}"]
        line = f"{name} = {_toml_value(_canonical(keys()[key].hint, value))}"
        lines.append(f"{line:<40}  # {keys()[key].doc}")
    return "\n".join(lines) + "\n"


def with_overrides(recipe: Recipe, overrides: Iterable[str] | Mapping[str, Any]) -> Recipe:
    """A copy of the recipe with some keys replaced, by texts ("optim.lr=0.01") or a mapping ({"optim.lr": 0.01}).

    Setting `steps` clears `epochs` and vice versa, as a run has one length. Raises UserError as `from_dict` does.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_split_override, overrides)
    changes = {}
    for key, value in pairs:
        _check_key(key)
        hint = keys()[key].hint
        changes[key] = _parse(hint, value.strip()) if isinstance(value, str) else _canonical(hint, value)
    return _replaced(recipe, changes)


def _split_override(override: str) -> tuple[str, str]:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f'"{override}" is not key=value: write for example optim.lr=0.01.')
    return key.strip(), text


def with_dev(recipe: Recipe, dev: float) -> Recipe:
    """The recipe with another fraction of train held out for choices (`data.dev`)."""
    return replace(recipe, data=replace(recipe.data, dev=dev))


def steps_of_run(recipe: Recipe, epoch: float) -> int:
    """The length of a run in steps, if an epoch has this many."""
    return recipe.steps or max(round(recipe.epochs * epoch), 1)


def recipe_hash(recipe: Recipe) -> str:
    """Twelve hexadecimal digits that two recipes share only if every value is equal."""
    settings = {key: _canonical(keys()[key].hint, value) for key, value in values(recipe).items()}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def architecture_of(recipe: Recipe, classes: int) -> ModelConfig:
    """The architecture of a model trained from scratch; with `init`, the weights determine it instead."""
    named = parse(recipe.model, classes=classes)
    named = replace(named, channels=len(recipe.data.mean))
    changes: dict[str, Any] = {name: value for name, value in asdict(recipe.shape).items() if value}
    changes.pop("head_bias", None)  # an initial value, not a shape
    weight_init = changes.pop("weight_init")
    head = changes.pop("head", "linear")
    if changes.pop("rope", False):
        changes["rope"] = RopeConfig()
    if recipe.image:
        changes["image"] = as_size(recipe.image)
    if isinstance(named, ResNetConfig):
        if set(changes) - {"image"} or weight_init != "paper":
            raise UserError(f"{recipe.model} has no shape to change: omit the shape keys, or name a ViT.")
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
    """The train and eval transforms with the model's image size filled in."""
    height, width = image
    size = str(height) if height == width else f"{height}, {width}"
    pixels = {"{size}": size, "{larger}": str(round(min(image) * 8 / 7)), "{wider}": str(round(min(image) * 7 / 6))}
    train, test = recipe.data.train_transform, recipe.data.eval_transform
    for placeholder, text in pixels.items():
        train, test = train.replace(placeholder, text), test.replace(placeholder, text)
    return train, test


def flips(recipe: Recipe) -> bool:
    """Whether training images are mirrored, left to right, at random."""
    steps = f"{recipe.data.train_transform}|{recipe.data.augment}".split("|")
    return recipe.trainable != "head" and not _FLIPS.isdisjoint(step.strip() for step in steps)


def without_flip(recipe: Recipe) -> Recipe:
    """The recipe without that."""

    def kept(steps: str) -> str:
        return "|".join(step for step in steps.split("|") if step.strip() not in _FLIPS)

    data = recipe.data
    return replace(recipe, data=replace(data, train_transform=kept(data.train_transform), augment=kept(data.augment)))


def _replaced(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    changes = dict(changes)
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(key) and other not in changes:  # a run has one length: setting it in one unit clears the other
            changes[other] = 0
    top: dict[str, Any] = {key: value for key, value in changes.items() if "." not in key}
    for section in {key.split(".")[0] for key in changes if "." in key}:
        inside = {key.split(".")[1]: value for key, value in changes.items() if key.startswith(f"{section}.")}
        top[section] = replace(getattr(recipe, section), **inside)
    return replace(recipe, **top)


def _parse(hint: Any, text: str) -> Any:
    """The value of a text; one that does not fit the type stays a text, which the schema then refuses."""
    if get_origin(hint) is tuple:
        return tuple(_parse(get_args(hint)[0], item.strip()) for item in text.strip("[]()").split(",") if item.strip())
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        with suppress(ValueError):
            return hint(text)  # whole numbers are not read as floats, which have 53 bits
        with suppress(ValueError):
            number = float(text)
            return int(number) if number.is_integer() else number  # 1e3 is a whole number, too
    return text


def _canonical(hint: Any, value: Any) -> Any:
    """One representation per value: 1 becomes 1.0 for a float, and a list a tuple."""
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_canonical(get_args(hint)[0], item) for item in value)
    return float(value) if hint is float and type(value) is int else value


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{value} is not valid UTF-8, which recipes are written in: rename it.") from error
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _check_key(key: str) -> None:
    if key in keys():
        return
    leaf = key.rpartition(".")[2]
    near = [name for name in keys() if name.rpartition(".")[2] == leaf]
    near = near or [key for name, key in _FOREIGN_KEYS.items() if name == leaf]
    near = near or difflib.get_close_matches(key, keys(), n=2, cutoff=0.6)
    near = near or [name for name in keys() if name.startswith(f"{key.split('.')[0]}.")]
    hint = f"did you mean {' or '.join(near)}?" if near else "`vitral show` prints every key."
    raise UserError(f'unknown key "{key}" in the recipe: {hint}')


def override_list(overrides: Overrides | Sweep) -> tuple[str, ...]:
    """Overrides as "key=value" texts; a sequence of values of a mapping is joined by commas."""
    if isinstance(overrides, str):
        raise UserError(f'set and sweep take a list: write ["{overrides}"].')
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={_text(value)}" for key, value in overrides.items())
    return tuple(overrides)


def keys_of(overrides: Iterable[str]) -> dict[str, str]:
    """The values of "key=value" texts by key."""
    return {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in overrides)}


def check_given_once(parameters: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse a recipe key that is given both in `set` and as a separate parameter, which is None or "" if it is
    not given."""
    for key in keys_of(overrides):
        if parameters.get(key) not in (None, ""):
            raise UserError(f"{key} is given twice, as an option and as --set {key}=...: omit one of them.")


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
