"""Benchmarks: worker processes, timing in turns, the parity check, result files and pages."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from vitral.bench import backends, loading
from vitral.bench import benchmark as runner
from vitral.bench.backends import Backend, Workload, build_model, default_modes, select_backends
from vitral.bench.loading import LoadingStep, PredictionStep, time_feeding, time_training_from_files
from vitral.bench.parity import TOLERANCES, check_parity, compare, reference_outputs
from vitral.bench.results import (
    COLUMNS,
    BenchmarkRow,
    merge_rows,
    page,
    page_name,
    quartiles,
    read_rows,
    speedup,
    summarize,
    table,
    write_rows,
)
from vitral.bench.steps import (
    InferenceStep,
    ParityError,
    StepOutputs,
    TrainingStep,
    float32_model,
    parameters_with_gradient,
)
from vitral.bench.worker import RequestHandler, Worker, WorkerFailed, handle_request, make_step
from vitral.cost import training_flops
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.events import Note, ignore_events
from vitral.models.model import normalize
from vitral.names import parse

WORKLOAD = Workload("train", "ViT-Ti/16", 2, "cpu", image=32, depth=2, classes=10)
OURS = Backend("vitral")


def row(**changes: Any) -> BenchmarkRow:
    default = BenchmarkRow(
        work="train",
        model="ViT-B/16",
        batch=4,
        library="vitral",
        settings="eager",
        device="cpu",
        precision="float32",
        seconds=0.5,
        seconds_q1=0.4,
        seconds_q3=0.6,
        samples=10,
        macs=10**9,
        matmul_flops=2e10,
        peak_bytes=2**30,
        startup_seconds=1.0,
        started_at="2026-01-02 03:04:05",
        environment={"hardware": "Abacus (R) 2000"},
    )
    return replace(default, **changes)


# Selection of backends


def test_every_setting_of_every_installed_library_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"timm", "transformers"}
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name if name in installed else None)
    cuda = replace(WORKLOAD, device="cuda")
    peers = ("timm", "torchvision", "transformers")
    selected, excluded = select_backends(cuda, peers, ("compile", "graphs"), ("flash", "cudnn"))
    assert len(selected) == 2 + 2 * 2 * 2  # ours has one mode, and two kinds of residual stream
    assert selected[:2] == [Backend("vitral", "graphs"), Backend("vitral", "graphs", float32_residual=True)]
    assert [sentence.split()[0] for sentence in excluded] == ["torchvision"]
    assert "pip install torchvision" in excluded[0]
    compiled, _ = select_backends(cuda, ("timm",), ("eager", "compile"), ("flash", "cudnn"))
    assert [backend.label for backend in compiled if backend.library == "vitral"] == [
        "vitral (eager)",
        "vitral (compile)",
        "vitral (eager, float32 residual)",
        "vitral (compile, float32 residual)",
    ]


def test_rows_in_fp8_are_summarized_apart() -> None:
    rows = [
        row(seconds=0.4),
        row(seconds=0.2, settings="fp8", precision="fp8"),
        row(seconds=0.6, library="timm"),
        row(seconds=0.3, library="timm", settings="torchao fp8", precision="fp8"),
    ]
    ratios = [speedup(each, rows) for each in rows]
    assert ratios == [pytest.approx(1.5), pytest.approx(1.5), None, None]
    assert len(summarize(rows)) == 2


def test_fp8_is_selected_for_wide_models_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backends, "has_fp8", lambda device: device.type == "cuda")

    def labels(model: str, device: str = "cuda") -> list[str]:
        workload = Workload("infer", model, 8, device)
        return [one.label for one in select_backends(workload, ("timm",), ("eager",), ("auto",))[0]]

    assert labels("ViT-B/16") == ["vitral (eager)", "vitral (eager, fp8)", "timm (eager)", "timm (eager, torchao fp8)"]
    assert labels("ViT-S/16") == labels("ViT-B/16", "cpu") == ["vitral (eager)", "timm (eager)"]


@pytest.mark.parametrize(
    ("against", "modes", "attentions", "word"),
    [
        (("timn",), ("eager",), ("auto",), "timn"),
        ((), ("fast",), ("auto",), "fast"),
        ((), ("graphs",), ("auto",), "NVIDIA"),
        ((), ("eager",), ("flash",), "NVIDIA"),
    ],
)
def test_unknown_or_unsupported_settings_are_refused(against, modes, attentions, word) -> None:
    with pytest.raises(UserError, match=word):
        select_backends(WORKLOAD, against, modes, attentions)


def test_a_peer_without_the_model_is_excluded() -> None:
    hybrid = replace(WORKLOAD, model="R50+ViT-B/16", depth=0, image=0)
    selected, excluded = select_backends(hybrid, ("transformers",), ("eager",), ("auto",))
    assert [backend.library for backend in selected] == ["vitral"]
    assert "R50+ViT-B/16" in excluded[0]


def test_models_are_compiled_on_a_gpu_only() -> None:
    assert default_modes("cuda") == ("compile", "graphs")
    assert default_modes("cpu") == ("eager",)


@pytest.mark.parametrize("float32", [False, True])
def test_the_residual_stream_is_float32_in_one_row(float32: bool) -> None:
    model = float32_model(Backend("vitral", float32_residual=float32), WORKLOAD)
    seen: list[torch.dtype] = []
    for block in model.get_submodule("model.blocks").children():
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert set(seen) == {torch.float32 if float32 else torch.bfloat16}


@pytest.mark.parametrize("library", ["timm", "transformers", "torchvision"])
def test_peers_have_our_architecture(library: str) -> None:
    """Exactly as many parameters as ours, and logits that are not all zero."""
    pytest.importorskip(library)
    model = build_model(Backend(library), WORKLOAD.architecture).eval()
    ours = build_model(Backend("vitral"), WORKLOAD.architecture)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.inference_mode():
        logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    assert logits.std() > 0


@pytest.mark.parametrize("name", ["R26x1", "R26+ViT-Ti/32", "R+ViT-Ti/16"])
def test_timm_has_resnets_and_hybrids(name: str) -> None:
    """Exactly as many parameters as ours."""
    pytest.importorskip("timm")
    workload = replace(WORKLOAD, model=name, image=64, depth=0)
    assert not backends._unsupported_reason("timm", workload)
    assert backends._unsupported_reason("torchvision", workload)
    ours, model = (build_model(Backend(library), workload.architecture) for library in ("vitral", "timm"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.inference_mode():
        assert model.eval()(torch.randn(2, 3, 64, 64)).std() > 0


@pytest.mark.parametrize(
    ("library", "mode"), [("onnxruntime", "float32"), ("onnxruntime", "int8"), ("openvino", "float32")]
)
def test_an_exported_model_computes_what_ours_does(library: str, mode: str) -> None:
    pytest.importorskip(library)
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    ours = build_model(Backend("vitral"), WORKLOAD.architecture).eval()
    torch.manual_seed(0)
    exported = build_model(Backend(library, mode), WORKLOAD.architecture)
    images = torch.rand(3, 3, 32, 32) * 2 - 1
    with torch.inference_mode():
        expected, logits = ours(images), exported(images)
    difference = (logits - expected).norm() / expected.norm()
    assert difference < {"float32": 1e-5, "int8": 0.1}[mode]
    assert (difference > 1e-4) == (mode == "int8")


def test_exported_models_run_on_a_cpu_in_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime", "onnxscript"}
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name if name in installed else None)
    peers = ("onnxruntime", "openvino")
    selected, excluded = select_backends(replace(WORKLOAD, work="infer"), peers, ("eager",), ("auto",))
    labels = ["vitral (int8)", "onnxruntime (float32)", "onnxruntime (int8)"]
    assert [backend.label for backend in selected[1:]] == labels
    assert "pip install openvino" in excluded[0]
    assert len(select_backends(WORKLOAD, peers, ("eager",), ("auto",))[0]) == 1  # nobody else trains


@pytest.mark.parametrize("family", ["DINOv3", "CLIP", "OpenCLIP"])
def test_timm_has_the_later_families(family: str) -> None:
    """Exactly as many parameters as ours, and a name of their own in rows."""
    pytest.importorskip("timm")
    workload = replace(WORKLOAD, model=f"{family}-Ti/16", image=0, depth=0)
    assert workload.model_name == f"{family}-Ti/16"
    assert replace(workload, image=32).model_name == f"{family}-Ti/16@32"
    ours, model = (build_model(Backend(library), workload.architecture) for library in ("vitral", "timm"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.inference_mode():
        assert model.eval()(torch.randn(2, 3, 224, 224)).std() > 0
    backends, _ = select_backends(workload, ("timm", "transformers"), ("eager",), ("auto",))
    assert [backend.library for backend in backends] == ["vitral", "timm"]


# Steps


def test_a_training_step_equals_a_plain_loop() -> None:
    """Forward, cross-entropy, backward, clipping to norm 1, AdamW give the same weights."""
    step = TrainingStep(OURS, WORKLOAD)
    plain = float32_model(OURS, WORKLOAD)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(plain.model(normalize(step.images, (0.5,) * 3, (0.5,) * 3)), step.labels).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert len(step.run(2)) == 2
    for ours, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_feeding_a_step_trains_on_those_images() -> None:
    """With the memory layout of batches, (batch, h, w, c); the step's buffer, which a CUDA graph reads, stays."""
    fed, plain = TrainingStep(OURS, WORKLOAD), TrainingStep(OURS, WORKLOAD)
    fed.images = fed.images.contiguous(memory_format=torch.channels_last)
    buffer = fed.images.data_ptr()
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    plain.images = images.contiguous()
    for _ in range(2):
        fed.feed(images)
        plain.run(1)
    assert fed.images.data_ptr() == buffer
    assert fed.images.stride() == images.stride()
    for ours, theirs in zip(fed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_latency_step_returns_the_top_five_classes() -> None:
    step = make_step(OURS, replace(WORKLOAD, work="latency", batch=1))
    logits = step.outputs().logits
    assert step._once() == logits[0].topk(5).indices.tolist()
    assert len(step.run(3)) == 3


def test_a_latency_step_must_return_the_classes_of_its_largest_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity check fails where the top class comes last of five."""
    step = make_step(OURS, replace(WORKLOAD, work="latency", batch=1))
    order = step.outputs().logits[0].argsort(descending=True)
    monkeypatch.setattr(step, "classifier", lambda host: (order[[8, 7, 6, 5, 0]], None))
    with pytest.raises(ParityError, match=r"vitral \(eager\) does not return"):
        step.outputs()


def test_images_are_random_and_only_ours_are_uint8() -> None:
    ours, theirs = InferenceStep(OURS, WORKLOAD), InferenceStep(Backend("timm"), WORKLOAD)
    assert ours.images.dtype == torch.uint8
    assert theirs.images.dtype == torch.float32
    assert ours.images.float().std() > 50
    torch.testing.assert_close(theirs.images, ours.images.float() / 127.5 - 1)


# Parity check


@pytest.mark.parametrize("make", [TrainingStep, InferenceStep])
def test_the_model_itself_passes_the_parity_check(make) -> None:
    workload = WORKLOAD if make is TrainingStep else replace(WORKLOAD, work="infer")
    result = check_parity(make(OURS, workload))
    assert result.logits < 1e-5
    assert result.gradients < 1e-5
    assert result.worst_gradient < 1e-4


def test_the_parity_check_tolerates_bfloat16_but_not_as_float32() -> None:
    step = TrainingStep(OURS, WORKLOAD)
    plain = reference_outputs(step)
    model = float32_model(OURS, WORKLOAD)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(step.images)
    F.cross_entropy(logits.float(), step.labels).backward()
    half = StepOutputs(logits.detach(), {name: weight.grad for name, weight in parameters_with_gradient(model)})
    result = compare(half, plain, TOLERANCES["bfloat16"], "half")
    assert result.logits > 1e-4
    with pytest.raises(ParityError, match="half differs from the float32 model"):
        compare(half, plain, TOLERANCES["float32"], "half")


def _scaled(outputs: StepOutputs) -> StepOutputs:
    return outputs._replace(logits=outputs.logits * 1.05)


def _one_gradient_lost(outputs: StepOutputs) -> StepOutputs:
    """The gradient of one bias is zero: a thousandth of the whole norm."""
    name = next(name for name in outputs.gradients if name.endswith("blocks.0.mlp.output.bias"))
    return outputs._replace(gradients={**outputs.gradients, name: torch.zeros_like(outputs.gradients[name])})


def _one_gradient_missing(outputs: StepOutputs) -> StepOutputs:
    return outputs._replace(gradients=dict(list(outputs.gradients.items())[1:]))


def _not_a_number(outputs: StepOutputs) -> StepOutputs:
    return outputs._replace(gradients={name: value * float("nan") for name, value in outputs.gradients.items()})


@pytest.mark.parametrize("plant", [_scaled, _one_gradient_lost, _one_gradient_missing, _not_a_number])
def test_the_parity_check_finds_planted_errors(plant) -> None:
    step = TrainingStep(OURS, WORKLOAD)
    plain = reference_outputs(step)
    with pytest.raises(ParityError):
        compare(plant(step.outputs()), plain, TOLERANCES["bfloat16"], "planted")


def test_a_failed_parity_check_ends_a_benchmark_without_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: Worker, method: str, workload: Workload) -> dict[str, float]:
        assert method == "check_parity"
        raise WorkerFailed("parity", "vitral (eager) differs from the float32 model")

    monkeypatch.setattr(Worker, "__init__", lambda self, backend: None)
    monkeypatch.setattr(Worker, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(Worker, "call", fail)
    with pytest.raises(ParityError, match="differs from the float32 model"):
        benchmark("train", model="ViT-Ti/16@32", batch=2, against=(), out=tmp_path / "r.json", device="cpu")
    assert list(tmp_path.iterdir()) == []


# Real processes: importing torch takes seconds, so few of them


def test_a_benchmark_end_to_end_and_a_later_one_adds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes: parity check, ours, a peer's. Then rows of other settings are added to the same file."""
    pytest.importorskip("torchvision")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "helpers" / "repair"), *sys.path])
    )
    monkeypatch.setattr(runner, "_TURN_SECONDS", 0.1)
    out, events = tmp_path / "results.json", []
    result = benchmark(
        "train",
        model="ViT-Ti/16@32",
        batch=2,
        against=("torchvision",),
        rounds=2,
        out=out,
        device="cpu",
        on_event=events.append,
    )
    assert {measured.library for measured in result.rows} == {"vitral", "torchvision"}
    for measured in result.rows:
        assert 0 < measured.seconds_q1 <= measured.seconds <= measured.seconds_q3
        assert measured.samples >= 2
        assert measured.startup_seconds > 0
        assert 0 < measured.matmul_share < 1
        assert 2 * measured.macs == training_flops(parse("ViT-Ti/16@32"), images=2, epochs=1)
    assert any("gradients within" in event.text for event in events)
    [(ours, ratio)] = result.speedups()
    theirs = next(measured for measured in result.rows if measured.library == "torchvision")
    assert ratio == theirs.seconds / ours.seconds

    older = row(environment=ours.environment, settings="compile", model=ours.model, batch=2)
    write_rows(out, merge_rows(read_rows(out), [older]))
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert result.page.parent == tmp_path
    assert "torchvision" in result.page.read_text()


