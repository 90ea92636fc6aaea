"""The documentation against the code: every command, option, recipe key, Python name and path that it mentions exists.

Commands in `sh` and `console` blocks are parsed; those whose files exist in the folder that `workspace` prepares, and
that are quick, are run. `python` blocks are run there too, without the statements that need the network.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image

import vitral
from vitral import cli
from vitral.checkpoints.mae import write_mae
from vitral.models.mae import MaeConfig, MaskedAutoencoder
from vitral.models.vit import ViT

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitral"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SETS_KEYS = {"--set", "--sweep"}
PURE = {"list", "show", "cost"}  # verbs that read no files: their printed output is compared as well
QUICK = PURE | {"info", "check", "convert", "predict", "embed", "evaluate", "inspect", "search"}
OTHER_PROGRAMS = {
    *("git", "pip", "pipx", "uv", "cd", "source", "export", "pre-commit", "pytest", ".ci/run", "curl", "docker")
}
FILE_SUFFIXES = "py|toml|md|css|js|yml|sh|json|cff|txt|ipynb|log|svg|png"
MAKE_TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SHAPE = ("shape.depth=1", "shape.width=32", "shape.mlp=64", "shape.heads=2")
TINY = ("image=32", "steps=2", "batch=8", "workers=0", *SHAPE)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


class Command(NamedTuple):
    """A command of a page, and what the page says that it prints."""

    where: str
    words: list[str]
    output: str = ""


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[2], "\n".join(row.removeprefix(match[1]) for row in match[3].splitlines()))


def prose_of(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(page: Path) -> list[str]:
    """Texts in backticks outside of blocks; in tables the pipe is escaped."""
    return [text.replace("\\|", "|").replace("\n", " ") for text in re.findall(r"`([^`]+)`", prose_of(page))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def block_commands(block: Block) -> Iterator[Command]:
    """Commands of an `sh` block (one per line) or of a `console` block (after `$ `, followed by their output)."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Command(str(block), shlex.split(command, comments=True), output)
        return
    for line in text.splitlines():
        if words := shlex.split(line, comments=True):
            yield Command(str(block), words)


COMMANDS = [command for block in BLOCKS if block.language in ("sh", "console") for command in block_commands(block)]


def vitral_words(words: list[str]) -> list[str] | None:
    """The words after `vitral` of a command that starts it in any way; None for other programs."""
    words = list(words)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if words and Path(words[0]).name == "vitral":
        return words[1:]
    if words and words[0] in ("python", "torchrun") and "-m" in words and words[words.index("-m") + 1] == "vitral":
        return words[words.index("-m") + 2 :]
    return None


@functools.cache
def run_vitral(*words: str) -> tuple[int, str]:
    """Exit code and output of the command line, called in this process."""
    output, argv = io.StringIO(), sys.argv
    sys.argv = ["vitral", *words]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            cli.main()
    except SystemExit as stop:
        return int(stop.code or 0), output.getvalue()
    finally:
        sys.argv = argv
    return 0, output.getvalue()


@functools.cache
def options_of(verb: str) -> frozenset[str]:
    """Options that the verb's own help lists."""
    code, text = run_vitral(verb, "--help")
    assert code == 0, text
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))


@functools.cache
def recipe_keys() -> frozenset[str]:
    """Keys of the default recipe, those of sections with a dot."""
    code, text = run_vitral("show")
    assert code == 0, text
    values = tomllib.loads(text)
    sections = {name: section for name, section in values.items() if isinstance(section, dict)}
    inner = {f"{name}.{key}" for name, section in sections.items() for key in section}
    return frozenset(values.keys() - sections.keys() | inner)


@functools.cache
def preset_names() -> set[str]:
    code, text = run_vitral("list", "recipes")
    assert code == 0, text
    return set(re.findall(r"^\s*(\S+[:/]\S+)", text, re.MULTILINE))


