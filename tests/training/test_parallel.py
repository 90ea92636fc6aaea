"""Several processes do what one does: the same weights, the same scores, one voice.

Starting processes costs seconds, so the `legs` fixture starts them twice, with a list of jobs for each start; this file
is also the program they run. Runs that several tests speak of:

    moved     1 process to step 7, 2 to step 14, 1 to the end
    sharded   1 process to step 5, shards on 2 to step 10, shards on 3 to step 15, 1 to the end
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import MODEL, TINY, make_pictures, metrics, outcome, starting_from, states, train, waiting
from safetensors.torch import load_file
from torch import Tensor

import vitral
from vitral import events
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.run import RunFolder
from vitral.cli import main
from vitral.data.images import ImageError, decode, encode_png
from vitral.data.preprocess import parse_pipeline
from vitral.data.splits import Split
from vitral.errors import Interrupted, UserError
from vitral.evaluation.predict import predict_split
from vitral.models.model import normalize
from vitral.training import setup
from vitral.training.metrics import Evaluator, measure
from vitral.training.objective import Objective
from vitral.training.parallel import World, init_distributed, wrap

pytestmark = pytest.mark.xdist_group("several processes")  # one worker for all: the others would start them, too
HERE = Path(__file__).resolve().parents[1]
BASE = (
    *("steps=20", "batch=7", "ema_decay=0.9", "optim.clip=2", "optim.lr=0.001", "optim.weight_decay=0.1"),
    *("save_every=100", "evaluate_every=10", "precision=float32"),
)
SGD = ("optim.name=sgd", "optim.lr=0.03")
PATIENT = ("evaluate_every=2", "patience=2", "optim.lr=0.00001", "ema_decay=0")
FSDP = "parallel=fsdp"
NOT_RUNS = ("evaluate", "moved", "sharded", "protocol", "seeds", "mistake", "threads", "errors")
BATCHES = (1, 7, 64)
PATIENCE = 1200  # seconds until a process counts as hanging; on a busy machine a start may take a minute
PREPROCESS = Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3)


# What the started processes do.


def work(jobs: Path) -> None:
    """Do the jobs, and leave what became of each of them beside the list, one file a process."""
    torch.set_num_threads(1)
    atexit.register(_write_threads, jobs)  # before the group is joined, hence called after it is left
    world = init_distributed("cpu")
    for job in json.loads(jobs.read_text()):
        try:
            outcome = JOBS[job.pop("do")](world, **job)
        except (UserError, OSError) as mistake:
            outcome = f"{type(mistake).__name__}: {mistake}"
        except Exception:
            outcome = traceback.format_exc()
        with jobs.with_suffix(f".{world.rank}").open("a") as stream:
            stream.write(json.dumps(outcome) + "\n")


def _write_threads(jobs: Path) -> None:
    """Leave the names of this process's threads beside the list, where the system tells (Linux)."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    jobs.with_suffix(f".threads-{os.environ['RANK']}").write_text(json.dumps(names))


def run(
    world: World,
    data: str,
    out: str,
    words: list[str],
    stop: int = 0,
    halt: int = 0,
    room: int = 0,
    late: bool = False,
    full: bool = False,
    slow: bool = False,
) -> Any:
    """A run that says how many rows at a time it computed, where it heard that.

    `stop`: after so many steps. `halt`: in the evaluation after so many steps, its first, image by image, when the
    first process has seen one; then says what was heard from that step on. `room`: memory for so many rows at once, in
    the last process alone. `late`: to the rest of the processes the folder seems taken. `full`: nowhere to save.
    `slow`: the rest of the processes open the decoded pixels late.
    """
    heard: list[Any] = []

    def on_event(event: Any) -> None:
        heard.append(event)
        if full and isinstance(event, events.StepDone) and event.step == 3:
            shutil.rmtree(Path(out) / "state")
            (Path(out) / "state").touch()
        if isinstance(event, events.StepDone) and event.step == stop - 1:  # it is told when the next step is done
            signal.raise_signal(signal.SIGTERM)
        if halt and isinstance(event, events.Progress) and _told(heard).startswith(f"StepDone {halt},"):
            signal.raise_signal(signal.SIGTERM)

    forward, rows, decode_once = Objective.forward, setup.RunSetup.eval_batch, setup.decode_once
    if late and not world.first:
        out = f"{out}-2"
    if slow and not world.first:
        setup.decode_once = lambda *words, **named: time.sleep(1) or decode_once(*words, **named)  # type: ignore[assignment]
    if halt:
        setup.RunSetup.eval_batch = property(lambda self: 1)  # type: ignore[assignment]
    if room and world.rank == world.size - 1:
        Objective.forward = _with_room(forward, room)  # type: ignore[method-assign]
    try:
        train(Path(data), Path(out), *words, on_event=on_event)
    except Interrupted:
        return _told(heard) if halt else "stopped"
    finally:
        Objective.forward = forward  # type: ignore[method-assign]
        setup.RunSetup.eval_batch, setup.decode_once = rows, decode_once  # type: ignore[assignment]
    return [event.microbatch for event in heard if isinstance(event, events.RunStarted)]


