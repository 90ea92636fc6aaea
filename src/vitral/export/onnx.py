"""Write a graph as one ONNX file, by PyTorch's exporter, with metadata that contains everything needed to use it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import torch

from vitral.errors import UserError, shorten
from vitral.export.graph import INPUT, ExportGraph
from vitral.export.pt2 import traced

OPSET = 20  # the first with Gelu; onnxruntime reads such files of PyTorch from 1.18 on
_LARGEST = 2**31 - 2**20  # bytes: a protobuf, and so an ONNX file, ends at 2 GiB


def write_onnx(graph: ExportGraph, path: Path, *, dynamic_size: bool = False) -> None:
    """Write a graph as an ONNX file, whose batch is dynamic.

    Args:
        graph: what to export.
        path: the file to write.
        dynamic_size: whether height and width are dynamic as well.

    Raises:
        UserError: onnx is not installed, or the model does not fit into one file.
    """
    import_onnx()
    size = sum(tensor.nbytes for tensor in graph.state_dict().values())
    if size > _LARGEST:
        raise UserError(f"an ONNX file holds at most 2 GB and the weights are {size / 1e9:.1f}: use --format pt2.")
    # The exporter reports its steps on standard output, which is for results, and warns about itself.
    with redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        traced_program = traced(graph, dynamic_size=dynamic_size)
        try:
            program = torch.onnx.export(
                traced_program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=list(graph.names),
            )
        except Exception as error:  # an operator without a translation, for one
            raise UserError(f"ONNX cannot express this model ({shorten(error)}): use --format pt2.") from error
        assert program is not None
        _name_axes(program)
        program.save(path, external_data=False)


def _name_axes(program: torch.onnx.ONNXProgram) -> None:
    """Name the dynamic sizes, which PyTorch numbers: runtimes set them by name."""
    shape = program.model.graph.inputs[0].shape
    assert shape is not None
    sizes = zip(map(str, shape), ("batch", "rows", "columns"), strict=False)  # such as s81, 16*s30, 224
    program.rename_axes({size.split("*")[-1]: name for size, name in sizes if not size.isdecimal()})


def add_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Set metadata of an ONNX file; values of other keys are kept."""
    onnx = import_onnx()
    model = onnx.load(path)
    merged = {entry.key: entry.value for entry in model.metadata_props} | dict(metadata)
    onnx.helper.set_model_props(model, merged)
    onnx.save(model, path)


def import_onnx() -> ModuleType:
    """The onnx package, with onnxscript, which PyTorch's exporter needs.

    Raises:
        UserError: one of them is not installed.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("exporting needs onnx and onnxscript: pip install 'vitral[export]'.") from error
    return onnx
