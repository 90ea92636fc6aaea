"""big_vision npz: positions are added before the class token is prepended, so it has no position row.

Three versions of the table's name are read: `Transformer/posembed_input/pos_embedding` (shared with Google's Linen
files), `Transformer/pos_embedding` and `pos_embedding`; the last is written. Fixed sin-cos positions are not stored.
Of two towers (LiT, SigLIP), the image tower is read.
"""

from __future__ import annotations

from collections.abc import Iterable

from vitral.architecture import Architecture, Pool, ViTConfig
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats import google
from vitral.checkpoints.formats.google import LINEN
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, grid_of_rows, is_square, position_entries

_POSITION = "pos_embedding"
_MAP = "MAPHead_0"
_IMAGES, _TEXTS = "img/", "txt/"  # two towers; their temperature and bias count as part of the text tower


def _renames(keys: Iterable[str]) -> dict[str, str]:
    renamed = {key: key.removeprefix("params/") for key in keys}
    if any(new.startswith(_IMAGES) for new in renamed.values()):
        texts = {key: _TEXTS + new.removeprefix(_TEXTS) for key, new in renamed.items()}
        renamed = {
            key: new.removeprefix(_IMAGES) if new.startswith(_IMAGES) else texts[key] for key, new in renamed.items()
        }
    older = {"Transformer/pos_embedding", google.POSITION}
    return {key: _POSITION if new in older else new for key, new in renamed.items()}


def _recognises(header: CheckpointHeader) -> bool:
    patches = header.has("embedding/kernel")  # a text tower has none
    return patches and header.has(f"Transformer/encoderblock_0/{LINEN.attention}/query/kernel")


def _architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = google.read_encoder(header, LINEN)
    token = header.has("cls")
    pool: Pool = "token" if token else "map" if header.has(f"{_MAP}/probe") else "mean"
    if not header.has(_POSITION):
        header.assume("assumed: fixed sin-cos positions, as the file has no table of positions")
        # The file does not show the grid, and nothing depends on it: 224 pixels without a hint.
        rows, columns = header.hints.grid or (224 // sizes["patch"], 224 // sizes["patch"])
        image = (rows * sizes["patch"], columns * sizes["patch"])
        return ViTConfig(**sizes, image=image, class_token=token, pool=pool, position="sincos2d", class_position=False)
    rows = header.shape(_POSITION, 3)[1]
    hint = header.hints.grid
    class_row = token and (rows - 1 == hint[0] * hint[1] if hint else not is_square(rows))
    grid = grid_of_rows(header, rows - int(class_row))
    image = (grid[0] * sizes["patch"], grid[1] * sizes["patch"])
    return ViTConfig(**sizes, image=image, class_token=token, pool=pool, class_position=class_row)


def _assumptions(header: CheckpointHeader, architecture: Architecture) -> tuple[str, ...]:
    count = sum(key.startswith(_TEXTS) for key in header.shapes)
    return (f"text tower not read ({count} tensors)",) if count else ()


def _map_entries(c: ViTConfig) -> list[Entry]:
    inner = f"{_MAP}/{LINEN.attention}"
    ours = {"query": ("map.q", (0, 1)), "key": ("map.kv", (0, 2)), "value": ("map.kv", (1, 2))}
    entries = [Entry(f"{_MAP}/probe", "map.probe", (1, 1, c.width))]
    entries += google.attention(inner, ours, "map.out", c)
    entries += google.norm(f"{_MAP}/LayerNorm_0", "map.norm", (c.width,))
    return entries + google.mlp(f"{_MAP}/{LINEN.mlp}", "map.mlp", c)


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    table = position_entries(_POSITION, c) if c.position == "1d" else []
    return google.encoder(c, LINEN) + table + (_map_entries(c) if c.pool == "map" else []) + google.head(c)


def _unsupported_reason(architecture: Architecture) -> str | None:
    if isinstance(architecture, ViTConfig) and architecture.stem:
        return "it does not support a hybrid's ResNet"
    return google.unsupported_reason(architecture)


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess:
    """Short side resized to 8/7 of the crop, as 256 is of 224; values from -1 to 1."""
    short = min(architecture.image)
    if architecture.image != (short, short):
        return google.plain_resize(header, architecture)
    half = (0.5,) * architecture.channels
    return Preprocess(f"decode|resize_small({round(short * 8 / 7)})|central_crop({short})", half, half)


BIG_VISION = Format(
    name="big_vision",
    title="big_vision npz",
    container="npz",
    recognises=_recognises,
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    renames=_renames,
    ignored=rf"opt/|chrono/|{_TEXTS}",
    assumptions=_assumptions,
    positions=("1d", "sincos2d"),
    class_row=lambda c: "folded",
    preprocess=_preprocess,
)
