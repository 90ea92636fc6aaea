"""HEIC through its extra, AVIF by Pillow itself, and what is said without the extra."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

import vitral
from vitral.data.images import ImageError, _register_heif, decode, describe


def picture() -> Image.Image:
    """Smooth, so that a lossy codec keeps it, and different on its four sides."""
    rows, columns = np.mgrid[0:48, 0:64]
    pixels = np.stack([4 * columns, 5 * rows, np.full_like(rows, 60)], 2).clip(0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


@pytest.fixture
def heif() -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()


@pytest.mark.usefixtures("heif")
def test_heic_is_read_as_any_other_image():
    data = encoded(picture(), "HEIF", quality=95)
    assert data[4:8] == b"ftyp"
    pixels = decode(data)
    assert pixels.shape == (48, 64, 3)
    assert np.abs(pixels.astype(int) - np.asarray(picture())).mean() < 4
    facts = describe(data)
    assert (facts.format, facts.width, facts.height, facts.frames) == ("HEIF", 64, 48, 1)
    assert decode(data, 1).shape == (48, 64, 1)
    with pytest.raises(ImageError):
        decode(data[: len(data) // 2])


@pytest.mark.usefixtures("heif")
def test_a_heic_is_turned_upright_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(encoded(picture(), "HEIF", quality=95, exif=exif.tobytes()))
    upright = np.rot90(np.asarray(picture()), -1)
    assert turned.shape == (64, 48, 3)
    assert np.abs(turned.astype(int) - upright).mean() < 4


@pytest.mark.usefixtures("heif")
def test_a_folder_of_heic_is_trained_on(tmp_path):
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            data = encoded(Image.new("RGB", (40, 40), colour), "HEIF")
            (tmp_path / "photos" / name / f"{index}.{['heic', 'HEIF', 'hif', 'heic'][index]}").write_bytes(data)
    report = vitral.check(tmp_path / "photos")
    assert (report.formats, report.unreadable, report.refusal) == ({"HEIF": 8}, (), "")


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    _register_heif.cache_clear()
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as if it were not installed
    data = b"\0\0\0\x18ftypheic" + bytes(40)
    with pytest.raises(ImageError, match=r"^HEIC needs an extra: pip install 'vitral\[heic\]'$"):
        decode(data)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(3):
            picture().save(tmp_path / name / f"{index}.png")
    (tmp_path / "a/phone.HEIC").write_bytes(data)
    (unread,) = vitral.check(tmp_path).unreadable
    assert (unread.path, "vitral[heic]" in unread.reason) == ("a/phone.HEIC", True)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow was built without AVIF")
def test_avif_is_read_without_an_extra(tmp_path: Path):
    data = encoded(picture(), "AVIF", quality=90)
    assert np.abs(decode(data).astype(int) - np.asarray(picture())).mean() < 4
    assert describe(data).format == "AVIF"
