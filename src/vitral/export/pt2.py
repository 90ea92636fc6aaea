"""Write a graph as a .pt2 file by `torch.export`, and read such files without executing their code.

`torch.export.load` unpickles what a file marks as pickled, loads compiled libraries, evaluates its symbolic expressions
as Python, executes its guards, and writes its names into generated code. So a file is read only if it is no more
than what `write_pt2` writes: weights as plain bytes, and a program of known operators, plain names, and expressions of
sizes. What is left out of a file for that purpose (guards, stack traces) is not needed to run it.
"""

from __future__ import annotations

import io
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.errors import UserError, shorten
from vitral.export.graph import ExportGraph, with_constant_filters

_MEMBERS = re.compile(
    r"models/model\.json|data/(?:weights|constants)/model_(?:weights|constants)_config\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+|data/sample_inputs/model\.pt"
    r"|extra/vitral\.\w+|archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id"
)
_ATEN = re.compile(
    r"_assert_tensor_metadata|abs|add|addcmul|alias|arange|avg_pool2d|cat|chunk|clamp|clamp_min|clone"
    r"|concat|contiguous|conv2d|cos|detach|div|dropout|einsum|eq|exp|expand|expand_as|flatten|flip|floor"
    r"|full|full_like|gather|ge|gelu|group_norm|gt|index|layer_norm|le|linear|lt|matmul|max_pool2d|maximum"
    r"|mean|meshgrid|minimum|mul|narrow|ne|neg|new_zeros|numpy_T|one_hot|ones|ones_like|pad|permute|pow|reciprocal|relu"
    r"|repeat|reshape|rsqrt|rsub|scalar_tensor|scaled_dot_product_attention|select|sigmoid|silu|sin|slice"
    r"|softmax|split|split_with_sizes|sqrt|square|squeeze|stack|sub|sum|sym_size|t|tanh|to|transpose"
    r"|type_as|unbind|unflatten|unsqueeze|view|where|zeros|zeros_like"
)
_OTHERS = re.compile(
    r"_operator\.(?:add|sub|mul|neg|floordiv|truediv|mod|eq|ne|le|lt|ge|gt|getitem)|torch\.sym_(?:float|int|max|min|sum)"
    r"|torch\.ops\.higher_order\.wrap_with_autocast"
)
_FUNCTIONS = (
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Min|Max|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|FloatTrueDiv"
    "|ToFloat|CeilToInt|FloorToInt|TruncToInt|precision|positive|nonnegative|integer|True"
)
_EXPRESSION = re.compile(rf"(?:\b(?:{_FUNCTIONS})\b|'(?:[su]\d+|-?\d+(?:\.\d+)?(?:e-?\d+)?)'|\d+|[\s(),=-])*")
_TREE = re.compile(r'(?:"(?:type|context|children_spec|builtins\.(?:tuple|dict)|null|\[\])"|null|[\s\d\[\]{},:])*')
_RULES: dict[str, re.Pattern[str]] = {
    "expr_str": _EXPRESSION,
    **dict.fromkeys(("in_spec", "out_spec"), _TREE),
    **dict.fromkeys(("parameter_name", "buffer_name", "fqn", "path_name"), re.compile(r"[\w.]*")),
    "as_float": re.compile(r"-?Infinity"),  # other numbers are no strings
    "as_string": re.compile(r"[\w,>. -]*"),  # such as the equation of an einsum
    "torch_version": re.compile(r"[\w.+-]*"),
}
_NAME = re.compile(r"(?:[A-Za-z_]\w*)?")
_RANGE = re.compile(r"(?:\d+\*)?[su]\d+")
_META = ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node", "custom")


def write_pt2(graph: ExportGraph, path: Path, *, dynamic_size: bool = False) -> None:
    """Write a graph as a .pt2 file, whose batch is dynamic.

    Args:
        graph: what to export.
        path: the file to write.
        dynamic_size: whether height and width are dynamic as well.

    Raises:
        UserError: PyTorch cannot export the model.
    """
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        program = traced(graph, dynamic_size=dynamic_size)
        program._guards_code = []
        modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
        for node in (node for module in modules for node in module.graph.nodes):
            for key in _META:  # paths of this machine among them
                node.meta.pop(key, None)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getvalue())