def test_a_worker_reports_errors_and_goes_on() -> None:
    with Worker(Backend("transformers", "eager")) as worker:
        with pytest.raises(WorkerFailed, match="no such model") as refused:
            worker.call("build", replace(WORKLOAD, model="R50x1", depth=0))
        assert refused.value.kind == "usage"
        with pytest.raises(WorkerFailed, match="AttributeError") as failed:
            worker.call("unknown")
        assert failed.value.kind == "error"
        os.kill(worker._process.pid, 9)
        with pytest.raises(WorkerFailed, match="its process ended") as died:
            worker.call("memory")
        assert died.value.kind == "died"


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Even before its first request, as its input ends."""
    code = "import sys, time; from vitral.bench.worker import Worker; from vitral.bench.backends import Backend\n"
    code += "worker = Worker(Backend('vitral')); sys.stdout.write(f'{worker._process.pid}\\n'); sys.stdout.flush()\n"
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
    deadline = time.monotonic() + 120  # a busy machine takes long to import torch, which comes first
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """A zombie, which may stay in a container, counts as dead."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_requests_are_handled() -> None:
    handler = RequestHandler()

    def result(method: str, **arguments: Any) -> Any:
        return handle_request(handler, json.dumps({"method": method, "arguments": arguments}))["result"]

    built = result("build", backend={"library": "vitral"}, workload={**vars(WORKLOAD), "work": "infer"})
    assert built["torch"] == torch.__version__
    assert len(result("run", count=3)) == 3
    assert result("matmul_flops") > 1e8
    assert result("details") == {}
    assert result("memory") >= 0


