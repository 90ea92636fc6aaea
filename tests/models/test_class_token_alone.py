"""One image on a CPU: the last block computes the class token alone if nothing can tell, and all tokens otherwise."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from oracles import quiet
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from vitral.architecture import RopeConfig, ViTConfig
from vitral.kernels.packed import pack, pack_int8
from vitral.models.adapters import add_lora
from vitral.models.build import build
from vitral.models.layers import computes_tokens_alone
from vitral.models.vit import ViT


class Subclass(torch.Tensor):
    """As quantised and distributed tensors are."""


TINY: dict[str, Any] = {"depth": 3, "width": 32, "mlp": 64, "heads": 2, "patch": 8, "image": (24, 24), "classes": 5}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"registers": 3},
    "rope": {"rope": RopeConfig()},
    "relative": {"position": "relative"},
    "bias": {"position": "bias"},
    "every": {"injection": "every"},
    "post": {"post_norm": True},
    "swiglu": {"swiglu": True},
    "qk norm": {"qk_norm": True},
    "scaled": {"layer_scale": True},
    "dropout": {"dropout": 0.5, "attention_dropout": 0.5, "stochastic_depth": 0.5},
    "one block": {"depth": 1},
}


def make_model(**changes: Any) -> ViT:
    torch.manual_seed(0)
    model = build(ViTConfig(**{**TINY, **changes}))
    assert isinstance(model, ViT)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model.eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def whole(model: ViT, images: torch.Tensor) -> torch.Tensor:
    """The logits by the parts that compute all tokens."""
    return model.head(model.pool(model.encode(model.patchify(images))))


class Multiplications(TorchDispatchMode):
    """How many there are in linear layers. PyTorch's FLOP counter has hooks, so that all tokens are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.count += output.numel() * args[-2].shape[-1]
        return output


def saved(model: ViT, images: torch.Tensor) -> int:
    """How many multiplications fewer than the parts that compute all tokens the model needs for the same logits."""
    with Multiplications() as least:
        logits = model(images)
    with Multiplications() as most:
        expected = whole(model, images)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    return most.count - least.count


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_class_token_alone_has_the_same_logits(kind, images):
    model = make_model(**KINDS[kind])
    weights = [layer.weight.numel() for layer in model.blocks[-1].modules() if isinstance(layer, nn.Linear)]
    qkv, others = weights[0], weights[1:]
    assert qkv == 3 * 32 * 32
    relative = model.config.position in ("relative", "bias")  # which exist between all tokens
    assert saved(model, images) == (0 if relative else (9 + model.config.registers) * sum(others))


@torch.no_grad()
def test_all_tokens_are_computed_where_something_could_tell(images):
    def replaced(model: Any) -> None:
        model.blocks[-1].mlp = nn.Sequential(model.blocks[-1].mlp)

    def subclass(model: Any) -> None:
        layer = model.blocks[-1].mlp.output
        layer.weight = nn.Parameter(layer.weight.as_subclass(Subclass))

    def over_tokens(model: Any) -> None:
        model.blocks[-1].norm2 = nn.LayerNorm([10, 32])

    def own_norm(model: Any) -> None:
        model.norm = nn.Sequential(model.norm)

    def own_encode(model: Any) -> None:
        model.encode = partial(ViT.encode, model)

    def own_pool(model: Any) -> None:
        model.pool = lambda tokens: tokens[:, 0]

    changes: dict[str, Callable[[Any], object]] = {
        "hook": lambda model: model.blocks[-1].register_forward_hook(lambda *_: None),
        "inner hook": lambda model: model.blocks[-1].mlp.hidden.register_forward_hook(lambda *_: None),
        "hook of the norm": lambda model: model.norm.register_forward_hook(lambda *_: None),
        "replaced": replaced,
        "tensor subclass": subclass,
        "norm over tokens": over_tokens,
        "own norm": own_norm,
        "own encode": own_encode,
        "own pool": own_pool,
        "parametrized": lambda model: spectral_norm(model.blocks[-1].mlp.output).eval(),
    }
    for name, change in changes.items():
        model = make_model()
        assert saved(model, images)
        change(model)
        assert saved(model, images) == 0, name


