"""First contact: the Makefile and its error messages, a command line that starts fast, tidy text files."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
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
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
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


@needs_make
def test_a_failed_installation_says_so_and_starts_again(project):
    """Stands in for pip: fails first, then works. The stamp appears only after it worked, and then nothing runs."""
    program(project / ".venv/bin/python", 'case "$*" in *install*) echo "$@" >> calls; exec ./pip-result;; esac')
    program(project / "pip-result", "exit 1")
    assert "constraints.txt" in complaint(make(project, "setup"))
    program(project / "pip-result", "exit 0")
    assert make(project, "setup", "TORCH_INDEX=https://example.org/cpu").returncode == 0
    assert make(project, "setup", "-j4").returncode == 0
    first, second = (project / "calls").read_text(encoding="utf-8").splitlines()
    assert "--constraint constraints.txt" in first
    assert "index" not in first
    assert "--extra-index-url https://example.org/cpu" in second
    later = (project / ".venv/.installed").stat().st_mtime + 10
    os.utime(project / "constraints.txt", (later, later))
    assert make(project, "setup").returncode == 0
    assert len((project / "calls").read_text(encoding="utf-8").splitlines()) == 3


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    assert all(line.count("==") == 1 and "+" not in line and "/" not in line for line in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(need for extra in project["optional-dependencies"].values() for need in extra),
    ]
    for need in wanted:
        name = need.partition(">=")[0].lower().replace("_", "-")
        assert name in names or name.startswith("vitral[")


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
