"""Read what a verb's Python function takes from its source: nothing is imported, so help needs no torch.

The signature gives names, types and defaults, the Google-style docstring gives the texts. A parameter whose type no
word on a command line can express (a callable, a module, an event handler) is not an option of the command.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

REQUIRED: Any = object()  # the default of a parameter that has none


@dataclass(frozen=True)
class ValueType:
    """Which words on the command line a parameter takes."""

    text: bool = False  # any word
    path: bool = False  # ... that may be the path of a file
    number: type[int] | type[float] | None = None
    flag: bool = False
    choices: tuple[str, ...] = ()
    many: bool = False  # one or more words
    pair: bool = False  # two whole numbers; one or two where `number` is set as well
    assignment: str = ""  # KEY=VALUE or KEY=VALUE,VALUE


@dataclass(frozen=True)
class Parameter:
    """One parameter of a verb."""

    name: str
    positional: bool
    type: ValueType
    default: Any
    help: str


@dataclass(frozen=True)
class VerbSignature:
    """A verb's function as the command line presents it."""

    description: str  # the docstring up to its sections
    parameters: tuple[Parameter, ...]
    takes_events: bool  # whether it has the parameter on_event


@cache
def read_signature(module: str, function: str) -> VerbSignature:
    """Read a function from the source of its module.

    Args:
        module: dotted name of the module.
        function: name of the function.

    Returns:
        Its parameters in order, without those that have no place on a command line.
    """
    node = _function(module, function)
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    description = re.split(r"\n\n(?:Args|Returns|Raises):\n", f"{docstring}\n")[0].strip()
    helps = parameter_helps(docstring)
    arguments = node.args
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    positional = zip(arguments.args, [*missing, *arguments.defaults], strict=True)
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    given = [*((*pair, True) for pair in positional), *((*pair, False) for pair in keyword)]
    parameters = []
    for argument, default, is_positional in given:
        value_type = None if argument.annotation is None else _value_type(argument.annotation, module)
        if value_type is not None:
            value = REQUIRED if default is None else ast.literal_eval(default)
            parameters.append(Parameter(argument.arg, is_positional, value_type, value, helps.get(argument.arg, "")))
    takes_events = any(argument.arg == "on_event" for argument in arguments.kwonlyargs)
    return VerbSignature(description, tuple(parameters), takes_events)


def read_summary(module: str, function: str) -> str:
    """The first line of a function's docstring."""
    return (ast.get_docstring(_function(module, function)) or "").partition("\n")[0]


def parameter_helps(docstring: str) -> dict[str, str]:
    """The texts under "Args:" by parameter, each as one line."""
    helps: dict[str, str] = {}
    name = ""
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith(" "):
            inside = line == "Args:" or (inside and not line)
        elif inside and (match := re.fullmatch(r" {4}(\w+): (.*)", line)):
            name = match[1]
            helps[name] = match[2]
        elif inside and name:
            helps[name] += f" {line.strip()}"
    return helps


def _function(module: str, name: str) -> ast.FunctionDef:
    return next(node for node in _tree(module).body if isinstance(node, ast.FunctionDef) and node.name == name)


@cache
def _tree(module: str) -> ast.Module:
    package, _, name = module.partition(".")
    path = name.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        try:
            source = pkgutil.get_data(package, file)
        except OSError:
            continue
        return ast.parse(source or b"")
    raise ModuleNotFoundError(module)


def _value_type(annotation: ast.expr, module: str) -> ValueType | None:
    """What the members of a union mean together; None where no member can be written as words."""
    values: dict[str, Any] = {}
    for node, scope in _members(annotation, module):
        values |= _value_of(node, scope)
    return ValueType(**values) if values else None


def _value_of(node: ast.expr, module: str) -> dict[str, Any]:
    """The fields of a `ValueType` that one type sets; none for a type of objects."""
    if isinstance(node, ast.Name):
        plain = {"str": {"text": True}, "Path": {"text": True, "path": True}, "bool": {"flag": True}}
        return plain.get(node.id) or {"int": {"number": int}, "float": {"number": float}}.get(node.id, {})
    if not isinstance(node, ast.Subscript):
        return {}
    container, inner = ast.unparse(node.value), node.slice
    if container == "Literal":
        return {"choices": tuple(_choices(inner, module))}
    if container == "Sequence":
        item = _value_type(inner, module)
        return {**vars(item), "many": True} if item else {}
    if container == "Mapping" and isinstance(inner, ast.Tuple):
        several = ast.unparse(inner.elts[1]).startswith("Sequence")
        return {"assignment": "KEY=VALUE,VALUE" if several else "KEY=VALUE"}
    return {"pair": True} if ast.unparse(node) == "tuple[int, int]" else {}


def _choices(node: ast.expr, module: str) -> Iterator[str]:
    for item in node.elts if isinstance(node, ast.Tuple) else [node]:
        if isinstance(item, ast.Constant):
            yield str(item.value)
        else:
            for member, scope in _members(item, module):
                assert isinstance(member, ast.Subscript)
                yield from _choices(member.slice, scope)


def _members(node: ast.expr, module: str) -> Iterator[tuple[ast.expr, str]]:
    """The types of a union, each with the module it is written in; aliases are replaced by what they stand for."""
    if isinstance(node, ast.BinOp):
        yield from _members(node.left, module)
        yield from _members(node.right, module)
    elif isinstance(node, ast.Name) and (alias := _alias(node.id, module)):
        yield from _members(*alias)
    else:
        yield node, module


def _alias(name: str, module: str) -> tuple[ast.expr, str] | None:
    """What `name = ...` in the module, or in the module of ours that it is imported from, assigns."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return node.value, module
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitral."):
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return _alias(imported.name, node.module)
    return None
