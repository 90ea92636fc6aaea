"""A run that was stopped, however and whenever, and started again is the run that was never stopped: bit for bit."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import random
import shlex
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
from journeys import Command
from runs import (
    MODEL,
    TINY,
    Crash,
    crash_at,
    interrupt_at,
    make_pictures,
    metrics,
    outcome,
    starting_from,
    states,
    train,
    waiting,
)

from vitral import events
from vitral.checkpoints import write
from vitral.checkpoints.run import RunFolder
from vitral.display import Display
from vitral.errors import Interrupted
from vitral.training import parallel

HERE = Path(__file__).parents[1]
EVERYTHING = (
    *("steps=90", "workers=1", "ema_decay=0.9", "optim.weight_decay=0.1", "evaluate_every=10", "save_every=3"),
    *("regularization.dropout=0.1", "regularization.attention_dropout=0.1", "regularization.stochastic_depth=0.2"),
)
KILLS = 22
PATIENCE = 1200  # seconds until a process counts as hanging, on however busy a machine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Processes that a test starts compute with one thread; sums must come in the same order here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def within_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two signals in a row count as one, however long a busy machine takes between them."""
    monkeypatch.setattr(parallel, "_REPEATED", math.inf)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


# kill -9, by a process of its own that forks its victims, so that torch is imported once


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_run_killed_at_twenty_moments_ends_as_the_run_that_was_not(pictures, tmp_path):
    script = f"import runpy, sys; runpy.run_path({str(Path(__file__))!r})['kill_often'](*sys.argv[1:])"
    command = [sys.executable, "-c", script, str(pictures), str(tmp_path)]
    with (tmp_path / "errors").open("wb") as errors:  # not a pipe, which a process left behind would keep open
        done = subprocess.run(command, env=environment(), stdout=errors, stderr=errors, timeout=PATIENCE)
    assert done.returncode == 0, (tmp_path / "errors").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kills"] >= 20
    assert report["torn"] >= 3, "some kills should have hit a state while it was written"
    # Torch's workers end with their parent, but for one whose parent is killed in the moment in which it is born.
    assert report["orphans"] <= 1, "loader workers outlived the process that they worked for"
    expected = outcome(tmp_path / "never-killed")
    for run in report["runs"]:
        assert outcome(Path(run)) == expected


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE / "helpers"), *sys.path]), "OMP_NUM_THREADS": "1"}


def kill_often(pictures: str, folder: str) -> None:
    """Kill runs at random moments, resume each until it is finished, and write down what happened."""
    for module in ("vitral.api.training", "torch._dynamo"):  # else every victim would import them again
        importlib.import_module(module)
    rng = random.Random(0)
    data, place = Path(pictures), Path(folder)
    assert _ended(_victim(data, place / "never-killed")[0]) == 0
    runs, victims, torn = [place / "killed-1"], [], 0
    while len(victims) < KILLS:
        run, how = runs[-1], rng.choice(("starting", "training", "training", "writing"))
        victim, ready = _victim(data, run, halt=rng.randrange(1, 300) if how == "writing" else 0)
        if how == "training":
            os.read(ready, 1)  # after the first step
        if how == "writing":
            while os.read(ready, 1) not in (b"w", b""):  # until it waits, or is finished
                pass
        else:
            time.sleep(rng.uniform(0, 0.3))
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
    _wait(lambda: not _orphans(victims))
    left = _orphans(victims)
    for orphan in left:
        os.kill(orphan, signal.SIGKILL)
    report = {"kills": len(victims), "torn": torn, "orphans": len(left), "runs": [str(run) for run in runs]}
    (place / "report.json").write_text(json.dumps(report))


