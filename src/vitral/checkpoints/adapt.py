"""Adapt weights to another head, image size, patch size or channel count; every change is recorded as a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitral.architecture import (
    Architecture,
    Epsilons,
    ModuleConfig,
    Position,
    ResizeRule,
    ResNetConfig,
    Size,
    ViTConfig,
    as_size,
)
from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.position import resize_matrix, resize_offsets, resize_table, sincos2d

State = dict[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """An architecture with its state dict, and the changes since it was read."""

    architecture: Architecture
    state: State
    changes: tuple[str, ...] = ()

    def changed(self, architecture: Architecture, state: State, change: str) -> Weights:
        """These weights with some tensors replaced, and the change recorded."""
        return Weights(architecture, {**self.state, **state}, (*self.changes, change))


@dataclass(frozen=True)
class Adaptation:
    """Requested changes of weights; None keeps a property as it is."""

    image: int | Size | None = None  # position embeddings are resized
    patch: int | None = None  # the patch embedding is resized, too
    channels: int | None = None
    classes: int | None = None  # the head is replaced by zeros; 0 removes it
    resize: ResizeRule | None = None  # another interpolation rule for position embeddings


def adapt(weights: Weights, changes: Adaptation) -> Weights:
    """Adapt weights; tensors that need no change stay bit-identical."""
    if changes.resize is not None and isinstance(weights.architecture, ViTConfig):
        weights = replace(weights, architecture=replace(weights.architecture, resize=changes.resize))
    if changes.channels is not None and changes.channels != weights.architecture.channels:
        weights = to_channels(weights, changes.channels)
    image = weights.architecture.image if changes.image is None else as_size(changes.image)
    weights = to_size(weights, image, changes.patch)
    if changes.classes is not None and changes.classes != weights.architecture.classes:
        weights = to_classes(weights, changes.classes)
    return weights


def to_classes(weights: Weights, classes: int) -> Weights:
    """Replace the head by zeros for another number of classes, without a tanh layer (section 3.1); 0 removes it."""
    if classes < 0:
        raise UserError(f"a model cannot have {classes} classes.")
    old = weights.architecture
    if isinstance(old, ModuleConfig):
        raise UserError(f'vitral cannot change the head of "{old.name}", your own module: change it in your code.')
    changes: dict[str, Any] = {"classes": classes}
    if isinstance(old, ViTConfig):
        changes |= {"representation": 0, "head_bias": True}
    new = replace(old, **changes)
    head = {"head.output.weight": torch.zeros(classes, old.features), "head.output.bias": torch.zeros(classes)}
    kept = {key: array for key, array in weights.state.items() if not key.startswith("head.")}
    tanh = " without its tanh layer" if isinstance(old, ViTConfig) and old.representation else ""
    sizes = f"{old.classes} -> {classes} classes" if classes != old.classes else f"of {classes} classes replaced"
    change = f"head {sizes}{tanh}" + (", zero-initialised" if classes else "")
    return Weights(new, {**kept, **(head if classes else {})}, (*weights.changes, change))


# Rules of patches whose positions have a rule of timm's.
_PATCH_RULES: dict[ResizeRule, ResizeRule] = {"timm": "timm", "naflex-par": "timm", "linear": "linear"}


def to_size(weights: Weights, image: Size, patch: int | None = None) -> Weights:
    """Resize position embeddings for another image size or patch size, by the architecture's rule.

    The patch embedding is resized by FlexiViT's pseudo-inverse: a resized patch keeps its embedding. Patches are
    resized as in that paper, linear with antialiasing, but as positions are where timm resizes both.
    """
    old = weights.architecture
    if isinstance(old, ModuleConfig):
        if image == old.image and patch is None:
            return weights
        raise UserError(f'vitral cannot resize "{old.name}", your own module: change it in your code.')
    if not isinstance(old, ViTConfig):
        return _resnet_to_size(weights, old, image, patch)
    patch = old.patch if patch is None else patch
    new = replace(old, image=image, patch=patch)
    patch_rule = _PATCH_RULES.get(old.resize, "siglip")
    resized = f"patch {old.patch} -> {patch} (pseudo-inverse resize, rule {patch_rule})"
    changes = [resized] if patch != old.patch else []
    changes += [f"image {_by(old.image)} -> {_by(image)} pixels"] if image != old.image else []
    if not changes:
        return weights
    if old.grid(old.image) != new.grid(image):
        rule = f" (rule {old.resize})" if old.position in ("1d", "2d") else ""
        changes.append(f"grid {_by(old.grid(old.image))} -> {_by(new.grid(image))}{rule}")
    state = _resized(weights.state, _shapes(new), old.resize)
    if patch != old.patch:
        state["embed.weight"] = resize_patch_kernel(weights.state["embed.weight"], patch, patch_rule)
    return weights.changed(new, state, ", ".join(changes))


def _resnet_to_size(weights: Weights, old: ResNetConfig, image: Size, patch: int | None) -> Weights:
    """Only the axial variant has position tables to resize; for a plain ResNet, only the size is recorded."""
    if patch is not None:
        raise UserError("a ResNet has no patches: omit patch=.")
    if image == old.image:
        return weights
    new = replace(old, image=image)
    state = _resized(weights.state, _shapes(new), "google")
    return weights.changed(new, state, f"image {_by(old.image)} -> {_by(image)} pixels")


def to_channels(weights: Weights, channels: int) -> Weights:
    """Adapt the first convolution to another number of input channels.

    One channel gets the sum of the kernels: a grey image then gives the same output as its copies in every channel, if
    all have the same mean and std. More channels are tiled and scaled so that the sum stays the same.
    """
    old = weights.architecture
    if channels < 1:
        raise UserError(f"an image cannot have {channels} channels.")
    keys = ("root.weight", "stem.root.conv.weight", "embed.weight")
    key = next(name for name in keys if name in weights.state)
    kernel = weights.state[key]
    if channels == 1:
        adapted = kernel.sum(dim=1, keepdim=True)
    else:
        copies = -(-channels // old.channels)
        adapted = kernel.repeat(1, copies, 1, 1)[:, :channels] * (old.channels / channels)
    method = "summed" if channels == 1 else "tiled and scaled"
    if key != "embed.weight":
        method += ", approximate: the root standardises its kernel"
    return weights.changed(
        replace(old, channels=channels),
        {key: adapted.contiguous()},
        f"channels {old.channels} -> {channels} ({method})",
    )


def to_table(weights: Weights, allowed: tuple[Position, ...]) -> Weights:
    """Convert positions that a format does not support to a learned table with the same values at the native size."""
    old = weights.architecture
    if (
        not isinstance(old, ViTConfig)
        or old.position in allowed
        or old.position in ("relative", "bias")
        or old.injection != "input"
    ):
        return weights
    rows, columns = old.grid(old.image)
    state = dict(weights.state)
    if old.position == "2d":
        x, y = state.pop("positions.0.x"), state.pop("positions.0.y")
        table = torch.cat([x.expand(rows, -1, -1), y.unsqueeze(1).expand(-1, columns, -1)], dim=-1).contiguous()
    elif old.position == "sincos2d":
        table = sincos2d((rows, columns), old.width)
    else:
        table = torch.zeros(rows, columns, old.width)
    new = replace(old, position="1d", class_position=old.class_row)
    change = f'positions "{old.position}" written as a table of {rows}x{columns}'
    return Weights(new, {**state, "positions.0.table": table}, (*weights.changes, change))


def with_class_row(weights: Weights) -> Weights:
    """Give a class token without a position row one of zeros, which computes the same."""
    old = weights.architecture
    if not isinstance(old, ViTConfig) or not old.class_token or old.class_row or old.position != "1d":
        return weights
    row = {"positions.0.class_row": torch.zeros(old.width)}
    return weights.changed(replace(old, class_position=True), row, "class token given a position row of zeros")


def without_class_row(weights: Weights) -> Weights:
    """Fold the class token's position row into the token, which computes the same."""
    old = weights.architecture
    if not isinstance(old, ViTConfig) or not old.class_row or old.injection != "input":
        return weights
    state = dict(weights.state)
    token = state["class_token"] + state.pop("positions.0.class_row")
    changes = (*weights.changes, "position row of the class token folded into the token")
    return Weights(replace(old, class_position=False), {**state, "class_token": token}, changes)


