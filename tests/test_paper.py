"""The paper's numbers as typed: checked against other tables of the paper, and against themselves."""

from dataclasses import FrozenInstanceError, fields
from statistics import mean

import pytest

from vitral import names, paper

COLUMNS = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers")

# Table 5 prints the JFT-300M models of Table 6 again.
TABLE5 = {
    ("ViT-B/16", 7): (84.15, 88.85, 99.00, 91.87, 95.80, 99.56),
    ("ViT-B/32", 7): (80.73, 86.27, 98.61, 90.49, 93.40, 99.27),
    ("ViT-L/16", 14): (87.12, 89.99, 99.38, 94.04, 97.11, 99.56),
    ("ViT-L/32", 7): (84.37, 88.28, 99.19, 92.52, 95.83, 99.45),
    ("ViT-H/14", 14): (88.04, 90.33, 99.50, 94.55, 97.56, 99.68),
}

# Table 7 prints the mean over five data sets of two ResNets of Table 6.
TABLE7_AVERAGE = {("ResNet50x1", 7): 89.33, ("ResNet152x2", 7): 94.01}


def scaling_row(model: str, epochs: int) -> paper.ScalingRow:
    (row,) = [row for row in paper.table6() if (row.model, row.epochs) == (model, epochs)]
    return row


def test_table1_has_the_shapes_that_the_names_stand_for() -> None:
    for row in paper.table1():
        assert names.SHAPES[row.size] == (row.layers, row.width, row.mlp, row.heads)
        assert names.parse(row.model) == names.parse(row.model, depth=row.layers, width=row.width, mlp=row.mlp)
    assert [row.name for row in paper.table1()] == ["ViT-Base", "ViT-Large", "ViT-Huge"]


def test_table6_lists_six_vits_seven_resnets_and_five_hybrids() -> None:
    models = [row.model for row in paper.table6()]
    kinds = ["hybrid" if "+" in model else model[:3] for model in models]
    assert {kind: kinds.count(kind) for kind in kinds} == {"ViT": 6, "Res": 7, "hybrid": 5}
    assert len({(row.model, row.epochs) for row in paper.table6()}) == 18
    for model in models:
        names.parse(model)


@pytest.mark.parametrize(("model", "epochs"), TABLE5)
def test_table6_agrees_with_table5_except_where_it_is_doubtful(model: str, epochs: int) -> None:
    row = scaling_row(model, epochs)
    differ = {
        column
        for column, printed in zip(COLUMNS, TABLE5[model, epochs], strict=True)
        if getattr(row, column) != printed
    }
    assert differ == set(row.doubtful)


@pytest.mark.parametrize(("model", "epochs"), TABLE7_AVERAGE)
def test_table6_averages_to_table7(model: str, epochs: int) -> None:
    row = scaling_row(model, epochs)
    five = [getattr(row, column) for column in COLUMNS if column != "real"]
    assert mean(five) == pytest.approx(TABLE7_AVERAGE[model, epochs], abs=0.006)


def test_twice_the_epochs_cost_twice_as_much_except_where_it_is_doubtful() -> None:
    costs = {(row.model, row.epochs): row.exaflops for row in paper.table6()}
    apart = {
        model
        for (model, epochs), cost in costs.items()
        if epochs == 14 and abs(cost - 2 * costs.get((model, 7), cost / 2)) > 2
    }
    doubtful = {row.model for row in paper.table6() if "exaflops" in row.doubtful}
    assert apart == doubtful == {"R50x1+ViT-L/16"}


def test_doubtful_columns_exist_and_are_explained() -> None:
    for row in paper.table6():
        assert set(row.doubtful) <= {field.name for field in fields(row)}
        assert bool(row.doubtful) == bool(row.note)


def test_steps_per_run_are_those_of_the_schedules() -> None:
    """Steps at batch 4096: the paper speaks of about 14 epochs of JFT-300M for a million steps (appendix B.1.2)."""
    sets = paper.pretraining_sets()
    assert sets["JFT-300M"].images * 14 / 4096 == pytest.approx(1_000_000, rel=0.04)
    assert sets["ImageNet-21k"].images * 90 / 4096 == pytest.approx(312_000, rel=0.001)
    assert sets["ImageNet"].images * 300 / 4096 == pytest.approx(93_800, rel=0.001)
    assert [sets[name].classes for name in ("ImageNet", "ImageNet-21k", "JFT-300M")] == [1000, 21_843, 18_291]


def test_rows_say_where_they_are_printed_and_cannot_be_changed() -> None:
    for row in (*paper.table1(), *paper.table6(), *paper.pretraining_sets().values()):
        assert "arXiv v2" in row.source
    with pytest.raises(FrozenInstanceError):
        paper.table6()[0].exaflops = 1.0  # type: ignore[misc]
