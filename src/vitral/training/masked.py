"""Masked patch prediction (paper, appendix B.1.2) and masked autoencoders (MAE): models, objective and metrics.

Which patches are masked is a hash of (seed, step, image), so masking has no state to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import Size, ViTConfig
from vitral.data.loader import PADDING, Batch, evaluation_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.evaluation.masked_baselines import LEVELS, colour_class, histogram_entropy, neighbour_loss
from vitral.evaluation.predict import Predictions, Preprocessing
from vitral.events import EventHandler, Progress
from vitral.models.mae import MaeConfig, MaskedAutoencoder
from vitral.models.model import normalize, zero_bias
from vitral.models.position import grid_of
from vitral.models.vit import ViT

_EVAL_STEP = 0  # evaluated images are always masked in the same way
_BASELINE_IMAGES = 2000


class MaskedObjective(nn.Module):
    """Sums over the valid rows of a batch: of losses, and of the shares of masked patches predicted correctly."""

    capturable = False  # which patches are masked is drawn on the host

    def __init__(self, model: MaskedModel | MaeModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        self.mean, self.std = mean, std

    def draw(self, step: int, image: Size) -> Tensor:
        """The step itself."""
        return torch.tensor(step)

    def forward(self, images: Tensor, keys: Tensor, valid: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (batch, channels, height, width), image indices (batch,), valid (batch,) -> loss (), correct ()"""
        losses, accuracies = self.model(normalize(images, self.mean, self.std), images, keys, int(draws))
        correct = torch.where(valid, accuracies, 0.0).sum()
        counted = torch.full_like(correct, -1.0) if self.model.regresses else correct
        return torch.where(valid, losses, 0.0).sum(), counted.detach()


