"""Read any checkpoint into our state dict, and write models in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.atomic import atomic_write
from vitral.checkpoints.adapt import (
    Adaptation,
    Weights,
    adapt,
    to_classes,
    to_epsilons,
    to_table,
    with_class_row,
    without_class_row,
)
from vitral.checkpoints.card import Card
from vitral.checkpoints.classifiers import INNER_HEAD
from vitral.checkpoints.description import Description, describe
from vitral.checkpoints.files import read_tensors, sha256
from vitral.checkpoints.formats import FORMATS, format_named
from vitral.checkpoints.formats.native import CARD, NATIVE, entries
from vitral.checkpoints.formats.table import Format, Hints, read_entries, write_entries
from vitral.checkpoints.hub import is_hub_name, located
from vitral.checkpoints.wrappers import strip_wrappers
from vitral.checkpoints.write import write_json, write_npz, write_safetensors
from vitral.errors import UserError
from vitral.models.adapters import LoraLinear
from vitral.models.build import Model, build
from vitral.models.vit import ViT
from vitral.names import size_of


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: our weights, the card, and the keys of the file that a classifier does not use."""

    format: str
    weights: Weights
    card: Card
    unmapped: tuple[str, ...]


def read(path: Path, format: str | None = None, hints: Hints | None = None) -> Checkpoint:
    """Read a checkpoint; UserError if it is damaged, or not exactly the architecture that its header indicates."""
    described = describe(path, format, hints)
    table, card = described.format, described.card
    try:
        tensors = read_tensors(described.file)
        used = {name: tensors[key] for key, name in described.names.items()}
        shapes = {entry.ours: entry.shape for entry in entries(card.architecture)}
        used = table.unpack(used, card.architecture)
        state, unused = read_entries(described.entries, used, shapes)
        if unused:
            names = ", ".join(unused[:3]) + (", ..." if unused[3:] else "")
            if all(map(INNER_HEAD.match, unused)):
                raise UserError(
                    f"its head is not one of this format ({names}): pass classes=0 to load the model without."
                )
            raise UserError(
                f"{len(unused)} of its tensors are not part of this format ({names}): it is of another architecture."
            )
    except UserError as error:
        raise UserError(f"{described.file.path}, read as {table.name}: {error}") from error
    if isinstance(card.architecture, ResNetConfig) and card.architecture.classes:  # a classifier may have none
        state.setdefault("head.output.bias", torch.zeros(shapes["head.output.bias"]))
    if not card.sha256:
        card = replace(card, sha256=sha256(described.file.path))
    changes = (*card.changes, *_dtype_notes(described))
    return Checkpoint(table.name, Weights(card.architecture, state, changes), card, described.ignored)


def read_adapted(
    source: str | Path,
    changes: Adaptation,
    format: str | None = None,
    hints: Hints | None = None,
    class_names: tuple[str, ...] = (),
) -> Checkpoint:
    """Read a file, a folder or a hub name, adapt the weights, and update the card accordingly.

    `class_names` are those of `changes.classes`: a head for classes of other names is replaced.
    """
    hints = replace(hints or Hints(), replaces_head=changes.classes is not None)
    checkpoint = read(located(source), format, hints)
    card, before = checkpoint.card, checkpoint.weights.architecture
    if is_hub_name(str(source)) and checkpoint.format != "vitral":
        card = replace(card, source=str(source))
    weights = adapt(checkpoint.weights, changes)
    renamed = class_names not in ((), card.class_names)
    if renamed and len(class_names) == before.classes:  # `adapt` keeps a head of as many classes
        weights = to_classes(weights, before.classes)
    after = weights.architecture
    preprocess = card.preprocess and card.preprocess.adapted(before.image, after.image, after.channels)
    if renamed or after.classes != before.classes:  # the temperature was fitted to the old head
        card = replace(card, class_names=class_names, temperature=1.0)
    card = replace(card, architecture=after, preprocess=preprocess, changes=weights.changes)
    return replace(checkpoint, weights=weights, card=card)


def weights_of(model: nn.Module, changes: tuple[str, ...] = ()) -> Weights:
    """The weights of a model on the CPU, without changing the model.

    It may be inside torch.compile, DistributedDataParallel or DataParallel; LoRA adapters are merged. `changes` are
    earlier ones of the weights. UserError if it is not a model of vitral's, or does not match its `config`.
    """
    plain = _unwrapped(model)
    state = {key: tensor.detach() for key, tensor in plain.state_dict().items()}
    adapted = {name: module for name, module in plain.named_modules() if isinstance(module, LoraLinear)}
    for name, module in adapted.items():
        state[f"{name}.weight"] = module.merged().weight.detach()
        del state[f"{name}.down"], state[f"{name}.up"]
    names = strip_wrappers(state)  # parts of the model may be compiled
    state = {names[key]: tensor.cpu() for key, tensor in state.items()}
    _check_config(plain, state)
    return Weights(plain.config, state, (*changes, *(["LoRA adapters merged into the weights"] if adapted else [])))


def _unwrapped(model: nn.Module) -> Model:
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, Model):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if not isinstance(inner, Model):
        raise UserError(
            f"vitral.save writes vitral's models, not a {type(model).__name__}: write it with torch.save instead."
        )
    return inner


