"""docs/paper-map.md: a row for every section, figure and table; the files and tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from vitral import paper
from vitral.cost import training_flops
from vitral.names import parse

ROOT = Path(__file__).parents[2]
SECTIONS = {
    *("3.1", "3.2", "4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "A", "B.1", "B.1.1", "B.1.2", "C"),
    *(f"D.{number}" for number in range(1, 11)),
}
PROOFS = ("outside", "formula", "printed", "ourselves")


class Row(NamedTuple):
    """A row of the table."""

    paper: str
    implemented: str
    tested: str
    run: str
    result: str


def rows() -> list[Row]:
    lines = (ROOT / "docs" / "paper-map.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
    cells = [row for row in cells if row[0] != "paper" and not row[0].startswith("---")]
    assert all(len(row) == 5 for row in cells), [row for row in cells if len(row) != 5]
    return [Row(*row) for row in cells]


def named(kind: str, most: int) -> set[int]:
    """The numbers after "Figure" or "Table" in the first column."""
    found = {int(number) for row in rows() for number in re.findall(rf"{kind} (\d+)", row.paper)}
    assert found <= set(range(1, most + 1))
    return found


def test_every_section_figure_and_table_has_a_row() -> None:
    section = re.compile(r"(?<![\w.])(?:\d\.\d|[A-D](?:\.\d+)*)(?![\w-])")
    assert {name for row in rows() for name in section.findall(row.paper)} >= SECTIONS
    assert named("Figure", 14) == set(range(1, 15))
    assert named("Table", 9) == set(range(1, 10))


def test_files_exist() -> None:
    for row in rows():
        names = re.findall(r"`([\w/]+(?:\.\w+|/))`", row.implemented)
        assert names, row.paper
        for name in names:
            assert (ROOT / "src" / "vitral" / name).exists(), name


def test_tests_exist_and_say_what_they_compare_with() -> None:
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows():
        assert row.tested.startswith(PROOFS), row.tested
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row.tested)
        assert tests or row.implemented == "`bench/`", row.paper
        for file, name in tests:
            assert f"\ndef {name}(" in sources[file], f"{file}::{name}"
        assert row.run
        assert row.result


def test_the_numbers_of_table6_are_those_of_the_code() -> None:
    percent: dict[str, list[float]] = {"ResNet": [], "R50x1+": [], "ViT": []}
    for row in paper.table6():
        computed = training_flops(parse(row.model), images=303e6, epochs=row.epochs) / 1e18
        family = next(family for family in percent if row.model.startswith(family))
        percent[family].append(round(100 * (computed / row.exaflops - 1), 1))
    (stated,) = (row.result for row in rows() if "Figure 5" in row.paper)
    vit, hybrid, resnet = percent["ViT"], sorted(percent["R50x1+"]), percent["ResNet"]
    assert f"ViT {min(vit):+.1f} to {max(vit):+.1f} %" in stated
    assert f"hybrids {abs(hybrid[1]):.1f} to {hybrid[-1]:+.1f} % and once {hybrid[0]:+.1f} %" in stated
    assert f"ResNets {min(resnet):+.1f} to {max(resnet):+.1f} %" in stated
