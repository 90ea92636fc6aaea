"""Augmentation against Pillow's own operations, brute force and statistics."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vitral.data import augment
from vitral.data.augment import FILL, OPERATIONS, erase, flip, randaugment

RNG = np.random.default_rng(3)
COARSE = Image.fromarray(RNG.integers(0, 200, (7, 8, 3), dtype=np.uint8))
IMAGE = np.array(COARSE.resize((96, 80), Image.Resampling.BICUBIC)) // 2 + 30
PILLOW = Image.fromarray(IMAGE)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def enhanced(kind: type, level: float) -> np.ndarray:
    return np.asarray(kind(PILLOW).enhance(0.1 + 1.8 * level))


ORACLES = {
    "autocontrast": lambda level: np.asarray(ImageOps.autocontrast(PILLOW)),
    "equalize": lambda level: np.asarray(ImageOps.equalize(PILLOW)),
    "invert": lambda level: np.asarray(ImageOps.invert(PILLOW)),
    "posterize": lambda level: np.asarray(ImageOps.posterize(PILLOW, min(max(int(4 * level), 1), 8))),
    "solarize": lambda level: np.asarray(ImageOps.solarize(PILLOW, int(256 * level))),
    "brightness": lambda level: enhanced(ImageEnhance.Brightness, level),
    "contrast": lambda level: enhanced(ImageEnhance.Contrast, level),
    "color": lambda level: enhanced(ImageEnhance.Color, level),
    "sharpness": lambda level: enhanced(ImageEnhance.Sharpness, level),
}


@pytest.mark.parametrize("level", [0, 0.3, 1, 1.5, 3])
@pytest.mark.parametrize("name", ORACLES)
def test_colour_operations_match_pillow(name, level):
    got = getattr(augment, name)(IMAGE, level, generator())
    difference = np.abs(got.astype(int) - ORACLES[name](level))
    assert difference.max() <= 1  # where a product is a whole number, but for the last bit
    assert (difference == 0).mean() > 0.97


def test_solarize_add_brightens_the_dark_half():
    expected = np.where(IMAGE < 128, IMAGE.astype(int) + 110, IMAGE).clip(0, 255)
    np.testing.assert_array_equal(augment.solarize_add(IMAGE, 1, generator()), expected)


def signs(move) -> list[np.ndarray]:
    """An operation's two outcomes, one for each side."""
    outcomes = {move(generator(seed)).tobytes(): move(generator(seed)) for seed in range(20)}
    assert len(outcomes) == 2
    return list(outcomes.values())


