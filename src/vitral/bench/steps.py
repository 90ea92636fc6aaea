"""What is timed: a full training step, a batch of predictions, or one answer, the same for every library.

CUDA graphs are torch.compile's own for the other libraries. We record: the whole step, optimizer included, as training
does it, and the whole way from a picture to its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.bench.backends import OURS, Backend, Task, build_model
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.normalize import normalize
from vitral.serving.classifier import Classifier as OnePicture

_SEED = 0
_CLIP = 1.0
_RATE = 1e-4
_TOP = 5
_TIE = 2e-2  # of the largest logit: what is no further apart may change places in half precision
_ATTENTION = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}


class WrongAnswers(RuntimeError):
    """A fast setting computes something else than the model it stands for."""


class Outputs(NamedTuple):
    """What the gate compares: logits (b, classes), and the gradient of each parameter where there are any."""

    logits: Tensor
    gradients: dict[str, Tensor]


class Step(Protocol):
    """A backend on its marks, with a batch of its own on the device."""

    images: Tensor  # what goes in: uint8 for us, floats for the others, so that they are spared the conversion
    labels: Tensor  # (b,)

    def run(self, count: int) -> list[float]:
        """The seconds of each of `count` steps."""
        ...

    def outputs(self) -> Outputs:
        """Logits and gradients of its batch, computed as `run` does, before anything changes the weights."""
        ...


def training_step(backend: Backend, task: Task) -> Step:
    """Forward, loss, backward, clip, optimizer."""
    return TrainingStep(backend, task)


def inference_step(backend: Backend, task: Task) -> Step:
    """A batch of images on the device to logits on the device."""
    return InferenceStep(backend, task)


def latency_step(backend: Backend, task: Task) -> Step:
    """One uint8 image in the host's memory to the five likeliest classes in the host's memory."""
    return (OurLatencyStep if backend.library == OURS else LatencyStep)(backend, task)


class Classifier(nn.Module):
    """A library's model behind the conversion of pixels, which only uint8 images need."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """uint8 or float (b, c, h, w) -> (b, classes)"""
        if images.dtype == torch.uint8:
            half = (0.5,) * images.shape[1]
            images = normalize(images, half, half)
        return self.model(images.to(self._dtype()))

    def _dtype(self) -> torch.dtype:
        return next((parameter.dtype for parameter in self.parameters()), torch.float32)


def classifier(backend: Backend, task: Task) -> Classifier:
    """The plain float32 model; the same weights whenever it is asked for."""
    torch.manual_seed(_SEED)
    return Classifier(build_model(backend.library, task.architecture)).to(task.device)


def predictor(backend: Backend, task: Task) -> Classifier:
    """The model as it predicts: in half precision on a GPU, and on a CPU with our weights packed."""
    model = classifier(backend, task).eval().to(getattr(torch, task.precision))
    if backend.library == OURS and task.device == "cpu":
        pack(model)
    return model


class TrainingStep:
    def __init__(self, backend: Backend, task: Task) -> None:
        choose_attention(backend.attention)
        self.task, self.backend = task, backend
        self.images, self.labels = _batch(backend, task)
        self.model = classifier(backend, task).train()
        self.forward = _faster(self._forward, backend)
        fused = True if task.device == "cuda" else None
        options: dict[str, Any] = {"fused": fused, "capturable": _records(backend)}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE, **options)
        self.recording: CudaGraph | None = None

    def run(self, count: int) -> list[float]:
        return timed(self._once, count, self.task.device)

    def feed(self, images: Tensor) -> None:
        """A step on these images, which on a GPU is only queued. They must lie in memory as `images` does: that is what
        a recorded step reads."""
        self.images.copy_(images, non_blocking=True)
        self._once()

    def outputs(self) -> Outputs:
        if _records(self.backend):
            self._backward()
            (logits,) = CudaGraph(lambda: (self._backward(),), [])()
        else:
            logits = self._backward()
        gradients = {name: weight.grad.clone() for name, weight in named_gradients(self.model)}
        self.optimizer.zero_grad()
        return Outputs(logits.detach().float().clone(), gradients)

    def _once(self) -> None:
        if not _records(self.backend):
            self._step()
            return
        if self.recording is None:
            self._step()
            self.recording = CudaGraph(self._step, [])
        self.recording.graph.replay()

    def _step(self) -> tuple[Tensor, ...]:
        logits = self._backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        return (logits,)

    def _backward(self) -> Tensor:
        _begin(self.backend)
        self.optimizer.zero_grad()
        loss, logits = self.forward(self.images, self.labels)
        loss.backward()
        return logits.detach()

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.task.device, torch.bfloat16, enabled=self.task.precision == "bfloat16"):
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels), logits


