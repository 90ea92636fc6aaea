"""Find the model in a weight file: under the prefixes that wrappers and training scripts add, alone or among others.

The prefixes are not a list: any path is one under which some format recognises its keys. What is outside of it is
either another model, of which the user chooses one, or returned as the keys that the model does not use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitral.checkpoints.files import WeightFile
from vitral.checkpoints.formats.native import CARD
from vitral.checkpoints.formats.table import CheckpointHeader, Format, Hints
from vitral.errors import UserError

# torch.compile, FSDP and activation checkpointing wrap a whole model or any part of it.
_MODULE_WRAPPER = re.compile(r"(?:^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LAYER = re.compile(r"(?:^|[./_])\d+[./]")  # the index of a layer, which the keys of every model have
_FEWEST = 10  # tensors of a model; a model of one layer has more
ROOT = "."  # the `part` of keys without a prefix


@dataclass(frozen=True)
class FoundModel:
    """One model in a file, recognised by its keys."""

    format: Format[Any]
    header: CheckpointHeader
    prefix: str  # in front of all its keys, such as "module.backbone."
    names: Mapping[str, str]  # key in the file -> key in the format's table
    outside: Mapping[str, str]  # all other keys of the file -> without the wrappers' parts
    notes: tuple[str, ...]  # what was removed from the keys, for `Card.changes`
    others: tuple[str, ...] = ()  # the prefixes of other models in the file

    @property
    def part(self) -> str:
        """The prefix as an error prints it."""
        return self.prefix.rstrip("./") or ROOT


def strip_wrappers(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to the key without the parts that torch.compile, FSDP and activation checkpointing add."""
    plain = {key: _MODULE_WRAPPER.sub("", key) for key in keys}
    _check_unique(plain)
    return plain


def find_model(file: WeightFile, tables: Iterable[Format[Any]], hints: Hints) -> FoundModel | None:
    """The model of a file, in the first of the formats that recognises one; None if none does.

    `hints.part` chooses one of several models: UserError without it.
    """
    plain = strip_wrappers(file.headers)
    recognised = partial(_recognised, file, plain, list(tables), hints)
    prefixes = [""] if CARD in file.metadata else _prefixes(plain.values())
    models: list[list[FoundModel]] = []
    for prefix in prefixes:
        keys = [key for key, name in plain.items() if name.startswith(prefix)]
        found = recognised(keys, prefix)
        if found is None:
            continue
        around = next((group for group in models if prefix.startswith(group[0].prefix)), [])
        # Whether the outer keys are still a model of the same format without those under the prefix.
        outer = [key for model in around[:1] for key in model.names if not plain[key].startswith(prefix)]
        rest = recognised(outer, around[0].prefix) if around else None
        if not around or (rest and rest.format is around[0].format):
            models.append([found])
        else:  # the same model, as the format allows a prefix of its own
            around.append(found)
    if not models:
        return None
    # The widest view of a model in which its format knows every key; else the widest, for the error it leads to.
    views = [next((view for view in group if not group[1:] or _knows_every_key(view)), group[0]) for group in models]
    chosen = _chosen(file, views, hints.part)
    others = [group[0].prefix for group in models if group[0].prefix != chosen.prefix and chosen not in group]
    nested = tuple(other for other in others if other.startswith(chosen.prefix))
    keys = [key for key, name in plain.items() if name.startswith(chosen.prefix) and not name.startswith(nested)]
    model = recognised(keys, chosen.prefix)
    assert model is not None
    _check_unique(model.names)
    return replace(model, others=tuple(others))


def ignored_sentences(keys: Collection[str], prefix: str = "") -> list[str]:
    """What is not used of a file, as sentences for `Card.changes`: one for each branch outside of `prefix`."""
    branches: dict[str, list[str]] = {}
    for key in keys:
        branches.setdefault(branch_of(key, prefix), []).append(key)
    return [
        f'ignored: {len(inside)} tensors under "{branch}"' if inside[1:] else f'ignored: tensor "{inside[0]}"'
        for branch, inside in branches.items()
    ]