def faults_of_command(words: list[str], whole: bool = True) -> Iterator[str]:
    """What is wrong with the words after `vitral`; `whole` where it is a full command and not a mention of one."""
    if not words or words[0].startswith("-"):
        return
    verb, *rest = words
    if verb in ("VERB", "..."):
        return
    if verb not in cli.VERBS:
        yield f'there is no verb "{verb}"'
        return
    option = ""
    for word in rest:
        if re.match(r"--?[a-z]", word):
            option = word.partition("=")[0]
            if option not in options_of(verb):
                yield f"`vitral {verb}` has no option {option}"
        elif option in SETS_KEYS and "=" in word and (key := word.partition("=")[0]) not in {"KEY", *recipe_keys()}:
            yield f'the recipe has no key "{key}"'
        elif option == "--recipe" and re.match(r"(paper|bit|speedrun)[:/]", word) and word not in preset_names():
            yield f'there is no preset "{word}"'
    if whole and verb not in PURE | {"demo", "bench"} and not rest:
        yield f"`vitral {verb}` lacks its arguments"


def faults_of_other_program(words: list[str]) -> Iterator[str]:
    program, *rest = words
    if program == "make":
        targets = {word for word in rest if "=" not in word and not word.startswith("-")}
        yield from (f"make has no target {target}" for target in sorted(targets - MAKE_TARGETS))
    elif program == "pip" and rest[:1] == ["install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = set(re.findall(r"[\w-]+", " ".join(re.findall(r"\[(.*?)\]", " ".join(rest)))))
        yield from (f"there is no extra {extra}" for extra in sorted(extras - set(project["optional-dependencies"])))
    elif program == "python" and rest and rest[0].endswith(".py"):
        if not (ROOT / rest[0]).is_file():
            yield f"{rest[0]} does not exist"
            return
        script = (ROOT / rest[0]).read_text(encoding="utf-8")
        yield from (f"{rest[0]} has no option {w}" for w in rest[1:] if w.startswith("--") and f'"{w}"' not in script)
    elif program not in OTHER_PROGRAMS and program not in ("python", "torchrun", "echo", "ls", "head"):
        yield f"unknown program {program}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.where} {' '.join(command.words)[:60]}")
