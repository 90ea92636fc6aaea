"""Images kept on a GPU come in the batches that workers would make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import make_pictures

from vitral.data.loader import read_pixels, training_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import open_data
from vitral.training.device_data import ResidentSplit, load_resident_split
from vitral.training.parallel import World

PLAIN = "decode|resize(8)"


@pytest.fixture
def split(tmp_path):
    return open_data(make_pictures(tmp_path / "pictures"), held_out=0).train


def kept(split) -> ResidentSplit:
    """As `load_resident_split` keeps them, on any device."""
    pipeline = parse_pipeline(PLAIN)
    pixels = [pipeline(read_pixels(split, index, 3)) for index in range(len(split))]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    return ResidentSplit(images, torch.from_numpy(split.labels), torch.ones(len(split), dtype=torch.bool))


@pytest.mark.parametrize("partners", [False, True])
@pytest.mark.parametrize("order", [None, np.array([3, 3, 1, 0, 5, 7, 9, 2, 4, 6])])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_batches_are_those_of_the_loader(split, partners, order, rank, size):
    drawn = {"batch": 5, "seed": 3, "mix_partner": partners, "order": order}
    world = World(rank, size, torch.device("cpu"))
    found = list(kept(split).batches(range(2, 7), world=world, **drawn))
    expected = list(
        training_batches(split, parse_pipeline(PLAIN), first_step=2, last_step=7, rank=rank, world=size, **drawn)
    )
    assert len(found) == len(expected) == 5
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def test_a_cpu_keeps_nothing(split):
    assert load_resident_split(split, parse_pipeline(PLAIN), 3, 0, World(0, 1, torch.device("cpu"))) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_keeps_what_needs_nothing_random(split):
    world = World(0, 1, torch.device("cuda", 0))
    assert load_resident_split(split, parse_pipeline("decode|inception_crop(8)"), 3, 0, world) is None
    found = load_resident_split(split, parse_pipeline(PLAIN), 3, 0, world)
    assert found is not None
    expected = kept(split)
    assert torch.equal(found.images.cpu(), expected.images)
    assert found.valid.all()