def ignored_keys(model: FoundModel, used: Collection[str]) -> list[str]:
    """The keys of a model, as in the table, that its format ignores."""
    pattern = re.compile(model.format.ignored)
    return [name for name in model.names.values() if name not in used and pattern.match(name)]


def branch_of(key: str, prefix: str) -> str:
    """The shortest start of a key, up to a separator, that the prefix does not share."""
    for match in re.finditer(r"[./]", key):
        if not prefix.startswith(key[: match.end()]):
            return key[: match.end()]
    return key


def _prefixes(keys: Iterable[str]) -> list[str]:
    """Paths of which the keys have layers, the shortest first; always the empty one."""
    ends = [(key, match.end()) for key in keys for match in re.finditer(r"[./]", key)]
    sizes = Counter(key[:end] for key, end in ends)
    layered = dict.fromkeys(key[:end] for key, end in ends if _LAYER.search(key[end:]))
    return ["", *sorted((prefix for prefix in layered if sizes[prefix] >= _FEWEST), key=len)]


def _recognised(
    file: WeightFile, plain: Mapping[str, str], tables: list[Format[Any]], hints: Hints, keys: list[str], prefix: str
) -> FoundModel | None:
    """The model that these keys, less the prefix, are in the first format that recognises them."""
    for table in tables:
        renamed = table.renames([plain[key].removeprefix(prefix) for key in keys])
        names = {key: renamed[plain[key].removeprefix(prefix)] for key in keys}
        shapes = {name: file.headers[key].shape for key, name in names.items()}
        header = CheckpointHeader(shapes, file.config, file.preprocessor, file.metadata, hints)
        if table.recognises(header):
            outside = {key: name for key, name in plain.items() if key not in names}
            return FoundModel(table, header, prefix, names, outside, _notes(keys, prefix))
    return None


def _notes(keys: Collection[str], prefix: str) -> tuple[str, ...]:
    wrappers = {match[1]: None for key in keys for match in _MODULE_WRAPPER.finditer(key)}
    notes = [f'keys: "{wrapper}." removed' for wrapper in wrappers]
    return (*notes, *([f'keys: prefix "{prefix}" removed'] if prefix else []))


def _knows_every_key(model: FoundModel) -> bool:
    """Whether a format uses or lists every key, or refuses the model, for which a narrower view is no remedy."""
    table, header = model.format, model.header
    try:
        architecture = table.architecture(header)
        entries = table.table_of(header, architecture)
        shapes = {name: torch.empty(shape, device="meta") for name, shape in header.shapes.items()}
        names = table.unpack(shapes, architecture)
    except UserError:
        return True
    used, ignored = {entry.theirs for entry in entries}, re.compile(table.ignored)
    return all(name in used or ignored.match(name) for name in names)


def _chosen(file: WeightFile, models: list[FoundModel], part: str | None) -> FoundModel:
    names = " and ".join(f'"{model.part}"' for model in models)
    if part is None and len(models) > 1:
        options = " or ".join(f'part="{_shortest_part(model, models)}"' for model in models)
        raise UserError(f"{file.path} contains {len(models)} models, {names}: pass {options}.")
    matching = models if part is None else _matching(models, part)
    if len(matching) != 1:
        count = "no model" if not matching else "more than one model"
        advice = f"it holds {names}" if models[1:] else "it holds one, so leave out part="
        raise UserError(f'{file.path} has {count} for part="{part}": {advice}.')
    return matching[0]


def _matching(models: list[FoundModel], part: str) -> list[FoundModel]:
    """The models whose prefix is the part, starts with it or has it as a component."""
    part = part.rstrip("./") or ROOT
    exact = [model for model in models if model.part == part]
    inside = [model for model in models if part in re.split("[./]", model.part) or model.part.startswith(f"{part}.")]
    return exact or inside


def _shortest_part(model: FoundModel, models: list[FoundModel]) -> str:
    components = [word for word in re.split("[./]", model.part) if word]
    return next((word for word in components if _matching(models, word) == [model]), model.part)


def _check_unique(names: Mapping[str, str]) -> None:
    if len(set(names.values())) < len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        first, second = [key for key, name in names.items() if name == twice][:2]
        raise UserError(f"the file has {first} and {second}, which are both {twice}: remove one of them.")
