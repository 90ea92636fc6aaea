"""The timed steps: a full training step, a batch of predictions, or a single prediction, the same for every library.

Other libraries get their CUDA graphs from torch.compile. Ours captures the whole training step, optimizer included, as
training does, and the whole prediction from the image in host memory to its classes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.bench.backends import OURS, Backend, Workload, build_model, is_vit
from vitral.errors import UserError
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack, pack_int8
from vitral.models.model import normalize
from vitral.serving import TopKClassifier

_SEED = 0
_CLIP_NORM = 1.0
_LEARNING_RATE = 1e-4
_TOP = 5
_TIE = 2e-2  # share of the largest logit: closer classes may change their order in bfloat16
# "loop": as "graphs", for ours as well, which otherwise captures its own CUDA graph; what a user's loop gets.
_COMPILE_MODES = {
    **{"compile": "default", "graphs": "reduce-overhead", "autotune": "max-autotune"},
    **{"loop": "reduce-overhead"},
}
_ATTENTION = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}
_BRANCH_SCALE = 0.1  # of the residual branches of a ResNet


class ParityError(RuntimeError):
    """A fast setting does not agree with the float32 model."""


class StepOutputs(NamedTuple):
    """What the parity check compares."""

    logits: Tensor  # (batch, classes)
    gradients: dict[str, Tensor]  # by parameter, in training


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
        dtype = next((parameter.dtype for parameter in self.parameters()), torch.float32)
        return self.model(images.to(dtype))


def float32_model(backend: Backend, workload: Workload) -> BenchmarkModel:
    """The model in float32 on the device; its weights are the same on every call."""
    torch.manual_seed(_SEED)
    # The random numbers of a ViT-H take seconds on a CPU. Exported models are written from one on a CPU.
    with torch.device(workload.device if backend.library == OURS else "cpu"):
        model = build_model(backend, workload.architecture)
    if backend.float32_residual:  # tokens in float32 stay so from block to block; a hook keeps blocks from being fused
        first = model.get_submodule("blocks.0")
        first.register_forward_pre_hook(lambda block, inputs: (inputs[0].float(), *inputs[1:]))
    # Undamped, the residual branches of a random ResNet turn rounding into errors as large as the gradients.
    for name, module in model.named_modules():
        if name.endswith("norm3") and isinstance(module, nn.GroupNorm):
            nn.init.constant_(module.weight, _BRANCH_SCALE)
    return BenchmarkModel(model).to(workload.device)


def inference_model(backend: Backend, workload: Workload) -> BenchmarkModel:
    """The model as it predicts: in bfloat16 on a GPU; on a CPU ours has packed weights, some of them in int8."""
    model = float32_model(backend, workload).eval()
    if backend.fp8 and backend.library == OURS:  # before its weights are rounded to bfloat16
        _use_fp8(model, freeze=True)
    model = model.to(getattr(torch, workload.precision))
    if backend.fp8 and backend.library != OURS:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_  # type: ignore[import-not-found]

        quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), filter_fn=_is_in_block)
    if is_int8(backend) and not pack_int8(model.get_submodule("model.blocks")):
        raise UserError("its layers are too small for int8 to gain")
    if backend.library == OURS and workload.device == "cpu":
        pack(model)
    return model


def _use_fp8(model: BenchmarkModel, *, freeze: bool) -> None:
    from vitral.models.fused import enable_fp8  # imports Triton

    if reason := enable_fp8(model.model, freeze=freeze):
        raise UserError(f"the model is not computed in FP8: {reason}.")


def _is_in_block(module: nn.Module, name: str) -> bool:
    """Whether it is a linear layer of timm's blocks; the first and the last layer are not computed in FP8."""
    return isinstance(module, nn.Linear) and "blocks." in name


def is_int8(backend: Backend) -> bool:
    """Whether it is our own int8; the logits of exported models are compared where they are exported."""
    return backend.library == OURS and backend.mode == "int8"


class TimedStep:
    """A backend that is ready to run, with its batch on the device.

    `images` are uint8 for ours, and for all if the latency is timed; else normalised floats, so that the others are
    spared the conversion. `labels` are (batch,).
    """

    def __init__(self, backend: Backend, workload: Workload) -> None:
        if backend.attention != "auto":  # where that kernel does not apply, PyTorch falls back to math
            for name, enable in _ATTENTION.items():
                enable(name == backend.attention)
        self.workload, self.backend = workload, backend
        self.images, self.labels = _random_batch(workload)
        if backend.library != OURS and workload.work != "latency":
            self.images = self.images.float() / 127.5 - 1.0
            if not is_vit(workload.architecture):  # convolutions in half precision are fastest with channels last
                self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.graph: CudaGraph | None = None

    def run(self, count: int) -> list[float]:
        """The seconds of each of `count` steps."""
        return timed(self._once, count, self.workload.device)

    def double_batch(self) -> None:
        """Take every image twice; not after a CUDA graph was captured."""
        self.images, self.labels = self.images.repeat(2, 1, 1, 1), self.labels.repeat(2)

    def outputs(self) -> StepOutputs:
        """Logits and gradients of the batch, computed as `run` does, before anything changes the weights."""
        raise NotImplementedError

    def _step(self) -> Tensor:
        """Logits (batch, classes)."""
        raise NotImplementedError

    def _once(self) -> Any:
        if not self.backend.captures:
            return self._step()
        if self.graph is None:
            self._step()
            self.graph = CudaGraph(lambda: (self._step(),), [])
        self.graph.graph.replay()
        return self.graph.outputs[0]

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.backend.mode not in _COMPILE_MODES or self.backend.captures:
            return function
        return torch.compile(function, mode=_COMPILE_MODES[self.backend.mode])

    def _mark_step(self) -> None:
        """Allow torch.compile's CUDA graphs to overwrite their earlier outputs."""
        if self.backend.mode in ("graphs", "autotune", "loop") and not self.backend.captures:
            torch.compiler.cudagraph_mark_step_begin()


