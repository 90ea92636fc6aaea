"""Cold start: from the command to the first answer, in a fresh process each time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitral.bench.backends import OURS
from vitral.bench.benchmark import Tell, now
from vitral.bench.machine import facts
from vitral.bench.results import Row, spread
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.models.build import build
from vitral.names import name_of, parse

# What a user of transformers writes for one answer.
_PIPELINE = """
import sys
from transformers import pipeline
print(pipeline("image-classification", model=sys.argv[1])(sys.argv[2]))
"""


def measure(model: str, libraries: Sequence[str], rounds: int, tell: Tell) -> list[Row]:
    """A row for each library: seconds from its command to its answer, the libraries in turns."""
    call = now()
    with tempfile.TemporaryDirectory() as folder:
        words = _commands(Path(folder), model)
        times = _rounds({name: words[name] for name in words if name in libraries}, rounds, tell)
    return [_row(name, model, seconds, call) for name, seconds in times.items()]


def _commands(folder: Path, model: str) -> dict[str, list[str]]:
    """The same weights in each library's own format, and one picture."""
    architecture = parse(model)
    state = {name: array.detach() for name, array in build(architecture).state_dict().items()}
    side = architecture.image[0]
    preprocess = Preprocess(f"decode|resize({side})", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    card = Card(architecture, tuple(f"class {number}" for number in range(architecture.classes)), preprocess=preprocess)
    own, theirs, picture = folder / "model.safetensors", folder / "hf", folder / "picture.png"
    write(Weights(architecture, state, ()), card, own, "vitral")
    write(Weights(architecture, state, ()), card, theirs, "hf")
    picture.write_bytes(encode_png(np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)))
    return {
        OURS: [sys.executable, "-m", "vitral", "predict", str(own), str(picture), "--json"],
        "transformers": [sys.executable, "-c", _PIPELINE, str(theirs), str(picture)],
    }


def _rounds(words: Mapping[str, Sequence[str]], rounds: int, tell: Tell) -> dict[str, list[float]]:
    """Seconds of each start, in turns; a first round fills the disk's cache and does not count."""
    found: dict[str, list[float]] = {name: [] for name in words}
    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}" if number else "once, to fill the cache of the disk")
        for name in list(found):
            try:
                seconds = _seconds(name, words[name])
            except UserError as failure:
                if name == OURS:
                    raise
                tell(str(failure))
                del found[name]
                continue
            if number:
                found[name].append(seconds)
    return found


def _row(library: str, model: str, seconds: Sequence[float], call: str) -> Row:
    low, median, high = spread(seconds)
    return Row(
        work="start",
        model=name_of(parse(model)),
        batch=1,
        library=library,
        settings="predict" if library == OURS else "pipeline",
        device="cpu",
        precision="float32",
        seconds=median,
        low=low,
        high=high,
        samples=len(seconds),
        macs=0,
        rate=0.0,
        peak_bytes=0,
        cold_seconds=median,
        call=call,
        facts=facts(library, "cpu"),
    )


def _seconds(name: str, command: Sequence[str]) -> float:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise UserError(f"{name} gave no answer ({last}): leave it out of --against.")
    return seconds
