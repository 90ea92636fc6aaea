"""Parts that workers hand over, and the images that a GPU makes of them: those that the workers would have made."""

from __future__ import annotations

import io
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitral.data.images import ImageError
from vitral.data.loader import training_batches
from vitral.data.pixels import resize
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import Split
from vitral.data.workers import MAX_SHRINK, PackedCrops
from vitral.training import device_data
from vitral.training.device_data import crop_uploader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CROP = "decode|random_resized_crop(12, 16, 0.05)|flip"
GOOGLES = "decode|inception_crop(12, 16, antialias=false)|flip"
DRAWN = {"batch": 9, "seed": 3, "first_step": 1, "last_step": 6}
SIZES = [(30, 40), (13, 15), (1, 1), (200, 300), (9, 70), (300, 8)]  # some shrink, some grow, some are too long


@dataclass(frozen=True)
class Files:
    files: tuple[bytes, ...]

    def read(self, index: int) -> bytes:
        if index == 4:
            raise ImageError("not there")
        return self.files[index]

    def mark(self, index: int) -> str:
        return ""


def split_of(sizes: list[tuple[int, int]], channels: int = 3) -> Split:
    """Noise as JPEG files, one of which cannot be read."""
    rng = np.random.default_rng(0)
    files = []
    for height, width in sizes:
        stream = io.BytesIO()
        shape = (height, width, 3) if channels == 3 else (height, width)
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(stream, "JPEG")
        files.append(stream.getvalue())
    return Split(
        "train", [f"{i}.jpg" for i in range(len(files))], np.arange(len(files)) % 2, ("a", "b"), Files((*files,))
    )


@dataclass(frozen=True)
class Blank:
    """Pictures as large as most of ImageNet's."""

    def read(self, index: int) -> np.ndarray:
        return np.zeros((375, 500, 3), np.uint8)

    def mark(self, index: int) -> str:
        return ""


class ByHand:
    """One part after the other, by the function that pipelines use."""

    def __init__(self, size: tuple[int, int], channels: int = 3, antialias: bool = True) -> None:
        self.size, self.channels, self.antialias = size, channels, antialias
        self.seen: list[PackedCrops] = []

    def __call__(self, parts: PackedCrops) -> torch.Tensor:
        self.seen.append(parts)
        images = []
        for start, height, width, mirrored in parts.table.tolist():
            pixels = parts.pixels[start : start + height * width * self.channels].numpy()
            image = resize(pixels.reshape(height, width, self.channels), self.size, antialias=self.antialias)
            images.append(image[:, ::-1] if mirrored else image)
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("partners", [False, True])
@pytest.mark.parametrize(
    "text", [CROP, GOOGLES, "decode|inception_crop(12, 16, 0.5)", "decode|resize_small(20)|" + CROP[7:]]
)
def test_parts_become_the_images_that_workers_make(text, partners, workers):
    split, pipeline = split_of(SIZES * 3), parse_pipeline(text)
    expected = list(training_batches(split, pipeline, **DRAWN, mix_partner=partners))
    hand = ByHand((12, 16), antialias=pipeline.antialias)
    found = list(training_batches(split, pipeline, **DRAWN, mix_partner=partners, workers=workers, resize=hand))
    assert not all(batch.valid.all() for batch in expected)
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(ours, theirs)


def test_grey_parts():
    split, pipeline = split_of(SIZES * 3, channels=1), parse_pipeline(CROP)
    options = {**DRAWN, "channels": 1}
    expected = training_batches(split, pipeline, **options)
    found = training_batches(split, pipeline, **options, resize=ByHand((12, 16), channels=1))
    assert all(torch.equal(one.images, other.images) for one, other in zip(found, expected, strict=True))


def test_workers_hand_over_what_they_cut_out():
    hand = ByHand((12, 16))
    list(training_batches(split_of([(15, 20)] * 20), parse_pipeline(CROP), **DRAWN, resize=hand))
    sizes = {(height, width) for parts in hand.seen for _, height, width, _ in parts.table.tolist()}
    assert len(sizes) > 20
    assert all(height <= 15 and width <= 20 for height, width in sizes)
    assert {int(mirrored) for parts in hand.seen for mirrored in parts.table[:, 3]} == {0, 1}


def test_parts_are_one_behind_the_other_and_all_find_room():
    hand = ByHand((12, 16))
    list(training_batches(split_of([(40, 50)] * 20), parse_pipeline(CROP), **DRAWN, resize=hand))
    for parts in hand.seen:
        starts, bytes_ = parts.table[:, 0], parts.table[:, 1] * parts.table[:, 2] * 3
        assert starts.tolist() == [0, *bytes_.cumsum(0)[:-1].tolist()]
        assert int(bytes_.sum()) == len(parts.pixels) <= 2 * 9 * 12 * 16 * 3
        sizes = [(height, width) for _, height, width, _ in parts.table.tolist()]
        assert (12, 16) in sizes  # resized by a worker, as there was no room left
        assert any(size > (12, 16) for size in sizes)


def test_usual_photographs_find_room():
    hand = ByHand((224, 224))
    split = Split("train", ["a"] * 64, np.zeros(64, np.int64), ("a",), Blank())
    drawn = {**DRAWN, "batch": 64, "last_step": 3}
    for _ in training_batches(split, parse_pipeline("decode|inception_crop(224)|flip"), **drawn, resize=hand):
        pass
    sizes = [(height, width) for parts in hand.seen for _, height, width, _ in parts.table.tolist()]
    assert (224, 224) not in sizes  # the size of what a worker has resized
    assert len(sizes) == 128


