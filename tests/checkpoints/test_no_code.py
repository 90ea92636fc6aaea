"""Nothing in a run folder, a checkpoint or a data folder is executed: planted pickles that would create a file."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as sharded

import vitral
from vitral.checkpoints.description import describe
from vitral.checkpoints.run import INDEX, RunFolder, SavedState
from vitral.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"model/a": torch.arange(12.0).reshape(4, 3), "optimizer/step/a": torch.tensor(3.0)}


class Planted:
    """A pickle of this object touches a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file whose existence proves that code ran."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(Planted(path)))
    assert path.exists()  # so the pickle works
    path.unlink()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with a sharded state after steps 1 and 2."""
    run = RunFolder(tmp_path / "run")
    run.make()
    for step in (1, 2):
        run.write_shards(step, {key: tensor * step for key, tensor in STATE.items()})
        run.name_shards(step, {"seconds": 1.0}, keep=5)
    return run


def newest(folder: RunFolder) -> SavedState:
    state = folder.newest_state()
    assert state is not None
    return state


def loaded(state: SavedState) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(STATE[name]) for name in state.names()}
    state.load_sharded(tensors)
    return tensors


def test_a_sharded_state_has_no_pickled_index(folder: RunFolder, proof: Path) -> None:
    state = newest(folder)
    assert not list(state.path.glob("*.metadata"))
    (state.path / ".metadata").write_bytes(pickle.dumps(Planted(proof)))  # torch reads it
    with pytest.raises(AttributeError):  # after it has run
        sharded.FileSystemReader(str(state.path)).read_metadata()
    assert proof.exists()
    proof.unlink()
    tensors = loaded(newest(folder))
    assert all(torch.equal(tensors[name], 2 * STATE[name]) for name in STATE)
    assert not proof.exists()


def test_a_state_with_a_pickled_index_alone_is_skipped(folder: RunFolder, proof: Path) -> None:
    path = newest(folder).path
    (path / INDEX).unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Planted(proof)))
    assert newest(folder).step == 1
    assert not proof.exists()


def test_a_pickle_in_a_shard_is_refused(folder: RunFolder, proof: Path) -> None:
    state = newest(folder)
    stream = io.BytesIO()
    torch.save({"x": Planted(proof)}, stream)
    index = json.loads((state.path / INDEX).read_text())
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk |= {"file": "planted.distcp", "start": 0, "length": stream.tell()}
    (state.path / "planted.distcp").write_bytes(stream.getvalue())
    (state.path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="is damaged: remove it"):
        loaded(newest(folder))
    assert not proof.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../outside.distcp"},
        {"file": "/etc/passwd"},
        {"file": 3},
        {"start": -1},
        {"length": "7"},
        {"sizes": [1 << 70]},
        {"offsets": None},
    ],
)
def test_an_index_that_lies_is_skipped(folder: RunFolder, change: dict[str, Any]) -> None:
    path = newest(folder).path / INDEX
    index = json.loads(path.read_text())
    index["tensors"]["model/a"]["chunks"][0] |= change
    path.write_text(json.dumps(index))
    assert newest(folder).step == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tensors": 3}', '{"tensors": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_is_skipped(folder: RunFolder, text: str) -> None:
    (newest(folder).path / INDEX).write_text(text)
    assert newest(folder).step == 1


def torch_pickle(path: Path, proof: Path) -> None:
    torch.save({"model": Planted(proof)}, path)


def old_torch_pickle(path: Path, proof: Path) -> None:
    torch.save({"model": Planted(proof)}, path, _use_new_zipfile_serialization=False)


def bare_pickle(path: Path, proof: Path) -> None:
    path.write_bytes(pickle.dumps(Planted(proof)))


def objects_in_npz(path: Path, proof: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([Planted(proof)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Transformer/posembed_input/pos_embedding.npy", stream.getvalue())


@pytest.mark.parametrize("plant", [torch_pickle, old_torch_pickle, bare_pickle, objects_in_npz])
def test_a_checkpoint_runs_nothing(plant: Callable[[Path, Path], None], tmp_path: Path, proof: Path) -> None:
    path = tmp_path / "planted.pth"
    plant(path, proof)
    with pytest.raises(UserError) as refused:
        describe(path)
    assert len(str(refused.value)) < 300 + 2 * len(str(tmp_path))
    assert not proof.exists()


@pytest.mark.parametrize("name", ["features.npz", "data_batch_1", "train.csv", "shard.tar", "x.npy", "data.pt"])
def test_data_runs_nothing(name: str, tmp_path: Path, proof: Path) -> None:
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    path = folder / name
    path.write_bytes(pickle.dumps(Planted(proof)))
    for source in (path, folder, tmp_path / "data"):
        with contextlib.suppress(UserError):  # `check` reports a class without images
            vitral.check(str(source))
    assert not proof.exists()
