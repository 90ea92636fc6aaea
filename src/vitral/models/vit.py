"""The Vision Transformer (paper, section 3.1), its hybrids and its axial variant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitral.architecture import Size, ViTConfig
from vitral.kernels.dispatch import (
    autocast_dtype,
    fits_add_positions,
    fits_blocks,
    fits_embedding,
    is_inactive_dropout,
    is_plain,
    linear,
    on_device_of,
)
from vitral.models.layers import AxialBlock, Block, MapPool, computes_tokens_alone
from vitral.models.model import Head, VisionModel, check_images, layer_indices, lecun_normal, normal, zero_bias
from vitral.models.position import RotaryPosition, Rotation, build_position, grid_of
from vitral.models.resnet import ResNetStem


class ViT(VisionModel[ViTConfig]):
    """A Vision Transformer: patches, class token and registers, positions, blocks, pooling, head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ResNetStem(config.stem, config.channels) if config.stem else nn.Identity()
        channels = config.stem.channels if config.stem else config.channels
        patch = {"kernel_size": config.patch, "stride": config.patch}
        self.embed = nn.Conv2d(channels, config.width, **patch, bias=config.patch_bias)
        self.class_token = nn.Parameter(torch.zeros(config.width)) if config.class_token else None
        registers = normal(torch.empty(config.registers, config.width), std=1e-6)
        self.registers = nn.Parameter(registers) if config.registers else None
        tables = config.depth if config.injection == "every" else 1
        positions = [build_position(config) for _ in range(tables)]
        self.positions = nn.ModuleList([position for position in positions if position is not None])
        self.rope = RotaryPosition(config, config.rope) if config.rope else None
        self.dropout = nn.Dropout(config.dropout)
        self.pre_norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.pre_norm else nn.Identity()
        block = AxialBlock if config.axial else Block
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList([block(config, config.stochastic_depth * i / last) for i in range(config.depth)])
        has_norm = config.norm_place != "none"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if has_norm else nn.Identity()
        self.map = MapPool(config) if config.pool == "map" else None
        self.head = Head(config.features, config.classes, config.representation, bias=config.head_bias)
        lecun_normal(self.embed.weight)
        if config.patch_bias:
            zero_bias(self.embed)
        self.fp8: bool | list[Any] = False  # set by `fused.enable_fp8`

    def patchify(self, images: Tensor) -> Tensor:
        """Embed patches; pixels at the right and bottom that fill no patch are dropped.

        (batch, channels, height, width) -> (batch, h, w, dim)
        """
        check_images(images, self.config.channels)
        grid = self.config.grid((images.shape[2], images.shape[3]))
        x = self.stem(images)
        if self.config.stem is None and is_plain(self.embed, nn.Conv2d) and self.embeds_patches:
            return self._embed_by_matmul(x, grid)
        return self.embed(x).permute(0, 2, 3, 1)

    def _embed_by_matmul(self, images: Tensor, grid: Size) -> Tensor:
        """The embedding's convolution as the matrix product that it is: several times as fast on a GPU."""
        half = autocast_dtype(images.device.type)
        if fits_embedding(images) and not (images.requires_grad and torch.is_grad_enabled()):
            from vitral.kernels.embedding import extract_patches  # imports Triton, which few runs need

            with on_device_of(images):
                pixels = extract_patches(images, self.config.patch, grid, half or images.dtype)
        else:
            pixels = patch_pixels(images, self.config.patch, grid)
            if half:  # converted and laid out in one pass
                pixels = pixels.to(half, memory_format=torch.contiguous_format)
            pixels = pixels.flatten(3)
        return linear(pixels, self.embed.weight.flatten(1), self.embed.bias)

    @property
    def embeds_patches(self) -> bool:
        """Whether the embedding is the convolution of `config`; its stride, for example, may have been changed."""
        conv, side = self.embed, (self.config.patch, self.config.patch)
        plain = conv.kernel_size == conv.stride == side and conv.dilation == (1, 1) and conv.groups == 1
        return plain and conv.padding == (0, 0)

    @property
    def fuses_blocks(self) -> bool:
        """Whether nothing stands between the blocks, and the final norm follows them."""
        return self.config.injection == "input" and self.config.norm_place == "tokens"

    def encode(self, patches: Tensor, visible: Tensor | None = None) -> Tensor:
        """Prepend class token and registers, add positions, apply blocks and final norm.

        (batch, h, w, dim) -> (batch, prefix + h * w, dim); with the indices (batch, k) of the visible patches, which
        a masked autoencoder has, (batch, prefix + k, dim)
        """
        return self._encode(patches, visible)

    def features(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, dim)"""
        only_class_token = self.config.pool == "token" and self._pools_as_defined()
        patches = self.patchify(images)
        tokens = self._encode(patches, only_class_token=True) if only_class_token else self.encode(patches)
        return self.pool(tokens)

    def _pools_as_defined(self) -> bool:
        """Whether no method that sees all tokens of the last block is a subclass's or replaced."""
        return not any(
            name in self.__dict__ or getattr(type(self), name) is not defined for name, defined in _SEE_ALL_TOKENS
        )

    def _encode(self, patches: Tensor, visible: Tensor | None = None, *, only_class_token: bool = False) -> Tensor:
        """`encode`; if `only_class_token` is read of the result, it may have no others."""
        grid, positions, rotations = grid_of(patches), self._position_rows(patches), self._rotations(patches)
        x = self._input_tokens(patches, positions)
        x = x if visible is None else self._only_visible(x, visible)
        if self.fuses_blocks and fits_blocks(x, self.config.heads):
            from vitral.models.fused import fused_blocks  # imports Triton, which few runs need

            tokens = fused_blocks(x, self.blocks, self.norm, rotations, self.fp8, only_class_token=only_class_token)
            if tokens is not None:
                return tokens
        last = len(self.blocks) - 1
        for i in range(last + 1):
            # Of the other tokens, the last block then computes no more than keys and values.
            shortened = only_class_token and i == last and self._may_shorten_last_block(x)
            x = self._apply_block(i, x, positions, grid, rotations[i], **({"queries": 1} if shortened else {}))
        return self._final_norm(x)

    def _may_shorten_last_block(self, x: Tensor) -> bool:
        """Whether the last block may compute the class token alone: for inference with one image, whose bits need not
        be those of `encode`. Those of larger batches, of one row per image, would depend on the size of the batch."""
        if torch.is_grad_enabled() or torch.jit.is_tracing():  # traces are compared, with gradients and without
            return False
        # Exported programs take batches of any size: their parts are not plain, so that they do not ask for it.
        alone = computes_tokens_alone(self.blocks[-1]) and computes_tokens_alone(self.norm)
        return alone and x.shape[0] == 1

    def intermediates(
        self, images: Tensor, layers: Sequence[int] | None = None, *, norm: bool = False, reshape: bool = True
    ) -> list[Tensor]:
        """Outputs of chosen blocks, with their gradients; blocks after the last chosen one are not computed.

        Args:
            images: (batch, channels, height, width), normalized.
            layers: blocks, counted from 0 or, negative, from the end; None for all.
            norm: apply the final LayerNorm, where the model has it before pooling (`norm_place="tokens"`): the last
                layer is then what `encode` returns.
            reshape: return maps of the patches instead of token sequences.

        Returns:
            One tensor per entry of `layers`, in that order: maps (batch, dim, h, w) without the prefix tokens or, with
            `reshape=False`, tokens (batch, prefix + h * w, dim): class token, registers, then patches row by row.

        Raises:
            UserError: the model has no such block.
        """
        indices = layer_indices(layers, len(self.blocks))
        patches = self.patchify(images)
        grid, positions, rotations = grid_of(patches), self._position_rows(patches), self._rotations(patches)
        x = self._input_tokens(patches, positions)
        outputs: dict[int, Tensor] = {}
        for i in range(max(indices, default=-1) + 1):
            x = self._apply_block(i, x, positions, grid, rotations[i])
            if i in indices:
                tokens = self._final_norm(x) if norm else x
                outputs[i] = self._as_map(tokens, grid) if reshape else tokens
        return [outputs[i] for i in indices]

    def _position_rows(self, patches: Tensor) -> list[Tensor]:
        """(batch, h, w, dim) -> what is added to the tokens, (prefix + h * w, dim) per table"""
        # Sines are computed in float32; half-precision weights need them in their own dtype.
        dtype = torch.float32 if autocast_dtype(patches.device.type) else patches.dtype
        return [position(patches).to(dtype) for position in self.positions]

    def _rotations(self, patches: Tensor) -> Sequence[Rotation | None]:
        return [None] * len(self.blocks) if self.rope is None else self.rope(patches)

    def _input_tokens(self, patches: Tensor, positions: list[Tensor]) -> Tensor:
        """(batch, h, w, dim) -> (batch, prefix + h * w, dim): what the first block reads"""
        plain = is_plain(self.pre_norm, nn.Identity) and is_inactive_dropout(self.dropout)
        if positions and plain and fits_add_positions(patches):
            from vitral.kernels.embedding import add_positions

            with on_device_of(patches):
                return add_positions(patches.flatten(1, 2), self._token_table(positions[0]))
        x = self._with_prefix(patches.flatten(1, 2))
        x = self.pre_norm(self.dropout(x + positions[0] if positions else x))
        # The residual stream, too, is in half precision: every block reads and writes it.
        half = autocast_dtype(x.device.type)
        return x.to(half) if half else x

    def _only_visible(self, x: Tensor, visible: Tensor) -> Tensor:
        """(batch, prefix + n, dim), (batch, k) -> (batch, prefix + k, dim)"""
        prefix, patches = x[:, : self.config.prefix], x[:, self.config.prefix :]
        return torch.cat([prefix, gather_rows(patches, visible)], dim=1)

    def _apply_block(
        self,
        index: int,
        x: Tensor,
        positions: list[Tensor],
        grid: Size,
        rotation: Rotation | None,
        **only: int,
    ) -> Tensor:
        if index > 0 and self.config.injection != "input":
            x = x + positions[index % len(positions)]
        return self.blocks[index](x, grid=grid, rotation=rotation, **only)  # by name: hooks receive tensors alone

    def _final_norm(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens) if self.config.norm_place == "tokens" else tokens

    def _as_map(self, tokens: Tensor, grid: Size) -> Tensor:
        """(batch, prefix + h * w, dim) -> (batch, dim, h, w)"""
        return tokens[:, self.config.prefix :].unflatten(1, grid).permute(0, 3, 1, 2)

    def pool(self, tokens: Tensor) -> Tensor:
        """The class token, the mean of the patches, both, or attention: (batch, tokens, dim) -> (batch, features)"""
        patches = tokens[:, self.config.prefix :]
        match self.config.pool:
            case "token":
                features = tokens[:, 0]
            case "token+register":
                features = tokens[:, :2].flatten(1)
            case "token+mean":
                features = torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=1)
            case _ if self.map is not None:
                features = self.map(tokens if self.config.map_prefix else patches)
            case _:
                features = patches.mean(dim=1)
        return self.norm(features) if self.config.norm_place == "features" else features

    def _with_prefix(self, x: Tensor) -> Tensor:
        """(batch, n, dim) -> (batch, prefix + n, dim)"""
        return torch.cat([*(rows.expand(x.shape[0], -1, -1) for rows in self._prefix_rows()), x], dim=1)

    def _prefix_rows(self) -> list[Tensor]:
        """Class token and registers, those that there are: (1, dim), (registers, dim)"""
        prefix = [] if self.class_token is None else [self.class_token.unsqueeze(0)]
        return prefix if self.registers is None else [*prefix, self.registers]

    def _token_table(self, positions: Tensor) -> Tensor:
        """What tokens are without patches: (prefix + n, dim) -> (prefix + n, dim)"""
        if not self.config.prefix:
            return positions
        prefix, patches = positions[: self.config.prefix], positions[self.config.prefix :]
        return torch.cat([torch.cat(self._prefix_rows()) + prefix, patches])

    def _checkpointed_layers(self) -> Iterable[nn.Module]:
        return self.blocks


_SEE_ALL_TOKENS = tuple((name, getattr(ViT, name)) for name in ("encode", "pool", "_apply_block", "_final_norm"))


def patch_pixels(images: Tensor, side: int, grid: Size) -> Tensor:
    """The pixels of each patch, as a view: (batch, channels, height, width) -> (batch, h, w, channels, side, side)"""
    h, w = grid
    pixels = images[:, :, : h * side, : w * side].unflatten(3, (w, side)).unflatten(2, (h, side))
    return pixels.permute(0, 2, 4, 1, 3, 5)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """(b, n, dim), (b, k) -> (b, k, dim)"""
    return x.gather(1, indices.unsqueeze(-1).expand(-1, -1, x.shape[2]))