def _victim(pictures: Path, run: Path, halt: int = 0) -> tuple[int, int]:
    """A forked process that trains, and a pipe on which it tells its steps; `halt`: the number of a tensor that it does
    not write but tells of, to wait."""
    ready, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, ready
    os.setpgid(0, 0)
    try:
        if halt:
            calls, real = itertools.count(1), write._write_bytes

            def halting(stream: Any, tensor: torch.Tensor) -> None:
                if next(calls) == halt:
                    os.write(tell, b"w")
                    time.sleep(PATIENCE)
                real(stream, tensor)

            write._write_bytes = halting
        train(
            pictures,
            run,
            *EVERYTHING,
            on_event=lambda event: isinstance(event, events.StepDone) and os.write(tell, b"."),
        )
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _wait(condition: Callable[[], bool], seconds: float = 120) -> None:
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
        ("optim.name=adamw", "optim.layer_decay=0.8", "ema_decay=0.9", "regularization.dropout=0.2"),
        ("optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=0.01", "regularization.stochastic_depth=0.3"),
        ("trainable=lora:2", "ema_decay=0.8"),
        ("trainable=last:1",),
        ("trainable=head",),
        ("trainable=head", "ema_decay=0.9", "balance=sampler"),
        ("trainable=bias", "data.mixup=0", "data.cutmix=1"),
        ("patience=2", "evaluate_every=2", "save_every=3", "steps=40", "optim.lr=0.01"),
        ("balance=sampler", "micro_batch=4", "grad_checkpointing=true"),
        ("data.mixup=0", "regularization.label_smoothing=0.1", "balance=weights"),
    ],
    ids=" ".join,
)
def test_any_run_goes_on_as_if_it_had_not_stopped(words, pictures, tmp_path):
    if words[0].startswith("trainable="):
        words = (*words, starting_from(tmp_path / "start.safetensors"))
    train(pictures, tmp_path / "whole", *words)
    with pytest.raises(Crash):  # after a state, before the next
        train(pictures, tmp_path / "parts", *words, on_event=crash_at(3))
    with pytest.raises(Interrupted):  # at a step where no state is due
        train(pictures, tmp_path / "parts", *words, on_event=interrupt_at(5))
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
    words = ("steps=60", "evaluate_every=30", "save_every=30", "workers=1")
    train(pictures, tmp_path / "whole", *words)
    run, saved = tmp_path / "parts", 0
    for name in (signal.SIGTERM, signal.SIGINT):
        program = start(pictures, run, words, before=waiting(20))
        begun = read_until("step 20 is done", program)
        program.send_signal(name)
        _, errors = program.communicate(timeout=PATIENCE)
        assert program.returncode == 128 + name, errors
        assert errors.count("stopping after this step; press Ctrl-C again to stop immediately\n") == 1
        last = errors.splitlines()[-1]
        assert "Traceback" not in errors
        assert f"resuming from step {saved}" in begun or not saved
        saved = int(states(run)[-1].stem.removeprefix("step-"))
        assert saved == metrics(run)[-1]["step"]
        assert f"stopped; the state of step {saved} is saved; resume with: vitral train {pictures} " in last
    train(pictures, run, *words)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_second_signal_stops_at_once(pictures, tmp_path):
    """Here in an evaluation, whose loader has a worker that is deaf to signals."""
    words = ("steps=300", "evaluate_every=20", "save_every=10", "workers=1")
    slow = (
        "import itertools, sys, time; from vitral.evaluation import predict; calls, real = itertools.count(), "
        "predict.normalize; wait = lambda: (print('it waits', file=sys.stderr, flush=True), time.sleep(10**6)); "
        "predict.normalize = lambda *args: wait() if next(calls) else real(*args)"
    )  # the first is the preflight's
    program = start(pictures, tmp_path / "run", words, before=slow)
    read_until("it waits", program)  # no word of the progress, which a slow program prints too
    program.send_signal(signal.SIGINT)
    read_until("stopping after this step", program)
    time.sleep(parallel._REPEATED + 0.1)
    assert program.poll() is None, "the first signal waits for the images that are being evaluated"
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130, errors
    assert "Traceback" not in errors
    assert [path.stem for path in states(tmp_path / "run")] == ["step-00000010"]


def start(pictures: Path, out: Path, words: tuple[str, ...], before: str) -> subprocess.Popen[str]:
    """`vitral train` in a process of its own, after some Python."""
    options = ["train", str(pictures), "--model", MODEL, "--out", str(out), "--device", "cpu", "--set", *TINY, *words]
    command = [sys.executable, "-c", f"{before}; from vitral.cli import main; main()", *options]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(text: str, program: subprocess.Popen[str]) -> str:
    """Read what a program prints on standard error until a line with the text."""
    assert program.stderr is not None
    said = ""
    for line in program.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(f'the program ended without "{text}": {said}')


def test_a_signal_that_is_repeated_within_a_moment_counts_once(within_a_moment, monkeypatch):
    before, told = signal.getsignal(signal.SIGTERM), []
    with parallel.stop_requests(lambda: told.append(1)) as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping()
        monkeypatch.setattr(parallel, "_REPEATED", -1.0)  # long ago
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def press(when: Callable[[events.Event], bool], heard: list[events.Event]) -> Callable[[events.Event], None]:
    """A listener that presses Ctrl-C once, and again a moment later, as `timeout` does."""
    pressed = False

    def on_event(event: events.Event) -> None:
        nonlocal pressed
        heard.append(event)
        if not pressed and when(event):
            pressed = True
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)

    return on_event


