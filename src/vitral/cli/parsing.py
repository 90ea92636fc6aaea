"""The parser of a verb, generated from its Python function, and one sentence for each mistake."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vitral.cli.signatures import REQUIRED, Parameter, ValueType, VerbSignature
from vitral.errors import UserError

# Options of the command line alone; all others are parameters of the verbs' functions.
CLI_OPTIONS = {"json": "print the result as JSON"}
_SHORT = {"output": "-o"}
_AFTER_MODEL = ("images", "data", "folder", "root")  # parameters that follow a model on the command line
_SHOWN = 3  # images in a suggested command


class VerbParser(argparse.ArgumentParser):
    """A parser whose mistakes are `UserError`s."""

    def __init__(self, verb: str, signature: VerbSignature, cli_options: Sequence[str] = ("json",)) -> None:
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
        for name in cli_options:
            self.add_argument(f"--{name}", action="store_true", help=CLI_OPTIONS[name])

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UserError(f"{message}: see `vitral {self.verb} --help`.")

    def parse_values(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse the words after a verb.

        Args:
            words: positional arguments and options in any order.

        Returns:
            The value of each parameter and of each option of the command line.

        Raises:
            UserError: where the words are not what the verb takes.
        """
        self._check_options(words)
        try:
            parsed, unknown = self.parse_known_intermixed_args(words)
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

    def _check_options(self, words: Sequence[str]) -> None:
        """Refuse options that do not exist, lack a value, or are given twice."""
        options = {option: action for action in self._actions for option in action.option_strings}
        given = [word.partition("=")[0] for word in words]
        for index, option in enumerate(given):
            if option.startswith("--") and option != "--" and option not in options:
                raise UserError(f"`{self.verb}` has no option {option}: {self._nearest(option, options)}")
            action = options.get(option)
            if action is None or action.nargs == 0:
                continue
            if given.count(option) > 1:
                values = "all its values" if action.nargs == "+" else "one value"
                raise UserError(f"{option} is given twice: write it once, followed by {values}.")
            value = words[index].partition("=")[2] if "=" in words[index] else "".join(words[index + 1 : index + 2])
            if (
                (not value and action.nargs == "+")
                or (words[index] == option and index + 1 == len(words))
                or (words[index] == option and value.startswith("--"))
            ):
                assignment = str(action.metavar).removesuffix(" ...")
                raise UserError(f"{option} needs {assignment if '=' in assignment else 'a value'}.")

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


def swapped_order(verb: str, signature: VerbSignature, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """The command with the model first, where a model follows what should follow it; else an empty text."""
    names = [parameter.name for parameter in signature.parameters if parameter.positional]
    if len(names) != 2 or names[0] != "source" or names[1] not in _AFTER_MODEL:
        return ""
    first, second = values[names[0]], values[names[1]]
    given = [first, *([second] if isinstance(second, str) else second)]
    model = _model_after_data(given, names[1])
    if not model:
        return ""
    rest, options = [word for word in given if word != model], list(words)
    for word in given:
        options.remove(word)
    shown = shlex.join([model, *rest[:_SHOWN], *["..."] * (len(rest) > _SHOWN), *options])
    return f"`{verb}` takes the model first, then the {names[1]}: write `vitral {verb} {shown}`."


def _model_after_data(given: Sequence[str], second: str) -> str:
    """The model among the later words, where the first word exists and is not a model."""
    from vitral.api.checkpoints import is_model
    from vitral.api.data import known_data

    exists = os.path.exists(os.path.expanduser(given[0])) or given[0].partition(":")[0] in known_data()
    if not exists or is_model(given[0]):
        return ""
    maybe_data = ("hf:",) if second == "data" else ()  # the hub has models and data sets under such names
    return next((word for word in given[1:] if not word.startswith(maybe_data) and is_model(word)), "")
