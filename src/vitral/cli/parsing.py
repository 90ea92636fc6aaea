"""The parser of a verb, generated from the source of its Python function, and one sentence for each mistake.

Nothing is imported, so help needs no torch: the signature gives names, types and defaults, the Google-style docstring
the texts. A parameter whose type no word on a command line can express (a callable, a module, an event handler) is not
an option of the command.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from vitral.errors import UserError

JSON_HELP = "print the result as JSON"  # the one option that is not a parameter of a verb's function
_SHORT = {"output": "-o"}
_AFTER_MODEL = ("images", "data", "folder", "root")  # parameters that follow a model on the command line
_SHOWN = 3  # images in a suggested command
REQUIRED: Any = object()  # the default of a parameter that has none


class VerbParser(argparse.ArgumentParser):
    """A parser whose mistakes are `UserError`s."""

    def __init__(self, verb: str, signature: VerbSignature) -> None:
        self.verb, self.signature = verb, signature
        positionals = " ".join(_usage(parameter) for parameter in signature.parameters if parameter.positional)
        super().__init__(
            prog=f"vitral {verb}",
            usage=f"vitral {verb} {positionals} [options]".replace("  ", " "),
            description=signature.description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
        )
        for parameter in signature.parameters:
            _add(self, parameter)
        self.add_argument("--json", action="store_true", help=JSON_HELP)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see `vitral {self.verb} --help`.")

    def parse_values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The value of each parameter and of --json; raises UserError for arguments that the verb does not take."""
        self._check_options(arguments)
        try:
            parsed, unknown = self.parse_known_intermixed_args(arguments)
        except argparse.ArgumentError as error:
            raise UserError(f"{error.argument_name} {error.message}: see `vitral {self.verb} --help`.") from error
        if unknown:
            self.error(f"not understood: {', '.join(unknown)}")
        values = vars(parsed)
        missing = [
            f"{_shown_name(parameter)} ({_first_sentence(parameter.help)})"
            for parameter in self.signature.parameters
            if parameter.default is REQUIRED and values.get(parameter.name, []) == []
        ]
        if missing:
            self.error(f"missing: {', '.join(missing)}")
        for parameter in self.signature.parameters:
            if isinstance(values[parameter.name], list):
                values[parameter.name] = _collected(parameter, values[parameter.name])
        return values

    def _check_options(self, arguments: Sequence[str]) -> None:
        """Refuse options that do not exist, lack a value, or are given twice."""
        options = {option: action for action in self._actions for option in action.option_strings}
        given_options = [word.partition("=")[0] for word in arguments]
        for index, option in enumerate(given_options):
            if option.startswith("--") and option != "--" and option not in options:
                raise UserError(f"`{self.verb}` has no option {option}: {self._nearest(option, options)}")
            action = options.get(option)
            if action is None or action.nargs == 0:
                continue
            if given_options.count(option) > 1:
                values = "all its values" if action.nargs == "+" else "one value"
                raise UserError(f"{option} is given twice: write it once, followed by {values}.")
            value = (
                arguments[index].partition("=")[2]
                if "=" in arguments[index]
                else "".join(arguments[index + 1 : index + 2])
            )
            if not value or (arguments[index] == option and value.startswith("--")):
                assignment = str(action.metavar).removesuffix(" ...")
                raise UserError(f"{option} needs {assignment if '=' in assignment else 'a value'}.")
        if "" in arguments:
            self.error("an argument is empty (a shell variable that is not set?)")

    def _nearest(self, option: str, options: Mapping[str, argparse.Action]) -> str:
        """The recipe's key that the option spells, such as --lr, or else the nearest option."""
        from vitral.recipe import keys

        wanted = option.removeprefix("--").replace("-", "_")
        matches = [key for key in keys() if wanted in (key, key.rpartition(".")[2])] if "--set" in options else []
        if matches:
            return f"write {' or '.join(f'--set {key}=VALUE' for key in matches)}."
        near = difflib.get_close_matches(option, options, n=1)
        return f"did you mean {near[0]}?" if near else f"`vitral {self.verb} --help` lists the options."


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help texts as the docstrings have them, each followed by the default where that says something."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return f"{action.metavar} ..." if action.nargs in ("+", "*") else super()._format_args(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        default = action.default
        if default in (None, "", (), False, argparse.SUPPRESS):
            return action.help or ""
        text = " ".join(map(str, default)) if isinstance(default, tuple) else f"{default}"
        return f"{action.help} (default: {text})"


