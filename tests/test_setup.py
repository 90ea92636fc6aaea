"""First contact: the Makefile and its error messages, a command line that starts fast, tidy text files."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ("requirements.txt", "requirements-cuda.txt")
HELP = [sys.executable, "-c", "from vitral.cli import main; main()", "--help"]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="alone, a test may use all cores")
def test_tests_side_by_side_have_one_thread_each():
    """With more they would wait for each other's: the suite takes three times as long."""
    assert torch.get_num_threads() == 1


@pytest.fixture
def project(tmp_path):
    """A clone in a folder whose name has a space, as far as the Makefile looks at it."""
    folder = tmp_path / "my clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", *REQUIREMENTS):
        shutil.copy(ROOT / name, folder)
    return folder


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests hands down its own options and variables.
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The only line that a failed make says, apart from make's own closing line."""
    assert done.returncode != 0
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make")]
    return line


@needs_make
@pytest.mark.parametrize("words", [(), ("help",)])
def test_help_names_every_target(project, words):
    done = make(project, *words)
    assert done.returncode == 0
    for target in ("setup", "demo", "test", "lint", "bench", "clean"):
        assert f"make {target} " in done.stdout
    assert not (project / ".venv").exists()


@needs_make
@pytest.mark.parametrize("target", ["setup", "test", "demo"])
def test_an_old_python_is_named(project, target):
    old = program(project / "old python", 'case "$*" in *version_info*) exit 1;; *) echo "Python 3.9.6";; esac')
    sentence = complaint(make(project, target, f"PYTHON={old}"))
    assert f"{old} is Python 3.9.6" in sentence
    assert "3.11" in sentence
    assert "make PYTHON=" in sentence
    assert not (project / ".venv").exists()


@needs_make
def test_a_missing_python_is_named(project):
    sentence = complaint(make(project, "setup", "PYTHON=python9.9"))
    assert "python9.9" in sentence
    assert "make PYTHON=" in sentence


@needs_make
def test_a_python_without_venv_is_named(project):
    bare = program(project / "bare", f'case "$*" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac')
    assert "apt install python3-venv" in complaint(make(project, "setup", f"PYTHON={bare}"))
    assert not (project / ".venv").exists()


def pip_calls(project: Path) -> list[str]:
    """What the stand-in for pip was called with since the last time."""
    path = project / "calls"
    calls = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.write_text("", encoding="utf-8")
    return calls


@needs_make
def test_a_failed_installation_says_so_and_starts_again(project):
    """Stands in for pip: fails first, then works. The stamp appears only after it worked, and then nothing runs."""
    script = 'case "$*" in *install*) echo "$@" >> calls; exec ./pip-result;; *metadata*) exec ./is-cuda;; esac'
    program(project / ".venv/bin/python", script)
    program(project / "pip-result", "exit 1")
    program(project / "is-cuda", "exit 1")
    assert "requirements.txt" in complaint(make(project, "setup"))
    assert len(pip_calls(project)) == 1
    program(project / "pip-result", "exit 0")
    assert make(project, "setup", "TORCH_INDEX=https://example.org/cpu").returncode == 0
    torch_call, hashed, own = pip_calls(project)
    assert re.search(r"--index-url https://example.org/cpu torch==[\d.]+$", torch_call)
    assert hashed.endswith("--require-hashes --requirement requirements.txt")
    assert own.endswith("--no-build-isolation --editable .")
    assert all("--no-deps" in call and "--only-binary :all:" in call for call in (torch_call, hashed, own))
    assert "index" not in hashed + own
    assert make(project, "setup", "-j4").returncode == 0
    assert pip_calls(project) == []
    program(project / "is-cuda", "exit 0")
    for name in REQUIREMENTS:
        later = (project / ".venv/.installed").stat().st_mtime + 10
        os.utime(project / name, (later, later))
        assert make(project, "setup").returncode == 0
        assert "index" not in "".join(calls := pip_calls(project))
        assert calls[2].endswith("--require-hashes --requirement requirements-cuda.txt")
        os.utime(project / name, (0, 0))


def test_no_file_names_two_indexes_at_once():
    """With a second index, pip takes whichever has the higher version, and anybody may publish one."""
    for path in (ROOT / "Makefile", ROOT / ".ci/run", ROOT / ".github/workflows/ci.yml", ROOT / "CONTRIBUTING.md"):
        assert "extra-index-url" not in path.read_text(encoding="utf-8")


def pins() -> dict[str, tuple[str, int]]:
    """Of both files: the normal name of each package, with its version and its number of hashes."""
    found: dict[str, tuple[str, int]] = {}
    for name in REQUIREMENTS:
        text = (ROOT / name).read_text(encoding="utf-8").replace(" \\\n", " ")
        for line in (line for line in text.splitlines() if not line.startswith("#")):
            pin = re.fullmatch(
                r"([\w.-]+)==([\w.]+)(?:; sys_platform == 'linux')?((?: +--hash=sha256:[0-9a-f]{64})+)", line
            )
            assert pin, line
            assert normal(pin[1]) not in found
            found[normal(pin[1])] = pin[2], pin[3].count("--hash")
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_installed_is_pinned_with_hashes():
    """From vitral[dev] and the build backend, through the metadata of what is installed here.

    The extras of trackers are not installed: users bring their own version."""
    from packaging.requirements import Requirement

    pinned, project = pins(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    waiting = [*project["project"]["dependencies"], *project["build-system"]["requires"], "editables"]
    installed = [need for extra, needs in extras.items() if extra not in ("wandb", "mlflow") for need in needs]
    waiting += [need for need in installed if not need.startswith("vitral[")]
    seen: set[str] = set()
    while waiting:
        need = Requirement(waiting.pop())
        name = normal(need.name)
        if name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in pinned or name == "torch", name
        if name in pinned:
            assert need.specifier.contains(pinned[name][0]), need
        with suppress(metadata.PackageNotFoundError):
            waiting += metadata.requires(name) or []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^TORCH := torch==\d+\.\d+\.\d+$", makefile, re.MULTILINE)


def run_help(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([HELP[0], *options, *HELP[1:]], env=environment, capture_output=True, text=True, timeout=600)


def test_help_answers_at_once():
    """Processor time, best of three: the clock on the wall also counts the tests that run beside this one."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_help()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr[-300:]
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5


def test_help_does_not_import_torch():
    done = run_help("-X", "importtime")
    assert done.returncode == 0, done.stderr[-300:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "vitral.cli" in imported
    assert not imported & {"torch", "numpy", "vitral.api"}


TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cff", ".css", ".js", ".json", ".ipynb", ""}


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a clone")
def test_text_files_are_tidy():
    """UTF-8, Unix line ends, no trailing spaces, one newline at the end; no file of more than a megabyte."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    faults = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if len(data) > 1_000_000:
            faults.append(f"{name} has {len(data):,} bytes")
        if path.suffix not in TEXT or not data:
            continue
        text = data.decode("utf-8")
        if "\r" in text or re.search(r"[ \t]$", text, re.MULTILINE) or not text.endswith("\n") or text.endswith("\n\n"):
            faults.append(f"{name} has trailing spaces, other line ends, or not one newline at the end")
    assert not faults


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs several workers")
@pytest.mark.xdist_group("setup")
def test_workers_know_groups(request):
    """Without, what tests of a group share is computed by every worker."""
    assert request.node.nodeid.endswith("@setup")
