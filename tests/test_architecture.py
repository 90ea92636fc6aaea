"""The architecture as a test: who may import whom, which word lives where, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vitral"

# Every room and what it may import. A new top-level module or folder starts with a line here.
PLAIN = {
    *("errors", "version", "atomic", "events", "display", "trackers"),
    *("validation", "architecture", "names", "cost", "paper"),
    *("recipe", "recipe_schema", "recipe_defaults", "recipe_presets"),
}
BELOW_MODELS = PLAIN | {"kernels"}
MEASURING = PLAIN | {"models", "data"}
TO_LEVEL_3 = PLAIN | {"kernels", "data", "models", "checkpoints", "evaluation", "inspection"}
TO_LEVEL_4 = TO_LEVEL_3 | {"training", "report", "serving", "export"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "atomic": {"errors"},
    "events": set(),
    "display": {"errors", "events"},
    "trackers": {"errors", "events", "atomic"},
    "validation": {"errors"},
    "architecture": {"errors", "validation"},
    "names": {"errors", "architecture"},
    "cost": {"errors", "architecture"},
    "paper": {"errors", "architecture", "names"},
    "recipe_schema": {"errors"},
    "recipe": {"errors", "architecture", "names", "paper", "recipe_schema"},
    "recipe_defaults": {"errors", "architecture", "names", "recipe"},
    "recipe_presets": {"errors", "architecture", "names", "paper", "recipe"},
    "kernels": PLAIN,
    "data": PLAIN,
    "models": BELOW_MODELS,
    "checkpoints": PLAIN | {"data", "models"},  # a card gives its preprocessing as a callable
    "evaluation": MEASURING,
    "inspection": MEASURING,
    "training": TO_LEVEL_3,
    "report": PLAIN | {"evaluation", "inspection", "data"},
    "serving": TO_LEVEL_3,
    "export": TO_LEVEL_3 | {"report"},  # its pages have the frame of reports
    "studies": TO_LEVEL_4,
    "bench": TO_LEVEL_4,
    "server": TO_LEVEL_4,
    "api": TO_LEVEL_4 | {"studies", "bench", "server"},
    "cli": PLAIN | {"api"},
    "sklearn": PLAIN | {"api"},
    "__init__": TO_LEVEL_4 | {"api"},
    "__main__": {"cli"},
}

# Modules that only some places may import although the rooms allow it, and words of other libraries with one home each.
# A place is a file, or a folder with its slash, below src/vitral.
HOMES: dict[str, tuple[str, ...]] = {
    "vitral.recipe": (
        *(
            "recipe.py",
            "recipe_defaults.py",
            "recipe_presets.py",
            "training/run.py",
            "training/setup.py",
            "training/build.py",
        ),
        *("studies/", "api/", "cli/", "sklearn.py", "__init__.py"),
    ),
    "torch.distributed": ("training/parallel.py", "checkpoints/run.py"),
    "PIL": ("data/images.py",),
    "simplejpeg": ("data/images.py",),
    "submitit": ("api/engines.py",),
    "starlette": ("server/",),
    "uvicorn": ("server/process.py",),
    "prometheus_client": ("server/monitoring.py",),
    "python_multipart": ("server/requests.py",),
    "matplotlib": (),
    "triton": ("kernels/",),
    "sklearn": ("sklearn.py", "data/catalog/readers.py"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), ("export/", "bench/")),
    "print": ("cli/",),
    "sys.argv": ("cli/",),
    "pickle": (),
    "dill": (),
    "cloudpickle": (),
    **dict.fromkeys(("marshal", "shelve", "joblib", "yaml", "runpy", "eval", "exec", "compile", "__import__"), ()),
}
UNPICKLES = {"allow_pickle": "True", "weights_only": "False"}
# Calls that run what a file holds unless they say otherwise; the index of a sharded state is read by ours.
READERS = {"torch.load": "weights_only=True", "sharded.load": "storage_reader=ShardReader("}

FOREIGN = (
    *("encoderblock_", "posembed_input", "MlpBlock_", "MultiHeadDotProductAttention", "standardized_conv2d"),
    *("cls_token", "reg_token", "patch_embeddings", "position_embeddings", "encoder_layer_", "conv_proj"),
)
FOREIGN_HOME = "checkpoints/formats/"

UNTYPED = ("kernels/jit/",)  # Triton's language has no types of arguments

HEAVY = {"torch", "numpy", "scipy", "safetensors", "vitral.api"}
FORBIDDEN = {"util", "utils", "common", "base", "factory", "manager", "legacy"}
LONGEST = 400


def faults(source: Path) -> list[str]:
    """One line for each rule that a file below `source` breaks."""
    found = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source).as_posix()
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        rules = (
            _room(place, tree),
            _words(place, tree),
            _foreign(place, tree),
            _heavy(place, tree),
            _types(place, tree),
        )
        found += [f"{place}: {fault}" for rule in (*rules, _shape(place, text)) for fault in rule]
    return found


@lru_cache(maxsize=1)
def _nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def _room(place: str, tree: ast.Module) -> Iterator[str]:
    room = place.split("/")[0].removesuffix(".py")
    if room not in ROOMS:
        yield f'the room "{room}" is unknown: move the code, or give ROOMS in test_architecture.py a line'
        return
    for name in sorted(_imports(place, tree)):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package == "vitral" and target not in {"", *ROOMS}:
            yield f'it imports the unknown room "{target}"'
        elif package == "vitral" and target not in {room, *ROOMS[room]}:
            yield f"{room} may not import {target or 'the package itself'}"
        if room in PLAIN and package == "torch":
            yield f"{room} is plain Python and may not import torch"


def _words(place: str, tree: ast.Module) -> Iterator[str]:
    used = _imports(place, tree) | set(_dotted_names(tree))
    for word, homes in HOMES.items():
        if any(f"{name}.".startswith(f"{word}.") for name in used) and not _at(place, homes):
            yield f"{word} belongs in {' and '.join(homes) or 'no file'}"
    for node in _nodes(tree):
        if isinstance(node, ast.keyword) and node.arg in UNPICKLES and ast.unparse(node.value) == UNPICKLES[node.arg]:
            yield f"{ast.unparse(node)} reads pickles"
        if isinstance(node, ast.Call):
            needed = READERS.get(_dotted(node.func), "")
            if needed and not any(ast.unparse(keyword).startswith(needed) for keyword in node.keywords):
                yield f"{_dotted(node.func)} without {needed} reads pickles"


def _foreign(place: str, tree: ast.Module) -> Iterator[str]:
    if _at(place, (FOREIGN_HOME,)):
        return
    docstrings = {id(node.value) for node in _nodes(tree) if isinstance(node, ast.Expr)}
    for node in _nodes(tree):
        text = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
        if text:
            yield from (f'the foreign name "{name}" belongs in {FOREIGN_HOME}' for name in FOREIGN if name in text)


def _heavy(place: str, tree: ast.Module) -> Iterator[str]:
    """`vitral --help` answers at once: the command line and the package load what computes inside the verb."""
    if not _at(place, ("cli/", "__init__.py", "__main__.py")):
        return
    for name in sorted(_imports(place, ast.Module(list(_run_at_import(tree)), []))):
        if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY):
            yield f"{name} is imported with the module: import it inside the function that needs it"


def _types(place: str, tree: ast.Module) -> Iterator[str]:
    if _at(place, UNTYPED):
        return
    methods = {id(item) for node in _nodes(tree) if isinstance(node, ast.ClassDef) for item in node.body}
    for node in _nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args]
        static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
        if id(node) in methods and not static:
            arguments = arguments[1:]
        arguments += [*node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
        bare = [argument.arg for argument in arguments if argument.annotation is None]
        bare += [] if node.returns else ["return"]
        if bare:
            yield f"{node.name} lacks the type of {', '.join(bare)}"


def _shape(place: str, text: str) -> Iterator[str]:
    if (length := len(text.splitlines())) > LONGEST:
        yield f"{length} lines are more than {LONGEST}"
    words = place.removesuffix(".py").replace("/", "_").split("_")
    yield from (f'"{word}" names no room' for word in sorted(FORBIDDEN.intersection(words)))


def _imports(place: str, tree: ast.AST) -> set[str]:
    """Dotted names of all that is imported, inside functions too; `from a import b` gives a.b."""
    folders = ["vitral", *place.split("/")[:-1]]
    names = set()
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folders[: len(folders) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            names.update(_member(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("importlib.import_module", "import_module"):
            names.update(str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))
    return names


def _member(module: str, name: str) -> str:
    """What is not a room is a public name of the package, and importing that imports the package itself."""
    return module if name == "*" or (module == "vitral" and name not in ROOMS) else f"{module}.{name}"


def _dotted_names(tree: ast.AST) -> Iterator[str]:
    """Attribute chains such as `torch.distributed.barrier`, and bare names that are called."""
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute):
            yield _dotted(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _run_at_import(node: ast.AST) -> Iterator[ast.stmt]:
    """Import statements that run with the module: neither in a function nor for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _run_at_import(ast.Module(child.orelse, []))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _run_at_import(child)


