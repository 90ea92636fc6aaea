"""Results of train, show, pretrain, finetune, vtab and demo as tables or JSON."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vitral.cli.results import counted, percent, print_json
from vitral.display import duration, headline, interval_text, print_facts, print_table, with_deviation
from vitral.errors import UserError
from vitral.recipe import Recipe, to_toml

if TYPE_CHECKING:
    from vitral.api.protocols import PaperNumber, ProtocolResult
    from vitral.api.study import StudyList, StudyReport, StudyRuns
    from vitral.api.training import DemoResult, TrainResult
    from vitral.api.vtab import VtabResult

_CLASSES = 12  # rows of a table of classes
_SHORT = {"jft300m": "JFT", "imagenet21k": "I21k"}


def show_training(result: Any, values: Mapping[str, Any]) -> None:
    """Write the page of the last run, and print what came out."""
    if result.folds is not None:
        _show_folds(result, values)
        return
    last = result.results[-1]
    print("writing the page", file=sys.stderr)
    page = _run_page(last.folder, values["data"], values["device"])
    if values["json"]:
        runs = [asdict(run) for run in result.results]
        print_json({"score": result.mean, "spread": result.spread, "seeds": len(runs), "runs": runs, "page": page})
        return
    score = headline(last.metrics)
    if result.spread is not None:
        score = with_deviation(f"{result.mean:.2%}", f"{result.spread:.2%}", len(result.results))
    rate = f", {last.images_per_second:,.0f} images/s" if last.images_per_second else ""
    hours = sum(run.device_hours for run in result.results)
    flops = f"{last.flops:.3g} FLOPs{' per run' if result.results[1:] else ''}"
    pairs = (last.metrics.get("confused") or [])[:3]
    confused = [f"{p['true']} taken for {p['predicted']} ({p['count']} of {p['support']})" for p in pairs]
    facts = {
        "result": score,
        "selection": last.selection,
        "calibration": _calibration(last),
        "time": f"{duration(sum(run.seconds for run in result.results))}{rate}",
        "cost": f"{flops}, {hours:.2g} device-hours ({last.devices} x {last.device})",
        "memory": f"{last.peak_bytes / 1e9:.2f} GB peak ({last.predicted_peak_bytes / 1e9:.2f} GB estimated)",
        "left out": f"{counted(len(last.unreadable), 'image')} that cannot be read" if last.unreadable else "",
        "often confused": "; ".join(confused),
        _run_folders(result.results): ", ".join(run.folder for run in result.results),
    }
    print_facts(facts)
    _print_classes(last.metrics)
    print(f"\nOpen the page:  {page}")
    print(f"Predict:        vitral predict {shlex.quote(last.folder)} IMAGES...")


def _show_folds(result: TrainResult, values: Mapping[str, Any]) -> None:
    """Print the mean of the folds, the accuracy over all images, and which model to use."""
    folds, runs = result.folds, result.results
    assert folds is not None
    if values["json"]:
        print_json({**folds.as_dict(), "folder": str(result.folder), "runs": [asdict(run) for run in runs]})
        return
    approximate = "by Student's t; the models share training images, so that it is approximate"
    scores, hours = ", ".join(f"{score:.2%}" for score in folds.scores), sum(run.device_hours for run in runs)
    pooled = ""
    if folds.out_of_fold is not None and folds.out_of_fold_interval is not None:
        accuracy = f"{folds.out_of_fold['top1']:.2%} ({interval_text(*folds.out_of_fold_interval)}, Wilson's)"
        pooled = (
            f"{accuracy} of {counted(folds.out_of_fold['n'], 'image')}, each predicted by the model that never saw it"
        )
    facts = {
        "result": f"{result.mean:.2%}, mean of {len(runs)} folds ({interval_text(*folds.interval)}, {approximate})",
        "folds": f"{scores} (seeds {folds.seeds[0]} to {folds.seeds[-1]})",
        "out of fold": pooled,
        "time": duration(sum(run.seconds for run in runs)),
        "cost": f"{hours:.2g} device-hours ({runs[-1].devices} x {runs[-1].device})",
        "run folders": f"{', '.join(run.folder for run in runs)}; all numbers in {result.folder / 'folds.json'}",
    }
    print_facts(facts)
    _print_classes(folds.out_of_fold or {})
    print(f"\nPredict:  vitral predict {shlex.quote(str(result.folder))} IMAGES...  (averages the {len(runs)} models)")


def _calibration(run: Any) -> str:
    """The calibration error with and without the temperature of a run."""
    metrics = run.metrics
    if metrics.get("temperature", 1.0) == 1.0:
        return f"error {metrics['ece']:.2%}; {run.calibration}" if "ece" in metrics else run.calibration
    return f"error {metrics['ece_calibrated']:.2%}, {metrics['ece']:.2%} without its temperature; {run.calibration}"


def show_recipe(result: Recipe, values: Mapping[str, Any]) -> None:
    if values["json"]:
        print_json(asdict(result))
    else:
        print(to_toml(result), end="")


def show_demo(result: DemoResult, values: Mapping[str, Any]) -> None:
    """Print the predictions and what to do next, and open the page if a person watches."""
    cells = [
        [Path(row.path).name, *(f"{name} ({p:.0%})" for name, p in zip(row.names, row.probabilities, strict=True))]
        for row in result.predictions.rows
    ]
    print_table(["image (named by its class)", "prediction", "second"], cells, left=3)
    if sys.stdout.isatty() and result.page.is_file():
        webbrowser.open(result.page.resolve().as_uri())
    first, second = result.folders
    facts = {
        "result": f"accuracy {result.accuracy:.2%} (n = {result.n:,})",
        "page": f"{result.page} (open it in a browser: curves, mistakes, attention maps)",
        "run folders": f"{first}, {second} (recipe.toml, metrics.jsonl, model.safetensors, result.json)",
    }
    print_facts(facts)
    print("\nNext, with a folder that has one sub-folder of images per class:")
    print("  vitral check photos/")
    print("  vitral train photos/ --init hf:google/vit-base-patch16-224")
    print(f"  vitral evaluate {second} digits")


def show_study(result: StudyList | StudyRuns | StudyReport, values: Mapping[str, Any]) -> None:
    """Print the studies there are, the commands of pending runs, the plan and the table of a study, or its claims."""
    from vitral.api.study import StudyList, StudyReport, describe_plan

    if isinstance(result, StudyList):
        rows = [
            [entry.name, entry.title, entry.source, ", ".join(entry.data), f"{entry.runs}", ", ".join(entry.scales)]
            for entry in result.studies
        ]
        print_table(["study", "about", "the paper", "data", "runs", "scales"], rows, left=4)
        return
    if isinstance(result, StudyReport):
        rows = [[name, claim.claim.text, claim.verdict, claim.measured] for name, claim in result.claims]
        print_table(["study", "claim", "verdict", "measured"], rows, left=4)
        print_facts({"wrote": ", ".join(map(str, result.files))})
        return
    if values["print_commands"]:
        print("\n".join(result.commands))
        return
    if not values["dry_run"]:
        columns, cells = result.table()
        print_table(columns, cells, left=columns.index(result.study.metric))
    print("\n".join(describe_plan(result)))


def show_protocol(result: ProtocolResult, values: Mapping[str, Any]) -> None:
    """Print one value per line: a table of all this would be wider than most windows."""
    outcome = result.outcome
    last = outcome.results[-1]
    if outcome.trials:
        n = outcome.trials[0].result.metrics["n"]
        cells = [[trial.name, _score(trial.result.metrics)] for trial in outcome.trials]
        print_table(["tried", f"on {outcome.dev} (n = {n:,})"], cells)
    speed = last.images_per_second / last.devices
    facts = {
        "model": result.model,
        "data": result.data,
        "diverged": ", ".join(outcome.diverged),
        "chosen": outcome.chosen.name if outcome.trials else "",
        "result": _protocol_score(result),
        "ReaL": f"{fmean(result.real):.2%} (n = {result.real_n:,})" if result.real else "",
        "the paper": "\n".join(_paper_number(entry) for entry in result.reported),
        "not as in the paper": ", ".join(result.changed) if result.reported else "",
        "FLOPs": f"{outcome.flops:.3g} per run, {outcome.all_flops:.3g} in all",
        "device-hours": f"{outcome.device_hours:.3g} in all",
        "speed": f"{speed:,.0f} images/s per device" if speed else "",
        "device": f"{last.devices} x {last.device}",
        "time": f"{duration(outcome.device_hours * 3600 / last.devices)} in all",
        _run_folders(outcome.results): ", ".join(run.folder for run in outcome.results),
        "all numbers": f"{result.folder}/protocol.json",
    }
    print_facts(facts)


def show_vtab(result: VtabResult, values: Mapping[str, Any]) -> None:
    row = result.as_dict()
    if row["trials"]:
        cells = [[trial["name"], f"{trial['score']:.2%}"] for trial in row["trials"]]
        print_table(["tried", "mean on validation"], cells)
    paper = row["paper"]
    heads = [f"{theirs['model'].removeprefix('ViT-')} {_SHORT[theirs['pretraining']]}" for theirs in paper]
    cells = [
        [name, f"{task['n']:,}", f"{100 * task['score']:.2f}", *(f"{theirs['tasks'][name]:.1f}" for theirs in paper)]
        for name, task in row["tasks"].items()
    ]
    cells += [
        [f"mean of {group}", "", f"{100 * score:.2f}", *(f"{theirs['groups'][group]:.1f}" for theirs in paper)]
        for group, score in row["groups"].items()
    ]
    cells.append(["mean of all", "", f"{100 * row['score']:.2f}", *(f"{theirs['mean']:.1f}" for theirs in paper)])
    print_table(["task", "n", "ours %", *heads], cells, note="\n".join(row["notes"]))
    print_table(
        ["task", "FLOPs per run", "device-hours", "images/s per device"],
        [_vtab_cost(name, task) for name, task in row["tasks"].items()],
    )
    print_facts(_vtab_facts(row))


def _run_page(folder: str, data: str, device: str) -> str:
    """The page of a run; a run whose page cannot be written is still a result."""
    from vitral.api.inspection import write_run_page

    try:
        return str(write_run_page(folder, data, device=device))
    except (UserError, OSError) as error:
        return f"none ({error})"


def _run_folders(results: Any) -> str:
    return "run folders" if results[1:] else "run folder"


def _print_classes(metrics: dict[str, Any]) -> None:
    """The classes with the lowest recall; all of them if there are few."""
    rows = [row for row in metrics.get("per_class", []) if row.get("recall") is not None]
    worst = sorted(rows, key=lambda row: row["recall"])[:_CLASSES]
    if not worst:
        return
    cells = [[row["name"], f"{row['support']:,}", f"{row['recall']:.1%}", percent(row["precision"])] for row in worst]
    print_table(["class" if len(worst) == len(rows) else "weakest classes", "images", "recall", "precision"], cells)


def _protocol_score(result: ProtocolResult) -> str:
    """The score, the split it was measured on, and the number of images and seeds."""
    outcome = result.outcome
    metrics = outcome.results[-1].metrics
    spread = ""
    if outcome.spread is not None:
        spread = f" +- {outcome.spread:.4f}" if "masked_loss" in metrics else f" +- {outcome.spread:.2%}"
    weights = f"; weights selected on {outcome.dev}" if outcome.chosen.recipe.patience else ""
    seeds = "1 seed" if not outcome.results[1:] else f"mean and standard deviation of {len(outcome.results)} seeds"
    mean = _score({**metrics, "score": outcome.mean})
    return f"{mean}{spread} on {outcome.split} (n = {metrics['n']:,}; {seeds}{weights})"


def _score(metrics: dict[str, Any]) -> str:
    if "masked_loss" in metrics:
        return f"loss {-metrics['score']:.4f}"
    name = "mAP " if "mean_average_precision" in metrics else ""
    return f"{name}{metrics['score']:.2%}"


def _paper_number(entry: PaperNumber) -> str:
    number = entry.number
    spread = f" +- {number.spread}" if number.spread is not None else ""
    note = f": {number.note}" if number.note else ""
    note += "; +- is its standard deviation" if spread else ""
    label = f", {entry.label}" if entry.label else ""
    return f"{number.value}{spread} % on {entry.data} from {entry.pretraining} ({number.source}{note}){label}"


def _vtab_cost(name: str, task: dict[str, Any]) -> list[str]:
    speed = task["images_per_second_per_device"]
    return [name, f"{task['training_flops']:.3g}", f"{task['device_hours']:.3g}", f"{speed:,.0f}" if speed else ""]


def _vtab_facts(row: dict[str, Any]) -> dict[str, str]:
    score = f"{row['score']:.2%}"
    if row["spread"] is not None:
        score = with_deviation(score, f"{row['spread']:.2%}", len(row["seeds"]))
    theirs = [f"{line['mean_of_all']} {line['model']} {_SHORT[line['pretraining']]}" for line in row["paper"]]
    label = f" ({row['paper'][0]['label']})" if row["paper"][0]["label"] else ""
    verified = sum(task["order"].startswith("tfds order: yes") for task in row["tasks"].values())
    return {
        "score": score,
        "model": row["model"],
        "tasks": row["coverage"],
        "diverged": ", ".join(row["diverged"]),
        "chosen": row["chosen"] if row["trials"] else "",
        "the paper, all tasks": "; ".join(theirs) + label,
        "not as in the paper": ", ".join(row["changed"]),
        "images": f"in TFDS's own order in {verified} of {len(row['tasks'])} tasks",
        "FLOPs": f"{row['training_flops']:.3g} for one run of each task, {row['all_flops']:.3g} in all",
        "device-hours": f"{row['device_hours']:.3g} in all",
        "device": f"{row['devices']} x {row['device']}",
        "run folder": row["folder"],
    }
