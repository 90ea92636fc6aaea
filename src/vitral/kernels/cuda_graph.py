"""CUDA graphs: GPU work captured once and replayed as a whole, without the host between its kernels.

`graphed` makes one of the training step of anybody's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import UserError

_CAPTURING = Lock()  # captures share a stream, and one would synchronize the device in the midst of another
EAGER_STEPS = 3  # before a step is captured: kernels are compiled and optimizer states made in them


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
        with _CAPTURING:
            self._capture(function)

    def _capture(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
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


def graphed(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float = 0.0,
    autocast: torch.dtype | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a training step for your own loop that one CUDA graph replays.

    On a GPU, the fourth call captures the whole step (forward, loss, backward, clipping, optimizer) for batches of that
    shape, and replays it from then on; every call is one step. Batches of another shape are computed plainly, as is
    everything on other devices. Learning rates may change at any time, by a scheduler or by hand; after another change
    (of a weight decay, of `requires_grad`, of `train()` or `eval()`) the step is captured again.

    Args:
        model: on one device, in one process; its weights may only be changed in place.
        loss: takes the model's outputs and the labels, and returns a scalar; it must not read from the GPU.
        optimizer: of the model's weights; on a GPU one of PyTorch's with `capturable=True`, or SGD with `fused=True`.
        clip: the largest global norm of the gradient; 0: it is not clipped.
        autocast: compute model and loss in this half precision, such as torch.bfloat16.

    Returns:
        A function of images (batch, channels, height, width) and labels, on any device, that takes a step and returns
        its loss, a scalar tensor without gradient. Gradients stay in `.grad` until the next call.

    Raises:
        UserError: the optimizer cannot be captured, or, when the step is called, the model or the loss.
    """
    return _GraphedStep(model, loss, optimizer, clip, autocast)


class _GraphedStep:
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float,
        autocast: torch.dtype | None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.clip, self.autocast = model, loss, optimizer, clip, autocast
        self.device = next(model.parameters()).device
        self.captures = self.device.type == "cuda"
        self.graph: CudaGraph | None = None
        self.count = 0
        self.graph_key: tuple[Any, ...] = ()  # what the graph depends on: shapes, then settings
        self.last_key: tuple[Any, ...] = ()  # of the last call
        self.rates: list[Tensor] = []  # of each parameter group, in the memory that the graph reads
        if self.captures:
            _check_capturable(optimizer)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take a step: (batch, channels, height, width), labels -> the loss, a scalar"""
        if not self.captures:
            return self._step(images.to(self.device), labels.to(self.device))[0]
        with torch.cuda.device(self.device):
            return self._captured_step(images, labels)

    def _captured_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self._keep_rates()
        self.count += 1
        key = (images.shape, images.dtype, labels.shape, labels.dtype), self._settings()
        new_settings = self.graph is None or key[1] != self.graph_key[1]
        if new_settings and self.count > EAGER_STEPS and key == self.last_key:
            self.graph, self.graph_key = None, key  # frees the memory of the old one first
            self.graph = self._capture(images, labels)
        self.last_key = key
        if self.graph is not None and key == self.graph_key:
            return self.graph(images, labels)[0]
        return self._step(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))[0]

    def _capture(self, images: Tensor, labels: Tensor) -> CudaGraph:
        try:
            return CudaGraph(self._step, [images.to(self.device), labels.to(self.device)])
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the training step cannot be captured as a CUDA graph ({reason}): keep model, loss and optimizer from "
                "reading values of the GPU, or write the step without vitral.graphed."
            ) from error

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            loss = self.loss(self.model(images), labels)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return (loss.detach(),)

    def _keep_rates(self) -> None:
        """Move each learning rate, which a scheduler or the user may have replaced, into the tensor of its group."""
        for index, group in enumerate(self.optimizer.param_groups):
            if index == len(self.rates):
                self.rates.append(torch.empty((), device=group["params"][0].device))
            if group["lr"] is not self.rates[index]:
                self.rates[index].fill_(group["lr"])
                group["lr"] = self.rates[index]

    def _settings(self) -> tuple[Any, ...]:
        """What a captured step depends on besides tensors."""
        rules = [
            (name, value)
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name != "params" and "lr" not in name and not isinstance(value, Tensor)
        ]
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        return rules, trained, [module.training for module in self.model.modules()]


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "capturable" not in group and not group.get("fused"):
            raise UserError(
                f"{type(optimizer).__name__} cannot be captured in a CUDA graph: use SGD with fused=True, or an "
                "optimizer that takes capturable=True, such as torch.optim.AdamW."
            )
        if not group.get("capturable", True):
            raise UserError(
                f"this {type(optimizer).__name__} cannot be captured in a CUDA graph: build it with capturable=True."
            )
