"""A model that is ready to serve: encoded images to pixels, batches of pixels to probabilities and attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.images import open_lazily
from vitral.data.loader import cores
from vitral.data.preprocess import Pipeline, parse_deterministic
from vitral.evaluation.calibration import probabilities
from vitral.export.exported import open_exported
from vitral.export.graph import PROBABILITIES, attention_map
from vitral.models.build import Model
from vitral.models.capture import capture
from vitral.serving import BatchRunner, model_input, prepare_model

_workers = 1  # processes that share the cores
_CPU_RUNNERS = 8  # more threads than that would wait for each other in Python


class Outputs(NamedTuple):
    """What a batch of images gives."""

    probabilities: np.ndarray  # (batch, classes) float32
    ranking: np.ndarray  # (batch, classes): values that order the classes, also where probabilities round to 0 or 1
    attention: np.ndarray | None  # (batch, rows, columns) float32; each sums to 1


class ServedImage(NamedTuple):
    """A decoded image."""

    pixels: np.ndarray  # uint8 (height, width, channels), as the model takes it
    region: tuple[float, float, float, float]  # left, top, width, height of what the model sees, as fractions


Runner = Callable[[np.ndarray, bool], Outputs]  # uint8 (batch, height, width, channels), whether attention is needed


@dataclass(frozen=True)
class Runtime:
    """A loaded model. Each of the `runners` is used by one thread at a time."""

    card: Card
    pipeline: Pipeline
    runners: tuple[Runner, ...]
    attention: bool  # whether it can be requested
    platform: str  # as the Open Inference Protocol calls it
    gains_by_batch: bool  # whether a batch takes less time than its images one by one
    classes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = self.card.class_names or tuple(map(str, range(self.card.architecture.classes)))
        object.__setattr__(self, "classes", names)

    @property
    def channels(self) -> int:
        return self.card.architecture.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the pixels."""
        return (*self.pipeline.size, self.channels)

    def decode(self, data: bytes) -> ServedImage:
        """An image file's bytes to the model's pixels, as `vitral predict` computes them; raises ImageError."""
        image = open_lazily(data, self.channels)
        height, width = image.shape[:2]
        return ServedImage(self.pipeline(image), self.pipeline.shown_region((height, width)))

    def warm_up(self) -> None:
        """Run once what the first request would otherwise wait for."""
        for runner in self.runners:
            runner(np.zeros((1, *self.shape), np.uint8), False)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the largest batch, which is among them."""
    powers = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return (*powers, largest)


def share_cores(workers: int) -> None:
    """State how many processes of this kind share the machine's cores."""
    global _workers
    _workers = workers


def core_share() -> int:
    """Cores per process, at least one."""
    return max(1, cores() // _workers)


def cpu_threads() -> tuple[int, int]:
    """How many runners share a CPU, and the threads of each.

    Batches gain little on a CPU, and threads that compute one batch together wait for each other at every layer: a
    runner per core gives the most images per second.
    """
    runners = min(core_share(), _CPU_RUNNERS)
    return runners, core_share() // runners


def torch_runtime(model: Model, card: Card, preprocess: Preprocess, device: torch.device, *, max_batch: int) -> Runtime:
    """Prepare a model on a device.

    Args:
        model: the model, which is modified: its weights are packed (CPU) or converted to bfloat16 (GPU).
        card: class names, temperature and whether classes are exclusive.
        preprocess: how pixels are prepared.
        device: where to compute.
        max_batch: the largest batch.
    """
    pipeline = parse_deterministic(preprocess.pipeline)
    prepare_model(model, device)
    # Two on a GPU: one copies its pixels and answers while the other computes. Of several processes each has one.
    gpu_runners = 2 if _workers == 1 else 1
    count = cpu_threads()[0] if device.type == "cpu" else gpu_runners
    shown = isinstance(card.architecture, ViTConfig) and not card.architecture.axial
    runners = []
    for _ in range(count):
        runners.append(_TorchRunner(_shared_copy(model), card, preprocess, device, pipeline, max_batch))
    return Runtime(card, pipeline, tuple(runners), shown, f"vitral_torch_{device.type}", device.type != "cpu")


def exported_runtime(path: str | Path, card: Callable[[Card], Card], device: torch.device) -> Runtime:
    """Open an exported file; its runners share one session.

    Args:
        path: the file.
        card: what names the classes of its card.
        device: where to compute.
    """
    runners, threads = cpu_threads() if device.type == "cpu" else (2, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # a session takes as many
    try:
        model = open_exported(path, device=str(device))
    finally:
        torch.set_num_threads(before)
    preprocess = model.card.preprocess
    assert preprocess is not None  # an exported file states it

    def run(pixels: np.ndarray, attention: bool) -> Outputs:
        outputs = model.outputs(pixels, [PROBABILITIES, "attention"] if attention else [PROBABILITIES])
        return Outputs(outputs[PROBABILITIES], outputs[PROBABILITIES], outputs.get("attention"))

    shown = "attention" in model.names
    pipeline = parse_deterministic(preprocess.pipeline)
    return Runtime(card(model.card), pipeline, (run,) * runners, shown, "onnxruntime_onnx", device.type != "cpu")


class _TorchRunner:
    """Logits by recorded CUDA graphs or packed weights; attention block by block, without a graph."""

    def __init__(
        self,
        model: nn.Module,
        card: Card,
        preprocess: Preprocess,
        device: torch.device,
        pipeline: Pipeline,
        max_batch: int,
    ) -> None:
        self.model, self.card, self.preprocess, self.device = model, card, preprocess, device
        shape = {"size": pipeline.size, "channels": card.architecture.channels}
        self.runner = BatchRunner(self._logits, device, batches=batch_sizes(max_batch), spin=False, **shape)

    def __call__(self, pixels: np.ndarray, attention: bool) -> Outputs:
        shown = None
        if attention:
            with torch.inference_mode():
                logits, shown = (output.float().cpu().numpy() for output in self._with_attention(pixels))
        else:
            (logits,) = self.runner(pixels)
        values = probabilities(logits, sigmoid=self.card.multilabel, temperature=self.card.temperature)
        return Outputs(values, logits, shown)

    def _logits(self, pixels: Tensor) -> tuple[Tensor]:
        return (self.model(self._input(pixels)).float(),)

    def _with_attention(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        config = self.card.architecture
        assert isinstance(config, ViTConfig)
        rows = "cls" if config.class_token else "all"
        with capture(self.model, layers=[-1], rows=rows) as captured:
            logits = self.model(self._input(torch.from_numpy(pixels).to(self.device)))
        return logits, attention_map(captured, config.grid(pixels.shape[1:3]))

    def _input(self, pixels: Tensor) -> Tensor:
        return model_input(self.model, pixels, self.preprocess.mean, self.preprocess.std)


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy with modules of its own, so that a capture in one thread does not see another's, and the same weights."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
