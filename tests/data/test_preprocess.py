"""Pipelines: their grammar, their pixels against Pillow, and the statistics of their random crops."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitral.checkpoints.card import Preprocess
from vitral.data.images import decode
from vitral.data.pixels import resize
from vitral.data.preprocess import NumberArgument, as_number, parse_pipeline, parse_preprocess, split_step
from vitral.errors import UserError

SMOOTH = np.random.default_rng(1).integers(0, 256, (12, 16, 3), dtype=np.uint8)
PHOTO = np.array(Image.fromarray(SMOOTH).resize((500, 375), Image.Resampling.BICUBIC))
# Each pixel states its own place, (row, column, 0): a crop's place and size can be read off its corners.
PLACES = np.dstack([*np.mgrid[0:200, 0:250], np.zeros((200, 250))]).astype(np.uint8)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "size", "random"),
    [
        ("decode|resize(224)", (224, 224), False),
        (" decode | resize( 200 , 300, bicubic ) ", (200, 300), False),
        ("decode|resize_small(256)|central_crop(224)", (224, 224), False),
        ("decode|resize_small(256, area)|central_crop(224, 192)", (224, 192), False),
        ("decode|resize_small(448)|random_crop(384)|flip", (384, 384), True),
        ("decode|inception_crop(224)|flip|randaugment(2, 10)|erase(0.25)", (224, 224), True),
        ("decode|inception_crop(96, 128, 0.08, bicubic)", (96, 128), True),
        ("decode|random_resized_crop(96, 128, 0.08, antialias=false)", (96, 128), True),
        ("decode|resize_small(256, antialias=false)|central_crop(224)", (224, 224), False),
        ("decode|flip()|resize(8)", (8, 8), True),
        ("decode|resize(50, 100)|resize_small(20)", (20, 40), False),
        ("decode|resize_short(248, pil_bicubic)|center_crop(224)", (224, 224), False),
        ("decode|resize_short(160)|center_crop(224)", (224, 224), False),
        ("decode|resize_cover(96, 161, pil_lanczos)|center_crop(96, 161)", (96, 161), False),
        ("decode|resize_fit(96, 161)|pad(96, 161, 124, 116, 104)|center_crop(96, 161)", (96, 161), False),
        ("decode|resize(50, 99)|resize_short(20)", (20, 39), False),
        ("decode|resize(50, 100)|resize_fit(40)|pad(30, 30, 7)", (30, 40), False),
    ],
)
def test_a_pipeline_states_its_size_and_whether_it_is_random(text, size, random):
    pipeline = parse_pipeline(text)
    assert pipeline.size == size
    assert pipeline.random == random
    assert pipeline.text == text.strip()
    assert parse_pipeline(pipeline.text) == pipeline
    got = pipeline(PHOTO, generator() if random else None)
    assert got.shape == (*size, 3)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not a step"),
        ("decode|", "not a step"),
        ("decode|resize(224", "not a step"),
        ("resize(224)", "decode must be the first step"),
        ("resize(224)|decode", "decode must be the first step"),
        ("decode|decode|resize(224)", "decode must be the first step"),
        ("decode|resize_smal(256)|central_crop(224)", "did you mean resize_small?"),
        ("decode|centre_crop(224)", "did you mean center_crop?"),
        ("decode|resize_fit(224)", "different sizes"),
        ("decode|resize_fit(224)|pad(224, 224)", "add a step such as central_crop(224)"),
        ("decode|pad(224)", "write pad(h, w[, red, green, blue])"),
        ("decode|pad(24, 24, 256)|center_crop(24)", "red must be whole and from 0 to 255"),
        ("decode|resize(224)|flip_lr", "use flip"),
        ("decode|wobble(3)", "the steps are decode, resize,"),
        ("decode|resize(224, bicubik)", "did you mean bicubic?"),
        ("decode|resize(224, bicubic, antialias=false)", "write resize(h[, w][, method])"),
        ("decode|central_crop(224, antialias=false)", "write central_crop(h[, w])"),
        ("decode|resize()", "write resize(h[, w][, method])"),
        ("decode|resize(22.4)", "write resize(h[, w][, method])"),
        ("decode|resize(-4)", "write resize(h[, w][, method])"),
        ("decode|resize(1, 2, 3)", "write resize(h[, w][, method])"),
        ("decode|resize(0)", "at least 1 pixel"),
        ("decode|resize_small(256, 256)|central_crop(224)", "write resize_small(s[, method])"),
        ("decode|resize_small(256)|central_crop(224, bicubic)", "write central_crop(h[, w])"),
        ("decode|inception_crop(224, 1.5)", "min_area must be from 0 to 1, not 1.5"),
        ("decode|inception_crop(224)|randaugment(2)", "needs magnitude, a number from 0 to 30"),
        ("decode|inception_crop(224)|randaugment(2.5, 10)", "layers must be"),
        ("decode|inception_crop(224)|randaugment(2, 31)", "magnitude must be from 0 to 30"),
        ("decode|inception_crop(224)|erase(2)", "chance must be from 0 to 1"),
        ("decode", "add a step such as resize(224)"),
        ("decode|resize_small(256)", "add a step such as central_crop(256)"),
        ("decode|resize_small(256)|flip", "different sizes"),
        ("decode|resize_small(224)|central_crop(256)", "larger than its input of 224 x 224 pixels"),
        ("decode|resize(100, 300)|random_crop(200)", "larger than its input of 100 x 300 pixels"),
        ("decode|value_range(-1, 1)|resize(224)", "only be the last step"),
    ],
)
def test_a_mistake_is_named_with_its_fix(text, part):
    with pytest.raises(UserError) as caught:
        parse_pipeline(text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


WORDS = st.text("abc019._-", min_size=1, max_size=4)


@given(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.lists(WORDS, max_size=4), st.sampled_from(["", " ", "  "]))
def test_a_step_is_split_into_name_and_arguments(name, words, space):
    inside = f"{space},{space}".join(words)
    assert split_step(f"{name}{space}({space}{inside}{space})") == (name, words)
    assert split_step(name) == (name, [])


@pytest.mark.parametrize("text", ["", "flip(", "flip)", "flip(1)(2)", "flip((1))", "flip flip", "(1)", " flip"])
def test_invalid_steps_are_not_split(text):
    assert split_step(text) is None


@pytest.mark.parametrize("word", ["", "x", "nan", "inf", "-inf", "1e999", "1 2"])
def test_only_finite_numbers_are_numbers(word):
    assert as_number(word) is None
    assert as_number("-2.5e1") == -25


def test_a_number_argument_checks_range_and_wholeness():
    layers, chance = NumberArgument("layers", 1, 16, whole=True), NumberArgument("chance", 0, 1)
    assert [layers.accepts(value) for value in (0, 1, 1.5, 16, 16.5, 17)] == [False, True, False, True, False, False]
    assert [chance.accepts(value) for value in (-0.1, 0, 0.5, 1, 1.1)] == [False, True, True, True, False]
    with pytest.raises(UserError, match=r"layers must be whole and from 1 to 16, not 2\.5\."):
        parse_pipeline("decode|resize(8)|randaugment(2.5, 10)")


@pytest.mark.parametrize(
    ("last", "mean", "std"),
    [
        ("", 0.5, 0.5),
        ("|value_range(-1, 1)", 0.5, 0.5),
        ("|value_range(0, 1)", 0, 1),
        ("|value_range(0, 255)", 0, 1 / 255),
        ("|imagenet_norm", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("|normalize(0.4, 0.2)", 0.4, 0.2),
        ("|normalize(0.1, 0.2, 0.3, 1, 2, 3)", (0.1, 0.2, 0.3), (1, 2, 3)),
    ],
)
def test_normalisation_of_the_last_step(last, mean, std):
    text, got_mean, got_std = parse_preprocess(f"decode|resize(224){last}")
    assert text == "decode|resize(224)"
    np.testing.assert_allclose(got_mean, np.broadcast_to(mean, 3))
    np.testing.assert_allclose(got_std, np.broadcast_to(std, 3))


def test_value_range_ends_where_it_says():
    _, mean, std = parse_preprocess("decode|resize(8)|value_range(-3, 5)", channels=1)
    assert (0 - mean[0]) / std[0] == pytest.approx(-3)
    assert (1 - mean[0]) / std[0] == pytest.approx(5)


@pytest.mark.parametrize(
    "last", ["value_range(1, 0)", "value_range(1)", "imagenet_norm(3)", "normalize(0.5, 0)", "normalize(a, b)"]
)
def test_invalid_normalisations_are_refused(last):
    with pytest.raises(UserError, match="write value_range"):
        parse_preprocess(f"decode|resize(8)|{last}")


def test_normalisations_for_another_number_of_channels_are_refused():
    with pytest.raises(UserError, match="for 3 channels, the images have 1"):
        parse_preprocess("decode|resize(8)|imagenet_norm", channels=1)


def close_to(got: np.ndarray, expected: np.ndarray) -> None:
    difference = np.abs(got.astype(int) - expected)
    assert difference.max() <= 2
    assert (difference == 0).mean() >= 0.99


@pytest.mark.parametrize(
    ("method", "filter"), [("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)]
)
def test_evaluation_pixels_match_pillow(method, filter):
    photo = Image.fromarray(PHOTO)
    square = photo.resize((224, 224), filter)
    close_to(parse_pipeline(f"decode|resize(224, {method})")(PHOTO), np.asarray(square))
    small = photo.resize((331, 248), filter)
    cropped = small.crop((53, 12, 53 + 224, 12 + 224))
    close_to(parse_pipeline(f"decode|resize_small(248, {method})|central_crop(224)")(PHOTO), np.asarray(cropped))


def test_real_photographs_match_pillow(assets):
    pipeline = parse_pipeline("decode|resize_small(248, bicubic)|central_crop(224)")
    files = sorted(Path(assets, "data", "imagenet_val_1000").glob("*/*"))[::50]
    assert files
    for file in files:
        data = file.read_bytes()
        photo = Image.open(io.BytesIO(data)).convert("RGB")
        ratio = 248 / min(photo.size)
        small = photo.resize((round(photo.width * ratio), round(photo.height * ratio)), Image.Resampling.BICUBIC)
        left, top = (small.width - 224) // 2, (small.height - 224) // 2
        close_to(pipeline(decode(data)), np.asarray(small.crop((left, top, left + 224, top + 224))))


def test_a_central_crop_takes_the_middle():
    got = parse_pipeline("decode|central_crop(101, 50)")(PLACES)
    assert got[0, 0].tolist() == [(200 - 101) // 2, 100, 0]
    assert got[-1, -1].tolist() == [49 + 100, 149, 0]


def test_a_crop_enlarges_a_small_image_until_it_fits():
    image = PHOTO[:40, :30]
    got = parse_pipeline("decode|central_crop(80)")(image)
    expected = Image.fromarray(image).resize((80, 107), Image.Resampling.BILINEAR).crop((0, 13, 80, 93))
    assert np.abs(got.astype(int) - np.asarray(expected)).max() <= 2


@pytest.mark.parametrize(
    "steps",
    ["resize_small(64)|central_crop(64)", "resize_short(64)|center_crop(64)", "resize_cover(64)|center_crop(64)"],
)
def test_an_absurdly_long_image_stays_small(steps, monkeypatch):
    sizes = []

    def noted(image, size, method, **options):
        sizes.append(size)
        return resize(image, size, method, **options)

    monkeypatch.setattr("vitral.data.pixels.resize", noted)
    line = np.zeros((1, 60_000, 3), np.uint8)
    line[:, 30_000 - 8 : 30_000 + 8] = 200
    got = parse_pipeline(f"decode|{steps}")(line)
    assert sizes == [(64, 16 * 64)]
    assert got.shape == (64, 64, 3)
    assert (got == 200).all()


STEPS = st.sampled_from(
    [
        "resize({a})",
        "resize({a}, {b}, bicubic)",
        "resize({a}, {b}, area)",
        "resize({a}, {b}, nearest)",
        "resize_small({c})|central_crop({a}, {b})",
        "resize_small({c})|random_crop({a}, {b})",
        "central_crop({a}, {b})",
        "resize_short({c}, pil_bicubic)|center_crop({a}, {b})",
        "resize_cover({a}, {b}, float_bilinear)|center_crop({b}, {a})",
        "resize_fit({a}, {b}, pil_lanczos)|pad({a}, {b}, 124, 116, 104)|center_crop({a}, {b})",
        "random_crop({a}, {b})",
        "inception_crop({a}, {b})",
        "inception_crop({a})|flip|randaugment(2, 10)|erase(0.5)",
    ]
)


@given(
    steps=STEPS,
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    channels=st.sampled_from([1, 3, 4]),
    a=st.integers(2, 60),
    b=st.integers(2, 60),
    seed=st.integers(0, 1000),
)
def test_any_image_comes_out_in_the_stated_size_and_the_same_again(steps, height, width, channels, a, b, seed):
    pipeline = parse_pipeline("decode|" + steps.format(a=a, b=b, c=max(a, b)))
    image = generator(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    kept = image.copy()
    image.flags.writeable = False  # as a memory map is
    got = pipeline(image, generator(seed))
    assert got.shape == (*pipeline.size, channels)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, pipeline(kept, generator(seed)))
    np.testing.assert_array_equal(image, kept)


def test_a_random_pipeline_needs_a_generator():
    with pytest.raises(ValueError, match="needs a generator"):
        parse_pipeline("decode|inception_crop(8)")(PHOTO)


def test_other_seeds_give_other_pixels():
    pipeline = parse_pipeline("decode|inception_crop(32)")
    assert len({pipeline(PHOTO, generator(seed)).tobytes() for seed in range(20)}) == 20


@given(st.sampled_from(["", "|flip"]), st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
def test_a_crop_region_is_what_a_call_resizes(ending, height, width, seed):
    pipeline = parse_pipeline("decode|inception_crop(24, 20)" + ending)
    assert pipeline.ends_in_random_crop
    part, mirrored = pipeline.crop_region(PHOTO[:height, :width], generator(seed))
    image = resize(part, (24, 20))
    np.testing.assert_array_equal(
        image[:, ::-1] if mirrored else image, pipeline(PHOTO[:height, :width], generator(seed))
    )


@pytest.mark.parametrize(
    "text", ["resize(8)", "inception_crop(8, area)", "inception_crop(8)|erase(0.5)", "inception_crop(8)|flip|flip"]
)
def test_not_every_pipeline_ends_in_a_random_crop(text):
    assert not parse_pipeline("decode|" + text).ends_in_random_crop


def crops(text: str, count: int) -> np.ndarray:
    """(count, 4): top, left, bottom, right of the crops, read from the nearest pixel in each corner."""
    pipeline = parse_pipeline(text)
    found = [pipeline(PLACES, generator(seed)) for seed in range(count)]
    return np.array([[*image[0, 0, :2], *image[-1, -1, :2]] for image in found], float)


def areas(text: str, count: int = 6000) -> np.ndarray:
    """(count,): the share of an image of 500 x 375 pixels that each crop covers."""
    pipeline, rng, image = parse_pipeline(text), generator(), np.empty((375, 500, 1), np.uint8)
    regions = [pipeline.crop_region(image, rng).pixels for _ in range(count)]
    return np.array([region.size for region in regions]) / image.size


def tensorflow_area(height: int, width: int, min_area: float, rng: np.random.Generator) -> float:
    """One draw of SampleDistortedBoundingBox, from its description: a square's side is not what is uniform, the height
    is, between the two that the area and the image allow at the drawn aspect ratio."""
    while True:
        aspect = 0.75 + 0.58 * rng.random()
        tallest = min(np.sqrt(height * width / aspect), width / aspect, height)
        high = rng.uniform(np.sqrt(min_area * height * width / aspect), tallest)
        if high * high * aspect >= min_area * height * width:
            return high * high * aspect / (height * width)


def test_inception_crops_are_tensorflows():
    found, rng = areas("decode|inception_crop(224)"), generator(1)
    expected = np.array([tensorflow_area(375, 500, 0.05, rng) for _ in range(6000)])
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        assert (found < share).mean() == pytest.approx((expected < share).mean(), abs=0.03)
    assert found.mean() == pytest.approx(0.343, abs=0.01)
    assert (found < 0.2).mean() == pytest.approx(0.345, abs=0.02)
    assert areas("decode|inception_crop(224, 0.5)", 300).min() >= 0.5


def test_random_resized_crops_are_torchvisions():
    transforms = pytest.importorskip("torchvision.transforms")
    found, image = areas("decode|random_resized_crop(224, 0.05)"), torch.empty(1, 375, 500)
    torch.manual_seed(0)
    boxes = [transforms.RandomResizedCrop.get_params(image, [0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(6000)]
    expected = np.array([high * wide for _, _, high, wide in boxes]) / (375 * 500)
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        assert (found < share).mean() == pytest.approx((expected < share).mean(), abs=0.03)
    assert found.mean() == pytest.approx(0.417, abs=0.01)
    assert (found < 0.2).mean() == pytest.approx(0.21, abs=0.02)
    assert areas("decode|random_resized_crop(224)", 1000).min() == pytest.approx(0.08, abs=0.005)


def test_inception_crops_have_the_stated_shapes_and_offsets():
    top, left, bottom, right = crops("decode|inception_crop(200, nearest)", 1000).T
    high, wide = bottom - top + 1, right - left + 1
    aspect = wide / high
    assert aspect.min() > 0.72
    assert aspect.max() < 1.37
    # Linear, not by the logarithm, whose median would be 1; where areas are small, every shape fits.
    assert np.median(aspect[high * wide < 0.5 * 200 * 250]) == pytest.approx(1.04, abs=0.02)
    assert ((bottom < 199) | (high == 200)).all()  # as TensorFlow's, which never draws the last offset
    assert ((right < 249) | (wide == 250)).all()


@pytest.mark.parametrize("size", [(20, 30), (100, 150), (375, 500), (400, 900)])
def test_a_resize_without_antialiasing_reads_the_four_nearest_pixels(size):
    """Bilinear at half-pixel centres: what tf.image.resize computes, rounded to bytes along each axis."""
    found = parse_pipeline(f"decode|resize({size[0]}, {size[1]}, antialias=false)")(PHOTO)
    rows, columns = (
        np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
        for before, after in zip(PHOTO.shape, size, strict=False)
    )
    y, x = rows.astype(int), columns.astype(int)
    dy, dx = (rows - y)[:, None, None], (columns - x)[:, None]
    below, right = np.minimum(y + 1, 374), np.minimum(x + 1, 499)
    upper = PHOTO[y][:, x] * (1 - dx) + PHOTO[y][:, right] * dx
    lower = PHOTO[below][:, x] * (1 - dx) + PHOTO[below][:, right] * dx
    np.testing.assert_allclose(found, upper * (1 - dy) + lower * dy, atol=1.01)


def test_without_antialiasing_most_pixels_of_a_large_image_do_not_count():
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[1::4] = 255
    plain, smooth = (parse_pipeline(f"decode|resize(8{option})")(stripes) for option in (", antialias=false", ""))
    assert plain.max() == 0
    assert smooth.min() > 50


def test_random_resized_crops_have_the_stated_areas_and_shapes():
    top, left, bottom, right = crops("decode|random_resized_crop(200, 0.05, nearest)", 2000).T
    high, wide = bottom - top + 1, right - left + 1
    area, aspect = high * wide / (200 * 250), wide / high
    assert area.min() >= 0.045
    assert area.max() <= 1
    assert aspect.min() > 0.72
    assert aspect.max() < 1.37
    # Below three quarters every shape fits, so nothing distorts the uniform areas there.
    low = area[area < 0.7]
    assert np.histogram(low, 5, (0.05, 0.7))[0] == pytest.approx(np.full(5, len(low) / 5), rel=0.15)
    assert np.log(aspect[area < 0.7]).mean() == pytest.approx(0, abs=0.02)
    assert (aspect[area < 0.7] > 1).mean() == pytest.approx(0.5, abs=0.04)
    # Anywhere: the share of the free room to the left and above is uniform on average.
    assert (left / (250 - wide + 1)).mean() == pytest.approx(0.5, abs=0.03)
    assert (top / (200 - high + 1)).mean() == pytest.approx(0.5, abs=0.03)


def test_the_minimum_area_can_be_set():
    top, left, bottom, right = crops("decode|inception_crop(200, 0.5, nearest)", 300).T
    assert ((bottom - top + 1) * (right - left + 1)).min() / (200 * 250) > 0.48


def test_an_image_that_fits_no_crop_is_used_whole():
    line = np.arange(250, dtype=np.uint8).reshape(1, 250, 1)
    got = parse_pipeline("decode|inception_crop(2, 250, 1, nearest)")(line, generator())
    np.testing.assert_array_equal(got[0], line[0])


def test_random_crops_are_uniform():
    top, left, bottom, right = crops("decode|random_crop(198, 249)", 600).T
    assert (bottom - top == 197).all()
    assert (right - left == 248).all()
    assert np.bincount(top.astype(int), minlength=3) == pytest.approx([200] * 3, rel=0.2)
    assert np.bincount(left.astype(int), minlength=2) == pytest.approx([300] * 2, rel=0.2)


def test_a_card_scaled_to_another_size_is_still_a_pipeline():
    card = Preprocess("decode|resize_small(248, bicubic)|central_crop(224)", (0.5,) * 3, (0.5,) * 3)
    for size in [(384, 384), (96, 160)]:
        assert parse_pipeline(card.adapted((224, 224), size, 3).pipeline).size == size
