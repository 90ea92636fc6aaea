"""Captured attention against the equations, Google's numbers and autograd; the model computes what it did before."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import gap, pictures
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitral
from vitral.architecture import ResNetConfig, StemConfig, ViTConfig
from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.capture import AttentionCapture, capture
from vitral.models.layers import Attention
from vitral.models.vit import ViT

SMALL = ViTConfig(depth=3, width=16, mlp=24, heads=2, patch=4, image=(12, 8), classes=5)
GRID: dict[str, Any] = {"class_token": False, "pool": "mean"}
PLAIN: dict[str, ViTConfig] = {
    "paper": SMALL,
    "registers": replace(SMALL, registers=3),
    "relative": replace(SMALL, position="relative", registers=1),
    "relative, no prefix": replace(SMALL, position="relative", **GRID),
    "mean": replace(SMALL, **GRID),
    "hybrid": replace(SMALL, stem=StemConfig(blocks=(1,)), patch=1, image=(16, 12)),
}
AXIAL = replace(SMALL, axial=True, **GRID)
MAP = replace(SMALL, pool="map", registers=1)


def random_model(config: ViTConfig) -> ViT:
    torch.manual_seed(0)
    model = ViT(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images_for(config: ViTConfig, batch: int = 2) -> Tensor:
    return pictures(batch, config.channels, *config.image)


class Projections:
    """What the projection of each attention gave, by a hook of torch."""

    def __init__(self, model: ViT) -> None:
        self.outputs: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(".qkv"):
                module.register_forward_hook(lambda _, inputs, output, name=name: self.outputs.update({name: output}))

    def attention(self, name: str, heads: int, bias: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """(b, heads, n, n) in double precision, one head of one image at a time: equations 5 and 6."""
        images = []
        for qkv in self.outputs[name].double():
            q, k, _ = qkv.chunk(3, dim=-1)
            pairs = zip(q.chunk(heads, dim=-1), k.chunk(heads, dim=-1), strict=True)
            logits = [(q_h, torch.einsum("qd,kd->qk", q_h, k_h) / math.sqrt(q_h.shape[-1])) for q_h, k_h in pairs]
            weights = [torch.exp(logit if bias is None else logit + bias(q_h)) for q_h, logit in logits]
            images.append(torch.stack([weight / weight.sum(-1, keepdim=True) for weight in weights]))
        return torch.stack(images)


def relative_bias(model: ViT, layer: int) -> Callable[[Tensor], Tensor]:
    """Table 8, pair by pair: an embedding of the raster offset, read by the query; none for prefix tokens."""
    table = model.get_parameter(f"blocks.{layer}.attention.relative.table").double()
    prefix = model.config.prefix

    def bias(q: Tensor) -> Tensor:
        found = torch.zeros(len(q), len(q), dtype=q.dtype)
        for i in range(prefix, len(q)):
            for j in range(prefix, len(q)):
                found[i, j] = (q[i] * table[i - j + len(table) // 2]).sum() / math.sqrt(q.shape[-1])
        return found

    return bias


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN.keys())
def test_rows_match_the_equations_and_logits_are_unchanged(config: ViTConfig) -> None:
    model, images = random_model(config), images_for(config)
    truth = Projections(model)
    with torch.no_grad():
        plain = model(images)
        with capture(model, rows="all") as seen:
            watched = model(images)
    assert torch.equal(plain, watched)
    assert seen.keys == (0, 1, 2)
    for layer in range(3):
        bias = relative_bias(model, layer) if config.position == "relative" else None
        expected = truth.attention(f"blocks.{layer}.attention.qkv", config.heads, bias)
        assert seen[layer].dtype == torch.float32
        assert gap(seen[layer], expected) <= 1e-6
        assert gap(seen[layer].sum(-1), torch.ones(expected.shape[:-1])) <= 1e-6


def test_google_has_the_same_probabilities(golden_file: Callable[[str], Path]) -> None:
    truth = np.load(golden_file("vit_token_p16.io.npz"), allow_pickle=False)
    model, _ = vitral.load(golden_file("vit_token_p16.ckpt.npz"), heads=2)
    images = torch.from_numpy(truth["r64/images"]).permute(0, 3, 1, 2)
    with torch.no_grad(), capture(model, rows="all") as seen:
        assert gap(model(images), truth["r64/logits"]) <= 2e-5
    for layer in range(2):
        assert gap(seen[layer], truth[f"r64/attention_{layer}"]) <= 2e-5


@given(
    layers=st.lists(st.integers(-3, 2), min_size=1, max_size=3),
    heads=st.lists(st.integers(-2, 1), min_size=1, max_size=3),
    rows=st.lists(st.integers(-7, 6), min_size=1, max_size=4),
)
def test_chosen_layers_heads_and_rows_are_slices_of_all(layers: list[int], heads: list[int], rows: list[int]) -> None:
    model, images = random_model(SMALL), images_for(SMALL)
    with (
        torch.no_grad(),
        capture(model, rows="all") as whole,
        capture(model, layers=layers, heads=heads, rows=rows) as part,
    ):
        model(images)
    assert part.keys == tuple(sorted({layer % 3 for layer in layers}))
    for layer in layers:
        assert gap(part[layer], whole[layer][:, heads][:, :, rows]) <= 1e-6
        assert torch.equal(part[layer], part[layer % 3])


def test_the_class_token_is_row_0() -> None:
    model, images = random_model(PLAIN["registers"]), images_for(SMALL)
    with torch.no_grad(), capture(model) as seen, capture(model, rows="all") as whole:
        model(images)
    for layer in seen.keys:
        assert seen[layer].shape == (2, 2, 1, 10)
        assert gap(seen[layer], whole[layer][:, :, :1]) <= 1e-6


@pytest.mark.parametrize("config", [SMALL, PLAIN["relative"], MAP], ids=["paper", "relative", "map"])
def test_autocast_keeps_the_probabilities_in_single_precision(config: ViTConfig) -> None:
    model, images = random_model(config), images_for(config)
    truth = Projections(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(images)
        with capture(model, rows="all") as seen:
            watched = model(images)
    assert torch.equal(plain, watched)
    for layer in seen.keys:
        name = f"blocks.{layer}.attention.qkv"
        assert truth.outputs[name].dtype == torch.bfloat16
        assert seen[layer].dtype == torch.float32
        assert gap(seen[layer].sum(-1), torch.ones(seen[layer].shape[:-1])) <= 1e-6
        if config.position != "relative":  # whose bias torch makes in bfloat16
            assert gap(seen[layer], truth.attention(name, config.heads)) <= 1e-5


def test_an_axial_block_shows_rows_and_columns() -> None:
    model, images = random_model(AXIAL), images_for(AXIAL)
    truth = Projections(model)
    with torch.no_grad():
        plain = model(images)
        with capture(model, layers=[0, -1], rows="all") as seen:
            assert torch.equal(model(images), plain)
    assert seen.keys == ((0, "row"), (0, "column"), (2, "row"), (2, "column"))
    assert seen[0, "row"].shape == (2 * 3, 2, 2, 2)  # a grid of 3 by 2
    assert seen[0, "column"].shape == (2 * 2, 2, 3, 3)
    for layer in (0, 2):
        for axis in ("row", "column"):
            expected = truth.attention(f"blocks.{layer}.{axis}.attention.qkv", 2)
            assert gap(seen[layer, axis], expected) <= 1e-6
    assert torch.equal(seen[-1, "row"], seen[2, "row"])


def test_attention_pooling_shows_its_probe() -> None:
    model, images = random_model(MAP), images_for(MAP)
    pool = model.map
    assert pool is not None
    with torch.no_grad():
        plain = model(images)
        with capture(model, layers=[1]) as seen:
            assert torch.equal(model(images), plain)
        patches = model.encode(model.patchify(images))[:, MAP.prefix :].double()
        pool.double()
        q, k = pool.q(pool.probe).view(2, 8), pool.kv(patches)[..., :16].unflatten(-1, (2, 8))
    weights = torch.exp(torch.einsum("hd,bnhd->bhn", q, k) / math.sqrt(8))
    assert seen.pool.shape == (2, 2, 1, 6)
    assert gap(seen.pool[:, :, 0], weights / weights.sum(-1, keepdim=True)) <= 1e-6


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_dropout_is_not_in_the_probabilities(mode: str) -> None:
    config = replace(SMALL, attention_dropout=0.5, dropout=0.1)
    model, images = random_model(config).train(mode == "train"), images_for(config)
    truth = Projections(model)
    torch.manual_seed(1)
    plain = model(images)
    torch.manual_seed(1)
    with capture(model, rows="all") as seen:
        watched = model(images)
    assert torch.equal(plain, watched)
    assert not seen[0].requires_grad
    for layer in seen.keys:
        assert gap(seen[layer], truth.attention(f"blocks.{layer}.attention.qkv", 2)) <= 1e-6


@pytest.fixture
def forget_graphs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # pytest would collect every step of the compiler
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED = [(SMALL, "eager"), (SMALL, "aot_eager"), (PLAIN["relative"], "aot_eager"), (AXIAL, "eager"), (MAP, "eager")]


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize(("config", "backend"), COMPILED, ids=["paper", "paper, aot", "relative, aot", "axial", "map"])
def test_a_compiled_model_shows_the_same(config: ViTConfig, backend: str) -> None:
    """Compiled before the first capture and, as one graph more, inside it; whatever is captured later fits that one."""
    model = random_model(replace(config, depth=1))
    rows = "cls" if model.config.class_token else "all"
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    graphs = []
    with torch.no_grad():
        for seed in range(3):
            images = pictures(2, 3, 12, 8, seed=seed)
            plain = compiled(images)
            with capture(compiled, rows=rows) as seen:
                assert gap(compiled(images), plain) <= 1e-5
            with capture(model, rows=rows) as expected:
                assert gap(model(images), plain) <= 1e-5
            assert gap(compiled(images), plain) == 0
            for left, right in zip(shown(seen), shown(expected), strict=True):
                assert gap(left, right) <= 1e-5
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3


def shown(seen: AttentionCapture) -> list[Tensor]:
    return [seen[key] for key in seen.keys]


@pytest.mark.usefixtures("forget_graphs")
def test_a_model_may_be_compiled_inside() -> None:
    model, images = random_model(SMALL), images_for(SMALL)
    with torch.no_grad(), capture(model, layers=[-1]) as seen:
        logits = model(images)
        expected = seen[-1]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert gap(compiled(images), logits) <= 1e-5
        assert seen[-1] is not expected
    assert gap(seen[-1], expected) <= 1e-5


def explicit(probabilities: list[Tensor]) -> Callable[..., Tensor]:
    """Attention without a fused kernel; its probabilities are part of the graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        probabilities.append((logits if attn_mask is None else logits + attn_mask).softmax(dim=-1))
        return probabilities[-1] @ v

    return attend


