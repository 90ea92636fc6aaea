"""How long it will take, against a clock that is made up; how much memory, and what is written down on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from journeys import MODEL, QUICK, Command, colour_folder
from torch import Tensor, nn

import vitral
from vitral import display
from vitral.api import inspection
from vitral.checkpoints.run import RunFolder
from vitral.data.loader import Batch
from vitral.data.sources import Split
from vitral.display import ThroughputMeter
from vitral.evaluation.predict import Predictions
from vitral.events import Evaluated, Event, EventHandler, RunStarted, Saved, StepDone
from vitral.recipe import Recipe
from vitral.training import metrics, resources, run
from vitral.training.loop import LoopConfig, TrainStep
from vitral.training.metrics import Evaluator, MetricsLogger, measure
from vitral.training.objective import LossSettings, Objective
from vitral.training.parallel import World
from vitral.training.resources import ResourceEstimate
from vitral.training.state import EMA, TrainState


def events(
    steps: int, every: int, step_seconds: Callable[[int], float], evaluation_seconds: float, first: int = 0
) -> Iterator[tuple[Event, float]]:
    """What the loop would tell, each with the seconds that it took."""
    for step in range(first + 1, steps + 1):
        seconds = step_seconds(step)
        yield StepDone(step, steps, 1.0, 0.5, 1e-3, 32, seconds, seconds / 4), seconds
        if step % every == 0 or step == steps:
            yield Evaluated(step, {}, evaluation_seconds, False), evaluation_seconds


RNG = np.random.default_rng(0)
NOISE = RNG.lognormal(0, 0.5, 1001)
COURSES: dict[str, Callable[[int], float]] = {
    "steady": lambda step: 0.1,
    "slow to start": lambda step: 30.0 if step == 1 else 0.1,
    "slow until it is recorded": lambda step: {1: 9.0, 2: 0.7, 3: 0.7, 4: 20.0, 5: 3.0}.get(step, 0.1),
    "noisy": lambda step: 0.1 * float(NOISE[step]),
    "a stall now and then": lambda step: 0.5 if step % 10 == 0 else 0.1,
    "slower from the middle on": lambda step: 0.1 if step < 500 else 0.11,
}


@pytest.mark.parametrize("first", [0, 400])
@pytest.mark.parametrize("evaluation_seconds", [0.2, 30.0])
@pytest.mark.parametrize("course", COURSES)
def test_the_time_left_is_right_from_a_tenth_on(course, evaluation_seconds, first):
    steps, every = 1000, 100
    told = list(events(steps, every, COURSES[course], evaluation_seconds, first))
    total = sum(seconds for _, seconds in told)
    # The preflight guessed both wrong, as it may: it has seen one step, and a few images.
    pace = ThroughputMeter(
        RunStarted(first, steps, (steps - first) // every, 32, 1, 32, 0.3, 2 * evaluation_seconds, 0)
    )
    elapsed, wrong = 0.0, []
    for event, seconds in told:
        pace(event)
        elapsed += seconds
        left = total - elapsed
        late = isinstance(event, StepDone) and event.step > first + every  # a tenth, and an evaluation
        if late and abs(pace.seconds_left() - left) > 0.25 * left + 0.5:  # near its end a quarter is a few steps
            wrong.append((event, pace.seconds_left(), left))
    assert not wrong
    assert pace.seconds_left() == 0


def test_speed_and_waiting_are_of_the_steps():
    pace = ThroughputMeter(RunStarted(0, 10, 1, 32, 1, 32, 5.0, 1.0, 0))
    assert pace.seconds_left() == 10 * 5 + 1
    for event, _ in events(10, 10, lambda step: 0.5, 1.0):
        pace(event)
    assert pace.images_per_second == pytest.approx(64)
    assert pace.data_share == pytest.approx(0.25)


@pytest.mark.parametrize("first", [0, 400])
def test_steps_that_warm_up_do_not_make_the_time_left_jump(first):
    """A resumed run warms up again; evaluations and saves in between are no slow steps."""
    pace = ThroughputMeter(RunStarted(first, 1000, 0, 32, 1, 32, 0.1, 0.0, 0))
    for event, _ in events(1000, 1000, lambda step: COURSES["slow until it is recorded"](step - first), 0.0, first):
        pace(event)
        if isinstance(event, StepDone):
            if event.step % 3 == 0:
                pace(Evaluated(event.step, {}, 0.0, False))
                pace(Saved(event.step))
            assert pace.seconds_left() == pytest.approx(0.1 * (1000 - event.step))
            assert pace.images_per_second == (pytest.approx(320) if event.step > first + 5 else 0)


def test_another_pace_is_found_out_within_a_hundred_steps():
    pace = ThroughputMeter(RunStarted(0, 1000, 0, 32, 1, 32, 0.1, 0.0, 0))
    for event, _ in events(600, 1000, lambda step: 0.1 if step <= 500 else 0.3, 0.0):
        pace(event)
    assert pace.step_seconds == pytest.approx(0.3)
    assert pace.images_per_second == pytest.approx(32 / 0.3)


class Clock:
    """Time passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("images, batch, size", [(10_000, 32, 1), (10_000, 256, 2), (60, 32, 1), (5, 32, 1)])