def _told(heard: list[Any]) -> str:
    """What was heard of the last step and after it; notes may come at any time."""
    steps = [place for place, event in enumerate(heard) if isinstance(event, events.StepDone)]
    last = [event for event in heard[steps[-1] :] if not isinstance(event, events.Note)] if steps else []
    return ", ".join(f"{type(event).__name__} {getattr(event, 'step', '')}".strip() for event in last)


def _with_room(forward: Callable[..., Any], room: int) -> Callable[..., Any]:
    def narrow(self: Objective, images: Tensor, *rest: Any) -> Any:
        if len(images) > room:
            raise torch.OutOfMemoryError("no room")
        return forward(self, images, *rest)

    return narrow


def evaluate(world: World) -> list[Any]:
    """Accuracy, number of images and confusions (true, predicted, how often) by each batch size."""
    model, split = _model(), _split()
    found = []
    for batch in BATCHES:

        def outputs(some: Split, batch: int = batch) -> Any:
            return predict_split(model, some, PREPROCESS, batch=batch, rank=world.rank, world=world.size)

        scores = Evaluator(split=split, world=world, batch=batch, predict=outputs, measure=measure).evaluate()
        found.append([scores["top1"], scores["n"], [list(entry) for entry in scores["confusion"]]])
    return found


def protocol(world: World, data: str, out: str, words: list[str]) -> Any:
    """A sweep, and a run of what was chosen; to all but the first process the folder seems taken."""
    place = out if world.first else f"{out}-2"
    sweep = ("optim.lr=0.001,0.01",)
    found = vitral.pretrain(data, model=MODEL, set=[*TINY, *words], sweep=sweep, out=place, device="cpu")
    return [found.folder, found.as_dict()["devices"]]


def command(world: World, folder: str, words: list[str]) -> list[Any]:
    """The exit code of `vitral` with these words in a folder, and what it said on both outputs."""
    os.chdir(folder)
    sys.argv = ["vitral", *words]
    code, streams = 0, (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return [code, *(stream.getvalue() for stream in streams)]


class Fault(BaseException):
    """An error that no job expects: it ends the process."""


def crash(world: World) -> None:
    """Crash with wrapped objectives in the traceback."""
    objectives = [wrap(torch.nn.Linear(4, 4), world, kind) for kind in ("ddp", "fsdp")]
    for objective in objectives:
        objective(torch.ones(2, 4)).sum().backward()
    raise Fault


JOBS: dict[str, Callable[..., Any]] = {
    **{"run": run, "evaluate": evaluate, "protocol": protocol},
    **{"command": command, "crash": crash},
}


@dataclass(frozen=True)
class Encoded:
    """A reader of what is in memory."""

    files: list[bytes]

    def read(self, index: int) -> bytes:
        return self.files[index]

    def mark(self, index: int) -> str:
        return str(index)


def _model() -> Any:
    torch.manual_seed(0)
    model: Any = vitral.create(MODEL, width=16, depth=1, heads=2, mlp=32, classes=4)
    torch.nn.init.normal_(model.head.output.weight)
    return model


def _split() -> Split:
    """23 images, which neither 2 nor 3 divide; one cannot be read."""
    rng = np.random.default_rng(1)
    files = [encode_png(rng.integers(0, 256, (9, 10, 3), dtype=np.uint8)) for _ in range(23)]
    files[12] = b"not an image"
    labels = rng.integers(0, 4, 23)
    return Split("test", [f"{i}" for i in range(23)], labels, ("a", "b", "c", "d"), Encoded(files))


# What the tests do.


def torchrun(processes: int, *words: str | Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *map(str, words),
    ]


def environment() -> dict[str, str]:
    source = str(HERE.parent / "src")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join([source, str(HERE / "helpers")])}