@pytest.mark.parametrize("name", ["paper", "relative", "mean", "axial", "hybrid"])
def test_gradients_are_those_of_explicit_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**PLAIN, "axial": AXIAL}[name]
    model, images = random_model(config), images_for(config)
    with capture(model, rows="all", gradients=True) as seen:
        fused = model(images)
    assert torch.equal(fused, model(images))
    gradients = seen.gradients(fused[:, 1].sum())
    probabilities: list[Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", explicit(probabilities))
    logits = model(images)
    assert gap(logits, fused) <= 1e-4
    expected = torch.autograd.grad(logits[:, 1].sum(), probabilities)
    assert list(gradients) == list(seen.keys)
    for gradient, truth, key in zip(gradients.values(), expected, seen.keys, strict=True):
        assert gradient.shape == seen[key].shape
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-5)


def test_gradients_of_chosen_rows_and_of_several_scores() -> None:
    model, images = random_model(SMALL), images_for(SMALL)
    with (
        capture(model, rows="all", gradients=True) as whole,
        capture(model, layers=[1], heads=[1], gradients=True) as part,
    ):
        logits = model(images)
    both = [whole.gradients(logits[:, 0].sum())[1], whole.gradients(logits[:, 2].sum())[1]]
    assert gap(both[0], both[1]) > 1e-3
    assert gap(part.gradients(logits[:, 2].sum())[1], both[1][:, 1:, :1]) <= 1e-6


