"""A run that was stopped, however and whenever, and started again is the run that was never stopped: bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import MODEL, TINY, make_pictures, metrics, outcome, states, train

from vitral import api
from vitral.checkpoints import write
from vitral.checkpoints.run import RunFolder
from vitral.errors import UserError
from vitral.training import signals

HERE = Path(__file__).parent
EVERYTHING = (
    *("steps=90", "workers=1", "average=0.9", "optim.weight_decay=0.1", "evaluate_every=10", "save_every=3"),
    *("regular.dropout=0.1", "regular.attention_dropout=0.1", "regular.stochastic_depth=0.2"),
)
KILLS = 22


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Processes that a test starts compute with one thread; sums must come in the same order here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


class Crash(Exception):
    """Stands in for the end of a process."""


def crash_at(step: int) -> Callable[[Any], None]:
    """A listener that ends the run when a step is done."""

    def listen(event: Any) -> None:
        if isinstance(event, api.StepDone) and event.step == step:
            raise Crash

    return listen


def interrupt_at(step: int) -> Callable[[Any], None]:
    """A listener that presses Ctrl-C when a step is done."""

    def listen(event: Any) -> None:
        if isinstance(event, api.StepDone) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return listen


def said(pictures: Path, out: Path, *words: str) -> list[str]:
    """What a run tells a person."""
    notes: list[str] = []
    train(pictures, out, *words, listen=lambda event: notes.append(event.text) if isinstance(event, api.Note) else None)
    return notes


# kill -9, by a process of its own that forks its victims, so that torch is imported once


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_run_killed_at_twenty_moments_ends_as_the_run_that_was_not(pictures, tmp_path):
    script = "import sys, test_resume; test_resume.kill_often(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(pictures), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] >= 20
    assert report["torn"] >= 3, "some kills should have hit a state while it was written"
    assert not report["orphans"], "loader workers outlived the process that they worked for"
    expected = outcome(tmp_path / "never-killed")
    for run in report["runs"]:
        assert outcome(Path(run)) == expected


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def kill_often(pictures: str, folder: str) -> None:
    """Kill runs at random moments, resume each until it is finished, and print what happened as JSON."""
    rng = random.Random(0)
    data, place = Path(pictures), Path(folder)
    assert _ended(_victim(data, place / "never-killed")[0]) == 0
    runs, victims, torn = [place / "killed-1"], [], 0
    while len(victims) < KILLS:
        run, how = runs[-1], rng.choice(("starting", "training", "training", "writing"))
        victim, ready = _victim(data, run, slow=how == "writing")
        if how != "starting":
            os.read(ready, 1)  # after the first step
        if how == "writing":
            _wait(lambda: any((run / "state").glob(".*.part")), 2)  # noqa: B023
        time.sleep(rng.uniform(0, 0.03 if how == "writing" else 0.3))
        os.kill(victim, signal.SIGKILL)
        code = _ended(victim)
        assert code in (0, -signal.SIGKILL)
        if code:
            victims.append(victim)
            torn += any((run / "state").glob(".*.part"))
        else:  # it was quicker than the killer, who takes another run
            runs.append(place / f"killed-{len(runs) + 1}")
        os.close(ready)
    assert _ended(_victim(data, runs[-1])[0]) == 0
    _wait(lambda: not _orphans(victims), 15)
    report = {"kills": len(victims), "torn": torn, "orphans": _orphans(victims), "runs": [str(run) for run in runs]}
    sys.stdout.write(json.dumps(report))


def _victim(pictures: Path, run: Path, slow: bool = False) -> tuple[int, int]:
    """A forked process that trains, and a pipe on which it tells its steps; `slow` makes writing take its time."""
    ready, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, ready
    os.setpgid(0, 0)
    try:
        if slow:
            fast = write._write_bytes
            write._write_bytes = lambda stream, tensor: (fast(stream, tensor), time.sleep(0.001))[0]
        train(pictures, run, *EVERYTHING, listen=lambda event: isinstance(event, api.StepDone) and os.write(tell, b"."))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def _orphans(groups: list[int]) -> list[int]:
    """Processes of these groups that still run, where the system tells (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = entry.read_text().split(" (", 1)
        except OSError:  # it has just ended
            continue
        state, _, group = rest.rpartition(") ")[2].split()[:3]
        if int(group) in groups and state != "Z":
            found.append(int(pid))
    return found


# every kind of run, stopped once


@pytest.mark.parametrize(
    "words",
    [
        ("optim.name=adam", "optim.layer_decay=0.8", "average=0.9", "regular.dropout=0.2"),
        ("optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=0.01", "regular.stochastic_depth=0.3"),
        ("tune=lora:2", "average=0.8"),
        ("tune=last:1",),
        ("tune=head",),
        ("tune=head", "average=0.9", "balance=sampler"),
        ("tune=bias", "data.mixup=0", "data.cutmix=1"),
        ("patience=2", "evaluate_every=2", "save_every=3", "steps=40", "optim.lr=0.01"),
        ("balance=sampler", "micro_batch=4", "checkpointing=true"),
        ("data.mixup=0", "regular.label_smoothing=0.1", "balance=weights"),
    ],
    ids=" ".join,
)
def test_any_run_goes_on_as_if_it_had_not_stopped(words, pictures, tmp_path):
    train(pictures, tmp_path / "whole", *words)
    with pytest.raises(Crash):  # after a state, before the next
        train(pictures, tmp_path / "parts", *words, listen=crash_at(3))
    with pytest.raises(api.Interrupted):  # at a step where no state is due
        train(pictures, tmp_path / "parts", *words, listen=interrupt_at(5))
    train(pictures, tmp_path / "parts", *words)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    if "patience=2" in words:
        steps = metrics(tmp_path / "whole")[-1]["step"]
        assert outcome(tmp_path / "whole")[3] < steps < 40, "the run should end early and keep an earlier step"


def test_the_best_model_stays_where_the_process_ends_before_the_result_is_written(pictures, tmp_path, monkeypatch):
    words = ("patience=2", "evaluate_every=2", "steps=40", "optim.lr=0.01")
    train(pictures, tmp_path / "whole", *words)
    with monkeypatch.context() as patch:
        whole = RunFolder.write_text

        def crash(self: RunFolder, name: str, text: str) -> None:
            if name == "result.json":
                raise Crash
            whole(self, name, text)

        patch.setattr(RunFolder, "write_text", crash)
        with pytest.raises(Crash):
            train(pictures, tmp_path / "parts", *words)
    train(pictures, tmp_path / "parts", *words)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


# signals


def test_signals_to_a_program_save_and_the_same_command_goes_on(pictures, tmp_path):
    words = ("steps=300", "evaluate_every=100", "save_every=100", "workers=1")
    train(pictures, tmp_path / "whole", *words)
    run = tmp_path / "parts"
    for number, name in enumerate((signal.SIGTERM, signal.SIGINT), start=1):
        program = start(pictures, run, words)
        _wait(lambda: lines(run) > 20 * number, 60)  # noqa: B023
        program.send_signal(name)
        _, errors = program.communicate(timeout=60)
        assert program.returncode == 130, errors
        assert "stopped; its state is saved: the same command with the same --out goes on" in errors
        assert "Traceback" not in errors
        saved = int(states(run)[-1].stem.removeprefix("step-"))
        assert saved == metrics(run)[-1]["step"]
        assert saved % 100, "the signal should have come between two checkpoints"
    program = start(pictures, run, words)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert f"going on from step {saved}" in errors
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_second_signal_stops_at_once(pictures, tmp_path):
    """Here in an evaluation, whose loader has a worker that is deaf to signals."""
    words = ("steps=300", "evaluate_every=20", "save_every=10", "workers=1")
    slow = "import time; from vitral.evaluation import predict; predict.normalise = lambda *_: time.sleep(100)"
    program = start(pictures, tmp_path / "run", words, before=slow)
    _wait(lambda: lines(tmp_path / "run") >= 20, 60)
    time.sleep(0.3)
    program.send_signal(signal.SIGINT)
    time.sleep(signals._ECHO + 0.3)
    assert program.poll() is None, "the first signal waits for the end of the evaluation"
    began = time.monotonic()
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130, errors
    assert time.monotonic() - began < 5
    assert "Traceback" not in errors
    assert [path.stem for path in states(tmp_path / "run")] == ["step-00000010"]


def start(pictures: Path, out: Path, words: tuple[str, ...], before: str = "pass") -> subprocess.Popen[str]:
    """`vitral train` in a process of its own, after some Python."""
    options = ["train", str(pictures), "--model", MODEL, "--out", str(out), "--device", "cpu", "--set", *TINY, *words]
    command = [sys.executable, "-c", f"{before}; from vitral.cli import main; main()", *options]
    if before == "pass":
        command[1:3] = ["-m", "vitral"]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_signal_that_is_repeated_within_a_moment_counts_once(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with signals.stop_requests() as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping()
        monkeypatch.setattr(signals, "_ECHO", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


# damaged and foreign folders


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(pictures, run, "keep=3")
    return run


@pytest.fixture(scope="module")
def stopped_run(pictures, tmp_path_factory) -> Path:
    """The same run, with its states after steps 4, 6 and 8."""
    run = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.raises(Crash):
        train(pictures, run, "keep=3", listen=crash_at(9))
    assert [path.stem for path in states(run)] == ["step-00000004", "step-00000006", "step-00000008"]
    return run


@pytest.fixture
def stopped(stopped_run, tmp_path) -> Path:
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def cut_in_the_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(5000))


def garbage_that_looks_like_a_pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x02" + random.Random(0).randbytes(5000))


def text(path: Path) -> None:
    path.write_text("no space left on device")


def without_facts(path: Path) -> None:
    write.write_safetensors(path, {"model/x": torch.zeros(3)})


DAMAGES = (
    *(empty, cut_in_the_header, cut_in_the_tensors, grown, garbage, garbage_that_looks_like_a_pickle, text),
    without_facts,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_state_is_passed_over(damage, pictures, whole, stopped):
    damage(states(stopped)[-1])
    assert "going on from step 6" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)


def test_what_an_interrupted_write_left_is_removed(pictures, whole, stopped):
    for name in ("state/.step-00000010.safetensors.1234abcd.part", ".best.safetensors.1234abcd.part", ".x.part"):
        (stopped / name).write_bytes(b"half")
    (stopped / "state" / ".step-00000010.shards.part").mkdir()
    with (stopped / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 10, "lo')
    assert "going on from step 8" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)
    names = {path.name for path in stopped.iterdir()}
    assert names == {"recipe.toml", "data.json", "metrics.jsonl", "model.safetensors", "result.json"}


def test_with_all_states_torn_the_run_begins_again_and_says_so(pictures, whole, stopped):
    for state, damage in zip(states(stopped), (empty, garbage, cut_in_the_tensors), strict=True):
        damage(state)
    assert "none of the saved states can be read: starting from the beginning" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)


def test_a_torn_state_does_not_outlive_the_ones_saved_after_it(pictures, whole, stopped):
    empty(states(stopped)[-1])
    with pytest.raises(api.Interrupted):
        train(pictures, stopped, "keep=1", listen=interrupt_at(7))
    assert [path.stem for path in states(stopped)] == ["step-00000007"]
    assert "going on from step 7" in said(pictures, stopped, "keep=1")
    assert outcome(stopped) == outcome(whole)


@pytest.mark.parametrize("word", ["optim.lr=0.02", "batch=5", "regular.dropout=0.5", "seed=1", "data.held_out=0.4"])
def test_a_changed_recipe_is_another_run(word, pictures, stopped):
    with pytest.raises(UserError) as refused:
        train(pictures, stopped, "keep=3", word)
    key, _, value = word.partition("=")
    assert key in str(refused.value)
    assert value in str(refused.value)
    assert len(states(stopped)) == 3


def test_what_only_costs_memory_time_or_disk_may_change(pictures, whole, stopped):
    words = ("keep=2", "workers=1", "checkpointing=true", "save_every=5")
    assert "going on from step 8" in said(pictures, stopped, *words)
    assert outcome(stopped) == outcome(whole)


@pytest.mark.parametrize("split", ["train", "test"])
def test_changed_images_are_another_run(split, tmp_path):
    data = tmp_path / "data"
    for name in ("train", "test"):
        make_pictures(data / name)
    with pytest.raises(Crash):
        train(data, tmp_path / "run", listen=crash_at(3))
    (data / split / "class-0" / "7.png").rename(data / split / "class-0" / "8.png")
    with pytest.raises(UserError, match=f"its {split} images were others"):
        train(data, tmp_path / "run")
    shutil.move(data / split / "class-0" / "8.png", data / split / "class-0" / "7.png")
    data.rename(tmp_path / "moved")
    assert "going on from step 2" in said(tmp_path / "moved", tmp_path / "run")


def test_until_a_state_is_saved_another_recipe_may_have_the_folder(pictures, tmp_path):
    with pytest.raises(UserError, match="batch=600"):
        train(pictures, tmp_path / "run", "batch=600")
    with pytest.raises(Crash):
        train(pictures, tmp_path / "run", "seed=3", listen=crash_at(1))
    train(pictures, tmp_path / "run")
    train(pictures, tmp_path / "fresh")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "fresh")


def test_weights_in_the_folder_are_not_overwritten(pictures, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(UserError, match="choose another folder"):
        train(pictures, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_finished_run_is_not_done_again(pictures, whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    made = (run / "model.safetensors").stat().st_mtime_ns
    events: list[Any] = []
    done = train(pictures, run, "keep=3", listen=events.append)
    assert not [event for event in events if isinstance(event, api.StepDone | api.Started)]
    assert any(isinstance(event, api.Note) and "finished" in event.text for event in events)
    assert done.results[0].metrics == outcome(whole)[2]
    assert (run / "model.safetensors").stat().st_mtime_ns == made
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in whole.iterdir())
    with pytest.raises(UserError, match=r"optim\.lr"):
        train(pictures, run, "keep=3", "optim.lr=0.02")
