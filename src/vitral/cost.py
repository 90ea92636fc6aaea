"""Parameters, multiply-accumulates and tokens of a model, computed from its architecture alone. No torch here.

Matrix products and convolutions count; norms, activations, softmax, pooling and the resizing of positions do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vitral.architecture import (
    AXIAL_HEADS,
    Architecture,
    ModelConfig,
    ModuleConfig,
    ResNetConfig,
    Size,
    StemConfig,
    ViTConfig,
    as_size,
)
from vitral.errors import UserError


@dataclass(frozen=True)
class Cost:
    """The size of a model, and the cost of a forward pass of one image."""

    params: int
    macs: int  # multiply-accumulates
    tokens: int  # length of the token sequence; of a ResNet, pixels of the last feature map
    grid: Size


def cost(architecture: Architecture, image: int | Size | None = None) -> Cost:
    """The cost of a model for images of a size, by default its own; raises UserError for a user's own module, whose
    layers vitral does not know."""
    if isinstance(architecture, ModuleConfig):
        raise UserError(f'cannot compute the cost of "{architecture.name}": vitral does not know its layers.')
    size = architecture.image if image is None else as_size(image)
    # Position tables keep the grid they were built for, so parameters do not depend on the image.
    params, macs = _count(architecture, architecture.image).params, _count(architecture, size).macs
    rows, columns = architecture.grid(size)
    tokens = architecture.tokens(size) if isinstance(architecture, ViTConfig) else rows * columns
    return Cost(params=params, macs=macs, tokens=tokens, grid=(rows, columns))


def training_flops(
    architecture: Architecture, *, images: float, epochs: float, image: int | Size | None = None
) -> float:
    """Floating-point operations of a training run, counted as for the paper's exaFLOPs (Table 6).

    A multiply-accumulate is 2 operations, and the backward pass takes twice the operations of the forward pass.
    """
    return 2.0 * 3.0 * cost(architecture, image).macs * images * epochs


def run_flops(architecture: Architecture, *, seen: int, images: int, trainable: str) -> float:
    """Floating-point operations of a run, as in `training_flops`; `seen` are images processed, repetitions included.

    With a trainable "head", features are computed once, in a forward pass of each image; other partial fine-tuning
    counts in full, since its gradients go through the whole model.
    """
    if trainable == "head":
        return 2.0 * cost(architecture).macs * images
    return training_flops(architecture, images=seen, epochs=1)


class _LayerCost(NamedTuple):
    """The cost of a layer, or of several."""

    params: int = 0
    macs: int = 0


def _total(*parts: _LayerCost) -> _LayerCost:
    params, macs = zip(*parts, strict=True)
    return _LayerCost(sum(params), sum(macs))


def _times(part: _LayerCost, count: int) -> _LayerCost:
    return _LayerCost(part.params * count, part.macs * count)


def _linear(inputs: int, outputs: int, rows: int, *, bias: bool = True) -> _LayerCost:
    return _LayerCost((inputs + bias) * outputs, rows * inputs * outputs)


def _convolution(inputs: int, outputs: int, kernel: int, size: Size) -> _LayerCost:
    """A convolution without bias whose output has this size."""
    weights = inputs * outputs * kernel**2
    return _LayerCost(weights, weights * size[0] * size[1])


def _norm(width: int) -> _LayerCost:
    return _LayerCost(params=2 * width)


def _count(architecture: ModelConfig, image: Size) -> _LayerCost:
    return _vit(architecture, image) if isinstance(architecture, ViTConfig) else _resnet(architecture, image)


def _vit(config: ViTConfig, image: Size) -> _LayerCost:
    rows, columns = config.grid(image)
    channels = config.stem.channels if config.stem else config.channels
    parts = [
        _convolution(channels, config.width, config.patch, (rows, columns)),
        _LayerCost(params=config.width * config.patch_bias),
        _LayerCost(params=config.prefix * config.width),
        _positions(config, rows, columns),
        *_layers(config, rows, columns),
        *[_norm(config.width)] * (config.pre_norm + (config.norm_place != "none")),
        _head(config),
    ]
    if config.stem:
        parts.append(_stem(config.stem, config.channels, image))
    if config.pool == "map":
        parts.append(_probe(config, rows * columns + config.prefix * config.map_prefix))
    return _total(*parts)


def _positions(config: ViTConfig, rows: int, columns: int) -> _LayerCost:
    """The tables that are added to tokens, and learned RoPE; relative positions count with the layers."""
    learned_rope = config.depth * config.width if config.rope and config.rope.learned else 0
    entries = {"1d": rows * columns * config.width, "2d": (rows + columns) * config.width // 2}.get(config.position, 0)
    tables = config.depth if config.injection == "every" else 1
    return _LayerCost(params=learned_rope + tables * (entries + config.class_row * config.width))


def _layers(config: ViTConfig, rows: int, columns: int) -> Iterator[_LayerCost]:
    patches = rows * columns
    if config.axial:
        # Appendix D.6: a whole block within every row, then a whole block within every column.
        yield _times(_block(config, sequences=rows, length=columns), config.depth)
        yield _times(_block(config, sequences=columns, length=rows), config.depth)
    else:
        yield _times(_block(config, sequences=1, length=config.prefix + patches), config.depth)
    if config.position == "relative":
        offsets = 2 * patches - 1
        # Every query is multiplied with every offset; all heads share a table, and their widths add up to the model's.
        offset_logits = _LayerCost(offsets * (config.width // config.heads), patches * offsets * config.width)
        yield _times(offset_logits, config.depth)
    if config.position == "bias":
        offsets = (2 * rows - 1) * (2 * columns - 1) + 3 * config.class_token
        yield _LayerCost(params=config.depth * config.heads * offsets)


def _block(config: ViTConfig, *, sequences: int, length: int) -> _LayerCost:
    """One block over `sequences` separate sequences of `length` tokens."""
    width, tokens = config.width, sequences * length
    return _total(
        _norm(width),
        _linear(width, 3 * width, tokens, bias=False),
        _LayerCost(params=width * (2 + config.key_bias) * config.qkv_bias),
        _attention(width, tokens, length),
        _linear(width, width, tokens),
        _norm(width),
        _two_layers(width, config.mlp * (2 if config.swiglu else 1), config.mlp, tokens),
        _LayerCost(params=2 * width * config.layer_scale),
        _LayerCost(params=4 * width // config.heads * config.qk_norm),
        _LayerCost(params=2 * (width * config.attention_norm + config.mlp * config.mlp_norm)),
    )


def _attention(width: int, queries: int, keys: int) -> _LayerCost:
    """Queries times keys, and attention weights times values."""
    return _LayerCost(macs=2 * queries * keys * width)


def _two_layers(width: int, hidden: int, inner: int, rows: int) -> _LayerCost:
    """width -> hidden, which an activation may halve to inner, -> width"""
    return _total(_linear(width, hidden, rows), _linear(inner, width, rows))


def _probe(config: ViTConfig, patches: int) -> _LayerCost:
    """Attention pooling: one learned query over the patches, then an MLP."""
    width = config.width
    return _total(
        _LayerCost(params=width),
        _linear(width, width, 1),
        _linear(width, 2 * width, patches),
        _attention(width, 1, patches),
        _linear(width, width, 1),
        _norm(width),
        _two_layers(width, config.map_mlp or config.mlp, config.map_mlp or config.mlp, 1),
    )


def _head(config: ViTConfig) -> _LayerCost:
    hidden = _linear(config.features, config.representation, 1)
    logits = _linear(config.representation or config.features, config.classes, 1, bias=config.head_bias)
    return _total(hidden, logits)


class _BottleneckShape(NamedTuple):
    """A bottleneck of a ResNet: 1x1, 3x3 (with the stride), 1x1, and a projection in the first one of a stage."""

    inputs: int
    middle: int
    outputs: int
    before: Size
    after: Size
    first: bool


def _bottleneck_shapes(blocks: tuple[int, ...], width: int, image: Size) -> Iterator[_BottleneckShape]:
    size = _half(_half(image))
    inputs = 64 * width
    for stage, depth in enumerate(blocks):
        middle = 64 * width * 2**stage
        for index in range(depth):
            after = _half(size) if stage and not index else size
            yield _BottleneckShape(inputs, middle, 4 * middle, size, after, first=not index)
            inputs, size = 4 * middle, after


def _half(size: Size) -> Size:
    """Half of each side, rounded up, the output size of strided layers with padding."""
    return -(-size[0] // 2), -(-size[1] // 2)


def _bottleneck(shape: _BottleneckShape, *, axial: bool = False) -> _LayerCost:
    """The convolutions of a bottleneck; an axial one attends at full size before it strides."""
    parts = [
        _convolution(shape.inputs, shape.middle, 1, shape.before),
        _axial(shape.middle, shape.before) if axial else _convolution(shape.middle, shape.middle, 3, shape.after),
        _convolution(shape.middle, shape.outputs, 1, shape.after),
    ]
    if shape.first:
        parts.append(_convolution(shape.inputs, shape.outputs, 1, shape.after))
    return _total(*parts)


def _axial(channels: int, size: Size) -> _LayerCost:
    """Attention along the height, then along the width, with offset vectors for queries, keys and values."""
    positions = size[0] * size[1]
    parts = []
    for length in size:
        offsets = (2 * length - 1) * 2 * channels // AXIAL_HEADS
        # Queries and keys have half the channels, values all: q.k, q.offset, k.offset, then values and their offsets.
        attention = positions * length * (3 * channels // 2 + 2 * channels)
        parts += [_convolution(channels, 2 * channels, 1, size), _LayerCost(offsets, attention)]
    return _total(*parts)


def _stem(config: StemConfig, channels: int, image: Size) -> _LayerCost:
    """A hybrid's ResNet: a norm after every convolution."""
    root = 64 * config.width
    parts = [_convolution(channels, root, 7, _half(image)), _norm(root)]
    for shape in _bottleneck_shapes(config.blocks, config.width, image):
        parts += [_bottleneck(shape), _norm(shape.middle), _norm(shape.middle), _norm(shape.outputs)]
        if shape.first:
            parts.append(_norm(shape.outputs))
    return _total(*parts)


def _resnet(config: ResNetConfig, image: Size) -> _LayerCost:
    """BiT's ResNet: a norm before every convolution of a bottleneck, none at the root, one at the end."""
    parts = [_convolution(config.channels, 64 * config.width, 7, _half(image))]
    for shape in _bottleneck_shapes(config.blocks, config.width, image):
        parts += [_bottleneck(shape, axial=config.axial), _norm(shape.inputs), _norm(shape.middle), _norm(shape.middle)]
    return _total(*parts, _norm(config.features), _linear(config.features, config.classes, 1))