def test_an_evaluation_is_foreseen_from_a_few_batches(monkeypatch, images, batch, size):
    """Workers take 2 seconds to start, a batch takes 0.1 however full it is."""
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    seen = 0

    def outputs(split: Split) -> Predictions:
        nonlocal seen
        seen += len(split)
        clock.now += 2 + 0.1 * -(-len(split) // (batch * size))
        return Predictions(np.zeros(0), np.zeros((0, 2)), np.zeros(0, bool))

    split = Split("test", [str(i) for i in range(images)], np.zeros(images, np.int64), ("a", "b"), NoReader())
    foreseen = Evaluator(split, World(0, size, torch.device("cpu")), batch, outputs, measure).estimate_seconds()
    assert foreseen == pytest.approx(2 + 0.1 * -(-images // (batch * size)))
    assert seen <= max(3 * batch * size, 64)


class NoReader:
    def read(self, index: int) -> bytes:
        raise AssertionError("no image is read here")

    def mark(self, index: int) -> str:
        return ""


@pytest.mark.parametrize(
    "computed, records, micro, foreseen, taken",
    [
        (0.01, False, 4, 0.01, 5),
        (0.01, True, 4, 0.001, 3 + 1 + 5),
        (0.01, True, 2, 0.02, 5),  # in two pieces nothing is recorded
        (0.6, True, 4, 0.6, 1),  # a slow step is as slow when it is replayed
    ],
)
def test_a_step_is_foreseen_as_the_run_will_take_it(monkeypatch, computed, records, micro, foreseen, taken):
    """A piece of a step takes `computed`, a recording 1 second, a replay 0.001; `records` as if on a GPU."""
    clock = Clock()
    monkeypatch.setattr(resources, "time", clock)
    made: list[TrainStep] = []

    class Recorded(TrainStep):
        def __init__(self, train_state: TrainState, plan: LoopConfig, world: World, on_event: EventHandler) -> None:
            super().__init__(train_state, plan, world, on_event)
            self.captures = records
            made.append(self)

    class Replayed:
        def __init__(self, function: object, inputs: object) -> None:
            clock.now += 1

        def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            clock.now += 0.001
            return (torch.zeros(()),) * 3

    monkeypatch.setattr(resources, "TrainStep", Recorded)
    monkeypatch.setattr("vitral.training.loop.CudaGraph", Replayed)
    train_state = a_trainee(lambda: setattr(clock, "now", clock.now + computed))
    batch = Batch(
        torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.arange(4) % 2, torch.ones(4).bool(), torch.arange(4)
    )
    plan = LoopConfig(steps=9, batch=4, microbatch=micro, seed=0, cuda_graph=True, clip=1.0)
    before = [weight.clone() for weight in train_state.model.parameters()]
    found = resources.estimate_resources(
        train_state, plan, World(0, 1, torch.device("cpu")), lambda _: iter([batch]), lambda: 7.0, str
    )
    assert found.step_seconds == pytest.approx(foreseen)
    assert (found.config, found.evaluation_seconds, made[0].count) == (plan, 7.0, taken)
    assert train_state.ema is not None
    assert all(map(torch.equal, before, train_state.model.parameters()))
    assert not any(sums.any() for sums in train_state.ema.sums.values())
    assert not train_state.optimizer.state


def a_trainee(computing: Callable[[], None]) -> TrainState:
    """A linear classifier of 3 x 2 x 2 pixels that says when it computes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    model.register_forward_pre_hook(lambda *_: computing())
    objective = Objective(model, LossSettings(2, (0.5,) * 3, (0.5,) * 3, seed=0), np.ones(2))
    groups = [{"params": list(model.parameters()), "factor": 1.0}]
    return TrainState(objective, model, torch.optim.AdamW(groups, lr=0.1), EMA(model, 0.9))


def test_what_is_written_down_on_the_way(tmp_path, monkeypatch, capsys):
    data = colour_folder(tmp_path / "colours", 6)
    out = tmp_path / "run"
    words = ["--model", MODEL, "--out", out, "--set", *QUICK, "steps=12", "evaluate_every=5"]
    said = Command(monkeypatch, capsys)("train", data, *words)
    assert "peak memory about" in said.err
    result = json.loads((out / "result.json").read_text())
    assert f"peak memory about {result['predicted_peak_bytes'] / 1e9:.1f} GB" in said.err
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_bytes"], rel=0.15)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "evaluation" in line] == [5, 10, 12]
    assert {"loss", "accuracy", "lr", "seconds", "data_seconds"} < lines[0].keys()
    assert lines[-1]["evaluation"]["top1"] == result["metrics"]["top1"]
    assert lines[0]["lr"] == 0  # the first step of a warm-up
    assert max(line["lr"] for line in lines if "lr" in line) <= 0.01


def test_the_page_is_announced_before_it_is_written(tmp_path, monkeypatch, capsys):
    real = inspection.write_run_page

    def announced(*words: Any, **options: Any) -> Any:
        print("and now it is", file=sys.stderr)
        return real(*words, **options)

    monkeypatch.setattr(inspection, "write_run_page", announced)
    data = colour_folder(tmp_path / "colours", 6)
    words = ["--model", MODEL, "--out", tmp_path / "run", "--json", "--set", *QUICK, "steps=1"]
    said = Command(monkeypatch, capsys)("train", data, *words)
    assert said.err.endswith("\nwriting the page\nand now it is\n")
    assert json.loads(said.out)["page"] == str(tmp_path / "run" / "page.html")


def test_a_long_run_writes_about_a_thousand_lines(tmp_path):
    folder = RunFolder(tmp_path)
    folder.make()
    logger = MetricsLogger(folder, lambda event: None)
    logger(RunStarted(0, 25_000, 1, 32, 1, 32, 0.1, 1.0, 0))
    for event, _ in events(25_000, 25_000, lambda step: 9.0 if step == 1 else 0.5, 1.0):
        logger(event)
    steps = [line["step"] for line in folder.metrics() if "loss" in line]
    assert len(steps) == 1000
    assert steps[-1] == 25_000
    assert logger.images_per_second() == pytest.approx(64)


def test_a_rate_is_shown_once_it_is_known(monkeypatch, capsys):
    monkeypatch.setattr(display, "_LOG_SECONDS", -1.0)
    shown = display.Display()
    shown(RunStarted(0, 7, 1, 32, 1, 32, 0.5, 1.0, 0))
    for event, _ in events(7, 9, lambda step: 0.5, 1.0):
        if isinstance(event, StepDone):
            shown(event)
    started, first, *_, fifth, sixth, _ = capsys.readouterr().err.splitlines()
    assert started.endswith("; about 4.5 s")
    assert first == "training 1/7  loss 1.000  accuracy 50%  4.0 s left"
    assert fifth == "training 5/7  loss 1.000  accuracy 50%  2.0 s left"
    assert sixth == "training 6/7  loss 1.000  accuracy 50%  1.5 s left  64 images/s  waiting for data 25%"


def test_a_head_on_features_has_no_images_a_second(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(display, "_LOG_SECONDS", -1.0)
    data, command = colour_folder(tmp_path / "colours", 6), Command(monkeypatch, capsys)
    command("train", data, "--model", MODEL, "--out", tmp_path / "start", "--set", *QUICK, "steps=1")
    words = ["--init", tmp_path / "start", "--trainable", "head", "--set", "workers=0", "steps=5"]
    said = command("train", data, *words, "--out", tmp_path / "run")
    assert said.code == 0
    assert "; less than a second\n" in said.err
    assert "training 5/5" in said.err
    assert "images/s" not in said.err + said.out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["images_per_second"] == 0


@pytest.mark.parametrize(
    "workers, trainable, share", [(0, "full", 0.75), (1, "full", 0.0), (0, "head", 0.0), (0, "bias", 0.75)]
)
def test_pixels_count_as_memory_where_this_process_reads_them_later(tmp_path, workers, trainable, share):
    """A batch is a quarter of the images; workers read for themselves, and features were computed before."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(bytes(500))
    parts: Any = SimpleNamespace(
        workers=workers,
        recipe=Recipe(trainable=trainable),
        config=LoopConfig(steps=9, batch=4, microbatch=4, seed=0),
        train=range(16),
    )
    estimate = ResourceEstimate(parts.config, 7, 0.0, 0.0)
    found = run._with_mapped_pixels(estimate, parts, tmp_path, World(0, 1, torch.device("cpu")))
    assert found.peak_bytes == 7 + 1000 * share


class Buffered(nn.Module):
    """A module with buffers that are counted up, assigned anew, empty at first, and not writable."""

    seen: Tensor
    mean: Tensor
    first: Tensor | None
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("first", None)
        self.register_buffer("scale", torch.ones(1).expand(3), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.mean((2, 3))
        if self.training:
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * pixels.detach().mean(0)
            self.first = self.mean if self.first is None else self.first
        return self.layer(pixels * self.scale)


def test_steps_of_the_estimate_leave_no_trace_in_buffers(tmp_path, monkeypatch):
    module, before = Buffered(), {}

    def estimated(state: TrainState, *rest: Any) -> ResourceEstimate:
        estimate = resources.estimate_resources(state, *rest)
        before.update(seen=module.seen.item(), mean=module.mean.tolist(), first=module.first)
        return estimate

    monkeypatch.setattr(run, "estimate_resources", estimated)
    images = [(np.full((8, 8, 3), 90 * (number % 2), np.uint8), number % 2) for number in range(20)]
    words = ["image=8", "steps=2", "batch=4", "workers=0"]
    vitral.train(images, model=module, out=tmp_path / "run", device="cpu", set=words)
    assert before == {"seen": 0, "mean": [0, 0, 0], "first": None}
    assert (module.seen, module.scale.tolist()) == (2, [1, 1, 1])


def test_buffers_of_scripted_modules_are_restored(tmp_path):
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    module = torch.jit.script(layers)
    images = [(np.full((8, 8, 3), 90 * (number % 2), np.uint8), number % 2) for number in range(20)]
    words = ["image=8", "steps=2", "batch=4", "workers=0"]
    vitral.train(images, model=module, out=tmp_path / "run", device="cpu", set=words)
    assert dict(module.named_buffers())["1.num_batches_tracked"] == 2