def _shown_name(parameter: Parameter) -> str:
    return _metavar(parameter) if parameter.positional else _option(parameter.name)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def _add(parser: argparse.ArgumentParser, parameter: Parameter) -> None:
    """Add a parameter's argument; a required one has no default, and is checked after parsing."""
    value_type = parameter.type
    several = value_type.many or bool(value_type.assignment) or (value_type.pair and value_type.number)
    options: dict[str, Any] = {"help": parameter.help, "default": parameter.default}
    if parameter.default is REQUIRED:
        options["default"] = argparse.SUPPRESS
    if value_type.flag:
        parser.add_argument(_option(parameter.name), action="store_true", help=parameter.help)
        return
    options |= {"type": _reader(value_type), "metavar": _metavar(parameter)}
    if parameter.positional:
        parser.add_argument(parameter.name, nargs="*" if several else "?", **options)
        return
    names = [_option(parameter.name), *([_SHORT[parameter.name]] if parameter.name in _SHORT else [])]
    if value_type.pair and not value_type.number:
        options |= {"nargs": 2, "metavar": ("ROW", "COLUMN") if parameter.name == "patch" else ("ROWS", "COLUMNS")}
    elif several:
        options["nargs"] = "+"
    parser.add_argument(*names, **options)


def _reader(value_type: ValueType) -> Callable[[str], Any]:
    """The function from a word to a value."""

    def read(word: str) -> Any:
        if value_type.text or value_type.assignment or word in value_type.choices:
            return word
        number = int if value_type.pair else value_type.number
        if number is not None:
            try:
                return number(word)
            except ValueError:
                pass
        expected = {None: "", int: "a whole number", float: "a number"}[number]
        choices = " or ".join([*filter(None, [expected]), *value_type.choices])
        raise argparse.ArgumentTypeError(f'takes {choices}, not "{word}"')

    return read


def _collected(parameter: Parameter, values: list[Any]) -> Any:
    """Several values as the function takes them."""
    if parameter.type.pair and parameter.type.number:
        if len(values) > 2 or min(values) < 1:
            raise UserError(f"{_option(parameter.name)} takes one number of pixels, or a height and a width.")
        return values[0] if len(values) == 1 else tuple(values)
    return tuple(values)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(parameter: Parameter) -> str:
    value_type = parameter.type
    if parameter.positional:
        return parameter.name.upper()
    if value_type.assignment:
        return value_type.assignment
    if value_type.pair:
        return "PIXELS"
    if value_type.text:
        return "PATH" if value_type.path else "NAME"
    return "|".join([*(["N"] if value_type.number else []), *value_type.choices])


def _usage(parameter: Parameter) -> str:
    text = _metavar(parameter) + " ..." * parameter.type.many
    return text if parameter.default is REQUIRED else f"[{text}]"


def swapped_order(verb: str, signature: VerbSignature, values: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """The command with the model first, if the arguments are in the wrong order; else empty."""
    names = [parameter.name for parameter in signature.parameters if parameter.positional]
    if len(names) != 2 or names[0] != "source" or names[1] not in _AFTER_MODEL:
        return ""
    first, second = values[names[0]], values[names[1]]
    given = [first, *([second] if isinstance(second, str) else second)]
    model = _model_after_data(given, names[1])
    if not model:
        return ""
    rest, options = [word for word in given if word != model], list(arguments)
    for word in given:
        options.remove(word)
    shown = shlex.join([model, *rest[:_SHOWN], *["..."] * (len(rest) > _SHOWN), *options])
    return f"`{verb}` takes the model first, then the {names[1]}: write `vitral {verb} {shown}`."


def _model_after_data(given: Sequence[str], second: str) -> str:
    """The model among the later arguments, if the first argument exists and is not a model."""
    from vitral.api.checkpoints import is_model
    from vitral.api.data import known_data

    exists = os.path.exists(os.path.expanduser(given[0])) or given[0].partition(":")[0] in known_data()
    if not exists or is_model(given[0]):
        return ""
    maybe_data = ("hf:",) if second == "data" else ()  # the hub has models and data sets under such names
    return next((word for word in given[1:] if not word.startswith(maybe_data) and is_model(word)), "")


@dataclass(frozen=True)
class ValueType:
    """Which command-line arguments a parameter takes."""

    text: bool = False  # any word
    path: bool = False  # ... that may be the path of a file
    number: type[int] | type[float] | None = None
    flag: bool = False
    choices: tuple[str, ...] = ()
    many: bool = False  # one or more arguments
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
    """Read a function from the source of its module, without parameters that have no place on a command line."""
    node = _function(module, function)
    docstring = ast.get_docstring(node) or ""
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
    name, inside = "", False
    for line in docstring.splitlines():
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
    """What the members of a union mean together; None if no member can be written as arguments."""
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
