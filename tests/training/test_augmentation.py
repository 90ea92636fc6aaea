"""Augmentation of whole batches against the augmentation of single images, brute force and statistics."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitral.data import augment
from vitral.data.augment import FILL, OPERATIONS
from vitral.data.preprocess import parse_pipeline
from vitral.errors import UserError
from vitral.models.model import normalize
from vitral.training import augmentation
from vitral.training.augmentation import affine, apply_operations, parse_augmentation, shifted, square

ALL = "shift(3)|flip|randaugment(2, 10)|erase(0.5)|cutout(5)"
NUMBERS = {operation.__name__: number for number, operation in enumerate(OPERATIONS)}
MOVES = ("rotate", "shear_x", "shear_y")  # which pixel is nearest to a place between two is a matter of rounding


class Drawn:
    """A generator of the numbers that are put into it."""

    def __init__(self, sign: int, *numbers: int) -> None:
        self.side = 0.25 if sign > 0 else 0.75
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.side

    def integers(self, high: int) -> int:
        return self.numbers.pop(0)


def photos(count: int, channels: int = 3, height: int = 24, width: int = 31) -> Tensor:
    """Smooth pictures, some dark and some bright, so that histograms and borders matter."""
    rng = np.random.default_rng(count)
    coarse = torch.from_numpy(rng.random((count, channels, 4, 5), dtype=np.float32))
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    low, high = torch.from_numpy(rng.integers(0, 90, (2, count, 1, 1, 1)))
    return (low + (255 - low - high) * fine).to(torch.uint8)


def alone(operation: augment.Operation, image: Tensor, level: float, drawn: Drawn) -> Tensor:
    """(c, h, w) -> (c, h, w), by the function for single images."""
    rng: np.random.Generator = drawn  # type: ignore[assignment]
    pixels = operation(image.permute(1, 2, 0).contiguous().numpy(), level, rng)
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)


def drawn_for(images: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """signs, rows and columns (b,)"""
    rng = np.random.default_rng(seed)
    count, _, height, width = images.shape
    numbers = rng.choice([-1, 1], count), rng.integers(height, size=count), rng.integers(width, size=count)
    signs, rows, columns = (torch.from_numpy(one) for one in numbers)
    return signs, rows, columns


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("level", [0, 0.3, 1, 1.5, 2.8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_that_of_single_images(operation, level, channels):
    images = photos(8, channels)
    signs, rows, columns = drawn_for(images)
    kinds = torch.full((8,), NUMBERS[operation.__name__])
    got = apply_operations(images, kinds, signs, rows, columns, level)
    drawn = [Drawn(*numbers) for numbers in torch.stack([signs, rows, columns], dim=1).tolist()]
    expected = torch.stack([alone(operation, one, level, two) for one, two in zip(images, drawn, strict=True)])
    difference = (got.int() - expected.int()).abs()
    if operation.__name__ not in MOVES:
        assert difference.max() <= 1  # where a product is a whole number, but for the last bit
    assert (difference == 0).float().mean() > 0.97


def test_every_image_of_a_batch_has_its_own_operation():
    images = photos(32)
    signs, rows, columns = drawn_for(images)
    kinds = torch.arange(32) % 16
    got = apply_operations(images, kinds, signs, rows, columns, 0.3)
    for row in range(32):
        one = slice(row, row + 1)
        single = apply_operations(images[one], kinds[one], signs[one], rows[one], columns[one], 0.3)
        assert torch.equal(got[one], single), OPERATIONS[kinds[row]].__name__
        assert not torch.equal(got[one], images[one]), OPERATIONS[kinds[row]].__name__


@pytest.mark.parametrize("channels", [1, 3])
def test_the_order_in_memory_changes_no_pixel(channels):
    images = photos(16, channels)
    other = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as a loader's batch lies
    drawn = (torch.arange(16), *drawn_for(images))
    assert torch.equal(apply_operations(other, *drawn, 1.5), apply_operations(images, *drawn, 1.5))


@pytest.mark.parametrize("value", [0, 77, 255])
def test_a_picture_of_one_colour_has_no_histogram_to_change(value):
    images = torch.full((2, 3, 20, 20), value, dtype=torch.uint8)
    kinds = torch.tensor([NUMBERS["autocontrast"], NUMBERS["equalize"]])
    assert torch.equal(apply_operations(images, kinds, *drawn_for(images), 1), images)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_shift_is_a_crop_of_the_mirrored_picture(height, width, data):
    down = data.draw(st.integers(1 - height, height - 1))
    right = data.draw(st.integers(1 - width, width - 1))
    images = photos(2, 3, height, width)
    got = shifted(images, torch.tensor([down, 0]), torch.tensor([right, 0]))
    around = ((0, 0), (height - 1, height - 1), (width - 1, width - 1))
    padded = np.pad(images[0].numpy(), around, mode="reflect")
    top, left = height - 1 - down, width - 1 - right
    np.testing.assert_array_equal(got[0], padded[:, top : top + height, left : left + width])
    assert torch.equal(got[1], images[1])


@given(st.lists(st.integers(-8, 8), min_size=12, max_size=12))
def test_affine_finds_the_nearest_pixel(eighths):
    images = photos(2, 1, 6, 7)
    matrices = torch.tensor(eighths).view(2, 2, 3) / 8 * torch.tensor([1.0, 1.0, 9.0])  # exact in binary
    expected = torch.full_like(images, FILL)
    for image in range(2):
        for y in range(6):
            for x in range(7):
                row, column = (matrices[image] @ torch.tensor([y, x, 1.0]) + 0.5).floor().int().tolist()
                if 0 <= row < 6 and 0 <= column < 7:
                    expected[image, 0, y, x] = images[image, 0, row, column]
    assert torch.equal(affine(images, matrices), expected)


@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_square_lies_about_its_pixel(side):
    images = photos(4, 2, 6, 7)
    rows, columns = [0, 5, 2, 3], [0, 6, 3, 1]
    got = square(images, torch.tensor(rows), torch.tensor(columns), side)
    expected = np.zeros((4, 1, 6, 7), bool)
    for image, (row, column) in enumerate(zip(rows, columns, strict=True)):
        top, left = row - side // 2, column - side // 2
        expected[image, 0, max(top, 0) : top + side, max(left, 0) : left + side] = True
    np.testing.assert_array_equal(got, expected)


def places(count: int, height: int, width: int) -> Tensor:
    """Each pixel states its own place, (row, column)."""
    grid = torch.from_numpy(np.mgrid[0:height, 0:width].astype(np.uint8))
    return grid.expand(count, 2, height, width)


def uniform(numbers: Tensor, kinds: int) -> None:
    """Pearson's statistic of the counts, within five of its standard deviations."""
    counts = numbers.long().bincount(minlength=kinds).double()
    mean = counts.sum() / kinds
    assert len(counts) == kinds
    assert abs(((counts - mean) ** 2 / mean).sum() - (kinds - 1)) < 5 * (2 * (kinds - 1)) ** 0.5


