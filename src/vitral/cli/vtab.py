"""`vitral vtab`: the 19 tasks of VTAB-1k, each beside the paper's own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.cli.output import Flag, Folder, Source, Text, Times, Tried, Words, print_facts, print_table
from vitral.cli.protocols import report

if TYPE_CHECKING:
    from vitral.api import VtabScore

_Root = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROOT")]
_Tasks = Annotated[str, tyro.conf.arg(metavar="TASK,TASK", help_behavior_hint="")]
_Recipe = Annotated[str, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="")]
_SHORT = {"jft300m": "JFT", "imagenet21k": "I21k"}


def vtab(
    source: Source,
    root: _Root,
    /,
    *,
    tasks: _Tasks = "",
    recipe: _Recipe = "paper:finetune/vtab",
    sweep: Tried = (),
    fixed: Flag = False,
    seeds: Times = 1,
    out: Folder = "",
    device: Text = "",
    set: Words = (),
    json: Flag = False,
) -> None:
    """Score a model on VTAB-1k as the paper does: one recipe for 19 tasks, chosen on 200 images of each, test once.

    Args:
        source: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        root: a folder with the data of each task, ROOT/TASK or ROOT/DATASET; what is missing is skipped and named.
        tasks: some of the tasks, such as pets,clevr-count; all that are there without it.
        recipe: a name (`vitral list recipes`), such as paper:finetune/vtab:inception or BiT's bit:finetune/small.
        sweep: values to choose from instead of the recipe's own, such as optim.lr=0.003,0.01 steps=500,2500.
        fixed: choose nothing: take the rate and the length that the paper chose.
        seeds: runs of the chosen recipe on each task.
        out: the run folder; the same folder again goes on where it stopped.
        device: cpu, cuda, cuda:1 or mps; chosen without it.
        set: keys of the recipe to change, such as steps=100 image=224.
        json: print the result as JSON.
    """
    from vitral import api

    report(
        lambda on_event: api.vtab1k(
            source,
            root,
            tasks=[name.strip() for name in tasks.split(",") if name.strip()],
            recipe=recipe,
            overrides=set,
            sweep=sweep,
            fixed=fixed,
            seeds=seeds,
            out=out,
            device=device,
            on_event=on_event,
        ),
        _print,
        json,
    )


def _print(found: VtabScore) -> None:
    values = found.as_dict()
    if values["trials"]:
        cells = [[trial["name"], f"{trial['score']:.2%}"] for trial in values["trials"]]
        print_table(["tried", "mean on validation"], cells)
    paper = values["paper"]
    heads = [f"{row['model'].removeprefix('ViT-')} {_SHORT[row['pretraining']]}" for row in paper]
    rows = [_task_row(name, task, paper) for name, task in values["tasks"].items()]
    rows += [
        _mean_row(f"mean of {group}", score, [row["groups"][group] for row in paper])
        for group, score in values["groups"].items()
    ]
    rows.append(_mean_row("mean of all", values["score"], [row["mean"] for row in paper]))
    print_table(["task", "n", "ours %", *heads], rows, note="\n".join(values["notes"]))
    print_table(
        ["task", "FLOPs a run", "device-hours", "images/s a device"],
        [_cost_row(name, task) for name, task in values["tasks"].items()],
    )
    print_facts(_facts(values))


def _task_row(name: str, task: dict[str, Any], paper: list[dict[str, Any]]) -> list[str]:
    return [name, f"{task['n']:,}", f"{100 * task['score']:.2f}", *(f"{row['tasks'][name]:.1f}" for row in paper)]


def _mean_row(name: str, score: float, theirs: list[float]) -> list[str]:
    return [name, "", f"{100 * score:.2f}", *(f"{value:.1f}" for value in theirs)]


def _cost_row(name: str, task: dict[str, Any]) -> list[str]:
    speed = task["images_per_second_per_device"]
    return [name, f"{task['training_flops']:.3g}", f"{task['device_hours']:.3g}", f"{speed:,.0f}" if speed else ""]


def _facts(values: dict[str, Any]) -> dict[str, str]:
    spread = f" +- {values['spread']:.2%} over {len(values['seeds'])} seeds" if values["spread"] is not None else ""
    whole = "; ".join(f"{row['mean_of_all']} {row['model']} {_SHORT[row['pretraining']]}" for row in values["paper"])
    verified = sum(task["order"].startswith("tfds order: yes") for task in values["tasks"].values())
    return {
        "score": f"{values['score']:.2%}{spread}",
        "model": values["model"],
        "tasks": values["coverage"],
        "diverged": ", ".join(values["diverged"]),
        "chosen": values["chosen"] if values["trials"] else "",
        "the paper, all tasks": whole,
        "images": f"those of TFDS's own order in {verified} of {len(values['tasks'])} tasks",
        "FLOPs": f"{values['training_flops']:.3g} for a run of each task, {values['all_flops']:.3g} in all",
        "device-hours": f"{values['device_hours']:.3g} in all",
        "device": f"{values['devices']} x {values['device']}",
        "run folder": values["folder"],
    }