class FakeWorker(Worker):
    """A worker without a process that logs its turns."""

    log: list[str]

    def __init__(self, backend: Backend) -> None:
        self.backend, self.started = backend, time.perf_counter()

    def __exit__(self, *rest: object) -> None: ...

    def call(self, method: str, workload: Workload | None = None, **arguments: Any) -> Any:
        return {
            "check_parity": {"logits": 0.0, "gradients": 0.0, "tolerance": 1.0},
            "build": {"hardware": "none"},
            "memory": 1,
            "matmul_flops": 1e9,
            "details": {},
        }[method]

    def run(self, count: int) -> list[float]:
        if self.backend.library == "timm" and self.log.count("timm") == 3:
            raise WorkerFailed("error", "out of memory")
        self.log.append(self.backend.library)
        return [0.25] * count


def test_backends_take_turns_and_a_failure_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker.log = []
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    names = ("vitral", "timm", "torchvision")
    rows, failures = runner.run_benchmark(WORKLOAD, [Backend(name) for name in names], rounds=3, on_event=ignore_events)
    warm_up = 2 * len(names)
    # The second round is reversed; timm runs out of memory there.
    assert FakeWorker.log[warm_up:] == [*names, "torchvision", "vitral", "vitral", "torchvision"]
    assert failures == ["timm (eager) did not finish: out of memory."]
    assert {measured.library: measured.samples for measured in rows} == {"vitral": 12, "torchvision": 12}


