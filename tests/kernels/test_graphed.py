"""`vitral.graphed`: a step equals that of a loop by hand. Without a GPU, a stand-in for CUDA graphs shows which are
captured; on a GPU they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitral
from vitral.kernels import cuda_graph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)


def make_batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 3, 2, 2), torch.randint(3, (size,))) for size in sizes]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=True)


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss.detach()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of captured batches. Off a GPU, steps are captured by a stand-in that calls the function."""
    captured: list[tuple[int, ...]] = []
    real = cuda_graph.CudaGraph

    class StandIn:
        def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
            captured.append(tuple(inputs[0].shape))
            self.call: Any = function if DEVICE == "cpu" else real(function, inputs)

        def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return self.call(*inputs)

    monkeypatch.setattr(cuda_graph, "CudaGraph", StandIn)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return captured


def make_captured_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    step: Any = vitral.graphed(model, F.cross_entropy, optimizer, clip=0.3)
    step.captures = True
    return step


def test_steps_equal_those_of_a_loop_by_hand():
    model, other = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(other)
    step = vitral.graphed(model, F.cross_entropy, optimizer, clip=0.3)
    for batch in make_batches(4, 4, 4, 4, 4, 2):
        loss = step(*batch)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, step_by_hand(other, expected, batch))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_autocast_is_for_model_and_loss():
    seen = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append((logits.dtype, torch.is_autocast_enabled(DEVICE)))
        return F.cross_entropy(logits, labels)

    model = make_model()
    vitral.graphed(model, loss, make_sgd(model), autocast=torch.bfloat16)(*make_batches(4)[0])
    assert seen == [(torch.bfloat16, True)]
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters())


def test_captured_steps_follow_rates_shapes_and_settings(captures):
    model, other = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(other)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected_schedule = torch.optim.lr_scheduler.StepLR(expected, 2, 0.5)
    step = make_captured_step(model, optimizer)
    counts = []
    for index, batch in enumerate(make_batches(4, 4, 4, 4, 4, 2, 2, 4, 4, 4, 4)):
        for each in (optimizer, expected):
            if index == 4:
                each.param_groups[0]["lr"] = 0.1  # by hand, between the steps of a scheduler
            if index == 8:
                each.param_groups[0]["weight_decay"] = 0.2
        torch.testing.assert_close(step(*batch), step_by_hand(other, expected, batch))
        schedule.step()
        expected_schedule.step()
        counts.append(len(captures))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert captures == [(4, 3, 2, 2), (4, 3, 2, 2)]
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_optimizers_that_cannot_be_captured_are_refused():
    model = make_model()
    for optimizer, reason in (
        (torch.optim.AdamW(model.parameters()), "this AdamW .* build it with capturable=True"),
        (torch.optim.SGD(model.parameters()), "SGD cannot be captured .* fused=True"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS cannot be captured"),
    ):
        with pytest.raises(vitral.UserError, match=reason):
            cuda_graph._check_capturable(optimizer)
    cuda_graph._check_capturable(make_sgd(model))


def test_a_failed_capture_is_one_sentence(captures, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graph, "CudaGraph", fail)
    model = make_model()
    step = make_captured_step(model, make_sgd(model))
    batches = make_batches(4, 4, 4, 4)
    for batch in batches[:3]:
        step(*batch)
    with pytest.raises(vitral.UserError, match="cannot be captured as a CUDA graph"):
        step(*batches[3])


def test_captures_of_several_threads_run_in_turn(monkeypatch):
    """Models of a server may be reloaded at once; with a stand-in for PyTorch's capture."""
    active: list[int] = []

    @contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        active.append(1)
        assert len(active) == 1
        time.sleep(0.01)
        yield
        active.pop()

    names = ("synchronize", "empty_cache", "current_device", "CUDAGraph")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(cuda_graph, "_stream", lambda device: None)
    monkeypatch.setattr(cuda_graph, "_restore_generator", lambda: None)
    with ThreadPoolExecutor(4) as pool:
        graphs = list(pool.map(lambda number: cuda_graph.CudaGraph(lambda: (number,), []), range(8)))  # type: ignore[arg-type]
    assert [graph.outputs for graph in graphs] == [(number,) for number in range(8)]
