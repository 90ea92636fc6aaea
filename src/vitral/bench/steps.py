"""The timed steps: a full training step, a batch of predictions, or a single prediction, the same for every library.

Other libraries get their CUDA graphs from torch.compile. Ours captures the whole training step, optimizer included, as
training does, and the whole prediction from the image in host memory to its classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.bench.backends import OURS, Backend, Workload, build_model
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.normalize import normalize
from vitral.serving.classifier import TopKClassifier

_SEED = 0
_CLIP_NORM = 1.0
_LEARNING_RATE = 1e-4
_TOP = 5
_TIE = 2e-2  # share of the largest logit: closer classes may change their order in bfloat16
_COMPILE_MODES = {"compile": "default", "graphs": "reduce-overhead", "autotune": "max-autotune"}
_ATTENTION = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}


class ParityError(RuntimeError):
    """A fast setting computes something else than the float32 model."""


class StepOutputs(NamedTuple):
    """What the parity check compares."""

    logits: Tensor  # (batch, classes)
    gradients: dict[str, Tensor]  # by parameter, in training


class BenchmarkStep(Protocol):
    """A backend that is ready to run, with its batch on the device."""

    images: Tensor  # uint8 for ours; normalised floats for the others, so that they are spared the conversion
    labels: Tensor  # (batch,)

    def run(self, count: int) -> list[float]:
        """The seconds of each of `count` steps."""
        ...

    def outputs(self) -> StepOutputs:
        """Logits and gradients of the batch, computed as `run` does, before anything changes the weights."""
        ...


class BenchmarkModel(nn.Module):
    """A library's model that takes uint8 or normalised images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """uint8 or float (batch, channels, height, width) -> (batch, classes)"""
        if images.dtype == torch.uint8:
            half = (0.5,) * images.shape[1]
            images = normalize(images, half, half)
        return self.model(images.to(self._dtype()))

    def _dtype(self) -> torch.dtype:
        return next((parameter.dtype for parameter in self.parameters()), torch.float32)


def float32_model(backend: Backend, workload: Workload) -> BenchmarkModel:
    """The model in float32 on the device; its weights are the same on every call."""
    torch.manual_seed(_SEED)
    return BenchmarkModel(build_model(backend.library, workload.architecture)).to(workload.device)


def inference_model(backend: Backend, workload: Workload) -> BenchmarkModel:
    """The model as it predicts: in bfloat16 on a GPU; on a CPU ours has packed weights."""
    model = float32_model(backend, workload).eval().to(getattr(torch, workload.precision))
    if backend.library == OURS and workload.device == "cpu":
        pack(model)
    return model


class TrainingStep:
    """Forward, loss, backward, gradient clipping and optimizer."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        set_attention(backend.attention)
        self.workload, self.backend = workload, backend
        self.images, self.labels = _random_batch(backend, workload)
        self.model = float32_model(backend, workload).train()
        self.forward = _compiled(self._forward, backend)
        fused = True if workload.device == "cuda" else None
        options: dict[str, Any] = {"fused": fused, "capturable": _captures(backend)}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, **options)
        self.graph: CudaGraph | None = None

    def run(self, count: int) -> list[float]:
        return timed(self._once, count, self.workload.device)

    def feed(self, images: Tensor) -> None:
        """Train on these images; on a GPU the step is only queued. The layout must be that of `self.images`, which the
        CUDA graph reads."""
        self.images.copy_(images, non_blocking=True)
        self._once()

    def outputs(self) -> StepOutputs:
        if _captures(self.backend):
            self._backward()
            (logits,) = CudaGraph(lambda: (self._backward(),), [])()
        else:
            logits = self._backward()
        gradients = {name: weight.grad.clone() for name, weight in parameters_with_gradient(self.model)}
        self.optimizer.zero_grad()
        return StepOutputs(logits.detach().float().clone(), gradients)

    def _once(self) -> None:
        if not _captures(self.backend):
            self._step()
            return
        if self.graph is None:
            self._step()
            self.graph = CudaGraph(self._step, [])
        self.graph.graph.replay()

    def _step(self) -> tuple[Tensor, ...]:
        logits = self._backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP_NORM)
        self.optimizer.step()
        return (logits,)

    def _backward(self) -> Tensor:
        _mark_step(self.backend)
        self.optimizer.zero_grad()
        loss, logits = self.forward(self.images, self.labels)
        loss.backward()
        return logits.detach()

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=self.workload.precision == "bfloat16"):
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels), logits


class InferenceStep:
    """A batch of images on the device to logits on the device; the weights themselves are bfloat16 on a GPU."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        set_attention(backend.attention)
        self.workload, self.backend = workload, backend
        self.model = inference_model(backend, workload)
        self.images, self.labels = _random_batch(backend, workload)
        if self.images.dtype != torch.uint8:
            self.images = self.images.to(getattr(torch, workload.precision))
        self.forward = _compiled(self.model, backend)
        self.graph: CudaGraph | None = None

    def run(self, count: int) -> list[float]:
        with torch.inference_mode():
            return timed(self._once, count, self.workload.device)

    def outputs(self) -> StepOutputs:
        with torch.inference_mode():
            return StepOutputs(self._once().float().clone(), {})

    def _once(self) -> Tensor:
        _mark_step(self.backend)
        if not _captures(self.backend):
            return self.forward(self.images)
        if self.graph is None:
            self.forward(self.images)
            self.graph = CudaGraph(lambda: (self.forward(self.images),), [])
        self.graph.graph.replay()
        return self.graph.outputs[0]


