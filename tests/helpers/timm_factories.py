"""The arguments of timm's model factories, captured from the installed timm.

`python tests/helpers/timm_factories.py src/vitral/checkpoints` writes vitral's two tables anew.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitral.checkpoints.formats.timm_arguments import WITHOUT_EFFECT

PATTERNS = ("vit*", "deit*", "beit*", "eva*", "flexivit*", "naflexvit*", "resnetv2*bit*", "test_vit*")
CLASSES = {
    "VisionTransformer": "vision_transformer",
    "Eva": "eva",
    "Beit": "beit",
    "VisionTransformerDistilled": "deit",
    "VisionTransformerRelPos": "vision_transformer_relpos",
    "NaFlexVit": "naflexvit",
    "ResNetV2": "resnetv2",
}


def names(patterns: Iterable[str] = PATTERNS) -> list[str]:
    import timm

    return sorted({name for pattern in patterns for name in timm.list_models(pattern)})


class _Made(Exception):
    """Raised in place of building a model."""

    def __init__(self, kind: str, arguments: dict[str, Any]) -> None:
        super().__init__(kind)
        self.kind, self.arguments = kind, arguments


def captured(name: str) -> tuple[str, dict[str, Any]]:
    """The class that a factory instantiates, and the arguments that differ from its defaults."""
    import timm

    try:
        with _intercepted(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            timm.create_model(name)
    except _Made as made:
        defaults = class_defaults(made.kind)
        plain = {key: _plain(value) for key, value in made.arguments.items() if key not in WITHOUT_EFFECT}
        own = {key: value for key, value in plain.items() if key == "img_size" or value != defaults.get(key)}
        return made.kind, own
    raise ValueError(f"{name} is none of {', '.join(CLASSES)}")


def class_defaults(kind: str) -> dict[str, Any]:
    """Of a class and those that it extends."""
    values: dict[str, Any] = {}
    for own in reversed(_class(kind).__mro__[:-2]):  # without nn.Module and object
        parameters = inspect.signature(own.__init__).parameters.values()
        values |= {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return {key: _plain(value) for key, value in values.items() if key not in WITHOUT_EFFECT}


def table(models: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Grouped: models of one class that differ in their sizes only are one entry."""
    sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "layers", "width_factor")
    classes: dict[str, Any] = {}
    for name, (kind, arguments) in models.items():
        groups = classes.setdefault(kind, {"defaults": class_defaults(kind), "groups": []})["groups"]
        shared = {key: value for key, value in sorted(arguments.items()) if key not in sizes}
        group = next((group for group in groups if group["arguments"] == shared), None)
        if group is None:
            group = {"arguments": shared, "models": {}}
            groups.append(group)
        own = {key: arguments[key] for key in sizes if key in arguments}
        if isinstance(side := own.get("img_size"), list) and side[0] == side[1]:
            own["img_size"] = side[0]
        group["models"][name] = own
    return {"timm": importlib.import_module("timm").__version__, "classes": classes}


PREPROCESS_KEYS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


def preprocess_of(name: str) -> dict[str, Any]:
    """How timm evaluates a release, "architecture.tag"; without a tag it is timm's default release."""
    from timm.models import get_pretrained_cfg

    stated = get_pretrained_cfg(name, allow_unregistered=False)
    return {key: _plain(getattr(stated, key)) for key in PREPROCESS_KEYS}


def preprocess_table() -> list[dict[str, Any]]:
    """Grouped: each preprocessing with the releases that use it."""
    import timm

    known = set(names())
    releases = [name for name in timm.list_models(include_tags=True) if name.partition(".")[0] in known]
    groups: dict[str, list[str]] = {}
    for name in sorted({*known, *releases}):
        groups.setdefault(json.dumps(preprocess_of(name)), []).append(name)
    return [{**json.loads(stated), "models": models} for stated, models in groups.items()]


def as_text(value: dict[str, Any]) -> str:
    """One line per model."""
    lines = [f'{{"timm": {json.dumps(value["timm"])}, "classes": {{']
    for last, (kind, entry) in _with_last(value["classes"].items()):
        lines.append(f'{json.dumps(kind)}: {{"defaults": {json.dumps(entry["defaults"])}, "groups": [')
        for last_group, group in _with_last(entry["groups"]):
            lines.append(f' {{"arguments": {json.dumps(group["arguments"])}, "models": {{')
            models = [f"  {json.dumps(name)}: {json.dumps(sizes)}" for name, sizes in group["models"].items()]
            lines.append(",\n".join(models) + "}}" + ("" if last_group else ","))
        lines.append("]}" + ("" if last else ","))
    return "\n".join([*lines, "}}"]) + "\n"


def _with_last(items: Iterable[Any]) -> list[tuple[bool, Any]]:
    listed = list(items)
    return [(i == len(listed) - 1, item) for i, item in enumerate(listed)]


def _class(kind: str) -> type[nn.Module]:
    return getattr(importlib.import_module(f"timm.models.{CLASSES[kind]}"), kind)


@contextmanager
def _intercepted() -> Generator[None]:
    """Models are not built: their arguments are enough. A hybrid's backbone, which is made first, is."""
    originals = {kind: _class(kind).__init__ for kind in CLASSES}

    def intercepting(original: Any) -> Any:
        @functools.wraps(original)
        def init(self: nn.Module, *arguments: Any, **options: Any) -> None:
            if options.get("global_pool") != "":  # that of a backbone
                raise _Made(type(self).__name__, options)
            original(self, *arguments, **options)

        return init

    try:
        for kind, original in originals.items():
            setattr(_class(kind), "__init__", intercepting(original))  # noqa: B010
        yield
    finally:
        for kind, original in originals.items():
            setattr(_class(kind), "__init__", original)  # noqa: B010


def _plain(value: Any) -> Any:
    """Numbers, texts and lists as they are; a class by its name; `partial` as "Class(argument=value)"."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        options = ", ".join(f"{key}={_plain(option)}" for key, option in value.keywords.items())
        return f"{_plain(value.func)}({options})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    return getattr(value, "__name__", type(value).__name__)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    factories = as_text(table({name: captured(name) for name in names()}))
    (folder / "timm_factories.json").write_text(factories, encoding="utf-8")
    rows = ",\n".join(json.dumps(row) for row in preprocess_table())
    (folder / "timm_preprocess.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
