"""Small data sets in the form of VTAB's: the same fields, classes and splits, other pictures.

Each drawn picture shows its label, so that a model can learn it: a coloured square in one of 16 places for a class;
discs that are as many, and as large, as CLEVR's objects are many and near; a hand that points and stands where a sprite
does. Others are of real photographs: how many small ones lie on a canvas, and where one lies; their test images show
other photographs than their training images do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from vtab_files import Record, write_parquet, write_records

from vitral.data.images import decode, encode_png
from vitral.data.pixels import resize
from vitral.data.splits import Split
from vitral.data.vtab.tasks import CLASS, TaskSpec, find_task, stored_split

Size = tuple[int, int]
# Height and width of a usual picture, by data set.
_SIZES: dict[str, Size] = {
    "caltech101": (200, 300),
    "cifar100": (32, 32),
    "dtd": (480, 480),
    "oxford_flowers102": (500, 667),
    "oxford_iiit_pet": (375, 500),
    "sun397": (256, 341),
    "svhn_cropped": (32, 32),
    "patch_camelyon": (96, 96),
    "eurosat": (64, 64),
    "resisc45": (256, 256),
    "diabetic_retinopathy_detection": (300, 300),
    "clevr": (320, 480),
    "dmlab": (360, 480),
    "dsprites": (64, 64),
    "kitti": (375, 1242),
    "smallnorb": (96, 96),
}
_DEPTHS = (7.5, 8.25, 8.75, 9.25, 9.75, 10.5)  # one in each of CLEVR's classes of distance
_GREY = 128
_CELLS = 4  # in each direction of the canvas that photographs lie on
_PLACES = 16


def write_stand_in(
    task: str, root: Path, *, train: int = 200, others: int = 100, layout: str = "parquet", shrink: int = 1
) -> None:
    """Writes ROOT/DATASET with `train` pictures in train and `others` in each other split.

    `layout` is parquet or tfrecord; pictures are `shrink` times smaller than the data set's, except sprites.
    """
    row, rng = find_task(task), np.random.default_rng(0)
    height, width = _SIZES[row.dataset]
    size = (height // shrink, width // shrink) if row.dataset != "dsprites" else (height, width)
    draw = _SCENES.get(row.dataset, lambda rng, size, place: _class_scene(rng, size, place % row.classes))
    counts = {stored_split(text): others for text in row.expressions().values()} | {"train": train}
    splits = {
        split: [draw(rng, size, int(place)) for place in rng.permutation(count)] for split, count in counts.items()
    }
    names = [f"class {number:03d}" for number in range(row.classes)] if row.rule is CLASS else []
    folder = root / row.dataset
    if layout == "parquet":
        write_parquet(folder, splits, names)
    else:
        write_records(_tfds_folder(row, folder), row.dataset, splits, names)


def _tfds_folder(task: TaskSpec, folder: Path) -> Path:
    version = task.builder.partition(":")[2].replace("*", "0.0")
    return folder / task.setting / version


def _class_scene(rng: np.random.Generator, size: Size, label: int) -> Record:
    """One of 16 places and, from the 17th class on, one of 26 colours."""
    picture = _background(rng, size)
    high, wide = size[0] // 4, size[1] // 4
    top, left = label % 16 // 4 * high, label % 4 * wide
    colour = 26 - label // 16
    picture[top : top + high, left : left + wide] = (colour // 9 * 127, colour // 3 % 3 * 127, colour % 3 * 127)
    return {"image": encode_png(picture), "label": np.array(label)}


def _clevr_scene(rng: np.random.Generator, size: Size, place: int) -> Record:
    """3 to 10 discs in different cells of a 3 x 4 grid; the nearest one's depth runs through all classes."""
    count, nearest = 3 + place % 8, _DEPTHS[place % 6]
    depths = nearest + np.append(0, rng.uniform(0, 1.5, count - 1))
    picture = _background(rng, size)
    rows, columns = np.ogrid[: size[0], : size[1]]
    centres = []
    for cell, depth in zip(rng.permutation(12)[:count].tolist(), depths, strict=True):
        y, x = (cell // 4 + 0.5) * size[0] / 3, (cell % 4 + 0.5) * size[1] / 4
        radius = 0.45 * min(size[0] / 3, size[1] / 4) * (7 / depth) ** 3
        picture[(rows - y) ** 2 + (columns - x) ** 2 <= radius**2] = rng.integers(150, 256, 3)
        centres.append((x, y, depth))
    sizes = (depths < nearest + 0.75).astype(np.int64)
    return {
        "image": encode_png(picture),
        "objects/pixel_coords": np.array(centres, np.float32),
        "objects/size": sizes,
    }


def _kitti_scene(rng: np.random.Generator, size: Size, place: int) -> Record:
    """Boxes that are the higher the nearer they are: none or a few vehicles, in white, and people, in blue."""
    kinds = [0, 1, 2][: place % 4] + [3] * int(rng.integers(1, 3))
    depths = rng.uniform(4, 40, len(kinds))
    picture = _background(rng, size)
    for slot, (kind, depth) in enumerate(zip(kinds, depths, strict=True)):
        high = int(min(size[0] - 2, size[0] * 4 / depth))
        left = slot * size[1] // len(kinds)
        wide = max(1, size[1] // 12)
        picture[size[0] - high :, left : left + wide] = (255, 255, 255) if kind < 3 else (40, 40, 255)
    locations = np.stack([rng.uniform(-8, 8, len(kinds)), np.full(len(kinds), 1.6), depths], 1)
    return {
        "image": encode_png(picture),
        "objects/type": np.array(kinds, np.int64),
        "objects/location": locations.astype(np.float32),
    }


def _sprite_scene(rng: np.random.Generator, size: Size, place: int) -> Record:
    """A mask of zeros and ones: where the hand begins is the position, where it points the orientation."""
    across, down, turn = place % 32, int(rng.integers(0, 32)), int(rng.integers(0, 40))
    mask = _hand(size, (16 + down, 16 + across), turn * 2 * np.pi / 40, 12, 2)
    return {
        "image": encode_png(mask[:, :, None].astype(np.uint8)),
        "label_x_position": np.array(across),
        "label_y_position": np.array(down),
        "label_orientation": np.array(turn),
    }


def _toy_scene(rng: np.random.Generator, size: Size, place: int) -> Record:
    """In grey: the hand points where the camera stood, and is the brighter the higher it stood."""
    azimuth, elevation = place % 18, int(rng.integers(0, 9))
    picture = rng.integers(0, 40, (*size, 1), np.uint8)
    middle = (size[0] / 2, size[1] / 2)
    picture[_hand(size, middle, azimuth * np.pi / 9, min(size) * 0.45, min(size) / 12)] = 80 + 20 * elevation
    return {
        "image": encode_png(picture),
        "label_azimuth": np.array(azimuth),
        "label_elevation": np.array(elevation),
    }


_SCENES: dict[str, Callable[[np.random.Generator, Size, int], Record]] = {
    "clevr": _clevr_scene,
    "kitti": _kitti_scene,
    "dsprites": _sprite_scene,
    "smallnorb": _toy_scene,
}


def _background(rng: np.random.Generator, size: Size) -> np.ndarray:
    """Dark patches that make every picture another one, uint8 (h, w, 3)."""
    return resize(rng.integers(0, 60, (8, 8, 3), np.uint8), size, "nearest")


def _hand(size: Size, start: tuple[float, float], angle: float, length: float, half: float) -> np.ndarray:
    """A bar from `start` (y, x) in a direction, bool (h, w)."""
    y, x = np.mgrid[: size[0], : size[1]] - np.array(start)[:, None, None]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return (along >= 0) & (along <= length) & (abs(across) <= half)


def write_real_counts(source: Split, root: Path, *, train: int = 2000, test: int = 500, side: int = 128) -> None:
    """Writes ROOT/clevr-count: 3 to 10 photographs in different cells of a 4 x 4 grid, each anywhere in its cell."""
    rng = np.random.default_rng(0)
    seen, unseen = _tiles(source, side // _CELLS * 3 // 4, rng)
    splits = {
        "train": [_counted(rng, seen, 3 + place % 8, side) for place in rng.permutation(train).tolist()],
        "validation": [_counted(rng, unseen, 3 + place % 8, side) for place in rng.permutation(test).tolist()],
    }
    write_parquet(root / "clevr-count", splits)


def write_real_locations(source: Split, root: Path, *, train: int = 4000, side: int = 128) -> None:
    """Writes ROOT/dsprites-location: one photograph at one of 16 places from left to right, and at any height."""
    rng = np.random.default_rng(0)
    seen, unseen = _tiles(source, side // _CELLS, rng)
    learned = train * 4 // 5  # of one stored split the task takes train[:80%], and tests on what follows
    labels = rng.permutation(train) % _PLACES
    records = [
        _placed(rng, seen if place < learned else unseen, label, side) for place, label in enumerate(labels.tolist())
    ]
    write_parquet(root / "dsprites-location", {"train": records})


def _tiles(source: Split, side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Square middles of photographs, uint8 (n, side, side, 3): four fifths to learn from, the others to test on."""
    tiles = np.stack([_middle(source, index, side) for index in rng.permutation(len(source)).tolist()])
    learned = len(tiles) * 4 // 5
    return tiles[:learned], tiles[learned:]


def _middle(source: Split, index: int, side: int) -> np.ndarray:
    data = source.reader.read(index)
    picture = decode(data) if isinstance(data, bytes) else data
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
