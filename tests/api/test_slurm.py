"""The engine slurm on a real cluster of one node, where Slurm is installed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import slurm as cluster_daemons
from patience import wait_until
from runs import STUDY, make_pictures, starting_from
from slurm import SlurmCluster

import vitral
from vitral.api.engines import Work, run_slurm
from vitral.errors import UserError
from vitral.events import Event, EventHandler
from vitral.studies.planning import read_records

pytestmark = pytest.mark.skipif(bool(cluster_daemons.missing()), reason=cluster_daemons.missing())
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def started() -> Iterator[SlurmCluster]:
    with SlurmCluster() as running:
        yield running


@pytest.fixture
def cluster(started, monkeypatch):
    """The cluster, with the environment that jobs get from the command that submits them."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return started


@dataclass
class Helps(Work):
    """Work that takes no time: the help texts of verbs, each in the log of its job."""

    unit = "texts"
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def is_done(self, item: str) -> bool:
        return any(f"usage: vitral {item}" in log.read_text() for log in (self.folder / "slurm").glob("*_log.out"))

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        raise AssertionError

    def outcome(self, item: str) -> str:
        return item

    def fail(self, item: str, reason: str, log: str) -> None:
        self.failures[item] = (reason, log)

    def arguments(self, items: Sequence[str]) -> list[str]:
        return ["help", *items]


def lines(events: list[Event]) -> str:
    return "\n".join(str(event) for event in events)


def test_jobs_are_submitted_once_and_failures_name_their_log(cluster, tmp_path):
    """Two commands for the same items, while the node takes no jobs: the second waits for the first one's jobs."""
    work, second = Helps(tmp_path), Helps(tmp_path)
    heard: tuple[list[Event], list[Event]] = ([], [])
    node = cluster.run("sinfo", "--noheader", "--format=%n").split()[0]
    items = ["embed", "nonsense", "study"]
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    threads = [threading.Thread(target=run_slurm, args=(work, items, heard[0].append))]
    threads[0].start()
    wait_until(lambda: len(cluster.queue()) == 3)
    threads += [threading.Thread(target=run_slurm, args=(second, items[:2], heard[1].append))]
    threads[1].start()
    wait_until(lambda: heard[1])
    assert "3 jobs submitted; logs in" in lines(heard[0])
    assert "0 jobs submitted, 2 were queued before" in lines(heard[1])
    assert len(cluster.queue()) == 3
    cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    for thread in threads:
        thread.join(300)
    assert [*work.failures] == [*second.failures] == ["nonsense"]
    reason, log = work.failures["nonsense"]
    assert "ended as FAILED, exit code 2:0" in reason
    assert 'there is no verb "nonsense"' in Path(log).read_text()
    assert all(work.is_done(item) for item in ("embed", "study"))
    assert not list(tmp_path.rglob("*.pkl"))  # no code travels through the folder