def traced(graph: ExportGraph, *, dynamic_size: bool) -> torch.export.ExportedProgram:
    """The graph as a program.

    Raises:
        UserError: PyTorch cannot export the model.
    """
    try:
        return torch.export.export(
            with_constant_filters(graph),
            (graph.example(),),
            dynamic_shapes=graph.dynamic_shapes(size=dynamic_size),
            strict=False,
        )
    except Exception as error:  # torch.export has no common class for what it cannot trace
        fix = "export it without --dynamic-size" if dynamic_size else "it cannot be exported"
        raise UserError(f"PyTorch cannot trace this model ({shorten(str(error).strip())}): {fix}.") from error


def read_pt2(path: Path) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], tuple[int | None, ...], dict[str, str]]:
    """Open a .pt2 file of `write_pt2`.

    Returns:
        The program as a function; its input's shape, None if it is dynamic; and the file's metadata.

    Raises:
        UserError: the file is damaged, or holds anything that `write_pt2` does not write.
    """
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            root = _checked_root(archive)
            _check_pickle(archive.read(f"{root}data/sample_inputs/model.pt"))
            for kind in ("weights", "constants"):
                _check_payloads(json.loads(archive.read(f"{root}data/{kind}/model_{kind}_config.json")))
            _check_program(json.loads(archive.read(f"{root}models/model.json")))
            start = f"{root}extra/"
            metadata = {
                name.removeprefix(start): archive.read(name).decode()
                for name in archive.namelist()
                if name.startswith(start)
            }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(io.BytesIO(data))
            [name] = program.graph_signature.user_inputs
            pixels = next(node for node in program.graph.nodes if node.name == name)
            module = program.module(check_guards=False)
    except Exception as error:  # damaged files fail in many ways
        raise UserError(
            f"{path} cannot be read ({shorten(error)}): it is damaged, or not of `vitral export`."
        ) from error
    return module, tuple(side if isinstance(side, int) else None for side in pixels.meta["val"].shape), metadata


def append_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Add metadata to a .pt2 file."""
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for key, value in metadata.items():
            archive.writestr(f"{root}/extra/{key}", value)


def _checked_root(archive: zipfile.ZipFile) -> str:
    """The folder that all files of the archive are in."""
    names = archive.namelist()
    root = f"{names[0].partition('/')[0]}/"
    for name in names:
        if not name.startswith(root) or not _MEMBERS.fullmatch(name.removeprefix(root)) or names.count(name) > 1:
            raise ValueError(f"unexpected file {name}")
    return root


def _check_pickle(data: bytes) -> None:
    torch.load(io.BytesIO(data), weights_only=True)  # raises for anything but tensors; torch would then run it


def _check_payloads(config: Mapping[str, Any]) -> None:
    for payload in config["config"].values():
        if payload["use_pickle"] is not False or not re.fullmatch(r"(?:weight|tensor)_\d+", payload["path_name"]):
            raise ValueError("pickled weights")


def _check_program(program: Mapping[str, Any]) -> None:
    if program.get("guards_code"):
        raise ValueError("guards, which are code")
    for key in program["range_constraints"]:
        if not _RANGE.fullmatch(key):
            raise ValueError(f"the size {key}")
    _check_value({key: value for key, value in program.items() if key != "range_constraints"}, "")


def _check_value(value: Any, key: str) -> None:
    """Refuse a string that is neither a plain name nor what its key allows."""
    if isinstance(value, dict):
        if key == "metadata" and value:
            raise ValueError("metadata of nodes")
        for name, inner in value.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"the name {name}")
            _check_value(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, key)
    elif isinstance(value, str):
        known = _is_operator(value) if key == "target" else _RULES.get(key, _NAME).fullmatch(value)
        if not known:
            raise ValueError(f"{key or 'a value'} {value}")


def _is_operator(target: str) -> bool:
    match = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.\w+", target)
    return bool(_ATEN.fullmatch(match[1])) if match else bool(_OTHERS.fullmatch(target) or _NAME.fullmatch(target))
