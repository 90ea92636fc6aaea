"""Uneven classes: the default recipe of `vitral train FOLDER --init WEIGHTS` against each balance and length.

    python benchmarks/uneven_folders.py PETS_MINI WEIGHTS --out results/uneven.jsonl [--set image=112]

PETS_MINI has `train/` and `test/` around one folder per class. Each seed draws six classes, their order and their
training images; the test images are all those of the six classes under `test/`, equally many per class. A run that
the file has already is not repeated, so a comparison that was stopped continues. Nothing is selected on the test
images: each run is evaluated once, at its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

import vitral
from vitral.events import ignore_events

LAYOUTS = {  # training images of the six classes
    "1 to 40": (1, 2, 5, 10, 20, 40),
    "2 to 20": (2, 3, 5, 8, 13, 20),
    "one large": (40, 4, 4, 4, 4, 4),
    "even": (10, 10, 10, 10, 10, 10),
}
BALANCES = ("none", "weights", "sampler", "logit-adjust")


def choices(epochs: list[int]) -> Iterator[dict[str, Any]]:
    """The settings that are compared: the default, a head, and full fine-tuning with every balance and length."""
    yield {}
    yield from ({"trainable": "head", "balance": balance} for balance in BALANCES)
    for length, balance in itertools.product(epochs, BALANCES):
        yield {"trainable": "full", "balance": balance, "epochs": length}


def build_folder(source: Path, counts: tuple[int, ...], seed: int, folder: Path) -> None:
    """Copy `counts[i]` random training images of the i-th of randomly drawn classes, and all their test images."""
    rng = random.Random(seed)
    names = sorted(path.name for path in (source / "train").iterdir())
    for name, count in zip(rng.sample(names, len(counts)), counts, strict=True):
        train = rng.sample(sorted((source / "train" / name).iterdir()), count)
        for split, images in (("train", train), ("test", sorted((source / "test" / name).iterdir()))):
            (folder / split / name).mkdir(parents=True)
            for image in images:
                shutil.copy(image, folder / split / name)


def measure(data: Path, weights: Path, seed: int, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train once and return the accuracy on the test images, with what was chosen."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        result = vitral.train(
            data,
            init=weights,
            out=Path(out, "run"),
            device=device,
            seed=seed,
            set={"evaluate_every": 1_000_000, **settings},
            on_event=ignore_events,
        )
    recipe, metrics = result.recipe, result.results[0].metrics
    chosen = {"trainable": recipe.trainable, "balance": recipe.balance, "epochs": recipe.epochs}
    return {
        "accuracy": metrics["score"],
        "images": metrics["n"],
        "recipe": chosen,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 30])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="run only choices whose name contains this text")
    parser.add_argument("--set", nargs="*", default=[], help="recipe keys that every run has, such as image=112")
    options = parser.parse_args()
    common = dict(word.split("=", 1) for word in options.set)
    lines = options.out.read_text().splitlines() if options.out.is_file() else []
    runs = [run for run in map(json.loads, lines) if run["set"] == common]
    rows = {(run["layout"], run["seed"], run["choice"]): run for run in runs}
    for seed, settings, layout in itertools.product(options.seeds, choices(options.epochs), options.layouts):
        key = (layout, seed, named(settings))
        if key in rows or options.only not in key[2]:
            continue
        with tempfile.TemporaryDirectory() as data:
            build_folder(options.source, LAYOUTS[layout], seed, Path(data))
            row = measure(Path(data), options.weights, seed, options.device, {**common, **settings})
        rows[key] = {"layout": layout, "seed": seed, "choice": key[2], "set": common, **row}
        with options.out.open("a") as file:
            print(json.dumps(rows[key]), file=file)
    print_table(list(rows.values()), options.layouts)


def named(settings: dict[str, Any]) -> str:
    """A row's name, such as `full, none, 30 epochs`."""
    words = [f"{value} epochs" if key == "epochs" else value for key, value in settings.items()]
    return ", ".join(words) or "default"


def print_table(rows: list[dict[str, Any]], layouts: list[str]) -> None:
    """Print the mean accuracy of each choice and layout, with every seed's."""
    table = Table("choice", *layouts, title="accuracy on test images (%): mean, and each seed")
    for choice in dict.fromkeys(row["choice"] for row in rows):
        cells = []
        for layout in layouts:
            scores = [100 * row["accuracy"] for row in rows if (row["choice"], row["layout"]) == (choice, layout)]
            each = ", ".join(f"{score:.1f}" for score in scores)
            cells.append(f"{mean(scores):.1f} ({each})" if scores else "")
        table.add_row(choice, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
