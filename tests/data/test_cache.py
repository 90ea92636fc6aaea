"""The disk cache: validation, atomic writes, and eviction of the least recently used entries."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vitral.data.cache import IN_USE, DiskCache, cache_key

KEYS = [cache_key({"number": number}) for number in range(5)]


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def put(cache: DiskCache, key: str, value: Any, age: float = 0.0) -> None:
    with cache.write(key) as path:
        path.write_text(json.dumps(value))
    stamp = time.time() - age
    os.utime(cache.path(key), (stamp, stamp))


def test_keys_depend_on_every_value_and_not_on_the_order():
    assert cache_key({"a": 1, "b": [2]}) == cache_key({"b": [2], "a": 1})
    assert len({cache_key(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {})}) == 5
    assert len(KEYS[0]) == 64


def test_an_entry_is_read_back_and_a_missing_or_damaged_one_is_none(tmp_path):
    cache = DiskCache(tmp_path / "new" / "folder", ".json")
    assert cache.read(KEYS[0], load) is None
    put(cache, KEYS[0], [1, 2])
    assert cache.read(KEYS[0], load) == [1, 2]
    cache.path(KEYS[0]).write_text("[1, ")
    assert cache.read(KEYS[0], load) is None
    assert cache.read(KEYS[0], lambda path: None) is None


def test_a_write_that_fails_leaves_no_entry(tmp_path):
    cache = DiskCache(tmp_path, ".json")
    with pytest.raises(RuntimeError), cache.write(KEYS[0]) as path:
        path.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_entries_are_removed(tmp_path):
    cache = DiskCache(tmp_path, ".json", limit_bytes=30)
    foreign = tmp_path / "notes.json"
    foreign.write_text("x" * 100)
    os.utime(foreign, (0, 0))
    for key, age in zip(KEYS[:4], (4, 3, 2, 0.5), strict=True):
        put(DiskCache(tmp_path, ".json"), key, "x" * 8, age * IN_USE)
    assert cache.read(KEYS[0], load) == "x" * 8  # used again, so the second is the oldest
    put(cache, KEYS[4], "x" * 8)
    kept = [key for key in KEYS if cache.path(key).exists()]
    assert kept == [KEYS[0], KEYS[3], KEYS[4]]
    assert foreign.exists()


def test_the_new_entry_stays_whatever_its_size(tmp_path):
    cache = DiskCache(tmp_path, ".json", limit_bytes=1)
    put(cache, KEYS[0], "x" * 50, age=2 * IN_USE)
    assert cache.read(KEYS[0], load) == "x" * 50
    put(cache, KEYS[1], "y" * 50)
    assert cache.path(KEYS[1]).exists()


def test_without_a_limit_nothing_but_abandoned_files_is_removed(tmp_path):
    cache = DiskCache(tmp_path, ".json")
    abandoned, running = (tmp_path / f".{KEYS[0]}.json.{name}.part" for name in ("0" * 8, "1" * 8))
    for path in (abandoned, running, other := tmp_path / ".other.part"):
        path.touch()
    os.utime(abandoned, (0, 0))
    os.utime(other, (0, 0))
    for key in KEYS[:3]:
        put(cache, key, 1, age=9 * IN_USE)
    put(cache, KEYS[3], 1)
    assert not abandoned.exists()
    assert running.exists()
    assert other.exists()
    assert all(cache.path(key).exists() for key in KEYS[:4])


def test_a_folder_that_cannot_be_written_raises_an_os_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError), DiskCache(tmp_path / "file", ".json").write(KEYS[0]):
        pass


def aged(folder: Path, name: str, days: float, size: int) -> Path:
    """A file that was last used some days ago."""
    path = folder / name
    path.write_bytes(bytes(size))
    used = time.time() - 86400 * days
    os.utime(path, (used, used))
    return path


def test_concurrent_eviction(tmp_path, monkeypatch):
    """Each starts from the same listing, and none removes more than all of them together should."""
    cache = DiskCache(tmp_path, ".npz", limit_bytes=20_500)
    for number in range(40):
        aged(tmp_path, f"{number:064x}.npz", 1 + number, 1000)
    new = aged(tmp_path, f"{99:064x}.npz", 0, 1000)
    start, listed = threading.Barrier(4), DiskCache._entries

    def together(self: DiskCache) -> list[tuple[bool, float, int, Path]]:
        result = listed(self)
        start.wait()
        return result

    monkeypatch.setattr(DiskCache, "_entries", together)
    threads = [threading.Thread(target=cache._evict, args=(new,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tmp_path.iterdir()) == sorted([new, *(tmp_path / f"{number:064x}.npz" for number in range(19))])