def test_loaders_fill_their_turn_and_steps_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that take 0.5 s to start and then deliver a batch every 10 ms: 350 batches fill 4 s."""

    class Loader(FakeWorker):
        work = ""

        def run(self, count: int) -> list[float]:
            return [0.01] * count if self.work == "train" else [(0.5 + 0.01 * count) / count]

        def call(self, method: str, workload: Workload | None = None, **arguments: Any) -> Any:
            self.work = workload.work if workload else self.work
            return super().call(method)

    monkeypatch.setattr(runner, "Worker", Loader)
    loader, trainer = Loader(OURS), Loader(OURS)
    runner.warm_up(loader, replace(WORKLOAD, work="data"), rounds=3)
    assert 3.0 < 0.5 + 0.01 * loader.steps < 5.5
    runner.warm_up(trainer, WORKLOAD, rounds=3)
    assert trainer.steps == 50


def test_a_backend_without_details_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeWorker):
        def call(self, method: str, workload: Workload | None = None, **arguments: Any) -> Any:
            if method == "details":
                raise WorkerFailed("error", "out of memory")
            return super().call(method)

    FakeWorker.log = []
    monkeypatch.setattr(runner, "Worker", Silent)
    rows, failures = runner.run_benchmark(replace(WORKLOAD, work="data"), [OURS], rounds=1, on_event=ignore_events)
    assert [measured.details for measured in rows] == [{}]
    assert failures == ["vitral (eager) has no details: out of memory."]


# Rows


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_quartiles(values: list[float]) -> None:
    low, median, high = quartiles(values)
    assert median == pytest.approx(statistics.median(values))
    assert (low, high) == pytest.approx(tuple(np.quantile(values, (0.25, 0.75))))


def test_rows_survive_the_file_and_new_ones_replace_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_rows(path) == []
    write_rows(path, [row(), row(library="timm", settings="compile", seconds=0.25)])
    rows = merge_rows(read_rows(path), [row(seconds=0.125), row(batch=8), row(environment={"hardware": "another"})])
    assert len(rows) == 4
    assert [other.seconds for other in rows if other.identity == row().identity] == [0.125]
    assert json.loads(path.read_text())["rows"][0]["images_per_second"] == 4 / 0.5


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"loss": 1}')
    with pytest.raises(UserError, match="not a file of benchmark results"):
        benchmark("train", out=path, device="cpu")
    assert path.read_text() == '{"loss": 1}'


def test_speedups_are_relative_to_the_best_comparable_peer() -> None:
    ours = row()
    slow, fast = (
        row(library="timm", seconds=2.0),
        row(library="timm", settings="compile", seconds=1.0, started_at="later"),
    )
    elsewhere = row(library="timm", seconds=0.01, environment={"hardware": "another"})
    assert speedup(ours, [ours, slow, fast, elsewhere]) == 2.0
    assert [cells[-1] for cells in table([ours, slow, fast, elsewhere])] == ["2.00*", "", "", ""]
    assert speedup(ours, [ours, slow]) == 4.0
    assert [cells[-1] for cells in table([ours, slow])] == ["4.00", ""]
    assert speedup(ours, [ours, elsewhere]) is None
    assert speedup(slow, [ours, slow]) is None


def test_derived_numbers() -> None:
    assert row().images_per_second == 8
    assert row().matmul_share == pytest.approx(2 * 1e9 / 0.5 / 2e10)
    assert row(macs=0).matmul_share == 0


def test_the_page_has_hardware_speedups_summary_and_figures() -> None:
    rows = [row(), row(library="timm", seconds=1.0, started_at="2026-02-03 00:00:00", details={"p99_ms": 12.5})]
    text = page(rows, summary=["A sentence."], figures=["growth.svg"])
    assert page_name(rows) == "abacus-r-2000-2026-02-03"
    assert "| 2.00* |" in text
    assert "p99 ms 12.5" in text
    assert "- A sentence." in text
    assert "![growth](growth.svg)" in text
    assert all(len(cells) == len(COLUMNS) for cells in table(rows))


def test_the_summary_has_the_best_peer_its_memory_and_percentiles() -> None:
    """By our best row and theirs, per comparison."""
    ours = [row(settings="compile", seconds=0.8), row(settings="graphs", seconds=0.5, peak_bytes=3 * 2**30)]
    peers = [row(library="timm", seconds=1.0, peak_bytes=4 * 2**30), row(library="transformers", seconds=2.0)]
    percentiles = {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
    latencies = [row(work="latency", batch=1, peak_bytes=0, details=percentiles)]
    slow = dict.fromkeys(percentiles, 4.0)
    latencies += [replace(latencies[0], library="timm", started_at="later", seconds=0.4, details=slow)]
    assert summarize([*ours, *peers, *latencies]) == [
        "train, ViT-B/16, batch 4: vitral (graphs) is 2.00 times as fast as timm (eager), "
        "with 0.75 times its peak memory.",
        "latency, ViT-B/16, batch 1: vitral (eager) is 0.80 times as fast as timm (eager), p50 1.00 against 4.00, "
        "p95 2.00 against 4.00, p99 3.00 against 4.00 ms, measured in different runs.",
    ]
    assert summarize(ours) == summarize(peers) == []


@pytest.mark.parametrize(
    ("work", "options", "word"),
    [
        ("swim", {}, "no benchmark"),
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
def test_usage_errors_are_raised_before_anything_starts(work, options, word, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "r.json", "device": "cpu", **options}
    with pytest.raises(UserError, match=word):
        benchmark(work, **arguments)


# Growth


def sweep_rows(axis: str, sizes: Sequence[int], seconds: Callable[[int], float], **changes: Any) -> list[BenchmarkRow]:
    return [
        row(work="growth", axis=axis, axis_value=size, macs=1000 * size, seconds=seconds(size), **changes)
        for size in sizes
    ]


def test_sizes_where_time_grows_faster_than_the_arithmetic_are_named() -> None:
    linear = sweep_rows("batch", (1, 2, 4), lambda size: 0.1 * size)
    square = sweep_rows("image", (64, 128), lambda size: 0.1 * size**2)
    assert runner.summarize_sweep(linear) == []
    assert runner.relative_growth(runner.measured_points(square)["image"]) == [2.0]
    assert runner.summarize_sweep([*linear, *square]) == [
        "up to image 128, time grows 2.00 times as fast as the arithmetic."
    ]


def test_a_slower_clock_is_not_growth() -> None:
    """Twice the work in four times the time, on a machine at half of its speed."""
    fast = row(work="growth", axis="batch", axis_value=1, macs=100, seconds=1.0, matmul_flops=8e9)
    slow = replace(fast, axis_value=2, macs=200, seconds=4.0, matmul_flops=4e9)
    assert runner.relative_growth(runner.measured_points([fast, slow])["batch"]) == [1.0]


def test_a_sweep_continues_along_the_other_axes_when_memory_ends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process until it fails, then in a new one."""
    started = []

    class SmallWorker(FakeWorker):
        def __enter__(self):
            started.append(len(FakeWorker.log))
            return self

        def call(self, method: str, workload: Workload | None = None, **arguments: Any) -> Any:
            if workload and workload.image > 128:
                raise WorkerFailed("error", "out of memory")
            return super().call(method)

    FakeWorker.log = []
    monkeypatch.setattr(runner, "Worker", SmallWorker)
    monkeypatch.setattr(runner, "_MAX_SECONDS", 1e9)
    rows = runner.run_sweep(replace(WORKLOAD, image=0, depth=0), OURS, ignore_events)
    points = runner.measured_points(rows)
    assert len(started) == 2
    sizes = {axis: tuple(point.axis_value for point in along) for axis, along in points.items()}
    assert list(sizes.items()) == list({**runner.SIZES, "image": (64, 128)}.items())
    assert {measured.startup_seconds for measured in rows} == {0}
    batches = [point.macs for point in points["batch"]]
    assert batches == [batches[0] * size for size in runner.SIZES["batch"]]