def to_epsilons(weights: Weights, epsilons: Epsilons) -> Weights:
    """Scale the filters of a ResNet so that weight standardization with other epsilons gives the same filters.

    The GroupNorms of a hybrid's stem have another epsilon, too, and no weights make up for that: where activations are
    large, as those of trained stems are, the difference is below float32.
    """
    old = weights.architecture
    if isinstance(old, ResNetConfig) and old.epsilons != epsilons:
        new: Architecture = replace(old, epsilons=epsilons)
        change = "filters scaled"
    elif isinstance(old, ViTConfig) and old.stem is not None and old.stem.epsilons != epsilons:
        new = replace(old, stem=replace(old.stem, epsilons=epsilons))
        change = "filters of the stem scaled, the epsilon of its GroupNorms changed"
    else:
        return weights
    # Every convolution with more than two axes but the patch embedding standardizes its filters.
    filters = {key: array for key, array in weights.state.items() if array.ndim == 4 and key != "embed.weight"}
    additive = isinstance(old, ViTConfig)
    scaled = {key: array * _filter_scales(array, epsilons, additive) for key, array in filters.items()}
    return weights.changed(new, scaled, f"{change}: weight standardization with the epsilons of {epsilons}")


def _filter_scales(filters: Tensor, epsilons: Epsilons, additive: bool) -> Tensor:
    """The factor of each filter, (outputs, 1, 1, 1), from the other epsilons to these; see `Epsilons`.

    `additive` states that Google's divisor is std + 1e-5 (a stem), not sqrt(var + 1e-10) (BiT).
    """
    std = filters.double().std((1, 2, 3), correction=0, keepdim=True)
    if not additive:
        factor = torch.full_like(std, 10.0 if epsilons == "timm" else 0.1)
    elif epsilons == "timm":  # a / sqrt(a^2 var + 1e-8) = 1 / (std + 1e-5)
        factor = (1e-8 / (2e-5 * std + 1e-10)).sqrt()
    else:  # a / (a std + 1e-5) = 1 / sqrt(var + 1e-8)
        factor = 1e-5 * ((std.square() + 1e-8).sqrt() + std) / 1e-8
    return factor.to(filters.dtype)


