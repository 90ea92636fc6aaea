"""The command line is generated from the Python functions: one description of each parameter, one call to each verb."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journeys import Command

import vitral
from vitral.api import models
from vitral.cli import VERBS
from vitral.cli.parsing import JSON_HELP, REQUIRED, VerbParser, VerbSignature, read_signature
from vitral.errors import UserError

SOURCE = Path(__file__).parents[2] / "src" / "vitral"
# Parameters of the Python functions that no word on a command line can express.
PYTHON_ONLY = {"on_event", "loss", "optimizer", "transform", "callbacks", "old"}


def function_of(verb: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"vitral.api.{VERBS[verb].module}"), VERBS[verb].function)


def signature_of(verb: str) -> VerbSignature:
    return read_signature(f"vitral.api.{VERBS[verb].module}", VERBS[verb].function)


def actions_of(verb: str) -> dict[str, argparse.Action]:
    parser = VerbParser(verb, signature_of(verb))
    return {action.dest: action for action in parser._actions if action.dest != "help"}


@pytest.mark.parametrize("verb", VERBS)
def test_names_kinds_and_defaults_are_the_functions(verb: str) -> None:
    actions = actions_of(verb)
    parameters = inspect.signature(function_of(verb)).parameters
    assert set(actions) - {"json"} == set(parameters) - PYTHON_ONLY
    for name, parameter in parameters.items():
        if name in PYTHON_ONLY:
            continue
        action = actions[name]
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert positional == (not action.option_strings), name
        assert positional or f"--{name.replace('_', '-')}" in action.option_strings
        required = parameter.default is parameter.empty
        assert action.default == (argparse.SUPPRESS if required else parameter.default), name


@pytest.mark.parametrize("verb", VERBS)
def test_help_texts_are_the_docstrings(verb: str) -> None:
    docstring = inspect.getdoc(function_of(verb)) or ""
    words = " ".join(docstring.split())
    for name, action in actions_of(verb).items():
        if name == "json":
            assert action.help == JSON_HELP
            continue
        assert action.help
        text = f" {name}: {action.help} "
        assert text in f"{words} "
        following = words.partition(text)[2].split(" ")[0]  # the text ends where the next entry or section begins
        assert following.endswith(":") or not following, (name, following)
    assert docstring.startswith(signature_of(verb).description)
    parser = VerbParser(verb, signature_of(verb))
    shown = " ".join(parser.format_help().split())
    assert all(" ".join(str(action.help).split()[:3]) in shown for action in actions_of(verb).values())


@pytest.mark.parametrize("verb", VERBS)
def test_every_parameter_is_documented(verb: str) -> None:
    """Those that the command line does not have as well."""
    docstring = inspect.getdoc(function_of(verb)) or ""
    names = [name for name in inspect.signature(function_of(verb)).parameters if name != "old"]
    assert not [name for name in names if f"\n    {name}: " not in docstring]
    assert "\nReturns:\n" in docstring


def test_options_are_described_in_one_place() -> None:
    """No text of an option is in the command line's own source, except for its own options."""
    texts = [parameter.help for verb in VERBS for parameter in signature_of(verb).parameters]
    for path in sorted((SOURCE / "cli").glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        strings = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not set(texts) & set(strings)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
        helps = [keyword.value for call in added for keyword in call.keywords if keyword.arg == "help"]
        assert not added or path.name == "parsing.py"
        assert not [text for text in helps if isinstance(text, ast.Constant | ast.JoinedStr)]


def parser_of(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerbParser:
    """The parser of a function `run` in a module with this source."""
    folder = tmp_path / "invented"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "verbs.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return VerbParser("run", read_signature.__wrapped__("invented.verbs", "run"))


def test_types_are_read_from_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(
        '''
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitral.architecture import ResizeRule, Size

Kind = Literal["a", "b"]
More = Literal[Kind, "c"]
Changes = Sequence[str] | Mapping[str, Any]

def run(
    first: str | Path,
    rest: Sequence[str | Path] = (),
    *,
    number: int = 3,
    maybe: float | None = None,
    either: float | Literal["auto"] = "auto",
    kind: More = "a",
    kinds: Sequence[Kind] = ("a",),
    rule: ResizeRule | None = None,
    size: int | Size | None = None,
    grid: Size | None = None,
    fast: bool = False,
    set: Changes = (),
    on_event: Callable[[int], None] | None = None,
    **others: object,
) -> None:
    """Run.

    Args:
        first: one
            on two lines.
        number: 95 % of it.
        on_event: a callable.
    """
''',
        tmp_path,
        monkeypatch,
    )
    plain = parser.parse_values(["x"])
    assert plain == {
        **{"first": "x", "rest": (), "number": 3, "maybe": None, "either": "auto", "kind": "a", "kinds": ("a",)},
        **{"rule": None, "size": None, "grid": None, "fast": False, "set": ()},
        "json": False,
    }
    numbers = ["--number", "-4", "y", "--maybe", "1e3", "--either", "2", "--size", "7", "--grid", "2", "3"]
    names = ["--kind", "c", "--kinds", "a", "b", "--rule", "timm", "--fast", "--set", "a=1", "b=2,3"]
    values = parser.parse_values(["x", *numbers, *names])
    assert values == {
        **{
            "first": "x",
            "rest": ("y",),
            "number": -4,
            "maybe": 1000.0,
            "either": 2.0,
            "kind": "c",
            "kinds": ("a", "b"),
        },
        **{"rule": "timm", "size": 7, "grid": (2, 3), "fast": True, "set": ("a=1", "b=2,3"), "json": False},
    }
    assert parser.parse_values(["x", "--size", "7", "8"])["size"] == (7, 8)
    assert parser.parse_values(["x", "--number=5"])["number"] == 5
    for wrong in ("x --kind d", "x --kinds a d", "x --rule none", "x --grid 2 b", "x --either b", "x --fast=1", ""):
        with pytest.raises(UserError):
            parser.parse_values(wrong.split())
    texts = {parameter.name: parameter.help for parameter in parser.signature.parameters}
    assert (texts["first"], texts["number"], texts["kind"]) == ("one on two lines.", "95 % of it.", "")
    assert parser.signature.parameters[0].default is REQUIRED
    assert "95 % of it. (default: 3)" in parser.format_help()


def test_the_entry_point_calls_the_function_directly(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []
    real = models.compute_cost

    def watched(*arguments: Any, **options: Any) -> Any:
        stacks.append([frame.name for frame in traceback.extract_stack() if "vitral/cli" in frame.filename])
        return real(*arguments, **options)

    monkeypatch.setattr(models, "compute_cost", watched)
    assert command("cost", "ViT-B/16").code == 0
    assert stacks == [["main", "run_verb"]]


@pytest.mark.parametrize("verb", ["train", "predict", "bench", "list"])
def test_help_of_a_verb_imports_nothing_heavy(verb: str) -> None:
    code = f"import sys; sys.argv = ['vitral', '{verb}', '--help']; from vitral.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    words = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0
    assert "--json" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "PIL", "vitral.api"}


def test_every_verb_is_a_function_of_the_package() -> None:
    """Also after a module of the same name was imported: `vitral.cost` is one."""
    assert {verb for verb in VERBS if getattr(vitral, VERBS[verb].function) is not function_of(verb)} == set()