def test_unavailable_gradients_are_refused() -> None:
    model, images = random_model(replace(SMALL, attention_dropout=0.1)), images_for(SMALL)
    assert model.class_token is not None
    with capture(model, gradients=True) as seen, capture(model) as without:
        with torch.no_grad():
            model(images)
        with pytest.raises(UserError, match="recorded no gradient"):
            seen.gradients(model.class_token.sum())
        logits = model(images)
    with pytest.raises(UserError, match="gradients=True"):
        without.gradients(logits.sum())
    with pytest.raises(UserError, match="does not depend on layer 0"):
        seen.gradients(model.class_token.sum())
    model.train()
    with pytest.raises(UserError, match=r"call model\.eval"):
        seen.gradients(logits.sum())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_class_token_rows_need_no_quadratic_memory() -> None:
    model = random_model(replace(SMALL, depth=1, width=4, mlp=4, heads=1, patch=1, image=(32, 32)))
    images, n = pictures(1, 3, 32, 32), 1 + 32 * 32
    largest = {}
    for rows in ("cls", "all"):
        with torch.inference_mode(), capture(model, rows=rows), Largest() as largest[rows]:
            model(images)
    assert largest["all"].elements == n**2
    assert largest["cls"].elements <= 16 * n


def test_reduce_keeps_only_what_it_makes() -> None:
    model, images = random_model(SMALL), images_for(SMALL)
    with (
        torch.no_grad(),
        capture(model, rows="all") as seen,
        capture(model, rows="all", reduce=lambda a: a.amax(dim=1)) as least,
    ):
        model(images)
    assert torch.equal(least[1], seen[1].amax(dim=1))


