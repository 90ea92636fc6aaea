"""The 19 tasks of VTAB-1k: the paper's rows, each with the rule of its labels."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from vitral.data.vtab.labels import CLASS, RULES, Rule
from vitral.errors import UserError
from vitral.paper import vtab_tasks


@dataclass(frozen=True)
class Task:
    """One task. `train`, `val` and `test` are splits in TFDS's words, before the first 800 and 200 are taken."""

    name: str
    group: str  # natural, specialized or structured
    builder: str  # TFDS's name of the data set, its setting and version
    classes: int
    train: str
    val: str
    test: str
    rule: Rule
    flip: bool  # whether BiT mirrors the training images
    crop: bool  # whether BiT crops them
    column: str  # in Table 9

    @property
    def dataset(self) -> str:
        """The data set's own name, which several tasks may share."""
        return self.builder.split(":")[0].split("/")[0]

    @property
    def setting(self) -> str:
        """TFDS's form of the data set, such as rgb of eurosat; empty where it has one form only."""
        return self.builder.split(":")[0].partition("/")[2]

    def expressions(self, train: int = 800, val: int = 200) -> dict[str, str]:
        """Our split's name to the images it takes."""
        return {"train800": f"{self.train}[:{train}]", "val200": f"{self.val}[:{val}]", "test": self.test}


TASKS: dict[str, Task] = {
    row.name: Task(
        name=row.name,
        group=row.group,
        builder=row.builder,
        classes=row.classes,
        train="train",
        val=row.val.removesuffix("[:200]"),
        test=row.test,
        rule=RULES.get(row.name, CLASS),
        flip=row.flip,
        crop=row.crop,
        column=row.paper,
    )
    for row in vtab_tasks()
}


def find_task(name: str) -> Task:
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"name one of {', '.join(TASKS)}."
        raise UserError(f"{name} is no task of VTAB: {hint}")
    return TASKS[name]