def test_shifts_are_uniform_in_both_directions():
    torch.manual_seed(0)
    images = places(9000, 7, 9)
    got = parse_augmentation("shift(2)")(images)
    down, right = (3 - got[:, 0, 3, 4].int()), (4 - got[:, 1, 3, 4].int())
    uniform((down + 2) * 5 + right + 2, 25)


def test_half_of_the_images_are_mirrored():
    torch.manual_seed(0)
    images = photos(1, 3, 4, 5).expand(4000, -1, -1, -1)
    got = parse_augmentation("flip")(images)
    mirrored = (got == images.flip(-1)).flatten(1).all(1)
    assert (mirrored | (got == images).flatten(1).all(1)).all()
    uniform(mirrored, 2)


def test_every_operation_side_and_place_is_as_likely(monkeypatch):
    seen: list[Tensor] = []
    levels: list[float] = []

    def record(images: Tensor, kinds: Tensor, signs: Tensor, row: Tensor, column: Tensor, level: float) -> Tensor:
        seen.append(torch.stack([kinds, signs, row, column]))
        levels.append(level)
        return images

    monkeypatch.setattr(augmentation, "apply_operations", record)
    torch.manual_seed(0)
    parse_augmentation("randaugment(3, 15)")(photos(1, 1, 3, 4).expand(2000, -1, -1, -1))
    assert levels == [1.5] * 3
    kinds, signs, rows, columns = torch.cat(seen, dim=1)
    assert set(signs.tolist()) == {-1, 1}
    uniform(((kinds * 2 + (signs > 0)) * 3 + rows) * 4 + columns, 16 * 2 * 3 * 4)
    uniform(seen[0][0] * 16 + seen[1][0], 256)  # an image's second operation does not depend on its first


