"""Open and run an exported file; its metadata contains everything needed to use it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import ModuleConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import EXPORTED_SUFFIXES
from vitral.errors import UserError, shorten
from vitral.export.graph import INPUT, PROBABILITIES
from vitral.export.onnx import add_metadata
from vitral.export.pt2 import append_metadata, read_pt2

CARD, GATE, SOURCE, VERSION, OUTPUTS = (f"vitral.{key}" for key in ("card", "gate", "source", "version", "outputs"))

Run = Callable[[np.ndarray, Sequence[str]], list[np.ndarray]]
_Opened = tuple[Run, tuple[str, ...], tuple[int | None, ...], dict[str, str]]  # outputs, shape of the input, metadata


@dataclass(frozen=True)
class ExportedModel:
    """An exported file, ready to run."""

    path: Path
    card: Card  # of the model it was exported from; its temperature is applied in the file
    names: tuple[str, ...]  # outputs: probabilities, and possibly features and attention
    size: tuple[int | None, int | None]  # height and width of images; None if any is accepted
    metadata: dict[str, str] = field(repr=False)
    run: Run = field(repr=False)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 (batch, height, width, channels) -> probabilities (batch, classes), float32"""
        return self.outputs(pixels, (PROBABILITIES,))[PROBABILITIES]

    def outputs(self, pixels: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Compute several outputs at once.

        Args:
            pixels: uint8 (batch, height, width, channels), resized and cropped by the card's pipeline.
            names: outputs to compute, of `self.names`.

        Returns:
            Arrays by name: probabilities (batch, classes), features (batch, dim), attention (batch, rows, columns).

        Raises:
            UserError: the pixels have another shape or type, or the file has no such output.
        """
        if missing := [name for name in names if name not in self.names]:
            raise UserError(
                f"{self.path} has no output {missing[0]!r}, only {', '.join(self.names)}: export it with --outputs."
            )
        architecture = self.card.architecture
        wanted = (*(side or "any" for side in self.size), architecture.channels)
        fits = pixels.ndim == 4 and all(
            want in ("any", side) for want, side in zip(wanted, pixels.shape[1:], strict=True)
        )
        if pixels.dtype != np.uint8 or not fits:
            shape = ", ".join(map(str, wanted))
            raise UserError(
                f"these pixels are {pixels.dtype} {pixels.shape}: {self.path} takes uint8 (batch, {shape})."
            )
        stride = 1 if isinstance(architecture, ModuleConfig) else architecture.stride
        if None in self.size and any(side % stride or side < 2 * stride for side in pixels.shape[1:3]):
            height, width = pixels.shape[1:3]
            raise UserError(
                f"{self.path} takes sides that are multiples of {stride}, at least {2 * stride}, not {height}x{width}."
            )
        images = len(pixels)
        if not images:  # onnxruntime's int8 operators divide by the size of the batch
            pixels = np.zeros((1, *pixels.shape[1:]), np.uint8)
        arrays = self.run(np.ascontiguousarray(pixels), names)
        return {name: array[:images] for name, array in zip(names, arrays, strict=True)}

    def top_classes(self, pixels: np.ndarray, *, top: int) -> tuple[np.ndarray, np.ndarray]:
        """uint8 (height, width, channels) -> indices of the top classes (top,), their probabilities (top,)"""
        values = self(pixels[None])[0]
        best = np.argsort(-values, kind="stable")[:top]
        return best, values[best]

    @property
    def report(self) -> dict[str, Any]:
        """What the gate measured before the file was written; empty if it states nothing."""
        return json.loads(self.metadata.get(GATE, "{}"))


class PixelLogits(nn.Module):
    """An exported file in place of a model: uint8 (batch, channels, height, width) -> logits (batch, classes).

    Logits are recovered from the probabilities, which alone a deployment sees: where these round to 0 or 1, they are
    those of the nearest number.
    """

    def __init__(self, exported: ExportedModel) -> None:
        super().__init__()
        self.exported = exported

    def forward(self, pixels: Tensor) -> Tensor:
        card = self.exported.card
        values = self.exported(pixels.permute(0, 2, 3, 1).numpy()).astype(np.float64)
        values = np.maximum(values, np.finfo(np.float32).tiny)
        logits = np.log(values)
        if card.multilabel:
            logits -= np.log1p(-np.minimum(values, 1 - np.finfo(np.float32).epsneg))
        return torch.from_numpy((logits * card.temperature).astype(np.float32))


def is_exported(source: object) -> bool:
    """Whether a source is the path of an exported file, by its name."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in EXPORTED_SUFFIXES


def open_exported(path: str | Path, *, device: str = "cpu") -> ExportedModel:
    """Open a file that `vitral export` wrote.

    Args:
        path: the file.
        device: cpu, or cuda where the installed onnxruntime supports it.

    Returns:
        The model, a function of pixels.

    Raises:
        UserError: there is no such file, it was not written by vitral, or it cannot be read.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {path}: check the path.")
    is_archive = zipfile.is_zipfile(path)  # by its content: the gate opens files under temporary names
    run, names, shape, metadata = (_open_pt2 if is_archive else _open_onnx)(path, device)
    if CARD not in metadata or PROBABILITIES not in names or len(shape) != 4:
        raise UserError(f"{path} was not written by `vitral export`: export the model again.")
    return ExportedModel(path, Card.from_json(metadata[CARD]), names, (shape[1], shape[2]), metadata, run)


def write_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Add metadata to an exported file."""
    (append_metadata if zipfile.is_zipfile(path) else add_metadata)(path, metadata)


def _open_pt2(path: Path, device: str) -> _Opened:
    if device != "cpu":
        raise UserError(f"{path} runs on the CPU: use --device cpu, or --format onnx.")
    program, shape, metadata = read_pt2(path)
    names = tuple(json.loads(metadata.get(OUTPUTS, "[]")))

    def run(pixels: np.ndarray, outputs: Sequence[str]) -> list[np.ndarray]:
        with torch.inference_mode():
            arrays = dict(zip(names, program(torch.from_numpy(pixels)), strict=True))
        return [arrays[name].numpy() for name in outputs]

    return run, names, shape, metadata


def _open_onnx(path: Path, device: str) -> _Opened:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"{path} needs onnxruntime: pip install 'vitral[export]'.") from error
    providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    kind, _, index = device.partition(":")
    if providers.get(kind) not in onnxruntime.get_available_providers():
        raise UserError(f"the installed onnxruntime does not support the device {device}: use --device cpu.")
    provider = (providers[kind], {"device_id": int(index or 0)}) if kind == "cuda" else providers[kind]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime has a class for each of its status codes
        raise UserError(f"{path} cannot be read ({shorten(error)}): it is damaged, or not ONNX.") from error
    inputs, names = session.get_inputs(), tuple(output.name for output in session.get_outputs())
    shape = inputs[0].shape if [each.name for each in inputs] == [INPUT] else ()

    def run(pixels: np.ndarray, outputs: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(array) for array in session.run(list(outputs), {INPUT: pixels})]

    sizes = tuple(side if isinstance(side, int) else None for side in shape)
    return run, names, sizes, dict(session.get_modelmeta().custom_metadata_map)
