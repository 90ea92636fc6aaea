"""The Vision Transformer against a plain one written here from equations 1-8, one image and one head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.errors import UserError
from vitral.models.layers import StochasticDepth
from vitral.models.vit import ViT

Weights = dict[str, Tensor]
Drop = Callable[[Tensor], Tensor]

SMALL = ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=4, image=(12, 8), classes=5)
AXIAL: dict[str, Any] = {"axial": True, "class_token": False, "pool": "mean"}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "one channel": {"channels": 1},
    "seven channels": {"channels": 7},
    "mean": {"pool": "mean"},
    "mean, no class token": {"pool": "mean", "class_token": False},
    "map": {"pool": "map"},
    "map, registers only": {"pool": "map", "class_token": False, "registers": 2},
    "registers": {"registers": 3},
    "no class row": {"class_position": False, "registers": 1},
    "tanh layer": {"representation": 7},
    "no classes": {"classes": 0},
    "tanh layer alone": {"classes": 0, "representation": 7},
    "layer scale": {"layer_scale": True},
    "erf": {"gelu": "erf"},
    "epsilon": {"norm_eps": 0.1},
    "norm after mean": {"norm_place": "features", "pool": "mean"},
    "norm after token": {"norm_place": "features"},
    "none": {"position": "none"},
    "2d": {"position": "2d", "registers": 1},
    "relative": {"position": "relative", "registers": 1},
    "relative, no prefix": {"position": "relative", "class_token": False, "pool": "mean"},
    "sincos2d": {"position": "sincos2d"},
    "1d, every layer": {"injection": "every"},
    "1d, shared": {"injection": "shared", "registers": 1},
    "2d, every layer": {"position": "2d", "injection": "every"},
    "2d, shared": {"position": "2d", "injection": "shared"},
    "sincos2d, every layer": {"position": "sincos2d", "injection": "every"},
    "axial": AXIAL,
    "axial, map": {**AXIAL, "pool": "map", "position": "2d", "layer_scale": True},
    "axial, shared": {**AXIAL, "injection": "shared"},
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


def random_model(config: ViTConfig) -> ViT:
    """In evaluation mode, with every parameter off its start value, so that a forgotten one shows."""
    torch.manual_seed(0)
    model = ViT(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def random_images(config: ViTConfig, batch: int = 2) -> Tensor:
    return torch.randn(batch, config.channels, *config.image, generator=torch.Generator().manual_seed(1))


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return torch.einsum("ni,oi->no", x, w[f"{name}.weight"]) + w[f"{name}.bias"]


def norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred**2).sum(-1, keepdim=True) / x.shape[-1]
    return centred / (variance + eps) ** 0.5 * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Tensor, kind: str) -> Tensor:
    if kind == "erf":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Equations 5-7 for each head; `bias` makes what is added to the logits from the head's queries."""
    outputs = []
    for q_h, k_h, v_h in zip(*(x.chunk(heads, dim=-1) for x in (q, k, v)), strict=True):
        logits = torch.einsum("qd,kd->qk", q_h, k_h) / math.sqrt(q_h.shape[-1])
        weights = torch.exp(logits if bias is None else logits + bias(q_h))
        outputs.append(torch.einsum("qk,kd->qd", weights / weights.sum(-1, keepdim=True), v_h))
    return torch.cat(outputs, dim=-1)