def test_what_slurm_refuses_is_one_sentence(cluster, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Slurm refuses the jobs \(.*[Ii]nvalid partition"):
        run_slurm(Helps(tmp_path, slurm={"partition": "nowhere"}), ["embed"], lambda event: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="Slurm does not respond"):
        run_slurm(Helps(tmp_path), ["embed"], lambda event: None)


def study(folder: Path, out: str, **options) -> vitral.StudyRuns:
    state = vitral.study(
        "run", folder / "mine.toml", data=[str(folder / "pictures")], out=folder / out, device="cpu", **options
    )
    assert isinstance(state, vitral.StudyRuns)
    return state


@contextmanager
def command(*words: str | Path | int) -> Iterator[subprocess.Popen[bytes]]:
    """`vitral ...` in a process of its own, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", "vitral", *map(str, words)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    return {key: dict(record.metrics) for key, record in read_records(folder).items()}


@pytest.mark.slow
def test_the_same_study_through_slurm_gives_the_same_table(cluster, tmp_path):
    """12 runs; the command that waits is killed after the third and given again, and no run is made twice."""
    make_pictures(tmp_path / "pictures")
    (tmp_path / "mine.toml").write_text(STUDY)
    out = tmp_path / "slurm"
    words = ["--data", tmp_path / "pictures", "--out", out, "--device", "cpu", "--engine", "slurm"]
    with command("study", "run", tmp_path / "mine.toml", *words):
        wait_until(lambda: len(read_records(out)) >= 3)
    notes: list[Event] = []
    state = study(tmp_path, "slurm", engine="slurm", on_event=notes.append)
    assert "0 jobs submitted" in lines(notes)
    whole = study(tmp_path, "whole")
    assert metrics(out) == metrics(tmp_path / "whole")
    columns, rows = state.table()
    kept = [number for number, name in enumerate(columns) if name != "seconds"]
    assert [[row[i] for i in kept] for row in rows] == [[row[i] for i in kept] for row in whole.table()[1]]
    assert len((out / "runs.jsonl").read_text().splitlines()) == 12
    assert sorted(path.name for path in out.iterdir()) == ["runs.jsonl", "study.json"]


@pytest.mark.slow
def test_cancelled_preempted_and_lost_jobs_go_on_where_they_were(cluster, tmp_path):
    """One run. Its job is cancelled, which is a row with the log; the same command resumes it; then a job of another
    partition preempts it, then its node is lost; it ends as one that was left alone."""
    make_pictures(tmp_path / "pictures")
    one_run = STUDY[: STUDY.index("[axes]")].replace("seeds = [0, 1, 2]", "seeds = [0]")
    (tmp_path / "mine.toml").write_text(one_run.replace("steps = 4", "steps = 900").replace("every = 1", "every = 20"))
    out = tmp_path / "slurm"
    words = ["study", "run", tmp_path / "mine.toml", "--data", tmp_path / "pictures", "--out", out, "--device", "cpu"]
    words += ["--engine", "slurm", "--slurm", "partition=low"]

    def saved() -> int:
        """The last step of the run that is saved."""
        steps = [int(path.name[5:13]) for path in out.glob("running/*/run/state/step-*")]
        return max(steps, default=0)

    with command(*words) as process:
        wait_until(saved)
        (job,) = cluster.queue()
        cluster.run("scancel", job.split()[0])
        assert process.wait(300) == 0
    (record,) = read_records(out).values()
    reason, _, log = record.reason.partition("; log: ")
    assert [record.status, reason] == ["failed", f"job {job.split()[0]} ended as CANCELLED, exit code 0:15"]
    assert "900 steps" in Path(log).read_text()
    cancelled_at = saved()
    with command(*words) as process:
        wait_until(lambda: saved() > cancelled_at)
        cluster.run("sbatch", "--partition=high", "--cpus-per-task=2", f"--output={tmp_path / 'high'}", "--wrap=true")
        wait_until((tmp_path / "high").exists)
        preempted_at = saved()
        wait_until(lambda: saved() > preempted_at)
        cluster.lose_node()
        lost_at = saved()
        wait_until(lambda: "down" in cluster.run("sinfo", "--noheader", "--format=%T"))
        cluster.start_node()
        assert process.wait(400) == 0
    assert 0 < cancelled_at < preempted_at < lost_at < 900
    (record,) = read_records(out).values()
    assert record.status == "ok"
    study(tmp_path, "whole")
    assert metrics(out) == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_parts_through_slurm_give_the_same_file(cluster, tmp_path):
    """The command that waits is killed after the first part, and given again."""
    make_pictures(tmp_path / "pictures")
    starting_from(tmp_path / "model.safetensors")
    how = {"batch": 4, "device": "cpu"}
    source, pictures, output = tmp_path / "model.safetensors", tmp_path / "pictures", tmp_path / "a.npz"
    words = ["--output", output, "--batch", 4, "--device", "cpu", "--parts", 3, "--engine", "slurm"]
    with command("embed", source, pictures, *words):
        wait_until(lambda: list(tmp_path.glob("a.npz.parts/part-*.npz")))
    assert not output.exists()
    vitral.embed(str(source), str(pictures), output=str(output), parts=3, engine="slurm", **how)
    vitral.embed(source, pictures, output=tmp_path / "whole.npz", **how)
    assert output.read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not (tmp_path / "a.npz.parts").exists()
