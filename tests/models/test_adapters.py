"""LoRA: the same function at the start, few parameters, and a merged model that computes what the adapted one does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitral.errors import UserError
from vitral.models.adapters import LoraLinear, add_lora, merge_lora
from vitral.models.build import build
from vitral.names import parse
from vitral.training.optimizer import freeze, parameter_groups

IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()


def vit(**changes):
    torch.manual_seed(0)
    model = build(parse("ViT-Ti/4", depth=2, width=16, mlp=32, heads=2, image=(16, 16), classes=5, **changes))
    nn.init.normal_(model.get_parameter("head.output.weight"))
    return model.eval()


def stirred(model):
    """Adapters away from their zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            nn.init.normal_(parameter, std=0.2)
    return model


def test_adapters_start_as_nothing_and_add_the_product_of_two_thin_matrices():
    model = vit()
    before = model(IMAGES)
    state = dict(model.state_dict())
    add_lora(model, 3)
    assert torch.equal(model(IMAGES), before)
    assert {name for name in state if name not in model.state_dict()} == set()
    layer = stirred(model).blocks[0].attention.qkv
    assert isinstance(layer, LoraLinear)
    x = torch.randn(4, 16, dtype=torch.float64)
    weight = layer.weight.double() + layer.up.double() @ layer.down.double()
    torch.testing.assert_close(layer.double()(x), F.linear(x, weight, layer.bias.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"axial": True, "class_token": False, "pool": "mean"}])
def test_only_adapters_and_head_learn(changes):
    model = vit(**changes)
    freeze(model, "lora:3")
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in learning} == {"blocks", "head"}
    assert all(name.endswith((".up", ".down")) for name in learning if name.startswith("blocks"))
    blocks = 2 * (2 if changes else 1)
    thin = 3 * ((16 + 48) + (16 + 16) + 2 * (16 + 32))
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert count == blocks * thin + 16 * 5 + 5
    decayed = [group["params"] for group in parameter_groups(model, weight_decay=0.1) if group["weight_decay"]]
    assert sum(map(len, decayed)) == 1  # the head's kernel
    model(IMAGES).square().mean().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_a_merged_model_is_plain_and_computes_the_same():
    model = vit()
    names = set(model.state_dict())
    add_lora(model, 4)
    stirred(model)
    before = model(IMAGES).detach()
    untouched = vit()(IMAGES).detach()
    assert (before - untouched).abs().max() > 0.05
    merge_lora(model)
    assert set(model.state_dict()) == names
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (model(IMAGES) - before).abs().max() <= 1e-5


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(UserError, match="ResNet"):
        add_lora(build(parse("R26x1", blocks=(1, 1, 1, 1), classes=5)), 4)
    with pytest.raises(UserError, match="at least 1"):
        add_lora(vit(), 0)
    model = vit()
    add_lora(model, 1)
    with pytest.raises(UserError, match="already"):
        add_lora(model, 1)
