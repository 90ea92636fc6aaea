"""Common parts of all models: normalized pixels, the four steps of a forward pass, the classification head, and weight
initialization with the distributions of Google's Flax code."""

from __future__ import annotations

import math
import operator
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.architecture import ResNetConfig, ViTConfig
from vitral.errors import UserError, shorten
from vitral.kernels.dispatch import fits_embedding, is_checkpointed, on_device_of

# State dicts have no place for what their tensors do not show; `state_dict()._metadata` has, and torch.save keeps it.
CONFIG = "vitral.config"
_HIDDEN = (
    *("heads", "gelu", "pool", "norm_eps", "norm_place", "position", "injection", "post_norm"),
    *("map_heads", "map_prefix", "root_pool", "epsilons"),
)

# Standard deviation of a standard normal truncated at two standard deviations; Flax divides by it.
_TRUNCATED_STD = 0.87962566103423978

ConfigT = TypeVar("ConfigT", ViTConfig, ResNetConfig)


class Head(nn.Module):
    """Features to logits: in pre-training a tanh layer (section 3.1), then a zero-initialized linear layer."""

    def __init__(self, features: int, classes: int, representation: int = 0, *, bias: bool = True) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, representation) if representation else None
        self.output = nn.Linear(representation or features, classes, bias=bias) if classes else None
        if self.hidden is not None:
            lecun_normal(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        if self.output is not None:
            for parameter in self.output.parameters():
                nn.init.zeros_(parameter)

    def represent(self, features: Tensor) -> Tensor:
        """(batch, dim) -> (batch, representation): the input of the last linear layer, Google's `pre_logits`."""
        return features if self.hidden is None else torch.tanh(self.hidden(features))

    def forward(self, features: Tensor) -> Tensor:
        """(batch, dim) -> (batch, classes), or (batch, representation) without classes"""
        representation = self.represent(features)
        return representation if self.output is None else self.output(representation)


class VisionModel(nn.Module, Generic[ConfigT]):
    """Images of any height and width to logits, in four steps that can be called one by one.

    patches  = model.patchify(images)   # (batch, channels, height, width) -> (batch, h, w, dim)
    tokens   = model.encode(patches)    # (batch, h, w, dim)               -> (batch, tokens, dim)
    features = model.pool(tokens)       # (batch, tokens, dim)             -> (batch, dim)
    logits   = model.head(features)     # (batch, dim)                     -> (batch, classes)

    Patches keep their grid, so that no step has to guess it from a number of tokens.
    """

    config: ConfigT
    head: Head

    @abstractmethod
    def patchify(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, h, w, dim)"""

    @abstractmethod
    def encode(self, patches: Tensor) -> Tensor:
        """(batch, h, w, dim) -> (batch, tokens, dim)"""

    @abstractmethod
    def pool(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""

    @abstractmethod
    def intermediates(
        self, images: Tensor, layers: Sequence[int] | None = None, *, norm: bool = False, reshape: bool = True
    ) -> list[Tensor]:
        """Feature maps of the chosen layers."""

    @abstractmethod
    def _checkpointed_layers(self) -> Iterable[nn.Module]:
        """The layers whose activations gradient checkpointing recomputes."""

    def features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, dim)"""
        return self.pool(self.encode(self.patchify(images)))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, classes)"""
        return self.head(self.features(images))

    def reset_classifier(self, classes: int) -> None:
        """Replace the head by a new, zero-initialized linear layer, and update `config`.

        As in fine-tuning (section 3.1) the tanh layer of a pre-training head goes, too.

        Args:
            classes: outputs of the new layer; 0 removes the head, so that the model returns its features.
        """
        changes: dict[str, Any] = {"classes": classes}
        if isinstance(self.config, ViTConfig):
            changes |= {"representation": 0, "head_bias": True}
        self.config = replace(self.config, **changes)
        like = next(self.parameters())
        self.head = Head(self.config.features, classes).to(like.device, like.dtype).train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})[CONFIG] = _hidden_fields(self.config)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *more: Any, **named: Any
    ) -> None:
        own, theirs = _hidden_fields(self.config), local_metadata.get(CONFIG, {})
        differing = [field for field in own if theirs.get(field, own[field]) != own[field]]
        if differing:
            pairs = ", ".join(f"{field}={theirs[field]} (here {own[field]})" for field in differing)
            warnings.warn(f"these weights are of a model with {pairs}: it computes other outputs.", stacklevel=2)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more, **named)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks (ViT) or bottlenecks (ResNet), and recompute the rest in the backward pass.

        Args:
            enable: False goes back to keeping all activations.
        """
        for layer in self._checkpointed_layers():
            if is_checkpointed(layer):
                forward = vars(layer).pop("forward").args[0]
                if forward != layer.forward:  # one that was set before
                    layer.forward = forward
            if enable:
                # The instance's forward, not a call of the layer: hooks (FSDP's among them) stay outside of it.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def _hidden_fields(config: ViTConfig | ResNetConfig) -> dict[str, Any]:
    """The fields of a configuration that change the outputs but not the shapes of the tensors."""
    fields = {field: value for field in _HIDDEN if (value := getattr(config, field, None)) is not None}
    if isinstance(config, ViTConfig):
        fields["rope"] = asdict(config.rope) if config.rope else {}
        fields |= {"epsilons": config.stem.epsilons} if config.stem else {}
    return fields


