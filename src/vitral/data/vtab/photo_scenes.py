"""Tasks of VTAB's structured kind from real photographs: how many small ones lie on a canvas, and where one lies.

They have CLEVR's and dSprites' fields and splits and go by those tasks' names, so that they are opened like them. The
test images show other photographs than the training images do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitral.data.images import decode, encode_png, resize
from vitral.data.splits import Split
from vitral.data.vtab.export import Record, new_folder, write_parquet
from vitral.data.vtab.task_data import STAND_IN
from vitral.errors import UserError

_PHOTOGRAPHS = 1000  # are enough, and of a large source not all need be read
_GREY = 128
_CELLS = 4  # in each direction of the canvas
_PLACES = 16


def write_real_counts(
    source: Split, root: str | Path, *, train: int = 2000, test: int = 500, side: int = 128, seed: int = 0
) -> Path:
    """Writes ROOT/clevr-count: 3 to 10 photographs in different cells of a 4 x 4 grid, each anywhere in its cell."""
    rng = np.random.default_rng(seed)
    seen, unseen = _tiles(source, side // _CELLS * 3 // 4, rng)
    splits = {
        "train": [_counted(rng, seen, 3 + place % 8, side) for place in rng.permutation(train).tolist()],
        "validation": [_counted(rng, unseen, 3 + place % 8, side) for place in rng.permutation(test).tolist()],
    }
    return _written(Path(root) / "clevr-count", splits, seed)


def write_real_locations(source: Split, root: str | Path, *, train: int = 4000, side: int = 128, seed: int = 0) -> Path:
    """Writes ROOT/dsprites-location: one photograph at one of 16 places from left to right, and at any height."""
    rng = np.random.default_rng(seed)
    seen, unseen = _tiles(source, side // _CELLS, rng)
    learned = train * 4 // 5  # of one stored split the task takes train[:80%], and tests on what follows
    labels = rng.permutation(train) % _PLACES
    records = [
        _placed(rng, seen if place < learned else unseen, label, side) for place, label in enumerate(labels.tolist())
    ]
    return _written(Path(root) / "dsprites-location", {"train": records}, seed)


def _tiles(source: Split, side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Square middles of photographs, uint8 (n, side, side, 3): four fifths to learn from, the others to test on."""
    if len(source) < 2 or side < 1:
        raise UserError("Scenes of photographs need two of them or more, and a canvas of 16 pixels or more.")
    chosen = rng.permutation(len(source))[:_PHOTOGRAPHS].tolist()
    tiles = np.stack([_middle(source, index, side) for index in chosen])
    learned = max(1, len(tiles) * 4 // 5)
    return tiles[:learned], tiles[learned:]


def _middle(source: Split, index: int, side: int) -> np.ndarray:
    data = source.reader.read(index)
    picture = decode(data) if isinstance(data, bytes) else data
    if picture.shape[2] == 1:
        picture = picture.repeat(3, 2)
    height, width = picture.shape[:2]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    return resize(picture[top : top + short, left : left + short], (side, side), "bilinear")


def _counted(rng: np.random.Generator, tiles: np.ndarray, count: int, side: int) -> Record:
    canvas = np.full((side, side, 3), _GREY, np.uint8)
    cell, tile = side // _CELLS, tiles.shape[1]
    centres = []
    for place in rng.permutation(_CELLS * _CELLS)[:count].tolist():
        shift = rng.integers(0, cell - tile + 1, 2)
        top, left = np.array([place // _CELLS, place % _CELLS]) * cell + shift
        canvas[top : top + tile, left : left + tile] = tiles[rng.integers(len(tiles))]
        centres.append((left + tile / 2, top + tile / 2, 9.0))  # all lie in one plane
    return {"image": encode_png(canvas), "objects/pixel_coords": np.array(centres, np.float32)}


def _placed(rng: np.random.Generator, tiles: np.ndarray, place: int, side: int) -> Record:
    canvas = np.full((side, side, 3), _GREY, np.uint8)
    tile = tiles.shape[1]
    left, top = (side - tile) * place // (_PLACES - 1), int(rng.integers(0, side - tile + 1))
    canvas[top : top + tile, left : left + tile] = tiles[rng.integers(len(tiles))]
    return {"image": encode_png(canvas), "label_x_position": np.array(2 * place)}  # the rule merges pairs


def _written(folder: Path, splits: dict[str, list[Record]], seed: int) -> Path:
    with new_folder(folder) as aside:
        write_parquet(aside, splits)
        note = f"{folder.name} is made of photographs pasted on a canvas (seed {seed}): it is not VTAB's own data.\n"
        (aside / STAND_IN).write_text(note, encoding="utf-8")
    return folder