class InferenceStep:
    """The weights themselves are in half precision on a GPU: nothing is converted on the way."""

    def __init__(self, backend: Backend, task: Task) -> None:
        choose_attention(backend.attention)
        self.task, self.backend = task, backend
        self.model = predictor(backend, task)
        self.images, self.labels = _batch(backend, task)
        if self.images.dtype != torch.uint8:
            self.images = self.images.to(getattr(torch, task.precision))
        self.forward = _faster(self.model, backend)
        self.recording: CudaGraph | None = None

    def run(self, count: int) -> list[float]:
        with torch.inference_mode():
            return timed(self._once, count, self.task.device)

    def outputs(self) -> Outputs:
        with torch.inference_mode():
            return Outputs(self._once().float().clone(), {})

    def _once(self) -> Tensor:
        _begin(self.backend)
        if not _records(self.backend):
            return self.forward(self.images)
        if self.recording is None:
            self.forward(self.images)
            self.recording = CudaGraph(lambda: (self.forward(self.images),), [])
        self.recording.graph.replay()
        return self.recording.outputs[0]


class LatencyStep:
    """Host to host: the copy in and the answer out are part of the time, as a caller feels them."""

    def __init__(self, backend: Backend, task: Task) -> None:
        choose_attention(backend.attention)
        self.task, self.backend = task, backend
        self.model = predictor(backend, task)
        self.images, self.labels = _batch(Backend(OURS), task)  # all get the same: uint8
        self.host = self.images[0].permute(1, 2, 0).contiguous().cpu().numpy()
        self.answer = _faster(self._answer, backend)

    def run(self, count: int) -> list[float]:
        return timed(self._once, count, "cpu")

    def outputs(self) -> Outputs:
        with torch.inference_mode():
            _begin(self.backend)
            return Outputs(self.answer(self.images[:1])[0].float().clone(), {})

    def _once(self) -> list[int]:
        with torch.inference_mode():
            _begin(self.backend)
            image = torch.from_numpy(self.host).to(self.task.device).permute(2, 0, 1).unsqueeze(0)
            return self.answer(image)[1][0].tolist()

    def _answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return logits, logits.float().softmax(dim=-1).topk(min(_TOP, self.task.classes)).indices


class OurLatencyStep(LatencyStep):
    """The same with what vitral has for it."""

    def __init__(self, backend: Backend, task: Task) -> None:
        super().__init__(backend, task)
        values = (0.5,) * task.architecture.channels
        self.one = OnePicture(
            self.model.model,
            self.images.device,
            size=task.architecture.image,
            channels=task.architecture.channels,
            mean=values,
            std=values,
            top=min(_TOP, task.classes),
        )

    def outputs(self) -> Outputs:
        found = super().outputs()
        answers = torch.as_tensor(self.one(self.host)[0], device=found.logits.device)
        likeliest = found.logits[0].topk(len(answers)).values
        if (found.logits[0, answers] < likeliest - _TIE * found.logits.abs().max()).any():
            raise WrongAnswers(f"{self.backend.label} does not name the classes of its largest logits.")
        return found

    def _once(self) -> list[int]:
        return self.one(self.host)[0].tolist()


def timed(work: Callable[[], Any], count: int, device: str) -> list[float]:
    """Seconds of each call. On a GPU its own clock counts, between the steps, so that the queue is never drained."""
    if device != "cuda":
        return [_seconds(work) for _ in range(count)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]


def matrix_rate(device: str, repeats: int = 8) -> float:
    """FLOP/s of a square matrix product on this device now: 8192^3 in bfloat16 on a GPU, 1024^3 in float32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    first, second = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: first @ second, 2, device)
    seconds = sorted(timed(lambda: first @ second, repeats, device))
    return 2.0 * side**3 / seconds[repeats // 2]


def named_gradients(model: nn.Module) -> list[tuple[str, Any]]:
    """Parameters that have a gradient."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.grad is not None]


def choose_attention(kind: str) -> None:
    """For the whole process, which has one backend: only this backend, with plain mathematics where it cannot."""
    if kind != "auto":
        for name, enable in _ATTENTION.items():
            enable(name == kind)


def _batch(backend: Backend, task: Task) -> tuple[Tensor, Tensor]:
    """Random pixels (b, c, h, w), never zeros, on which hardware runs faster; random labels (b,)."""
    drawn = torch.Generator().manual_seed(_SEED)
    shape = (task.batch, task.architecture.channels, *task.architecture.image)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=drawn)
    labels = torch.randint(0, task.classes, (task.batch,), generator=drawn).to(task.device)
    images = images.to(task.device)
    return (images if backend.library == OURS else images.float() / 127.5 - 1.0), labels


def _faster(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    if backend.mode not in ("compile", "graphs") or _records(backend):
        return function
    return torch.compile(function, mode="reduce-overhead" if backend.mode == "graphs" else "default")


def _records(backend: Backend) -> bool:
    return backend.library == OURS and backend.mode == "graphs"


def _begin(backend: Backend) -> None:
    """What a CUDA graph returned before may now be overwritten."""
    if backend.mode == "graphs" and not _records(backend):
        torch.compiler.cudagraph_mark_step_begin()


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