def _check_config(model: Model, state: Mapping[str, Tensor]) -> None:
    expected = {entry.ours: entry.shape for entry in entries(model.config)}
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    wrong = sorted(key for key in expected.keys() | shapes.keys() if expected.get(key) != shapes.get(key))
    if wrong:
        raise UserError(
            f"the model does not match its config: {wrong[0]} has the shape {shapes.get(wrong[0])} where "
            f"{expected.get(wrong[0])} is expected; set model.config to what the model computes."
        )
    if isinstance(model, ViT) and isinstance(model.embed, nn.Conv2d) and not model.embeds_patches:
        raise UserError(
            f"the model's embedding has the stride {model.embed.stride}, padding {model.embed.padding} and dilation "
            f"{model.embed.dilation}, which its config cannot state: write it with torch.save instead."
        )


def assemble(weights: Weights) -> Model:
    """Build a model with these weights, in evaluation mode."""
    with torch.device("meta"):
        model = build(weights.architecture)
    model.load_state_dict(weights.state, strict=True, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def write(weights: Weights, card: Card, path: Path, format: str) -> Card:
    """Write weights in a format, atomically, and return the card as written.

    The path is a file or, for formats with a config.json, a folder. There, a path that ends in .safetensors writes the
    weights alone if the format can be read without config.json.
    """
    table = format_named(format)
    weights = fit_to_format(weights, table)
    card = replace(card, architecture=weights.architecture, changes=weights.changes)
    arrays = {table.file_key(key, card.architecture): array for key, array in _arrays(weights, table).items()}
    if table.config is None:
        _write_file(path, table, arrays, card)
    elif path.suffix == ".safetensors":
        reason = table.alone(card.architecture)
        if reason:
            raise UserError(
                f"{path.name} would be read differently without config.json, as {reason}: name a folder instead."
            )
        _write_file(path, table, arrays, card)
    else:
        with atomic_write(path, folder=True) as folder:
            _write_file(folder / "model.safetensors", table, arrays, card)
            write_json(folder / "config.json", table.config(card, card.architecture))
            preprocessor = table.preprocessor(card)
            if preprocessor is not None:
                write_json(folder / "preprocessor_config.json", preprocessor)
    return card


def fit_to_format(weights: Weights, table: Format[Any]) -> Weights:
    """The same function in a form that the format can represent; UserError if there is none."""
    reason = table.unsupported_reason(weights.architecture)
    if reason:
        able = [name for name, other in FORMATS.items() if not other.unsupported_reason(weights.architecture)]
        raise UserError(f"format {table.name} cannot represent this model: {reason}; use {', '.join(able)}.")
    weights = to_table(weights, table.positions)
    weights = to_epsilons(weights, table.epsilons) if table.epsilons else weights
    if isinstance(weights.architecture, ViTConfig):
        row = table.class_row(weights.architecture)
        weights = {"kept": with_class_row, "folded": without_class_row, "either": lambda same: same}[row](weights)
    return replace(weights, changes=(*weights.changes, *table.pack_changes(weights.architecture)))


def unstated(card: Card, back: Card, table: Format[Any]) -> list[str]:
    """What a file of this format does not state of its card, so that its reader must be told or behaves differently.

    `back` is the card that it is read with.
    """
    missing = _unstated_shape(card.architecture, back.architecture, table)
    if card.class_names and not back.class_names:
        missing.append("the names of its classes")
    if card.preprocess is not None and back.preprocess is None:
        missing.append("its preprocessing")
    elif card.preprocess is not None and back.preprocess is not None and card.preprocess != back.preprocess:
        ours, theirs = (preprocess.in_words() for preprocess in (card.preprocess, back.preprocess))
        missing.append(f"its preprocessing is {ours}, its readers use {theirs}")
    if card.temperature != back.temperature:
        missing.append(f"its temperature, {card.temperature:.3g}, which its logits are to be divided by")
    return missing


def _unstated_shape(written: Architecture, back: Architecture, table: Format[Any]) -> list[str]:
    if not isinstance(written, ViTConfig) or not isinstance(back, ViTConfig):
        return []
    rows, columns = written.grid(written.image)
    alone = table.config is None and table.name != "vitral"
    missing = [f"its grid is {rows}x{columns}"] if alone and rows != columns else []
    standard = size_of(written.depth, written.width)
    if alone and table.container == "safetensors" and (standard is None or standard.heads != written.heads):
        missing.append(f"it has {written.heads} heads")
    if back.resize != written.resize:
        missing.append(
            f"positions are resized to other image sizes by rule {written.resize}, its readers use {back.resize}"
        )
    return missing


def _arrays(weights: Weights, table: Format[Any]) -> Mapping[str, Tensor]:
    arrays = table.pack(write_entries(table.entries(weights.architecture), weights.state), weights.architecture)
    for key, shape in table.zeros(weights.architecture).items():
        arrays[key] = torch.zeros(shape)
    return arrays


def _write_file(path: Path, table: Format[Any], arrays: Mapping[str, Tensor], card: Card) -> None:
    if table.container == "npz":
        write_npz(path, arrays)
    else:
        write_safetensors(path, arrays, {CARD: card.to_json()} if table is NATIVE else None)


def _dtype_notes(described: Description) -> list[str]:
    narrow = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    changed = {**dict.fromkeys(narrow, "exact"), "float64": "rounded"}
    dtypes = {described.file.headers[key].dtype for key in described.names}
    return [f"weights {dtype} -> float32 ({how})" for dtype, how in changed.items() if dtype in dtypes]
