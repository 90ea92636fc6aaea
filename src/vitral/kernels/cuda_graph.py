"""CUDA graphs: GPU work captured once and replayed as a whole, without the host between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor


class CudaGraph:
    """A function of GPU tensors, captured for inputs of fixed shapes.

    Memory that it reads and writes besides its inputs keeps its address: weights must be changed in place.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        """Capture a call.

        Args:
            function: has run before, so that one-time work (compiling kernels, loading libraries, creating optimizer
                states) is done.
            inputs: examples on the GPU; they are copied.
        """
        self.inputs = [tensor.clone() for tensor in inputs]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph's memory pool is separate from PyTorch's cache
        self.graph = torch.cuda.CUDAGraph()
        stream = _stream(torch.cuda.current_device())
        # Errors of this thread only: another one may pin memory meanwhile.
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)
        except BaseException:
            _restore_generator()
            raise

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay the graph. Inputs may be on the host; outputs are copies, which the next call does not overwrite."""
        for static, value in zip(self.inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures on a GPU: cuBLAS allocates a workspace per stream. (PyTorch's default capture stream
    stays on the GPU of its first use.)"""
    return torch.cuda.Stream(device)


def _restore_generator() -> None:
    """Reset the random generator, which a failed capture leaves in capture mode, to a copy that is not."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
