"""Callable transforms: functions of a PIL image in place of a pipeline."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.data.augment import CallableTransform
from vitral.data.images import encode_png
from vitral.data.loader import evaluation_batches, training_batches
from vitral.data.sources import open_data
from vitral.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (10, 20, 24, 3), np.uint8)
SPLIT = open_data((PIXELS, [0, 1] * 5), held_out=0).train
TRAINING: dict[str, Any] = {"batch": 4, "seed": 3, "first_step": 0, "last_step": 5}


def small(image: Image.Image) -> Image.Image:
    return image.resize((10, 8), Image.Resampling.NEAREST)


def as_array(image: Image.Image) -> np.ndarray:
    return np.asarray(small(image))


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(small(image))).permute(2, 0, 1)


def normalised(image: Image.Image) -> torch.Tensor:
    return as_tensor(image).float() / 127.5 - 1


def noisy(image: Image.Image) -> torch.Tensor:
    """Draws from all three global generators."""
    return normalised(image) * random.random() + float(np.random.rand()) + torch.rand(3, 8, 10)


@pytest.mark.parametrize("function", [small, as_array, as_tensor])
def test_results_of_every_uint8_form(function):
    transform = CallableTransform(function)
    assert (transform.size, transform.dtype, transform.random) == ((8, 10), np.uint8, True)
    assert not transform.ends_in_random_crop
    assert function.__name__ in transform.text
    np.testing.assert_array_equal(transform(PIXELS[0]), np.asarray(small(Image.fromarray(PIXELS[0]))))


@pytest.mark.parametrize("workers", [0, 2])
def test_floating_point_batches(workers):
    batches = list(training_batches(SPLIT, CallableTransform(normalised), **TRAINING, workers=workers))
    for batch in batches:
        assert batch.images.dtype == torch.float32
        assert batch.images.shape == (4, 3, 8, 10)
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert torch.equal(image, normalised(Image.fromarray(PIXELS[index])))


@pytest.mark.parametrize("workers", [0, 2])
def test_uint8_batches(workers):
    for batch in training_batches(SPLIT, CallableTransform(as_tensor), **TRAINING, workers=workers):
        assert batch.images.dtype == torch.uint8
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert torch.equal(image, as_tensor(Image.fromarray(PIXELS[index])))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms_resume_exactly_with_any_number_of_workers(workers):
    expected = list(training_batches(SPLIT, CallableTransform(noisy), **TRAINING))
    resumed: dict[str, Any] = {**TRAINING, "first_step": 2}
    again = list(training_batches(SPLIT, CallableTransform(noisy), **resumed, workers=workers))
    for first, second in zip(expected[2:], again, strict=True):
        assert torch.equal(first.images, second.images)
    reseeded: dict[str, Any] = {**TRAINING, "seed": 4}
    other = next(training_batches(SPLIT, CallableTransform(noisy), **reseeded))
    assert not torch.equal(other.images, expected[0].images)
    assert len({image.numpy().tobytes() for batch in expected for image in batch.images}) == 20


def test_global_generators_are_left_as_they_were():
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    transform = CallableTransform(noisy)
    transform(PIXELS[0], np.random.default_rng(0))
    assert states() == before
    with pytest.raises(ZeroDivisionError):
        CallableTransform(lambda image: 1 / 0 if image.width == 24 else small(image))(PIXELS[0])
    assert states() == before


def test_evaluation_is_repeatable_and_padding_is_zero():
    first, second = (list(evaluation_batches(SPLIT, CallableTransform(noisy), batch=4)) for _ in range(2))
    assert all(torch.equal(one.images, other.images) for one, other in zip(first, second, strict=True))
    assert not first[-1].images[~first[-1].valid].any()
    assert first[-1].valid.tolist() == [True, True, False, False]


def test_grey_models_and_grey_results():
    grey = CallableTransform(lambda image: small(image.convert("L")))
    batch = next(evaluation_batches(SPLIT, grey, batch=2))
    assert torch.equal(batch.images[:, 0], batch.images[:, 2])
    one = CallableTransform(small, channels=1)
    split = open_data((PIXELS[:, :, :, :1], [0, 1] * 5), held_out=0).train
    assert next(evaluation_batches(split, one, batch=2, channels=1)).images.shape == (2, 1, 8, 10)


def test_encoded_images_are_decoded_for_the_function():
    split = open_data(([encode_png(image) for image in PIXELS], [0, 1] * 5), held_out=0).train
    batch = next(evaluation_batches(split, CallableTransform(as_tensor), batch=10))
    for image, pixels in zip(batch.images, PIXELS, strict=True):
        assert torch.equal(image, as_tensor(Image.fromarray(pixels)))


def test_an_unreadable_image_is_not_valid():
    split = open_data(([encode_png(PIXELS[0]), b"not an image"], [0, 1]), held_out=0).train
    batch = next(evaluation_batches(split, CallableTransform(normalised), batch=2))
    assert batch.valid.tolist() == [True, False]
    assert not batch.images[1].any()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda image: None, "is None, not a PIL image"),
        (lambda image: 1 / 0, "fails on a blank image of 320 x 256 pixels (ZeroDivisionError"),
        (lambda image: torch.zeros(8, 8, 3), "a tensor of shape (8, 8, 3): return (channels, height, width)"),
        (lambda image: np.zeros((8, 8, 3), np.int32), "of dtype int32"),
        (lambda image: torch.zeros(2, 8, 8), "returns 2 channels and the model takes 3"),
    ],
)
def test_wrong_functions_are_refused_before_training(function, message):
    with pytest.raises(UserError) as caught:
        CallableTransform(function)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_size_must_be_one_and_the_models():
    with pytest.raises(UserError, match="returns 10 x 8 pixels, not 16 x 16: resize to one size"):
        CallableTransform(small, (16, 16))
    with pytest.raises(UserError, match="returns 24 x 20 pixels, not 320 x 256"):
        CallableTransform(lambda image: image)(PIXELS[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_another_size_in_a_worker_is_one_sentence(workers):
    with pytest.raises(UserError, match=r"returns 24 x 20 pixels, not 320 x 256: resize to one size\.$"):
        list(training_batches(SPLIT, CallableTransform(lambda image: image), **TRAINING, workers=workers))


def test_torchvisions_transforms():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    steps = [v2.ToImage(), v2.RandomResizedCrop(12), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    transform = CallableTransform(v2.Compose([*steps, v2.Normalize((0.5,) * 3, (0.5,) * 3)]))
    assert (transform.size, transform.dtype) == ((12, 12), np.float32)
    first, second = (list(training_batches(SPLIT, transform, **TRAINING, workers=count)) for count in (0, 2))
    assert all(torch.equal(one.images, other.images) for one, other in zip(first, second, strict=True))
