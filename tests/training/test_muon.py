"""Muon against decompositions, torch's own optimizers and steps written out, and what a run needs of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from runs import Crash, crash_at, make_pictures, outcome, train
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.vit import ViT
from vitral.names import parse
from vitral.training.masked import MaskedModel, MaskSettings
from vitral.training.optimizer import Muon, build_optimizer, freeze, orthogonalize, parameter_groups, set_lr
from vitral.training.state import _moment

LINEAR = ("attention.qkv", "attention.out", "mlp.hidden", "mlp.output")


def vit(**changes) -> ViT:
    shape = {"depth": 2, "width": 16, "mlp": 32, "heads": 2, "image": (8, 8), "classes": 5} | changes
    model = build(parse("ViT-Ti/4", **shape))
    assert isinstance(model, ViT)
    return model


def svd_steps(matrix: Tensor) -> Tensor:
    """What five steps of the iteration make of a matrix: its odd polynomial, applied to the singular values alone."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


# the iteration


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (3, 2), (1, 7), (7, 1)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape):
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([svd_steps(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices.double()), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalize(matrices).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (32, 96), (96, 32)])
def test_the_result_is_nearly_the_orthogonal_factor(shape, dtype):
    """From a 200th of the norm on, the polynomial ends between 0.68 and 1.21; half precision a little outside."""
    generator = torch.Generator().manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(4, *shape, generator=generator), full_matrices=False)
    found = orthogonalize((u * torch.logspace(-1.7, 0, min(shape)) @ v).to(dtype)).float()
    values = torch.linalg.svdvals(found)
    slack = 0.05 if dtype == torch.bfloat16 else 0.0
    assert values.min() > 0.68 - slack
    assert values.max() < 1.21 + slack
    assert F.cosine_similarity(found.flatten(1), (u @ v).flatten(1)).min() > 0.97


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_matrices_do_not_mix_and_their_size_does_not_matter(number, rows, columns, size, seed):
    matrices = torch.randn(number, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    together = orthogonalize(matrices)
    alone = torch.cat([orthogonalize(size * matrix.unsqueeze(0)) for matrix in matrices])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_nothing_stays_nothing():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


# steps


def gradients(weights: list[nn.Parameter], steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights] for _ in range(steps)]


