"""What a model costs, from its description alone: parameters, multiply-accumulates and tokens. No torch here.

Matrix products and convolutions count; norms, activations, softmax, pooling and the resizing of positions do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vitral.architecture import AXIAL_HEADS, Architecture, ResNetConfig, Size, StemConfig, ViTConfig, as_size


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass of one image, and the size of the model."""

    params: int
    macs: int  # multiply-accumulates
    tokens: int  # what the transformer attends over; for a ResNet, the positions of the last feature map
    grid: Size


def cost(architecture: Architecture, image: int | Size | None = None) -> Cost:
    """The cost at an image size, or at the architecture's own."""
    size = architecture.image if image is None else as_size(image)
    # Tables of positions keep the grid they were built for, so parameters never depend on the image.
    params, macs = _count(architecture, architecture.image).params, _count(architecture, size).macs
    rows, columns = architecture.grid(size)
    tokens = architecture.tokens(size) if isinstance(architecture, ViTConfig) else rows * columns
    return Cost(params=params, macs=macs, tokens=tokens, grid=(rows, columns))


def training_flops(
    architecture: Architecture, *, images: float, epochs: float, image: int | Size | None = None
) -> float:
    """Floating-point operations of a training run by the rule behind the paper's exaFLOPs (Table 6).

    A multiply-accumulate is 2 operations, and the backward pass takes twice the work of the forward pass.
    """
    return 2.0 * 3.0 * cost(architecture, image).macs * images * epochs


def run_flops(architecture: Architecture, *, seen: int, images: int, trainable: str) -> float:
    """What a run of `seen` images, repetitions included, from a training set of `images` costs by the same rule.

    With trainable="head" features are computed once, in a forward pass of each image; other partial tuning counts in full,
    since its gradients go through the whole model.
    """
    if trainable == "head":
        return 2.0 * cost(architecture).macs * images
    return training_flops(architecture, images=seen, epochs=1)


class _Part(NamedTuple):
    """What one layer, or a stack of them, adds."""

    params: int = 0
    macs: int = 0


def _total(parts: Iterable[_Part]) -> _Part:
    params, macs = zip(*parts, strict=True)
    return _Part(sum(params), sum(macs))


def _times(part: _Part, count: int) -> _Part:
    return _Part(part.params * count, part.macs * count)


def _linear(inputs: int, outputs: int, rows: int) -> _Part:
    return _Part((inputs + 1) * outputs, rows * inputs * outputs)


def _convolution(inputs: int, outputs: int, kernel: int, size: Size) -> _Part:
    """A convolution without bias that makes a map of this size."""
    weights = inputs * outputs * kernel**2
    return _Part(weights, weights * size[0] * size[1])


def _norm(width: int) -> _Part:
    return _Part(params=2 * width)


def _count(architecture: Architecture, image: Size) -> _Part:
    return _vit(architecture, image) if isinstance(architecture, ViTConfig) else _resnet(architecture, image)


def _vit(config: ViTConfig, image: Size) -> _Part:
    rows, columns = config.grid(image)
    channels = config.stem.channels if config.stem else config.channels
    parts = [
        _convolution(channels, config.width, config.patch, (rows, columns)),
        _Part(params=config.width),  # the bias of that convolution
        _Part(params=config.prefix * config.width),
        _positions(config, rows, columns),
        *_layers(config, rows, columns),
        _norm(config.width),
        _head(config),
    ]
    if config.stem:
        parts.append(_stem(config.stem, config.channels, image))
    if config.pool == "map":
        parts.append(_probe(config, rows * columns))
    return _total(parts)


