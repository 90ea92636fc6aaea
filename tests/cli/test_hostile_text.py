"""Control characters in names never reach the terminal, and variables of torchrun that are wrong are one sentence."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vitral.cli import main
from vitral.cli.results import print_json
from vitral.data.images import UnreadableImage
from vitral.display import Display, print_facts, print_table
from vitral.errors import printable
from vitral.events import Note
from vitral.serving import ImagePrediction, PredictionResults, write_results

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE = "cat\x1b]0;title\x07\x1b[2J\x9b31m\rdog\x7f\u202egpj.\x00"


def test_escapes_are_those_of_json() -> None:
    assert printable("a\x1b[31m\x9bé\n") == "a\\u001b[31m\\u009bé\n"
    assert json.loads(printable(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


def test_tables_facts_and_json_print_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["image", "classes"], [[f"{HOSTILE}\nrow", HOSTILE]], left=2, note=HOSTILE)
    print_facts({"data": f"{HOSTILE}\nrow"})
    print_json({"path": HOSTILE, HOSTILE: 1})
    out = capsys.readouterr().out
    assert out.count("cat\\u001b") == 6
    assert not CONTROL.search(out)
    assert not re.search("^row", out, re.MULTILINE)


def test_notes_below_a_table_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["image"], [["a"]], note="first\nsecond")
    assert capsys.readouterr().out.splitlines()[-2:] == ["first", "second"]


def test_notes_print_no_control_characters() -> None:
    display, stream = Display(), io.StringIO()
    display.console = Console(file=stream, markup=False)
    display(Note(f"Left out the folder {HOSTILE}."))
    assert "cat\\u001b" in stream.getvalue()
    assert not CONTROL.search(stream.getvalue())


def test_errors_print_no_control_characters(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vitral", "check", f"/nowhere/{HOSTILE[:-1]}"])
    with pytest.raises(SystemExit):
        main()
    err = capsys.readouterr().err
    assert "cat\\u001b" in err
    assert not CONTROL.search(err)


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "plain", "a=b", "'quoted"])
def test_csv_cells_are_no_formulas(name: str, tmp_path: Path) -> None:
    images = (ImagePrediction(name, (name,), (0.5,)), UnreadableImage(name, name))
    write_results(tmp_path / "x.csv", PredictionResults(images))
    with (tmp_path / "x.csv").open(newline="") as stream:
        _, good, bad = csv.reader(stream)
    expected = f"'{name}" if name[0] in "=+-@\t" else name.replace("\r", "\\r")
    assert good == [expected, expected, "0.500000", ""]
    assert bad == [expected, "", "", expected]


ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "one"}, "RANK=one is not a number"),
        ({"RANK": "-1"}, "RANK=-1 is not a number"),
        ({"RANK": "9" * 6000}, "is not a number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK= is not a number"),
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", **ADDRESS}, "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_variables_of_torchrun_that_are_wrong_are_one_sentence(variables, expected, monkeypatch, capsys) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *ADDRESS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["vitral", "check", "digits"])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert expected in err
    assert len(err) < 300
    assert err.count("\n") == 1


@pytest.mark.parametrize("signalled", [True, False], ids=["by signal", "by waiting"])  # how PyTorch may notice
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "a worker process that reads images was killed"),
        ("os._exit(1)", "a worker process that reads images failed, with its error printed above"),
    ],
)
def test_a_worker_that_ends_is_one_sentence(end: str, said: str, signalled: bool) -> None:
    code = """
import os, signal
from vitral.data.loader import iterate_in_workers
from vitral.errors import UserError

class Images:
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5: END
        return index

try:
    for item in iterate_in_workers(Images(), 1):
        if not SIGNALLED: signal.signal(signal.SIGCHLD, signal.SIG_DFL)
except UserError as error:
    print(error)
"""
    source = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("END", end).replace("SIGNALLED", str(signalled))],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith(said), done.stderr[-2000:]
    assert len(done.stdout) < 300