def with_image_keys(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches with the images' indices as labels: the mask depends on (seed, step, image) alone."""
    try:
        for batch in batches:
            yield batch._replace(labels=batch.indices)
    finally:
        getattr(batches, "close", lambda: None)()


def masked_outputs(
    model: MaskedModel | MaeModel,
    split: Split,
    preprocess: Preprocessing,
    *,
    batch: int,
    device: torch.device,
    rank: int,
    world: int,
    workers: int,
    precision: str,
    on_event: EventHandler,
) -> Predictions:
    """Loss and accuracy (images, 2) of this process's share of the split."""
    assert isinstance(preprocess.pipeline, str)
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
            inputs = normalize(images, preprocess.mean, preprocess.std)
            outputs = torch.stack(model(inputs, images, part.indices.to(device), _EVAL_STEP), dim=1).float().cpu()
            rows.append((part.indices[real].numpy(), outputs[real].numpy(), part.valid[real].numpy()))
            on_event(Progress("evaluating", sum(len(indices) for indices, _, _ in rows), len(split)))
    model.train()
    indices, numbers, valid = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    return Predictions(indices, numbers, valid)


def baselines(
    train: Split, eval_split: Split, pipeline: str, config: ViTConfig, settings: MaskSettings
) -> dict[str, float]:
    """Baselines of the loss for target "mean", on the first images of each split: see
    `evaluation/masked_baselines.py`."""
    (train_colours, train_hidden), (colours, hidden) = (
        _colours(split, pipeline, config, settings) for split in (train, eval_split)
    )
    return {
        "histogram_entropy": histogram_entropy(colour_class(colours[hidden])),
        "neighbour_loss": neighbour_loss(train_colours, train_hidden, colours, hidden),
    }


def _colours(split: Split, pipeline: str, config: ViTConfig, settings: MaskSettings) -> tuple[np.ndarray, np.ndarray]:
    """Mean colours of the patches (images, h, w, channels), and which of them are masked (images, h, w)."""
    first = split.select(np.arange(min(len(split), _BASELINE_IMAGES)))
    colours, hidden = [], []
    for part in evaluation_batches(first, parse_pipeline(pipeline), batch=64, channels=config.channels):
        images, keys = part.images[part.valid], part.indices[part.valid]
        if not len(images):
            continue
        grid = config.grid((images.shape[2], images.shape[3]))
        means = mean_colours(cut_patches(images, config.stride, grid))[:, :, 0]
        drawn = draw_corruption(keys, _EVAL_STEP, grid[0] * grid[1], settings)
        colours.append(means.unflatten(1, grid).numpy())
        hidden.append(drawn.hidden.unflatten(1, grid).numpy())
    return np.concatenate(colours), np.concatenate(hidden)


def measure_masked(baseline_losses: dict[str, float]) -> Callable[..., dict[str, Any]]:
    """A function of losses and accuracies (n, 2) that gives metrics; the score is the negative loss."""

    def measure(rows: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
        loss, accuracy = rows.mean(axis=0, dtype=np.float64).tolist()
        metrics = {"score": -loss, "masked_loss": loss, "n": len(rows), **baseline_losses}
        return metrics if accuracy < 0 else {**metrics, "masked_accuracy": accuracy}

    return measure


Target = Literal["mean", "grid", "pixels"]
GRID = 4  # colours per side of a patch that target "grid" predicts
_TOKEN_STD = 0.02  # of the mask token's initialisation; the paper does not give one


@dataclass(frozen=True)
class MaskSettings:
    """Which patches are masked, and the prediction target."""

    share: float = 0.5  # of the patches, corrupted and predicted
    token: float = 0.8  # of those, become the mask token
    random: float = 0.1  # of those, become another patch of the image; the rest stays
    target: Target = "mean"
    seed: int = 0


class Corruption(NamedTuple):
    """What happens to the n patches of each of b images, k of which are hidden (corrupted and predicted)."""

    indices: Tensor  # (b, k) int64: the hidden patches
    hidden: Tensor  # (b, n) bool: the same
    masked: Tensor  # (b, n) bool: hidden and replaced by the mask token
    swapped: Tensor  # (b, n) bool: hidden and replaced by another patch
    source: Tensor  # (b, n) int64: the patch whose embedding is at each position; its own but where swapped


def draw_corruption(keys: Tensor, step: int, patches: int, settings: MaskSettings) -> Corruption:
    """int64 (b,) -> the corruption of each row, on the keys' device.

    A key identifies the row's image, such as its index in the split. How many patches are hidden, masked and swapped is
    the whole number nearest to their shares (half to even), the same in all images; at least one is hidden. Which ones
    they are, and which other patch replaces one that is swapped, is uniform.
    """
    if patches < 2:
        raise UserError(
            "an image of one patch has nothing to predict it from: choose smaller patches or larger images."
        )
    hidden = max(round(settings.share * patches), 1)
    masked = round(settings.token * hidden)
    changed = min(masked + round(settings.random * hidden), hidden)
    drawn = _hashes(keys, _start(settings.seed, step), 2 * patches)
    order = drawn[:, :patches].argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    swapped = (rank >= masked) & (rank < changed)
    position = torch.arange(patches, device=keys.device)
    other = (position + 1 + drawn[:, patches:].remainder(patches - 1)) % patches
    return Corruption(order[:, :hidden], rank < hidden, rank < masked, swapped, torch.where(swapped, other, position))


def corrupt(patches: Tensor, corruption: Corruption, mask_token: Tensor) -> Tensor:
    """(b, h, w, d), (d,) -> (b, h, w, d). A swapped patch gets the other's embedding before corruption."""
    flat = patches.flatten(1, 2)
    swapped = flat.gather(1, corruption.source.unsqueeze(-1).expand_as(flat))
    mixed = torch.where(corruption.masked.unsqueeze(-1), mask_token.to(swapped.dtype), swapped)
    return mixed.view_as(patches)


def cut_patches(images: Tensor, side: int, grid: Size) -> Tensor:
    """(b, c, height, width) -> (b, n, c, side, side), in the order of the tokens.

    Pixels at the right and bottom beyond the grid are dropped. A stem rounds its grid up instead: then the last pixels
    are repeated.
    """
    for axis, count in zip((2, 3), grid, strict=True):
        pixels = torch.arange(count * side, device=images.device).clamp(max=images.shape[axis] - 1)
        images = images.index_select(axis, pixels)
    return images.unflatten(3, (grid[1], side)).unflatten(2, (grid[0], side)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def mean_colours(patches: Tensor, cells: int = 1) -> Tensor:
    """uint8 (b, n, c, side, side) -> int64 (b, n, cells * cells, c): means over areas, rounded down.

    Each side is cut into `cells` areas, which share a pixel if they do not divide it. In whole numbers: a mean that
    falls on the border of two colours must not depend on how a device rounds.
    """
    side = patches.shape[-1]
    spans = [(i * side // cells, -(-(i + 1) * side // cells)) for i in range(cells)]
    means = [
        patches[..., top:bottom, left:right].sum((-2, -1)) // ((bottom - top) * (right - left))
        for top, bottom in spans
        for left, right in spans
    ]
    return torch.stack(means, dim=2)


def colour_targets(patches: Tensor, target: Target) -> Tensor:
    """uint8 (b, n, c, side, side) -> int64 (b, n, 1) for "mean", (b, n, 16) for "grid", of 8^c classes (512 for RGB).

    The means of a patch, or of each of its 4 x 4 areas, in three bits a channel.
    """
    return colour_class(mean_colours(patches, _cells(target)))


class MaskedModel(nn.Module):
    """A ViT, the mask token and the layer that predicts the hidden patches from their tokens.

    The ViT's head and attention pooling take no part and are frozen, so DistributedDataParallel waits for no gradient
    of theirs; build the ViT with classes=0 and it has no head to store either.
    """

    def __init__(self, model: ViT, settings: MaskSettings) -> None:
        super().__init__()
        config = model.config
        self.model = model
        self.settings = settings
        self.side = config.stride
        if settings.target == "grid" and self.side < GRID:
            raise UserError(
                f"a patch of {self.side} pixels per side cannot be shrunk to {GRID} x {GRID}: "
                "set masked.target to mean or pixels."
            )
        self.classes = LEVELS**config.channels
        pixels = config.channels * self.side**2
        outputs = pixels if settings.target == "pixels" else _cells(settings.target) ** 2 * self.classes
        self.mask_token = nn.Parameter(torch.empty(config.width).normal_(std=_TOKEN_STD))
        self.predict = nn.Linear(config.width, outputs)
        nn.init.zeros_(self.predict.weight)  # as the head of a classifier: the first loss is that of a uniform guess
        zero_bias(self.predict)
        _freeze_unused(model)

    def forward(self, images: Tensor, raw: Tensor, keys: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Normalised (b, c, height, width), the same as uint8, keys (b,) -> losses (b,), accuracies (b,).

        In evaluation every hidden patch is the mask token: one that is left unchanged would reveal its answer.
        Both are means over an image's hidden patches: a cross-entropy in nats, or for "pixels" the mean square in units
        of the normalised pixels, which has no accuracy: -1.
        """
        patches = self.model.patchify(images)
        grid = grid_of(patches)
        settings = self.settings if self.training else replace(self.settings, token=1.0, random=0.0)
        corruption = draw_corruption(keys, step, grid[0] * grid[1], settings)
        tokens = self._tokens(corrupt(patches, corruption, self.mask_token))
        outputs = self.predict(_rows(tokens, corruption.indices)).float()
        pixels = _rows(cut_patches(images if self.regresses else raw, self.side, grid), corruption.indices)
        if self.regresses:
            losses = (outputs - pixels.flatten(2)).square().mean(dim=(1, 2))
            return losses, torch.full_like(losses, -1.0).detach()
        targets = colour_targets(pixels, self.settings.target)
        logits = outputs.unflatten(2, (-1, self.classes))
        losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
        return losses.mean(dim=(1, 2)), (logits.argmax(dim=-1) == targets).float().mean(dim=(1, 2))

    @property
    def regresses(self) -> bool:
        """Whether it predicts pixels, which has no accuracy."""
        return self.settings.target == "pixels"

    def _tokens(self, patches: Tensor) -> Tensor:
        """(b, h, w, d) -> (b, n, d): the encoder's token of each patch, after its norm."""
        tokens = self.model.encode(patches)[:, self.model.config.prefix :]
        return self.model.norm(tokens) if self.model.config.norm_place == "features" else tokens


class MaeModel(nn.Module):
    """A masked autoencoder with the interface of `MaskedModel`, for masked.target="mae"."""

    regresses = True

    def __init__(self, model: ViT, config: MaeConfig, seed: int) -> None:
        super().__init__()
        self.autoencoder = MaskedAutoencoder(model, config)
        self.seed = seed
        _freeze_unused(model)

    @property
    def model(self) -> ViT:
        return self.autoencoder.encoder

    def forward(self, images: Tensor, raw: Tensor, keys: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """As `MaskedModel.forward`; the loss is the mean square of the hidden patches' pixels."""
        rows, columns = self.model.config.grid(self.model.config.image)
        noise = _hashes(keys, _start(self.seed, step), rows * columns)
        losses = self.autoencoder(images, noise).losses
        return losses, torch.full_like(losses, -1.0).detach()


def _freeze_unused(model: ViT) -> None:
    for unused in (model.head, model.map):
        if unused is not None:
            unused.requires_grad_(False)


def _cells(target: Target) -> int:
    return GRID if target == "grid" else 1


def _rows(values: Tensor, indices: Tensor) -> Tensor:
    """(b, n, ...), (b, k) -> (b, k, ...)"""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), indices]


def _start(seed: int, step: int) -> int:
    digest = hashlib.blake2b(f"mask {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as signed integers, which torch has
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _hashes(keys: Tensor, start: int, count: int) -> Tensor:
    """int64 (b,) -> (b, count): the first outputs of a SplitMix64 generator for each key."""
    state = _mix(keys * _GOLDEN + start).unsqueeze(1)
    return _mix(state + _GOLDEN * torch.arange(1, count + 1, device=keys.device))


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finalizer, by products that wrap around: int64 -> int64, one-to-one."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift of signed integers repeats the sign."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
