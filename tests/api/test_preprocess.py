"""Weights whose preprocessing is not stated: every verb takes the same one, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from vitral.api.recipes import choose_recipe
from vitral.architecture import Architecture
from vitral.checkpoints.card import Card, Preprocess
from vitral.events import Note
from vitral.models.build import build
from vitral.names import parse
from vitral.recipe import pipelines

TINY = parse("ViT-Ti/8@32", depth=2, width=16, mlp=32, heads=2, classes=2)
ASSUMED = Preprocess("decode|resize_small(37)|central_crop(32)", (0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of eight images."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(8):
            Image.fromarray(rng.integers(0, 255, (40, 48, 3), np.uint8)).save(folder / name / f"{number}.png")
    return folder


def bare(folder: Path, name: str) -> Path:
    """A file that states no preprocessing."""
    vitral.save(build(TINY), folder / name, Card(TINY, class_names=("a", "b")))
    return folder / name


def named(folder: Path, name: str, config: Architecture) -> Path:
    """A file of timm's layout without config.json."""
    vitral.save(build(config), folder / name, Card(config), "timm")
    return folder / name


def verbs(weights: Path, photos: Path, out: Path, heard: list[Any]) -> dict[str, Preprocess]:
    """The preprocessing that each verb used, as far as it can be seen from outside or at the one place it is asked."""
    import vitral.api.features as features
    import vitral.api.inference as inference
    import vitral.api.inspection as inspection
    import vitral.api.prediction as prediction

    used: dict[str, Preprocess] = {}
    original = inference.resolve_preprocessing
    modules = {"predict": inference, "evaluate": inference, "inspect": inspection, "search": features}
    image = sorted(photos.rglob("*.png"))[0]
    calls = {
        "predict": lambda: vitral.predict(weights, image, device="cpu", on_event=heard.append),
        "embed": lambda: vitral.embed(weights, image, device="cpu", on_event=heard.append),
        "classifier": lambda: vitral.classifier(weights, device="cpu"),
        "evaluate": lambda: vitral.evaluate(weights, photos, device="cpu", on_event=heard.append),
        "inspect": lambda: vitral.inspect(weights, image, output=out / "page.html", on_event=heard.append),
        "search": lambda: vitral.search(weights, photos, query=image, on_event=heard.append),
        "fewshot": lambda: vitral.fewshot(weights, photos, shots=(1,), seeds=1, device="cpu", on_event=heard.append),
        "check": lambda: vitral.check(
            photos, model=weights, output=out / "check.html", device="cpu", on_event=heard.append
        ),
    }
    import vitral.api.check as check

    modules |= {"embed": prediction, "classifier": prediction, "fewshot": features, "check": check}
    for name, call in calls.items():
        with pytest.MonkeyPatch.context() as patch:

            def recorded(*arguments: Any, name: str = name) -> Preprocess:
                used[name] = original(*arguments)
                return used[name]

            patch.setattr(modules[name], "resolve_preprocessing", recorded)
            call()
    return used


def trained(weights: Path, photos: Path, **options: Any) -> tuple[Preprocess, str]:
    """What `train` would store with its weights, and the reasons it prints."""
    _, recipe, reasons = choose_recipe(photos, init=weights, device="cpu", **options)
    return Preprocess(pipelines(recipe, (32, 32))[1], recipe.data.mean, recipe.data.std), " ".join(reasons)


def test_every_verb_assumes_the_same_and_says_so(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights, heard = bare(tmp_path, "mine.safetensors"), []
    used = verbs(weights, photos, tmp_path, heard)
    assert len(used) == 8
    assert set(used.values()) == {ASSUMED}
    said = [event for event in heard if isinstance(event, Note) and "mean and std 0.5 are assumed" in event.text]
    assert len(said) == 7  # of all but `classifier`, which has no events
    preprocess, reasons = trained(weights, photos)
    assert preprocess == ASSUMED
    assert "mean and std 0.5 are assumed" in reasons
    assert vitral.info(weights).card.preprocess is None  # nothing is written into files as if it were known


def test_the_weights_of_a_run_predict_with_what_was_assumed(photos, tmp_path):
    weights = bare(tmp_path, "mine.safetensors")
    done = vitral.train(photos, init=weights, out=tmp_path / "run", epochs=1, device="cpu", set=["workers=0"])
    assert done.load()[1].preprocess == ASSUMED


def test_a_name_brings_its_preprocessing_to_every_verb(photos, tmp_path):
    weights = named(tmp_path, "deit_tiny_patch16_224-a1311bcf.safetensors", parse("ViT-Ti/16", classes=2, gelu="erf"))
    own = Preprocess("decode|resize_short(248, pil_bicubic)|center_crop(224)", *IMAGENET)
    card = vitral.load(weights)[1]
    assert card.preprocess == own
    (sentence,) = (change for change in card.changes if "by the name deit_tiny_patch16_224-a1311bcf: " in change)
    assert "norm_eps=1e-06, decode|resize_short(248" in sentence
    assert trained(weights, photos)[0] == own
    other = named(
        tmp_path, "deit_tiny_patch16_224.safetensors", parse("ViT-Ti/32", classes=2, gelu="erf")
    )  # not that model
    assert vitral.load(other)[1].preprocess is None


def test_a_preset_is_followed_with_the_normalisation_of_the_weights(photos, tmp_path):
    stated = Preprocess("decode|resize(32)", *IMAGENET)
    vitral.save(build(TINY), tmp_path / "w.safetensors", Card(TINY, preprocess=stated))
    options = {"recipe": "paper:finetune/pets", "set": ["batch=4", "image=32"]}
    assert trained(tmp_path / "w.safetensors", photos, **options)[0].mean == IMAGENET[0]
    assert trained(bare(tmp_path, "x.safetensors"), photos, **options)[0].mean == (0.5,) * 3


def test_an_assumption_holds_for_other_sizes_and_channels():
    assert Preprocess.assumed((16, 24), 1) == Preprocess("decode|resize_small(18)|central_crop(16, 24)", (0.5,), (0.5,))
    grey = Card(replace(TINY, channels=1), preprocess=Preprocess.assumed((32, 32), 1))
    assert grey.transform()(np.zeros((5, 7, 1), np.uint8)).shape == (1, 32, 32)
