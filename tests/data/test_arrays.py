"""Arrays as images: the order of axes, .npy files compared with NumPy's reader, and files that are damaged."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitral.data.arrays import ImageError, npy_shape
from vitral.data.check import check
from vitral.data.images import channels_of, decode, describe, open_lazily
from vitral.data.pixels import image_array
from vitral.data.sources import open_data
from vitral.errors import UserError


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@given(
    shape=st.one_of(
        st.tuples(*[st.integers(1, 9)] * 2), st.tuples(st.integers(11, 14), st.just(10), st.integers(1, 9))
    ),
    dtype=st.sampled_from(["u1", "<f2", "<f4", ">f4", "<f8"]),
    by_columns=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_a_file_holds_what_numpy_reads(shape, dtype, by_columns, version):
    values = pixels(*shape)
    array = values if dtype == "u1" else (values / 255).astype(dtype)
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array, order="F" if by_columns else "C"), version=version)
    data, channels = stream.getvalue(), (*shape, 1)[2]
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), array)  # NumPy reads what was written
    np.testing.assert_array_equal(decode(data, channels), values.reshape(*shape[:2], channels))
    np.testing.assert_array_equal(open_lazily(data, channels), decode(data, channels))
    facts = describe(data)
    assert (facts.format, facts.height, facts.width, facts.channels) == ("NPY", *shape[:2], channels)
    assert channels_of(data) == channels_of(decode(data, channels)) == (3 if channels == 1 else channels)


def test_one_channel_is_repeated_and_other_counts_are_refused():
    grey, five = npy(pixels(6, 8)), npy(pixels(6, 8, 5))
    np.testing.assert_array_equal(decode(grey, 5), np.repeat(pixels(6, 8)[:, :, None], 5, axis=2))
    for data, channels in ((five, 3), (five, 1), (npy(pixels(6, 8, 3)), 1)):
        with pytest.raises(ImageError, match=f"has [35] channels, not {channels}"):
            decode(data, channels)


@pytest.mark.parametrize(
    "array, says",
    [
        (np.zeros((6, 8, 5), np.uint16), "type uint16, not uint8 or floating-point"),
        (np.zeros((6, 8, 5), np.int8), "type int8"),
        (np.zeros((6, 8, 5), complex), "type complex128"),
        (np.array([["a"]]), "type <U1"),
        (np.full((6, 8, 5), 1.5), "values from 1.5 to 1.5, not 0 to 1"),
        (np.full((6, 8, 5), np.nan), "not 0 to 1"),
        (np.zeros(7, np.uint8), r"shape \(7,\), not \(height, width, channels\)"),
        (np.zeros((2, 6, 8, 3), np.uint8), "not .height, width, channels"),
        (np.zeros((0, 8, 3), np.uint8), "not .height, width, channels"),
        (np.zeros((5, 8, 8), np.uint8), r"\(5, 8, 8\) may begin with the channels"),
        (np.zeros((3, 8, 9), np.uint8), "may begin with the channels"),
    ],
)
def test_arrays_that_are_no_image_are_refused(array, says):
    with pytest.raises(ImageError, match=says):
        decode(npy(array), 5)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "executed"),)

    objects = np.empty((2, 2), object)
    objects[:] = [[Evil(), 1], [2, 3]]
    for data in (npy(objects), b"\x93NUMPY" + pickle.dumps(Evil())):
        with pytest.raises(ImageError):
            decode(data)
    assert not list(tmp_path.iterdir())


def test_a_length_that_contradicts_the_header_allocates_nothing():
    whole = npy(pixels(6, 8, 5))
    huge = whole.replace(b"(6, 8, 5), }", b"(99999999, 99999999, 5), }")
    for data in (whole[:-1], whole + b"x", whole[:20], whole[:8], b"\x93NUMPY", huge):
        with pytest.raises(ImageError):
            npy_shape(data)
        with pytest.raises(ImageError):
            decode(data, 5)


def test_the_limit_of_pixels_holds_for_arrays(monkeypatch):
    monkeypatch.setenv("VITRAL_MAX_PIXELS", "47")
    with pytest.raises(ImageError, match=r"too many pixels .48; VITRAL_MAX_PIXELS is 47"):
        decode(npy(pixels(6, 8, 5)), 5)


@pytest.mark.parametrize("shape", [(5, 8, 8), (200, 8, 8), (3, 6, 8)])
def test_axes_in_doubt_are_refused(shape):
    with pytest.raises(UserError, match="height, width, channels"):
        image_array(pixels(*shape), "it")
    with pytest.raises(UserError, match="channels, height, width"):
        image_array(torch.from_numpy(pixels(*shape[::-1])), "it")
    other = pixels(*shape[1:], shape[0])
    np.testing.assert_array_equal(image_array(other, "it"), other)
    np.testing.assert_array_equal(
        image_array(torch.from_numpy(pixels(*shape)), "it"), pixels(*shape).transpose(1, 2, 0)
    )


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_arrays_beside_other_images_are_left_out(tmp_path):
    picture = io.BytesIO()
    Image.fromarray(pixels(6, 8, 3)).save(picture, "PNG")
    features = npy(np.zeros(7, np.float32))
    mixed = {f"{name}/{i}.png": picture.getvalue() for name in "ab" for i in range(5)}
    mixed |= {name.replace("png", "npy"): features for name in mixed}
    data = open_data(write(tmp_path / "mixed", mixed), held_out=0)
    assert {Path(key).suffix for key in data.train.keys} == {".png"}
    assert "Left out 10 files that are no images (.npy 10)." in data.notes
    arrays = {name: npy(pixels(6, 8, 5)) for name in mixed if name.endswith("npy")}
    assert len(open_data(write(tmp_path / "arrays", arrays), held_out=0).train) == 10


@pytest.mark.parametrize("order", ["npy png cls", "png npy cls"])
def test_arrays_beside_other_images_of_a_shard_are_left_out(tmp_path, order):
    with tarfile.open(tmp_path / "s-000.tar", "w") as archive:
        for name in (f"{number}.{kind}" for number in range(3) for kind in order.split()):
            data = b"0" if name.endswith("cls") else name[-3:].encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    train = open_data(tmp_path / "s-000.tar", held_out=0).train
    assert [train.reader.read(i) for i in range(3)] == [b"png"] * 3


def test_check_compares_arrays(tmp_path):
    rng = np.random.default_rng(0)
    files = {f"{name}/{i}.npy": npy(rng.integers(0, 256, (64, 48, 5), np.uint8)) for name in "ab" for i in range(4)}
    files["b/copy.npy"] = files["a/0.npy"]
    files["a/bad.npy"] = npy(np.zeros((64, 48, 5), np.uint16))
    report = check(str(write(tmp_path, files)))
    assert report.formats == {"NPY": 9}
    assert [image.path for image in report.unreadable] == ["a/bad.npy"]
    assert report.contradictions == (("a/0.npy", "b/copy.npy"),)
    assert not report.near