def test_a_sweep_ends_where_the_next_step_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of any size takes a quarter of a second: by the arithmetic, 64 images after 4 take four seconds."""
    FakeWorker.log = []
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    monkeypatch.setitem(runner.SIZES, "batch", (1, 4, 64))
    points = runner.measured_points(runner.run_sweep(replace(WORKLOAD, image=0, depth=0), OURS, ignore_events))
    assert [point.axis_value for point in points["batch"]] == [1, 4]


def test_only_the_last_sweep_is_drawn() -> None:
    """A later one may have measured another model."""
    old = sweep_rows("batch", (1, 2), lambda size: 0.1 * size, model="ViT-L/16")
    new = [replace(measured, model="ViT-S/16", started_at="2027") for measured in old]
    assert runner.newest_sweep([*old, *new, row()]) == new
    assert "Training step of ViT-S/16 on Abacus (R) 2000" in runner.sweep_chart(new)
    assert runner.newest_sweep([row()]) == []
    assert runner.measured_points([row()]) == {}


def test_rows_with_other_image_sizes_are_not_compared() -> None:
    small, large = (row(work="data", settings="loader", details={"megapixels": size}) for size in (0.0873, 0.1875))
    theirs = replace(small, library="torchvision", seconds=4 * small.seconds)
    rows = merge_rows([small], [large, theirs])
    assert len(rows) == 3
    assert speedup(small, rows) is not None
    assert speedup(large, rows) is None
    assert [cells[0] for cells in table(rows)] == ["data, 0.087 megapixels"] * 2 + ["data, 0.188 megapixels"]
    assert summarize(rows)[0].startswith("data, 0.087 megapixels, ViT-")


def test_the_chart_has_every_point() -> None:
    rows = sweep_rows("batch", (1, 2, 4), lambda size: 0.1 * size)
    root = ElementTree.fromstring(runner.sweep_chart(rows))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 3
    lines = [element.get("points") for element in root.iter() if element.tag.endswith("polyline")]
    assert lines[0] == lines[1]  # time that grows like the arithmetic lies on its line


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
def test_loaders_are_timed_with_details(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    workload = replace(WORKLOAD, work="data", folder=str(pictures))
    step = LoadingStep(Backend(library, "loader"), workload)
    [seconds] = step.run(3)
    assert seconds > 0
    details = step.details()
    assert ("decode_per_second" in details) == (library == "vitral")
    assert details["megapixels"] == pytest.approx(40 * 50 / 1e6)


@pytest.mark.parametrize("library", ["vitral", "torchvision"])
def test_training_from_files_is_compared_with_synthetic_images(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    workload = replace(WORKLOAD, work="data", folder=str(pictures))
    details = time_training_from_files(Backend(library, "loader"), workload, loader_seconds=1e-6)
    assert details["relative_speed"] == pytest.approx(details["files_per_second"] / details["synthetic_per_second"])
    assert 0 < details["data_wait_share"] < 1
    [sentence] = summarize([row(work="data", library=library, settings="loader", details={"workers": 0, **details})])
    assert f"with {library} (loader), training from files reaches {details['relative_speed']:.0%}" in sentence


def test_training_is_not_faster_than_the_loader_alone(pictures: Path) -> None:
    """Prefetched batches must not hide how slow their workers are."""
    workload = replace(WORKLOAD, work="data", folder=str(pictures))
    details = time_training_from_files(Backend("vitral", "loader"), workload, loader_seconds=1e3)
    assert details["files_per_second"] == workload.batch / 1e3
    assert 0.9 < details["data_wait_share"] < 1


def test_the_start_of_a_loader_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that take 100 s to start and 30 s for each of their first three batches, then hand over two at once
    every 4 s, and are slow at the end."""
    clock = [0.0]
    monkeypatch.setattr(loading.time, "perf_counter", lambda: clock[0])

    def batches(backend: Backend, workload: Workload, count: int, *, training: bool) -> Iterator[torch.Tensor]:
        clock[0] += 100
        for number in range(count):
            clock[0] += (number % 2 == 0) * (30 if number < 6 else 4 if number < 12 else 50)
            yield torch.zeros(1)

    monkeypatch.setattr(loading, "_batches", batches)
    step = LoadingStep(Backend("vitral", "loader"), replace(WORKLOAD, work="data", workers=2))
    assert step.run(5) == [2.0]
    assert step.best == 2.0