@pytest.mark.parametrize("stage", ["reading", "evaluating", "RunStarted"])
def test_before_the_first_step_a_signal_stops_at_once(stage, pictures, tmp_path):
    """While pixels are decoded, in the resource estimate, and before the first step."""
    heard: list[events.Event] = []

    def reached(event: events.Event) -> bool:
        task = event.task if isinstance(event, events.Progress) else type(event).__name__
        return task.startswith(stage)

    with pytest.raises(KeyboardInterrupt):
        train(pictures, tmp_path / "parts", on_event=press(reached, heard))
    assert reached(heard[-1])
    assert not states(tmp_path / "parts")
    assert not list((tmp_path / "parts").rglob("*.part"))
    train(pictures, tmp_path / "parts")
    train(pictures, tmp_path / "whole")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.usefixtures("within_a_moment")
def test_a_stop_is_acknowledged_at_once(pictures, tmp_path):
    """Told while the listener, and with it the run, still waits."""
    heard: list[events.Event] = []
    press_at_2 = press(lambda event: isinstance(event, events.StepDone) and event.step == 2, heard)

    def on_event(event: events.Event) -> None:
        press_at_2(event)
        if event == heard[-1] and isinstance(event, events.StepDone) and event.step == 2:
            _wait(lambda: isinstance(heard[-1], events.Note))
            assert heard[-1] == events.Note("stopping after this step; press Ctrl-C again to stop immediately")

    with pytest.raises(Interrupted):
        train(pictures, tmp_path / "run", on_event=on_event)


@pytest.mark.usefixtures("within_a_moment")
@pytest.mark.parametrize("last", [False, True], ids=["in between", "last step"])
@pytest.mark.parametrize("during", [False, True], ids=["before", "during"])
def test_a_run_that_stops_does_not_wait_for_an_evaluation(last, during, pictures, tmp_path):
    """The run that goes on makes up for it, also where it is killed in between."""
    words = ("patience=9", "optim.lr=0.01", "steps=11")  # evaluated after 4, 8 and 11
    at, heard = 11 if last else 8, []
    train(pictures, tmp_path / "whole", *words)

    def when(event: events.Event) -> bool:
        steps = [found.step for found in heard if isinstance(found, events.StepDone)]
        if during:
            return isinstance(event, events.Progress) and steps[-1:] == [at]
        return steps[-1:] == [at - 1]  # told when the next one is done

    with pytest.raises(Interrupted):
        train(pictures, tmp_path / "parts", *words, on_event=press(when, heard))
    assert [event.step for event in heard if isinstance(event, events.Evaluated)] == [4, 8, 11][: 1 + last]
    assert states(tmp_path / "parts")[-1].stem == f"step-{at:08d}"

    def crash(event: events.Event) -> None:
        if isinstance(event, events.Evaluated):  # written down, and not yet in a state
            raise Crash

    with pytest.raises(Crash):
        train(pictures, tmp_path / "parts", *words, on_event=crash)
    train(pictures, tmp_path / "parts", *words)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_what_is_said_at_the_end_is_the_way_on(verb, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    command, real = Command(monkeypatch, capsys), Display._show_step

    def step(self: Display, event: events.StepDone) -> None:
        real(self, event)
        if event.step == 5 and "--out" not in sys.argv:  # told when the sixth is done
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Display, "_show_step", step)
    said = command(verb, pictures, "--model", MODEL, "--device", "cpu", "--set", *TINY)
    assert said.code == 143
    before, _, words = said.err.splitlines()[-1].partition("; resume with: vitral ")
    assert before == "stopped; the state of step 6 is saved"
    assert shlex.split(words)[-2] == "--out"
    again = command(*shlex.split(words))
    assert again.code == 0
    assert "resuming from step 6\n" in again.err
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_the_way_on_is_said_before_the_first_step_too(name, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitral.training.run.estimate_resources", lambda *_: signal.raise_signal(name))
    out = str(tmp_path / "my run")
    said = Command(monkeypatch, capsys)("train", pictures, f"--out={out}", "--set", *TINY)
    assert said.code == 128 + name
    words = shlex.join(["train", str(pictures), f"--out={out}", "--set", *TINY])
    assert said.err.splitlines()[-1] == f"stopped; resume with: vitral {words}"
