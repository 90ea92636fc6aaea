"""`card.transform()`: the preprocessing of a model as a callable, with the pixels that prediction uses."""

from __future__ import annotations

import io
import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import SMALL
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitral.checkpoints.card import Card, ImageTransform, Preprocess
from vitral.data.sources import open_images
from vitral.errors import UserError
from vitral.evaluation.predict import predict_split
from vitral.models.build import build

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIPELINES = (
    *("decode|resize_small(36, bicubic)|central_crop(32)", "decode|resize(32)", "decode|resize(32, 32, area)"),
    "decode|resize_short(36, pil_bicubic)|center_crop(32)",
)


def card(pipeline: str = PIPELINES[0]) -> Card:
    return Card(SMALL, preprocess=Preprocess(pipeline, MEAN, STD))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """JPEGs with and without an EXIF rotation; PNGs that are grey, transparent, 16-bit and with a palette."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (80, 60), Image.Resampling.BICUBIC
    )
    turned = Image.Exif()
    turned[0x0112] = 6
    noise.save(tmp_path / "a.jpg", quality=90)
    noise.save(tmp_path / "b.jpg", quality=90, exif=turned)
    noise.convert("L").save(tmp_path / "c.png")
    noise.convert("RGBA").rotate(30).save(tmp_path / "d.png")
    Image.fromarray(rng.integers(0, 65536, (50, 40), dtype=np.uint16)).save(tmp_path / "e.png")
    noise.convert("P").save(tmp_path / "f.png")
    return sorted(tmp_path.iterdir())


def predicted_pixels(card: Card, files: list[Path]) -> Tensor:
    """What `predict` hands to the model, (images, channels, height, width)."""
    batches: list[Tensor] = []
    model = build(SMALL)
    model.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].clone()))
    assert card.preprocess is not None
    predict_split(model, open_images(files), card.preprocess, batch=4)
    return torch.cat(batches)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pixels_are_those_of_prediction(files: list[Path], pipeline: str) -> None:
    transform = card(pipeline).transform()
    expected = predicted_pixels(card(pipeline), files)
    for path, pixels in zip(files, expected, strict=True):
        with Image.open(path) as image:
            for source in (path, str(path), path.read_bytes(), image):
                tensor = transform(source)
                assert (tensor.dtype, tensor.shape) == (torch.float32, (3, 32, 32))
                assert torch.equal(tensor, pixels), path.name


def test_arrays_and_converted_pil_images_are_taken_as_they_are(files: list[Path]) -> None:
    transform = card().transform()
    with Image.open(files[0]) as image:
        array = np.array(image)
    expected = transform(files[0])
    assert torch.equal(transform(array), expected)
    assert torch.equal(transform(Image.fromarray(array)), expected)
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    assert torch.equal(transform(grey), transform(np.repeat(grey, 3, axis=2)))
    assert torch.equal(transform(grey[:, :, 0]), transform(grey))


class Pictures(Dataset):
    def __init__(self, files: list[Path], transform: ImageTransform) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(Image.open(self.files[index]))


def test_workers_of_a_data_loader_give_the_same(files: list[Path]) -> None:
    transform = card().transform()
    expected = torch.stack([transform(path) for path in files])
    assert pickle.loads(pickle.dumps(transform)) == transform
    for context in ("fork", "spawn"):
        loader = DataLoader(Pictures(files, transform), batch_size=4, num_workers=2, multiprocessing_context=context)
        assert torch.equal(torch.cat(list(loader)), expected)


def test_one_channel_and_other_sizes(files: list[Path]) -> None:
    grey = Card(replace(SMALL, channels=1), preprocess=Preprocess("decode|resize(16, 24)", (0.5,), (0.5,)))
    assert grey.transform()(files[0]).shape == (1, 16, 24)


def test_what_cannot_be_transformed_is_refused(tmp_path: Path, files: list[Path]) -> None:
    with pytest.raises(UserError, match=r"does not state the preprocessing of these weights: set it, such as replace"):
        Card(SMALL).transform()
    with pytest.raises(UserError, match="draws at random"):
        card("decode|random_crop(32)").transform()
    transform = card().transform()
    whole = files[0].read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 3])
    wrong: list[tuple[Any, str]] = [
        (tmp_path / "none.jpg", "none.jpg cannot be read .No such file"),
        (tmp_path / "cut.jpg", "cut.jpg cannot be read .the file is truncated"),
        (b"text", "this image cannot be read .not an image"),
        (Image.open(io.BytesIO(whole[: len(whole) // 3])), "this image cannot be read .the file is truncated"),
        (np.zeros((8, 8, 3), np.float32), r"these pixels are float32 \(8, 8, 3\): pass uint8"),
        (np.zeros((8, 8, 2), np.uint8), r"pass uint8 \(height, width, 3\)"),
        (torch.zeros(3, 8, 8), "a Tensor is not an image: pass a PIL image"),
    ]
    for value, expected in itertools.chain(wrong, [(None, "a NoneType is not an image")]):
        with pytest.raises(UserError, match=expected):
            transform(value)
