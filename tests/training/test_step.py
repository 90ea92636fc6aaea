"""TrainStep of training, one after the other: the numbers of a loop written out by hand, recorded or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.data.loader import Batch
from vitral.events import Note
from vitral.models.vit import ViT
from vitral.training import loop
from vitral.training.loop import LoopConfig, TrainStep
from vitral.training.masked import MaskedModel, MaskedObjective, MaskSettings
from vitral.training.objective import LossSettings, Objective
from vitral.training.parallel import World
from vitral.training.state import EMA, TrainState

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CLASSES, BATCH, STEPS = 5, 6, 7
RATE, MOMENTUM, FACTOR, SEED = 0.1, 0.9, 0.8, 3
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
SHAPE = (3, 4, 4)
RECORDED = STEPS - 3  # the first three are computed


def a_trainee(dropout: float = 0.0, device: torch.device = CPU, **settings: Any) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(48, CLASSES)).to(device)
    objective = Objective(model, LossSettings(CLASSES, MEAN, STD, seed=SEED, **settings), np.ones(CLASSES)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return TrainState(objective, model, optimizer, EMA(model, FACTOR))


def a_batch(seed: int, rows: int = BATCH) -> Batch:
    """The last row cannot be read."""
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (rows, *SHAPE), np.uint8))
    labels = torch.from_numpy(rng.integers(0, CLASSES, rows))
    return Batch(images, labels, torch.arange(rows) < rows - 1, torch.arange(rows))


def a_plan(**changes: Any) -> LoopConfig:
    return replace(LoopConfig(steps=STEPS, batch=BATCH, microbatch=BATCH, seed=SEED, cuda_graph=True), **changes)


class Replayed:
    """Stands in for a CUDA graph: takes its inputs over as one does, and computes when it is called."""

    made = 0
    seeds: list[int]

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> None:
        type(self).made += 1
        type(self).seeds = []
        self.function, self.inputs = function, [tensor.clone() for tensor in inputs]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.seeds.append(torch.initial_seed())
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        return self.function(*self.inputs)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> type[Replayed]:
    monkeypatch.setattr(Replayed, "made", 0)
    monkeypatch.setattr(loop, "CudaGraph", Replayed)
    return Replayed


def taken(
    train_state: TrainState, plan: LoopConfig, *, records: bool, rows: int = BATCH
) -> tuple[list[list[float]], list[str]]:
    """All steps' numbers, and what was said; `records` as if the device were a GPU."""
    said: list[Any] = []
    steps = TrainStep(train_state, plan, World(0, 1, CPU), said.append)
    assert not steps.captures
    steps.captures = records
    numbers = []
    for number in range(STEPS):
        numbers.append([float(value) for value in steps(a_batch(number, rows))])
        train_state.step += 1
    return numbers, [event.text for event in said]


def columns(weights: dict[str, Any]) -> np.ndarray:
    """(classes, 48 + 1): the bias as last column."""
    return np.column_stack([weights["2.weight"].detach().numpy(), weights["2.bias"].detach().numpy()])


def written_out(clip: float) -> tuple[list[list[float]], np.ndarray, np.ndarray]:
    """The same in double precision, without autograd: numbers, weights, their average."""
    weights = columns(dict(a_trainee().model.named_parameters())).astype(np.float64)
    total, moment, numbers = np.zeros_like(weights), np.zeros_like(weights), []
    for number in range(STEPS):
        batch = a_batch(number)
        pixels = batch.images.numpy() / 255 - np.reshape(MEAN, (3, 1, 1))
        x = np.column_stack([(pixels / np.reshape(STD, (3, 1, 1))).reshape(BATCH, -1), np.ones(BATCH)])[:-1]
        labels = batch.labels.numpy()[:-1]
        logits = x @ weights.T
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        loss = -np.log(chances[np.arange(len(x)), labels]).sum() / BATCH
        gradient = (chances - np.eye(CLASSES)[labels]).T @ x / BATCH
        norm = np.sqrt((gradient**2).sum())
        moment = MOMENTUM * moment + gradient * (min(1, clip / norm) if clip else 1)
        weights = weights - RATE * moment
        total = FACTOR * total + weights
        numbers.append([loss, (logits.argmax(axis=1) == labels).sum(), norm])
    return numbers, weights, total / sum(FACTOR**i for i in range(STEPS))


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("micro", [BATCH, 4, 1])
@pytest.mark.parametrize("records", [False, True])
def test_steps_are_the_loop_written_out(records, micro, clip, replayed):
    train_state = a_trainee()
    numbers, notes = taken(train_state, a_plan(microbatch=micro, clip=clip), records=records)
    expected, weights, average = written_out(clip)
    np.testing.assert_allclose(numbers, expected, rtol=1e-4)
    np.testing.assert_allclose(columns(dict(train_state.model.named_parameters())), weights, atol=1e-5)
    assert train_state.ema is not None
    np.testing.assert_allclose(columns(train_state.ema.average(STEPS)), average, atol=1e-5)
    assert notes == []
    # A batch in several pieces is computed anew each time.
    assert replayed.made == int(records and micro == BATCH)


