"""Copy detection: hashes and their table against brute force, the correlation of thumbnails against NumPy."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from scipy.fft import dctn

from vitral.data.copies import (
    CROPS,
    MAX_BITS,
    MIN_COARSE,
    MIN_CORRELATION,
    THUMBNAIL,
    HashTable,
    _best_crop,
    hamming_distance,
    perceptual_hashes,
    signature,
    signatures,
    thumbnail_correlation,
)
from vitral.data.sources import Split
from vitral.data.workers import CHUNK


@dataclass(frozen=True)
class Memory:
    """Encoded images in memory."""

    images: Sequence[bytes]

    def read(self, index: int) -> bytes:
        return self.images[index]

    def mark(self, index: int) -> str:
        return str(index)


def scene(seed: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
    """A smooth random picture, similar to a photograph at low resolution."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def perceptual_hash(thumbnails: np.ndarray) -> np.ndarray:
    """(n, 32, 32) -> (n,)"""
    return perceptual_hashes(thumbnails)[:, 0]


def test_the_hash_compares_low_frequencies_with_their_median():
    pictures = np.random.default_rng(0).integers(0, 256, (9, 32, 32)).astype(np.float64)
    for picture, result in zip(pictures, perceptual_hash(pictures).tolist(), strict=True):
        low = dctn(picture)[1:9, 1:9].ravel()
        bits = "".join("1" if value > np.median(low) else "0" for value in low)
        assert f"{result:064b}" == bits


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.resize((192, 160), Image.Resampling.BICUBIC),
        lambda image: Image.open(encoded(image, 50)),
        lambda image: image.point(lambda value: min(255, int(value * 0.9 + 20))),
    ],
)
def test_hashes_of_copies_are_near_and_others_are_not(change):
    originals = [scene(seed) for seed in range(40)]
    first, second = (
        perceptual_hash(np.stack([np.asarray(image.convert("L").resize((32, 32))) for image in images]))
        for images in (originals, [change(image) for image in originals])
    )
    assert hamming_distance(first, second).max() <= MAX_BITS
    apart = [hamming_distance(first[i : i + 1], second[j : j + 1])[0] for i in range(40) for j in range(40) if i != j]
    assert min(apart) > MAX_BITS


def encoded(image: Image.Image, quality: int) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream


def test_blocks_bound_the_memory(monkeypatch):
    monkeypatch.setattr("vitral.data.copies._BLOCK", 50)
    hashes = np.zeros(40, np.uint64)
    blocks = list(HashTable(hashes).near(hashes, 3))
    assert max(map(len, blocks)) <= 50
    assert sum(map(len, blocks)) == 40 * 40


def test_a_crop_has_the_hash_of_the_cropped_image():
    pictures = np.random.default_rng(0).integers(0, 256, (20, 64, 64), dtype=np.uint8)
    stretches = ((0.0, 0.5), (0.25, 0.75), (0.5, 1.0))  # of 32 pixels each, which need no averaging
    result = perceptual_hashes(pictures, stretches).reshape(20, 3, 3)
    for row, top in enumerate((0, 16, 32)):
        for column, left in enumerate((0, 16, 32)):
            alone = perceptual_hash(pictures[:, top : top + 32, left : left + 32])
            assert np.bitwise_count(alone ^ result[:, row, column]).max() <= 2  # rounding, next to the median
    halved = pictures.reshape(20, 32, 2, 32, 2).mean((2, 4))
    assert np.bitwise_count(perceptual_hash(halved) ^ perceptual_hashes(pictures, ((0.0, 1.0),))[:, 0]).max() <= 2


@given(st.integers(0, 2**32), st.integers(0, MAX_BITS), st.integers(0, 60), st.integers(0, 60))
def test_the_table_finds_all_near_pairs_once(seed, farthest, stored, asked):
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**64, 5, dtype=np.uint64)

    def drawn(n: int) -> np.ndarray:
        hashes = centres[rng.integers(0, 5, n)]
        for _ in range(4):
            hashes ^= np.where(rng.random(n) < 0.6, np.uint64(1) << rng.integers(0, 64, n).astype(np.uint64), 0)
        return hashes

    table, wanted = drawn(stored), drawn(asked)
    result = [tuple(pair) for block in HashTable(table).near(wanted, farthest) for pair in block.tolist()]
    expected = {
        (i, j)
        for i, one in enumerate(wanted.tolist())
        for j, other in enumerate(table.tolist())
        if (one ^ other).bit_count() <= farthest
    }
    assert len(result) == len(set(result))
    assert set(result) == expected


