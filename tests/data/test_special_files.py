"""Pipes, devices and broken links among images: left out or refused at once, never waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import vitral
from vitral.data.folders import FileReader, find_images
from vitral.data.images import ImageError
from vitral.data.sources import open_images
from vitral.errors import UserError

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """End a test that waits for a pipe."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(300)  # seconds: a busy machine may take some for a test that does not wait
    yield
    signal.alarm(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with two images each, a pipe, a pipe without an extension, links to a device and to nothing."""
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    os.mkfifo(tmp_path / "cats" / "pipe.jpg")
    os.mkfifo(tmp_path / "cats" / "pipe")
    (tmp_path / "cats" / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "dogs" / "gone.png").symlink_to(tmp_path / "nothing.png")
    return tmp_path


def test_regular_files_alone_are_images(folder: Path) -> None:
    listing = find_images(folder)
    assert listing.names == ["cats/0.png", "cats/1.png", "dogs/0.png", "dogs/1.png", "dogs/gone.png"]
    assert listing.notes() == ["Left out 3 files that are no images (not regular files 3)."]
    report = vitral.check(str(folder))
    assert [image.path for image in report.unreadable] == ["dogs/gone.png"]


@pytest.mark.parametrize("name", ["cats/pipe.jpg", "cats/endless.png"])
def test_a_special_file_is_not_read(folder: Path, name: str) -> None:
    with pytest.raises(ImageError, match="not a regular file"):
        FileReader(str(folder), [name]).read(0)
    with pytest.raises(UserError):
        open_images([folder / name])
    (folder / "list.csv").write_text(f"path,label\ncats/0.png,a\ndogs/0.png,b\n{name},a\n")
    assert any("is missing" in note for note in vitral.check(str(folder / "list.csv")).notes)


@pytest.mark.parametrize("name", ["weights.pth", "data.csv", "data.tar", "data.parquet"])
def test_a_pipe_is_no_checkpoint_and_no_data(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError):
        vitral.info(str(tmp_path / name)) if name.endswith("pth") else vitral.check(str(tmp_path / name))
