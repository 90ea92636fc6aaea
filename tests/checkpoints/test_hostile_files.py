"""Changed images, checkpoints, configurations and data: one sentence or a result, in bounded time and memory.

`VITRAL_HOSTILE=20000 pytest tests/checkpoints/test_hostile_files.py` tries that many of each kind, with other seeds;
`VITRAL_HOSTILE_SEED` sets the first one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus
import pytest

import vitral
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.run import RunFolder
from vitral.checkpoints.weights import read
from vitral.data.images import ImageError, decode, describe, open_lazily
from vitral.data.loader import read_pixels
from vitral.data.sources import open_data
from vitral.errors import UserError

COUNT = int(os.environ.get("VITRAL_HOSTILE", "0"))
SEED = int(os.environ.get("VITRAL_HOSTILE_SEED", random.SystemRandom().randrange(1 << 30) if COUNT else 0))
SECONDS = 10  # for one input
GROWTH = 600e6  # bytes of memory that all inputs of a kind may add to this process
LONGEST = 300  # characters of a sentence, without the paths in it


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Fail where memory has grown by more than any of these small files justifies."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GROWTH, f"{grown / 1e6:.0f} MB"


def sweep(short: int, attempt: Callable[[random.Random], None]) -> None:
    """Try many inputs; whatever escapes is counted by where it was raised, with the seed that repeats it."""
    escapes: dict[str, list[str]] = defaultdict(list)
    for number in range(COUNT or short):
        seed = SEED + number
        try:
            with corpus.time_limit(SECONDS):
                attempt(random.Random(seed))
        except (UserError, ImageError) as error:
            sentence = " ".join(word for word in str(error).split(" ") if "/" not in word)
            if len(sentence) > LONGEST or "\n" in sentence:
                escapes[f"too long a sentence: {_origin(error)}"].append(f"seed {seed}: {sentence[:200]!r}")
        except (Exception, corpus.TooSlow) as error:
            escapes[f"{type(error).__name__}: {_origin(error)}"].append(f"seed {seed}: {str(error)[:150]!r}")
    assert not escapes, "\n".join(f"{len(found)} x {where}; {found[0]}" for where, found in escapes.items())


def _origin(error: BaseException) -> str:
    """The last line of ours that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/src/vitral/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/src/')[2]}:{frames[-1].lineno}" if frames else "the test"


def test_changed_images() -> None:
    originals = corpus.images()
    assert len(originals) > 40
    for data in originals.values():
        assert decode(data, 3).shape[2] == 3
    names = sorted(originals)

    def attempt(rng: random.Random) -> None:
        data = corpus.changed_bytes(originals[rng.choice(names)], rng)
        match rng.randrange(3):
            case 0:
                decode(data, rng.choice((1, 3, 4)))
            case 1:
                describe(data)
            case _:
                open_lazily(data, 3)[slice(0, 5), slice(0, 5)]

    sweep(1500, attempt)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return corpus.checkpoints(tmp_path_factory.mktemp("checkpoints"))


def test_changed_weight_files(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    files = {name: path / "model.safetensors" if path.is_dir() else path for name, path in checkpoints.items()}
    originals = {name: (file.name, file.read_bytes()) for name, file in files.items()}
    names = ["vitral", *sorted(originals)]

    def attempt(rng: random.Random) -> None:
        name = rng.choice(names)
        file, data = originals[name]
        header = file.endswith(".safetensors") and rng.random() < 0.7
        path = tmp_path / file
        path.write_bytes(corpus.change_safetensors(data, rng) if header else corpus.changed_bytes(data, rng))
        read(path, hints=Hints(heads=2))

    sweep(250, attempt)


def test_changed_configurations(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folders = {name: path for name, path in checkpoints.items() if path.is_dir()}
    for name, folder in folders.items():
        shutil.copytree(folder, tmp_path / name)
    names = sorted(folders)

    def attempt(rng: random.Random) -> None:
        name = rng.choice(names)
        files = sorted(path.name for path in folders[name].glob("*.json"))
        chosen = rng.choice(files)
        original = (folders[name] / chosen).read_text()
        text = corpus.json_text(corpus.changed_json(json.loads(original), rng), rng)
        (tmp_path / name / chosen).write_text(text, "utf-8", "surrogatepass")
        try:
            loaded = read(tmp_path / name, hints=Hints(heads=2) if rng.random() < 0.5 else Hints())
            if loaded.card.preprocess is not None:
                loaded.card.transform()
        finally:
            (tmp_path / name / chosen).write_text(original)

    sweep(200, attempt)
    assert {FORMATS[name].config is not None for name in names} == {True}


def test_changed_data(tmp_path: Path) -> None:
    shard = corpus.tar_shard()
    (tmp_path / "a.png").write_bytes(corpus.images()["PNG RGB"])
    rows = [{"path": "a.png", "label": label, "split": "train"} for label in ("x", "y", 3)]
    table = "path,label,split\na.png,x,train\na.png,y,test\n"

    def attempt(rng: random.Random) -> None:
        match rng.randrange(4):
            case 0:
                path = tmp_path / "data.tar"
                path.write_bytes(corpus.changed_bytes(shard, rng))
            case 1:
                path = tmp_path / "index.tar"
                path.write_bytes(shard)
                index = tmp_path / "index.tar.index.json"
                if not index.exists():
                    open_data(str(path))
                stored = json.loads(index.read_text())
                stored["shard"]["time"] = path.stat().st_mtime_ns
                index.write_text(corpus.json_text(corpus.changed_json(stored, rng), rng), "utf-8", "surrogatepass")
            case 2:
                path = tmp_path / "data.jsonl"
                lines = (corpus.json_text(corpus.changed_json(row, rng), rng) for row in rows)
                path.write_text("\n".join(lines), "utf-8", "surrogatepass")
            case _:
                path = tmp_path / "data.csv"
                path.write_bytes(corpus.changed_bytes(table.encode(), rng))
        try:
            data = open_data(str(path))
            for index in range(len(data.train)):
                read_pixels(data.train, index, 3)
        finally:
            for leftover in tmp_path.glob("*.index.json"):
                leftover.unlink()

    sweep(250, attempt)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_changed_states(tmp_path: Path) -> None:
    import torch

    run = RunFolder(tmp_path / "run")
    run.make()
    state = {"model/a": torch.arange(12.0).reshape(4, 3)}
    run.save_state(1, state, {"seconds": 1.0}, keep=5)
    run.write_shards(2, state)
    run.name_shards(2, {"seconds": 1.0}, keep=5)
    files = sorted(path for path in run.states.rglob("*") if path.is_file())
    originals = {path: path.read_bytes() for path in files}
    assert len(files) == 4

    def attempt(rng: random.Random) -> None:
        path = rng.choice(files)
        data = originals[path]
        if path.suffix == ".json":
            text = corpus.json_text(corpus.changed_json(json.loads(data), rng), rng)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(corpus.changed_bytes(data, rng))
        try:
            newest = run.newest_state()
            if newest is not None and newest.is_sharded and newest.names() == ["model/a"]:
                newest.load_sharded({"model/a": torch.zeros(4, 3)})
            elif newest is not None and not newest.is_sharded:
                newest.tensors()
        finally:
            path.write_bytes(data)

    sweep(100, attempt)


def test_the_public_entry_points_refuse_the_same(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    data = checkpoints["vitral"].read_bytes()

    def attempt(rng: random.Random) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(corpus.change_safetensors(data, rng))
        vitral.info(str(path))
        vitral.load(str(path))

    sweep(60, attempt)