def test_correlation_is_that_of_images_without_their_local_mean():
    first, second = np.random.default_rng(0).integers(0, 256, (2, THUMBNAIL, THUMBNAIL), dtype=np.uint8)

    def details(picture: np.ndarray) -> np.ndarray:
        cells = picture.reshape(16, 4, 16, 4).mean((1, 3))
        around = np.empty_like(cells)
        for i in range(16):
            for j in range(16):
                around[i, j] = cells[max(i - 2, 0) : i + 3, max(j - 2, 0) : j + 3].mean()
        return (cells - around).ravel()

    result = thumbnail_correlation(first, second, (((0.0, 1.0),),))
    ways = (details(second), details(second[:, ::-1]))
    assert result == pytest.approx(max(np.corrcoef(details(first), way)[0, 1] for way in ways), abs=1e-5)


@given(st.integers(0, 2**32))
def test_correlation_ignores_order_mirroring_and_brightness(seed):
    first, second = np.random.default_rng(seed).integers(40, 200, (2, THUMBNAIL, THUMBNAIL), dtype=np.uint8)
    expected = thumbnail_correlation(first, second, (CROPS[:4],))
    assert thumbnail_correlation(second, first, (CROPS[:4],)) == pytest.approx(expected, abs=1e-5)
    assert thumbnail_correlation(first // 2 * 2 + 20, second, (CROPS[:4],)) == pytest.approx(expected, abs=0.02)
    assert thumbnail_correlation(first, first[:, ::-1], (CROPS[:4],)) == pytest.approx(1, abs=1e-5)
    assert thumbnail_correlation(first, np.full_like(first, 9), (CROPS[:4],)) == pytest.approx(0, abs=1e-3)


def test_signatures_are_in_order():
    data = [encoded(scene(seed), 90).getvalue() for seed in range(CHUNK + 20)]
    split = Split("x", list(map(str, range(len(data)))), np.zeros(len(data), np.int64), ("a",), Memory(data))
    chunks = list(signatures(split))
    assert [len(chunk) for chunk in chunks] == [CHUNK, 20]
    thumbnails = np.stack([image.thumbnail for chunk in chunks for image in chunk])
    assert thumbnails.shape == (len(data), THUMBNAIL, THUMBNAIL)
    for image, thumbnail in zip(data, thumbnails, strict=True):
        picture = Image.open(io.BytesIO(image))
        pillow = picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR).convert("L")
        assert np.abs(np.asarray(pillow, int) - thumbnail).max() <= 2


def test_pictures_that_agree_in_coarse_shapes_alone_are_no_copies():
    """As hands of different people in front of one wall; a re-encoded, smaller or cropped copy keeps its details."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)

    def picture(seed: int) -> Image.Image:
        fine = np.random.default_rng(seed).integers(0, 256, (32, 32), dtype=np.uint8)
        layers = (
            np.asarray(Image.fromarray(layer).resize((128, 128), Image.Resampling.BICUBIC), float)
            for layer in (coarse, fine)
        )
        shapes, details = layers
        return Image.fromarray((0.7 * shapes + 0.3 * details).astype(np.uint8)).convert("RGB")

    def thumbnail(image: Image.Image, quality: int = 90) -> np.ndarray:
        return signature(encoded(image, quality).getvalue()).thumbnail

    original, other = thumbnail(picture(1)), thumbnail(picture(2))
    whole = (((0.0, 1.0),),)
    assert _best_crop(original, other, *whole, *whole, 16).score > MIN_COARSE
    assert thumbnail_correlation(original, other) < MIN_CORRELATION
    for copy in (picture(1).resize((72, 72)), picture(1).crop((6, 3, 121, 127)), ImageOps.mirror(picture(1))):
        assert thumbnail_correlation(original, thumbnail(copy, 40)) > MIN_CORRELATION
