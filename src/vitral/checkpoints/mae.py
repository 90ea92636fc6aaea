"""Masked autoencoders with their decoder, as transformers' `ViTMAEForPreTraining` and Meta's own code store them.

The encoder is read and written by the formats `hf-mae` and `dino`, whose names Meta's files share; here is the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitral.architecture import ViTConfig
from vitral.atomic import atomic_write
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import WeightFile, open_weights, read_tensors
from vitral.checkpoints.formats import format_named
from vitral.checkpoints.formats.hugging_face import LAYOUT, in_file
from vitral.checkpoints.formats.layout import Layout, block_entries, timm_layout
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Hints, linear, norm, read_entries, write_entries
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import assemble, fit_to_format, read, weights_of
from vitral.checkpoints.wrappers import ignored_sentences
from vitral.checkpoints.write import write_json, write_safetensors
from vitral.errors import UserError
from vitral.models.mae import MaeConfig, MaskedAutoencoder
from vitral.models.vit import ViT

MaeFormat = Literal["hf-mae", "mae"]

_PART = re.compile(r"decoder[._]|mask_token$")
_LAYER, _BLOCK = "encoder.layer.", re.compile(r"decoder\.decoder_(?:layers|encoder\.layer)\.(.*)")
# The keys of config.json.
_CONFIG = {
    **{"decoder_hidden_size": "width", "decoder_num_hidden_layers": "depth", "decoder_num_attention_heads": "heads"},
    **{"decoder_intermediate_size": "mlp", "mask_ratio": "ratio", "norm_pix_loss": "norm_pixels"},
}


@dataclass(frozen=True)
class _Names:
    """What stands in front of a decoder's names, the names of its blocks, and the format of the encoder."""

    prefix: str
    blocks: Layout
    encoder: str


_NAMES: dict[MaeFormat, _Names] = {
    "hf-mae": _Names("decoder.", replace(LAYOUT, block="decoder.decoder_layers.{}"), "hf-mae"),
    "mae": _Names("", replace(timm_layout(), block="decoder_blocks.{}"), "dino"),
}


def read_mae(
    source: str | Path,
    *,
    heads: int | None = None,
    decoder_heads: int | None = None,
    norm_pixels: bool | None = None,
) -> tuple[MaskedAutoencoder, Card]:
    """Read a masked autoencoder with its decoder, for further pre-training or to see what it reconstructs.

    Args:
        source: a file or folder of transformers or Meta, or a name on the hub.
        heads: number of attention heads of the encoder, if the file does not state it.
        decoder_heads: the same of the decoder.
        norm_pixels: whether it predicts pixels normalised by the mean and std of their patch, if the file does not
            state it.

    Returns:
        The model in evaluation mode, and the card of its encoder.

    Raises:
        UserError: the file cannot be read, or has no decoder.
    """
    path = located(source)
    checkpoint, file = read(path, None, Hints(heads=heads)), open_weights(path)
    encoder, parts = assemble(checkpoint.weights), _parts(file)
    if parts is None or not isinstance(encoder, ViT):
        raise UserError(f"{path} has no decoder of a masked autoencoder: load its encoder with vitral.load.")
    try:
        config = _config(parts, {"heads": decoder_heads, "norm_pixels": norm_pixels})
        model = MaskedAutoencoder(encoder, config)
        _load(model, file, parts)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    changes = [change for change in checkpoint.card.changes if not change.startswith(("ignored: ", "decoder not"))]
    changes += ignored_sentences([key for key in checkpoint.unmapped if key not in parts.keys])
    return model.eval(), replace(checkpoint.card, changes=(*changes, *parts.header.assumed))


def read_decoder(source: str | Path, model: MaskedAutoencoder) -> bool:
    """Read the decoder of a file into a model of its sizes (UserError for others); False if the file has none."""
    path = located(source)
    file = open_weights(path)
    if (parts := _parts(file)) is None:
        return False
    try:
        config = _config(parts, {}, usual=replace(MaeConfig(), heads=model.config.heads))
        for field in ("width", "depth", "heads", "mlp"):
            ours, stored = getattr(model.config, field), getattr(config, field)
            if ours != stored:
                raise UserError(f"its decoder has {field}={stored}, not {ours}: set the sizes of the decoder.")
        _load(model, file, parts)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return True


def write_mae(
    model: MaskedAutoencoder, path: str | Path, card: Card | None = None, format: MaeFormat = "hf-mae"
) -> None:
    """Write a masked autoencoder with its decoder.

    Args:
        model: the model.
        path: a folder for hf-mae, a safetensors file for mae.
        card: of the encoder, for its preprocessing.
        format: hf-mae for `ViTMAEForPreTraining.from_pretrained`, mae for the names of Meta's code.

    Raises:
        UserError: the format cannot hold the encoder.
    """
    path, names = Path(path), _NAMES[format]
    table = format_named(names.encoder)
    weights = fit_to_format(weights_of(model.encoder), table)
    c = weights.architecture
    assert isinstance(c, ViTConfig)
    state = {key: tensor.detach().cpu() for key, tensor in model.decoder.state_dict().items()}
    arrays = write_entries(table.entries(c), weights.state)
    arrays = {f"vit.{key}" if format == "hf-mae" else key: array for key, array in arrays.items()}
    arrays |= write_entries(_entries(names, c, model.config), state)
    if table.config is None:
        write_safetensors(path, arrays)
        return
    card = replace(card or Card(c), architecture=c)
    decoder = {key: getattr(model.config, field) for key, field in _CONFIG.items()}
    with atomic_write(path, folder=True) as folder:
        write_safetensors(folder / "model.safetensors", arrays)
        config = {**table.config(card, c), **decoder, "architectures": ["ViTMAEForPreTraining"]}
        write_json(folder / "config.json", config)
        if (preprocessor := table.preprocessor(card)) is not None:
            write_json(folder / "preprocessor_config.json", preprocessor)


