"""Models whose parts somebody has changed, in tools and loops of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitral
from vitral.architecture import ViTConfig
from vitral.errors import UserError
from vitral.models.layers import StochasticDepth
from vitral.models.position import sincos2d
from vitral.models.vit import ViT

CONFIG = ViTConfig(depth=3, width=32, mlp=64, heads=2, patch=16, image=(48, 48), classes=5)
EMBEDDINGS: dict[str, Callable[[], nn.Conv2d]] = {
    "overlapping": lambda: nn.Conv2d(3, 32, 16, 8),
    "padded": lambda: nn.Conv2d(3, 32, 16, 16, padding=8),
    "reflecting": lambda: nn.Conv2d(3, 32, 16, 16, padding=8, padding_mode="reflect"),
    "smaller patches": lambda: nn.Conv2d(3, 32, 8, 8),
    "dilated": lambda: nn.Conv2d(3, 32, 8, 16, dilation=2),
}


def make_images(batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 48, 48)


@pytest.mark.parametrize("change", EMBEDDINGS)
def test_a_changed_embedding_is_applied_and_not_saved(change: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ViT(CONFIG)
    model.embed = EMBEDDINGS[change]()
    torch.testing.assert_close(model.patchify(make_images()), model.embed(make_images()).permute(0, 2, 3, 1))
    with pytest.raises(UserError, match="config"):
        vitral.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_smaller_stride_gives_denser_features() -> None:
    """The usual edit for dense features of DINO."""
    model = ViT(CONFIG)
    model.embed.stride = (8, 8)
    assert model.patchify(make_images()).shape == (2, 5, 5, 32)
    assert model(make_images()).shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_neither_positions_nor_draws(dtype: torch.dtype) -> None:
    """Lightning's "bf16-true" sets it around every step."""
    drop = StochasticDepth(0.003).train()
    expected = sincos2d((24, 24), 64)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(sincos2d((24, 24), 64), expected)
        draws = drop.draw(make_images())
    finally:
        torch.set_default_dtype(torch.float32)
    assert draws is not None
    assert draws.dtype == torch.float32


def test_a_replica_of_data_parallel_computes_the_same() -> None:
    """Its weights are plain attributes: it has no parameters."""
    model = ViT(CONFIG)
    modules = list(model.modules())
    replicas = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        for name, child in module._modules.items():
            setattr(replicas[id(module)], name, None if child is None else replicas[id(child)])
        for name, parameter in module._parameters.items():
            setattr(replicas[id(module)], name, None if parameter is None else parameter.clone())
    replica = replicas[id(model)]
    assert not list(replica.parameters())
    assert torch.equal(replica(make_images()), model(make_images()))


def test_removed_blocks_are_not_counted() -> None:
    model = ViT(CONFIG).eval()
    model.blocks = model.blocks[:2]
    assert len(model.intermediates(make_images())) == 2
    with vitral.capture(model) as attention:
        model(make_images())
    assert len(attention) == 2
    with pytest.raises(UserError, match="no layer 2"):
        attention[2]


def test_hooks_of_blocks_receive_tensors_alone() -> None:
    """Captum's layer attribution to inputs takes no others."""
    model, received = ViT(CONFIG), []
    for module in (model.blocks[0], model.blocks[0].attention):
        assert isinstance(module, nn.Module)
        module.register_forward_pre_hook(lambda _, inputs: received.append(inputs))
    model(make_images())
    assert [[type(value) for value in inputs] for inputs in received] == [[Tensor], [Tensor]]


@pytest.mark.parametrize("pool", ["token", "mean", "map"])
def test_an_empty_batch_has_no_logits(pool: str) -> None:
    model = vitral.create("ViT-Ti/16@32", depth=1, classes=5, pool=pool)
    assert model(torch.randn(0, 3, 32, 32)).shape == (0, 5)