class LatencyStep:
    """One uint8 image in host memory to its five top classes in host memory; both copies are part of the time."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        set_attention(backend.attention)
        self.workload, self.backend = workload, backend
        self.model = inference_model(backend, workload)
        self.images, self.labels = _random_batch(Backend(OURS), workload)  # uint8 for all
        self.host = self.images[0].permute(1, 2, 0).contiguous().cpu().numpy()
        self.predict = _compiled(self._predict, backend)

    def run(self, count: int) -> list[float]:
        return timed(self._once, count, "cpu")

    def outputs(self) -> StepOutputs:
        with torch.inference_mode():
            _mark_step(self.backend)
            return StepOutputs(self.predict(self.images[:1])[0].float().clone(), {})

    def _once(self) -> list[int]:
        with torch.inference_mode():
            _mark_step(self.backend)
            image = torch.from_numpy(self.host).to(self.workload.device).permute(2, 0, 1).unsqueeze(0)
            return self.predict(image)[1][0].tolist()

    def _predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return logits, logits.float().softmax(dim=-1).topk(min(_TOP, self.workload.classes)).indices


class VitralLatencyStep(LatencyStep):
    """The same with vitral's `TopKClassifier`."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        super().__init__(backend, workload)
        config = workload.architecture
        half = (0.5,) * config.channels
        self.classifier = TopKClassifier(
            self.model.model,
            self.images.device,
            size=config.image,
            channels=config.channels,
            mean=half,
            std=half,
            top=min(_TOP, workload.classes),
        )

    def outputs(self) -> StepOutputs:
        outputs = super().outputs()
        logits = outputs.logits[0]
        classes = torch.as_tensor(self.classifier(self.host)[0], device=logits.device)
        if (logits[classes] < logits.topk(len(classes)).values - _TIE * logits.abs().max()).any():
            raise ParityError(f"{self.backend.label} does not return the classes with its largest logits.")
        return outputs

    def _once(self) -> list[int]:
        return self.classifier(self.host)[0].tolist()


def timed(work: Callable[[], Any], count: int, device: str) -> list[float]:
    """Seconds of each call; on a GPU by CUDA events between the calls, so that the queue is never drained."""
    if device != "cuda":
        return [_seconds(work) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]


def matmul_flops(device: str, repeats: int = 8) -> float:
    """FLOP/s of a matrix product on this device now: 8192^3 in bfloat16 on a GPU, 1024^3 in float32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    first, second = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: first @ second, 2, device)
    seconds = sorted(timed(lambda: first @ second, repeats, device))
    return 2.0 * side**3 / seconds[repeats // 2]


def parameters_with_gradient(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and parameters that have a gradient."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.grad is not None]


def set_attention(kernel: str) -> None:
    """Allow only this attention kernel in this process; where it does not apply, PyTorch falls back to math."""
    if kernel != "auto":
        for name, enable in _ATTENTION.items():
            enable(name == kernel)


def _random_batch(backend: Backend, workload: Workload) -> tuple[Tensor, Tensor]:
    """Random pixels (batch, channels, height, width), as hardware is faster on zeros; random labels (batch,)."""
    generator = torch.Generator().manual_seed(_SEED)
    config = workload.architecture
    shape = (workload.batch, config.channels, *config.image)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, workload.classes, (workload.batch,), generator=generator).to(workload.device)
    images = images.to(workload.device)
    return (images if backend.library == OURS else images.float() / 127.5 - 1.0), labels


def _compiled(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    if backend.mode not in _COMPILE_MODES or _captures(backend):
        return function
    return torch.compile(function, mode=_COMPILE_MODES[backend.mode])


def _captures(backend: Backend) -> bool:
    """Whether vitral's own CUDA graphs are used."""
    return backend.library == OURS and backend.mode == "graphs"


def _mark_step(backend: Backend) -> None:
    """Allow torch.compile's CUDA graphs to overwrite their earlier outputs."""
    if backend.mode in ("graphs", "autotune") and not _captures(backend):
        torch.compiler.cudagraph_mark_step_begin()


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
