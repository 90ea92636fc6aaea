"""The bench: backends in processes of their own, rows that complete a file, a gate that no wrong answer passes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import vitral
from vitral.api.bench import benchmark
from vitral.bench import backends, loading, parity, start, sweep
from vitral.bench import benchmark as runner
from vitral.bench.backends import Backend, Task, build_model, default_modes, field
from vitral.bench.loading import LoadingStep, PredictionStep, feed, training_from_files
from vitral.bench.plot import chart, ticks
from vitral.bench.results import (
    COLUMNS,
    Row,
    merged,
    page,
    page_name,
    ratio,
    read_rows,
    remarks,
    spread,
    table,
    write_rows,
)
from vitral.bench.steps import (
    Outputs,
    TrainingStep,
    WrongAnswers,
    classifier,
    inference_step,
    latency_step,
    named_gradients,
    training_step,
)
from vitral.bench.worker import Child, Worker, WorkerFailed, answer
from vitral.cost import training_flops
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.models.normalise import normalise
from vitral.names import parse

TASK = Task("train", "ViT-Ti/16", 2, "cpu", image=32, depth=2, classes=10)
OURS = Backend("vitral")


def row(**changes: Any) -> Row:
    usual = Row(
        work="train",
        model="ViT-B/16",
        batch=4,
        library="vitral",
        settings="eager",
        device="cpu",
        precision="float32",
        seconds=0.5,
        low=0.4,
        high=0.6,
        samples=10,
        macs=10**9,
        rate=2e10,
        peak_bytes=2**30,
        cold_seconds=1.0,
        call="2026-01-02 03:04:05",
        facts={"hardware": "Abacus (R) 2000"},
    )
    return replace(usual, **changes)


# Who races


def test_every_setting_of_every_installed_library_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"timm", "transformers"}
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name if name in there else None)
    cuda = replace(TASK, device="cuda")
    found = field(cuda, ("timm", "torchvision", "transformers"), ("compile", "graphs"), ("flash", "cudnn"))
    assert len(found.backends) == 1 + 2 * 2 * 2  # ours has one way
    assert found.backends[0] == Backend("vitral", "graphs")
    assert [sentence.split()[0] for sentence in found.absent] == ["torchvision"]
    assert "pip install torchvision" in found.absent[0]
    compiled = field(cuda, ("timm",), ("eager", "compile"), ("flash", "cudnn")).backends
    assert [one.label for one in compiled if one.library == "vitral"] == ["vitral (eager)", "vitral (compile)"]


@pytest.mark.parametrize(
    ("against", "modes", "attentions", "word"),
    [
        (("timn",), ("eager",), ("auto",), "timn"),
        ((), ("fast",), ("auto",), "fast"),
        ((), ("graphs",), ("auto",), "NVIDIA"),
        ((), ("eager",), ("flash",), "NVIDIA"),
    ],
)
def test_what_nobody_has_is_refused(against, modes, attentions, word) -> None:
    with pytest.raises(UserError, match=word):
        field(TASK, against, modes, attentions)


def test_a_peer_that_lacks_the_model_is_left_out() -> None:
    found = field(replace(TASK, model="R50+ViT-B/16", depth=0, image=0), ("transformers",), ("eager",), ("auto",))
    assert [one.library for one in found.backends] == ["vitral"]
    assert "R50+ViT-B/16" in found.absent[0]


def test_a_gpu_is_raced_compiled_and_a_cpu_plainly() -> None:
    assert default_modes("cuda") == ("compile", "graphs")
    assert default_modes("cpu") == ("eager",)


@pytest.mark.parametrize("library", ["timm", "transformers", "torchvision"])
def test_peers_have_our_shape(library: str) -> None:
    """As many parameters as ours, to the last one, and logits that are not all zero."""
    pytest.importorskip(library)
    model = build_model(library, TASK.architecture).eval()
    ours = build_model("vitral", TASK.architecture)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.inference_mode():
        logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    assert logits.std() > 0


# What is timed


def test_a_training_step_is_the_one_of_a_plain_loop() -> None:
    """Forward, cross-entropy, backward, clip to norm 1, AdamW: written out here, and the same weights come out."""
    step = TrainingStep(OURS, TASK)
    plain = classifier(OURS, TASK)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(plain.model(normalise(step.images, (0.5,) * 3, (0.5,) * 3)), step.labels).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert len(step.run(2)) == 2
    for ours, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_step_that_is_fed_learns_from_those_images() -> None:
    """As batches lie in memory, (b, h, w, c): the step's own memory keeps its place, which a recorded step reads."""
    fed, plain = TrainingStep(OURS, TASK), TrainingStep(OURS, TASK)
    fed.images = fed.images.contiguous(memory_format=torch.channels_last)
    own = fed.images.data_ptr()
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    plain.images = images.contiguous()
    for _ in range(2):
        fed.feed(images)
        plain.run(1)
    assert fed.images.data_ptr() == own
    assert fed.images.stride() == images.stride()
    for ours, theirs in zip(fed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_latency_answers_with_the_five_likeliest() -> None:
    step = latency_step(OURS, replace(TASK, work="latency", batch=1))
    logits = step.outputs().logits
    assert step._once() == logits[0].topk(5).indices.tolist()  # type: ignore[attr-defined]
    assert len(step.run(3)) == 3


def test_one_picture_s_answers_must_be_those_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest class as the last of five."""
    step = latency_step(OURS, replace(TASK, work="latency", batch=1))
    order = step.outputs().logits[0].argsort(descending=True)
    monkeypatch.setattr(step, "one", lambda host: (order[[8, 7, 6, 5, 0]], None))
    with pytest.raises(WrongAnswers, match=r"vitral \(eager\) does not name"):
        step.outputs()


def test_images_are_random_and_only_ours_are_bytes() -> None:
    ours, theirs = inference_step(OURS, TASK), inference_step(Backend("timm"), TASK)
    assert ours.images.dtype == torch.uint8
    assert theirs.images.dtype == torch.float32
    assert ours.images.float().std() > 50
    torch.testing.assert_close(theirs.images, ours.images.float() / 127.5 - 1)


# The gate


@pytest.mark.parametrize("make", [training_step, inference_step])
def test_the_gate_opens_for_the_model_itself(make) -> None:
    task = TASK if make is training_step else replace(TASK, work="infer")
    found = parity.check(make(OURS, task), OURS, task)
    assert found.logits < 1e-5
    assert found.gradients < 1e-5
    assert found.single < 1e-4


def test_the_gate_allows_for_half_precision_but_not_as_float32() -> None:
    step = training_step(OURS, TASK)
    plain = parity.plain_outputs(classifier(OURS, TASK), step, learning=True)
    model = classifier(OURS, TASK)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(step.images)
    F.cross_entropy(logits.float(), step.labels).backward()
    half = Outputs(logits.detach(), {name: weight.grad for name, weight in named_gradients(model)})
    found = parity.compare(half, plain, parity.TOLERANCES["bfloat16"], "half")
    assert found.logits > 1e-4
    with pytest.raises(WrongAnswers, match="half is not the plain float32 model"):
        parity.compare(half, plain, parity.TOLERANCES["float32"], "half")


def _scaled(outputs: Outputs) -> Outputs:
    return outputs._replace(logits=outputs.logits * 1.05)


def _one_gradient_lost(outputs: Outputs) -> Outputs:
    """One bias's gradient is zero: a thousandth of the whole."""
    name = next(name for name in outputs.gradients if name.endswith("blocks.0.mlp.output.bias"))
    return outputs._replace(gradients={**outputs.gradients, name: torch.zeros_like(outputs.gradients[name])})


def _one_gradient_missing(outputs: Outputs) -> Outputs:
    return outputs._replace(gradients=dict(list(outputs.gradients.items())[1:]))


def _not_a_number(outputs: Outputs) -> Outputs:
    return outputs._replace(gradients={name: value * float("nan") for name, value in outputs.gradients.items()})


@pytest.mark.parametrize("plant", [_scaled, _one_gradient_lost, _one_gradient_missing, _not_a_number])
def test_the_gate_catches_planted_errors(plant) -> None:
    step = training_step(OURS, TASK)
    plain = parity.plain_outputs(classifier(OURS, TASK), step, learning=True)
    with pytest.raises(WrongAnswers):
        parity.compare(plant(step.outputs()), plain, parity.TOLERANCES["bfloat16"], "planted")


def test_wrong_answers_end_a_race_without_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(self: Worker, task: Task) -> dict[str, float]:
        raise WorkerFailed("wrong", "vitral (eager) is not the plain float32 model")

    monkeypatch.setattr(Worker, "__init__", lambda self, backend: None)
    monkeypatch.setattr(Worker, "close", lambda self: None)
    monkeypatch.setattr(Worker, "gate", wrong)
    with pytest.raises(WrongAnswers, match="not the plain"):
        benchmark("train", model="ViT-Ti/16@32", batch=2, against=(), out=tmp_path / "r.json", device="cpu")
    assert list(tmp_path.iterdir()) == []


# The protocol, with real processes: importing torch takes seconds, so few of them


def test_a_race_end_to_end_and_a_later_call_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes: the gate's, ours, a peer's. Then the same file gets rows of another kind."""
    pytest.importorskip("torchvision")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers" / "repair"), *sys.path])
    )
    monkeypatch.setattr(runner, "_TURN", 0.1)
    out, told = tmp_path / "results.json", []
    found = benchmark(
        "train",
        model="ViT-Ti/16@32",
        batch=2,
        against=("torchvision",),
        rounds=2,
        out=out,
        device="cpu",
        on_event=lambda event: told.append(getattr(event, "text", "")),
    )
    assert {one.library for one in found.rows} == {"vitral", "torchvision"}
    for one in found.rows:
        assert 0 < one.low <= one.seconds <= one.high
        assert one.samples >= 2
        assert one.cold_seconds > one.seconds
        assert 0 < one.share < 1
        assert 2 * one.macs == training_flops(parse("ViT-Ti/16@32"), images=2, epochs=1)
    assert any("gradients within" in sentence for sentence in told)
    [(ours, compared)] = found.ratios()
    theirs = next(one for one in found.rows if one.library == "torchvision")
    assert compared == theirs.seconds / ours.seconds

    older = row(facts=ours.facts, settings="compile", model=ours.model, batch=2)
    write_rows(out, merged(read_rows(out), [older]))
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert found.page.parent == tmp_path
    assert "torchvision" in found.page.read_text()


def test_a_child_answers_its_own_mistakes_and_goes_on() -> None:
    with Worker(Backend("timm", "eager")) as worker:
        with pytest.raises(WorkerFailed, match="no such model") as refused:
            worker.ask("build", backend={"library": "timm"}, task={**vars(TASK), "model": "R50x1", "depth": 0})
        assert refused.value.kind == "mistake"
        with pytest.raises(WorkerFailed, match="AttributeError") as failed:
            worker.ask("dance")
        assert failed.value.kind == "failed"
        os.kill(worker.pid, 9)
        with pytest.raises(WorkerFailed, match="its process ended") as gone:
            worker.ask("rate")
        assert gone.value.kind == "gone"


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The child is not even asked anything: it ends because its input does."""
    code = "import sys, time; from vitral.bench.worker import Worker; from vitral.bench.backends import Backend\n"
    code += "worker = Worker(Backend('vitral')); sys.stdout.write(f'{worker.pid}\\n'); sys.stdout.flush()\n"
    code += "time.sleep(60)"
    source = str(Path(runner.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """A zombie, which nobody in a container may reap, is dead too."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_request_is_answered_without_a_process() -> None:
    child = Child()
    task = {**vars(TASK), "work": "infer"}
    built = answer(child, json.dumps({"do": "build", "backend": {"library": "vitral"}, "task": task}))
    assert built["ok"]["facts"]["torch"] == torch.__version__
    assert len(answer(child, '{"do": "run", "count": 3}')["ok"]["seconds"]) == 3
    assert answer(child, '{"do": "rate"}')["ok"]["flops"] > 1e8
    assert answer(child, '{"do": "details"}') == {"ok": {}}
    assert answer(child, '{"do": "memory"}')["ok"]["bytes"] >= 0


class FakePlayer:
    """Turns without a process: who ran when."""

    log: list[str]

    def __init__(self, backend: Backend) -> None:
        self.backend, self.began = backend, time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *rest: object) -> None: ...

    def gate(self, task: Task):
        return {"logits": 0.0, "gradients": 0.0, "tolerance": 1.0}

    def build(self, task: Task):
        return {"facts": {"hardware": "none"}}

    def ask(self, what: str):
        return {"memory": {"bytes": 1}, "rate": {"flops": 1e9}, "details": {}}[what]

    def run(self, count: int) -> list[float]:
        if self.backend.library == "timm" and self.log.count("timm") == 3:
            raise WorkerFailed("failed", "out of memory")
        self.log.append(self.backend.library)
        return [0.25] * count


def test_contestants_take_turns_and_one_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePlayer.log = []
    monkeypatch.setattr(runner, "Worker", FakePlayer)
    names = ("vitral", "timm", "torchvision")
    found = runner.race(TASK, [Backend(name) for name in names], rounds=3, tell=lambda sentence: None)
    warm = 2 * len(names)
    # The second round runs backwards; timm runs out of memory there.
    assert FakePlayer.log[warm:] == [*names, "torchvision", "vitral", "vitral", "torchvision"]
    assert found.failed == ["timm (eager) did not finish: out of memory."]
    assert {one.library: one.samples for one in found.rows} == {"vitral": 12, "torchvision": 12}


def test_a_loader_has_its_whole_turn_and_a_step_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that take 0.5 s to start and then deliver a batch every 10 ms: 350 batches fill 4 s."""

    class Loader(FakePlayer):
        def run(self, count: int) -> list[float]:
            return [0.01] * count if self.task.work == "train" else [(0.5 + 0.01 * count) / count]

        def build(self, task: Task):
            self.task = task
            return super().build(task)

    monkeypatch.setattr(runner, "Worker", Loader)
    steps = runner.warm(Loader(OURS), replace(TASK, work="data"), rounds=3).steps  # type: ignore[arg-type]
    assert 3.0 < 0.5 + 0.01 * steps < 5.5
    assert runner.warm(Loader(OURS), TASK, rounds=3).steps == 50  # type: ignore[arg-type]


def test_who_fails_at_the_details_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakePlayer):
        def ask(self, what: str):
            if what == "details":
                raise WorkerFailed("failed", "out of memory")
            return super().ask(what)

    FakePlayer.log = []
    monkeypatch.setattr(runner, "Worker", Silent)
    found = runner.race(replace(TASK, work="data"), [OURS], rounds=1, tell=lambda sentence: None)
    assert [one.details for one in found.rows] == [{}]
    assert found.failed == ["vitral (eager) tells no details: out of memory."]


# Rows


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_quartiles(values: list[float]) -> None:
    low, median, high = spread(values)
    assert median == pytest.approx(statistics.median(values))
    assert (low, high) == pytest.approx(tuple(np.quantile(values, (0.25, 0.75))))


def test_rows_survive_the_file_and_replace_their_like(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_rows(path) == []
    write_rows(path, [row(), row(library="timm", settings="compile", seconds=0.25)])
    known = merged(read_rows(path), [row(seconds=0.125), row(batch=8), row(facts={"hardware": "another"})])
    assert len(known) == 4
    assert [one.seconds for one in known if one.place == row().place and one.race == row().race] == [0.125]
    assert json.loads(path.read_text())["rows"][0]["images_per_second"] == 4 / 0.5


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"loss": 1}')
    with pytest.raises(UserError, match="not a file of results"):
        benchmark("train", out=path, device="cpu")
    assert path.read_text() == '{"loss": 1}'


def test_ratios_are_against_the_best_peer_of_the_same_race() -> None:
    ours = row()
    slow, fast = row(library="timm", seconds=2.0), row(library="timm", settings="compile", seconds=1.0, call="later")
    elsewhere = row(library="timm", seconds=0.01, facts={"hardware": "another"})
    assert ratio(ours, [ours, slow, fast, elsewhere]) == (2.0, False)
    assert ratio(ours, [ours, slow]) == (4.0, True)
    assert ratio(ours, [ours, elsewhere]) is None
    assert ratio(slow, [ours, slow]) is None


def test_numbers_that_follow_from_others() -> None:
    assert row().per_second == 8
    assert row().share == pytest.approx(2 * 1e9 / 0.5 / 2e10)
    assert row(macs=0).share == 0


def test_the_page_tells_hardware_calls_and_ratios() -> None:
    rows = [row(), row(library="timm", seconds=1.0, call="2026-02-03 00:00:00", details={"p99 ms": 12.5})]
    text = page(rows, remarks=["All is well."], figures=["growth.svg"])
    assert page_name(rows) == "abacus-r-2000-2026-02-03"
    assert "| 2.00* |" in text
    assert "p99 ms 12.5" in text
    assert "- All is well." in text
    assert "![growth](sweep.svg)" in text
    assert all(len(cells) == len(COLUMNS) for cells in table(rows))


def test_remarks_name_the_best_peer_its_memory_and_percentiles() -> None:
    """By our best row and theirs, each race apart."""
    ours = [row(settings="compile", seconds=0.8), row(settings="graphs", seconds=0.5, peak_bytes=3 * 2**30)]
    peers = [row(library="timm", seconds=1.0, peak_bytes=4 * 2**30), row(library="transformers", seconds=2.0)]
    percentiles = {"p50 ms": 1.0, "p95 ms": 2.0, "p99 ms": 3.0}
    answers = [row(work="latency", batch=1, peak_bytes=0, details=percentiles)]
    answers += [replace(answers[0], library="timm", call="later", seconds=0.4, details=dict.fromkeys(percentiles, 4.0))]
    assert remarks([*ours, *peers, *answers]) == [
        "train, ViT-B/16, batch 4: vitral (graphs) is 2.00 times as fast as timm (eager), "
        "with 0.75 times its peak memory.",
        "latency, ViT-B/16, batch 1: vitral (eager) is 0.80 times as fast as timm (eager), p50 1.00 against 4.00, "
        "p95 2.00 against 4.00, p99 3.00 against 4.00 ms, measured in different calls.",
    ]
    assert remarks(ours) == remarks(peers) == []


@pytest.mark.parametrize(
    ("work", "options", "word"),
    [
        ("swim", {}, "no bench"),
        ("train", {"rounds": 0}, "above 0"),
        ("train", {"batch": 0}, "above 0"),
        ("data", {"data": "nowhere", "workers": -1}, "0 or more"),
        ("growth", {"against": ("timm",)}, "growth times vitral alone"),
        ("growth", {"settings": ("eager", "compile")}, "growth times vitral alone"),
        ("data", {}, "--data"),
        ("data", {"data": "nowhere"}, "nowhere"),
        ("train", {"model": "ViT-Q/16"}, "ViT-Q/16"),
        ("train", {"device": "cpu:0"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_mistakes_are_told_before_anything_starts(work, options, word, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"out": tmp_path / "r.json", "device": "cpu", **options}
    with pytest.raises(UserError, match=word):
        benchmark(work, **chosen)


# Growth


def test_what_grows_faster_than_the_arithmetic_is_named() -> None:
    linear = [sweep.Point("batch", size, 0.1 * size, 1000 * size) for size in (1, 2, 4)]
    square = [sweep.Point("image", size, 0.1 * size**2, 1000 * size) for size in (64, 128)]
    assert sweep.too_steep(linear) == []
    assert sweep.steepness(square) == [2.0]
    assert sweep.too_steep([*linear, *square]) == ["up to image 128 time grows 2.00 times as fast as the arithmetic."]


def test_a_slower_clock_is_not_growth() -> None:
    """Twice the work in four times the time, on a machine that had half of its speed left."""
    kinds = [{"macs": 100, "seconds": 1.0, "rate": 8e9}, {"macs": 200, "seconds": 4.0, "rate": 4e9}]
    rows = [row(work="growth, batch", details={"value": size + 1}, **kind) for size, kind in enumerate(kinds)]
    assert sweep.steepness(sweep.points(rows)) == [1.0]


def test_growth_goes_on_along_the_other_axes_when_memory_ends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, until it fails: the next goes on with what is left."""
    started = []

    class Small(FakePlayer):
        def __enter__(self):
            started.append(len(FakePlayer.log))
            return self

        def build(self, task: Task):
            if task.image > 128:
                raise WorkerFailed("failed", "out of memory")
            return super().build(task)

    FakePlayer.log = []
    monkeypatch.setattr(sweep, "Worker", Small)
    monkeypatch.setattr(sweep, "_LONGEST", 1e9)
    rows = sweep.measure(replace(TASK, image=0, depth=0), OURS, lambda sentence: None)
    found = sweep.points(rows)
    assert len(started) == 2
    assert list(dict.fromkeys(point.axis for point in found)) == ["image", "batch", "depth"]
    assert {one.cold_seconds for one in rows} == {0}
    assert [point.value for point in found if point.axis == "image"] == [64, 128]
    assert [point.value for point in found if point.axis == "batch"] == list(sweep.BATCHES)
    assert [point.value for point in found if point.axis == "depth"] == list(sweep.DEPTHS)
    batches = [point.macs for point in found if point.axis == "batch"]
    assert batches == [batches[0] * size for size in sweep.BATCHES]


def test_growth_ends_where_the_next_step_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of any size takes a quarter of a second here: by the arithmetic, 64 images after 4 take four seconds."""
    FakePlayer.log = []
    monkeypatch.setattr(sweep, "Worker", FakePlayer)
    monkeypatch.setattr(sweep, "BATCHES", (1, 4, 64))
    found = sweep.points(sweep.measure(replace(TASK, image=0, depth=0), OURS, lambda sentence: None))
    assert [point.value for point in found if point.axis == "batch"] == [1, 4]


def test_only_the_last_growth_is_drawn() -> None:
    """A later call may have measured another model."""
    old = [row(work="growth, batch", model="ViT-L/16", details={"value": size}) for size in (1, 2)]
    new = [replace(one, model="ViT-S/16", call="2027") for one in old]
    assert sweep.newest([*old, *new, row()]) == new
    assert sweep.title(new) == "A training step of ViT-S/16 on Abacus (R) 2000"
    assert sweep.newest([row()]) == sweep.points([row()]) == []


@given(st.floats(1e-3, 1e6), st.floats(3, 1e9))
def test_ticks_are_few_round_and_inside(low: float, factor: float) -> None:
    found = ticks(low, low * factor)
    assert 1 <= len(found) <= 10
    assert all(low <= tick <= low * factor for tick in found)
    assert {f"{tick:e}"[:8] for tick in found} <= {"1.000000", "2.000000", "5.000000"}


@pytest.mark.parametrize(("low", "high", "found"), [(2.1, 4.9, [2.1, 4.9]), (3, 3, [3]), (1.9, 2.1, [2])])
def test_an_axis_without_a_round_number_shows_its_ends(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == found


def test_rows_of_other_pictures_are_kept_apart() -> None:
    small, large = (row(work="data", settings="loader", details={"megapixels": size}) for size in (0.0873, 0.1875))
    theirs = replace(small, library="torchvision", seconds=4 * small.seconds)
    rows = merged([small], [large, theirs])
    assert len(rows) == 3
    assert ratio(small, rows) is not None
    assert ratio(large, rows) is None
    assert [cells[0] for cells in table(rows)] == ["data, 0.087 megapixels"] * 2 + ["data, 0.188 megapixels"]
    assert remarks(rows)[0].startswith("data, 0.087 megapixels, ViT-")


def test_the_chart_is_a_picture_with_every_point() -> None:
    points = [sweep.Point("batch", size, 0.1 * size, 1000 * size) for size in (1, 2, 4)]
    root = ElementTree.fromstring(chart(points, "a < b"))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 3
    lines = [element.get("points") for element in root.iter() if element.tag.endswith("polyline")]
    assert lines[0] == lines[1]  # time that grows as the arithmetic does lies on its line


# Files


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(6):
        path = folder / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_png(rng.integers(0, 256, (40, 50, 3), np.uint8)))
    return folder


@pytest.mark.parametrize("library", ["vitral", "torchvision"])
def test_loaders_deliver_what_is_asked_for(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    task = replace(TASK, work="data", folder=str(pictures))
    step = LoadingStep(Backend(library, "loader"), task)
    [seconds] = step.run(3)
    assert seconds > 0
    found = step.details()
    assert ("decode/s" in found) == (library == "vitral")
    assert found["megapixels"] == pytest.approx(40 * 50 / 1e6)


@pytest.mark.parametrize("library", ["vitral", "torchvision"])
def test_training_from_files_is_put_beside_synthetic_images(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    task = replace(TASK, work="data", folder=str(pictures))
    found = training_from_files(Backend(library, "loader"), task, alone=1e-6)
    assert found["of synthetic speed"] == pytest.approx(found["from files/s"] / found["synthetic/s"])
    assert 0 < found["share waiting"] < 1
    [said] = remarks([row(work="data", library=library, settings="loader", details={"workers": 0, **found})])
    assert f"with {library} (loader), training from files runs at {found['of synthetic speed']:.0%}" in said


def test_no_more_is_trained_on_than_a_loader_makes_alone(pictures: Path) -> None:
    """Batches that waited for the first step hide how slow their workers are."""
    task = replace(TASK, work="data", folder=str(pictures))
    found = training_from_files(Backend("vitral", "loader"), task, alone=1e3)
    assert found["from files/s"] == task.batch / 1e3
    assert 0.9 < found["share waiting"] < 1


def test_a_loader_s_start_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that take 100 s to start and 30 s for each of their first three batches, then hand over two at once
    every 4 s, and are slow at the end."""
    clock = [0.0]
    monkeypatch.setattr(loading.time, "perf_counter", lambda: clock[0])

    def batches(backend: Backend, task: Task, count: int, *, training: bool) -> Iterator[torch.Tensor]:
        clock[0] += 100
        for number in range(count):
            clock[0] += (number % 2 == 0) * (30 if number < 6 else 4 if number < 12 else 50)
            yield torch.zeros(1)

    monkeypatch.setattr(loading, "_batches", batches)
    step = LoadingStep(Backend("vitral", "loader"), replace(TASK, work="data", workers=2))
    assert step.run(5) == [2.0]
    assert step.best == 2.0


def test_waiting_is_the_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that take 3 s to come and steps of 1 s, by a clock of our own; the first two do not count."""
    clock = [0.0]
    monkeypatch.setattr(loading.time, "perf_counter", lambda: clock[0])

    class Slow:
        def feed(self, images: torch.Tensor) -> None:
            clock[0] += 1 if images else 10

    def batches():
        for number in range(8):
            clock[0] += 30 if number < 2 else 3
            yield torch.tensor(number >= 2)

    assert feed(Slow(), batches(), 2, "cpu") == (4.0, 0.75)


@pytest.mark.parametrize("library", ["vitral", "torchvision"])
def test_files_are_classified(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    [seconds] = PredictionStep(Backend(library), replace(TASK, work="predict", folder=str(pictures))).run(2)
    assert seconds > 0


def test_starts_are_timed_in_turns_after_one_that_does_not_count(tmp_path: Path) -> None:
    told: list[str] = []
    note = f"open({str(tmp_path / 'log')!r}, 'a').write"
    words = {name: [sys.executable, "-S", "-c", f"{note}({name[0]!r})"] for name in ("ours", "theirs")}
    found = start._rounds(words, 2, told.append)
    assert (tmp_path / "log").read_text() == "ot" * 3
    assert {name: len(seconds) for name, seconds in found.items()} == {"ours": 2, "theirs": 2}
    words["theirs"] = [sys.executable, "-S", "-c", "raise SystemExit('boom')"]
    assert list(start._rounds(words, 1, told.append)) == ["ours"]
    assert told[-2].startswith("theirs gave no answer (boom)")
    with pytest.raises(UserError, match=r"vitral gave no answer .*boom"):
        start._rounds({"vitral": words["theirs"]}, 1, told.append)


def test_both_starts_get_weights_that_answer_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = start._commands(tmp_path, "ViT-Ti/16@32")
    own, picture, folder = Path(words["vitral"][4]), Path(words["vitral"][5]), words["transformers"][3]
    named = vitral.predict(own, picture, top=1).rows[0]
    theirs = transformers.pipeline("image-classification", model=folder)(str(picture))
    assert theirs[0]["label"] == named.names[0]
    assert theirs[0]["score"] == pytest.approx(named.probabilities[0], rel=0.05)