def matched(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Each outcome is one of the expected ones, but for pixels whose nearest neighbour is a matter of rounding."""
    for one in expected:
        assert max((one == other).all(axis=2).mean() for other in got) > 0.98


def affine(*matrix: float) -> np.ndarray:
    return np.asarray(PILLOW.transform(PILLOW.size, Image.Transform.AFFINE, matrix, fillcolor=(FILL,) * 3))


def test_rotation_matches_pillow():
    got = signs(lambda rng: augment.rotate(IMAGE, 0.5, rng))
    matched(got, [np.asarray(PILLOW.rotate(angle, fillcolor=(FILL,) * 3)) for angle in (15, -15)])


def test_shears_match_pillow():
    got = signs(lambda rng: augment.shear_x(IMAGE, 0.9, rng))
    # Pillow looks at the centres of pixels, half a pixel off.
    matched(got, [affine(1, shear, -shear / 2, 0, 1, 0) for shear in (0.27, -0.27)])
    got = signs(lambda rng: augment.shear_y(IMAGE, 0.9, rng))
    matched(got, [affine(1, 0, 0, shear, 1, -shear / 2) for shear in (0.27, -0.27)])


def test_translations_match_pillow():
    got = signs(lambda rng: augment.translate_x(IMAGE, 1, rng))
    matched(got, [affine(1, 0, move, 0, 1, 0) for move in (43, -43)])  # 100 / 224 of 96
    got = signs(lambda rng: augment.translate_y(IMAGE, 1, rng))
    matched(got, [affine(1, 0, 0, 0, 1, move) for move in (36, -36)])  # 100 / 224 of 80
    assert (augment.translate_x(IMAGE, 3, generator()) == FILL).all()


def test_cutout_greys_one_square():
    white = np.full((80, 96, 3), 255, np.uint8)
    reach = 14  # 40 / 224 of 80
    sizes = []
    for seed in range(300):
        rows, columns = np.nonzero((augment.cutout(white, 1, generator(seed)) == FILL).all(axis=2))
        high, wide = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert high * wide == len(rows)
        sizes.append((high, wide))
    assert max(sizes) == (2 * reach, 2 * reach)
    assert min(min(size) for size in sizes) >= reach


def test_every_operation_is_as_likely(monkeypatch):
    seen = []
    probes = tuple(lambda image, level, rng, n=n: seen.append((n, level)) or image for n in range(len(OPERATIONS)))
    monkeypatch.setattr(augment, "OPERATIONS", probes)
    for seed in range(1600):
        randaugment(IMAGE, generator(seed), 2, 15)
    numbers, levels = zip(*seen, strict=True)
    assert set(levels) == {1.5}
    assert np.bincount(numbers) == pytest.approx(np.full(16, 200), rel=0.3)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("magnitude", [0, 10, 30])
@pytest.mark.parametrize("size", [(1, 1), (2, 9), (24, 31)])
def test_any_image_and_magnitude_keep_their_shape(size, magnitude, channels):
    image = generator().integers(0, 256, (*size, channels), dtype=np.uint8)
    image.flags.writeable = False
    before = image.copy()
    for operation in OPERATIONS:
        got = operation(image, magnitude / 10, generator())
        assert got.shape == image.shape, operation
        assert got.dtype == np.uint8
    np.testing.assert_array_equal(image, before)


def test_the_same_generator_gives_the_same_pixels():
    def augmented(seed: int) -> bytes:
        rng = generator(seed)
        return erase(randaugment(flip(IMAGE, rng), rng, 3, 10), rng, 0.5).tobytes()

    assert [augmented(seed) for seed in range(30)] == [augmented(seed) for seed in range(30)]
    assert len({augmented(seed) for seed in range(30)}) > 25


def test_half_of_the_images_are_mirrored():
    mirrored = np.asarray(ImageOps.mirror(PILLOW))
    outcomes = [flip(IMAGE, generator(seed)) for seed in range(1000)]
    count = sum(np.array_equal(one, mirrored) for one in outcomes)
    assert count + sum(np.array_equal(one, IMAGE) for one in outcomes) == 1000
    assert 450 < count < 550


def test_erasing_takes_one_rectangle_of_the_stated_area():
    grey = np.full((100, 120, 3), 77, np.uint8)
    areas, aspects = [], []
    for seed in range(400):
        rows, columns = np.nonzero((erase(grey, generator(seed), 1) != grey).any(axis=2))
        high, wide = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) > 0.98 * high * wide  # noise equals the grey now and then
        areas.append(high * wide / grey[:, :, 0].size)
        aspects.append(high / wide)
    assert 0.015 < min(areas) < 0.03
    assert 0.30 < max(areas) < 0.34
    assert np.mean(areas) == pytest.approx(0.175, abs=0.015)
    assert min(aspects) > 0.28
    assert max(aspects) < 3.6


def test_erasing_noise_is_uniform_and_as_often_as_asked():
    grey = np.full((60, 60, 1), 77, np.uint8)
    changed = [one for seed in range(600) if (one := erase(grey, generator(seed), 0.25)) is not grey]
    assert len(changed) / 600 == pytest.approx(0.25, abs=0.05)
    noise = np.concatenate([one[one != 77] for one in changed])
    assert noise.mean() == pytest.approx(127.5, abs=1)
    assert noise.std() == pytest.approx(256 / np.sqrt(12), abs=1)