def relative_bias(table: Tensor, prefix: int, q: Tensor) -> Tensor:
    """Table 8: the query of each patch against an embedding of its raster offset from each key."""
    bias = torch.zeros(len(q), len(q), dtype=q.dtype)
    for i in range(len(q) - prefix):
        for j in range(len(q) - prefix):
            offset = table[i - j + len(table) // 2]
            bias[prefix + i, prefix + j] = (q[prefix + i] * offset).sum() / math.sqrt(q.shape[-1])
    return bias


def mlp(config: ViTConfig, w: Weights, name: str, x: Tensor, drop: Drop) -> Tensor:
    return drop(linear(w, f"{name}.output", drop(gelu(linear(w, f"{name}.hidden", x), config.gelu))))


def block(config: ViTConfig, w: Weights, name: str, x: Tensor, drop: Drop) -> Tensor:
    """Equations 2, 3 and 8: (n, d) -> (n, d)"""
    table = w.get(f"{name}.attention.relative.table")
    bias = None if table is None else lambda q: relative_bias(table, config.prefix, q)
    q, k, v = linear(w, f"{name}.attention.qkv", norm(w, f"{name}.norm1", x, config.norm_eps)).chunk(3, dim=-1)
    y = drop(linear(w, f"{name}.attention.out", attend(q, k, v, config.heads, bias)))
    x = x + y * w.get(f"{name}.scale1.scale", 1.0)
    y = mlp(config, w, f"{name}.mlp", norm(w, f"{name}.norm2", x, config.norm_eps), drop)
    return x + y * w.get(f"{name}.scale2.scale", 1.0)


def axial_block(config: ViTConfig, w: Weights, name: str, x: Tensor, drop: Drop) -> Tensor:
    """Appendix D.6: every row by itself, then every column by itself."""
    rows, columns = config.grid(config.image)
    x = x.clone()
    for row in range(rows):
        line = [row * columns + column for column in range(columns)]
        x[line] = block(config, w, f"{name}.row", x[line], drop)
    for column in range(columns):
        line = [row * columns + column for row in range(rows)]
        x[line] = block(config, w, f"{name}.column", x[line], drop)
    return x


def waves(place: int, quarter: int) -> list[float]:
    angles = [place * 10_000 ** (-k / (quarter - 1)) for k in range(quarter)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def positions(config: ViTConfig, w: Weights, layer: int) -> Tensor:
    """(prefix + n, d) at the native grid"""
    rows, columns = config.grid(config.image)
    name, zeros = f"positions.{layer}", torch.zeros(config.width, dtype=torch.float64)
    front = [w.get(f"{name}.class_row", zeros)] * config.class_token + [zeros] * config.registers
    table = []
    for y in range(rows):
        for x in range(columns):
            if config.position == "1d":
                table.append(w[f"{name}.table"][y, x])
            elif config.position == "2d":
                table.append(torch.cat([w[f"{name}.x"][x], w[f"{name}.y"][y]]))
            elif config.position == "sincos2d":
                table.append(torch.tensor(waves(x, config.width // 4) + waves(y, config.width // 4)).double())
            else:
                table.append(zeros)
    return torch.stack(front + table)


def embed(config: ViTConfig, w: Weights, image: Tensor) -> list[Tensor]:
    """Patches in raster order, each flattened and projected."""
    rows, columns = config.grid(config.image)
    p = config.patch
    cut = [image[:, r * p : (r + 1) * p, c * p : (c + 1) * p] for r in range(rows) for c in range(columns)]
    return [torch.einsum("chw,dchw->d", patch, w["embed.weight"]) + w["embed.bias"] for patch in cut]


def reference(config: ViTConfig, w: Weights, image: Tensor, drop: Drop = lambda x: x) -> Tensor:
    """Equations 1-4 and the head for one image: (c, h, w) -> (classes)"""
    front = [w["class_token"]] if config.class_token else []
    x = torch.stack([*front, *w.get("registers", []), *embed(config, w, image)])
    x = drop(x + positions(config, w, 0))
    for layer in range(config.depth):
        if layer and config.injection != "input":
            x = x + positions(config, w, layer if config.injection == "every" else 0)
        x = (axial_block if config.axial else block)(config, w, f"blocks.{layer}", x, drop)
    if config.norm_place == "tokens":
        x = norm(w, "norm", x, config.norm_eps)
    patches = x[config.prefix :]
    if config.pool == "map":
        k, v = linear(w, "map.kv", patches).chunk(2, dim=-1)
        y = linear(w, "map.out", attend(linear(w, "map.q", w["map.probe"]), k, v, config.heads))
        y = y + mlp(config, w, "map.mlp", norm(w, "map.norm", y, config.norm_eps), lambda z: z)  # as in big_vision
    else:
        y = x[:1] if config.pool == "token" else patches.sum(0, keepdim=True) / len(patches)
    if config.norm_place == "features":
        y = norm(w, "norm", y, config.norm_eps)
    if config.representation:
        y = torch.tanh(linear(w, "head.hidden", y))
    return (linear(w, "head.output", y) if config.classes else y)[0]


def referenced(model: ViT, images: Tensor, drop: Drop = lambda x: x) -> Tensor:
    weights = {name: value.double() for name, value in model.state_dict().items()}
    return torch.stack([reference(model.config, weights, image, drop) for image in images.double()])


@each_variant
def test_forward_matches_the_equations(changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    model, images = random_model(config).double(), random_images(config).double()
    # The library computes its sines in single precision.
    torch.testing.assert_close(
        model(images), referenced(model, images), rtol=0, atol=1e-5 if "sin" in config.position else 1e-11
    )


@each_variant
def test_the_four_steps_compose(changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    model, images = random_model(config), random_images(config)
    patches = model.patchify(images)
    tokens = model.encode(patches)
    features = model.pool(tokens)
    logits = model.head(features)
    assert patches.shape == (2, 3, 2, 16)
    assert tokens.shape == (2, config.prefix + 6, 16) == (2, config.tokens(config.image), 16)
    assert features.shape == (2, 16)
    assert logits.shape == (2, config.classes or config.representation or 16)
    assert torch.equal(model.features(images), features)
    assert torch.equal(model(images), logits)


@each_variant
def test_dropout_acts_at_the_papers_four_sites(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves and shifts, a site too many, too few or elsewhere changes the logits."""
    config = replace(SMALL, **changes, dropout=0.5)
    model, images = random_model(config).double().train(), random_images(config).double()

    def stub(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
        return x * p + 0.1 if training and p else x

    monkeypatch.setattr(F, "dropout", stub)
    expected = referenced(model, images, lambda x: x * 0.5 + 0.1)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5 if "sin" in config.position else 1e-11)
    torch.testing.assert_close(model.eval()(images), referenced(model, images), rtol=0, atol=1e-5)


def test_attention_dropout_stays_inside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    real = F.scaled_dot_product_attention

    def record(*args: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        rates.append(dropout_p)
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    model = random_model(replace(SMALL, attention_dropout=0.4))
    images = random_images(SMALL)
    expected = model(images)
    # With the logger taking attention's own dropout away, nothing random is left.
    assert torch.equal(model.train()(images), expected)
    assert rates == [0.0, 0.0, 0.4, 0.4]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_stochastic_depth_keeps_the_expectation(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8000, 2, 3)
    factor = StochasticDepth(rate)(x) / x
    assert torch.allclose(factor, factor[:, :1, :1])
    assert {0.0, round(1 / (1 - rate), 4)} == {round(value, 4) for value in factor[:, 0, 0].tolist()}
    error = math.sqrt(rate / (1 - rate) / len(x))
    assert abs(factor[:, 0, 0].mean().item() - 1) < 4 * error
    assert StochasticDepth(rate).eval()(x) is x


@pytest.mark.parametrize("axial", [{}, AXIAL], ids=["plain", "axial"])
def test_stochastic_depth_drops_branches_of_whole_images(axial: dict[str, Any]) -> None:
    config = replace(SMALL, depth=4, stochastic_depth=0.6, **axial)
    model = random_model(config).train()
    seen: dict[float, list[Tensor]] = {}

    def record(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, StochasticDepth)
        factor = (output / args[0]).flatten(1)
        assert torch.allclose(factor, factor[:, :1])
        seen.setdefault(round(module.rate, 6), []).append(factor[:, 0])

    for module in model.modules():
        if isinstance(module, StochasticDepth):
            module.register_forward_hook(record)
    model(random_images(config, batch=64))
    assert list(seen) == [0.0, 0.2, 0.4, 0.6]
    for rate, factors in seen.items():
        assert len(factors) == (4 if axial else 2)
        dropped = [factor == 0 for factor in factors]
        assert all(0 < drops.sum() < 64 for drops in dropped) == (rate > 0)
        assert rate == 0 or not torch.equal(dropped[0], dropped[1])


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    model = random_model(replace(SMALL, dropout=0.2, attention_dropout=0.2, stochastic_depth=0.5))
    images = random_images(SMALL)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_bad_images_are_refused() -> None:
    model = ViT(SMALL)
    with pytest.raises(UserError, match=r"batch of 3-channel images .* not a tensor of shape \(2, 4, 12, 8\)\.$"):
        model(torch.zeros(2, 4, 12, 8))
    with pytest.raises(UserError, match=r"not a tensor of shape \(3, 12, 8\)\.$"):
        model(torch.zeros(3, 12, 8))
    with pytest.raises(UserError, match="3x8 pixels is smaller than one patch: make each side at least 4 pixels"):
        model(torch.zeros(1, 3, 3, 8))


@pytest.mark.parametrize(
    "images, says",
    [
        (torch.zeros(1, 3, 12, 8, dtype=torch.uint8), "not torch.uint8: use card.transform"),
        (np.zeros((1, 3, 12, 8), np.float32), "not ndarray: make one with card.transform"),
    ],
)
def test_images_that_are_not_prepared_are_refused(images: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ViT(SMALL)(images)


@each_variant
@pytest.mark.parametrize("size", [(12, 8), (8, 16)], ids=["native", "other size"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_bfloat16_is_close(changes: dict[str, Any], size: tuple[int, int], autocast: bool) -> None:
    config = replace(SMALL, **changes)
    model, images = random_model(config), torch.randn(4, config.channels, *size)
    expected = model(images)
    if autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(images)
    else:
        output = model.bfloat16()(images.bfloat16())
    assert output.dtype == torch.bfloat16 or config.classes == 0
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.06 * expected.abs().max().item())


@each_variant
def test_gradients_reach_every_parameter(changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    if config.position == "relative":  # the class token's query has no offsets, so the last layer's go unread
        config = replace(config, pool="mean")
    model = random_model(config).train()
    logits = model(random_images(config))
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def assert_lecun_normal(weight: Tensor) -> None:
    """Deviation 1 / sqrt(fan_in), from a normal cut at two of its own deviations."""
    goal = 1 / math.sqrt(weight[0].numel())
    assert weight.std().item() == pytest.approx(goal, rel=0.02)
    assert weight.abs().max().item() == pytest.approx(2 * goal / 0.87962566, rel=0.02)


def assert_xavier_uniform(weight: Tensor) -> None:
    """Up to sqrt(6 / (fan_in + fan_out)), evenly."""
    bound = math.sqrt(6 / sum(weight.shape))
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert 0.99 * bound < weight.abs().max().item() <= bound


def test_initial_values_match_googles() -> None:
    torch.manual_seed(0)
    config = replace(SMALL, width=192, mlp=256, heads=3, image=(64, 64), registers=20, representation=150)
    w = ViT(replace(config, pool="map", layer_scale=True)).state_dict()
    first = "blocks.0"
    for weight in (*w[f"{first}.attention.qkv.weight"].chunk(3), *w["map.kv.weight"].chunk(2)):
        assert_xavier_uniform(weight)
    for name in ("attention.out", "mlp.hidden", "mlp.output"):
        assert_xavier_uniform(w[f"{first}.{name}.weight"])
    for name in ("map.q", "map.out", "map.mlp.hidden", "map.mlp.output"):
        assert_xavier_uniform(w[f"{name}.weight"])
    assert w["map.probe"].abs().max() <= math.sqrt(6 / (1 + 192))
    for name in ("embed", "head.hidden"):
        assert_lecun_normal(w[f"{name}.weight"])
    zeros = ["class_token", "head.output.weight", "head.output.bias", "head.hidden.bias", "embed.bias", "norm.bias"]
    zeros += [f"{first}.{name}.bias" for name in ("attention.qkv", "attention.out", "norm1", "norm2")]
    zeros += [f"map.{name}.bias" for name in ("q", "kv", "out", "norm")]
    assert not any(w[name].any() for name in zeros)
    assert all(w[f"{name}.weight"].eq(1).all() for name in ("norm", "map.norm", f"{first}.norm1", f"{first}.norm2"))
    for tiny in (w[f"{first}.mlp.hidden.bias"], w[f"{first}.mlp.output.bias"], w["registers"]):
        assert tiny.std().item() == pytest.approx(1e-6, rel=0.15)
    assert w["positions.0.table"].std().item() == pytest.approx(0.02, rel=0.02)
    assert w["positions.0.class_row"].std().item() == pytest.approx(0.02, rel=0.2)
    assert w[f"{first}.scale1.scale"].eq(1e-5).all()


def test_a_seed_gives_the_same_model() -> None:
    """The head starts at 0, so a new model knows nothing; its features are what the seed decides."""
    images, features = random_images(SMALL), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = ViT(SMALL).eval()
        assert not model(images).any()
        features.append(model.features(images))
    assert torch.equal(features[0], features[1])
    assert not torch.equal(features[0], features[2])
