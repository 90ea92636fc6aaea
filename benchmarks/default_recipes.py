"""What `vitral train DATA --init WEIGHTS` reaches with all defaults, over several data sets.

    python benchmarks/default_recipes.py WEIGHTS pets:DIR flowers/ ... --out results/defaults.jsonl --seeds 0 1 2

Each run is evaluated once, at its end, on the test split of the data, or on the held-out fifth where it has none;
nothing is selected on these images. A run that the file has already is not repeated, so a comparison that was stopped
continues. `--set KEY=VALUE` changes the recipe of all runs, for comparison. The table is Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import vitral
from vitral.data.sources import open_data, with_test_split
from vitral.events import ignore_events

KEYS = ("trainable", "balance", "epochs", "steps", "batch", "image")
NEVER = 1_000_000  # steps between evaluations: only the end is evaluated


def measure(data: str, weights: str, seed: int, device: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Train once with the defaults, or with changes ("KEY=VALUE"); the accuracy, and what was chosen."""
    opened = with_test_split(open_data(data))
    with tempfile.TemporaryDirectory() as out:
        result = vitral.train(
            opened,  # type: ignore[arg-type]  # a DataSet is opened as it is
            init=weights,
            out=Path(out, "run"),
            seed=seed,
            device=device,
            set=[f"evaluate_every={NEVER}", *changes],
            on_event=ignore_events,
        )
    run = result.results[0]
    return {
        "accuracy": run.metrics["score"],
        "n": run.metrics["n"],
        "train": len(opened.train),
        "classes": len(opened.train.classes),
        "recipe": {key: getattr(result.recipe, key) for key in KEYS} | {"lr": result.recipe.optim.lr},
        "seconds": run.seconds,
        "device": run.device,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="")
    parser.add_argument("--set", nargs="+", default=[], help="keys of the recipe to change, as KEY=VALUE")
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.is_file() else []
    name, changes = Path(options.weights).name, " ".join(options.set)
    rows = {(row["data"], row["weights"], row["seed"], row["set"]): row for row in map(json.loads, lines)}
    for data, seed in itertools.product(options.data, options.seeds):
        key = (short_name(data), name, seed, changes)
        if key not in rows:
            row = measure(data, options.weights, seed, options.device, options.set)
            rows[key] = {"data": key[0], "weights": name, "seed": seed, "set": changes, **row}
            with options.out.open("a") as file:
                print(json.dumps(rows[key]), file=file)
    print_table([row for row in rows.values() if (row["weights"], row["set"]) == (name, changes)])


def short_name(data: str) -> str:
    """ "pets:DIR" -> "pets", "path/to/flowers" -> "flowers" """
    name, _, place = data.partition(":")
    return data if name == "hf" else name if place else Path(data).name


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per data set: the mean, and the standard deviation over seeds."""
    print("| data | classes | training images | test images | chosen | accuracy | seeds | seconds per run |")
    print("|---|--:|--:|--:|---|--:|--:|--:|")
    for data in dict.fromkeys(row["data"] for row in rows):
        runs = [row for row in rows if row["data"] == data]
        scores, last = [100 * row["accuracy"] for row in runs], runs[-1]
        deviation = f" +- {stdev(scores):.2f} (standard deviation)" if len(scores) > 1 else ""
        chosen = last["recipe"]
        recipe = f"{chosen['trainable']}, {chosen['epochs']:g} epochs, balance {chosen['balance']}"
        cells = [data, last["classes"], last["train"], last["n"], recipe, f"{fmean(scores):.2f} %{deviation}"]
        print("|", " | ".join(map(str, [*cells, len(scores), f"{fmean(row['seconds'] for row in runs):.0f}"])), "|")


if __name__ == "__main__":
    main()
