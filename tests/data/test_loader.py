"""Batches: the same rows for any number of ranks and workers and from any step on; padding, bad images, clean ends."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from runs import make_pictures

from vitral.atomic import atomic_write
from vitral.data import cache, loader
from vitral.data.cache import decode_once
from vitral.data.images import ImageError, decode
from vitral.data.loader import (
    Batch,
    balanced_order,
    batch_indices,
    default_workers,
    evaluation_batches,
    example_rng,
    training_batches,
)
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.events import Event, Note, Progress
from vitral.recipe import Recipe
from vitral.training.parallel import World
from vitral.training.setup import worker_count

# torch warns where there are fewer cores than workers; what is tested here holds there too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RANDOM = parse_pipeline("decode|random_crop(12)|flip")
PLAIN = parse_pipeline("decode|central_crop(12)")
SETTINGS = {"batch": 7, "seed": 3, "first_step": 0, "last_step": 6}


@dataclass(frozen=True)
class InMemory:
    """Encoded images, pixels, or None for one that is not there."""

    images: tuple[bytes | np.ndarray | None, ...]
    version: str = "1"

    def read(self, index: int) -> bytes | np.ndarray:
        found = self.images[index]
        if found is None:
            raise ImageError("not there")
        return found

    def mark(self, index: int) -> str:
        return self.version


def a_split(n: int = 17, bad: dict[int, bytes | None] | None = None, version: str = "1") -> Split:
    """Noise of different sizes as PNG files; `bad` replaces some."""
    rng = np.random.default_rng(0)
    images = [png(rng.integers(0, 256, (13 + index % 4, 15 + index % 3, 3), np.uint8)) for index in range(n)]
    files = tuple((bad or {}).get(index, data) for index, data in enumerate(images))
    return split_of(files, version)


def split_of(images: tuple[bytes | np.ndarray | None, ...], version: str = "1") -> Split:
    labels = np.arange(len(images), dtype=np.int64) % 3
    return Split("train", [f"{i}.png" for i in range(len(images))], labels, ("a", "b", "c"), InMemory(images, version))


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def decoded(split: Split, index: int, channels: int = 3) -> np.ndarray:
    data = split.reader.read(index)
    assert isinstance(data, bytes)
    return decode(data, channels)


def equal(ours: Batch, theirs: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def all_equal(ours: Iterator[Batch], theirs: Iterator[Batch]) -> bool:
    return all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def children() -> list[BaseProcess]:
    return multiprocessing.active_children()


@pytest.fixture
def no_child_is_left() -> Iterator[None]:
    assert not children()
    yield
    assert not children()


def test_a_batch_is_what_a_plain_loop_makes():
    split = a_split()
    batches = list(training_batches(split, RANDOM, **SETTINGS))
    assert len(batches) == 6
    for step, batch in enumerate(batches):
        assert batch.images.shape == (7, 3, 12, 12)
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.valid.all()
        indices = batch_indices(17, 7, step, 3)
        for position, index in enumerate(indices.tolist()):
            expected = RANDOM(decoded(split, index), example_rng(3, step, position))
            assert np.array_equal(batch.images[position].numpy(), expected.transpose(2, 0, 1))
            assert batch.labels[position] == index % 3
            assert batch.indices[position] == index


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_together_read_the_batch_of_one(world: int):
    split = a_split()
    ranks = [training_batches(split, RANDOM, **SETTINGS, rank=rank, world=world) for rank in range(world)]
    whole = training_batches(split, RANDOM, **SETTINGS)
    assert all(equal(joined(list(parts)), batch) for *parts, batch in zip(*ranks, whole, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int, no_child_is_left: None):
    split = a_split(bad={4: b"no image"})
    own = training_batches(split, RANDOM, **SETTINGS)
    assert all_equal(own, training_batches(split, RANDOM, **SETTINGS, workers=workers))
    own = evaluation_batches(split, PLAIN, batch=5)
    assert all_equal(own, evaluation_batches(split, PLAIN, batch=5, workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_prefetch_do_not_overwrite_the_current_batch(workers: int, monkeypatch: pytest.MonkeyPatch):
    def late(items: Sized, workers: int) -> Iterator[Any]:
        for item in iterate_in_workers(items, workers):
            time.sleep(0.01)  # the workers have made by now all that they were asked for
            yield item

    split, iterate_in_workers = a_split(), loader.iterate_in_workers
    whole = list(training_batches(split, RANDOM, **{**SETTINGS, "last_step": 20}))
    monkeypatch.setattr(loader, "iterate_in_workers", late)
    slow = list(training_batches(split, RANDOM, **{**SETTINGS, "last_step": 20}, workers=workers))
    assert all_equal(iter(slow), iter(whole))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_may_be_forked_or_spawned(method: str, no_child_is_left: None):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform cannot {method}")
    before, split = multiprocessing.get_start_method(allow_none=True), a_split()
    multiprocessing.set_start_method(method, force=True)
    try:
        batches = list(training_batches(split, RANDOM, **SETTINGS, workers=1))
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert all_equal(iter(batches), training_batches(split, RANDOM, **SETTINGS))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_reads_what_the_whole_run_reads(workers: int):
    split = a_split()
    whole = list(training_batches(split, RANDOM, **SETTINGS))
    later = training_batches(split, RANDOM, **{**SETTINGS, "first_step": 4}, workers=workers)
    assert all_equal(later, iter(whole[4:]))
    assert list(training_batches(split, RANDOM, **{**SETTINGS, "first_step": 6}, workers=workers)) == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mix_partner_puts_the_row_before_the_slice_first(world: int):
    split = a_split()
    whole = list(training_batches(split, RANDOM, **SETTINGS))
    for rank in range(world):
        own = list(training_batches(split, RANDOM, **SETTINGS, rank=rank, world=world))
        more = list(training_batches(split, RANDOM, **SETTINGS, rank=rank, world=world, mix_partner=True))
        before = 7 * rank // world - 1
        for batch, rows, extra in zip(whole, own, more, strict=True):
            front = Batch(*(tensor[[before]] for tensor in batch))
            assert equal(extra, joined([front, rows]))


def test_an_order_selects_or_repeats_examples():
    split = a_split(12)
    order = np.array([2, 2, 5, 11])
    drawn = joined(list(training_batches(split, RANDOM, batch=4, seed=0, first_step=0, last_step=3, order=order)))
    assert sorted(drawn.indices.tolist()) == sorted(3 * order.tolist())
    assert torch.equal(drawn.labels, drawn.indices % 3)
    rare = Split("train", split.keys, np.array([0] * 10 + [1, 2]), split.classes, split.reader)
    order = balanced_order(rare.labels, 0)
    epoch = joined(list(training_batches(rare, RANDOM, batch=10, seed=0, first_step=0, last_step=3, order=order)))
    assert torch.bincount(epoch.labels).tolist() == [10, 10, 10]


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 23), world=st.integers(1, 5), batch=st.integers(1, 9))
def test_evaluation_sees_each_example_once(n: int, world: int, batch: int):
    split = split_of(tuple(np.full((12, 12, 3), index, np.uint8) for index in range(n)))
    ranks = [list(evaluation_batches(split, PLAIN, batch=batch, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    together = joined([part for batches in ranks for part in batches])
    assert {len(part.valid) for batches in ranks for part in batches} == {min(batch, -(-n // world))}
    seen = together.valid
    assert together.indices[seen].tolist() == list(range(n))
    assert together.labels[seen].tolist() == [index % 3 for index in range(n)]
    assert torch.equal(together.images[seen].amax((1, 2, 3)), torch.arange(n, dtype=torch.uint8))
    assert (together.indices[~seen] == loader.PADDING).all()
    assert not together.images[~seen].any()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_zero_and_not_valid(workers: int):
    split = a_split(6, bad={1: None, 4: b"text, not pixels"})
    (batch,) = evaluation_batches(split, PLAIN, batch=6, workers=workers)
    assert batch.valid.tolist() == [True, False, True, True, False, True]
    assert batch.indices.tolist() == list(range(6))
    assert not batch.images[~batch.valid].any()
    assert batch.images[batch.valid].flatten(1).any(1).all()


def test_several_labels_and_grey_pixels():
    labels = np.eye(4, dtype=np.uint8)
    grey = tuple(np.full((12, 12, 1), 40 * index, np.uint8) for index in range(4))
    split = Split("train", list("abcd"), labels, tuple("wxyz"), InMemory(grey))
    (batch,) = evaluation_batches(split, PLAIN, batch=4)
    assert batch.labels.dtype == torch.uint8
    assert torch.equal(batch.labels, torch.eye(4, dtype=torch.uint8))
    assert torch.equal(batch.images, torch.arange(0, 160, 40, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 12, 12))
    (batch,) = evaluation_batches(split, PLAIN, batch=4, channels=1)
    assert batch.images.shape == (4, 1, 12, 12)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_user_error_in_a_worker_is_one_sentence(workers: int):
    coloured = split_of((np.zeros((12, 12, 3), np.uint8),))
    with pytest.raises(UserError, match=r"^[^\n]* has 3 channels and the model takes 1[^\n]*$"):
        list(evaluation_batches(coloured, PLAIN, batch=1, channels=1, workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_generator_of_dropout(workers: int):
    before = torch.get_rng_state()
    list(training_batches(a_split(), RANDOM, **SETTINGS, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_batches_are_the_same_however_workers_start(start: str, monkeypatch):
    """Children that are forked inherit their memory; others get it by name."""
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} on this system")
    expected = list(training_batches(a_split(), RANDOM, **SETTINGS))
    usual = multiprocessing.get_start_method()
    if start == "fork":
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared", None)  # no room in /dev/shm is asked for
    multiprocessing.set_start_method(start, force=True)
    try:
        assert all_equal(training_batches(a_split(), RANDOM, **SETTINGS, workers=2), iter(expected))
    finally:
        multiprocessing.set_start_method(usual, force=True)


def test_small_splits_allocate_small_batches():
    (batch,) = evaluation_batches(a_split(5), PLAIN, batch=10**9)
    assert batch.images.shape == (5, 3, 12, 12)
    parts = [list(evaluation_batches(a_split(5), PLAIN, batch=10**9, rank=rank, world=2)) for rank in range(2)]
    assert [[part.indices.tolist() for part in own] for own in parts] == [[[0, 1, -1]], [[2, 3, 4]]]


@dataclass(frozen=True)
class Signed:
    """Every picture shows who read it."""

    def read(self, index: int) -> np.ndarray:
        return np.full((12, 12, 3), os.getpid() % 251, np.uint8)

    def mark(self, index: int) -> str:
        return ""


def test_each_worker_keeps_to_its_own_buffers():
    split = Split("train", ["a"] * 40, np.zeros(40, np.int64), ("a",), Signed())
    found = evaluation_batches(split, PLAIN, batch=2, workers=3)
    writers = [int(batch.images[0, 0, 0, 0]) for batch in found]
    assert len(set(writers)) == 3
    for item, writer in enumerate(writers):
        assert writer == writers[item % loader.buffer_count(3)]


def test_stopping_early_leaves_no_process(no_child_is_left: None):
    batches = training_batches(a_split(), RANDOM, **{**SETTINGS, "last_step": 1000}, workers=2)
    next(batches)
    assert len(children()) == 2
    batches.close()  # type: ignore[attr-defined]
    assert not children()


def test_an_error_of_the_consumer_leaves_no_process(no_child_is_left: None):
    def consume() -> None:
        for _ in training_batches(a_split(), RANDOM, **{**SETTINGS, "last_step": 1000}, workers=2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()


@dataclass(frozen=True)
class Stuck:
    """The first picture is read, the others never."""

    def read(self, index: int) -> np.ndarray:
        if index:
            time.sleep(600)
        return np.zeros((12, 12, 3), np.uint8)

    def mark(self, index: int) -> str:
        return ""


def test_a_worker_that_does_not_end_is_killed(no_child_is_left: None, monkeypatch: pytest.MonkeyPatch):
    """torch waits for it, then sends SIGTERM, to which our workers are deaf, and waits as long again."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    split = Split("train", ["a"] * 4, np.zeros(4, np.int64), ("a",), Stuck())
    batches = evaluation_batches(split, PLAIN, batch=1, workers=1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_a_signal_to_the_whole_group(number: signal.Signals, no_child_is_left: None):
    whole = list(training_batches(a_split(), RANDOM, **SETTINGS))
    batches = training_batches(a_split(), RANDOM, **SETTINGS, workers=1)
    first = next(batches)
    for child in children():
        os.kill(child.pid, number)  # type: ignore[arg-type]
    time.sleep(0.1)
    assert all_equal(iter([first, *batches]), iter(whole))


@pytest.mark.parametrize(
    "cores, device, ranks, expected",
    [(2, "cpu", 1, 0), (8, "cpu", 1, 1), (8, "cpu", 4, 0), (16, "cuda", 1, 15), (16, "cuda", 8, 1), (1, "cuda", 4, 1)],
)
def test_workers_by_default(cores: int, device: str, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_workers(device, ranks) == expected


def test_machines_count_their_own_processes(monkeypatch):
    """Four machines of 64 cores and 8 processes each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    world = World(rank=0, size=32, device=torch.device("cuda"))
    assert worker_count(Recipe(), world) == 7


@pytest.mark.parametrize("workers, channels", [(0, 3), (2, 3), (0, 1)])
def test_decode_once_has_the_same_pixels(workers: int, channels: int, tmp_path: Path, no_child_is_left: None):
    split, events = a_split(), []
    kept, unreadable = decode_once(split, tmp_path, channels=channels, workers=workers, on_event=events.append)
    assert unreadable == []
    assert events == [Progress("reading train", done, 17) for done in range(1, 18)]
    assert kept.fingerprint() == split.fingerprint()
    for index in range(17):
        assert np.array_equal(kept.reader.read(index), decoded(split, index, channels))
    common = {**SETTINGS, "channels": channels}
    assert all_equal(
        training_batches(split, RANDOM, **common), training_batches(kept, RANDOM, **common, workers=workers)
    )


def test_decode_once_leaves_out_what_cannot_be_read(tmp_path: Path):
    split = a_split(6, bad={1: None, 4: b"text, not pixels"})
    first, second = decode_once(split, tmp_path), decode_once(split, tmp_path)
    for kept, unreadable in (first, second):
        assert [image.path for image in unreadable] == ["1.png", "4.png"]
        assert all(image.reason for image in unreadable)
        assert list(kept.keys) == ["0.png", "2.png", "3.png", "5.png"]
        assert kept.labels.tolist() == [0, 2, 0, 2]
        assert np.array_equal(kept.reader.read(2), decoded(split, 3))


def test_decode_once_decodes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    decode_once(a_split(), tmp_path)
    monkeypatch.setattr(cache, "read_pixels", None)
    kept, _ = decode_once(a_split(), tmp_path)
    assert np.array_equal(kept.reader.read(16), decoded(a_split(), 16))


def test_a_changed_image_is_decoded_again(tmp_path: Path):
    decode_once(a_split(), tmp_path)
    changed = np.full((20, 20, 3), 7, np.uint8)
    kept, _ = decode_once(a_split(bad={0: png(changed)}, version="2"), tmp_path)
    assert np.array_equal(kept.reader.read(0), changed)


@pytest.mark.parametrize("damage", ["short", "torn index", "empty"])
def test_a_damaged_file_is_written_again(damage: str, tmp_path: Path):
    split = a_split()
    decode_once(split, tmp_path)
    (pixels,) = tmp_path.glob("*.bin")
    sound = pixels.read_bytes()
    if damage == "torn index":
        pixels.write_bytes(sound[:-100] + bytes(92) + sound[-8:])
    else:
        os.truncate(pixels, len(sound) - 1 if damage == "short" else 0)
    kept, _ = decode_once(split, tmp_path)
    assert np.array_equal(kept.reader.read(16), decoded(split, 16))
    assert pixels.read_bytes() == sound


def test_changes_to_read_pixels_do_not_reach_the_file(tmp_path: Path):
    split = a_split()
    kept, _ = decode_once(split, tmp_path)
    np.asarray(kept.reader.read(0))[:] = 0
    again, _ = decode_once(split, tmp_path)
    assert np.array_equal(again.reader.read(0), decoded(split, 0))


def test_too_large_a_split_stays_as_it_is(tmp_path: Path):
    split = a_split()
    size = sum(decoded(split, index).size for index in range(17))
    assert decode_once(split, tmp_path, limit_bytes=size - 1) == (split, [])
    assert not list(tmp_path.iterdir())
    kept, _ = decode_once(split, tmp_path, limit_bytes=size)
    assert kept is not split


def test_a_limit_passed_on_the_way_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "SAMPLE", 1)
    split = split_of((png(np.zeros((4, 4, 3), np.uint8)), png(np.zeros((400, 400, 3), np.uint8))))
    assert decode_once(split, tmp_path, limit_bytes=1000) == (split, [])
    assert not list(tmp_path.iterdir())


def test_pixels_in_memory_stay_there(tmp_path: Path):
    split = split_of((np.zeros((4, 4, 3), np.uint8),) * 3)
    assert decode_once(split, tmp_path) == (split, [])


def test_a_full_disk_leaves_the_split_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    split = a_split()
    notes: list[Event] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert decode_once(split, tmp_path, on_event=notes.append) == (split, [])
    assert notes[-1] == Note(
        f"not enough disk space in {tmp_path} for decoded train images: they are decoded again in every epoch"
    )
    notes.clear()
    assert not list(tmp_path.iterdir())
    size = sum(decoded(split, index).size for index in range(17))
    for free, kept in ((2 * size - 1, False), (2 * size, True)):
        monkeypatch.setattr(cache, "_free_bytes", lambda folder, free=free: free)
        assert (decode_once(split, tmp_path / "not-there-yet", on_event=notes.append)[0] is not split) is kept
        assert (tmp_path / "not-there-yet").exists() is kept
    assert sum(isinstance(event, Note) for event in notes) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a folder"):
        decode_once(a_split(), tmp_path / "file")


def test_large_files_of_pixels_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notes: list[Event] = []
    decode_once(a_split(), tmp_path / "quiet", on_event=notes.append)
    assert not any(isinstance(event, Note) for event in notes)
    size = sum(decoded(a_split(), index).size for index in range(17))
    monkeypatch.setattr(cache, "LARGE", size - 1)
    decode_once(a_split(), tmp_path, on_event=notes.append)
    assert notes[-1] == Note(f"decoded train images take {size / 1e9:.1f} GB in {tmp_path} until the run ends")


def test_only_abandoned_files_are_removed(tmp_path: Path):
    unfinished = [atomic_write(tmp_path / name) for name in (f"{16 * 'a'}.bin", f"{16 * 'b'}.bin")]
    old, new = [writing.__enter__() for writing in unfinished]
    os.utime(old, (0, 0))
    decode_once(a_split(), tmp_path)
    assert not old.exists()
    assert new.exists()


def test_the_folder_of_the_pixels_is_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file's name is the folder's to keep, also after a power cut."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    decode_once(a_split(), tmp_path)
    written = [*tmp_path.glob("*.bin"), tmp_path]
    assert flushed == [path.stat().st_ino for path in written]


HOLDING = """
import sys
from vitral.data.loader import training_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import open_data

split = open_data(sys.argv[1], held_out=0).train
pipeline = parse_pipeline("decode|resize(8)")
stream = training_batches(split, pipeline, batch=2, seed=0, first_step=0, last_step=1000, workers=2)
next(stream)
"""


@pytest.mark.skipif(os.name == "nt", reason="workers are forked")
def test_a_program_that_still_holds_a_loader_ends(tmp_path):
    script = tmp_path / "holding.py"
    script.write_text(HOLDING)
    pictures = make_pictures(tmp_path / "pictures")
    words = [sys.executable, "-W", "ignore", str(script), str(pictures)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environment, timeout=600, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
