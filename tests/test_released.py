"""The real ViT-Ti/16 on real photographs: the numbers its weights are known for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import vitral
from vitral.checkpoints.card import Preprocess
from vitral.data.sources import open_data
from vitral.evaluation.accuracy import classification_metrics, real_accuracy
from vitral.evaluation.mapping import class_mapping
from vitral.evaluation.predict import predict_split

WEIGHTS = "data/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
PREPROCESS = Preprocess("decode|resize_small(248, bicubic)|central_crop(224)", (0.5,) * 3, (0.5,) * 3)


class Evaluation:
    """Outputs (1000, 1000) for one photograph of each class, its label, and its path below the folder."""

    def __init__(self, assets: Path) -> None:
        model, card = vitral.load(assets / WEIGHTS)
        split = open_data(assets / "data" / "imagenet_val_1000", held_out=0).train
        outputs, self.rule = class_mapping(split.classes, card.class_names, card.architecture.classes)
        found = predict_split(model, split, PREPROCESS, batch=50)
        assert found.valid.all()
        self.logits, self.labels, self.keys = found.logits, outputs[split.labels], split.keys


@pytest.fixture(scope="module")
def evaluation(assets: Path) -> Evaluation:
    return Evaluation(assets)


def test_it_loads_by_itself(assets: Path) -> None:
    model, card = vitral.load(assets / WEIGHTS)
    assert card.format == "timm"
    assert card.changes == ()
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416
    assert (card.architecture.image, card.architecture.classes) == ((224, 224), 1000)
    assert card.sha256 == "bacee59cf95f20e8f5c24108883cdbfefc20562abbda912bf83c29e28970b0dc"


def test_folders_are_output_numbers(evaluation: Evaluation) -> None:
    assert "output numbers" in evaluation.rule
    assert evaluation.labels.tolist() == [int(key.split("/")[0]) for key in evaluation.keys]


def test_top_1_is_72_4_and_top_5_is_91_9_percent(evaluation: Evaluation) -> None:
    found = classification_metrics(evaluation.logits, evaluation.labels, tuple(map(str, range(1000))))
    assert found.n == 1000
    assert found.top1 == pytest.approx(0.724, abs=0.002)
    assert found.top5 == pytest.approx(0.919, abs=0.002)
    assert found.mean_per_class == pytest.approx(found.top1)


def test_real_accuracy_is_80_2_percent(evaluation: Evaluation, assets: Path) -> None:
    labels = json.loads((assets / "data" / "imagenet_real.json").read_text(encoding="utf-8"))
    accuracy, scored = real_accuracy(evaluation.logits, evaluation.keys, labels)
    assert scored == 940
    assert accuracy == pytest.approx(0.802, abs=0.003)


def test_the_table_of_wnids_gives_the_same_classes(assets: Path) -> None:
    table = assets / "data" / "imagenet_classes.tsv"
    wnids = [line.split("\t")[0] for line in table.read_text(encoding="utf-8").splitlines()]
    shuffled = np.random.default_rng(0).permutation(1000)
    for source in (table, None):
        found, _ = class_mapping([wnids[i] for i in shuffled], (), 1000, source)
        assert found.tolist() == shuffled.tolist()
