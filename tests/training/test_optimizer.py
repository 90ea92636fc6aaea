"""Which parameters learn and decay, optimizer steps worked out by hand, and the running average of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import vitral
from vitral.errors import UserError
from vitral.models.build import build
from vitral.names import parse
from vitral.training.optimizer import build_optimizer, freeze, layer_index, parameter_groups, set_lr
from vitral.training.state import EMA


def vit(**changes):
    shape = {"depth": 3, "width": 16, "mlp": 32, "heads": 2, "image": (8, 8), "classes": 5} | changes
    return build(parse("ViT-Ti/4", **shape))


def resnet(**changes):
    return build(parse("R26x1", blocks=(1, 1, 1, 1), classes=5, **changes))


MODELS = {
    "token": vit(registers=2, layer_scale=True),
    "map": vit(pool="map", class_token=False, representation=7),
    "every": vit(injection="every"),
    "2d": vit(position="2d"),
    "relative": vit(position="relative"),
    "axial": vit(axial=True, class_token=False, pool="mean"),
    "hybrid": build(parse("R26+ViT-Ti/32", depth=2, width=16, mlp=32, heads=2, image=(64, 64), classes=5)),
    "resnet": resnet(),
    "axial resnet": resnet(axial=True, image=(64, 64)),
}
# Everything that is no kernel, by the last words of its name.
NOT_KERNELS = ("bias", "scale", "class_token", "registers", "probe", "class_row", "table", "offsets", ".x", ".y")


def groups_by_name(model, **settings):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, **settings)
    found = {names[id(parameter)]: group for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found)
    return found


RATES: dict[str, float] = {"lr": 0.1, "weight_decay": 0.5}


def test_groups_for_an_optimizer_of_ones_own_have_learning_rates():
    """MAE's rule: rate * decay ** (depth + 1 - layer), where norm and head are layer depth + 1."""
    model = vit(depth=3)
    optimizer = torch.optim.SGD(vitral.parameter_groups(model, lr=0.1, layer_decay=0.5, head_lr=3.0))
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    expected = {"embed": 0.1 / 16, "blocks.0": 0.1 / 8, "blocks.2": 0.1 / 2, "norm": 0.1, "head": 0.3}
    for part, rate in expected.items():
        found = [rates[id(parameter)] for parameter in model.get_submodule(part).parameters()]
        assert found == pytest.approx([rate] * len(found))
    wrappers: list[Any] = [nn.DataParallel(model), torch.compile(model), torch.compile(nn.DataParallel(model))]
    for wrapped in wrappers:
        with pytest.raises(UserError, match=r"before torch\.compile"):
            vitral.parameter_groups(wrapped, lr=0.1)


def test_modules_of_ones_own_are_not_taken_for_wrappers():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)

    for own in (Own(), torch.compile(Own())):
        rates = {name: (group["lr"], group["weight_decay"]) for name, group in groups_by_name(own, **RATES).items()}
        assert list(rates.values()) == [(0.1, 0.5), (0.1, 0.0)]