def observers(model: ViT) -> int:
    return sum(len(module.observers) for module in model.modules() if isinstance(module, Attention))


def test_the_latest_pass_is_kept() -> None:
    model = random_model(SMALL)
    first, second = pictures(1, 3, 12, 8, seed=1), pictures(3, 3, 16, 8, seed=2)
    with torch.no_grad():
        with capture(model) as alone:
            model(second)
        with capture(model) as seen:
            model(first)
            model(second)
        model(first)
    assert torch.equal(seen[0], alone[0])
    assert seen[0].shape == (3, 2, 1, 9)


def test_captures_overlap_and_end_in_any_order() -> None:
    model, images = random_model(SMALL), images_for(SMALL)
    early, late = ExitStack(), ExitStack()
    with torch.no_grad():
        one = early.enter_context(capture(model, layers=[0]))
        two = late.enter_context(capture(model, layers=[0, 1]))
        early.close()
        model(images)
        late.close()
    with pytest.raises(UserError, match="nothing was captured yet"):
        one[0]
    assert two[0].shape == (2, 2, 1, 7)
    assert observers(model) == 0


def test_an_exception_ends_the_capture() -> None:
    model = random_model(SMALL)
    with pytest.raises(UserError, match="3-channel"), capture(model):
        assert observers(model) == 3
        model(pictures(1, 1, 12, 8))
    assert observers(model) == 0


def test_a_wrapped_model_is_found() -> None:
    model = random_model(SMALL)
    with torch.no_grad(), capture(nn.Sequential(nn.Identity(), model)) as seen:
        model(images_for(SMALL))
    assert seen[2].shape == (2, 2, 1, 7)


REFUSED: list[tuple[dict[str, Any], ViTConfig, str]] = [
    ({"layers": [3]}, SMALL, "no layer 3: the model has 3"),
    ({"layers": [-4]}, SMALL, "no layer -4"),
    ({"layers": 3}, SMALL, "layers must be a list of whole numbers, not 3"),
    ({"layers": ["a"]}, SMALL, r"layers must be a list of whole numbers, not \['a'\]"),
    ({"heads": [2]}, SMALL, "no head 2: the model has 2"),
    ({"heads": [0.5]}, SMALL, r"heads must be a list of whole numbers, not \[0.5\]"),
    ({"rows": 3}, SMALL, "rows must be a list of whole numbers, not 3"),
    ({"rows": "class"}, SMALL, 'rows="class" is not one of'),
    ({"rows": [7]}, SMALL, "a token that does not exist: there are 7"),
    ({"rows": "cls"}, PLAIN["mean"], "no class token"),
    ({"rows": [0]}, AXIAL, "along whole rows and columns"),
]


@pytest.mark.parametrize(("options", "config", "message"), REFUSED)
def test_unknown_layers_heads_and_rows_are_refused(options: dict[str, Any], config: ViTConfig, message: str) -> None:
    model = random_model(config)
    with pytest.raises(UserError, match=message), capture(model, **options):
        model(images_for(config))
    assert observers(model) == 0


def test_indices_may_be_an_array_or_a_tensor() -> None:
    model = random_model(SMALL)
    indices: dict[str, Any] = {"layers": torch.tensor([0, 2]), "heads": np.array([1]), "rows": range(3)}
    with torch.no_grad(), capture(model, **indices) as seen:
        model(images_for(SMALL))
    assert seen.keys == (0, 2)
    assert seen[2].shape == (2, 1, 3, 7)


def test_a_resnet_has_no_attention() -> None:
    with (
        pytest.raises(UserError, match="choose a Vision Transformer"),
        capture(build(ResNetConfig(blocks=(1, 1, 1, 1), image=(32, 32)))),
    ):
        pass


def test_layers_not_captured_are_refused() -> None:
    model = random_model(SMALL)
    with torch.no_grad(), capture(model, layers=[1]) as seen:
        model(images_for(SMALL))
    with pytest.raises(UserError, match=r"2 was not captured: use one of \[1\]"):
        seen[2]
    with pytest.raises(UserError, match="no layer 3"):
        seen[3]
    with pytest.raises(UserError, match='only pool="map" has a probe'):
        _ = seen.pool


def test_a_capture_is_iterated_as_a_dict_of_its_layers() -> None:
    model = random_model(SMALL)
    with torch.no_grad(), capture(model, layers=[0, -1]) as seen:
        model(images_for(SMALL))
    assert list(seen) == [0, 2]
    assert len(seen) == 2
    assert all(seen[layer].shape[2] == 1 for layer in seen)
