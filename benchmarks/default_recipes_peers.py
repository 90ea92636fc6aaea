"""Defaults beside defaults: `vitral train`, timm's train.py and lightly-train on the same small folders of images.

    python benchmarks/default_recipes_peers.py WEIGHTS pets:DIR@10 cifar10:DIR@20 pets_mini/ --folders FOLDER \\
        --out results/defaults-peers.jsonl --timm pytorch-image-models/train.py --lightly PYTHON

SOURCE@N takes N training images per class; at most `--test` held-out images are kept. Both are drawn with seed 0 and
written to a folder of class folders, which all programs read; its `val` has the test images. Weights are a
safetensors file under its timm name. Each run is evaluated on these images once, at its end, by its own program.

| method | what is run |
|---|---|
| vitral | all defaults |
| timm, defaults | train.py --pretrained, all defaults: SGD at 0.05, batches of 128, 300 epochs |
| timm, same length | the same with the epochs and the batch that vitral chose |
| timm with AdamW, same length | likewise, --opt adamw --lr 2e-4 --clip-grad 1 --warmup-epochs 2 --sched-on-updates |
| lightly-train, defaults | train_image_classification, all defaults: AdamW at 3e-4, 100,000 steps of 16 images |
| lightly-train, same length | likewise, a tenth of the steps as warmup, pixels normalised as the weights expect |

lightly-train's warmup of 500 steps would be all of such a short run, and it normalises by ImageNet's mean and standard
deviation, whatever weights are given. timm keeps its warmup of 5 epochs: it changes the rate once per epoch and does
not clip gradients, and with a single epoch of warmup a run diverged.

timm's train.py is not part of its wheel: name that of a checkout. PYTHON is an interpreter that has lightly-train. A
run that the file has already is not repeated, so a comparison that was stopped continues. The table is Markdown.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from default_recipes import measure, short_name
from PIL import Image
from safetensors.torch import load_file

from vitral.data.sources import Split, open_data, with_test_split

METHODS = (
    "vitral",
    "timm, same length",
    "timm with AdamW, same length",
    "lightly-train, same length",
    "timm, defaults",
    "lightly-train, defaults",
)
LIGHTLY = "import ast, sys, lightly_train; lightly_train.train_image_classification(**ast.literal_eval(sys.argv[1]))"
TOP1 = re.compile(r"val_metric/top1_acc_micro *\| *[\d.]+ *\| *([\d.]+) *\|")  # the best, then the last value
OUTPUT_TAIL = 2_000  # characters of a failed program's output


@dataclass(frozen=True)
class Job:
    """One run of a peer."""

    folder: Path  # with train and val
    weights: Path
    seed: int
    device: str
    workers: int
    out: Path  # a temporary folder
    epochs: int = 0  # 0: the peer's defaults
    batch: int = 0
    adamw: bool = False  # timm: with settings that a user of Vision Transformers would choose

    def classes(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "train").iterdir())

    def images(self) -> int:
        return sum(1 for _ in (self.folder / "train").glob("*/*"))


def write_folder(source: str, per_class: int, test: int, folder: Path) -> None:
    """Write the training and test images that all programs read; nothing is done where the folder exists."""
    if folder.is_dir():
        return
    data = with_test_split(open_data(source))
    held_out = data.eval_split
    assert held_out is not None
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(data.train.labels == label)) for label in range(len(data.train.classes))]
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    _write_images(data.train, np.concatenate([row[: per_class or None] for row in rows]), unfinished / "train")
    _write_images(held_out, rng.permutation(len(held_out))[:test], unfinished / "val")
    unfinished.rename(folder)


def _write_images(split: Split, rows: np.ndarray, folder: Path) -> None:
    """Write encoded images as they are, and arrays as PNG."""
    for row in rows.tolist():
        image, parent = split.reader.read(row), folder / split.classes[split.labels[row]]
        parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, np.ndarray):
            Image.fromarray(image.squeeze()).save(parent / f"{row:05d}.png")
        else:
            suffix = ".jpg" if image.startswith(b"\xff\xd8") else ".png"
            (parent / f"{row:05d}{suffix}").write_bytes(image)


def run_timm(program: str, job: Job) -> float:
    """Accuracy of the last epoch."""
    model, classes = job.weights.stem, str(len(job.classes()))
    words = [sys.executable, program, "--data-dir", str(job.folder), "--model", model, "--num-classes", classes]
    words += ["--pretrained", "--device", job.device]
    words += ["--seed", str(job.seed), "--workers", str(job.workers), "--val-interval", "1000000"]
    words += ["--output", str(job.out), "--experiment", "run"]
    if job.epochs:
        words += ["--epochs", str(job.epochs), "--batch-size", str(job.batch)]
    if job.adamw:
        words += ["--opt", "adamw", "--lr", "2e-4", "--clip-grad", "1", "--warmup-epochs", "2", "--sched-on-updates"]
    run_program(words, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(hub_cache(job)))
    with (job.out / "run" / "summary.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]) / 100


def hub_cache(job: Job) -> Path:
    """A cache of the Hugging Face hub that has the weights. train.py's --pretrained-path reads those of Google alone,
    an .npz file, for this model."""
    repository = job.out / "hub" / f"models--timm--{job.weights.stem}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("local")
    (repository / "snapshots" / "local").mkdir(parents=True)
    (repository / "snapshots" / "local" / "model.safetensors").symlink_to(job.weights.absolute())
    return job.out / "hub"


def run_lightly(python: str, job: Job) -> float:
    """Accuracy after the last step."""
    weights = job.out / "weights.pt"
    torch.save(load_file(job.weights), weights)
    settings: dict[str, Any] = {
        "out": str(job.out / "run"),
        "data": {
            "train": str(job.folder / "train"),
            "val": str(job.folder / "val"),
            "classes": dict(enumerate(job.classes())),
        },
        "model": f"timm/{job.weights.stem}",
        "model_args": {"backbone_weights": str(weights)},
        "seed": job.seed,
        "accelerator": "gpu" if job.device.startswith("cuda") else "cpu",
        "devices": 1,
        "num_workers": job.workers,
    }
    if job.epochs:
        steps = math.ceil(job.epochs * job.images() / job.batch)
        settings |= {"steps": steps, "batch_size": job.batch}
        settings["model_args"]["lr_warmup_steps"] = steps // 10
        settings["transform_args"] = {"normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}
        settings["logger_args"] = {"val_every_num_steps": steps}
    return float(TOP1.findall(run_program([python, "-c", LIGHTLY, repr(settings)]))[-1])


def run_program(words: list[str], **environment: str) -> str:
    """The output of a program."""
    merged = os.environ | environment
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=merged)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\nfailed:\n{done.stdout[-OUTPUT_TAIL:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folders", type=Path, required=True, help="where the images of all programs are written")
    parser.add_argument("--timm", default="", help="train.py of a checkout of pytorch-image-models")
    parser.add_argument("--lightly", default="", help="a Python that has lightly-train")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=4, help="data loading processes of the peers")
    options = parser.parse_args()
    options.folders.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.is_file() else []
    rows = {(row["data"], row["method"], row["seed"]): row for row in map(json.loads, lines)}
    names = []
    for text in options.data:
        source, _, count = text.rpartition("@") if "@" in text else (text, "", "0")
        names.append(short_name(source.rstrip("/")) + (f", {count} per class" if int(count) else ""))
        folder = options.folders / names[-1].replace(", ", "-").replace(" ", "-")
        write_folder(source, int(count), options.test, folder)
        for seed in options.seeds:
            for method in options.methods:
                if (names[-1], method, seed) in rows:
                    continue
                ours = rows.get((names[-1], "vitral", seed))
                try:
                    row = run_method(method, folder, ours, options, seed)
                except RuntimeError as error:  # the other runs are carried out; this one is repeated next time
                    print(error, file=sys.stderr)
                    continue
                rows[names[-1], method, seed] = {"data": names[-1], "method": method, "seed": seed, **row}
                with options.out.open("a") as file:
                    print(json.dumps(rows[names[-1], method, seed]), file=file)
    print_table([row for row in rows.values() if row["data"] in names])


def run_method(
    method: str, folder: Path, ours: dict[str, Any] | None, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One run: accuracy, seconds, and what was chosen."""
    if method == "vitral":
        return measure(str(folder), str(options.weights), seed, options.device)
    length: dict[str, int] = {}
    if method.endswith("same length"):
        if ours is None:
            sys.exit(f'"{method}" needs the run of vitral with seed {seed}: name vitral first in --methods.')
        length = {"epochs": round(ours["recipe"]["epochs"]), "batch": ours["recipe"]["batch"]}
    program = options.timm if method.startswith("timm") else options.lightly
    if not program:
        sys.exit(f'"{method}" needs --timm TRAIN_PY or --lightly PYTHON.')
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        adamw = "AdamW" in method
        job = Job(folder, options.weights, seed, options.device, options.workers, Path(out), **length, adamw=adamw)
        accuracy = (run_timm if method.startswith("timm") else run_lightly)(program, job)
    seconds = round(time.perf_counter() - began, 1)
    return {"accuracy": accuracy, "seconds": seconds, "device": options.device, **length}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per data set: of each method the mean, and the standard deviation over seeds."""
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    print("| data | training images | test images | chosen |", " | ".join(methods), "|")
    print("|---|--:|--:|---|" + "--:|" * len(methods))
    for data in dict.fromkeys(row["data"] for row in rows):
        ours = [row for row in rows if row["data"] == data and row["method"] == "vitral"][-1]
        recipe = f"{ours['recipe']['trainable']}, {ours['recipe']['epochs']:g} epochs"
        cells = [data, ours["train"], ours["n"], recipe]
        for method in methods:
            runs = [100 * row["accuracy"] for row in rows if (row["data"], row["method"]) == (data, method)]
            deviation = f" +- {stdev(runs):.1f}" if len(runs) > 1 else ""
            cells.append(f"{fmean(runs):.1f} %{deviation} ({len(runs)})" if runs else "")
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
