"""Rotary position embeddings between the qkv projection and attention: launchers of the kernel, and a reference.

Queries and keys are rotated in place in one pass, so that attention, forward and backward, reads them as they are. On
the way back their gradients are rotated back in place, and summed over the tokens for the bias of the projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.kernels.dispatch import ceil_div, launch
from vitral.kernels.jit import rotary as jit

# Cosines and sines, float32 (tokens, 1 or heads, dim / 2); whether channels 2i and 2i + 1 are a pair, not i and
# i + dim / 2. The fields of `models.position.Rotation`.
RotaryTables = tuple[Tensor, Tensor, bool]

_PAIRS = 256  # per program
# Rows per program and at a time, forward and backward, where more rows need fewer sums; tuned on an H200.
_FORWARD_ROWS, _BACKWARD_ROWS = (16, 4), (64, 2)


def reference(qkv: Tensor, rotation: RotaryTables) -> Tensor:
    """Queries and keys, or keys alone, rotated, values as they are: (batch, tokens, 3 or 2, heads, dim) -> the same"""
    cos, sin, adjacent = rotation
    shape = (-1, 2) if adjacent else (2, -1)
    first, second = qkv[:, :, :-1].unflatten(-1, shape).unbind(-1 if adjacent else -2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1 if adjacent else -2)
    return torch.cat([turned.flatten(-2), qkv[:, :, -1:]], dim=2)


def rotate_(qkv: Tensor, rotation: RotaryTables) -> None:
    """As the reference, in place, for a contiguous input."""
    _launch(qkv, rotation, inverse=False)


def rotate_back_(grad: Tensor, rotation: RotaryTables) -> Tensor:
    """The inverse, in place: turn the gradient of what `rotate_` returned into that of its input.

    Args:
        grad: (batch, tokens, 3 or 2, heads, dim), contiguous.
        rotation: as in the forward pass.

    Returns:
        The sums of the rotated gradients over the tokens of each program, float32 (programs, 2 * heads * dim), or
        half as many numbers without queries.
    """
    return _launch(grad, rotation, inverse=True)


def _launch(qkv: Tensor, rotation: RotaryTables, *, inverse: bool) -> Tensor:
    """Returns the programs' column sums, see `rotate_back_`; without `inverse` they are empty."""
    cos, sin, adjacent = rotation
    b, n, parts, heads, d = qkv.shape
    rotated = parts - 1
    program_rows, rows = _BACKWARD_ROWS if inverse else _FORWARD_ROWS
    programs = ceil_div(b * n, program_rows)
    sums = qkv.new_empty(programs, rotated * heads * d if inverse else 0, dtype=torch.float32)
    launch(
        jit.rotate, (programs, ceil_div(rotated * heads * d // 2, _PAIRS)),
        qkv, cos.contiguous(), sin.contiguous(), sums, b * n, n, heads,
        PARTS=rotated, HALF=d // 2, HEAD_TABLES=cos.shape[1] > 1, ADJACENT=adjacent, INVERSE=inverse,
        PROGRAM_ROWS=program_rows, ROWS=rows, PAIRS=_PAIRS, warps=1,
    )  # fmt: skip
    return sums