def start(processes: int, jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[Any]]:
    """Start processes on a list of jobs, in a folder where the core file of one that aborts stays, too.

    Returns:
        What became of each job, [name][process]; with "threads" those that the processes had when they had left their
        group, and with "errors" what they said on standard error.
    """
    path = folder / f"jobs-{processes}.json"
    path.write_text(json.dumps(list(jobs.values())))
    started = torchrun(processes, Path(__file__), path)
    done = subprocess.run(started, env=environment(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode == 0) == ("crash" not in jobs), done.stderr
    said = [path.with_suffix(f".{rank}").read_text().splitlines() for rank in range(processes)]
    ended = [name for name in jobs if name != "crash"]
    told = {name: [json.loads(line) for line in lines] for name, *lines in zip(ended, *said, strict=True)}
    threads = [json.loads(left.read_text()) for left in sorted(folder.glob(f"{path.stem}.threads-*"))]
    return told | {"threads": threads, "errors": [done.stderr]}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=11)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Legs:
    """Where the runs are, and what the starts with several processes said: [name][process]."""

    folder: Path
    two: dict[str, list[Any]]
    three: dict[str, list[Any]]


@pytest.fixture(scope="module")
def legs(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Legs:
    """All runs, in the order in which they need each other."""
    folder = tmp_path_factory.mktemp("runs")
    alone = World(0, 1, torch.device("cpu"))

    def job(name: str, *words: str, **more: Any) -> dict[str, Any]:
        return {"data": str(pictures), "out": str(folder / name), "words": ["optim.name=adamw", *BASE, *words], **more}

    start_here = starting_from(folder / "start.safetensors")
    head, lora = ("trainable=head", start_here), ("trainable=lora:2", start_here)
    for name, *settings in (("adamw",), ("sgd", *SGD), ("head", *head), ("lora", *lora), ("best", *PATIENT)):
        run(alone, **job(name, *settings))
    assert run(alone, **job("moved", stop=7)) == run(alone, **job("sharded", stop=5)) == "stopped"
    two = {
        "sgd-2": job("sgd-2", *SGD),
        "pieces-2": job("pieces-2", *SGD, "micro_batch=2", "workers=1"),
        "uneven-2": job("uneven-2", *SGD, "micro_batch=3"),  # 3 and 4 rows: one piece and two
        "room-2": job("room-2", *SGD, room=4),  # 4 rows and a mixing partner do not fit
        "shards-2": job("shards-2", *SGD, FSDP, late=True),
        "shards-uneven-2": job("shards-uneven-2", *SGD, FSDP, "micro_batch=1"),
        "adamw-2": job("adamw-2"),
        "head-2": job("head-2", FSDP, *head),
        "lora-2": job("lora-2", FSDP, *lora),
        "best-2": job("best-2", FSDP, *PATIENT),
        "halted": job("halted", halt=10),
        "halted, gone on": job("halted"),
        "halted, shards": job("halted-shards", FSDP, *PATIENT, halt=2),
        "halted, shards, gone on": job("halted-shards", FSDP, *PATIENT),
        "moved": job("moved", stop=14),
        "sharded": job("sharded", FSDP, stop=10),
        "other run": job("sgd", *SGD, "seed=5"),
        "small batch": job("small", "batch=1", slow=True),  # the first removes the folder that the others read
        "full": job("full", full=True),
        "full, shards": job("full-shards", FSDP, full=True),
    }
    three = {
        "sgd-3": job("sgd-3", *SGD),
        "shards-3": job("shards-3", *SGD, FSDP),
        "sharded": job("sharded", FSDP, stop=15),
    }
    for jobs in (two, three):
        jobs |= {name: {"do": "run", **job} for name, job in jobs.items()} | {"evaluate": {"do": "evaluate"}}
    line = ["train", str(pictures), *words("steps=6", *SGD)]
    (folder / "seeds").mkdir()
    two["seeds"] = {"do": "command", "folder": str(folder / "seeds"), "words": [*line, "--json", "--seeds", "2"]}
    two["mistake"] = {"do": "command", "folder": str(folder), "words": [*line, "optim.lrr=1"]}
    three["crash"] = {"do": "crash"}
    two["protocol"] = {"do": "protocol", **job("protocol", "steps=2", "data.dev=0.2")}
    said_by_two = start(2, two, folder)
    shutil.copytree(folder / "sharded", folder / "damaged")
    run(alone, **job("moved"))
    said_by_three = start(3, three, folder)
    run(alone, **job("sharded"))
    return Legs(folder, said_by_two, said_by_three)


def difference(legs: Legs, first: str, second: str) -> float:
    """The largest between the weights of two runs.

    The bias of the keys is left out where Adam makes it: it changes no output, so its gradient is rounding error alone,
    which Adam brings to the size of any other.
    """
    ours, theirs = (load_file(legs.folder / name / "model.safetensors") for name in (first, second))
    assert ours.keys() == theirs.keys()
    gaps = {name: (ours[name] - theirs[name]).abs() for name in ours}
    for name in gaps:
        if name.endswith("qkv.bias") and not first.startswith("sgd"):
            gaps[name] = torch.cat([gaps[name].chunk(3)[0], gaps[name].chunk(3)[2]])
    return max(float(gap.max()) for gap in gaps.values())


@pytest.mark.parametrize("name", ["sgd-2", "sgd-3", "pieces-2", "uneven-2", "room-2"])
def test_copies_learn_what_one_process_learns(legs: Legs, name: str) -> None:
    """A batch of 7 over 2 and 3 processes, in pieces or not, mixed, augmented, clipped and averaged."""
    assert difference(legs, "sgd", name) < 1e-6


@pytest.mark.parametrize("name", ["shards-2", "shards-3", "shards-uneven-2"])
def test_shards_learn_what_one_process_learns(legs: Legs, name: str) -> None:
    assert difference(legs, "sgd", name) < 1e-5
    _, card = vitral.load(legs.folder / name)
    assert card.class_names == ("class-0", "class-1", "class-2")


def test_all_processes_write_where_the_first_does(legs: Legs) -> None:
    assert (legs.folder / "shards-2" / "result.json").exists()
    assert not (legs.folder / "shards-2-2").exists()


def test_a_protocol_of_two_processes_is_written_once(legs: Legs) -> None:
    assert legs.two["protocol"] == [[str(legs.folder / "protocol"), 2]] * 2
    row = json.loads((legs.folder / "protocol" / "protocol.json").read_text())
    assert [trial["n"] for trial in row["trials"]] == [6, 6]
    assert not (legs.folder / "protocol-2").exists()


@pytest.mark.parametrize("name", ["adamw", "head", "lora", "best"])
def test_other_ways_to_learn(legs: Legs, name: str) -> None:
    assert difference(legs, name, f"{name}-2") < 1e-6
    assert steps_and_scores(legs.folder / name) == steps_and_scores(legs.folder / f"{name}-2")


def steps_and_scores(run: Path) -> tuple[int, float, list[int]]:
    result = json.loads((run / "result.json").read_text())
    return result["step"], result["metrics"]["score"], [line["step"] for line in metrics(run)]


def test_patience_ended_the_run_and_the_best_weights_are_kept(legs: Legs) -> None:
    step, _, steps = steps_and_scores(legs.folder / "best-2")
    assert step < max(steps) < 20


@pytest.mark.parametrize("name", ["moved", "sharded"])
def test_a_run_goes_on_with_another_number_of_processes(legs: Legs, name: str) -> None:
    assert legs.two[name] == ["stopped"] * 2
    assert name == "moved" or legs.three[name] == ["stopped"] * 3
    assert difference(legs, "adamw", name) < 1e-6
    assert steps_and_scores(legs.folder / name) == steps_and_scores(legs.folder / "adamw")


@pytest.mark.parametrize(
    "name, step, folder, whole", [("halted", 10, "halted", "adamw-2"), ("halted, shards", 2, "halted-shards", "best-2")]
)
def test_an_evaluation_ends_in_all_processes_where_one_is_stopped(
    legs: Legs, name: str, step: int, folder: str, whole: str
) -> None:
    """After one of its three images a process; the run that goes on makes up for it, and ends with the same bits."""
    assert legs.two[name] == [f"StepDone {step}, Progress, Saved {step}", ""]
    assert legs.two[f"{name}, gone on"][0]
    assert outcome(legs.folder / folder) == outcome(legs.folder / whole)


def test_a_damaged_sharded_state_is_passed_over(legs: Legs) -> None:
    folder = RunFolder(legs.folder / "damaged")
    before, newest = states(folder.path)
    assert folder.newest_state().path == newest  # type: ignore[union-attr]
    shard = max(newest.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    assert folder.newest_state().path == before  # type: ignore[union-attr]


def test_evaluation_counts_every_image_once(legs: Legs) -> None:
    """Against each image by itself, whatever the number of processes and the batch."""
    model, split, confusion = _model().eval(), _split(), np.zeros((4, 4), int)
    pipeline = parse_pipeline(PREPROCESS.pipeline)
    for index, label in enumerate(split.labels):
        try:
            pixels = pipeline(decode(bytes(split.reader.read(index))), None)
        except ImageError:
            continue
        image = normalize(torch.from_numpy(pixels).permute(2, 0, 1)[None], PREPROCESS.mean, PREPROCESS.std)
        confusion[label, int(model(image).argmax())] += 1
    entries = [[*place.tolist(), int(confusion[tuple(place)])] for place in np.argwhere(confusion)]
    expected = [np.trace(confusion) / 22, 22, entries]
    alone = evaluate(World(0, 1, torch.device("cpu")))
    for found in (alone, *legs.two["evaluate"], *legs.three["evaluate"]):
        assert found == [expected] * len(BATCHES)


def test_memory_that_runs_out_in_one_process_makes_smaller_pieces_in_all(legs: Legs) -> None:
    assert legs.two["room-2"] == [[2], []]


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("other run", "UserError: {folder}/sgd contains another run (seed was 0 and is 5)"),
        ("small batch", "UserError: a batch of 1 images is too small for 2 processes"),
        ("full", "Unwritable: {folder}/full/state/step-00000020.safetensors cannot be written"),
        ("full, shards", "UserError: the state of step 20 cannot be written"),
    ],
)
def test_all_processes_end_with_the_same_mistake(legs: Legs, name: str, sentence: str) -> None:
    first, second = legs.two[name]
    assert first == second
    assert first.startswith(sentence.format(folder=legs.folder))