def test_the_head_of_a_model_inside_another_is_known():
    """As a LightningModule has it."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit(depth=1)

    expected = groups_by_name(vit(depth=1), **RATES, layer_decay=0.5, head_lr=3.0)
    found = groups_by_name(Module(), **RATES, layer_decay=0.5, head_lr=3.0)
    assert {name: group["lr"] for name, group in found.items()} == {
        f"model.{name}": group["lr"] for name, group in expected.items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_only_kernels_decay_and_nothing_is_forgotten(kind):
    model = MODELS[kind]
    found = groups_by_name(model, weight_decay=0.3)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, group in found.items():
        norm = "norm" in name.split(".")[-2] if "." in name else False
        kernel = not norm and not name.endswith(NOT_KERNELS)
        assert group["weight_decay"] == (0.3 if kernel else 0.0), name
        assert not kernel or model.get_parameter(name).ndim in (2, 4)


@pytest.mark.parametrize(
    ("kind", "name", "layer"),
    [
        ("token", "embed.weight", 0),
        ("token", "class_token", 0),
        ("token", "registers", 0),
        ("token", "positions.0.table", 0),
        ("token", "blocks.0.norm1.weight", 1),
        ("token", "blocks.2.mlp.hidden.weight", 3),
        ("token", "norm.weight", 4),
        ("token", "head.output.weight", 4),
        ("map", "map.probe", 4),
        ("every", "positions.2.table", 2),
        ("hybrid", "stem.root.conv.weight", 0),
        ("hybrid", "blocks.1.attention.qkv.bias", 2),
        ("resnet", "root.weight", 0),
        ("resnet", "stages.3.0.conv1.weight", 4),
        ("resnet", "norm.bias", 5),
    ],
)
def test_rates_shrink_layer_by_layer_away_from_the_head(kind, name, layer):
    model = MODELS[kind]
    last = {"hybrid": 3, "resnet": 5}.get(kind, 4)
    assert layer_index(name, model) == layer
    factor = groups_by_name(model, layer_decay=0.5, head_lr=3.0)[name]["factor"]
    assert factor == pytest.approx(0.5 ** (last - layer) * (3.0 if name.startswith("head") else 1.0))


def test_the_rate_of_a_step_reaches_every_group():
    model = vit()
    optimizer = build_optimizer(parameter_groups(model, layer_decay=0.5, head_lr=2.0), lr=0.1)
    set_lr(optimizer, 0.01)
    rates = sorted({round(group["lr"], 12) for group in optimizer.param_groups})
    assert rates == pytest.approx([0.01 / 16, 0.01 / 8, 0.01 / 4, 0.01 / 2, 0.01, 0.02])


@pytest.mark.parametrize(
    ("trainable", "learning"),
    [
        ("head", {"head"}),
        ("last:1", {"blocks.2", "norm", "head"}),
        ("last:3", {"blocks.0", "blocks.1", "blocks.2", "norm", "head"}),
    ],
)
def test_freezing_leaves_the_named_part_to_learn(trainable, learning):
    model = vit()
    freeze(model, trainable)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(tuple(f"{part}." for part in learning)), name
    assert len(groups_by_name(model)) == sum(parameter.requires_grad for parameter in model.parameters())


def test_freezing_to_biases_full_and_stages():
    model = vit()
    freeze(model, "bias")
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if name.endswith("bias")} | {"head.output.weight"}
    freeze(model, "full")
    assert all(parameter.requires_grad for parameter in model.parameters())
    network = resnet()
    freeze(network, "last:1")
    learning = {name.split(".")[0] for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert learning == {"stages", "norm", "head"}
    assert not network.get_parameter("stages.2.0.conv1.weight").requires_grad


@pytest.mark.parametrize("trainable", ["last:4", "last:0", "last", "tail", "lora:0"])
def test_what_cannot_be_tuned_is_refused(trainable):
    with pytest.raises(UserError):
        freeze(vit(), trainable)


def test_nothing_to_learn_and_unknown_rules_are_refused():
    with pytest.raises(UserError, match="no parameter is left"):
        build_optimizer([], lr=0.1)
    with pytest.raises(UserError, match="adam, sgd or muon"):
        build_optimizer(parameter_groups(vit()), name="lion", lr=0.1)


def stepped(name, steps=5, **settings):
    """A linear layer after some steps, and the same by hand in double precision."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    groups = [
        {"params": [model.weight], "weight_decay": 0.1, "factor": 0.5},
        {"params": [model.bias], "weight_decay": 0.0, "factor": 1.0},
    ]
    optimizer = build_optimizer(groups, name=name, lr=1.0, **settings)
    inputs = torch.randn(steps, 6, 4, dtype=torch.float64)
    gradients = {"weight": [], "bias": []}
    for step in range(steps):
        set_lr(optimizer, 0.1 / (step + 1))
        optimizer.zero_grad()
        model(inputs[step]).square().mean().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[key].append(parameter.grad.clone())
        optimizer.step()
    return dict(model.named_parameters()), start, gradients


def test_adam_is_decoupled_and_its_decay_scales_with_the_rate():
    ours, expected, gradients = stepped("adamw", beta1=0.8, beta2=0.95)
    for key, decay, factor in (("weight", 0.1, 0.5), ("bias", 0.0, 1.0)):
        x, m, v = expected[key], 0.0, 0.0
        for step, g in enumerate(gradients[key], start=1):
            rate = 0.1 / step * factor
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
            x = x - rate * decay * x - rate * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(ours[key].detach(), x, rtol=1e-10, atol=1e-12)


def test_sgd_has_momentum_and_its_decay_is_in_the_gradient():
    ours, expected, gradients = stepped("sgd", momentum=0.7)
    for key, decay, factor in (("weight", 0.1, 0.5), ("bias", 0.0, 1.0)):
        x, m = expected[key], 0.0
        for step, g in enumerate(gradients[key], start=1):
            m = 0.7 * m + g + decay * x
            x = x - 0.1 / step * factor * m
        torch.testing.assert_close(ours[key].detach(), x, rtol=1e-10, atol=1e-12)


def test_the_average_is_the_weighted_mean_of_the_weights_after_each_step():
    """The initial weights have no share in it: those of the steps sum to 1."""
    model = nn.Linear(3, 2).double()
    model.bias.requires_grad_(False)
    history = []
    ema = EMA(model, 0.9)
    assert ema.average(0) == {}
    for _ in range(20):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        ema.update(model)
        history.append(model.weight.detach().clone())
    shares = [0.9 ** (20 - i) for i in range(1, 21)]
    expected = sum(share / sum(shares) * weights for share, weights in zip(shares, history, strict=True))
    average = ema.average(20)
    assert set(average) == {"weight"}
    torch.testing.assert_close(average["weight"], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, history[-1])
