"""Small-scale runs of the paper's studies on CIFAR-100, one JSON line per run: heads (Figure 9), positions (Table 8),
shape (Figure 8).

    python benchmarks/small_studies.py heads cifar100:FOLDER --out results/heads.jsonl

A run that the file has already is not repeated, so a study that was stopped continues. Every run trains a small ViT at
32 pixels from scratch and is evaluated once, on the 10,000 test images; nothing is selected on them, and the
runs of each rate are all listed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vitral
from vitral.events import ignore_events

BASE: dict[str, Any] = {
    "model": "ViT-Ti/4@32",
    "epochs": 16,
    "batch": 512,
    "evaluate_every": 1_000_000,
    "shape.depth": 6,
    "optim.name": "adamw",
    "optim.weight_decay": 0.1,
    "schedule.warmup": 0.1,
    "data.train_transform": "decode|resize({size})",
    "data.eval_transform": "decode|resize({size})",
    "data.augment": "shift(4)|flip",
    "data.mixup": 0.2,
}
SEEDS = (0, 1, 2)
POSITIONS = (
    ("none", "input"),
    ("1d", "input"),
    ("1d", "every"),
    ("1d", "shared"),
    ("2d", "input"),
    ("2d", "every"),
    ("2d", "shared"),
    ("relative", "input"),
)


def heads() -> Iterator[dict[str, Any]]:
    """Class token and mean pooling, each at three rates: the paper needed another rate for each."""
    for pool, lr, seed in itertools.product(("token", "mean"), (3e-4, 1e-3, 3e-3), SEEDS):
        yield {"shape.pool": pool, "optim.lr": lr, "seed": seed}


def positions() -> Iterator[dict[str, Any]]:
    """The eight cells of Table 8."""
    for (position, injection), seed in itertools.product(POSITIONS, SEEDS):
        yield {"shape.position": position, "shape.injection": injection, "optim.lr": 1e-3, "seed": seed}


def shape() -> Iterator[dict[str, Any]]:
    """Depth, width, MLP width and patch size, each by itself, and the first three together; heads of 32 channels."""
    base = {"depth": 6, "width": 192, "mlp": 384, "patch": 4}
    axes = {
        "depth": [{"depth": depth} for depth in (2, 6, 12, 24)],
        "width": [{"width": width} for width in (96, 192, 384, 768)],
        "mlp": [{"mlp": mlp} for mlp in (192, 384, 768, 1536)],
        "patch": [{"patch": patch} for patch in (16, 8, 4, 2)],
        "all": [{"depth": 6 * k // 2, "width": 96 * k, "mlp": 192 * k} for k in (1, 2, 4, 6)],
    }
    for seed, points in itertools.product(SEEDS[:2], axes.values()):
        for point in points:
            sizes = {**base, **point}
            changes = {f"shape.{name}": sizes[name] for name in ("depth", "width", "mlp")}
            changes |= {"model": f"ViT-Ti/{sizes['patch']}@32", "shape.heads": sizes["width"] // 32}
            yield {**changes, "optim.lr": 1e-3, "seed": seed}


STUDIES = {"heads": heads, "positions": positions, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to every run, for trying out"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = [json.loads(line)["changes"] for line in lines]
    for changes in STUDIES[options.study]():
        if changes not in done:
            with options.out.open("a") as file:
                file.write(json.dumps(_run(options, changes)) + "\n")
            done.append(changes)  # the base of the shape study is a point of every axis


def _run(options: argparse.Namespace, changes: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {**BASE, **changes}
        result = vitral.train(
            options.data,
            recipe=vitral.Recipe(),
            out=Path(folder) / "run",
            set=[*(f"{key}={value}" for key, value in keys.items()), *options.set],
            on_event=ignore_events,
        ).results[0]
    row = {
        "study": options.study,
        "changes": changes,
        "top1": result.metrics["top1"],
        "n": result.metrics["n"],
        "seconds": round(result.seconds, 1),
        "flops": result.flops,
        "recipe": result.recipe,
        "device": result.device,
        "version": vitral.__version__,
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