def _positions(config: ViTConfig, rows: int, columns: int) -> _Part:
    """The tables that are added to tokens; relative positions belong to the layers."""
    entries = {"1d": rows * columns * config.width, "2d": (rows + columns) * config.width // 2}.get(config.position, 0)
    sets = config.depth if config.injection == "every" else 1
    return _Part(params=sets * (entries + config.class_row * config.width))


def _layers(config: ViTConfig, rows: int, columns: int) -> Iterator[_Part]:
    patches = rows * columns
    if config.axial:
        # Appendix D.6: a whole block within every row, then a whole block within every column.
        yield _times(_block(config, sequences=rows, length=columns), config.depth)
        yield _times(_block(config, sequences=columns, length=rows), config.depth)
    else:
        yield _times(_block(config, sequences=1, length=config.prefix + patches), config.depth)
    if config.position == "relative":
        offsets = 2 * patches - 1
        # Every query meets every offset; one table serves all heads, whose widths add up to the model's.
        offset_logits = _Part(offsets * (config.width // config.heads), patches * offsets * config.width)
        yield _times(offset_logits, config.depth)


def _block(config: ViTConfig, *, sequences: int, length: int) -> _Part:
    """One block over `sequences` separate runs of `length` tokens."""
    width, tokens = config.width, sequences * length
    return _total(
        (
            _norm(width),
            _linear(width, 3 * width, tokens),
            _attention(width, tokens, length),
            _linear(width, width, tokens),
            _norm(width),
            _mlp(config, tokens),
            _Part(params=2 * width * config.layer_scale),
        )
    )


def _attention(width: int, queries: int, keys: int) -> _Part:
    """Queries times keys, and their weights times values."""
    return _Part(macs=2 * queries * keys * width)


def _mlp(config: ViTConfig, rows: int) -> _Part:
    return _total((_linear(config.width, config.mlp, rows), _linear(config.mlp, config.width, rows)))


def _probe(config: ViTConfig, patches: int) -> _Part:
    """Attention pooling: one learned query over the patches, then an MLP."""
    width = config.width
    return _total(
        (
            _Part(params=width),
            _linear(width, width, 1),
            _linear(width, 2 * width, patches),
            _attention(width, 1, patches),
            _linear(width, width, 1),
            _norm(width),
            _mlp(config, 1),
        )
    )


def _head(config: ViTConfig) -> _Part:
    hidden = _linear(config.width, config.representation, 1)
    logits = _linear(config.representation or config.width, config.classes, 1)
    return _total((hidden, logits))


class _Unit(NamedTuple):
    """One bottleneck of a ResNet: 1x1, 3x3 (with the stride), 1x1, and a projection in the first unit of a stage."""

    inputs: int
    middle: int
    outputs: int
    before: Size
    after: Size
    first: bool


def _units(blocks: tuple[int, ...], width: int, image: Size) -> Iterator[_Unit]:
    size = _half(_half(image))
    inputs = 64 * width
    for stage, units in enumerate(blocks):
        middle = 64 * width * 2**stage
        for unit in range(units):
            after = _half(size) if stage and not unit else size
            yield _Unit(inputs, middle, 4 * middle, size, after, first=not unit)
            inputs, size = 4 * middle, after


def _half(size: Size) -> Size:
    """Half of each side, rounded up, as strided layers with padding do."""
    return -(-size[0] // 2), -(-size[1] // 2)


def _bottleneck(unit: _Unit, *, axial: bool = False) -> _Part:
    """The convolutions of a unit; an axial one attends at full size before it strides."""
    parts = [
        _convolution(unit.inputs, unit.middle, 1, unit.before),
        _axial(unit.middle, unit.before) if axial else _convolution(unit.middle, unit.middle, 3, unit.after),
        _convolution(unit.middle, unit.outputs, 1, unit.after),
    ]
    if unit.first:
        parts.append(_convolution(unit.inputs, unit.outputs, 1, unit.after))
    return _total(parts)


def _axial(channels: int, size: Size) -> _Part:
    """Attention along the height, then along the width, with offset vectors for queries, keys and values."""
    positions = size[0] * size[1]
    parts = []
    for length in size:
        offsets = (2 * length - 1) * 2 * channels // AXIAL_HEADS
        # Queries and keys have half the channels, values all: q.k, q.offset, k.offset, then values and their offsets.
        attention = positions * length * (3 * channels // 2 + 2 * channels)
        parts += [_convolution(channels, 2 * channels, 1, size), _Part(offsets, attention)]
    return _total(parts)


def _stem(config: StemConfig, channels: int, image: Size) -> _Part:
    """A hybrid's ResNet: a norm behind every convolution."""
    root = 64 * config.width
    parts = [_convolution(channels, root, 7, _half(image)), _norm(root)]
    for unit in _units(config.blocks, config.width, image):
        parts += [_bottleneck(unit), _norm(unit.middle), _norm(unit.middle), _norm(unit.outputs)]
        if unit.first:
            parts.append(_norm(unit.outputs))
    return _total(parts)


def _resnet(config: ResNetConfig, image: Size) -> _Part:
    """BiT's ResNet: a norm before every convolution of a unit, none at the root, one at the end."""
    parts = [_convolution(config.channels, 64 * config.width, 7, _half(image))]
    for unit in _units(config.blocks, config.width, image):
        parts += [_bottleneck(unit, axial=config.axial), _norm(unit.inputs), _norm(unit.middle), _norm(unit.middle)]
    return _total((*parts, _norm(config.features), _linear(config.features, config.classes, 1)))
