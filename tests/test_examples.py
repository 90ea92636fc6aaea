"""Notebooks in examples/ run from top to bottom: their code cells in plain Python, without Jupyter."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_cells(notebook: Path) -> list[str]:
    """Sources of the code cells in Python, without shell commands (`!`) and magics (`%`)."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [
        "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("!", "%")))
        for source in sources
        if not source.startswith("%%")
    ]


def test_shell_commands_and_magics_are_left_out(tmp_path):
    sources = ["%matplotlib inline\n", "!pip install vitral\n", "x = 1\n"], ["%%bash\n", "ls\n"]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["#"]}, *cells]}))
    assert code_cells(tmp_path / "a.ipynb") == ["x = 1"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(notebook, tmp_path, monkeypatch):
    """Cells share their names; what they write goes to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": "__main__", "display": lambda *values: None}
    for number, source in enumerate(code_cells(notebook), 1):
        exec(compile(ast.parse(source), f"{notebook.name}, code cell {number}", "exec"), names)
