"""Weights that attention starts with: tokens look at tokens like them, and subtract what they see."""

from __future__ import annotations

import pytest
import torch

from vitral import recipe as recipes
from vitral.errors import UserError
from vitral.models.initial import mimetic
from vitral.models.layers import Attention
from vitral.names import parse
from vitral.recipe import Recipe, ShapeRecipe
from vitral.training.prepare import prepare_model

HEADS, WIDTH = 4, 64


def start() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    qkv, out = torch.zeros(3 * WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
    mimetic(qkv, out, HEADS)
    return qkv, out


def test_keys_are_like_queries_and_outputs_undo_values():
    qkv, out = start()
    queries, keys, values = qkv.double().view(3, HEADS, -1, WIDTH)
    scores = queries.transpose(1, 2) @ keys  # what two tokens have in common, for each head
    share = scores.diagonal(dim1=1, dim2=2).sum(1) / (WIDTH // HEADS)
    assert share == pytest.approx(torch.full((HEADS,), 0.75 * 0.81), abs=0.08)
    seen = out.double() @ values.reshape(WIDTH, WIDTH)
    assert float(seen.trace()) / WIDTH == pytest.approx(-0.5 * 0.81, abs=0.05)
    heads = queries.reshape(HEADS, -1)
    assert float(torch.corrcoef(heads).fill_diagonal_(0).abs().max()) < 0.15  # heads do not look alike


def test_a_model_begins_by_looking_at_what_is_alike():
    """The mean share that a token gives itself, of 16 tokens with random numbers."""
    shares = []
    for kind in ("paper", "mimetic"):
        recipe = Recipe(model="ViT-Ti/16@64", shape=ShapeRecipe(depth=2, start=kind))
        model, _ = prepare_model(recipe, ("a", "b"))
        attention = next(module for module in model.modules() if isinstance(module, Attention))
        tokens = torch.nn.functional.layer_norm(torch.randn(8, 16, 192), (192,))
        q, k, _ = attention.qkv(tokens).detach().view(8, 16, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
        shares.append(float((q @ k.mT / 8).softmax(-1).diagonal(dim1=-2, dim2=-1).mean()))
    assert shares[0] < 0.15
    assert shares[1] > 0.6


def test_nothing_else_changes():
    kinds = [Recipe(model="ViT-Ti/16@64", shape=ShapeRecipe(depth=2, start=kind)) for kind in ("paper", "mimetic")]
    (one, _), (other, _) = (prepare_model(recipe, ("a", "b")) for recipe in kinds)
    changed = {name for name, weight in one.state_dict().items() if not torch.equal(weight, other.state_dict()[name])}
    assert changed == {f"blocks.{block}.attention.{name}.weight" for block in (0, 1) for name in ("qkv", "out")}


def test_a_convolutional_network_has_no_attention_to_start():
    recipe = Recipe(model="R50x1", shape=ShapeRecipe(start="mimetic"))
    with pytest.raises(UserError, match="name a ViT"):
        recipes.architecture_of(recipe, 2)
    assert recipes.architecture_of(Recipe(model="R50x1"), 2) == parse("R50x1", classes=2)
