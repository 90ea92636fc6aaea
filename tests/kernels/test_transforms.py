"""Models whose operators are counted, mapped or differentiated forward need PyTorch's own, not kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral import create
from vitral.architecture import ViTConfig
from vitral.kernels import blocks, dispatch, group_norm
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_vit() -> nn.Module:
    return ViT(ViTConfig(depth=2, width=48, mlp=96, heads=3, patch=16, image=(32, 32), classes=5))


def small_resnet() -> nn.Module:
    return create("R26x1@32", classes=5)


def flops(model: nn.Module, images: Tensor) -> Tensor:
    """Of each module, which a formula per operator counts."""
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    counts = counter.get_flop_counts()
    return torch.tensor([sum(counts[name].values()) for name in sorted(counts)])


def gradients_per_image(model: nn.Module, images: Tensor) -> Tensor:
    """Of the head's weight."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, weights, (image[None],)).square().sum()

    per_image = vmap(grad(loss), in_dims=(None, 0))(weights, images)
    return next(value for name, value in per_image.items() if name.startswith("head") and value.ndim == 3)


def forward_derivative(model: nn.Module, images: Tensor) -> Tensor:
    return jvp(model, (images,), (torch.ones_like(images),))[1]


def dual_numbers(model: nn.Module, images: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(images, torch.ones_like(images)))).tangent
    assert tangent is not None
    return tangent


def compiled_forward_derivative(model: nn.Module, images: Tensor) -> Tensor:
    return jvp(torch.compile(model, backend="eager"), (images,), (torch.ones_like(images),))[1]


def jit_traced(model: nn.Module, images: Tensor) -> Tensor:
    graph: Any = torch.jit.trace(model, images, check_trace=False)
    assert not any(name in str(graph.inlined_graph) for name in ("vitral::", "PythonOp"))
    return graph(images)


def traced(model: nn.Module, images: Tensor) -> Tensor:
    return make_fx(model)(images)(images)


LOOKS = (
    *(flops, gradients_per_image, forward_derivative, compiled_forward_derivative),
    *(dual_numbers, traced, jit_traced),
)


@pytest.fixture
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)


@pytest.mark.parametrize("make_model", [small_vit, small_resnet])
@pytest.mark.filterwarnings("ignore")  # of the tracers
@pytest.mark.parametrize("look", LOOKS)
def test_transforms_see_the_operators_of_pytorch(
    look: Callable[[nn.Module, Tensor], Tensor], make_model: Callable[[], nn.Module], request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    model, images = make_model().to(DEVICE), torch.randn(2, 3, 32, 32, device=DEVICE)
    with sdpa_kernel(SDPBackend.MATH):  # others have no forward derivative
        expected = look(model, images)
        request.getfixturevalue("kernels_on_any_device")
        torch.testing.assert_close(look(model, images), expected)


@pytest.mark.parametrize("make_model", [small_vit, small_resnet])
def test_fake_tensors_start_no_kernel(make_model: Callable[[], nn.Module], kernels_on_any_device: None) -> None:
    with FakeTensorMode():
        logits = make_model()(torch.randn(2, 3, 32, 32))
        logits.sum().backward()
    assert logits.shape == (2, 5)


class TwoTensors(Tensor):
    """A subclass that computes in its own way."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> TwoTensors:
        like = {"strides": first.stride(), "dtype": first.dtype, "device": first.device}
        return Tensor._make_wrapper_subclass(cls, first.shape, **like)  # type: ignore[missing-attribute]

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.pair = (first, second)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[bad-override]
        def one(index: int) -> Any:
            pick = lambda x: x.pair[index] if isinstance(x, TwoTensors) else x  # noqa: E731
            return func(*tree_map(pick, args), **tree_map(pick, kwargs or {}))

        results = zip(*(tree_leaves(one(index)) for index in (0, 1)), strict=True)
        wrapped = [TwoTensors(*pair) if isinstance(pair[0], Tensor) else pair[0] for pair in results]
        return tree_unflatten(wrapped, tree_structure(one(0)))


@pytest.mark.parametrize("make_model", [small_vit, small_resnet])
def test_subclasses_of_tensors_reach_no_kernel(make_model, kernels_on_any_device):
    model, images = make_model().to(DEVICE), torch.randn(2, 1, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        logits = model(TwoTensors(*images))
        for found, image in zip(logits.pair, images, strict=True):
            torch.testing.assert_close(found, model(image), rtol=1e-3, atol=1e-3)


class Called(Exception):
    pass


@pytest.mark.parametrize(
    ("make_model", "module", "kernel"), [(small_vit, blocks, "encode"), (small_resnet, group_norm, "group_norm")]
)
def test_kernels_are_used_without_transforms(make_model, module, kernel, monkeypatch, kernels_on_any_device):
    """Else the tests above would compare PyTorch with itself."""

    def raise_called(*arguments: object, **options: object) -> None:
        raise Called

    monkeypatch.setattr(module, kernel, raise_called)
    with pytest.raises(Called):
        make_model().to(DEVICE)(torch.randn(2, 3, 32, 32, device=DEVICE))
