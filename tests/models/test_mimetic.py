"""A mimetic start: tokens look at tokens like them, subtract what they see, and are like their neighbours."""

from __future__ import annotations

import pytest
import torch
from runs import make_pictures

import vitral
from vitral import recipe as recipes
from vitral.api.recipes import choose_recipe
from vitral.errors import UserError
from vitral.models.build import build, mimetic_init
from vitral.models.layers import Attention
from vitral.models.vit import ViT
from vitral.names import parse
from vitral.recipe_schema import Recipe, ShapeRecipe
from vitral.training.build import build_model

HEADS, WIDTH = 4, 64


def started(**changes: object) -> ViT:
    torch.manual_seed(0)
    model = build(parse("ViT-Ti/4@24", width=WIDTH, heads=HEADS, depth=2, mlp=WIDTH, classes=2, **changes))
    assert isinstance(model, ViT)
    mimetic_init(model)
    return model


def test_keys_are_like_queries_and_outputs_undo_values():
    for attention in (module for module in started().modules() if isinstance(module, Attention)):
        qkv, out = attention.qkv.weight.detach().double(), attention.out.weight.detach().double()
        queries, keys, values = qkv.view(3, HEADS, -1, WIDTH)
        scores = queries.transpose(1, 2) @ keys  # what two tokens have in common, for each head
        share = scores.diagonal(dim1=1, dim2=2).sum(1) / (WIDTH // HEADS)
        assert share == pytest.approx(torch.full((HEADS,), 0.75 * 0.81), abs=0.12)
        seen = out @ values.reshape(WIDTH, WIDTH)
        assert float(seen.trace()) / WIDTH == pytest.approx(-0.5 * 0.81, abs=0.05)
        heads = torch.corrcoef(queries.reshape(HEADS, -1))
        assert float(heads.fill_diagonal_(0).abs().max()) < 0.15  # heads do not look alike


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_learned_positions_start_as_those_that_are_fixed_but_for_their_mean(kind):
    patches = torch.zeros(1, 6, 6, WIDTH)
    fixed, learned = (started(position=name).positions[0] for name in ("sincos2d", kind))
    table = fixed(patches)[1:]  # but for the class token's
    torch.testing.assert_close(learned(patches)[1:], table - table.mean(0))
    assert all(weight.requires_grad for weight in learned.parameters())


@pytest.mark.parametrize(("width", "heads", "kind"), [(90, 3, "1d"), (90, 3, "2d"), (45, 3, "1d")])
def test_sines_fill_what_four_divides_of_any_width(width, heads, kind):
    torch.manual_seed(0)
    model = build(parse("ViT-Ti/4@24", width=width, heads=heads, depth=1, mlp=8, classes=2, position=kind))
    assert isinstance(model, ViT)
    mimetic_init(model)
    table = model.positions[0](torch.zeros(1, 6, 6, width))[1:]
    used = table.abs().amax(0) > 0
    assert int(used.sum()) == 4 * (width // 4)
    assert torch.unique(table, dim=0).shape[0] == 36  # no place is like another


@pytest.mark.slow
def test_digits_are_learnt_faster_than_from_the_paper_s_start(tmp_path):
    pytest.importorskip("sklearn")
    losses = {}
    for kind in ("paper", "mimetic"):
        words = ["steps=90", "evaluate_every=90", "workers=0", "optim.name=muon", "optim.momentum=0.95"]
        done = vitral.train("digits", set=[*words, f"shape.weight_init={kind}"], out=tmp_path / kind, device="cpu")
        losses[kind] = done.results[0].metrics["nll"]
    assert losses["mimetic"] < 0.7 * losses["paper"]


def test_a_model_begins_by_looking_at_what_is_alike():
    """The mean share that a token gives itself, of 16 tokens with random numbers."""
    shares = []
    for kind in ("paper", "mimetic"):
        recipe = Recipe(model="ViT-Ti/16@64", shape=ShapeRecipe(depth=2, weight_init=kind))
        model, _ = build_model(recipe, ("a", "b"))
        attention = next(module for module in model.modules() if isinstance(module, Attention))
        tokens = torch.nn.functional.layer_norm(torch.randn(8, 16, 192), (192,))
        q, k, _ = attention.qkv(tokens).detach().view(8, 16, 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
        shares.append(float((q @ k.mT / 8).softmax(-1).diagonal(dim1=-2, dim2=-1).mean()))
    assert shares[0] < 0.15
    assert shares[1] > 0.6


def test_nothing_else_changes():
    kinds = [
        Recipe(model="ViT-Ti/16@64", shape=ShapeRecipe(depth=2, weight_init=kind)) for kind in ("paper", "mimetic")
    ]
    (one, _), (other, _) = (build_model(recipe, ("a", "b")) for recipe in kinds)
    changed = {name for name, weight in one.state_dict().items() if not torch.equal(weight, other.state_dict()[name])}
    attention = {f"blocks.{block}.attention.{name}.weight" for block in (0, 1) for name in ("qkv", "out")}
    assert changed == attention | {"positions.0.table"}


def test_a_convolutional_network_has_no_attention_to_start():
    recipe = Recipe(model="R50x1", shape=ShapeRecipe(weight_init="mimetic"))
    with pytest.raises(UserError, match="name a ViT"):
        recipes.architecture_of(recipe, 2)
    assert recipes.architecture_of(Recipe(model="R50x1"), 2) == parse("R50x1", classes=2)


@pytest.mark.parametrize(
    ("words", "optimizer", "start"),
    [
        ([], "muon", "mimetic"),
        (["optim.name = muon"], "muon", "mimetic"),
        (["shape.weight_init=paper"], "muon", "paper"),
        (["optim.name=adamw"], "adamw", "paper"),
        (["parallel=fsdp"], "adamw", "paper"),
        (["objective=masked", "data.mixup=0"], "adamw", "paper"),
        (["model=R50x1"], "adamw", "paper"),
    ],
)
def test_the_default_yields_to_what_is_said(words, optimizer, start, tmp_path):
    pictures = make_pictures(tmp_path / "pictures")
    _, recipe, _ = choose_recipe(pictures, set=words, device="cpu")
    assert (recipe.optim.name, recipe.shape.weight_init) == (optimizer, start)


def test_a_card_says_what_a_model_started_from():
    for kind in ("paper", "mimetic"):
        _, card = build_model(Recipe(model="ViT-Ti/16@64", shape=ShapeRecipe(depth=1, weight_init=kind)), ("a", "b"))
        assert ("mimetic" in card.source) == (kind == "mimetic")
