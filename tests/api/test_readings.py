"""What a protocol says beside its result is true of its runs: readings, overrides, and the label of the paper's number.

Training is replaced by a stand-in that scores 0.5 throughout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import finished_run, make_pictures

import vitral
from vitral import events, paper
from vitral.architecture import ResNetConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.sources import DataSet
from vitral.models.build import build
from vitral.recipe import Recipe, with_overrides
from vitral.recipe_presets import get_preset
from vitral.studies import protocol
from vitral.training.run import RunResult

SMALL = ("batch=6", "image=32", "workers=0")


def stand_in(recipe: Recipe, data: DataSet, path: Path, *, device: str, on_event: Any) -> RunResult:
    # BiT's recipe scores higher, so that a ResNet takes it.
    score = 0.6 if recipe.schedule.kind == "multistep" else 0.5
    return finished_run(recipe, path, score, 12)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    configs = {
        "vit": ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=16, image=(32, 32), classes=3),
        "resnet": ResNetConfig(blocks=(1, 1, 1, 1), width=1, image=(32, 32), classes=3),
    }
    for name, config in configs.items():
        card = Card(config, preprocess=Preprocess("decode|resize(32)", (0.5,) * 3, (0.5,) * 3))
        vitral.save(build(config), folder / f"{name}.safetensors", card)
    return {name: folder / f"{name}.safetensors" for name in configs}


@pytest.fixture
def finetuned(pictures, weights, tmp_path, monkeypatch):
    """finetune() without training: the result, its protocol.json, and what was said before."""
    monkeypatch.setattr(protocol, "run", stand_in)
    monkeypatch.setattr("vitral.api.protocols.name_of", lambda config: "ViT-L/16")  # a model that the paper has

    def call(*words: str, recipe: str = "paper:finetune/pets", source: str = "vit", **options: Any) -> Any:
        heard: list[events.Event] = []
        result = vitral.finetune(
            weights[source],
            pictures,
            recipe=recipe,
            set=[*SMALL, *words],
            out=tmp_path / "run",
            on_event=heard.append,
            **options,
        )
        row = json.loads((tmp_path / "run" / "protocol.json").read_text())
        return result, row, [event.text for event in heard if isinstance(event, events.Note)]

    return call


def why(*names: str) -> set[str]:
    return {paper.readings()[name].why for name in names}


@pytest.mark.parametrize(
    ("words", "dropped"),
    [
        ((), set()),
        (("schedule.warmup=3",), {"short warm-up"}),
        (("regularization.dropout=0.2",), {"dropout"}),
        (("data.train_transform=decode|resize({size})",), {"square"}),
        (("data.eval_transform=decode|resize({size}, area)",), {"square"}),
        (("regularization.dropout=0.1", "seed=3"), set()),  # which is what the reading says
        (("schedule.warmup=3", "regularization.dropout=0"), {"short warm-up", "dropout"}),
    ],
)
def test_an_overridden_key_takes_its_reading_with_it(finetuned, words, dropped):
    result, row, notes = finetuned(*words)
    said = why("square", "short warm-up", "dropout") - why(*dropped)
    assert set(result.readings) == set(row["readings"]) == said
    assert said <= set(notes)
    assert not why(*dropped) & set(notes)
    assert row["overrides"] == [*SMALL, *words]
    assert row["preset"] == "paper:finetune/pets"


def test_a_rate_that_is_not_swept_has_its_reading(finetuned):
    _, row, _ = finetuned()
    assert not why("rate") & set(row["readings"])  # four rates were tried
    _, row, _ = finetuned("optim.lr=0.03")
    assert why("rate") <= set(row["readings"])
    _, row, _ = finetuned("optim.lr=0.02")
    assert not why("rate") & set(row["readings"])


def test_the_paper_number_of_another_recipe_is_labelled(finetuned, monkeypatch, capsys):
    from vitral.cli.training import show_protocol

    result, row, _ = finetuned("optim.momentum=0.8", "seed=1")
    assert {entry["label"] for entry in row["paper"]} == {"other recipe"}
    assert row["changed"] == ["batch", "image", "optim.momentum"]
    show_protocol(result, {})
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(", other recipe") == len(row["paper"]) > 1
    assert "batch, image, optim.momentum" in said


def test_the_recipe_as_printed_has_no_label(pictures, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "run", stand_in)
    monkeypatch.setattr("vitral.api.protocols.name_of", lambda config: "ViT-L/16")
    monkeypatch.setattr("vitral.api.protocols.check_recipe", lambda *_: None)  # there are fewer images than its batch
    for words, sweep, label in (
        (["seed=4", "workers=0"], (), ""),
        ([], ("optim.lr=0.001,0.003",), "other recipe"),
        (["data.subset=30"], (), "other recipe"),
    ):
        found = vitral.finetune(
            weights["vit"], pictures, recipe="paper:finetune/pets", set=words, sweep=sweep, out=tmp_path / "run"
        )
        assert {entry.label for entry in found.reported} == {label}
        assert found.overrides == (*words, *sweep)


def test_a_sweep_of_ones_own_drops_what_is_said_of_the_papers(finetuned):
    _, row, _ = finetuned(recipe="paper:finetune/imagenet")
    assert why("largest rate") <= set(row["readings"])
    _, row, _ = finetuned(recipe="paper:finetune/imagenet", sweep=["optim.lr=0.01,0.03"])
    assert not why("largest rate", "rate") & set(row["readings"])
    assert "optim.lr" in row["changed"]
    assert row["overrides"][-1] == "optim.lr=0.01,0.03"


def test_one_task_is_not_said_to_be_nineteen(finetuned):
    _, row, _ = finetuned(recipe="paper:finetune/vtab")
    assert why("vtab sweep") <= set(row["readings"])
    assert not why("vtab dev", "vtab crops") & set(row["readings"])


def test_a_warmup_that_was_scaled_is_said(finetuned):
    _, row, notes = finetuned("steps=50")
    assert not why("short warm-up") & set(row["readings"])
    sentence = "Warmup takes 10 of 50 steps, in proportion to the full run: 100 of them would not fit."
    assert sentence in row["readings"]
    assert sentence in notes
    assert {entry["label"] for entry in row["paper"]} == {"other recipe"}


def test_a_resnet_that_took_bits_recipe_has_bits_readings(finetuned, monkeypatch):
    monkeypatch.setattr("vitral.api.protocols.name_of", lambda config: "R50x1")
    result, row, _ = finetuned("regularization.dropout=0", source="resnet", recipe="paper:finetune/pets")
    assert result.outcome.chosen.name == "bit:finetune/small"
    assert set(row["readings"]) == why("bit flip", "bit drops")  # the image is not BiT's 384


def test_every_condition_can_drop_a_reading():
    entry = get_preset("paper:finetune/imagenet-512", "ViT-L/16")
    names = {reading.why: name for name, reading in paper.readings().items()}

    def said(*words: str, happens: tuple[str, ...] = ("sweep", "preset sweep")) -> set[str]:
        recipe = with_overrides(entry.recipe, words)
        return {names[text] for text in entry.true_readings(recipe, entry.sweep, happens)}

    everything = {"square", "warm-up", "dropout", "largest rate", "size before the crop", "ema_decay"}
    assert said() == everything
    assert said("ema_decay=0.5") == everything - {"ema_decay"}
    assert said("data.train_transform=decode|resize({size})") == everything - {"square", "size before the crop"}
    assert said(happens=("sweep",)) == everything - {"largest rate"}
