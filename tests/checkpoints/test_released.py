"""The real ViT-Ti/16 on real photographs: 200 of them, and with the slow tests all 1,000.

They are re-encoded and few: the expected numbers are those of timm on the 200 files, prepared as the file's name says,
and our own reference on the 1,000 (Pillow's bicubic, float32), not the published 75.45 % and ReaL 82.06 % of all 50,000
originals.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from released import PREPROCESS, WEIGHTS

import vitral
from vitral import EvalResult
from vitral.evaluation.mapping import class_mapping

pytestmark = pytest.mark.xdist_group("released")  # one worker for all: the evaluation takes seconds


class Evaluation(NamedTuple):
    """`vitral evaluate` over one photograph of every `step`-th class, and what is expected of it."""

    step: int
    result: EvalResult
    top1: float
    top5: float
    real: float
    scored: int  # photographs with ReaL labels
    tolerance: float


@pytest.fixture(scope="module", params=[5, pytest.param(1, marks=pytest.mark.slow)])
def evaluation(assets: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Evaluation:
    """In folders called 000 to 999."""
    data, photographs, step = assets / "data", tmp_path_factory.mktemp("photographs"), request.param
    for number in range(0, 1000, step):
        (photographs / f"{number:03d}").symlink_to(data / "imagenet_val_1000" / f"{number:03d}")
    options = {"real": data / "imagenet_real.json", "batch": 50, "preprocess": PREPROCESS if step == 1 else ""}
    result = vitral.evaluate(assets / WEIGHTS, photographs, **options)
    if step == 1:
        return Evaluation(step, result, 0.724, 0.919, 0.802, 940, tolerance=0.002)
    return Evaluation(step, result, 149 / 200, 183 / 200, 155 / 189, 189, tolerance=1e-9)


def test_it_loads_by_itself(assets: Path) -> None:
    model, card = vitral.load(assets / WEIGHTS)
    assert card.format == "timm"
    assert all(change.startswith(("assumed: ", "by the name ")) for change in card.changes)
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416
    assert (card.architecture.image, card.architecture.classes) == ((224, 224), 1000)
    assert card.sha256 == "bacee59cf95f20e8f5c24108883cdbfefc20562abbda912bf83c29e28970b0dc"


def test_folders_are_output_numbers(evaluation: Evaluation) -> None:
    numbers = [f"{number:03d}" for number in range(0, 1000, evaluation.step)]
    assert any("output numbers" in note for note in evaluation.result.notes)
    assert [row["name"] for row in evaluation.result.metrics["per_class"] if row["support"]] == numbers


def test_accuracy_is_that_of_the_reference(evaluation: Evaluation) -> None:
    found = evaluation.result.metrics
    assert (found["n"], evaluation.result.unreadable) == (1000 // evaluation.step, ())
    assert found["top1"] == pytest.approx(evaluation.top1, abs=evaluation.tolerance)
    assert found["top5"] == pytest.approx(evaluation.top5, abs=evaluation.tolerance)
    assert found["mean_per_class"] == pytest.approx(found["top1"])


def test_real_accuracy_is_that_of_the_reference(evaluation: Evaluation) -> None:
    assert evaluation.result.real is not None
    accuracy, scored = evaluation.result.real
    assert scored == evaluation.scored
    assert accuracy == pytest.approx(evaluation.real, abs=evaluation.tolerance)


def test_the_file_name_states_the_preprocessing(assets: Path) -> None:
    stated = vitral.info(assets / WEIGHTS).card.preprocess
    assert stated is not None
    assert stated.pipeline == "decode|resize_short(248, pil_bicubic)|center_crop(224)"
    assert (stated.mean, stated.std) == ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.slow
def test_a_head_on_pets_reaches_96_percent(assets: Path, tmp_path: Path) -> None:
    """480 photographs of 12 breeds, 300 to test on, the defaults but for --tune head."""
    done = vitral.train(
        assets / "data" / "pets_mini", init=assets / WEIGHTS, out=tmp_path / "run", set=["trainable=head"]
    )
    assert done.results[0].metrics["n"] == 300
    assert done.mean >= 0.96


def test_the_table_of_wnids_gives_the_same_classes(assets: Path) -> None:
    table = assets / "data" / "imagenet_classes.tsv"
    wnids = [line.split("\t")[0] for line in table.read_text(encoding="utf-8").splitlines()]
    shuffled = np.random.default_rng(0).permutation(1000)
    for source in (table, None):
        found, _ = class_mapping([wnids[i] for i in shuffled], (), 1000, source)
        assert found.tolist() == shuffled.tolist()
