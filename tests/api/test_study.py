"""Studies end to end: small runs on digits that are killed, continued, spread over processes, and reported on."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from runs import STUDY, make_pictures, waiting

import vitral
from vitral.api import study_runs
from vitral.checkpoints import lock
from vitral.data.sources import open_data, with_dev_split
from vitral.errors import UserError
from vitral.studies.planning import read_records
from vitral.training.loop import Diverged

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toml(tmp_path):
    make_pictures(tmp_path / "pictures")
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return path


def run(toml: Path, out: str, **options):
    data = [str(toml.parent / "pictures")]
    state = vitral.study("run", toml, data=data, out=toml.parent / out, device="cpu", **options)
    assert isinstance(state, vitral.StudyRuns)
    return state


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    return {key: dict(record.metrics) for key, record in read_records(folder).items()}


def scores(state: vitral.StudyRuns) -> list[list[str]]:
    """The table without its times."""
    columns, rows = state.table()
    return [[cell for name, cell in zip(columns, row, strict=True) if name != "seconds"] for row in rows]


def test_a_killed_study_goes_on_and_gives_the_same_table(toml, tmp_path):
    """kill -9 after some of the 12 runs, in the middle of one; then the same command, and an uninterrupted study."""
    out = tmp_path / "killed"
    words = ["study", "run", str(toml), "--data", str(tmp_path / "pictures"), "--out", str(out), "--device", "cpu"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "helpers")])
    command = [sys.executable, "-c", f"{waiting(14)}; from vitral.cli import main; main()", *words]  # 4 steps per run
    threads = str(torch.get_num_threads())  # as here: with another number sums differ in their last bits
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("step 14 is done" in line for line in process.stderr)
        process.kill()
    before = metrics(out)
    assert len(before) == 3
    assert list(out.glob("running/*/run/state/step-*"))
    notes: list[str] = []
    state = run(toml, "killed", on_event=lambda event: notes.append(str(event)))
    assert "9 of 12 runs to do" in " ".join(notes)
    whole = run(toml, "whole")
    assert scores(state) == scores(whole)
    assert metrics(out) == metrics(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == ["runs.jsonl", "study.json"]  # no models, no pixels
    assert before.items() <= metrics(out).items()


def test_records_of_two_machines_merge(toml, tmp_path):
    """Two processes with a share of the runs each, as a scheduler starts them, and their files in one folder."""
    planned = run(toml, "plan", print_commands=True)
    assert len(planned.commands) == 12
    assert not (tmp_path / "plan").exists()
    ids = [re.findall(r"--only (\w+)", command)[0] for command in planned.commands]
    assert planned.commands[0].startswith(f"vitral study run {toml} --out {tmp_path / 'plan'} --only {ids[0]} --data ")
    run(toml, "a", only=ids[:2])
    run(toml, "b", only=ids[1:3])
    (tmp_path / "a" / "more.jsonl").write_text((tmp_path / "b" / "runs.jsonl").read_text())
    state = run(toml, "a", dry_run=True)
    assert set(state.records) == set(ids[:3])
    assert [planned.id for planned in state.plan.pending] == ids[3:]
    with pytest.raises(UserError, match="the study has no run zzz"):
        run(toml, "a", only=["zzz"])


@pytest.mark.slow
def test_processes_share_the_runs(toml, tmp_path):
    state = run(toml, "parallel", parallel=2)
    assert not state.plan.pending
    assert len((tmp_path / "parallel" / "runs.jsonl").read_text().splitlines()) == 12  # none was made twice
    assert scores(state) == scores(run(toml, "alone"))


def test_a_requeued_job_waits_for_the_lock_of_the_node_that_was_lost(toml, tmp_path, monkeypatch):
    """Slurm starts a job again before the lock of its first start is stale; the lock inside the run is no obstacle."""
    monkeypatch.setattr(lock, "_WAIT", 0.05)
    run_id = run(toml, "out", dry_run=True).plan.pending[0].id
    folder = tmp_path / "out" / "running" / run_id
    (folder / "run").mkdir(parents=True)
    (tmp_path / "out" / "study.json").write_text(
        json.dumps({"study": "mine", "scale": "small", "set": [], "definition": None})
    )
    elsewhere = replace(lock.LockOwner.current(), host="elsewhere", token="of the lost node")
    for path in (folder, folder / "run"):
        (path / ".lock").write_text(json.dumps(asdict(elsewhere)))
    assert len(run(toml, "out", only=[run_id]).plan.pending) == 12  # left to the other process
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    threading.Timer(0.3, (folder / ".lock").unlink).start()
    (record,) = run(toml, "out", only=[run_id]).records.values()
    assert record.status == "ok"


def test_what_diverges_or_fails_is_a_row(toml, tmp_path, monkeypatch):
    def measure(context, planned, folder, on_event):
        if planned.settings["seed"] == 1:
            raise Diverged("the loss is not finite: lower optim.lr.")
        if planned.settings["seed"] == 2:
            raise RuntimeError("CUDA out of memory")
        return study_runs.Measured({"top1": 0.5, "score": 0.5, "names": ["a"]}, flops=1.0)

    monkeypatch.setitem(study_runs.MEASURES, "train", measure)
    state = run(toml, "bad")
    columns, rows = state.table()
    assert {row[columns.index("runs")] for row in rows} == {"1 of 3; 1 diverged; 1 failed"}
    assert len(state.plan.pending) == 4  # the failed ones
    reasons = {record.reason for record in state.records.values()}
    assert reasons == {"", "the loss is not finite: lower optim.lr.", "RuntimeError: CUDA out of memory"}
    monkeypatch.setitem(study_runs.MEASURES, "train", lambda *args: study_runs.Measured({"top1": 0.7}))
    assert not run(toml, "bad").plan.pending


def test_a_run_that_fails_does_not_hold_up_the_runs_that_wait_for_trials(toml, monkeypatch):
    """One cell fails in the first round; the final runs of the other one, known after its trials, are still made."""
    rest = '[[points]]\nname = "fails"\noptim.lr = 0.5\n[[points]]\nname = "chosen"\nchoose.optim.lr = [0.1, 0.2]\n'
    toml.write_text(STUDY[: STUDY.index("[axes]")] + rest)

    def measure(context, planned, folder, on_event):
        if planned.cell.labels["name"] == "fails":
            raise RuntimeError("CUDA out of memory")
        return study_runs.Measured({"top1": 0.5, "score": planned.settings["optim.lr"]})

    monkeypatch.setitem(study_runs.MEASURES, "train", measure)
    state = run(toml, "out")
    assert {planned.cell.labels["name"] for planned in state.plan.pending} == {"fails"}
    assert [len(cell.records) for cell in state.cells] == [0, 3]
    assert len(read_records(state.folder)) == 3 + 2 + 3


def test_mistakes_are_found_before_anything_is_written(toml, tmp_path):
    toml.write_text(STUDY.replace("batch = 6", "batch = 6000"))
    with pytest.raises(UserError, match="more than the 18 training images"):
        run(toml, "out")
    with pytest.raises(UserError, match="nowhere does not exist"):
        vitral.study("run", toml, data=["nowhere"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="contains no study"):
        vitral.study("report", tmp_path)
    with pytest.raises(UserError, match="NAME is missing"):
        vitral.study("run")


def test_a_dry_run_refuses_data_that_the_runs_could_not_open(toml, tmp_path):
    """Not the data of the catalog, or of a study that states how many images it has: the cost is known without it."""

    def dry(**options) -> vitral.StudyRuns:
        state = vitral.study("run", toml, out=tmp_path / "out", dry_run=True, **options)
        assert isinstance(state, vitral.StudyRuns)
        return state

    for text, data in ((STUDY.replace('"pictures"', '"gone"'), ()), (STUDY, [str(tmp_path / "gone")])):
        toml.write_text(text)
        with pytest.raises(UserError, match="gone does not exist"):
            dry(data=data)
    toml.write_text(STUDY.replace('"pictures"', '"gone"\nimages = 100\nclasses = 3'))
    assert dry().cost.flops
    toml.write_text(STUDY.replace('"pictures"', '"cifar100"'))
    dry()
    with pytest.raises(UserError, match="gone"):
        dry(data=[f"cifar100:{tmp_path / 'gone'}"])
    shipped = vitral.study("run", "compute", scale="paper", out=tmp_path / "out", dry_run=True)
    assert isinstance(shipped, vitral.StudyRuns)
    assert shipped.plan.total == 18


def test_another_study_does_not_take_the_folder(toml, tmp_path):
    run(toml, "out", only=[run(toml, "out", dry_run=True).plan.pending[0].id])
    other = tmp_path / "other.toml"
    other.write_text(STUDY)
    with pytest.raises(UserError, match=r"contains another study \(mine\)"):
        run(other, "out")


def test_choices_starts_and_patience(toml, tmp_path):
    """One run of each kind: trials on dev, a shared pre-training, a test split that early stopping never sees."""
    toml.write_text(
        STUDY[: STUDY.index("[axes]")].replace("[0, 1, 2]", "[0]").replace("save_every = 1", "patience = 1")
        + 'shape.depth = 1\nevaluate_every = 2\n[[points]]\nname = "scratch"\nchoose.optim.lr = [0.001, 0.01]\n'
        '[[points]]\nname = "masked"\nstart = "masked"\nseeds = [0, 1]\n'
        '[starts.masked]\non = "pictures"\nmodel = "ViT-Ti/4@8"\nobjective = "masked"\nsteps = 2\nbatch = 6\n'
        "workers = 0\nshape.depth = 1\nshape.width = 16\nshape.heads = 2\n"
    )
    state = run(toml, "out", keep=True)
    records = list(state.records.values())
    assert [record.status for record in records] == ["ok"] * 5
    trials = [record for record in records if record.trial]
    best = max(trials, key=lambda record: record.metrics["score"])
    assert state.cells[0].chosen == {"optim.lr": best.changes["optim.lr"]}
    finals = [record for record in records if not record.trial]
    test = open_data(tmp_path / "pictures").test
    assert test is not None
    assert {record.metrics["n"] for record in finals} == {len(test)}
    dev = with_dev_split(open_data(tmp_path / "pictures"), 0.1).val
    assert dev is not None
    assert len(dev) != len(test)
    assert {record.metrics["n"] for record in trials} == {len(dev)}  # test selects nothing
    for record in finals:
        stopped = json.loads((tmp_path / "out" / "running" / record.id / "run" / "result.json").read_text())["metrics"]
        assert (record.metrics["dev"], stopped["n"]) == (stopped["score"], len(dev))
    assert len({record.metrics["pretraining_flops"] for record in finals if "pretraining_flops" in record.metrics}) == 1


def test_weights_are_probed_and_evaluated_and_speed_is_measured(toml, tmp_path):
    trained = vitral.train(
        tmp_path / "pictures", model="ViT-Ti/4@8", out=tmp_path / "run", device="cpu",
        set={"steps": 2, "batch": 6, "workers": 0, "shape.width": 16, "shape.heads": 2, "shape.depth": 1},
    )  # fmt: skip
    points = '[[points]]\nmeasure = "probe"\nname = "2-shot"\n[[points]]\nmeasure = "evaluate"\nname = "released"\n'
    head = 'title = "Transfer"\ndata = "pictures"\nmetric = "top1"\nshots = [1, 2]\n[recipe]\ninit = "weights.npz"\n'
    toml.write_text(head + points)
    state = run(toml, "out", init=trained.folder)
    probed, released = (cell.records[0] for cell in state.cells)
    assert (
        released.metrics["top1"] == vitral.evaluate(trained.folder, tmp_path / "pictures", device="cpu").metrics["top1"]
    )
    few = vitral.fewshot(trained.folder, tmp_path / "pictures", shots=(1, 2), device="cpu").shots
    assert [probed.metrics["1-shot"], probed.metrics["2-shot"]] == pytest.approx([row.mean for row in few])
    toml.write_text(
        'title = "Speed"\nmeasure = "speed"\nmetric = "train_images_per_second"\n'
        '[recipe]\nbatch = 16\nimage = 16\n[axes]\nmodel = ["ViT-Ti/16"]\n'
    )
    (record,) = run(toml, "speed").records.values()
    assert record.metrics["largest_batch"] == 16
    assert all(record.metrics[f"{work}_images_per_second"] > 0 for work in ("train", "infer"))


def test_the_search_for_the_largest_batch_takes_few_steps(toml, monkeypatch):
    """Training goes on until memory runs out, prediction until larger batches are no faster; slow steps run twice."""
    steps: list[tuple[str, int]] = []

    class Step:
        def __init__(self, backend, workload):
            self.work, self.batch = workload.work, workload.batch

        def run(self, count):
            if (self.work, self.batch) == ("train", 128):
                raise torch.OutOfMemoryError("CUDA out of memory")
            steps.extend([(self.work, self.batch)] * count)
            return [max(self.batch, 32) / {"train": 100, "infer": 1000}[self.work]] * count  # seconds

        def double_batch(self):
            self.batch *= 2

    monkeypatch.setattr(study_runs, "TrainingStep", Step)
    monkeypatch.setattr(study_runs, "InferenceStep", Step)
    toml.write_text(
        'title = "Speed"\nmeasure = "speed"\nmetric = "train_images_per_second"\n'
        '[recipe]\nbatch = 4096\nimage = 16\nmodel = "ViT-Ti/16"\n'
    )
    (record,) = run(toml, "speed").records.values()
    assert record.metrics == {
        "train_images_per_second": 100, "infer_images_per_second": 1000, "largest_batch": 64,
    }  # fmt: skip
    counts = [(work, batch, len(list(group))) for (work, batch), group in itertools.groupby(steps)]
    assert counts[:4] == [("train", 8, 4), ("train", 16, 4), ("train", 32, 4), ("train", 64, 2)]
    assert counts[4:] == [("infer", 8, 4), ("infer", 16, 4), ("infer", 32, 4), ("infer", 64, 4)]


def test_a_measurement_of_speed_keeps_no_model_in_memory(toml, monkeypatch):
    """Else the largest batch of the next model would be smaller."""
    models = []

    class Step(study_runs.TrainingStep):
        def __init__(self, backend, workload):
            super().__init__(backend, workload)
            models.append(weakref.ref(self.model))

        def double_batch(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(study_runs, "TrainingStep", Step)
    toml.write_text(
        'title = "Speed"\nmeasure = "speed"\nmetric = "train_images_per_second"\n'
        '[recipe]\nbatch = 16\nimage = 16\nmodel = "ViT-Ti/16"\n'
    )
    gc.disable()  # it would free the model at some time
    try:
        run(toml, "speed")
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


def test_the_study_in_the_documentation_runs_and_is_reported_on(tmp_path):
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(text.strip().splitlines()) == 10
    path = tmp_path / "depth.toml"
    path.write_text(text)
    state = vitral.study("run", path, out=tmp_path / "depth", device="cpu", set=["workers=0"])
    assert isinstance(state, vitral.StudyRuns)
    assert [len(cell.records) for cell in state.cells] == [2, 2, 2]
    report = vitral.study("report", tmp_path / "depth")
    assert isinstance(report, vitral.StudyReport)
    ((name, result),) = report.claims
    assert (name, result.claim.text) == ("depth", "more layers are better")
    html = (tmp_path / "depth" / "report.html").read_text()
    assert html.count("<circle") == 3
    assert "more layers are better" in html
    assert result.verdict in html
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", html)
    written = json.loads((tmp_path / "depth" / "report.json").read_text())
    assert written["claims"][0]["verdict"] == result.verdict
    assert [cell["mean"] for cell in written["cells"]] == [cell.mean("top1") for cell in state.cells]
    markdown = (tmp_path / "depth" / "report.md").read_text()
    assert f"| more layers are better | {result.verdict.replace('not held', '**not held**')} |" in markdown


def test_shipped_studies_are_listed():
    listed = vitral.study()
    assert isinstance(listed, vitral.StudyList)
    assert {"positions", "heads", "shape", "optimizers", "data-size", "compute", "speed", "axial", "self-supervision",
            "transfer"} == {entry.name for entry in listed.studies}  # fmt: skip