def test_clipping_was_at_work():
    assert {norm > 0.7 for _, _, norm in written_out(0.7)[0]} == {True}


@pytest.mark.parametrize("settings", [{"mixup": 0.5}, {"cutmix": 0.5}, {"mixup": 0.5, "cutmix": 0.5}])
def test_each_replay_gets_its_own_mix(settings, replayed):
    plan, rows = a_plan(mix_partner=True), BATCH + 1
    computed, _ = taken(a_trainee(**settings), plan, records=False, rows=rows)
    found, _ = taken(a_trainee(**settings), plan, records=True, rows=rows)
    assert found == computed
    assert replayed.made == 1
    assert {right for _, right, _ in found} == {-1.0}


def test_a_replay_draws_what_the_step_would(replayed):
    """A graph seeds nothing by itself: the seed must stand before it is replayed."""
    train_state, seeds = a_trainee(dropout=0.5), []
    train_state.model.register_forward_pre_hook(lambda *_: seeds.append(torch.initial_seed()))
    computed, _ = taken(train_state, a_plan(), records=False)
    found, _ = taken(a_trainee(dropout=0.5), a_plan(), records=True)
    assert found == computed
    assert replayed.seeds == seeds[-RECORDED:]
    assert len(set(seeds)) == STEPS


@pytest.mark.parametrize(
    "error, says",
    [
        (RuntimeError("operation not permitted\nCUDA kernel errors might be"), "(operation not permitted)"),
        (torch.OutOfMemoryError("CUDA out of memory."), "(CUDA out of memory.)"),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_what_cannot_be_recorded_is_computed(error, says, monkeypatch):
    train_state, tries = a_trainee(dropout=0.5), []

    def failing(function: Any, inputs: list[Tensor]) -> None:
        tries.append(len(inputs))
        for parameter in train_state.model.parameters():
            parameter.grad = torch.full_like(parameter, 9.0)  # what was begun lies about
        raise error

    computed, _ = taken(a_trainee(dropout=0.5), a_plan(), records=False)
    monkeypatch.setattr(loop, "CudaGraph", failing)
    found, notes = taken(train_state, a_plan(), records=True)
    assert found == computed
    assert len(tries) == 1
    assert notes == [f"the step is not captured as a CUDA graph {says}"]


def test_pieces_that_memory_made_smaller_are_not_recorded(replayed, monkeypatch):
    real = Objective.forward

    def forward(self: Objective, images: Tensor, *rest: Tensor) -> Any:
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, images, *rest)

    computed, _ = taken(a_trainee(), a_plan(microbatch=3), records=False)
    monkeypatch.setattr(Objective, "forward", forward)
    found, notes = taken(a_trainee(), a_plan(), records=True)
    assert found == computed
    assert replayed.made == 0
    assert notes == ["memory ran out: continuing with microbatches of 3 images, same result"]


def masked() -> nn.Module:
    config = ViTConfig(depth=1, width=16, mlp=16, heads=2, patch=4, image=(8, 8), classes=0)
    return MaskedObjective(MaskedModel(ViT(config), MaskSettings()), MEAN, STD)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        ({"cuda_graph": False}, False),
        ({"device": CPU}, False),
        ({"device": torch.device("mps")}, False),
        ({"size": 2}, False),
        ({"objective": masked}, False),
        ({"taken": 70}, False),
    ],
)
def test_only_one_gpu_with_room_records(changes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: changes.get("taken", 50))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    train_state = a_trainee()
    train_state.wrapped = changes.get("objective", lambda: train_state.wrapped)()
    world = World(0, changes.get("size", 1), changes.get("device", GPU))
    assert (
        TrainStep(train_state, a_plan(cuda_graph=changes.get("cuda_graph", True)), world, lambda event: None).captures
        is expected
    )


class Reading(Objective):
    """Reads a number on the way, which a recording cannot."""

    def forward(self, images: Tensor, labels: Tensor, valid: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        loss, right = super().forward(images, labels, valid, draws)
        assert loss.item() > 0
        return loss, right


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
def test_after_a_failed_recording_a_gpu_still_draws():
    """Dropout, and augmentation on the device, draw from a generator that took part in what failed."""
    found = []
    for graph in (True, False):
        said: list[Any] = []
        train_state = a_trainee(dropout=0.5, device=GPU)
        train_state.wrapped = Reading(train_state.model, train_state.objective.settings, np.ones(CLASSES)).to(GPU)
        steps = TrainStep(train_state, a_plan(cuda_graph=graph), World(0, 1, GPU), said.append)
        numbers = []
        for number in range(STEPS):
            numbers.append([float(value) for value in steps(a_batch(number))])
            train_state.step += 1
        assert [type(event) for event in said] == [Note] * graph
        found.append(numbers)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