@torch.no_grad()
def test_batches_have_the_bits_of_all_tokens(images):
    model, batch = make_model(), images.expand(3, -1, -1, -1)
    assert not saved(model, batch)
    assert torch.equal(model(batch), whole(model, batch))


@torch.no_grad()
def test_gradient_checkpointing_does_not_change_the_bits_of_inference(images):
    model = make_model()
    logits, fewer = model(images), saved(model, images)
    model.set_grad_checkpointing()
    assert saved(model, images) == fewer > 0
    assert torch.equal(model(images), logits)


@torch.no_grad()
def test_checkpointing_keeps_a_forward_of_ones_own(images):
    model: Any = make_model()
    block, shapes = model.blocks[-1], []

    def own(x: torch.Tensor, grid: Any, rotation: Any = None) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return type(block).forward(block, x, grid, rotation)

    block.forward = own
    for enable in (True, True, False):
        model.set_grad_checkpointing(enable)
        assert saved(model, images) == 0
    assert block.forward is own
    assert shapes == [(1, 10, 32)] * 6


def test_gradients_and_training_have_the_bits_of_all_tokens(images):
    model = make_model(**KINDS["dropout"])
    assert torch.equal(model(images), whole(model, images))
    model.train()
    with torch.no_grad():
        torch.manual_seed(2)
        logits = model(images)
        torch.manual_seed(2)
        assert torch.equal(logits, whole(model, images))


@torch.no_grad()
def test_subclasses_have_what_they_define(images):
    class Doubled(ViT):
        def encode(self, patches: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
            return 2 * super().encode(patches, visible)

    class Pooled(ViT):
        def pool(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.mean(dim=1)

    class Centred(ViT):
        def _final_norm(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens - tokens.mean(dim=1, keepdim=True)

    class Scaled(ViT):
        def _apply_block(self, index: int, x: torch.Tensor, *more: Any, **only: Any) -> torch.Tensor:
            assert not only
            return super()._apply_block(index, x, *more) + x.mean(dim=1, keepdim=True)

    model = make_model()
    for kind in (Doubled, Pooled, Centred, Scaled):
        own = deepcopy(model)
        own.__class__ = kind
        assert not saved(own, images)
        assert not torch.allclose(own(images), model(images))


@torch.no_grad()
@pytest.mark.parametrize("pool", ["mean", "map"])
def test_models_that_pool_all_tokens_compute_them(pool, images):
    assert not saved(make_model(pool=pool), images)


@torch.no_grad()
def test_observers_see_all_tokens(images):
    model: Any = make_model()
    shapes = []

    class Recorder:
        def observe(self, q: Any, k: Any, v: Any, bias: Any, output: torch.Tensor) -> None:
            shapes.append(tuple(output.shape))

    model.blocks[-1].attention.observers.append(Recorder())
    model(images)
    assert shapes == [(1, 2, 10, 16)]


@torch.no_grad()
def test_lora_and_packed_layers_compute_the_class_token_alone(images):
    def lora(some: ViT) -> None:
        add_lora(some, 2)
        some.eval()  # the adapters are new

    model = make_model(width=256, heads=4, mlp=512)
    for change in (lora, pack, lambda some: pack_int8(some.blocks)):
        changed = deepcopy(model)
        change(changed)
        assert computes_tokens_alone(changed.blocks[-1])
        expected = whole(changed, images)
        found = changed(images)
        assert (found - expected).norm() < 1e-4 * expected.norm()


@torch.no_grad()
def test_an_empty_batch_has_no_logits(images):
    assert make_model()(images[:0]).shape == (0, 5)


def test_a_trace_has_the_same_logits(images):
    model = make_model()
    with quiet():
        traced: Any = torch.jit.trace(model, images)
    torch.testing.assert_close(traced(images), model(images))


@torch.no_grad()
def test_compiled_and_exported_models_have_the_same_logits(images):
    model = make_model(registers=2)
    expected = whole(model, images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    program = torch.export.export(model, (images,))
    for logits in (compiled(images), program.module()(images)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