def follow(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], made: list[list[Tensor]], rate=float) -> None:
    """TrainStep along given gradients at a falling rate."""
    for step, some in enumerate(made):
        set_lr(optimizer, rate(0.1 / (step + 1)))
        for weight, gradient in zip(weights, some, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def make_weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


SHAPES = ((6, 6), (12, 4), (4, 12), (18, 6), (6, 6), (5,))


def mixed_groups(weights: list[nn.Parameter]) -> list[dict[str, object]]:
    """Equal shapes in several groups, a weight of three matrices, and one for Adam."""
    return [
        {"params": weights[:3], "weight_decay": 0.3, "factor": 1.0, "matrices": 1},
        {"params": weights[3:4], "weight_decay": 0.3, "factor": 1.0, "matrices": 3},
        {"params": weights[4:5], "weight_decay": 0.0, "factor": 0.5, "matrices": 1},
        {"params": weights[5:], "weight_decay": 0.0, "factor": 0.5, "matrices": 0},
    ]


def test_steps_are_those_written_out():
    weights = make_weights(*SHAPES, dtype=torch.float64)
    expected = [weight.detach().clone() for weight in weights[:5]]
    made = gradients(weights, 6)
    follow(Muon(mixed_groups(weights), lr=1.0, momentum=0.8), weights, made)
    momentum = [torch.zeros_like(weight) for weight in expected]
    for step, some in enumerate(made):
        for i in range(5):
            rate = 0.1 / (step + 1) * (0.5 if i == 4 else 1.0)
            momentum[i] = 0.8 * momentum[i] + some[i]
            ahead = some[i] + 0.8 * momentum[i]
            pieces = ahead.split(6) if i == 3 else [ahead]
            moved = torch.cat([svd_steps(piece) * 0.2 * max(piece.shape) ** 0.5 for piece in pieces])
            expected[i] = (1 - rate * (0.0 if i == 4 else 0.3)) * expected[i] - rate * moved
    for weight, value in zip(weights, expected, strict=False):
        torch.testing.assert_close(weight.detach(), value, rtol=0, atol=1e-9)


def test_torch_moves_matrices_the_same_way():
    """Its iteration is in bfloat16; the same learning rate means the same size of update."""
    ours, theirs = make_weights((24, 24), (12, 36)), make_weights((24, 24), (12, 36))
    made = gradients(ours, 5)
    start = [weight.detach().clone() for weight in ours]
    group = {"weight_decay": 0.1, "factor": 1.0}
    follow(Muon([{"params": ours, "matrices": 1, **group}], lr=1.0, momentum=0.9), ours, made)
    other = torch.optim.Muon([{"params": theirs, **group}], momentum=0.9, adjust_lr_fn="match_rms_adamw")
    follow(other, theirs, made)
    for mine, other_one, before in zip(ours, theirs, start, strict=True):
        way, other_way = (mine - before).detach(), (other_one - before).detach()
        assert (way - other_way).norm() < 0.02 * other_way.norm()


def test_the_update_is_as_large_as_adams():
    weights = make_weights((64, 64), (32, 128))
    before = [weight.detach().clone() for weight in weights]
    group = {"params": weights, "matrices": 1, "factor": 1.0}
    follow(Muon([group], lr=1.0), weights, gradients(weights, 1))
    for weight, start in zip(weights, before, strict=True):
        assert 0.15 < (weight - start).square().mean().sqrt() / 0.1 < 0.25


def test_the_rest_learns_as_with_adam():
    shapes = ((4, 6), (5,), (), (2, 3, 4, 4))
    ours, theirs = make_weights(*shapes), make_weights(*shapes)
    made = gradients(ours, 20)
    for kind, weights in ((Muon, ours), (torch.optim.AdamW, theirs)):
        groups = [
            {"params": weights[:2], "weight_decay": 0.2, "factor": 1.0},
            {"params": weights[2:], "weight_decay": 0.0, "factor": 0.3},
        ]
        follow(kind(groups, lr=1.0, betas=(0.8, 0.97)), weights, made)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_a_rate_may_be_a_tensor():
    numbers, tensors = make_weights(*SHAPES), make_weights(*SHAPES)
    made = gradients(numbers, 6)
    follow(Muon(mixed_groups(numbers), lr=1.0), numbers, made)
    follow(Muon(mixed_groups(tensors), lr=1.0), tensors, made, rate=torch.tensor)
    for mine, other in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_a_weight_without_a_gradient_stays():
    weights = make_weights((4, 4), (4, 4), (3,), (3,))
    optimizer = Muon([{"params": weights[:2], "matrices": 1, "weight_decay": 0.1}, {"params": weights[2:]}], lr=0.1)
    before = [weight.detach().clone() for weight in weights]
    weights[0].grad, weights[2].grad = torch.ones(4, 4), torch.ones(3)
    optimizer.step()
    assert [torch.equal(now, then) for now, then in zip(weights, before, strict=True)] == [False, True, False, True]
    assert set(optimizer.state) == {weights[0], weights[2]}


def test_a_step_asks_the_device_nothing():
    """Tensors without values raise where one is read."""
    with FakeTensorMode():
        weights = make_weights(*SHAPES)
        optimizer = Muon(mixed_groups(weights), lr=1.0)
        follow(optimizer, weights, gradients(weights, 2), rate=lambda value: torch.full((), value))
        with pytest.raises(DataDependentOutputException):
            optimizer.state[weights[5]]["step"].item()


def test_a_restored_count_of_steps_lies_beside_its_weight():
    weight = nn.Parameter(torch.empty(3, device="meta"))
    assert _moment(torch.tensor(4.0), weight, Muon([{"params": [weight]}], lr=0.1)).device == weight.device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_holds_a_step():
    eager, held = ([nn.Parameter(weight.detach().cuda()) for weight in make_weights(*SHAPES)] for _ in range(2))
    for weights in (eager, held):
        optimizer = Muon(mixed_groups(weights), lr=torch.tensor(0.1, device="cuda"))
        for weight in weights:
            weight.grad = torch.ones_like(weight).cumsum(0)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        if weights is eager:
            optimizer.step()
            optimizer.step()
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
        graph.replay()
    for mine, other in zip(eager, held, strict=True):
        assert torch.equal(mine, other)


# which weights


def matrices_by_name(model: nn.Module) -> dict[str, int]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.9)
    found = {names[id(weight)]: group["matrices"] for group in groups for weight in group["params"]}
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize(
    ("model", "front"),
    [
        (vit(registers=2, layer_scale=True, representation=7), ("blocks.0.", "blocks.1.")),
        (vit(pool="map", class_token=False, position="relative"), ("blocks.0.", "blocks.1.")),
        (vit(axial=True, class_token=False, pool="mean", depth=1), ("blocks.0.row.", "blocks.0.column.")),
        (MaskedModel(vit(), MaskSettings()), ("model.blocks.0.", "model.blocks.1.")),
        (build(parse("R26x1", blocks=(1, 1, 1, 1), classes=5)), ()),
    ],
    ids=["token", "map", "axial", "masked", "resnet"],
)
def test_the_linear_layers_of_blocks_are_matrices(model, front):
    assert matrices_by_name(model) == {
        f"{block}{layer}.weight": 3 if layer.endswith("qkv") else 1 for block in front for layer in LINEAR
    }