def _at(place: str, homes: tuple[str, ...]) -> bool:
    return any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes)


def test_the_source_keeps_its_rules():
    assert (SOURCE / "errors.py").is_file()
    assert faults(SOURCE) == []


def test_the_rooms_form_no_cycle():
    done: set[str] = set()
    while ready := {room for room in set(ROOMS) - done if ROOMS[room] <= done}:
        done |= ready
    assert done == set(ROOMS)


BROKEN = [
    ("names.py", "import vitral.data.loader", "names may not import data"),
    ("models/vit.py", "from vitral.checkpoints import files", "models may not import checkpoints"),
    ("models/vit.py", "def f() -> None:\n    from vitral.data.loader import pick", "models may not import data"),
    ("models/vit.py", "from ..training import loop", "models may not import training"),
    ("models/vit.py", "from vitral import load", "models may not import the package itself"),
    ("kernels/a.py", "import importlib\nimportlib.import_module('vitral.models')", "kernels may not import models"),
    ("cli/train.py", "def f() -> None:\n    from vitral.models import vit", "cli may not import models"),
    ("api.py", "from vitral.cli import main", "api may not import cli"),
    ("paper/__init__.py", "from torch import Tensor", "paper is plain Python"),
    ("wizards/__init__.py", "", 'the room "wizards" is unknown'),
    ("api.py", "from vitral.wizards import spell", 'unknown room "wizards"'),
    ("training/loop.py", "from vitral.recipe import Recipe", "vitral.recipe belongs in"),
    ("training/loop.py", "from torch import distributed as dist", "torch.distributed belongs in"),
    ("training/loop.py", "import torch\ntorch.distributed.barrier()", "torch.distributed belongs in"),
    ("models/vit.py", "from PIL import Image", "PIL belongs in data/images.py"),
    ("data/sources.py", "import simplejpeg", "simplejpeg belongs in data/images.py"),
    ("inspection/attention.py", "import matplotlib.pyplot as plt", "matplotlib belongs in no file"),
    ("models/layers.py", "import triton.language as tl", "triton belongs in kernels/"),
    ("api.py", "print('done')", "print belongs in cli/"),
    ("api.py", "import sys\nwords = sys.argv[1:]", "sys.argv belongs in cli/"),
    ("checkpoints/files.py", "import pickle", "pickle belongs in no file"),
    ("checkpoints/files.py", "import numpy as np\nnp.load('a', allow_pickle=True)", "allow_pickle=True reads pickles"),
    ("checkpoints/files.py", "f('a', weights_only=False)", "weights_only=False reads pickles"),
    ("checkpoints/files.py", "import torch\ntorch.load('a')", "torch.load without weights_only=True reads pickles"),
    ("checkpoints/run.py", "sharded.load({}, checkpoint_id='a')", "sharded.load without storage_reader="),
    ("data/labels.py", "import yaml", "yaml belongs in no file"),
    ("data/labels.py", "eval('1')", "eval belongs in no file"),
    ("models/vit.py", "KEY = f'Transformer/encoderblock_{0}'", 'foreign name "encoderblock_"'),
    ("models/vit.py", "def f(model: object) -> object:\n    return model.cls_token", 'foreign name "cls_token"'),
    ("cli/train.py", "import torch.nn as nn", "torch.nn is imported with the module"),
    ("cli/train.py", "try:\n    from vitral import api\nexcept ImportError:\n    pass", "vitral.api is imported with"),
    ("__init__.py", "from vitral.api import load", "vitral.api.load is imported with the module"),
    ("names.py", "def f(a, *, b: int, **c) -> None: ...", "f lacks the type of a, c"),
    ("names.py", "class A:\n    def f(self): ...", "f lacks the type of return"),
    ("names.py", "\n" * 401, "401 lines are more than 400"),
    ("data/image_utils.py", "", '"utils" names no room'),
    ("data/common/order.py", "", '"common" names no room'),
]