def test_cut_out_squares_are_anywhere():
    torch.manual_seed(0)
    got = parse_augmentation("cutout(1)")(torch.zeros(6000, 1, 5, 6, dtype=torch.uint8))
    assert ((got == FILL).sum(dim=(1, 2, 3)) == 1).all()
    uniform((got == FILL).flatten(1).int().argmax(1), 30)


def test_erasing_takes_one_rectangle_of_the_stated_area():
    torch.manual_seed(0)
    images = torch.full((600, 3, 64, 80), 77, dtype=torch.uint8)
    got = parse_augmentation("erase(1)")(images)
    changed = (got != images).any(dim=1)
    rows, columns = changed.any(dim=2), changed.any(dim=1)
    high, wide = rows.sum(1), columns.sum(1)
    first, last = columns.int().argmax(1), 79 - columns.flip(1).int().argmax(1)
    assert torch.equal(last - first + 1, wide)  # no gap
    shares, areas = changed.sum(dim=(1, 2)) / (high * wide), high * wide / (64 * 80)
    assert shares.min() > 0.98  # noise equals the grey now and then
    assert 0.015 < areas.min() < 0.03
    assert 0.30 < areas.max() < 0.34
    assert areas.mean().item() == pytest.approx(0.175, abs=0.015)
    assert (high / wide).log().mean().item() == pytest.approx(0, abs=0.1)
    assert (high / wide).log().abs().max() < 1.35  # log(1 / 0.3), and rounding
    for place, most in ((rows.int().argmax(1), 64 - high), (first, 80 - wide)):
        uniform((place + 0.5) / (most + 1) * 8, 8)  # from one border to the other
        assert place.min() == (most - place).min() == 0


def test_erasing_noise_is_uniform_and_as_often_as_asked():
    torch.manual_seed(0)
    images = torch.full((4000, 1, 12, 12), 77, dtype=torch.uint8)
    got = parse_augmentation("erase(0.25)")(images)
    changed = (got != images).flatten(1).any(1)
    assert changed.float().mean().item() == pytest.approx(0.25, abs=0.03)
    noise = got[got != images].double()
    assert noise.mean().item() == pytest.approx(127.8, abs=1.5)
    assert noise.std().item() == pytest.approx(256 / 12**0.5, abs=1)


def test_where_no_rectangle_fits_nothing_is_erased():
    torch.manual_seed(0)
    images = photos(5, 3, 1, 1)
    assert torch.equal(parse_augmentation("erase(1)")(images), images)
    # Of two rows one can go, but few rectangles are so flat: many images draw none in their ten tries.
    images = torch.full((2000, 3, 2, 40), 77, dtype=torch.uint8)
    got = parse_augmentation("erase(1)")(images)
    rng = np.random.default_rng(0)
    plain = np.full((2, 40, 3), 77, np.uint8)
    singles = [augment.erase(plain, rng, 1) is plain for _ in range(2000)]
    rows = (got != images).any(dim=1).any(dim=2).sum(dim=1)
    assert rows.max() == 1
    assert (rows == 0).float().mean().item() == pytest.approx(np.mean(singles), abs=0.05)
    assert 0.1 < np.mean(singles) < 0.9


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (12, 7)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 10, 30])
def test_any_batch_keeps_its_shape_and_its_input(size, channels, magnitude):
    augment_all = parse_augmentation(f"flip|randaugment(16, {magnitude})|erase(1)")
    for count in (1, 3):
        images = photos(count, channels, *size)
        before = images.clone()
        got = augment_all(images)
        assert torch.equal(images, before)
        assert got.shape == images.shape
        assert normalize(got, (0.5,) * channels, (0.5,) * channels).dtype == torch.float32


