"""The cache of features: computed once, complete, and never mistaken for others."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitral.architecture import ViTConfig
from vitral.atomic import atomic_write
from vitral.checkpoints.card import Preprocess
from vitral.data.splits import Split
from vitral.evaluation import predict
from vitral.evaluation.predict import SplitFeatures, cached_features, embed_split, weights_digest
from vitral.events import Event, Progress
from vitral.models.build import Model, build

SMALL = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=8, image=(16, 16), classes=3, representation=12)
PREPROCESS = Preprocess("decode|resize(16, 16)", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PICTURES = 9
BROKEN = 4


@dataclass(frozen=True)
class Pixels:
    images: np.ndarray
    version: str = "1"

    def read(self, index: int) -> bytes | np.ndarray:
        return b"no picture" if index == BROKEN else self.images[index]

    def mark(self, index: int) -> str:
        return f"{self.version} {index}"


@pytest.fixture
def split() -> Split:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (PICTURES, 16, 16, 3), dtype=np.uint8)
    keys = [f"picture {i}" for i in range(PICTURES)]
    return Split("train", keys, rng.integers(0, 3, PICTURES), ("a", "b", "c"), Pixels(images))


def fresh(config: ViTConfig = SMALL, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return build(config).eval()


class Counter:
    """How often features were really computed."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, event: Event) -> None:
        self.runs += isinstance(event, Progress) and event.done == event.total


def test_features_are_the_input_of_the_last_layer(split, tmp_path):
    model = fresh()
    result = cached_features(model, split, PREPROCESS, folder=tmp_path, batch=4)
    assert isinstance(split.reader, Pixels)
    pixels = torch.from_numpy(split.reader.images).permute(0, 3, 1, 2)
    with torch.no_grad():
        hidden = model.features(pixels / 127.5 - 1)
        assert model.head.hidden is not None
        expected = torch.tanh(hidden @ model.head.hidden.weight.T + model.head.hidden.bias).numpy()
    keep = np.arange(PICTURES) != BROKEN
    np.testing.assert_allclose(result.x[keep], expected[keep], atol=1e-5)
    assert (result.x.shape, result.x.dtype) == ((PICTURES, 12), np.float32)
    assert result.valid.tolist() == keep.tolist()
    assert list(result.keys) == list(split.keys)
    x, labels = result.readable()
    np.testing.assert_array_equal(x, result.x[keep])
    np.testing.assert_array_equal(labels, split.labels[keep])
    assert not model.training


def test_without_a_tanh_layer_features_are_the_input_of_the_head(split):
    model = fresh(replace(SMALL, representation=0))
    own, plain = (
        embed_split(model, split, PREPROCESS, batch=4, pool=pool).features for pool in ("pre_logits", "features")
    )
    np.testing.assert_array_equal(own, plain)