def test_queries_keys_and_values_learn_apart():
    """The fused layer moves as three layers would that each have a third of its gradient."""
    model = vit(depth=1).double()
    weight = model.get_parameter("blocks.0.attention.qkv.weight")
    thirds = [nn.Parameter(part.detach().clone()) for part in weight.chunk(3)]
    fused = build_optimizer(parameter_groups(model), name="muon", lr=0.1)
    apart = Muon([{"params": thirds, "matrices": 1}], lr=0.1, momentum=0.9)
    for step in range(3):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        weight.grad = gradient
        for third, part in zip(thirds, gradient.chunk(3), strict=True):
            third.grad = part.clone()
        fused.step()
        apart.step()
    torch.testing.assert_close(weight.detach(), torch.cat([third.detach() for third in thirds]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("trainable", ["head", "bias", "lora:2"])
def test_muon_without_a_matrix_that_learns_is_refused(trainable):
    model = vit()
    freeze(model, trainable)
    with pytest.raises(UserError, match=r"set optim\.name=adam"):
        build_optimizer(parameter_groups(model), name="muon", lr=0.1)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_shards_are_refused(alone):
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,))))
    with pytest.raises(UserError, match="parallel=ddp"):
        build_optimizer([{"params": [weight], "factor": 1.0, "matrices": 1}], name="muon", lr=0.1)


# runs

MUON = ("optim.name=muon", "optim.momentum=0.95", "optim.weight_decay=0.1")


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    words = (*MUON, "optim.layer_decay=0.8", "ema_decay=0.9", "regularization.dropout=0.2")
    pictures = make_pictures(tmp_path / "pictures")
    train(pictures, tmp_path / "whole", *words)
    with pytest.raises(Crash):
        train(pictures, tmp_path / "parts", *words, on_event=crash_at(7))
    train(pictures, tmp_path / "parts", *words)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_digits_are_learnt_faster_than_with_adam():
    """The same rate and steps for both, near the best rate of Adam; Muon gains more at twice that rate."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = (pixels.float() / 8 - 1).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    steps, losses = 60, {}
    for name in ("adamw", "muon"):
        torch.manual_seed(0)
        model = build(parse("ViT-Ti/2@8", width=32, depth=2, heads=2, mlp=64, classes=10))
        optimizer = build_optimizer(parameter_groups(model), name=name, lr=0.01, momentum=0.95)
        for step in range(steps):
            set_lr(optimizer, 0.01 * min(1.0, (step + 1) / 10) * (1 - step / steps))
            rows = torch.randint(0, 1200, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            losses[name] = float(F.cross_entropy(model(images[1200:]), labels[1200:]))
    assert losses["muon"] < 0.85 * losses["adamw"]
