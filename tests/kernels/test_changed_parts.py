"""Models whose parts somebody has changed compute the same with kernels as without: nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral.architecture import RopeConfig, ViTConfig
from vitral.kernels import dispatch
from vitral.models.layers import Attention, Block, Mlp, StochasticDepth
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ViTConfig(depth=3, width=64, mlp=128, heads=2, patch=16, image=(48, 48), classes=5)


class Twice(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


class AlwaysDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, 0.5, training=True)


class TwiceKept(StochasticDepth):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def make_vit(**changes: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(replace(CONFIG, **changes)).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def with_part(name: str, make_part: Callable[[], nn.Module]) -> ViT:
    model = make_vit()
    model.set_submodule(name, make_part())
    return model


def with_block(**changes: Any) -> ViT:
    model = make_vit()
    model.blocks[1] = Block(replace(CONFIG, **changes), 0.0).to(DEVICE).eval()
    return model


def with_dropout_alone_in_training() -> ViT:
    model = make_vit(dropout=0.3, pool="mean")
    for module in model.modules():
        module.training = isinstance(module, nn.Dropout)
    return model


def with_attention_dropout_in_training() -> ViT:
    model = make_vit(attention_dropout=0.3)
    for block in model.blocks:
        block.attention.training = True  # type: ignore[union-attr]
    return model


def with_hook_before_the_blocks() -> ViT:
    model = make_vit()
    model.pre_norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def without_last_block() -> ViT:
    model = make_vit(position="none", rope=RopeConfig(learned=True))
    model.blocks = model.blocks[:2]
    return model


def without_blocks() -> ViT:
    model = make_vit()
    model.blocks = model.blocks[:0]
    return model


def with_strided(name: str) -> ViT:
    """A vector that is a column of a matrix; the kernels read the final norm if all tokens are pooled."""
    model = make_vit(pool="mean")
    parent, _, leaf = name.rpartition(".")
    vector = model.get_parameter(name).detach()
    columns = torch.stack([vector, torch.full_like(vector, torch.nan)], dim=1)
    setattr(model.get_submodule(parent), leaf, nn.Parameter(columns[:, 0]))
    return model


CHANGES: dict[str, Callable[[], ViT]] = {
    "a block with other heads": lambda: with_block(heads=4),
    "a block with another GELU": lambda: with_block(gelu="quick"),
    "scale": lambda: with_part("blocks.0.scale1", Twice),
    "norm in attention": lambda: with_part("blocks.0.attention.norm", Twice),
    "norm in MLP": lambda: with_part("blocks.0.mlp.norm", Twice),
    "dropout in MLP": lambda: with_part("blocks.0.mlp.dropout", AlwaysDropout),
    "stochastic depth": lambda: with_part("blocks.0.drop", lambda: TwiceKept(0.0)),
    "no stochastic depth": lambda: with_part("blocks.0.drop", nn.Identity),
    "no dropout": lambda: with_part("blocks.0.attention.dropout", nn.Identity),
    "norm before the blocks": lambda: with_part("pre_norm", Twice),
    "hook before the blocks": with_hook_before_the_blocks,
    "Monte Carlo dropout": with_dropout_alone_in_training,
    "Monte Carlo dropout of attention": with_attention_dropout_in_training,
    "last block removed": without_last_block,
    "all blocks removed": without_blocks,
    **{
        f"strided {name}": lambda name=name: with_strided(name)  # type: ignore[misc]
        for name in ("norm.weight", "blocks.0.norm1.weight", "blocks.1.attention.out.bias", "blocks.0.mlp.output.bias")
    },
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switch them on for float32 on any device, or off."""
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    return lambda on: monkeypatch.setattr(dispatch, "_has_kernels", lambda device: on)


def make_images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 48, 48, device=DEVICE)


@torch.no_grad()
def logits(model: ViT) -> Tensor:
    torch.manual_seed(2)  # of dropout
    return model(make_images())


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_compute_the_same_with_kernels(change, kernels):
    model = CHANGES[change]()
    kernels(False)
    expected = logits(model)
    kernels(True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)


class Spy:
    """A callable that is no function, as mocks are."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        self.calls = 0

    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Tensor]:
        return self if module is None else lambda *inputs: self(module, *inputs)

    def __call__(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.forward(module, *inputs)


@pytest.mark.parametrize("on", [False, True])
def test_mocks_of_a_forward_are_called(on, kernels, monkeypatch):
    spy = Spy(nn.Linear.forward)
    monkeypatch.setattr(nn.Linear, "forward", spy)
    kernels(on)
    logits(make_vit())
    assert spy.calls == 4 * CONFIG.depth + 1


def test_a_forward_with_a_copied_name_is_called(kernels, monkeypatch):
    forward = Mlp.forward

    def changed(self: Mlp, x: Tensor) -> Tensor:
        return 1.5 * forward(self, x)

    changed.__qualname__, changed.__module__ = forward.__qualname__, forward.__module__
    kernels(True)
    before = logits(make_vit())
    monkeypatch.setattr(Mlp, "forward", changed)
    assert (logits(make_vit()) - before).abs().max() > 0.01


@pytest.mark.parametrize("module_type", [Attention, Mlp, Block, nn.LayerNorm, nn.Dropout])
def test_a_new_forward_of_a_class_is_called(module_type, kernels, monkeypatch):
    model, forward = make_vit(), module_type.forward
    kernels(True)
    before = logits(model)
    monkeypatch.setattr(module_type, "forward", lambda self, *inputs, **named: 1.5 * forward(self, *inputs, **named))
    changed = logits(model)
    kernels(False)
    torch.testing.assert_close(changed, logits(model), rtol=1e-3, atol=1e-3)
    assert (changed - before).abs().max() > 0.01


def test_generated_weights_get_a_gradient(kernels):
    gradients = []
    for on in (False, True):
        kernels(on)
        model = make_vit().requires_grad_(False)
        linear = model.get_submodule("blocks.0.mlp.hidden")
        weight = linear.weight.detach()  # type: ignore[union-attr]
        delta = torch.full_like(weight, 0.01, requires_grad=True)
        del linear.weight
        linear.weight = weight + delta  # type: ignore[assignment]
        model(make_images()).square().sum().backward()
        gradients.append(delta.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)