@pytest.mark.parametrize(("place", "text", "expected"), BROKEN)
def test_a_broken_rule_is_reported(tmp_path, place, text, expected):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    found = faults(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{place}: ")
    assert expected in found[0]


KEPT = [
    ("names.py", "from vitral import architecture\nfrom vitral.errors import UserError"),
    ("training/parallel.py", "import torch.distributed as dist\nfrom vitral.models import vit"),
    ("training/run.py", "from vitral.recipe import Recipe"),
    ("checkpoints/formats/google.py", "KEY = 'Transformer/encoderblock_0/MlpBlock_3'"),
    ("checkpoints/files.py", "import numpy as np\nnp.load('a', allow_pickle=False)"),
    ("models/vit.py", '"""Google calls this encoderblock_0."""\n# and timm cls_token\nfrom . import layers\n'),
    ("cli/train.py", "def run() -> None:\n    import torch\n    from vitral import api\n    print(api, torch)"),
    ("cli/train.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("names.py", "class A:\n    @staticmethod\n    def f(a: int) -> None: ...\n    def g(self, *b: int) -> None: ..."),
    ("names.py", "\n" * 400),
]


@pytest.mark.parametrize(("place", "text"), KEPT)
def test_a_kept_rule_is_not_reported(tmp_path, place, text):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    assert faults(tmp_path) == []
