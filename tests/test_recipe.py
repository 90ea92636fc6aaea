"""Recipes: strict when made, the same after a trip through text, and chosen sensibly from the data."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, fields, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitral.architecture import ResNetConfig, RopeConfig, ViTConfig
from vitral.data.preprocess import parse_pipeline
from vitral.errors import UserError
from vitral.names import parse
from vitral.recipe import (
    _FOREIGN_KEYS,
    Recipe,
    architecture_of,
    from_dict,
    from_toml,
    keys,
    pipelines,
    recipe_hash,
    to_toml,
    values,
    with_overrides,
)
from vitral.recipe_defaults import default_recipe
from vitral.recipe_schema import (
    DataRecipe,
    MaskedRecipe,
    OptimRecipe,
    RegularizationRecipe,
    ScheduleRecipe,
    ShapeRecipe,
)

OTHER = Recipe(
    model="B/16",
    init='C:\\weights "final" é😀\x7f\n.npz',
    epochs=0,
    steps=500,
    trainable="last:2",
    compile=True,
    precision="bfloat16",
    ema_decay=0.9999,
    data=DataRecipe(mean=(0.485, 0.456, 0.406), std=(1, 2, 3), mixup=0.2),
    optim=OptimRecipe(name="sgd", lr=1e-5, clip=0),
    schedule=ScheduleRecipe(kind="multistep", drops=(0.3, 600), factors=(0.1, 0.01)),
    regularization=RegularizationRecipe(dropout=0.1),
)


@pytest.mark.parametrize("recipe", [Recipe(), OTHER, Recipe(shape=ShapeRecipe(width=96, pool="mean"))])
def test_recipes_survive_toml_and_json(recipe):
    assert from_toml(to_toml(recipe)) == recipe
    assert from_dict(json.loads(json.dumps(asdict(recipe)))) == recipe
    assert recipe_hash(from_toml(to_toml(recipe))) == recipe_hash(recipe)


def test_toml_has_every_key_once_with_a_comment():
    parsed = tomllib.loads(to_toml(Recipe()))
    sections = {name: kind for name, kind in parsed.items() if isinstance(kind, dict)}
    flat = {name for name in parsed if name not in sections}
    flat |= {f"{section}.{name}" for section, inside in sections.items() for name in inside}
    parts = {"shape": ShapeRecipe, "data": DataRecipe, "optim": OptimRecipe}
    parts |= {"schedule": ScheduleRecipe, "regularization": RegularizationRecipe, "masked": MaskedRecipe}
    known = {item.name for item in fields(Recipe)} - set(parts)
    known |= {f"{part}.{item.name}" for part, kind in parts.items() for item in fields(kind)}
    assert flat == known == set(keys())
    lines = [line for line in to_toml(Recipe()).splitlines() if line]
    assert all(len(line.split("  # ", 1)[1]) > 2 for line in lines)


def test_paths_that_are_not_utf_8_are_refused():
    with pytest.raises(UserError, match="not valid UTF-8, which recipes are written in: rename it"):
        to_toml(Recipe(init=b"caf\xe9".decode("utf-8", "surrogateescape")))


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optim.lr=0.01", "optim.lr", 0.01),
        ("optim.lr=1", "optim.lr", 1.0),
        ("batch=1e3", "batch", 1000),
        ("seed=9007199254740993", "seed", 2**53 + 1),  # the first whole number that no float is
        ("compile=True", "compile", True),
        ("trainable=lora:8", "trainable", "lora:8"),
        ("data.mean=0.1, 0.2,0.3", "data.mean", (0.1, 0.2, 0.3)),
        ("data.mean=[0.1, 0.2, 0.3]", "data.mean", (0.1, 0.2, 0.3)),
        ("data.train_transform=decode|resize(8, 9)", "data.train_transform", "decode|resize(8, 9)"),
        ("init=run=2/best", "init", "run=2/best"),
        ("balance=logit-adjust", "balance", "logit-adjust"),
        ("workers=-1", "workers", -1),
    ],
)
def test_an_override_sets_a_typed_value(word, key, value):
    found = values(with_overrides(Recipe(), [word]))
    assert found[key] == value
    assert found == values(Recipe()) | {key: value}


def test_the_names_of_other_libraries_stand_for_keys():
    assert set(_FOREIGN_KEYS.values()) <= set(keys())
    assert {key.rpartition(".")[2] for key in keys()}.isdisjoint(_FOREIGN_KEYS)


def test_overrides_may_be_a_mapping():
    changes = {"optim.lr": 0.01, "batch": "1e3", "data.mean": [0.1, 0.2, 1], "compile": True, "optim.name": "adam"}
    recipe = with_overrides(Recipe(), changes)
    words = ["optim.lr=0.01", "batch=1000", "data.mean=0.1,0.2,1", "compile=true", "optim.name=adam"]
    assert recipe == with_overrides(Recipe(), words)
    assert with_overrides(Recipe(), {}) == Recipe()
    for wrong, expected in (
        ({"optm.lr": 1}, "did you mean optim.lr"),
        ({"batch": 2.5}, "batch must be a whole number"),
    ):
        with pytest.raises(UserError, match=expected):
            with_overrides(Recipe(), wrong)


def test_one_length_replaces_the_other():
    recipe = with_overrides(Recipe(), ["steps=500"])
    assert (recipe.steps, recipe.epochs) == (500, 0)
    recipe = with_overrides(recipe, ["epochs=2.5"])
    assert (recipe.steps, recipe.epochs) == (0, 2.5)
    assert from_toml("steps = 7").steps == 7
    with pytest.raises(UserError, match="one length"):
        with_overrides(Recipe(), ["steps=5", "epochs=5"])
    with pytest.raises(UserError, match="one length"):
        with_overrides(Recipe(), ["epochs=0"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optm.lr=1", "did you mean optim.lr?"),
        ("lr=1", "did you mean optim.lr?"),
        ("optim.momentun=0.9", "did you mean optim.momentum"),
        ("regularization.drop_path=0.1", "did you mean regularization.stochastic_depth?"),
        ("smoothing=0.1", "did you mean regularization.label_smoothing?"),
        ("optim.opt=sgd", "did you mean optim.name?"),
        ("schedule.steps=1", "did you mean steps?"),
        ("frobnicate=1", "vitral show"),
        ("optim.lr", "key=value"),
        ("optim.lr=fast", "optim.lr must be a number, for example optim.lr=0.001"),
        ("optim.lr=nan", "optim.lr must be a number"),
        ("batch=2.5", "batch must be a whole number"),
        ("batch=true", "batch must be a whole number"),
        ("compile=yes", "compile must be true or false"),
        ("precision=float16", "one of auto, float32, bfloat16, fp8"),
        ("data.mean=0.5,x,0.5", "numbers separated by commas"),
        ("data.mean=0.5", "one number per channel"),
        ("data.std=0,1,1", "above 0"),
        ("batch=0", "batch must be above 0"),
        ("optim.lr=-1", "optim.lr must be above 0"),
        ("optim.weight_decay=-1", "at least 0"),
        ("regularization.dropout=1", "below 1"),
        ("ema_decay=1", "below 1"),
        ("data.held_out=1.5", "below 1"),
        ("optim.layer_decay=1.1", "at most 1"),
        ("seed=-1", "at least 0"),
        ("trainable=last:0", "last:2"),
        ("trainable=lora", "lora:8"),
        ("micro_batch=512", "micro_batch=512 is more than batch=256"),
        ("schedule.kind=multistep", "schedule.drops"),
        ("schedule.drops=0.5", "must have the same length"),
    ],
)
def test_a_wrong_override_gets_one_sentence(word, expected):
    with pytest.raises(UserError) as error:
        with_overrides(Recipe(), [word])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_contradictions_are_refused():
    with pytest.raises(UserError, match="logit-adjust"):
        Recipe(loss="sigmoid", balance="logit-adjust")
    with pytest.raises(UserError, match="shape"):
        Recipe(init="weights.npz", shape=ShapeRecipe(width=96))
    with pytest.raises(UserError, match="TOML"):
        from_toml("optim.lr = = 3")
    with pytest.raises(UserError, match="unknown key"):
        from_toml("[optim]\nlearning_rat = 3")
    with pytest.raises(UserError, match="optim"):
        from_toml("optim = 3")
    with pytest.raises(UserError, match="batch"):
        from_dict({"batch": True})


def test_the_hash_changes_with_every_value_and_with_nothing_else():
    assert recipe_hash(Recipe(epochs=100)) == recipe_hash(Recipe(epochs=100.0)) == recipe_hash(Recipe())
    words = ["seed=1", "optim.lr=0.0011", "data.mean=0.5,0.5,0.4", "shape.depth=3", "compile=true", "steps=3"]
    hashes = {recipe_hash(with_overrides(Recipe(), [word])) for word in words}
    assert len(hashes | {recipe_hash(Recipe())}) == len(words) + 1
    assert len(recipe_hash(Recipe())) == 12


@given(st.floats(1e-12, 1e12), st.integers(1, 10**9), st.text(max_size=20))
def test_any_value_survives_toml(rate, batch, name):
    name = name.encode("utf-8", "ignore").decode()
    recipe = Recipe(optim=OptimRecipe(lr=rate), batch=batch, init=name)
    assert from_toml(to_toml(recipe)) == recipe


def test_the_architecture_is_the_name_and_the_shape():
    assert architecture_of(Recipe(model="ViT-S/16@384"), 7) == parse("ViT-S/16@384", classes=7)
    words = ["model=ViT-Ti/2@8", "shape.width=96", "shape.heads=4", "shape.depth=3", "shape.pool=mean", "image=16"]
    config = architecture_of(with_overrides(Recipe(), [*words, "regularization.dropout=0.1"]), 10)
    assert isinstance(config, ViTConfig)
    assert (config.depth, config.width, config.mlp, config.heads, config.patch) == (3, 96, 384, 4, 2)
    assert (config.pool, config.class_token, config.image, config.dropout) == ("mean", False, (16, 16), 0.1)
    resnet = architecture_of(Recipe(model="R50x1", image=128), 5)
    assert isinstance(resnet, ResNetConfig)
    assert resnet.image == (128, 128)
    with pytest.raises(UserError, match="R50x1"):
        architecture_of(Recipe(model="R50x1", shape=ShapeRecipe(depth=3)), 5)
    with pytest.raises(UserError, match="heads"):
        architecture_of(Recipe(shape=ShapeRecipe(heads=5)), 5)


def test_pipelines_take_the_size_of_the_model():
    train, test = pipelines(Recipe(), (224, 224))
    assert train == "decode|random_resized_crop(224, 0.05)|flip"
    assert test == "decode|resize_small(256)|central_crop(224)"
    fixed = replace(
        Recipe(), data=DataRecipe(train_transform="decode|resize({size})", eval_transform="decode|resize(32)")
    )
    assert pipelines(fixed, (32, 48)) == ("decode|resize(32, 48)", "decode|resize(32)")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("weights", ["", "ViT-Ti/16", "ViT-L/16@384", "R50+ViT-B/16", "R101x3"])
def test_every_default_recipe_fits_the_data(device, weights):
    start = parse(weights) if weights else None
    for images, pixels in product([3, 24, 480, 1437, 50_000, 1_281_167], [5, 8, 28, 64, 256]):
        recipe, reasons = default_recipe(
            images=images, class_counts=[images // 3] * 3, pretrained=start, device=device, pixels=pixels
        )
        assert recipe.batch <= images
        assert recipe.precision == "auto"
        assert all(reason and not reason.endswith(".") for reason in reasons)
        assert str(images) in reasons[0]
        config = start or architecture_of(recipe, 3)
        assert min(config.grid(config.image)) >= 2
        assert [parse_pipeline(text).size for text in pipelines(recipe, config.image)] == [config.image] * 2
        assert recipe.model == weights or not weights


def chosen(images, classes, weights="", device="cpu", **settings):
    start = parse(weights) if weights else None
    counts = [images // classes] * classes
    return default_recipe(images=images, class_counts=counts, pretrained=start, device=device, **settings)[0]


def test_default_recipes_for_common_cases():
    pets = chosen(480, 12, "ViT-Ti/16")
    assert (pets.trainable, pets.batch, pets.epochs) == ("full", 32, 5)
    digits = chosen(1437, 10, pixels=8)
    assert digits.model == "ViT-Ti/2@8"
    assert "flip" not in digits.data.train_transform
    assert (digits.optim.name, digits.shape.weight_init, digits.epochs) == ("muon", "mimetic", 31)
    adam = chosen(1437, 10, pixels=8, muon=False)
    assert (adam.optim.name, adam.shape.weight_init, adam.epochs) == ("adamw", "paper", 62)
    assert chosen(480, 12, model="R50x1").optim.name == "adamw"
    assert chosen(1_281_167, 1000).optim.name == "adamw"
    assert chosen(30, 12, "ViT-Ti/16").trainable == "head"
    assert chosen(20_000, 12, "ViT-L/16").trainable == "head"
    assert chosen(20_000, 12, "ViT-L/16", device="cuda").trainable == "full"
    assert chosen(480, 12, model="R50x1").model == "R50x1"
    assert chosen(480, 12, multilabel=True).loss == "sigmoid"


def fine_tuned(images, classes, trainable="", device="cpu", **said):
    """What is chosen where the user says `trainable` and perhaps more, and why."""
    words = {key.replace("_", "."): value for key, value in said.items()} | (
        {"trainable": trainable} if trainable else {}
    )
    counts = [images // classes] * classes
    return default_recipe(
        images=images, class_counts=counts, pretrained=parse("ViT-Ti/16"), device=device, overrides=words
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_requested_head_trains_like_a_chosen_one(device):
    few, _ = fine_tuned(30, 12, device=device)
    assert few.trainable == "head"
    assert fine_tuned(30, 12, "head", device)[0] == few
    asked, (reason,) = fine_tuned(480, 12, "head", device)
    assert asked == replace(few, batch=256)
    assert "30 epochs at a learning rate of 0.001" in reason
    assert asked.optim.layer_decay == asked.optim.head_lr == 1
    for words in ({"epochs": "3"}, {"steps": "3"}, {"optim_lr": "0.1"}):
        assert fine_tuned(480, 12, "head", device, **words) == (asked, ())


@pytest.mark.parametrize("images", [30, 480])
@pytest.mark.parametrize("trainable", ["lora:8", "bias"])
def test_adapters_and_biases_get_a_higher_learning_rate(trainable, images):
    whole, said = fine_tuned(images, 12, "full")
    found, reasons = fine_tuned(images, 12, trainable)
    assert found.trainable == "full"  # what is said is not followed here
    assert found.optim.lr == pytest.approx(5 * whole.optim.lr)
    assert (found.optim.layer_decay, found.optim.head_lr) == (1, 1)
    assert (found.epochs, found.batch) == (whole.epochs, whole.batch)
    assert "all layers" in said[0]
    assert "all layers" not in "".join(reasons)


def test_requested_full_training_does_not_use_the_head_recipe():
    usual, reasons = fine_tuned(480, 12)
    assert fine_tuned(480, 12, "full") == (usual, reasons)
    few, _ = fine_tuned(30, 12, "full")
    assert (few.optim, few.batch, few.epochs) == (usual.optim, 30, 75)
    long = default_recipe(
        images=20_000,
        class_counts=[1_666] * 12,
        pretrained=parse("ViT-L/16"),
        device="cpu",
        overrides={"trainable": "full"},
    )
    assert (long[0].trainable, long[0].epochs, long[0].optim.layer_decay) == ("full", 5, 0.75)


def uneven(*counts, multilabel=False, **said):
    """What is chosen for classes of these sizes, and why."""
    start = parse("ViT-Ti/16")
    return default_recipe(
        images=sum(counts),
        class_counts=counts,
        pretrained=start,
        device="cpu",
        multilabel=multilabel,
        overrides={key.replace("_", "."): value for key, value in said.items()},
    )


@pytest.mark.parametrize("counts", [(1, 2, 5, 10, 20, 40), (2, 3, 5, 8, 13, 20), (200, 4, 4, 4, 4, 4)])
def test_uneven_small_classes_train_a_balanced_head(counts):
    recipe, reasons = uneven(*counts)
    assert (recipe.trainable, recipe.balance, recipe.epochs) == ("head", "logit-adjust", 30)
    assert f"{sum(counts)} images" in reasons[0]
    assert f"classes have {min(counts)} to {max(counts)} images" in reasons[-1]
    assert uneven(*counts, trainable="head")[0] == recipe


def test_large_uneven_classes_are_fine_tuned_and_balanced():
    recipe, reasons = uneven(500, 100, 40)
    assert (recipe.trainable, recipe.balance, recipe.epochs) == ("full", "logit-adjust", 5)
    assert "classes have 40 to 500 images" in reasons[-1]
    assert uneven(1000, 1000, 5)[0].trainable == "full"  # one small class among large ones


def test_classes_are_balanced_only_where_they_are_uneven_and_the_loss_allows_it():
    assert uneven(60, 20, 20)[0].balance == "none"
    assert uneven(61, 20, 20)[0].balance == "logit-adjust"
    assert uneven(61, 20, 0)[0].balance == "logit-adjust"
    assert uneven(60, 20, 0)[0].balance == "none"  # an empty class has nothing to balance
    for settings in ({"multilabel": True}, {"loss": "sigmoid"}, {"objective": "masked"}, {"balance": "none"}):
        recipe, reasons = uneven(400, 40, 40, **settings)
        assert recipe.balance == "none"
        assert "classes have" not in "".join(reasons)
    assert uneven(8, 4, 4, objective="masked")[0].trainable == "full"  # labels are not used


@pytest.mark.parametrize(("images", "epochs"), [(12, 75), (60, 40), (120, 20), (479, 6), (480, 5), (4_000, 5)])
def test_small_sets_are_fine_tuned_for_75_steps_at_least(images, epochs):
    recipe, reasons = fine_tuned(images, 3, "full")
    assert recipe.epochs == epochs
    assert recipe.epochs * images / recipe.batch >= 75
    assert any(f"{epochs} epochs make the 75 steps" in reason for reason in reasons) == (images < 480)
    _, reasons = fine_tuned(images, 3, "full", epochs="9")
    assert "75 steps" not in "".join(reasons)


def test_with_weights_a_name_only_asks_for_an_image_size():
    assert chosen(480, 12, "ViT-Ti/16", model="Ti/16").image == 0
    assert chosen(480, 12, "ViT-Ti/16", model="Ti/16@384").image == 384
    assert chosen(480, 12, "ViT-Ti/16@384", model="ViT-Ti/16@224").image == 224
    with pytest.raises(UserError, match="hold a ViT-Ti/16, not a ViT-B/16"):
        chosen(480, 12, "ViT-Ti/16", model="ViT-B/16")


def test_the_parts_of_later_transformers_are_keys_of_the_shape():
    words = ["swiglu=true", "qk_norm=true", "registers=4", "layer_scale=true", "rope=true"]
    config = architecture_of(with_overrides(Recipe(model="ViT-Ti/16"), [f"shape.{word}" for word in words]), 10)
    plain = parse("ViT-Ti/16", classes=10)
    assert isinstance(plain, ViTConfig)
    assert config == replace(plain, rope=RopeConfig(), swiglu=True, qk_norm=True, registers=4, layer_scale=True)
    assert architecture_of(Recipe(model="ViT-Ti/16"), 10) == plain
