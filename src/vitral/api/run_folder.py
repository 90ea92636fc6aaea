"""Where a run may be written: not among its images, not among other files, not over another run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitral.api.data import known_data
from vitral.atomic import check_writable
from vitral.data.splits import SPLIT_NAMES
from vitral.errors import UserError
from vitral.recipe import Recipe

_BEGUN = ("recipe.toml", "protocol.json", "sweep", "seed-*")  # what a run leaves in its folder


def check_out(out: str | Path, data: object) -> None:
    """Refuse a run folder that lies among the images of the data, holds other files, or cannot be written.

    Args:
        out: the run folder; without it there will be one in runs/.
        data: what `vitral train` takes; only paths are checked.
    """
    source = str(data) if isinstance(data, str | Path) else ""
    name, _, location = source.partition(":")
    source = location if name in known_data() else source
    folder = Path(source).expanduser()
    check_folder(out, [folder] if source and folder.is_dir() else [])


def check_folder(out: str | Path, data: Iterable[Path], begun: Sequence[str] = _BEGUN) -> None:
    """The same for several folders of data, existing or not; `begun` are patterns of what a run to resume has."""
    folder = Path(out or "runs")
    for images in (images for source in data for images in _image_folders(source)):
        if folder.resolve().is_relative_to(images.resolve()):
            raise UserError(
                f"the run folder {folder} lies in the data folder {images}, where its files would count as images: "
                "choose another with --out."
            )
    check_writable(folder / "recipe.toml")
    if out and folder.is_dir() and _holds_others(folder, begun):
        raise UserError(f"{folder} holds other files and no run to resume: choose another folder with --out.")


def _image_folders(data: Path) -> list[Path]:
    """The folders that hold class folders: those of the splits, or the data folder itself."""
    inside = data.iterdir() if data.is_dir() else ()
    return [path for path in inside if path.is_dir() and path.name.lower() in SPLIT_NAMES] or [data]


def _holds_others(folder: Path, begun: Sequence[str]) -> bool:
    if any(any(folder.glob(pattern)) for pattern in begun):
        return False
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return any(name not in ("state", "tensorboard", "vtab-ids") for name in names)


def new_folder(data: str | Path, recipe: Recipe) -> Path:
    """runs/NAME, or runs/NAME-2, ... where that exists: no run is overwritten by another."""
    name = Path(str(data)).expanduser().name.split(".")[0] or "run"
    weights = Path(recipe.init)
    weights = weights.parent if weights.name.startswith("seed-") else weights
    model = weights.name.split(".")[0] if recipe.init else re.sub("[/+@]", "-", recipe.model)
    base = f"{name}-{model}"
    number = 1
    while (folder := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return folder