def resize_patch_kernel(kernel: Tensor, patch: int, rule: ResizeRule) -> Tensor:
    """(dim, channels, p, p) -> (dim, channels, p', p'); if p' >= p, <resized patch, new kernel> = <patch, kernel>."""
    exact = kernel.double()
    inverse = torch.linalg.pinv(resize_matrix(kernel.shape[-1], patch, rule, exact).T)  # (p', p)
    return (inverse @ exact @ inverse.T).to(kernel.dtype)


def _shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(array.shape) for key, array in build(architecture).state_dict().items()}


def _resized(state: State, shapes: dict[str, tuple[int, ...]], rule: ResizeRule) -> State:
    """The position tables whose shape changes, resized in double precision."""
    resized = {}
    for key, array in state.items():
        shape = shapes[key]
        if tuple(array.shape) == shape or key == "embed.weight":
            continue
        exact = array.double()
        if key.endswith(".table") and array.ndim == 3:  # (h, w, d)
            exact = resize_table(exact, (shape[0], shape[1]), rule)
        elif key.endswith((".x", ".y")):  # one axis of a factorised table
            exact = resize_table(exact.unsqueeze(1), (shape[0], 1), rule).squeeze(1)
        else:  # relative offsets
            exact = resize_offsets(exact, shape[0])
        resized[key] = exact.to(array.dtype)
    return resized


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
