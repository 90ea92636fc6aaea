"""The display in a terminal of 80 columns: nothing important is cut, and the time left is that of the task."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rich.console import Console

from vitral import display
from vitral.display import Display, duration
from vitral.events import Note, Progress, RunStarted, StepDone


@pytest.fixture
def shown(monkeypatch) -> Display:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return Display()


def bar(shown: Display) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(shown.bar.get_renderable())
    return captured.get().rstrip("\n")


def test_a_narrow_terminal_cuts_neither_the_task_nor_the_time_left(shown):
    shown(RunStarted(0, 10_000, 1, 32, 1, 32, 0.5, 1.0, 0))
    for step in range(1, 9):
        shown(StepDone(step, 10_000, 1.0, 1.0, 0.1, 32, 0.5, 0.0))
    text = bar(shown)
    assert text.startswith("training ")
    assert "  8/10,000  loss 1.000  accuracy 100%  1 h 23 min left  64 images/s" in text
    assert "…" not in text


def test_each_evaluation_starts_the_time_left_anew(shown, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: clock)
    texts = []
    for start in (0.0, 1000.0):
        for done in (0, 100, 200):
            clock = start + done / 10
            shown(Progress("evaluating", done, 400))
            texts.append(bar(shown).split("images")[1].strip())
    assert texts == ["", "30 s left", "20 s left"] * 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0.0 s"), (9.94, "9.9 s"), (9.97, "10 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (90, "1 min 30 s")),
        *((179.7, "3 min 0 s"), (3599.4, "59 min 59 s"), (3599.8, "1 h 0 min"), (7199, "2 h 0 min")),
    ],
)
def test_no_duration_has_60_seconds_or_minutes(seconds, text):
    assert duration(seconds) == text


def test_notes_are_wrapped_between_words(shown, capsys):
    shown(Note("a note about the images " * 5))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.split()[-1] in ("a", "note", "about", "the", "images") for line in lines)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_scripts_print_notes_to_log_files(rank: str, lines: int) -> None:
    """Nobody who reads the log of a job would otherwise know what was assumed; one of several processes tells it."""
    script = "from vitral.display import displayed\nfrom vitral.events import Note\n"
    script += "for _ in range(3):\n  with displayed(None) as handler: handler(Note('3 images are unreadable'))"
    environment = {**os.environ, "RANK": rank}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "3 images are unreadable\n" * lines
    assert not done.stdout
