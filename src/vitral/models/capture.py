"""Exact attention maps with fused attention enabled: probabilities are recomputed from queries and keys.

    with capture(model, layers=[-1], rows="cls") as seen:
        logits = model(images)
    seen[-1]  # (batch, heads, 1, tokens)

The model computes the same as without a capture; observers of the chosen layers read their tensors. Only the
probabilities of the chosen layers, heads and rows are computed, so rows of the class token need memory in O(tokens),
not O(tokens^2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.errors import UserError
from vitral.models.layers import Attention, AxialBlock, Block, MapPool
from vitral.models.model import index_list, layer_index, layer_indices
from vitral.models.vit import ViT

Axis = Literal["row", "column"]
LayerKey = int | tuple[int, Axis]  # a block's index; in an axial block with the axis
Rows = Literal["cls", "all"] | Sequence[int]
Reduce = Callable[[Tensor], Tensor]
Indices = slice | list[int]  # a slice is a view; a list has to be copied to the device first

_ALL = slice(None)
_POOL = -1  # the key of MAP pooling; blocks count from 0


@contextmanager
def capture(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Rows = "cls",
    gradients: bool = False,
    reduce: Reduce | None = None,
) -> Iterator[AttentionCapture]:
    """Record the attention of every forward pass inside the `with` block; the latest pass replaces earlier ones.

    Captures may nest and overlap, and the model may be compiled, before or inside.

    Args:
        model: a ViT, or a wrapper around one (torch.compile, DDP, an objective).
        layers: blocks, counted from 0 or, negative, from the end; None for all.
        heads: likewise.
        rows: queries: "cls" for the class token, "all", or token indices (prefix tokens come first).
        gradients: keep what `AttentionCapture.gradients` needs.
        reduce: applied to the probabilities of each layer at once, where only a summary is to be kept.

    Yields:
        The captured attention, indexed by layer.

    Raises:
        UserError: the model has no attention, or no such layer, head or row.
    """
    vit = _find_vit(model)
    indices = sorted(set(layer_indices(layers, len(vit.blocks))))
    modules = {key: module for index in indices for key, module in _attention_layers(index, vit.blocks[index])}
    row_indices, head_indices = _row_indices(rows, vit.config), _head_indices(heads, vit.config)
    captures: dict[LayerKey, _LayerCapture] = {
        key: _LayerCapture(row_indices, head_indices, gradients, reduce) for key in modules
    }
    if vit.map is not None:
        modules[_POOL], captures[_POOL] = vit.map, _LayerCapture(_ALL, head_indices, gradients, reduce)
    for key, module in modules.items():
        module.observers.append(captures[key])
    try:
        yield AttentionCapture(vit, captures)
    finally:
        for key, module in modules.items():
            module.observers.remove(captures[key])


class AttentionCapture:
    """The attention of the latest forward pass: probabilities before dropout, float32, without a gradient.

    seen[layer]            (batch, heads, rows, tokens)
    seen[layer, "row"]     (batch * h, heads, w, w), in an axial block: the patches of each row, image after image
    seen[layer, "column"]  (batch * w, heads, h, h), likewise of each column
    seen.pool              (batch, heads, 1, patches), of attention pooling: how its probe reads the patches

    Layers may be negative, counted from the end. With `reduce`, its results instead of these.
    """

    def __init__(self, model: ViT, captures: dict[LayerKey, _LayerCapture]) -> None:
        self._model = model
        self._captures = captures

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={list(self.keys)})"

    @property
    def keys(self) -> tuple[LayerKey, ...]:
        """The keys of `seen[...]`, in the order of computation."""
        return tuple(key for key in self._captures if key != _POOL)

    def __iter__(self) -> Iterator[LayerKey]:
        """The keys, as of a dict."""
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, key: LayerKey) -> Tensor:
        layer, axis = key if isinstance(key, tuple) else (key, None)
        index = layer_index(layer, len(self._model.blocks))
        captured = self._captures.get(index if axis is None else (index, axis))
        if captured is None:
            raise UserError(f"the attention of {key!r} was not captured: use one of {list(self.keys)}.")
        return _require(captured.attention)

    @property
    def pool(self) -> Tensor:
        """The attention of MAP pooling."""
        if _POOL not in self._captures:
            raise UserError('this model does not pool by attention: only pool="map" has a probe.')
        return _require(self._captures[_POOL].attention)

    def gradients(self, score: Tensor) -> dict[LayerKey, Tensor]:
        """The gradient of `score` with respect to the attention of each of `keys`, of the same shape, float32.

        A layer's output is A V, so the gradient of A is that of the output times V transposed: fused attention stays
        on here as well. The graph is retained, so that several scores of one pass can be differentiated.

        Args:
            score: a sum over the outputs of the captured forward pass.

        Raises:
            UserError: the pass was run without `gradients=True` or without autograd, or with attention dropout.
        """
        if self._model.training and self._model.config.attention_dropout:
            raise UserError("dropout hides the gradient of the attention: call model.eval() before the forward pass.")
        captures = [self._captures[key] for key in self.keys]
        outputs = [_require(captured.output) for captured in captures]
        if not (score.requires_grad and all(output.requires_grad for output in outputs)):
            raise UserError("the forward pass recorded no gradient: run it outside no_grad and inference_mode.")
        output_gradients = torch.autograd.grad(score, outputs, retain_graph=True, allow_unused=True)
        gradients: dict[LayerKey, Tensor] = {}
        for key, captured, gradient in zip(self.keys, captures, output_gradients, strict=True):
            if gradient is None:
                raise UserError(f"the score does not depend on layer {key!r}: use this pass, and no compiled model.")
            gradients[key] = captured.product(gradient, _require(captured.v))
        return gradients


class _LayerCapture:
    """Observer of one attention layer. Plain attributes, so that torch.compile traces it and can reuse its graph."""

    def __init__(self, rows: Indices, heads: Indices, gradients: bool, reduce: Reduce | None) -> None:
        self.rows = rows
        self.heads = heads
        self.keep_graph = gradients
        self.reduce = reduce
        self.attention: Tensor | None = None
        self.output: Tensor | None = None
        self.v: Tensor | None = None

    def observe(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, output: Tensor) -> None:
        logits = self.product(q.detach(), k.detach()) * q.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + self.select(bias.detach())
        attention = logits.softmax(dim=-1)
        self.attention = attention if self.reduce is None else self.reduce(attention)
        if self.keep_graph:
            self.output, self.v = output, v.detach()

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """(batch, heads, queries, dim), (batch, heads, n, dim) -> (batch, chosen heads, chosen rows, n), float32"""
        with torch.autocast(left.device.type, enabled=False):
            return self.select(left) @ right[:, self.heads].float().transpose(-1, -2)

    def select(self, x: Tensor) -> Tensor:
        """(batch, heads, queries, ...) -> (batch, chosen heads, chosen rows, ...), float32"""
        queries = x.shape[2]
        if isinstance(self.rows, list) and any(not -queries <= row < queries for row in self.rows):
            raise UserError(f"rows={self.rows} contains a token that does not exist: there are {queries}.")
        return x[:, self.heads][:, :, self.rows].float()


def _find_vit(model: nn.Module) -> ViT:
    """The model itself, or the one inside a wrapper."""
    for module in model.modules():
        if isinstance(module, ViT):
            return module
    raise UserError("this model has no attention to capture: choose a Vision Transformer.")


def _attention_layers(index: int, block: nn.Module) -> list[tuple[LayerKey, Attention | MapPool]]:
    if isinstance(block, AxialBlock):
        return [((index, "row"), block.row.attention), ((index, "column"), block.column.attention)]
    assert isinstance(block, Block)
    return [(index, block.attention)]


def _head_indices(heads: Sequence[int] | None, config: ViTConfig) -> Indices:
    if heads is None:
        return _ALL
    indices = index_list("heads", heads)
    for head in indices:
        if not -config.heads <= head < config.heads:
            raise UserError(f"there is no head {head}: the model has {config.heads}, counted from 0.")
    return indices


def _row_indices(rows: Rows, config: ViTConfig) -> Indices:
    if rows == "all":
        return _ALL
    if config.axial:
        raise UserError('an axial model attends along whole rows and columns: use rows="all".')
    if rows == "cls":
        if not config.class_token:
            raise UserError('this model has no class token: use rows="all", or a list of token indices.')
        return slice(1)
    if isinstance(rows, str):
        raise UserError(f'rows="{rows}" is not one of cls, all, or a list of token indices.')
    return index_list("rows", rows)


def _require(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise UserError("nothing was captured yet: run the model inside the capture (gradients need gradients=True).")
    return tensor