def test_seeds_repeat_and_images_draw_apart():
    images = photos(1).expand(40, -1, -1, -1)

    def augmented(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return parse_augmentation(ALL)(images)

    assert torch.equal(augmented(1), augmented(1))
    assert not torch.equal(augmented(1), augmented(2))
    assert len({one.numpy().tobytes() for one in augmented(1)}) == 40


def test_the_whole_needs_no_drawn_number_on_the_host():
    """Tensors without data refuse to be looked at, and to meet tensors of another device."""
    got = parse_augmentation(ALL)(torch.empty(4, 3, 32, 32, dtype=torch.uint8, device="meta"))
    assert got.device.type == "meta"
    assert got.shape == (4, 3, 32, 32)


@pytest.fixture
def compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # pytest would collect every step of the compiler
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
def test_it_compiles_to_one_graph():
    augment_all = parse_augmentation(ALL)
    compiled = torch.compile(augment_all, fullgraph=True, backend="aot_eager")
    images = photos(6)
    torch.manual_seed(5)
    expected = augment_all(images)
    torch.manual_seed(5)
    assert torch.equal(compiled(images), expected)


def test_a_text_states_its_steps():
    parsed = parse_augmentation(" shift( 4 ) |flip|randaugment(2,7.5) | cutout(8)|erase(0.25)")
    numbers = {"shift": (4,), "flip": (), "randaugment": (2, 7.5), "cutout": (8,), "erase": (0.25,)}
    assert parsed.steps == tuple(numbers.items())
    assert parse_augmentation(parsed.text) == parsed


@pytest.mark.parametrize(
    "text", ["flip", "flip()", "randaugment(2, 10)", "randaugment(16, 0)", "erase(1)", "erase( 0 )"]
)
def test_steps_that_pipelines_have_too_are_written_alike(text):
    (name, numbers), step = parse_augmentation(text).steps[0], parse_pipeline(f"decode|resize(8)|{text}").steps[-1]
    assert (name, numbers) == (step.name, step.numbers)


STEPS = "the steps are shift(pixels), flip, randaugment(layers, magnitude), erase(chance), cutout(side)."


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", STEPS),
        ("flip|", STEPS),
        ("decode|flip", '"decode" is not an augmentation'),
        ("shift(4", STEPS),
        ("wobble(3)", '"wobble(3)" is not an augmentation'),
        ("flip(1)", '"flip(1)": write flip.'),
        ("shift", "write shift(pixels), with pixels a whole number from 1 to 1024."),
        ("shift(0)", "from 1 to 1024"),
        ("shift(2.5)", "a whole number"),
        ("shift(1, 2)", "write shift(pixels)"),
        ("shift(four)", "write shift(pixels)"),
        ("shift(nan)", "write shift(pixels)"),
        ("cutout(inf)", "write cutout(side)"),
        ("erase(1.5)", "with chance a number from 0 to 1."),
        ("randaugment(2)", "with layers a whole number from 1 to 16 and magnitude a number from 0 to 30."),
        ("randaugment(2, 31)", "magnitude a number from 0 to 30."),
        ("randaugment(1.5, 10)", "layers a whole number"),
    ],
)
def test_a_wrong_text_is_refused_in_one_sentence(text, part):
    with pytest.raises(UserError) as caught:
        parse_augmentation(text)
    assert part in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("text", ["shift(6)", "cutout(9)"])
def test_a_step_larger_than_the_images_is_refused(text):
    with pytest.raises(UserError, match=r"of 6 x 9 pixels: write a number below 6\."):
        parse_augmentation(text)(photos(2, 3, 6, 9))
