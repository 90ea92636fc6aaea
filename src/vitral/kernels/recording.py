"""A CUDA graph: work for a GPU recorded once and replayed as a whole, without the host between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Recording:
    """A function of tensors on a GPU, recorded for tensors of these shapes. It must have run before, so that all that
    happens only once (kernels compiled, libraries opened, optimizer states made) has happened.

    Memory that it reads and writes besides its inputs stays where it is: weights must be changed in place.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what a recording takes is kept apart from what PyTorch holds ready
        self.graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another may pin memory meanwhile. PyTorch's own stream stays on the GPU it began on.
        try:
            with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
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


def _draw_again() -> None:
    """A recording that failed leaves the generator of random numbers as if still recorded; a copy is not."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