@dataclass(frozen=True)
class _Parts:
    """The decoder in a file."""

    names: _Names
    keys: dict[str, str]  # in the file -> in the table
    header: CheckpointHeader


def unsupported_reason(model: MaskedAutoencoder, format: MaeFormat = "hf-mae") -> str | None:
    """Why a format cannot hold a masked autoencoder."""
    return format_named(_NAMES[format].encoder).unsupported_reason(model.encoder.config)


def _parts(file: WeightFile) -> _Parts | None:
    """The tensors of a decoder, below any prefix."""
    first = "decoder_embed.weight"
    root = next((key.removesuffix(first) for key in file.headers if re.search(rf"(^|\.){first}$", key)), None)
    if root is None:
        return None
    names = _NAMES["hf-mae" if root.endswith("decoder.") else "mae"]
    start = root.removesuffix(names.prefix)
    inside = {key: key.removeprefix(start) for key in file.headers if key.startswith(start)}
    keys = {key: _name(name) for key, name in inside.items() if _PART.match(name)}
    shapes = {name: file.headers[key].shape for key, name in keys.items()}
    return _Parts(names, keys, CheckpointHeader(shapes, file.config))


def _name(name: str) -> str:
    """A key of the table; transformers 5 saves the blocks under another name, and holds their parts under others."""
    match = _BLOCK.match(name)
    return f"decoder.decoder_layers.{in_file(f'{_LAYER}{match[1]}').removeprefix(_LAYER)}" if match else name


def _load(model: MaskedAutoencoder, file: WeightFile, parts: _Parts) -> None:
    tensors = read_tensors(file)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.decoder.state_dict().items()}
    entries = _entries(parts.names, model.encoder.config, model.config)
    state, unused = read_entries(entries, {name: tensors[key] for key, name in parts.keys.items()}, shapes)
    if unused:
        raise UserError(f"{len(unused)} tensors of its decoder are not those of MAE, such as {unused[0]}.")
    model.decoder.load_state_dict(state)


def _config(parts: _Parts, passed: Mapping[str, Any], usual: MaeConfig | None = None) -> MaeConfig:
    """The decoder by its tensors, config.json, and what was passed; without `usual`, what is assumed is recorded."""
    names, header = parts.names, parts.header
    written = header.config or {}
    stated: dict[str, Any] = {field: written[key] for key, field in _CONFIG.items() if key in written}
    if written.get("model_type") == "vit_mae":  # transformers leaves out its defaults
        stated = {"heads": 16, "ratio": 0.75, "norm_pixels": False, **stated}
    width = header.shape(f"{names.prefix}decoder_embed.weight", 2)[0]
    hidden = names.blocks.in_block(0, f"{names.blocks.hidden}.weight")
    shown = {"width": width, "mlp": header.shape(hidden, 2)[0]}
    shown["depth"] = header.count(names.blocks.block.replace(".", r"\.").replace("{}", r"(\d+)") + r"\.")
    for field, value in shown.items():
        if stated.get(field, value) != value:
            raise UserError(f"config.json states a {field} of {stated[field]} for the decoder, its tensors {value}.")
    known: dict[str, Any] = {
        **stated,
        **shown,
        **{field: value for field, value in passed.items() if value is not None},
    }
    if usual is None:
        usual = MaeConfig()
        if "heads" not in known and (width, shown["depth"]) != (usual.width, usual.depth):
            raise UserError("the file does not state the number of heads of its decoder: pass decoder_heads=.")
        assumed = [f"{field}={getattr(usual, field)}" for field in ("heads", "norm_pixels") if field not in known]
        if assumed:
            parts.header.assume(f"assumed: {', '.join(assumed)} of the decoder, as MAE's paper has; pass others if not")
    return replace(usual, **known)


def _entries(names: _Names, c: ViTConfig, config: MaeConfig) -> list[Entry]:
    prefix, rows = names.prefix, c.prefix + c.grid(c.image)[0] * c.grid(c.image)[1]
    blocks = config.blocks(c)
    entries = linear(f"{prefix}decoder_embed", "embed", c.width, config.width)
    entries.append(Entry(f"{prefix}mask_token", "mask_token", (1, 1, config.width)))
    entries.append(Entry(f"{prefix}decoder_pos_embed", "positions", (1, rows, config.width)))
    for i in range(config.depth):
        entries += block_entries(names.blocks, i, f"blocks.{i}", blocks)
    entries += norm(f"{prefix}decoder_norm", "norm", config.width)
    return entries + linear(f"{prefix}decoder_pred", "predict", config.width, c.patch**2 * c.channels)
