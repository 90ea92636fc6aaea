"""Starts a kernel. Triton's launch is written as an index and a call, neither of which has types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current GPU, whatever memory they are given; autograd itself sees to backward passes."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch(
    kernel: Any, programs: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **sizes: Any
) -> None:
    """`programs` of the kernel, of so many warps each; `stages` is how far loops that multiply read ahead."""
    kernel[programs](*arguments, **sizes, num_warps=warps, num_stages=stages)
