"""Kill runs with SIGKILL at random moments, start each again, and compare its end with an uninterrupted run's.

    python benchmarks/kill_runs.py FOLDER WEIGHTS --kills 100 --parallel 2

FOLDER is a folder of images by class, WEIGHTS any checkpoint to fine-tune. Each trial runs one command of `train`,
`train --init`, `finetune` or masked `pretrain` on a CPU, with one thread; it is killed once, at a time drawn uniformly
from the life of its run folder, and the same command is given again. Then every model, and the metrics of every
`result.json`, must be equal to those of the run that was never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMMON = ("image=32", "batch=16", "workers=1", "save_every=4", "evaluate_every=8")
SMALL = ("shape.depth=2", "shape.width=64", "shape.heads=2")


def commands(data: str, weights: str) -> dict[str, list[str]]:
    """The commands by name, without the folder that each writes."""
    model = ["--model", "ViT-Ti/8@32"]
    finetune = ["--recipe", "paper:finetune/pets", "--sweep", "optim.lr=0.003,0.01", "--seeds", "1"]
    masked = ["--recipe", "paper:pretrain/jft300m-masked", *model]
    return {
        "train": ["train", data, *model, "--set", *COMMON, *SMALL, "steps=60", "ema_decay=0.9", "data.mixup=0.2"],
        "train --init": ["train", data, "--init", weights, "--trainable", "full", "--set", *COMMON, "steps=30"],
        "finetune": ["finetune", weights, data, *finetune, "--set", *COMMON, "steps=12"],
        "pretrain, masked": ["pretrain", data, *masked, "--set", *COMMON, *SMALL, "steps=60"],
    }


def start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    """A process that runs a verb; its words go into a file beside the run folder."""
    words = command.copy()
    words[words.index("--set") : words.index("--set")] = ["--out", str(out), "--device", "cpu"]
    with out.with_suffix(".log").open("ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "vitral", *words], stdout=log, stderr=log, env=environment, start_new_session=True
        )


def outcome(out: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how it came about."""
    models = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.rglob("model.safetensors")}
    results = {path: json.loads(path.read_text())["metrics"] for path in out.rglob("result.json")}
    return {str(path.relative_to(out)): value for path, value in (models | results).items()}


def trial(command: list[str], out: Path, moment: float, expected: dict[str, Any]) -> tuple[str, bool]:
    """Start, kill `moment` seconds after its folder appears, start again: where it was hit, and whether the end is the
    same."""
    process = start(command, out)
    wait_for(process, out)
    time.sleep(moment)
    hit = "finished" if process.poll() is not None else phase(out)
    process.kill()
    process.wait()
    return hit, start(command, out).wait() == 0 and outcome(out) == expected


def wait_for(process: subprocess.Popen[bytes], out: Path) -> None:
    """Until the run has a folder, which takes some seconds of imports."""
    while process.poll() is None and not out.exists():
        time.sleep(0.01)


def phase(out: Path) -> str:
    """What a run is doing, judged by its files."""
    if any(out.rglob(".*.part")):
        return "writing"
    if any(out.rglob("model.safetensors")):
        return "after a model was written"
    return "training" if any(out.rglob("metrics.jsonl")) else "starting"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("weights")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = commands(options.data, options.weights)
    with tempfile.TemporaryDirectory() as folder:
        trials = []
        for kind, (name, command) in enumerate(kinds.items()):
            reference = Path(folder, f"never killed {name}")
            process = start(command, reference)
            wait_for(process, reference)
            begin = time.monotonic()
            if process.wait():
                sys.exit(reference.with_suffix(".log").read_text())
            duration = time.monotonic() - begin
            expected = outcome(reference)
            trials += [
                (command, Path(folder, f"{name} {index}"), rng.uniform(0, duration), expected)
                for index in range(kind, options.kills, len(kinds))
            ]
        with ThreadPoolExecutor(options.parallel) as pool:
            ends = list(pool.map(lambda arguments: trial(*arguments), trials))
    print(json.dumps({"hits": collections.Counter(hit for hit, _ in ends), "same": sum(same for _, same in ends)}))
    sys.exit(not all(same for _, same in ends))


if __name__ == "__main__":
    main()
