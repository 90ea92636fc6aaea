"""The route from `vitral train` to the loss, as docs/architecture.md tells it, against the stack of a real run."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
from journeys import Command

from vitral.training import objective

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitral"
HEADING = "## From `vitral train` to the loss"


def told_hops() -> list[tuple[str, str]]:
    """(function, file) of each numbered hop of the documentation."""
    section = (ROOT / "docs" / "architecture.md").read_text("utf-8").split(HEADING, 1)[1].split("\n## ", 1)[0]
    hops = re.findall(r"^\d+\. `([\w.]+)` in `([\w/]+\.py)`", section, re.MULTILINE)
    return [(name.rpartition(".")[2], file) for name, file in hops]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> list[tuple[str, str]]:
    """(function, file) of vitral's own frames when the loop first computes a loss."""
    stacks: list[list[tuple[str, str]]] = []
    real = objective.softmax_loss

    def softmax_loss(*arguments: object, **options: object) -> object:
        frames = [frame for frame in traceback.extract_stack()[:-1] if Path(frame.filename).is_relative_to(SOURCE)]
        stacks.append([(frame.name, Path(frame.filename).relative_to(SOURCE).as_posix()) for frame in frames])
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(objective, "softmax_loss", softmax_loss)
    command = Command(monkeypatch, capsys)
    options = ("--set", "steps=1", "shape.depth=1", "data.mixup=0", "optim.name=adamw", "workers=0")
    assert command("train", "digits", "--device", "cpu", "--out", tmp_path / "run", *options).code == 0
    return next(frames for frames in stacks if "train_loop" in {name for name, _ in frames})


def test_the_route_is_short_and_the_one_told(stack):
    route = [*stack, ("softmax_loss", "training/objective.py")]
    hops = told_hops()
    assert hops[0] == ("main", "cli/__init__.py")
    assert [frame for frame in route if frame in hops] == hops
    assert len(hops) <= 8, hops
    assert len(route) - 1 <= 8, route  # calls
    assert len({file for _, file in route}) <= 5