def test_the_wait_share_is_the_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that take 3 s and steps of 1 s, by a fake clock; the first two do not count."""
    clock = [0.0]
    monkeypatch.setattr(loading.time, "perf_counter", lambda: clock[0])

    def feed(images: torch.Tensor) -> None:
        clock[0] += 1 if images else 10

    def batches():
        for number in range(8):
            clock[0] += 30 if number < 2 else 3
            yield torch.tensor(number >= 2)

    assert time_feeding(feed, batches(), 2, "cpu") == (4.0, 0.75)


@pytest.mark.parametrize("library", ["vitral", "torchvision"])
def test_files_are_classified(library: str, pictures: Path) -> None:
    pytest.importorskip(library)
    [seconds] = PredictionStep(Backend(library), replace(WORKLOAD, work="predict", folder=str(pictures))).run(2)
    assert seconds > 0


def test_starts_are_timed_in_turns_after_a_warm_up(tmp_path: Path) -> None:
    events: list[Any] = []
    log = f"open({str(tmp_path / 'log')!r}, 'a').write"
    commands = {name: [sys.executable, "-S", "-c", f"{log}({name[0]!r})"] for name in ("ours", "theirs")}
    times = runner._run_starts(commands, 2, events.append)
    assert (tmp_path / "log").read_text() == "ot" * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"ours": 2, "theirs": 2}
    commands["theirs"] = [sys.executable, "-S", "-c", "raise SystemExit('boom')"]
    assert list(runner._run_starts(commands, 1, events.append)) == ["ours"]
    assert events[-2] == Note("theirs failed to predict (boom): omit it of --against.")
    with pytest.raises(UserError, match=r"vitral failed to predict .*boom"):
        runner._run_starts({"vitral": commands["theirs"]}, 1, events.append)


def test_both_start_commands_predict_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    commands = runner._prepare_commands(tmp_path, "ViT-Ti/16@32")
    weights, picture, folder = *map(Path, commands["vitral"][4:6]), commands["transformers"][3]
    ours = vitral.predict(weights, picture, top=1).rows[0]
    theirs = transformers.pipeline("image-classification", model=folder)(str(picture))
    assert theirs[0]["label"] == ours.names[0]
    assert theirs[0]["score"] == pytest.approx(ours.probabilities[0], rel=0.05)