def layer_index(layer: int, depth: int) -> int:
    """A layer counted from 0 or, negative, from the end -> its index; UserError if there is no such layer."""
    if not -depth <= layer < depth:
        raise UserError(f"there is no layer {layer}: the model has {depth}, counted from 0.")
    return layer % depth


def layer_indices(layers: Sequence[int] | None, depth: int) -> list[int]:
    """`layer_index` of each layer; None means all of them."""
    return list(range(depth)) if layers is None else [layer_index(i, depth) for i in index_list("layers", layers)]


def index_list(name: str, indices: Sequence[int]) -> list[int]:
    """The indices that a user passes as a list, array or tensor; UserError for anything else."""
    try:
        return [operator.index(index) for index in indices]
    except TypeError as error:
        raise UserError(f"{name} must be a list of whole numbers, not {shorten(repr(indices))}.") from error


def check_images(images: Tensor, channels: int) -> None:
    """Raise UserError unless `images` is a floating-point batch of images (batch, channels, height, width)."""
    if not isinstance(images, Tensor):
        raise UserError(
            f"this model reads a tensor (b, c, h, w), not {type(images).__name__}: make one with card.transform()."
        )
    if not images.is_floating_point():
        raise UserError(f"this model reads normalised floating-point images, not {images.dtype}: use card.transform().")
    if images.ndim != 4 or images.shape[1] != channels:
        raise UserError(
            f"this model reads a batch of {channels}-channel images (b, c, h, w), "
            f"not a tensor of shape {tuple(images.shape)}."
        )


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale uint8 pixels (batch, channels, height, width) to 0..1 and normalize them per channel, to float32.

    Floating-point images pass through unchanged: they come out of a user's own transform, which has normalized them
    already, and scaling them a second time would cost a model most of its accuracy without an error. Another dtype, or
    `mean` and `std` for another number of channels, is a UserError.
    """
    if images.is_floating_point():
        return images
    if images.dtype != torch.uint8:
        dtype = str(images.dtype).removeprefix("torch.")
        raise UserError(
            f"cannot normalize {dtype} images: pass uint8 pixels from 0 to 255, or normalized floating-point images."
        )
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f"images of {channels} channels need as many values of mean and std, not {len(mean)} and {len(std)}."
        )
    # torch.compile would warn of the cache, and needs none.
    factors = scale_and_shift.__wrapped__ if torch.compiler.is_compiling() else scale_and_shift
    scale, shift = factors(tuple(mean), tuple(std), images.device)
    images = images.contiguous()
    if fits_embedding(images):
        from vitral.kernels.embedding import normalize_pixels  # imports Triton

        with on_device_of(images):
            return normalize_pixels(images, scale, shift)
    return torch.addcmul(shift, images, scale)


@cache
@torch.inference_mode(False)
def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift, (channels, 1, 1) each, in double precision until the last rounding.

    Cached: a step that is captured as a CUDA graph must not copy anything from the host.
    """
    mean64, std64 = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    scale, shift = 1 / (255 * std64), -mean64 / std64
    return scale.to(device, torch.float32), shift.to(device, torch.float32)


@torch.no_grad()
def lecun_normal(weight: Tensor) -> None:
    """Fill an (out, in, ...) weight from a truncated normal of variance 1 / fan_in, Flax's default.

    Draws through the inverse of the distribution function: torch's rejection loop takes half a minute for the largest
    ResNet.
    """
    if weight.is_meta:
        return
    std = math.sqrt(1.0 / weight[0].numel()) / _TRUNCATED_STD
    edge = math.erf(2 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def normal(weight: Tensor, std: float) -> Tensor:
    """Fill and return `weight`. A meta tensor is left alone: torch would import its compiler to fill it."""
    return weight if weight.is_meta else nn.init.normal_(weight, std=std)


def xavier_uniform(weight: Tensor, parts: int = 1) -> None:
    """Glorot uniform for a (parts * out, in) weight that stacks `parts` matrices with fans of their own."""
    rows, columns = weight.shape
    bound = math.sqrt(6.0 / (rows // parts + columns))
    nn.init.uniform_(weight, -bound, bound)


def zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    """Fill the bias of a layer that has one with zeros."""
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
