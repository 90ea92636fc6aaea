"""Damaged, renamed and wrapped files of every format: refused, or the same outputs, or the difference is recorded.

What no reader can detect is left out:

- values: two tensors of the same shape swapped, a square matrix transposed;
- a complete file of another model: without all tensors of the head, or with one row of positions less, for the patches
  alone; where no config.json or card counts them, also without registers or with more, with fewer layers or
  more channels.

`VITRAL_FUZZ=5000 pytest tests/checkpoints/test_fuzz.py` tries that many random changes of each format.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import hints_for, pictures, random_weights, run, save_npz, written
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.architecture import Architecture, ResNetConfig, RopeConfig, StemConfig, ViTConfig
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import fit_to_format, read
from vitral.errors import UserError

EXAMPLES = int(os.environ.get("VITRAL_FUZZ", "8"))
LIMIT = 1e-5
Arrays = dict[str, Tensor]

# All sizes differ, so that no axis can stand for another: 16 = 2 heads x 8, MLP 24, 4 patches, 3 channels, 5 classes.
BASE = ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=5, image=(10, 10), classes=6)
DINOV3 = replace(BASE, gelu="erf", classes=0, registers=3, layer_scale=True, position="none", norm_eps=1e-5)
DINOV3 = replace(DINOV3, key_bias=False)
CLIP = replace(BASE, gelu="erf", pre_norm=True, patch_bias=False, norm_eps=1e-5)
BEIT = replace(BASE, gelu="erf", position="bias", layer_scale=True, key_bias=False, pool="mean")
BEIT = replace(BEIT, norm_place="features")
CANDIDATES: tuple[Architecture, ...] = (
    BASE,
    replace(BASE, gelu="erf"),
    replace(BASE, gelu="erf", classes=0, registers=3, layer_scale=True, mlp=32),
    replace(BASE, classes=0),
    replace(BASE, gelu="erf", classes=0),
    ResNetConfig(blocks=(1, 1, 1, 1), image=(32, 32), classes=5),
    replace(BASE, gelu="erf", registers=1, pool="token+register"),
    replace(BASE, gelu="erf", class_token=False, pool="mean", norm_eps=1e-12),
    replace(BASE, gelu="tanh", class_token=False, pool="mean"),
    replace(BASE, gelu="erf", stem=StemConfig(blocks=(), epsilons="timm"), image=(40, 40)),
    replace(DINOV3, rope=RopeConfig()),
    replace(DINOV3, rope=RopeConfig(periods="bfloat16")),
    replace(CLIP, head_bias=False),
    replace(CLIP, gelu="quick", head_bias=False),
    BEIT,
    replace(BEIT, pool="token", norm_place="tokens"),
    replace(BEIT, norm_eps=1e-12),
)
# The smallest of timm's BiT models is an R50, which is too large to be written a hundred times.
TOO_LARGE = {"timm-bit"}
OPTIONAL = re.compile(r"(^|\.)(register_tokens|reg_token|storage_tokens)$")
NAMES = ("queue", "head.weight", "fc.weight", "proj.0.weight", "dino_head.mlp.0.weight", "opt/m", "blocks.0.extra")
PREFIXES = ("module.", "model.", "backbone.", "encoder.", "visual.trunk.", "vit.", "0.", "teacher.backbone.")


@dataclass(frozen=True)
class Case:
    """A small model in a format, and what its file does not state."""

    format: str
    architecture: Architecture
    arrays: Arrays
    metadata: dict[str, str] | None
    output: Tensor
    hints: Hints
    changes: frozenset[str]  # recorded for the undamaged file


@cache
def case_of(format: str, folder: Path) -> Case:
    table = FORMATS[format]
    architecture = next(c for c in CANDIDATES if table.unsupported_reason(c) is None)
    weights = fit_to_format(random_weights(architecture), table)
    target = folder / ("model" if table.config else f"model.{table.container}")
    written(weights, target, format)
    file = target / "model.safetensors" if table.config else target
    hints = hints_for(architecture, format)
    found = read(target, hints=hints)
    images = pictures(1, 3, *architecture.image)
    output = run(weights, images)
    assert torch.allclose(run(found.weights, images), output, atol=LIMIT)
    if table.container == "npz":
        with np.load(file) as stored:
            arrays = {key: torch.from_numpy(stored[key]) for key in stored.files}
        return Case(format, architecture, arrays, None, output, hints, frozenset(found.weights.changes))
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    return Case(format, architecture, load_file(file), metadata, output, hints, frozenset(found.weights.changes))


def put(case: Case, arrays: Arrays, folder: Path) -> Path:
    table = FORMATS[case.format]
    if table.container == "npz":
        path = folder / "changed.npz"
        save_npz(path, {key: array.contiguous().numpy() for key, array in arrays.items()})
        return path
    target = folder / ("changed" if table.config else "changed.safetensors")
    if table.config and not target.exists():
        shutil.copytree(folder / "model", target)
    file = target / "model.safetensors" if table.config else target
    save_file({key: array.clone().contiguous() for key, array in arrays.items()}, file, case.metadata)
    return target


# --- changes: arrays, two numbers that choose -> changed arrays and the keys that were touched


def pick(items: list[str], number: int) -> str:
    return items[number % len(items)]


def near(key: str, number: int) -> str:
    """A name that resembles a key: where a reader that matches loosely would take it for the key."""
    parts = re.split(r"(?<=[./])", key)
    names = [
        f"x.{key}",
        f"module.{key}",
        f"vit.{key}",
        f"_orig_mod.{key}",
        f"{key}2",
        f"{key}.ema",
        "".join(parts[1:]) or f"y{key}",
        "".join([*parts[:-1], "z.", parts[-1]]),
        key.replace("0", "1", 1) if "0" in key else f"{key}_",
        key.upper(),
    ]
    return pick(names, number)


def unequal(array: Tensor) -> Tensor:
    """Other values, so that the wrong one of two tensors shows."""
    return array * 1.5 + 0.25


Change = Callable[[Arrays, int, int], tuple[Arrays, set[str]]]


def wrap(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    prefix = PREFIXES[one % len(PREFIXES)]
    return {f"{prefix}{key}": array for key, array in arrays.items()}, set()


def compile_part(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    """torch.compile of the module that holds a key."""
    module = pick(list(arrays), one).rpartition(".")[0]
    return {
        re.sub(rf"^{re.escape(module)}\.", f"{module}._orig_mod.", key) if module else f"_orig_mod.{key}": array
        for key, array in arrays.items()
    }, set()


def has_copy(arrays: Arrays, key: str) -> bool:
    """Whether the file of a compiled model has a changed copy, which would take the place of a key that is removed."""
    return any(name.endswith(f"_orig_mod.{key}") for name in arrays)


def drop(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    if has_copy(arrays, key):
        return arrays, set()
    return {name: array for name, array in arrays.items() if name != key}, {key}


def duplicate(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    name = near(key, two)
    return {name: unequal(arrays[key]), **arrays}, {key, name}


def rename(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    if has_copy(arrays, key):
        return arrays, set()
    name = near(key, two)
    return {name if old == key else old: array for old, array in arrays.items() if old != name}, {key, name}


def reshape(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    array = arrays[key]
    shapes = [(-1,), (1, *array.shape), (*array.shape, 1), (array.numel(), 1), (array.shape or (1,))[::-1]]
    return {**arrays, key: array.reshape(shapes[two % len(shapes)])}, {key}


def transpose(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    array = arrays[key]
    if array.ndim < 2:
        return arrays, set()
    axis = two % (array.ndim - 1)
    turned = array.transpose(axis, axis + 1)
    square = [n for n in turned.shape if n != 1] == [n for n in array.shape if n != 1]
    return (arrays, set()) if square else ({**arrays, key: turned.contiguous()}, {key})


def lengthen(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    array = arrays[key]
    if not array.ndim:
        return arrays, set()
    return {**arrays, key: torch.cat([array, unequal(array)], dim=two % array.ndim)}, {key}


def shorten(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    key = pick(list(arrays), one)
    array = arrays[key]
    axis = two % max(array.ndim, 1)
    if not array.ndim or array.shape[axis] < 2:
        return arrays, set()
    return {**arrays, key: array.narrow(axis, 0, array.shape[axis] - 1).contiguous()}, {key}


def add(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    name = NAMES[one % len(NAMES)]
    return {**arrays, name: torch.full((7, 16) if two % 2 else (16,), 0.3)}, {name}


def copy_all(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    prefix = PREFIXES[one % len(PREFIXES)]
    copies = {f"{prefix}{key}": unequal(array) for key, array in arrays.items()}
    return {**copies, **arrays}, set(copies) | set(arrays)


def drop_module(arrays: Arrays, one: int, two: int) -> tuple[Arrays, set[str]]:
    """All tensors of a layer, a block or any other path, but not of the model: a changed copy of it may be left."""
    key = pick(list(arrays), one)
    ends = [match.end() for match in re.finditer(r"[./]", key)] or [len(key)]
    module = key[: ends[two % len(ends)]]
    kept = {name: array for name, array in arrays.items() if not name.startswith(module)}
    return (kept, set(arrays) - set(kept)) if 2 * len(kept) > len(arrays) else (arrays, set())


CHANGES: tuple[Change, ...] = (
    *(wrap, compile_part, drop, duplicate, rename, reshape, transpose, lengthen, shorten, add, copy_all, drop_module),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=3
)


def is_recorded(changes: set[str], touched: set[str]) -> bool:
    """Whether a new entry of `card.changes`, other than that of a prefix, names a key that was touched."""
    sentences = [change for change in changes if change.startswith(("ignored: ", "assumed: "))]
    named = {word.rstrip("./") for change in sentences for word in re.findall(r'"([^"]+)"', change)}
    positions = any("positions" in change for change in sentences) and any("pos" in key for key in touched)
    modules = {key.rpartition(".")[0] or key for key in touched}  # without a wrapper that came later
    wrapped = any(name.endswith(f".{module}") for name in named for module in modules)
    return positions or wrapped or any(name in key for name in named for key in touched)


def is_another_model(case: Case, found: Architecture, touched: set[str], arrays: Arrays) -> bool:
    """A complete file of a model without the head or the class token's position, or that nothing counts.

    Without a config.json also one of a CLIP with a projection to another width, and of a DINOv3 whose heads are so
    small that their only RoPE period is 1.
    """
    original = case.architecture
    headless = original.classes > 0 and found.classes == 0
    rowless = getattr(original, "class_row", False) and not getattr(found, "class_row", False)
    if FORMATS[case.format].config is not None or case.format == "vitral":
        return headless or rowless
    if case.format == "open_clip" and touched == {"visual.proj"} and found.classes != original.classes:
        return True
    periods = [array for key, array in arrays.items() if _is_periods(key)]
    if case.format == "dinov3" and all(map(_is_periods, touched)) and [len(array) for array in periods] == [1]:
        return True
    fewer_layers = getattr(found, "depth", 0) < getattr(original, "depth", 0)
    registers = getattr(found, "registers", 0) > getattr(original, "registers", 0) or lost_registers(touched, arrays)
    return headless or rowless or fewer_layers or found.channels != original.channels or registers


def _is_periods(key: str) -> bool:
    return key.endswith("rope_embed.periods")


def lost_registers(touched: set[str], arrays: Arrays) -> bool:
    return any(map(OPTIONAL.search, touched)) and not any(map(OPTIONAL.search, arrays))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in TOO_LARGE])
def test_a_changed_file_is_refused_or_computes_the_same_or_says_why(format: str, folder: Path) -> None:
    place = folder / format
    place.mkdir()
    case = case_of(format, place)
    heavy = isinstance(case.architecture, ResNetConfig)  # 30 MB a file

    @settings(
        max_examples=max(EXAMPLES // 5, 1) if heavy else EXAMPLES,
        **{"deadline": None, "database": None, "derandomize": "VITRAL_FUZZ" not in os.environ},
        suppress_health_check=list(HealthCheck),
    )
    @given(steps=STEPS)
    def check(steps: list[tuple[Change, int, int]]) -> None:
        arrays, touched = dict(case.arrays), set()
        for change, one, two in steps:
            arrays, keys = change(arrays, one, two)
            touched |= keys
        if not arrays:
            return
        try:
            found = read(put(case, arrays, place), hints=case.hints)
        except UserError:
            return
        output = run(found.weights, pictures(1, found.weights.architecture.channels, *case.architecture.image))
        if output.shape == case.output.shape and torch.allclose(output, case.output, atol=LIMIT):
            return
        new = set(found.weights.changes) - case.changes
        assert is_recorded(new, touched) or is_another_model(case, found.weights.architecture, touched, arrays), (
            [(change.__name__, one, two) for change, one, two in steps],
            sorted(touched)[:4],
            found.weights.changes,
        )

    check()
