"""Trackers on stand-ins of wandb and mlflow, with the signatures that wandb 0.31 and mlflow 3.17 have."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import runs

import vitral
from vitral import events
from vitral.trackers import Tracking


class FakeWandb:
    """The part of wandb that is used: `init` returns a run."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def init(
        self,
        project: str | None = None,
        *,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str | None = None,
    ) -> FakeWandb:
        assert (resume == "allow") == (id is not None)
        self.id = id or f"run-{len(self.runs)}"
        self.state = self.runs.setdefault(self.id, {"project": project, "name": name, "config": config, "rows": []})
        self.summary: dict[str, Any] = {}
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.state["rows"].append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.state |= {"exit_code": exit_code, "summary": self.summary}


class FakeMlflow:
    """The fluent interface of mlflow: an active run, and metrics by run."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.active: list[str] = []

    def active_run(self) -> str | None:
        return self.active[-1] if self.active else None

    def start_run(self, run_id: str | None = None, run_name: str | None = None, nested: bool = False) -> Any:
        if self.active and not nested:
            raise RuntimeError("a run is already active")
        run_id = run_id or f"id-{len(self.runs)}"
        self.runs.setdefault(run_id, {"name": run_name, "params": {}, "metrics": [], "status": "RUNNING"})
        self.active.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_params(self, params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None) -> None:
        assert len(params) <= 100
        assert self.runs[self.active[-1]]["params"].keys().isdisjoint(params)
        self.runs[self.active[-1]]["params"] |= params

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
    ) -> None:
        assert run_id is not None
        self.runs[run_id]["metrics"].append((step, metrics))

    def flush_async_logging(self) -> None: ...

    def end_run(self, status: str = "FINISHED") -> None:
        self.runs[self.active.pop()]["status"] = status


@pytest.fixture
def services(monkeypatch):
    wandb, mlflow = FakeWandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return wandb, mlflow


def test_a_run_and_its_resumption_are_one_run_of_each_tracker(services, tmp_path):
    wandb, mlflow = services
    pictures, out = runs.make_pictures(tmp_path / "pictures"), tmp_path / "run"
    options: Any = {
        "model": runs.MODEL,
        "out": out,
        "set": list(runs.TINY),
        "device": "cpu",
        "track": ["wandb", "mlflow"],
    }
    with pytest.raises(runs.Crash):
        vitral.train(pictures, **options, on_event=runs.crash_at(7))
    assert wandb.runs["run-0"]["exit_code"] == 1
    assert mlflow.runs["id-0"]["status"] == "KILLED"
    result = vitral.train(pictures, **options, on_event=lambda event: None)
    assert json.loads((out / "tracker.json").read_text()) == {"wandb": "run-0", "mlflow": "id-0"}
    assert list(wandb.runs) == ["run-0"]
    assert list(mlflow.runs) == ["id-0"]
    ours, theirs = wandb.runs["run-0"], mlflow.runs["id-0"]
    assert (ours["project"], ours["name"], ours["exit_code"], theirs["status"]) == ("vitral", "run", 0, "FINISHED")
    assert ours["config"]["optim.lr"] == result.recipe.optim.lr
    assert theirs["params"]["optim.lr"] == str(result.recipe.optim.lr)
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in logged if "loss" in line}
    assert {row["step"]: row["train/loss"] for row in ours["rows"] if "train/loss" in row} == losses
    assert {step: row["train/loss"] for step, row in theirs["metrics"] if "train/loss" in row} == losses
    scores = {line["step"]: line["evaluation"]["top1"] for line in logged if "evaluation" in line}
    assert {row["step"]: row["eval/top1"] for row in ours["rows"] if "eval/top1" in row} == scores
    assert ours["summary"]["result/score"] == theirs["metrics"][-1][1]["result/score"] == result.mean
    assert ours["summary"]["result/seconds"] == result.results[0].seconds


def test_each_seed_is_a_run_of_its_own(services, tmp_path):
    wandb, _ = services
    pictures = runs.make_pictures(tmp_path / "pictures")
    words = [word for word in runs.TINY if not word.startswith("steps")]
    options: Any = {"model": runs.MODEL, "out": tmp_path / "run", "device": "cpu", "seeds": 2, "track": "wandb"}
    vitral.train(pictures, **options, set=[*words, "steps=2"], on_event=lambda event: None)
    assert [run["name"] for run in wandb.runs.values()] == ["seed-0", "seed-1"]
    assert [run["config"]["seed"] for run in wandb.runs.values()] == [0, 1]


class Failing:
    """A tracker whose service is down for some of its calls."""

    def __init__(self, call: str) -> None:
        self.call, self.heard = call, []

    def _do(self, name: str) -> None:
        self.heard.append(name)
        if name == self.call:
            raise OSError("no route to host\nsecond line")

    def start(self, folder, recipe, step):
        self._do("start")

    def log(self, step, values):
        self._do("log")

    def finish(self, result):
        self._do("finish")


@pytest.mark.parametrize(
    ("call", "heard"),
    [("start", ["start"]), ("log", ["start", "log"]), ("finish", ["start", "log", "log", "finish"])],
)
def test_a_tracker_that_fails_is_left_out_with_one_note(call, heard):
    notes, failing, sound = [], Failing(call), Failing("")
    with Tracking([failing, sound], notes.append) as handler:
        handler(events.RunStarted(0, 2, 1, 8, 1, 8, 0.1, 0.1, 0))
        for step in (1, 2):
            handler(events.StepDone(step, 2, 0.5, None, 0.1, 8, 0.1, 0.0))
        handler(events.RunFinished({"metrics": {"score": 1.0}}))
    texts = [event.text for event in notes if isinstance(event, events.Note)]
    assert texts == ["Failing failed (OSError: no route to host second line): the run continues without it"]
    assert len(notes) == 5  # every event was passed on
    assert failing.heard == heard
    assert sound.heard == ["start", "log", "log", "finish"]


def test_a_missing_package_and_an_unknown_name_are_said_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name, reason in (("wandb", r"pip install 'vitral\[wandb\]'"), ("comet", "use tensorboard, wandb, mlflow")):
        with pytest.raises(vitral.UserError, match=reason):
            vitral.train("digits", out=tmp_path / "run", track=name)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
