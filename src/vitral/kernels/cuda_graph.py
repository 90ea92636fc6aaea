"""A CUDA graph: work for a GPU recorded once and replayed as a whole, without the host between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor


class CudaGraph:
    """A function of tensors on a GPU, recorded for tensors of these shapes. It must have run before, so that all that
    happens only once (kernels compiled, libraries opened, optimizer states made) has happened.

    Memory that it reads and writes besides its inputs stays where it is: weights must be changed in place.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what a recording takes is kept apart from what PyTorch holds ready
        self.graph = torch.cuda.CUDAGraph()
        stream = _stream(torch.cuda.current_device())
        # Of this thread alone: another may pin memory meanwhile.
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)
        except BaseException:
            _draw_again()
            raise

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs may lie on the host; outputs are copies, which the next call leaves alone."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all recordings on a GPU, as cuBLAS takes memory of its own for each stream that it has seen. (PyTorch's
    stays on the GPU that it began on.)"""
    return torch.cuda.Stream(device)


def _draw_again() -> None:
    """A recording that failed leaves the generator of random numbers as if still recorded; a copy is not."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
