"""The paper's numbers as typed: cell by cell against the notes on the paper, and against each other."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from statistics import mean

import pytest
from paper_tables import WORDS, expanded, notes, printed_table

from vitral import names, paper
from vitral.errors import UserError

COLUMNS = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers")
# Table 7 prints the mean over five data sets of two ResNets of Table 6.
TABLE7_AVERAGE = {("ResNet50x1", 7): 89.33, ("ResNet152x2", 7): 94.01}

# The plain mean over the tasks of Table 9, and the means over natural, specialized and structured tasks.
VTAB_MEANS = {
    ("ViT-H/14", "jft300m"): (77.63, 86.7, 87.0, 65.0),
    ("ViT-L/16", "jft300m"): (76.29, 85.6, 86.7, 63.0),
    ("ViT-L/16", "imagenet21k"): (72.71, 83.3, 84.7, 57.5),
}


def scaling_row(model: str, epochs: int) -> paper.ScalingRow:
    (row,) = [row for row in paper.table6() if (row.model, row.epochs) == (model, epochs)]
    return row


def test_table1_has_the_shapes_that_the_names_stand_for() -> None:
    for row in paper.table1():
        assert names.VIT_SIZES[row.size] == (row.layers, row.width, row.mlp, row.heads)
        assert names.parse(row.model) == names.parse(row.model, depth=row.layers, width=row.width, mlp=row.mlp)
    assert [row.name for row in paper.table1()] == ["ViT-Base", "ViT-Large", "ViT-Huge"]


def test_table2_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 2 [P]")
    columns = list(printed[0])[1:]
    assert columns == ["ViT-H/14 JFT", "ViT-L/16 JFT", "ViT-L/16 I21k", "BiT-L R152x4", "Noisy Student EffNet-L2"]
    assert [row.model for row in paper.table2()] == ["ViT-H/14", "ViT-L/16", "ViT-L/16", "R152x4", "EfficientNet-L2"]
    assert [row.pretraining for row in paper.table2()] == ["jft300m", "jft300m", "imagenet21k", "jft300m", "jft300m"]
    for row, column in zip(paper.table2(), columns, strict=True):
        for line in printed[:-1]:
            cell = line[column].split("/")[0]  # "88.4/88.5*": the second is of another paper
            expected = () if cell == "-" else tuple(map(float, cell.split("+-")))
            assert getattr(row, WORDS[line[""]]) == expected, (column, line[""])
        assert row.core_days == float(printed[-1][column].rstrip("k")) * 1000
    sizes = {row.model: row.image for row in paper.table2() if row.image}
    text = notes(assets)
    assert "512 px (L/16), 518 px (H/14), Polyak averaging factor 0.9999" in text
    assert sizes == {"ViT-L/16": 512, "ViT-H/14": 518}
    assert {row.ema_decay for row in paper.table2() if row.image} == {0.9999}


def test_table3_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### 5.1 Table 3")
    for row, line in zip(paper.table3(), printed, strict=True):
        assert row.printed == line["models"]
        assert row.models == expanded(line["models"])
        assert row.dataset == WORDS[line["dataset"]]
        assert row.epochs == tuple(map(int, line["epochs"].split("/")))
        assert row.lr == float(line["base LR"])
        assert row.decay == line["decay"]
        assert row.weight_decay == float(line["weight decay"])
        assert row.dropout == float(line["dropout"])
    common = re.search(
        r"Adam b1 (\S+), b2 (\S+); batch (\d+); LR warmup (\d+)k steps .*resolution (\d+); "
        r"gradient clipping at global norm (\d) \*\*only for ImageNet\*\*",
        notes(assets),
    )
    assert common is not None
    beta1, beta2, batch, warmup, image, clip = map(float, common.groups())
    for row in paper.table3():
        assert (row.beta1, row.beta2, row.batch) == (beta1, beta2, batch)
        assert (row.warmup, row.image) == (1000 * warmup, image)
        assert row.clip == (clip if row.dataset == "imagenet" else 0)


def test_table4_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### 5.2 Fine-tuning, Table 4")
    for row, line in zip(paper.table4(), printed, strict=True):
        assert row.dataset == WORDS[line["dataset"]]
        assert row.steps == int(line["steps"].replace(",", ""))
        assert row.rates == tuple(map(float, line["base LR grid"].strip("{}").split(",")))
    text = notes(assets)
    common = re.search(
        r"SGD momentum (\S+), batch (\d+), (\w+) decay, no weight decay, clip global norm (\d), (\d+) px", text
    )
    shares = re.search(r"(\d+)% Pets/Flowers, (\d+)% CIFAR, (\d+)% ImageNet", text)
    assert common is not None
    assert shares is not None
    few, cifar, imagenet = (int(share) / 100 for share in shares.groups())
    devs = {"pets": few, "flowers": few, "cifar10": cifar, "cifar100": cifar, "imagenet": imagenet}
    for row in paper.table4():
        assert row.momentum == float(common[1])
        assert (row.batch, row.decay, row.weight_decay) == (int(common[2]), common[3], 0)
        assert (row.clip, row.image) == (float(common[4]), int(common[5]))
        assert row.dev == devs.get(row.dataset, 200 / 1000)


def test_table5_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 5, fine-tuned")
    cells = {
        (f"ViT-{model}", WORDS[line["pre-train"]], WORDS[line["eval"]]): float(cell)
        for line in printed
        for model, cell in list(line.items())[2:]
        if cell != "-"
    }
    assert len(cells) == 3 * 5 * 6 - 6
    ours = {(row.model, row.pretraining, word): getattr(row, word) for row in paper.table5() for word in COLUMNS}
    assert ours == cells


def test_table6_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 6, JFT scaling study")
    for row, line in zip(paper.table6(), printed, strict=True):
        assert (row.model, row.epochs) == (line["model"], int(line["ep"]))
        for column in ("ImageNet", "ReaL", "C10", "C100", "Pets", "Flowers"):
            assert getattr(row, WORDS[column]) == float(line[column])
        assert row.exaflops == float(line["exaFLOPs"])


def test_table7_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 7, ResNets")
    for row, column in zip(paper.table7(), list(printed[0])[1:], strict=True):
        model, optimizer = column.split()
        assert names.parse(row.model) == names.parse(model)
        assert row.optimizer == optimizer.lower()
        for line in printed:
            assert getattr(row, WORDS[line[""]]) == float(line[column])


def test_table8_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 8, position embeddings")
    kinds = {"none": "none", "1-D learned": "1d", "2-D learned": "2d", "relative": "relative"}
    for row, line in zip(paper.table8(), printed, strict=True):
        kind, *cells = line.values()
        assert row.position == kinds[kind]
        assert [row.input, row.every, row.shared] == [None if cell == "n/a" else float(cell) for cell in cells]


def test_table9_as_printed(assets: Path) -> None:
    printed = printed_table(assets, "### Table 9, VTAB-1k")
    columns = {task.paper: task.name for task in paper.vtab_tasks()}
    assert list(printed[0]) == ["", *columns, "mean"]
    for row, line in zip(paper.table9(), printed, strict=True):
        model, pretraining = line[""].split()
        assert (row.model, row.pretraining) == (f"ViT-{model}", WORDS[pretraining])
        assert row.scores == {columns[column]: float(line[column]) for column in columns}
        assert row.mean == float(line["mean"])


def test_vtab_tasks_as_noted(assets: Path) -> None:
    printed = printed_table(assets, "### 11.3 VTAB-1k")
    assert len(printed) == 19
    for task, line in zip(paper.vtab_tasks(), printed, strict=True):
        assert task.group == line["group"].lower()
        assert task.builder == line["TFDS builder"].split(" (")[0]
        assert task.classes == int(line["classes"])
        assert task.val.replace("%:80%", ":80%") == line["val200 from"]
        assert task.test == line["test split"]
    # "no horizontal flip for dSprites-orientation, SmallNORB-azimuth, dSprites-location; no random crop for ..."
    refused = re.search(r"\*\*no horizontal flip\*\* for (.*?); \*\*no random crop\*\* for (.*?)\.\n", notes(assets))
    assert refused is not None
    for listed, allowed in zip(refused.groups(), ("flip", "crop"), strict=True):
        without = {task.name for task in paper.vtab_tasks() if not getattr(task, allowed)}
        assert without == {word.strip().lower() for word in listed.split(",")}


def test_masked_training_as_noted(assets: Path) -> None:
    items = {line["item"]: line["value"] for line in printed_table(assets, "### 5.4 Self-supervision")}
    row = paper.masked_training()
    assert row.model in items["task"]
    share, token, random, rest = (int(number) / 100 for number in re.findall(r"(\d+)%", items["corruption"]))
    assert (row.ratio, row.token_ratio, row.random_ratio) == (share, token, random)
    assert rest == pytest.approx(1 - row.token_ratio - row.random_ratio)
    assert "mean colour" in items["target"]
    assert row.target == "mean"
    settings = r"JFT, (\d)M steps .*batch (\d+), (\w+), base LR (\S+), warmup (\d+)k, (\w+) decay"
    training = re.fullmatch(settings, items["training"])
    assert training is not None
    assert (row.steps, row.batch, row.optimizer) == (int(training[1]) * 10**6, int(training[2]), training[3].lower())
    assert (row.lr, row.warmup, row.decay) == (float(training[4]), int(training[5]) * 1000, training[6])
    assert items["result"].startswith(f"{row.imagenet}% ImageNet")


def test_bits_recipe_as_noted(assets: Path) -> None:
    text = notes(assets)
    start = re.search(
        r"SGD mom (\S+), lr 0\.03\*\(batch/256\), batch (\d+), wd (\S+), .*linear warmup (\d+) steps; "
        r"BiT-S/M (\d+) epochs with /10 at ([\d,]+); BiT-L (\d+) epochs with /10 at ([\d,]+)\.",
        text,
    )
    assert start is not None
    momentum, batch, decay, warmup = map(float, start.groups()[:4])
    lengths = {"jft300m": (start[7], start[8])}
    for row in paper.bit_pretraining():
        epochs, drops = lengths.get(row.dataset, (start[5], start[6]))
        assert (row.momentum, row.batch, row.weight_decay, row.warmup) == (momentum, batch, decay, warmup)
        assert row.lr == pytest.approx(0.03 * batch / 256)
        assert (row.epochs, row.drops) == (int(epochs), tuple(map(int, drops.split(","))))
    rule = re.search(
        r"SGD lr (\S+) mom (\S+) batch (\d+), no wd; small <(\d+)k ex: (\d+) steps; medium <(\d+)k: (\d+)k; "
        r"large: (\d+)k; /10 at (\d+)/(\d+)/(\d+)%; linear warmup (\d+)/(\d+)/(\d+) steps .*MixUp alpha (\S+) for",
        text,
    )
    assert rule is not None
    lr, momentum, batch, few, short, many, middle, long, *rest = map(float, rule.groups())
    drops = tuple(share / 100 for share in rest[:3])
    sizes = [(row.size, row.below, row.steps, row.warmup, row.mixup) for row in paper.bit_finetuning()]
    assert sizes == [
        ("small", few * 1000, short, rest[3], 0),
        ("medium", many * 1000, middle * 1000, rest[4], rest[6]),
        ("large", None, long * 1000, rest[5], rest[6]),
    ]
    for row in paper.bit_finetuning():
        printed = (0.4, 0.6, 0.8) if row.size == "small" else drops  # those of BiT's code, not of its text
        assert (row.lr, row.momentum, row.batch, row.drops) == (lr, momentum, batch, printed)


def test_objectnet_and_duplicates_as_noted(assets: Path) -> None:
    text = notes(assets)
    vit, bit = paper.objectnet()
    assert f"H/14: **{vit.top5}% top-5, {vit.top1}% top-1**" in text
    assert f"BiT-L R152x4 there: {bit.top5} top-5, {bit.top1} top-1" in text
    counts = re.findall(r"(ImageNet|CIFAR-10|CIFAR-100|Pets|Flowers) (\d+)/(\d+)/(\d+)", text)
    assert len(counts) == len(paper.near_duplicates()) == 5
    for row, (dataset, *numbers) in zip(paper.near_duplicates(), counts, strict=True):
        assert row.dataset == WORDS[dataset]
        assert [row.jft300m, row.imagenet21k, row.imagenet] == list(map(int, numbers))


def test_table6_lists_six_vits_seven_resnets_and_five_hybrids() -> None:
    models = [row.model for row in paper.table6()]
    kinds = ["hybrid" if "+" in model else model[:3] for model in models]
    assert {kind: kinds.count(kind) for kind in kinds} == {"ViT": 6, "Res": 7, "hybrid": 5}
    assert len({(row.model, row.epochs) for row in paper.table6()}) == 18
    for model in models:
        names.parse(model)


def test_table6_agrees_with_table5_except_where_it_is_doubtful() -> None:
    for row in paper.table5():
        if row.pretraining == "jft300m":
            again = scaling_row(row.model, 14 if row.model in ("ViT-L/16", "ViT-H/14") else 7)
            differ = {word for word in COLUMNS if getattr(row, word) != getattr(again, word)}
            assert differ == set(again.doubtful)


@pytest.mark.parametrize(("model", "epochs"), TABLE7_AVERAGE)
def test_table6_averages_to_table7(model: str, epochs: int) -> None:
    row = scaling_row(model, epochs)
    five = [getattr(row, column) for column in COLUMNS if column != "real"]
    assert mean(five) == pytest.approx(TABLE7_AVERAGE[model, epochs], abs=0.006)


def test_table7_averages_its_columns_and_repeats_table6_for_adam() -> None:
    for row in paper.table7():
        five = {word: getattr(row, word) for word in COLUMNS if word != "real"}
        assert mean(five.values()) == pytest.approx(row.average, abs=0.006)
        again = scaling_row(row.model.replace("R", "ResNet"), 7)
        assert (five == {word: getattr(again, word) for word in five}) == (row.optimizer == "adam")


def test_table8_positions_beat_none_wherever_they_are_added() -> None:
    none, *others = paper.table8()
    assert none.position == "none"
    assert [row.position for row in others] == ["1d", "2d", "relative"]
    given = [share for row in others for share in (row.input, row.every, row.shared) if share is not None]
    assert len(given) == 7
    assert none.input + 0.025 < min(given) < max(given) < none.input + 0.03


def test_table9_averages_as_printed_and_by_group() -> None:
    tasks = paper.vtab_tasks()
    groups = [[task.name for task in tasks if task.group == word] for word in ("natural", "specialized", "structured")]
    assert list(map(len, groups)) == [7, 4, 8]
    assert {(row.model, row.pretraining) for row in paper.table9()} == set(VTAB_MEANS)
    for row in paper.table9():
        plain, *by_group = VTAB_MEANS[row.model, row.pretraining]
        assert list(row.scores) == [task.name for task in tasks]
        assert mean(row.scores.values()) == pytest.approx(plain, abs=0.005)
        assert row.mean == round(plain, 1)
        (best,) = [best for best in paper.table2() if (best.model, best.pretraining) == (row.model, row.pretraining)]
        assert best.vtab[0] == pytest.approx(plain, abs=0.011)  # Table 2 averages before rounding
        for group, expected in zip(groups, by_group, strict=True):
            assert mean(row.scores[name] for name in group) == pytest.approx(expected, abs=0.051)


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
    """TrainStep at batch 4096: the paper speaks of about 14 epochs of JFT-300M for a million steps (appendix B.1.2)."""
    sets = paper.pretraining_sets()
    assert sets["JFT-300M"].images * 14 / 4096 == pytest.approx(1_000_000, rel=0.04)
    assert sets["ImageNet-21k"].images * 90 / 4096 == pytest.approx(312_000, rel=0.001)
    assert sets["ImageNet"].images * 300 / 4096 == pytest.approx(93_800, rel=0.001)
    assert [sets[name].classes for name in ("ImageNet", "ImageNet-21k", "JFT-300M")] == [1000, 21_843, 18_291]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (
            ("ViT-L/16", "jft300m", "imagenet"),
            [(87.76, 0.03, "Table 2"), (87.12, None, "Table 5"), (86.3, None, "Table 6"), (87.12, None, "Table 6")],
        ),
        (("ViT-B/16", "imagenet21k", "pets"), [(94.43, None, "Table 5")]),
        (("B/16@384", "imagenet", "cifar10"), [(98.13, None, "Table 5")]),
        (("R50+ViT-B/16", "jft300m", "real"), [(89.65, None, "Table 6")]),
        (
            ("R50x1", "jft300m", "flowers"),
            [(94.26, None, "Table 6"), (94.26, None, "Table 7"), (92.06, None, "Table 7")],
        ),
        (("R152x4", "jft300m", "real"), [(90.54, None, "Table 2")]),
        (("ViT-L/16", "imagenet21k", "vtab"), [(72.72, 0.21, "Table 2"), (72.7, None, "Table 9")]),
        (("ViT-H/14", "jft300m", "objectnet"), [(61.7, None, "Appendix D.9")]),
        (("ViT-B/16", "jft300m-masked", "imagenet"), [(79.9, None, "Appendix B.1.2 and section 4.6")]),
        (("ViT-H/14", "imagenet", "imagenet"), []),
        (("ViT-Ti/16", "imagenet21k", "pets"), []),
        (("ViT-(3 layers, width 8, MLP 32, 2 heads)/16", "imagenet21k", "pets"), []),
        (("EfficientNet-L2", "jft300m", "real"), [(90.55, None, "Table 2")]),
    ],
)
def test_reported_results(question: tuple[str, str, str], answer: list[tuple[float, float | None, str]]) -> None:
    assert [(number.value, number.spread, number.source) for number in paper.reported(*question)] == answer


def test_reported_results_refuse_unknown_names() -> None:
    for question in (("ViT-B/16", "jft", "pets"), ("ViT-B/16", "jft300m", "mnist")):
        with pytest.raises(UserError, match="use one of"):
            paper.reported(*question)


def test_rows_have_a_source_and_are_immutable() -> None:
    tables = (paper.table1, paper.table2, paper.table3, paper.table4, paper.table5, paper.table6, paper.table7)
    for number, table in enumerate(tables, 1):
        assert {row.source for row in table()} == {f"Table {number}, arXiv v2"}
    others = (*paper.table8(), *paper.table9(), *paper.vtab_tasks(), *paper.pretraining_sets().values())
    for row in (*others, *paper.bit_pretraining(), *paper.bit_finetuning(), *paper.near_duplicates()):
        assert "arXiv v2" in row.source
    with pytest.raises(FrozenInstanceError):
        paper.table6()[0].exaflops = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        paper.table9()[0].scores["pets"] = 100.0  # type: ignore[index]
