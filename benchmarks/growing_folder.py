"""A folder that grows after training: what `vitral evaluate RUN FOLDER` scores, and how well calibrated it is.

    python benchmarks/growing_folder.py PETS_MINI WEIGHTS [--seeds 0 1 2] [--device cpu]

PETS_MINI has `train/` and `test/` around one folder per class. Each seed draws six classes with 20 images, which
`vitral train FOLDER --init WEIGHTS` splits into train and held-out images, all by default. Then images are added,
renamed, moved and copied. The score of the held-out images must stay what it was, and no training image may be
counted. The last columns are the expected calibration error without and with the model's own temperature: of held-out
images with temperatures cross-fitted, of new images with the one in the model's card.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import vitral
from vitral.events import ignore_events

CLASSES, IMAGES, ADDED = 6, 20, 10


def build_folder(source: Path, seed: int, folder: Path) -> list[str]:
    """Copy `IMAGES` training images of random classes, without splits; returns the classes."""
    rng = random.Random(seed)
    names = rng.sample(sorted(path.name for path in (source / "train").iterdir()), CLASSES)
    for name in names:
        (folder / name).mkdir(parents=True)
        for image in rng.sample(sorted((source / "train" / name).iterdir()), IMAGES):
            shutil.copy(image, folder / name)
    return names


def changed_folders(source: Path, folder: Path, names: list[str], place: Path) -> dict[str, Path]:
    """Copies of the folder: as it was, elsewhere, and with images added, renamed, and copied once each."""
    kinds = {kind: place / kind.replace(" ", "-") for kind in ("moved", "added", "renamed")}
    kinds["all copied"] = place / "copies"
    for path in kinds.values():
        shutil.copytree(folder, path)
    for name in names:
        for image in sorted((source / "test" / name).iterdir())[:ADDED]:
            shutil.copy(image, kinds["added"] / name / f"new-{image.name}")
        for number, image in enumerate(sorted((kinds["renamed"] / name).iterdir())):
            image.rename(image.with_name(f"{name[::-1]}-{number}{image.suffix}"))
        for image in sorted((kinds["all copied"] / name).iterdir()):
            shutil.copy(image, image.with_name(f"copy-{image.name}"))
    return {"unchanged": folder, **kinds}


def cells(metrics: dict[str, Any] | None) -> list[str]:
    """Number of images, top-1, and calibration error without and with a temperature."""
    if metrics is None:
        return ["", "", ""]
    return [
        f"{metrics['n']}",
        f"{metrics['top1']:.1%}",
        f"{metrics['ece']:.1%} -> {metrics['ece_calibrated']:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    table = Table("seed", "folder", "held out", "top-1", "ECE", "new", "top-1", "ECE", "note")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as place:
            folder, run = Path(place, "photos"), Path(place, "run")
            names = build_folder(options.source, seed, folder)
            vitral.train(
                folder, init=options.weights, out=run, device=options.device, seed=seed, on_event=ignore_events
            )
            for kind, path in changed_folders(options.source, folder, names, Path(place, "later")).items():
                result = vitral.evaluate(run, path, device=options.device, on_event=ignore_events)
                table.add_row(str(seed), kind, *cells(result.metrics), *cells(result.new), result.notes[0])
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