def test_cached_features_are_not_computed_again(split, tmp_path):
    model, counter = fresh(), Counter()
    first = cached_features(model, split, PREPROCESS, folder=tmp_path, batch=4, on_event=counter)
    second = cached_features(fresh(), split, PREPROCESS, folder=tmp_path, batch=7, on_event=counter)
    assert counter.runs == 1
    assert first.path == second.path
    assert list(tmp_path.iterdir()) == [first.path]
    for name in ("x", "valid", "labels"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_everything_that_changes_the_features_changes_the_file_name(split, tmp_path):
    relabelled = replace(split, labels=1 - np.minimum(split.labels, 1))
    touched = replace(split, reader=replace(split.reader, version="2"))
    moved = fresh()
    with torch.no_grad():
        moved.get_parameter("norm.bias")[3] += 1e-6
    cases: list[SplitFeatures] = [
        cached_features(fresh(), split, PREPROCESS, folder=tmp_path),
        cached_features(moved, split, PREPROCESS, folder=tmp_path),
        cached_features(fresh(replace(SMALL, gelu="erf")), split, PREPROCESS, folder=tmp_path),
        cached_features(fresh(), relabelled, PREPROCESS, folder=tmp_path),
        cached_features(fresh(), touched, PREPROCESS, folder=tmp_path),
        cached_features(fresh(), split.select(np.arange(5)), PREPROCESS, folder=tmp_path),
        cached_features(fresh(), split, replace(PREPROCESS, pipeline="decode|central_crop(16)"), folder=tmp_path),
        cached_features(fresh(), split, replace(PREPROCESS, std=(0.5, 0.5, 0.6)), folder=tmp_path),
    ]
    assert len({case.path for case in cases}) == len(cases) == len(list(tmp_path.iterdir()))


def test_the_digest_supports_every_dtype():
    digests = {weights_digest(fresh().to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    assert len(digests) == 3
    assert weights_digest(fresh()) == weights_digest(fresh())
    assert weights_digest(fresh(seed=1)) != weights_digest(fresh())


def torn(path: Path, good: bytes) -> None:
    path.write_bytes(good[: len(good) // 2])


def flipped(path: Path, good: bytes) -> None:
    middle = len(good) // 2
    path.write_bytes(good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :])


def empty(path: Path, good: bytes) -> None:
    path.write_bytes(b"")


def an_array(path: Path, good: bytes) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))


def of_other_images(path: Path, good: bytes) -> None:
    np.savez(path, name=np.array(path.stem), x=np.zeros((3, 12), np.float32), valid=np.ones(3, bool))


def of_another_name(path: Path, good: bytes) -> None:
    np.savez(path, name=np.array("0" * 64), x=np.zeros((PICTURES, 12), np.float32), valid=np.ones(PICTURES, bool))


def of_another_kind(path: Path, good: bytes) -> None:
    np.savez(path, name=np.array(path.stem), x=np.zeros((PICTURES, 12)), valid=np.ones(PICTURES, bool))


@pytest.mark.parametrize("damage", [torn, flipped, empty, an_array, of_other_images, of_another_name, of_another_kind])
def test_damaged_and_mismatched_files_are_computed_again(split, tmp_path, damage):
    counter = Counter()
    first = cached_features(fresh(), split, PREPROCESS, folder=tmp_path, on_event=counter)
    assert first.path is not None
    good = first.path.read_bytes()
    damage(first.path, good)
    second = cached_features(fresh(), split, PREPROCESS, folder=tmp_path, on_event=counter)
    np.testing.assert_array_equal(first.x, second.x)
    assert counter.runs == 2
    cached_features(fresh(), split, PREPROCESS, folder=tmp_path, on_event=counter)
    assert counter.runs == 2


def test_without_a_writable_folder_features_are_returned_uncached(split, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    result = cached_features(fresh(), split, PREPROCESS, folder=tmp_path / "file" / "below")
    assert (result.path, result.x.shape) == (None, (PICTURES, 12))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predict.np, "savez", full)
    assert cached_features(fresh(), split, PREPROCESS, folder=tmp_path / "full").path is None
    assert not (tmp_path / "full").exists()  # nothing half written, not even its folder


def test_the_default_cache_folder(split, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "own"))
    result = cached_features(fresh(), split, PREPROCESS)
    assert result.path is not None
    assert result.path.parent == tmp_path / "own" / "features"


def aged(folder: Path, name: str, days: float, size: int) -> Path:
    """A file that was last used some days ago."""
    path = folder / name
    path.write_bytes(bytes(size))
    used = time.time() - 86400 * days
    os.utime(path, (used, used))
    return path


def test_the_least_recently_used_files_are_removed(split, tmp_path, monkeypatch):
    old = [aged(tmp_path, f"{day:064x}.npz", day, 1000) for day in (1, 2, 3, 4)]
    recent = aged(tmp_path, f"{9:064x}.npz", 0.5 / 24, 50_000)  # within the hour: perhaps another process's
    others = [aged(tmp_path, name, 99, 9000) for name in ("mine.npz", "notes.txt", f"{'A' * 64}.npz")]
    own = cached_features(fresh(), split, PREPROCESS, folder=tmp_path).path
    assert own is not None
    assert all(path.exists() for path in (*old, recent, *others, own))  # there is room for all
    second = replace(PREPROCESS, std=(0.5, 0.5, 0.6))
    one = own.stat().st_size
    monkeypatch.setattr(predict, "MAX_BYTES", 50_000 + 2 * one + 2500)
    kept = cached_features(fresh(), split, second, folder=tmp_path).path
    assert kept is not None
    assert kept.stat().st_size == one
    assert [path.exists() for path in old] == [True, True, False, False]
    monkeypatch.setattr(predict, "MAX_BYTES", 0)
    newest = cached_features(fresh(seed=1), split, PREPROCESS, folder=tmp_path).path
    assert newest is not None
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (recent, *others, own, kept, newest))
    monkeypatch.setattr("vitral.data.cache.IN_USE", -1e9)  # as if the clock of the disk were far behind
    last = cached_features(fresh(seed=2), split, PREPROCESS, folder=tmp_path).path
    assert {*tmp_path.iterdir()} == {last, *others}


def test_reading_counts_as_use(split, tmp_path, monkeypatch):
    first, second = (cached_features(fresh(seed=seed), split, PREPROCESS, folder=tmp_path).path for seed in (0, 1))
    assert first is not None
    assert second is not None
    for path, days in ((first, 3), (second, 2)):
        os.utime(path, (time.time() - 86400 * days,) * 2)
    counter = Counter()
    cached_features(fresh(), split, PREPROCESS, folder=tmp_path, on_event=counter)
    assert counter.runs == 0
    monkeypatch.setattr(predict, "MAX_BYTES", 2.5 * first.stat().st_size)
    cached_features(fresh(seed=2), split, PREPROCESS, folder=tmp_path)
    assert (first.exists(), second.exists()) == (True, False)


def test_incomplete_files_of_killed_processes_are_removed(split, tmp_path):
    with atomic_write(tmp_path / f"{1:064x}.npz") as aside:
        unfinished = aside.name
    abandoned = aged(tmp_path, unfinished, 1, 10)
    growing = aged(tmp_path, unfinished.replace("0" * 8, "1" * 8), 0, 10)
    elsewhere = aged(tmp_path, ".mine.npz.01234567.part", 1, 10)
    cached_features(fresh(), split, PREPROCESS, folder=tmp_path)
    assert (abandoned.exists(), growing.exists(), elsewhere.exists()) == (False, True, True)


def test_a_file_that_cannot_be_removed_is_skipped(split, tmp_path, monkeypatch):
    """Another user's file in a folder of many cannot be removed, and room is made with what can be."""
    stuck, loose = (aged(tmp_path, f"{day:064x}.npz", day, 1000) for day in (2, 1))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(predict, "MAX_BYTES", 0)
    assert cached_features(fresh(), split, PREPROCESS, folder=tmp_path).path is not None
    assert (stuck.exists(), loose.exists()) == (True, False)