def test_only_the_first_process_hears_of_the_run(legs: Legs) -> None:
    for name, said in (legs.two | legs.three).items():
        if name not in NOT_RUNS and isinstance(said[0], list):
            assert len(said[0]) == 1
            assert not any(said[1:])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_the_threads_of_a_group_end_before_the_interpreter(legs: Legs) -> None:
    """Those of gloo, which would else abort the process now and then; also after a crash, whose exit code stays."""
    two, three = legs.two["threads"], legs.three["threads"]
    assert len(two) == 2
    assert len(three) >= 1  # torchrun may end the others early
    assert not any("gloo" in name for names in (*two, *three) for name in names)
    assert "Fault" in legs.three["errors"][0]
    assert "exitcode  : 1 " in legs.three["errors"][0]


# The command line.


def words(*more: str) -> list[str]:
    return ["--model", MODEL, "--device", "cpu", "--set", *TINY, *more]


def test_seeds_on_the_command_line(pictures: Path, legs: Legs) -> None:
    """Two runs after each other in a folder that the processes must agree on; said once."""
    (code, output, errors), other = legs.two["seeds"]
    assert code == 0, errors
    assert other == [0, "", ""]
    said, folder = json.loads(output), legs.folder / "seeds"
    assert [Path(run["folder"]).name for run in said["runs"]] == ["seed-0", "seed-1"]
    assert len(list((folder / "runs").iterdir())) == 1
    assert errors.count("seed 1\n") == 1
    assert "Warning" not in errors + legs.two["errors"][0]
    train(pictures, legs.folder / "sgd-seed-1", "steps=6", *SGD, "seed=1")
    assert difference(legs, "sgd-seed-1", f"seeds/{said['runs'][1]['folder']}") < 1e-6