def test_a_part_that_is_too_long_is_resized_by_the_worker():
    """The kernel has no weights for it."""
    hand = ByHand((12, 16))
    split = split_of([(60, 8), (8, 70)] * 10)  # which would find room
    list(training_batches(split, parse_pipeline("decode|inception_crop(12, 16)"), **DRAWN, resize=hand))
    for parts in hand.seen:
        assert all(row[1] <= 12 * MAX_SHRINK and row[2] <= 16 * MAX_SHRINK for row in parts.table.tolist())


@given(st.data(), st.booleans())
@settings(max_examples=80 if DEVICE.type == "cuda" else 8)
def test_the_kernel_gives_the_pixels_of_a_cpu(data, antialias):
    pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")
    from vitral.kernels.resize import CropResize, reference

    side = st.integers(1, 24)
    size, channels = (data.draw(side), data.draw(side)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    pixels, places = [np.zeros(5, np.uint8)], []
    for _ in range(4):
        height, width = (data.draw(st.integers(1, MAX_SHRINK * length)) for length in size)
        part = rng.integers(0, 256, height * width * channels, np.uint8)
        if data.draw(st.booleans()):  # extremes, where the sum of rounded weights would show
            part = np.where(part > 127, 255, 0).astype(np.uint8)
        places.append([sum(map(len, pixels)), height, width, data.draw(st.integers(0, 1))])
        pixels.append(part)
    there = torch.from_numpy(np.concatenate(pixels)).to(DEVICE), torch.tensor(places, device=DEVICE)
    found = CropResize(size, channels, MAX_SHRINK, DEVICE, antialias=antialias)(*there)
    assert found.permute(0, 2, 3, 1).is_contiguous()
    assert torch.equal(found, reference(*there, size, channels, antialias=antialias))


@pytest.mark.parametrize("antialias", [True, False])
def test_the_kernel_takes_every_length(antialias):
    pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")
    from vitral.kernels.resize import CropResize, reference

    lengths = torch.arange(1, MAX_SHRINK * 224 + 1, 1 if DEVICE.type == "cuda" else 61)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1] * 2])
    places = torch.stack([starts, lengths, torch.full_like(lengths, 2), torch.zeros_like(lengths)], 1)
    pixels = torch.randint(
        256, (int(lengths.sum()) * 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    there = pixels.to(DEVICE), places.to(DEVICE)
    found = CropResize((224, 2), 1, MAX_SHRINK, DEVICE, antialias=antialias)(*there)
    assert torch.equal(found, reference(*there, (224, 2), 1, antialias=antialias))


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        (CROP, 100, True),
        (GOOGLES, 100, True),
        (CROP, 10**6, False),
        ("decode|inception_crop(12, bicubic)|flip", 100, False),
        ("decode|random_crop(12)|flip", 100, False),
        ("decode|inception_crop(12)|flip|randaugment(2, 10)", 100, False),
    ],
)
def test_who_leaves_the_resizing_to_a_gpu(text, rows, expected, monkeypatch):
    monkeypatch.setattr(device_data, "supports_crop_resize", lambda device: True)
    monkeypatch.setattr(device_data, "CropUploader", lambda *arguments: "on the GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**9))
    found = crop_uploader(parse_pipeline(text), rows, 3, torch.device("cuda"))
    assert found == ("on the GPU" if expected else None)


def test_no_gpu_no_upload():
    assert crop_uploader(parse_pipeline(CROP), 100, 3, torch.device("cpu")) is None


@pytest.fixture(params=["random_resized_crop(112, 0.05)", "inception_crop(112, antialias=false)"])
def there(request):
    """A split, a pipeline, and the GPU's part of it."""
    if DEVICE.type == "cpu":
        pytest.skip("needs an NVIDIA GPU")
    pipeline = parse_pipeline(f"decode|{request.param}|flip")
    found = crop_uploader(pipeline, 9, 3, DEVICE)
    assert found is not None
    return split_of(SIZES * 3), pipeline, found


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_gpu_are_those_of_the_workers(there, workers):
    """Read long after later batches have asked for memory."""
    split, pipeline, upload_there = there
    drawn = {**DRAWN, "last_step": 40}
    expected = [batch.images for batch in training_batches(split, pipeline, **drawn)]
    found = []
    for batch in training_batches(split, pipeline, **drawn, workers=workers, pin=True, resize=upload_there):
        torch.cuda._sleep(10**8)
        found.append(batch.images.clone())
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_a_step_waits_for_its_images(there):
    split, pipeline, upload_there = there

    def slow(parts: PackedCrops) -> torch.Tensor:
        with torch.cuda.stream(upload_there.stream):
            torch.cuda._sleep(10**8)
        return upload_there(parts)

    found = [batch.images.clone() for batch in training_batches(split, pipeline, **DRAWN, pin=True, resize=slow)]
    expected = [batch.images for batch in training_batches(split, pipeline, **DRAWN)]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_parts_of_all_sizes_take_the_same_memory(there):
    split, pipeline, upload_there = there
    taken = []
    for batch in training_batches(split, pipeline, **{**DRAWN, "last_step": 60}, pin=True, resize=upload_there):
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved())
        del batch
    assert taken[-1] == taken[5]
