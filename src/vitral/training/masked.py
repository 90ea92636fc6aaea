"""A run of masked patch prediction (B.1.2): its objective, and who judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Size, ViTConfig
from vitral.data.loader import PADDING, Batch, evaluation_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import Split
from vitral.evaluation.colours import colour_class, histogram_entropy, neighbour_loss
from vitral.evaluation.predict import Predictions, Preprocessing
from vitral.models.normalise import normalise
from vitral.training.masking import (
    MaskedModel,
    MaskSettings,
    cut_patches,
    draw_corruption,
    mean_colours,
)

_TEST_STEP = 0  # held-out images are always corrupted in the same way
_BASELINE_IMAGES = 2000


class MaskedObjective(nn.Module):
    """Sums over the valid rows of a batch: of the losses, and of the shares of hidden patches that were named right."""

    replayable = False  # what is hidden is drawn from the step on the host

    def __init__(self, model: MaskedModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        self.mean, self.std = mean, std

    def numbers(self, step: int, image: Size) -> Tensor:
        """The step itself."""
        return torch.tensor(step)

    def forward(self, images: Tensor, keys: Tensor, valid: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (b, c, h, w), the images' places in the split (b,), valid (b,) -> loss (), right answers ()"""
        losses, right = self.model(normalise(images, self.mean, self.std), images, keys, int(numbers))
        answers = torch.where(valid, right, 0.0).sum()
        counted = torch.full_like(answers, -1.0) if self.model.settings.target == "pixels" else answers
        return torch.where(valid, losses, 0.0).sum(), counted.detach()


def keyed(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches with the images' own places for labels: what is hidden depends on (seed, step, image) alone."""
    try:
        for batch in batches:
            yield batch._replace(labels=batch.indices)
    finally:
        getattr(batches, "close", lambda: None)()


def masked_outputs(
    model: MaskedModel,
    split: Split,
    preprocess: Preprocessing,
    *,
    batch: int,
    device: torch.device,
    rank: int,
    world: int,
    workers: int,
    precision: str,
    on_progress: Callable[[int, int], None],
) -> Predictions:
    """Loss and share of right answers, (m, 2), of this process's part of the split."""
    pipeline = parse_pipeline(preprocess.pipeline)
    channels = model.model.config.channels
    half = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    model.eval()
    with torch.inference_mode(), half:
        for part in evaluation_batches(
            split, pipeline, batch=batch, rank=rank, world=world, workers=workers, channels=channels
        ):
            real = part.indices != PADDING
            images = part.images.to(device)
            inputs = normalise(images, preprocess.mean, preprocess.std)
            found = torch.stack(model(inputs, images, part.indices.to(device), _TEST_STEP), dim=1).float().cpu()
            rows.append((part.indices[real].numpy(), found[real].numpy(), part.valid[real].numpy()))
            on_progress(sum(len(indices) for indices, _, _ in rows), len(split))
    model.train()
    indices, numbers, valid = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    return Predictions(indices, numbers, valid)


def baselines(train: Split, test: Split, pipeline: str, config: ViTConfig, settings: MaskSettings) -> dict[str, float]:
    """What the loss must beat, on the first images of each split: see `evaluation/colours.py`.

    Only for one colour a patch: the other targets have no such simple rivals.
    """
    if settings.target != "mean":
        return {}
    (seen, seen_hidden), (colours, hidden) = (_colours(part, pipeline, config, settings) for part in (train, test))
    return {
        "histogram_entropy": histogram_entropy(colour_class(colours[hidden])),
        "neighbour_loss": neighbour_loss(seen, seen_hidden, colours, hidden),
    }


def _colours(split: Split, pipeline: str, config: ViTConfig, settings: MaskSettings) -> tuple[np.ndarray, np.ndarray]:
    """Mean colours of the patches, (m, h, w, c), and which of them a held-out image hides, (m, h, w)."""
    some = split.select(np.arange(min(len(split), _BASELINE_IMAGES)))
    colours, hidden = [], []
    for part in evaluation_batches(some, parse_pipeline(pipeline), batch=64, channels=config.channels):
        images, keys = part.images[part.valid], part.indices[part.valid]
        if not len(images):
            continue
        grid = config.grid((images.shape[2], images.shape[3]))
        found = mean_colours(cut_patches(images, config.stride, grid))[:, :, 0]
        drawn = draw_corruption(keys, _TEST_STEP, grid[0] * grid[1], settings)
        colours.append(found.unflatten(1, grid).numpy())
        hidden.append(drawn.hidden.unflatten(1, grid).numpy())
    return np.concatenate(colours), np.concatenate(hidden)


def measure_masked(rivals: dict[str, float]) -> Callable[..., dict[str, Any]]:
    """A function of (n, 2) losses and shares that gives metrics; the smaller the loss, the better the score."""

    def measure(numbers: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
        loss, right = numbers.mean(axis=0, dtype=np.float64).tolist()
        metrics = {"score": -loss, "masked_loss": loss, "n": len(numbers), **rivals}
        return metrics if right < 0 else {**metrics, "masked_accuracy": right}

    return measure
