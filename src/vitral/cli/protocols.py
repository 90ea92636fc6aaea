"""`vitral pretrain` and `vitral finetune`: the paper's protocols, each result beside the paper's own number."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from vitral.cli.output import (
    Count,
    Data,
    Flag,
    Folder,
    Source,
    Text,
    Times,
    Tried,
    Words,
    print_facts,
    print_json,
    print_table,
)
from vitral.cli.train import check_once, rank, shown_run
from vitral.progress import duration

if TYPE_CHECKING:
    from vitral.api.protocols import Printed, Protocol


class Described(typing.Protocol):
    def as_dict(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Described)
_Recipe = Annotated[str, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="")]


def pretrain(
    data: Data,
    /,
    *,
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    recipe: _Recipe = "paper:pretrain/imagenet",
    sweep: Tried = (),
    seeds: Times = 1,
    out: Folder = "",
    device: Text = "",
    set: Words = (),
    json: Flag = False,
) -> None:
    """Pre-train from scratch as the paper does: Table 3's recipes, BiT's, or masked patch prediction.

    Args:
        data: what `vitral train` takes, cifar10:FOLDER, imagenet:FOLDER, ...
        model: its name, such as ViT-B/16; with the recipe's name it picks the row of the table.
        recipe: a name (`vitral list recipes`), or a TOML file.
        sweep: values to choose from on the dev split, such as regularization.dropout=0,0.1 optim.weight_decay=0.03,0.1.
        seeds: runs of the chosen recipe.
        out: the run folder; the same folder again goes on where it stopped.
        device: cpu, cuda, cuda:1 or mps; chosen without it.
        set: keys of the recipe to change, such as data.subset=9000000 data.exclude=FILE data.dev=0.01 patience=3.
        json: print the result as JSON.
    """
    from vitral import api

    check_once({"model": model}, set)
    report(
        lambda on_event: api.pretrain(
            data,
            model=model,
            recipe=recipe,
            overrides=set,
            sweep=sweep,
            seeds=seeds,
            out=out,
            device=device,
            on_event=on_event,
        ),
        _print,
        json,
    )


def finetune(
    source: Source,
    data: Data,
    /,
    *,
    recipe: Annotated[str, tyro.conf.arg(metavar="RECIPE")],
    sweep: Tried = (),
    seeds: Count = None,
    out: Folder = "",
    device: Text = "",
    set: Words = (),
    json: Flag = False,
) -> None:
    """Fine-tune as the paper does: the rate chosen on a dev split, all of train, three seeds, the test split once.

    Args:
        source: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        data: what `vitral train` takes, pets:FOLDER, cifar100:FOLDER, ...
        recipe: a name (`vitral list recipes`), such as paper:finetune/pets, or a TOML file.
        sweep: values to choose from instead of the recipe's own, such as optim.lr=0.003,0.01.
        seeds: runs of the chosen recipe; the recipe's own number without it.
        out: the run folder; the same folder again goes on where it stopped.
        device: cpu, cuda, cuda:1 or mps; chosen without it.
        set: keys of the recipe to change, such as steps=100 image=224.
        json: print the result as JSON.
    """
    from vitral import api

    check_once({"init": source}, set)
    report(
        lambda on_event: api.finetune(
            source,
            data,
            recipe=recipe,
            overrides=set,
            sweep=sweep,
            seeds=seeds,
            out=out,
            device=device,
            on_event=on_event,
        ),
        _print,
        json,
    )


def report(start: Callable[[Any], T], show: Callable[[T], None], json: bool) -> None:
    """Run it under the display, then print what came out."""
    with shown_run() as display:
        found = start(display)
    if rank():
        return
    if json:
        print_json(found.as_dict())
    else:
        show(found)


def _print(found: Protocol) -> None:
    """One value a line: a table of all this would be wider than most windows."""
    outcome = found.outcome
    last = outcome.results[-1]
    if outcome.trials:
        n = outcome.trials[0].result.metrics["n"]
        cells = [[trial.name, _value(trial.result.metrics)] for trial in outcome.trials]
        print_table(["tried", f"on {outcome.dev} (n = {n:,})"], cells)
    speed = last.images_per_second / last.devices
    print_facts(
        {
            "model": found.model,
            "data": found.data,
            "diverged": ", ".join(outcome.diverged),
            "chosen": outcome.chosen.name if outcome.trials else "",
            "result": _result(found),
            "the paper": "\n".join(_paper(entry) for entry in found.reported),
            "FLOPs": f"{outcome.flops:.3g} a run, {outcome.all_flops:.3g} in all",
            "device-hours": f"{outcome.device_hours:.3g} in all",
            "speed": f"{speed:,.0f} images/s a device" if speed else "",
            "device": f"{last.devices} x {last.device}",
            "time": f"{duration(outcome.device_hours * 3600 / last.devices)} in all",
            "run folders" if outcome.results[1:] else "run folder": ", ".join(run.folder for run in outcome.results),
            "all numbers": f"{found.folder}/protocol.json",
        }
    )


def _result(found: Protocol) -> str:
    """The value, and what it is: which images, how many, how often."""
    outcome = found.outcome
    metrics = outcome.results[-1].metrics
    spread = ""
    if outcome.spread is not None:
        spread = f" +- {outcome.spread:.4f}" if "masked_loss" in metrics else f" +- {outcome.spread:.2%}"
    kind = "the best value of a run on" if outcome.chosen.recipe.patience else "on"
    times = "1 seed" if not outcome.results[1:] else f"mean and standard deviation of {len(outcome.results)} seeds"
    mean = _value({**metrics, "score": outcome.mean})
    return f"{mean}{spread} {kind} {outcome.split} (n = {metrics['n']:,}; {times})"


def _value(metrics: dict[str, Any]) -> str:
    """The one number of a run."""
    if "masked_loss" in metrics:
        return f"loss {-metrics['score']:.4f}"
    kind = "mAP " if "mean_average_precision" in metrics else ""
    return f"{kind}{metrics['score']:.2%}"


def _paper(entry: Printed) -> str:
    number = entry.number
    spread = f" +- {number.spread}" if number.spread is not None else ""
    note = f": {number.note}" if number.note else ""
    return f"{number.value}{spread} % on {entry.data} from {entry.pretraining} ({number.source}{note})"