def test_a_mistake_on_the_command_line_is_one_sentence(legs: Legs) -> None:
    """Of the first process that makes it; the other is silent."""
    codes, outputs, errors = zip(*legs.two["mistake"], strict=True)
    assert (codes, outputs) == ((2, 2), ("", ""))
    assert "".join(errors).count('vitral: unknown key "optim.lrr"') == 1
    assert "" in errors


def test_a_signal_to_torchrun_saves_and_the_run_goes_on(pictures: Path, tmp_path: Path) -> None:
    run, more = tmp_path / "run", ("steps=20", "save_every=1000", "evaluate_every=1000", *SGD)
    program = tmp_path / "program.py"
    program.write_text(f"{waiting(5)}; from vitral.cli import main; main()")
    command = torchrun(2, program, "train", pictures, "--out", run, *words(*more))
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("step 5 is done" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert said.count("stopping after this step") == 1
    assert said.count(f"is saved; resume with: torchrun ... -m vitral train {pictures} ") == 1
    (state,) = states(run)
    assert state.stem in ("step-00000005", "step-00000006")
    train(pictures, run, *more)
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(1, 21))
    train(pictures, tmp_path / "alone", *more)
    losses = [[line["loss"] for line in metrics(path) if "loss" in line] for path in (run, tmp_path / "alone")]
    assert np.allclose(*losses, rtol=0, atol=1e-5)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