def test_commands_in_blocks_exist(command):
    words = vitral_words(command.words)
    faults = faults_of_other_program(command.words) if words is None else faults_of_command(words)
    assert not list(faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_prose_exist(page):
    """Whole commands, and options on their own: those must belong to some verb or benchmark script."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    known = {option for verb in cli.VERBS for option in options_of(verb)}
    faults = []
    for text in inline_code(page):
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        inner = vitral_words(words)
        if inner is not None:
            faults += faults_of_command(inner, whole=False)
        elif words[:1] in (["make"], ["pip"]) or (words[:1] == ["python"] and "benchmarks" in text):
            faults += faults_of_other_program(words)
        elif words and re.match(r"--[a-z]", words[0]):
            option = words[0].partition("=")[0]
            if option not in known and f'"{option}"' not in scripts:
                faults.append(f"no verb has the option {option}")
            if option in SETS_KEYS:
                faults += faults_of_command(["train" if option == "--set" else "pretrain", *words], whole=False)
    assert not faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipe_keys_and_presets_exist(page):
    keys = recipe_keys()
    sections = {key.partition(".")[0] for key in keys if "." in key}
    faults = []
    for text in inline_code(page):
        for key in re.findall(r"(?<![\w./-])([a-z_]+\.[a-z_0-9]+)(?![\w.(/])", text):
            section, _, name = key.partition(".")
            if section in sections and key not in keys and not re.fullmatch(FILE_SUFFIXES, name):
                faults.append(f'the recipe has no key "{key}"')
        for key in re.findall(r"^([a-z_]+)=[\w.\"-]+$", text):
            if key not in keys | python_parameters():
                faults.append(f'"{key}" is neither a key of the recipe nor a parameter')
        for name in re.findall(r"(?<![\w/])(?:paper:|bit:|speedrun/)[\w/:.-]+", text):
            if not name.endswith("...") and "..." not in name and name.rstrip(".") not in preset_names():
                faults.append(f'there is no preset "{name}"')
    assert not faults


@functools.cache
def python_parameters() -> frozenset[str]:
    """Names of parameters of the package's public functions."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return frozenset(names)


def resolve(dotted: str) -> None:
    """Import the longest module of a dotted name and look up the rest, or raise."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name)
        return
    raise AttributeError(dotted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_names_exist(page):
    faults = []
    for text in inline_code(page):
        for dotted in re.findall(r"\bvitral(?:\.[A-Za-z_]\w*)+", text):
            try:
                resolve(dotted)
            except AttributeError:
                faults.append(f"there is no {dotted}")
    assert not faults


OTHER_LIBRARIES = {
    *("ImageFolder", "DataLoader", "DistributedDataParallel", "once_differentiable", "onnxruntime", "onnxscript"),
    *("pre_logits", "cross_val_score", "AutoModelForImageClassification", "create_model"),
    *("create_transform", "resolve_model_data_config", "num_prefix_tokens", "pretrained_cfg"),
    "param_groups_layer_decay",
    "train_image_classification",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_identifiers_occur_in_the_source(page):
    """Names in backticks that look like code: CamelCase, snake_case, or called with parentheses."""
    words = source_words() | OTHER_LIBRARIES
    names = set()
    for text in inline_code(page):
        if re.fullmatch(r"[A-Z]?[a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z]+)+|[A-Za-z_]+\([^)]*\)", text):
            names.add(re.split(r"\(", text)[0])
    assert not names - words


@functools.cache
def source_words() -> frozenset[str]:
    files = SOURCE.rglob("*.py")
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


@functools.cache
def repository_files() -> frozenset[str]:
    folders = ("src", "tests", "docs", "benchmarks", "examples", ".github", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*files, *ROOT.glob("*"), *ROOT.glob(".*")])


def is_in_repository(path: str) -> bool:
    """Whether the path exists, from the root or below any folder of it: `models/vit.py`, `test_vit.py`."""
    pattern = re.compile("(?:.*/)?" + re.escape(path.rstrip("/")).replace(r"\*", "[^/]*"))
    return any(pattern.fullmatch(name) for name in repository_files())


# Files that runs, protocols and other libraries write, or that a reader brings.
OTHER_FILES = re.compile(
    r"(x|answers|page|inspect|real|real_labels|config|preprocessor_config|recipe|data|split|metrics|result|protocol|vtab"
    r"|dataset_info|TASK|exclude|FILE|LICENSES|my_\w+)\.\w+|runs/.*|vtab/.*|state/?|.*/?page\.html|pytorch_model\.bin.*"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    """Paths of this repository in backticks, and the targets of relative links."""
    faults = []
    pattern = re.compile(rf"[\w./*-]+\.(?:{FILE_SUFFIXES})|(?:src|tests|docs|benchmarks|examples)/[\w./*-]*")
    for text in inline_code(page):
        if pattern.fullmatch(text) and not OTHER_FILES.fullmatch(text) and not is_in_repository(text):
            faults.append(f"{text} does not exist")
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target and not (page.parent / target).exists():
            faults.append(f"the link {target} leads nowhere")
    assert not faults


def test_the_page_of_studies_is_that_of_their_runs(tmp_path):
    """Claims, verdicts and reports are computed from the records; `python benchmarks/studies_page.py` updates them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        studies_page = importlib.import_module("studies_page")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    results = shutil.copytree(ROOT / "results", tmp_path / "results")
    text = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    assert text.count("| held |") > 2
    assert studies_page.updated(text, results) == text
    for path in (ROOT / "results").glob("*/report.md"):
        assert (results / path.parent.name / "report.md").read_text("utf-8") == path.read_text("utf-8")


@pytest.fixture(scope="module")
def workspace(golden_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files that the documentation speaks of, as small as possible."""
    folder = tmp_path_factory.mktemp("docs")
    for i in range(24):
        path = folder / "photos" / ("cat", "dog")[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(0, 256, (40, 48, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(path)
    (folder / "new").mkdir()
    for name in ("cat.jpg", "dog.jpg", "new/1.jpg"):
        shutil.copy(folder / "photos" / "cat" / "0.jpg", folder / name)
    shutil.copy(golden_file("vit_token_p16.ckpt.npz"), folder / "ViT-B_16.npz")
    sizes = {"depth": 1, "width": 16, "mlp": 32, "heads": 2, "classes": 0, "position": "sincos2d"}
    encoder = vitral.create("ViT-Ti/16@64", **sizes)
    assert isinstance(encoder, ViT)
    write_mae(MaskedAutoencoder(encoder, MaeConfig(width=16, depth=1, heads=2, mlp=32)), folder / "vit-mae-base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VITRAL_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "200")
        words = ["train", "photos", "--model", "ViT-Ti/16", "--out", "runs/photos", "--device", "cpu", "--set", *TINY]
        code, output = run_vitral(*words)
        assert code == 0, output
        for name in ("photos-vit-base-patch16-224", "pets"):
            shutil.copytree(folder / "runs" / "photos", folder / "runs" / name)
        yield folder


def is_runnable(words: list[str], folder: Path) -> bool:
    """Whether a command is quick, offline, and about files that exist in the folder."""
    if not words or words[0] not in QUICK or any(re.match(r"(hf|timm):|.*:DIR", word) for word in words):
        return False
    outputs = {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-o", "--output", "--figures", "--index")}
    inputs = [word for word in words[1:] if re.search(r"[/.]", word) and not word.startswith("-")]
    if words[0] == "convert":
        outputs.add(words[2])
    if words[0] in PURE:
        return not {"DATA", "--data"} & set(words)
    return all(word in outputs or list(folder.glob(word)) for word in inputs)


def test_commands_run(workspace):
    """Also: of commands that read no files, the printed output is the documented one (`...` stands for any lines)."""
    ran = set()
    for command in COMMANDS:
        words = vitral_words(command.words)
        if words is None or not is_runnable(words, workspace):
            continue
        for written in ("vit-b16", "page.html", "answers.csv"):
            shutil.rmtree(workspace / written, ignore_errors=True)
            (workspace / written).unlink(missing_ok=True)
        words = [path for word in words for path in expanded(word, workspace)]
        code, output = run_vitral(*words)
        assert code == 0, f"{command.where}: vitral {' '.join(words)}\n{output}"
        if words[0] in PURE and command.output:
            pattern = r"\s*".join(map(re.escape, command.output.split())).replace(r"\.\.\.", ".*")
            assert re.search(pattern, output, re.DOTALL), f"{command.where} prints\n{output}"
        ran.add(words[0])
    assert ran >= {"list", "show", "cost", "check", "predict"}


def expanded(word: str, folder: Path) -> list[str]:
    """What a shell makes of `new/*.jpg`."""
    return [str(path.relative_to(folder)) for path in sorted(folder.glob(word))] if "*" in word else [word]


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))])
def test_python_blocks_run(page, workspace, monkeypatch):
    """Blocks of a page share their names, as a reader would type them; network names and placeholders are left out."""
    names: dict[str, object] = {
        "vitral": vitral,
        "source": "ViT-B_16.npz",
        "images": torch.rand(2, 3, 64, 64),
        "noise": torch.rand(2, 16),
        "model": vitral.load("ViT-B_16.npz")[0],
    }
    for block in blocks_of(page):
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        tree.body = [node for node in tree.body if not re.search(r"['\"](hf|timm):", ast.unparse(node))]
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, str(block), "exec"), names)


WRONG = [
    ("vitral tarin photos/", 'no verb "tarin"'),
    ("vitral train photos/ --tune head", "no option --tune"),
    ("vitral train photos/ --set optim.learning=1", 'no key "optim.learning"'),
    ("vitral train photos/ --recipe paper:finetune/pet", 'no preset "paper:finetune/pet"'),
    ("torchrun -m vitral train photos/ --sed 1", "no option --sed"),
    ("vitral predict", "lacks its arguments"),
]


@pytest.mark.parametrize(("command", "expected"), WRONG)
def test_a_wrong_command_is_reported(command, expected):
    words = vitral_words(shlex.split(command))
    assert words is not None
    assert expected in "; ".join(faults_of_command(words))


def test_the_architecture_names_every_module():
    """One row per package or module of the source, and in a package's row each of its modules."""
    rows = dict(
        re.findall(r"^\| (`[^|]+) \| (.+) \|$", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
    )
    source = ROOT / "src" / "vitral"
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    plain = {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    assert told >= (plain - {"version.py", "errors.py"}) | packages
    for package in packages - {"paper/"}:
        modules = {path.name for path in (source / package).glob("*.py") if path.name != "__init__.py"}
        assert not modules - set(re.findall(r"`([^`]+)`", rows[f"`{package}`"])), package