class TrainingStep(TimedStep):
    """Forward, loss, backward, gradient clipping and optimizer."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        super().__init__(backend, workload)
        self.model = float32_model(backend, workload).train()
        if backend.fp8 and backend.library == OURS:
            _use_fp8(self.model, freeze=False)
        elif backend.fp8:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

            config = Float8LinearConfig.from_recipe_name("rowwise")
            convert_to_float8_training(self.model, config=config, module_filter_fn=_is_in_block)
        self.forward = self._compiled(self._forward)
        fused = True if workload.device == "cuda" else None
        options: dict[str, Any] = {"fused": fused, "capturable": backend.captures}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, **options)

    def feed(self, images: Tensor) -> None:
        """Train on these images; on a GPU the step is only queued. The layout must be that of `self.images`, which the
        CUDA graph reads."""
        self.images.copy_(images, non_blocking=True)
        self._once()

    def outputs(self) -> StepOutputs:
        logits = self._backward()
        if self.backend.captures:
            (logits,) = CudaGraph(lambda: (self._backward(),), [])()
        gradients = {name: weight.grad.clone() for name, weight in parameters_with_gradient(self.model)}
        self.optimizer.zero_grad()
        return StepOutputs(logits.float().clone(), gradients)

    def _step(self) -> Tensor:
        logits = self._backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP_NORM)
        self.optimizer.step()
        return logits

    def _backward(self) -> Tensor:
        self._mark_step()
        self.optimizer.zero_grad()
        loss, logits = self.forward(self.images, self.labels)
        loss.backward()
        return logits.detach()

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=self.workload.precision == "bfloat16"):
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels), logits


class InferenceStep(TimedStep):
    """A batch of images on the device to logits on the device; the weights themselves are bfloat16 on a GPU."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        super().__init__(backend, workload)
        self.model = inference_model(backend, workload)
        if self.images.dtype != torch.uint8:
            self.images = self.images.to(getattr(torch, workload.precision))
        self.forward = self._compiled(self.model)

    def run(self, count: int) -> list[float]:
        with torch.inference_mode():
            return super().run(count)

    def outputs(self) -> StepOutputs:
        with torch.inference_mode():
            return StepOutputs(self._once().float().clone(), {})

    def _step(self) -> Tensor:
        self._mark_step()
        return self.forward(self.images)


class LatencyStep(TimedStep):
    """One uint8 image in host memory to its five top classes in host memory; both copies are part of the time.

    Ours is vitral's `TopKClassifier`.
    """

    def __init__(self, backend: Backend, workload: Workload) -> None:
        super().__init__(backend, workload)
        self.model = inference_model(backend, workload)
        self.host = self.images[0].permute(1, 2, 0).contiguous().cpu().numpy()
        self.predict = self._compiled(self._predict)
        self.classifier: Callable[..., Any] | None = None
        if backend.library == OURS:
            config, top = workload.architecture, min(_TOP, workload.classes)
            channels, half = config.channels, (0.5,) * config.channels
            self.classifier = TopKClassifier(
                self.model.model, self.images.device, size=config.image, channels=channels, mean=half, std=half, top=top
            )

    def run(self, count: int) -> list[float]:
        return timed(self._once, count, "cpu")

    def outputs(self) -> StepOutputs:
        with torch.inference_mode():
            self._mark_step()
            logits = self.predict(self.images[:1])[0].float().clone()
        if self.classifier is not None:
            classes = torch.as_tensor(self.classifier(self.host)[0], device=logits.device)
            if (logits[0, classes] < logits[0].topk(len(classes)).values - _TIE * logits.abs().max()).any():
                raise ParityError(f"{self.backend.label} does not return the classes with its largest logits.")
        return StepOutputs(logits, {})

    def _once(self) -> list[int]:
        if self.classifier is not None:
            return self.classifier(self.host)[0].tolist()
        with torch.inference_mode():
            self._mark_step()
            image = torch.from_numpy(self.host).to(self.workload.device).permute(2, 0, 1).unsqueeze(0)
            return self.predict(image)[1][0].tolist()

    def _predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return logits, logits.float().softmax(dim=-1).topk(min(_TOP, self.workload.classes)).indices


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


def free_memory() -> None:
    """Give back the memory of a model that is no longer used: it is part of a reference cycle, with its step or its
    optimizer, which only the garbage collector frees."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def matmul_flops(device: str, repeats: int = 8) -> float:
    """FLOP/s of a matrix product on this device now: 8192^3 in bfloat16 on a GPU, 1024^3 in float32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    first, second = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: first @ second, 2, device)
    seconds = sorted(timed(lambda: first @ second, repeats, device))
    return 2.0 * side**3 / seconds[repeats // 2]


def parameters_with_gradient(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.grad is not None]


def _random_batch(workload: Workload) -> tuple[Tensor, Tensor]:
    """Random pixels, uint8 (batch, channels, height, width), as hardware is faster on zeros; random labels (batch,)."""
    generator = torch.Generator().manual_seed(_SEED)
    config = workload.architecture
    shape = (workload.batch, config.channels, *config.image)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, workload.classes, (workload.batch,), generator=generator)
    return images.to(workload.device), labels.to(workload.device)
