"""Exact attention while fused attention stays on: probabilities computed anew from the queries and keys that were used.

    with capture(model, layers=[-1], rows="cls") as seen:
        logits = model(images)
    seen[-1]  # (b, heads, 1, tokens)

The model computes what it computes without a capture; each watched layer only shows its tensors. The probabilities of
the asked layers, heads and rows alone are made, so that rows of the class token cost memory in n, not in n^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.errors import UserError
from vitral.models.heads import MapPool
from vitral.models.layers import Attention, AxialBlock, Block
from vitral.models.vit import ViT

Axis = Literal["row", "column"]
Key = int | tuple[int, Axis]  # a block's number, in an axial block with the axis
Rows = Literal["cls", "all"] | Sequence[int]
Reduce = Callable[[Tensor], Tensor]
Places = slice | list[int]  # a slice is a view; a list of numbers has to travel to the device first

_ALL = slice(None)
_POOL = -1  # where the attention of MAP pooling is kept; blocks count from 0


@contextmanager
def capture(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Rows = "cls",
    gradients: bool = False,
    reduce: Reduce | None = None,
) -> Iterator[Seen]:
    """While it lasts, every forward pass of `model` leaves its attention in what is yielded; the latest pass counts.

    layers     blocks, from 0 or, negative, from the end; all where none are named
    heads      likewise
    rows       queries: the class token, all tokens, or tokens by number (prefix tokens come first)
    gradients  keep what `Seen.gradients` needs
    reduce     applied to the probabilities of each layer at once, where only something smaller is to be kept

    A model may be compiled, before or inside; captures may nest and overlap, and a model that is wrapped is found.
    """
    vit = _vision_transformer(model)
    chosen = range(vit.config.depth) if layers is None else [_layer(number, vit.config) for number in layers]
    places = {key: place for number in sorted(set(chosen)) for key, place in _attentions(number, vit.blocks[number])}
    wanted, part = _rows(rows, vit.config), _heads(heads, vit.config)
    watches: dict[Key, _Watch] = {key: _Watch(wanted, part, gradients, reduce) for key in places}
    if vit.map is not None:
        places[_POOL], watches[_POOL] = vit.map, _Watch(_ALL, part, gradients, reduce)
    for key, place in places.items():
        place.watchers.append(watches[key])
    try:
        yield Seen(vit, watches)
    finally:
        for key, place in places.items():
            place.watchers.remove(watches[key])


class Seen:
    """The attention of the latest forward pass: probabilities before dropout, float32, without a gradient.

    seen[layer]            (b, heads, rows, tokens)
    seen[layer, "row"]     (b * h, heads, w, w), in an axial block: the patches of each row, image after image
    seen[layer, "column"]  (b * w, heads, h, h), likewise: of each column
    seen.pool              (b, heads, 1, n), where attention pools: how its probe reads the patches

    Layers may be counted from the end. With `reduce`, what that made of these.
    """

    def __init__(self, model: ViT, watches: dict[Key, _Watch]) -> None:
        self._model = model
        self._watches = watches

    @property
    def keys(self) -> tuple[Key, ...]:
        """What `seen[...]` has, in the order of the computation."""
        return tuple(key for key in self._watches if key != _POOL)

    def __getitem__(self, key: Key) -> Tensor:
        number, axis = key if isinstance(key, tuple) else (key, None)
        layer = _layer(number, self._model.config)
        found = self._watches.get(layer if axis is None else (layer, axis))
        if found is None:
            raise UserError(f"the attention of {key!r} was not asked for: it is one of {list(self.keys)}.")
        return _shown(found.attention)

    @property
    def pool(self) -> Tensor:
        if _POOL not in self._watches:
            raise UserError('this model does not pool by attention: only pool="map" has a probe.')
        return _shown(self._watches[_POOL].attention)

    def gradients(self, score: Tensor) -> dict[Key, Tensor]:
        """d score / d attention for each of `keys`, of the same shape, float32; `score` is a sum of the pass's outputs.

        A layer's output is A V, so the gradient of A is that of the output times V transposed: fused attention may
        stay on here as well. The graph is kept, so that several scores of one pass can be asked for.
        """
        if self._model.training and self._model.config.attention_dropout:
            raise UserError("dropout hides the gradient of the attention: call model.eval() before the forward pass.")
        watches = [self._watches[key] for key in self.keys]
        outputs = [_shown(watch.output) for watch in watches]
        if not (score.requires_grad and all(output.requires_grad for output in outputs)):
            raise UserError("the forward pass recorded no gradient: run it outside no_grad and inference_mode.")
        found = torch.autograd.grad(score, outputs, retain_graph=True, allow_unused=True)
        result: dict[Key, Tensor] = {}
        for key, watch, gradient in zip(self.keys, watches, found, strict=True):
            if gradient is None:
                raise UserError(f"the score does not depend on layer {key!r}: use this pass, and no compiled model.")
            result[key] = watch.product(gradient, _shown(watch.v))
        return result


class _Watch:
    """Sits at one attention. Plain attributes, so that torch.compile looks through it and a next one fits its graph."""

    def __init__(self, rows: Places, heads: Places, gradients: bool, reduce: Reduce | None) -> None:
        self.rows = rows
        self.heads = heads
        self.keep_graph = gradients
        self.reduce = reduce
        self.attention: Tensor | None = None
        self.output: Tensor | None = None
        self.v: Tensor | None = None

    def see(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, output: Tensor) -> None:
        logits = self.product(q.detach(), k.detach()) * q.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + self.part(bias.detach())
        attention = logits.softmax(dim=-1)
        self.attention = attention if self.reduce is None else self.reduce(attention)
        if self.keep_graph:
            self.output, self.v = output, v.detach()

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """(b, heads, queries, d), (b, heads, n, d) -> (b, heads asked, rows asked, n), float32 under autocast too"""
        with torch.autocast(left.device.type, enabled=False):
            return self.part(left) @ right[:, self.heads].float().transpose(-1, -2)

    def part(self, x: Tensor) -> Tensor:
        """(b, heads, queries, ...) -> (b, heads asked, rows asked, ...), float32"""
        queries = x.shape[2]
        if isinstance(self.rows, list) and any(not -queries <= row < queries for row in self.rows):
            raise UserError(f"rows={self.rows} asks for a token that is not there: there are {queries}.")
        return x[:, self.heads][:, :, self.rows].float()


def _vision_transformer(model: nn.Module) -> ViT:
    """The model itself, or the one inside a wrapper (torch.compile, DDP, an objective)."""
    for module in model.modules():
        if isinstance(module, ViT):
            return module
    raise UserError("this model has no attention to capture: choose a Vision Transformer.")


def _attentions(number: int, block: nn.Module) -> list[tuple[Key, Attention | MapPool]]:
    if isinstance(block, AxialBlock):
        return [((number, "row"), block.row.attention), ((number, "column"), block.column.attention)]
    assert isinstance(block, Block)
    return [(number, block.attention)]


def _layer(number: int, config: ViTConfig) -> int:
    if not -config.depth <= number < config.depth:
        raise UserError(f"there is no layer {number}: the model has {config.depth}, counted from 0.")
    return number % config.depth


def _heads(heads: Sequence[int] | None, config: ViTConfig) -> Places:
    for number in heads or ():
        if not -config.heads <= number < config.heads:
            raise UserError(f"there is no head {number}: the model has {config.heads}, counted from 0.")
    return _ALL if heads is None else list(heads)


def _rows(rows: Rows, config: ViTConfig) -> Places:
    if rows == "all":
        return _ALL
    if config.axial:
        raise UserError('the lines of an axial model are captured whole: say rows="all".')
    if rows == "cls":
        if not config.class_token:
            raise UserError('this model has no class token: say rows="all", or name tokens by number.')
        return slice(1)
    if isinstance(rows, str):
        raise UserError(f'rows="{rows}" is not one of cls, all, or a list of tokens.')
    return list(rows)


def _shown(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise UserError(
            "there is nothing to see yet: run the model inside the capture (gradients need gradients=True)."
        )
    return tensor
