"""`vitral train` and `vitral show`."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.cli.output import Data, Flag, Text, Words, counted, print_facts, print_json, print_table
from vitral.errors import Interrupted, UserError
from vitral.progress import Display, duration, headline
from vitral.recipe import Recipe, to_toml, with_overrides

if TYPE_CHECKING:
    from vitral.api import TrainResult

_Number = Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]


def train(
    data: Data,
    /,
    *,
    model: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = "",
    init: Annotated[str, tyro.conf.arg(metavar="WEIGHTS", help_behavior_hint="")] = "",
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = "",
    recipe: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = "",
    epochs: _Number = None,
    trainable: Text = "",
    balance: Text = "",
    seed: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    seeds: Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")] = 1,
    device: Text = "",
    set: Words = (),
    tensorboard: Flag = False,
    json: Flag = False,
) -> None:
    """Train a model on images, or fine-tune one; everything that is not said is chosen, and said why.

    Args:
        data: a folder with one sub-folder per class, a CSV or JSONL manifest, Parquet, tar shards, or `digits`.
        model: a model to train from scratch, such as ViT-Ti/16.
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        out: the run folder; the same folder again goes on where it stopped.
        recipe: a TOML file; `vitral show` prints one to start from.
        epochs: how often each image is seen.
        trainable: what learns: full, head, last:K, bias or lora:R.
        balance: against uneven classes: none, weights, sampler or logit-adjust.
        seed: of weights, order, augmentation and dropout.
        seeds: train this many times, from seed on, and print mean and spread.
        device: cpu, cuda, cuda:1 or mps; chosen without it.
        set: any other key of the recipe, such as optim.lr=0.01 data.mixup=0.2.
        tensorboard: write TensorBoard events into the run folder too.
        json: print the result as JSON.
    """
    from vitral import api

    named = {"epochs": epochs, "trainable": trainable or None, "balance": balance or None, "seed": seed}
    words = [f"{key}={value}" for key, value in named.items() if value is not None]
    check_once({**named, "model": model or None, "init": init or None}, set)
    with shown_run() as display, _listener(display, data, out, tensorboard and not rank()) as on_event:
        done = api.train(
            data,
            model=model,
            init=init,
            out=out,
            recipe=recipe,
            set=[*words, *set],
            seeds=seeds,
            device=device,
            on_event=on_event,
        )
    if rank():
        return
    display.print("writing the page")
    page = write_page(done.results[-1].folder, data, device)
    if json:
        print_json({**_values(done), "page": page})
    else:
        _print(done, page)


def show(
    set: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE] [KEY=VALUE ...]", help_behavior_hint="")
    ] = (),
    /,
    *,
    data: Annotated[str, tyro.conf.arg(metavar="DATA", help_behavior_hint="")] = "",
    model: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = "",
    init: Annotated[str, tyro.conf.arg(metavar="WEIGHTS", help_behavior_hint="")] = "",
    recipe: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = "",
    json: Flag = False,
) -> None:
    """Print a recipe as TOML, every key with its meaning: the defaults, a file, or what would be chosen for data.

    Args:
        set: a recipe file or run folder, and keys to change, such as optim.lr=0.01.
        data: print what `vitral train DATA` would follow.
        model: the model to train from scratch.
        init: the weights to start from.
        recipe: a TOML file to complete.
        json: print JSON instead of TOML.
    """
    if set and "=" not in set[0]:
        recipe, set = set[0], set[1:]
    check_once({"model": model or None, "init": init or None}, set)
    if data:
        from vitral import api

        _, chosen, _ = api.choose_recipe(data, model=model, init=init, recipe=recipe, set=set)
    else:
        named = {"model": model, "init": init}
        words = [f"{key}={value}" for key, value in named.items() if value]
        chosen = with_overrides(_read(recipe) if recipe else Recipe(), [*words, *set])
    if json:
        print_json(asdict(chosen))
    else:
        print(to_toml(chosen), end="")


def check_once(named: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse a key of the recipe that has an option of its own and is given both ways; None was not given."""
    for key in (word.partition("=")[0].strip() for word in words):
        if named.get(key) is not None:
            raise UserError(f"{key} is given twice, by its own option and as {key}=...: leave one of them out.")


def _read(recipe: str) -> Recipe:
    from vitral import api

    return api.read_recipe(recipe)


def rank() -> int:
    """Which process of a torchrun this is; only the first speaks."""
    return int(os.environ.get("RANK", 0))


@contextmanager
def shown_run() -> Iterator[Display]:
    """A display for runs of one folder; where they are stopped, it says how they go on."""
    with Display(quiet=rank() > 0) as display:
        try:
            yield display
        except (Interrupted, KeyboardInterrupt):
            if display.folder:  # else it has not begun
                saved = f"; the state of step {display.saved_step:,} is saved" if display.saved_step else ""
                display.print(f"stopped{saved}; go on with: {_same_command(display.folder)}")
            sys.exit(130)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not display.folder:
                raise
            raise UserError(
                "the disk is full: free some space; what was saved before is whole, and goes on with "
                f"`{_same_command(display.folder)}`."
            ) from error


def _same_command(folder: str) -> str:
    """What the user typed, with the run folder where that was not named."""
    words = sys.argv[1:]
    if not any(word.partition("=")[0] == "--out" for word in words):
        words = [*words, "--out", folder]
    return f"{'torchrun ... -m vitral' if 'RANK' in os.environ else 'vitral'} {shlex.join(words)}"


def write_page(folder: str, data: str, device: str = "") -> str:
    """The page of a run; a run whose page cannot be made is still a run."""
    from vitral import api

    try:
        return str(api.write_run_page(folder, data, device=device))
    except (UserError, OSError) as error:
        return f"none ({error})"


def _values(done: TrainResult) -> dict[str, Any]:
    return {
        "score": done.mean,
        "spread": done.spread,
        "seeds": len(done.results),
        "runs": [asdict(result) for result in done.results],
    }


def _print(done: TrainResult, page: str) -> None:
    last = done.results[-1]
    rate = f", {last.images_per_second:,.0f} images/s" if last.images_per_second else ""
    facts = {"result": headline(last.metrics)}
    if done.spread is not None:
        facts["result"] = (
            f"{done.mean:.2%} +- {done.spread:.2%} (mean and standard deviation of {len(done.results)} seeds)"
        )
    facts |= {
        "time": f"{duration(sum(result.seconds for result in done.results))}{rate}",
        "cost": f"{last.flops:.3g} FLOPs{' a run' if done.results[1:] else ''}, {_hours(done)} device-hours "
        f"({last.devices} x {last.device})",
        "memory": f"{last.peak_bytes / 1e9:.2f} GB at most ({last.predicted_peak_bytes / 1e9:.2f} GB predicted)",
        "left out": f"{counted(len(last.unreadable), 'image')} that cannot be read" if last.unreadable else "",
        "often confused": _confused(last.metrics),
        "run folders" if done.results[1:] else "run folder": ", ".join(result.folder for result in done.results),
    }
    print_facts(facts)
    _print_classes(last.metrics)
    print(f"\nLook at it:  {page}")
    print(f"Try it:      vitral predict {last.folder} IMAGES...")


def _hours(done: TrainResult) -> str:
    return f"{sum(result.device_hours for result in done.results):.2g}"


def _confused(metrics: dict[str, Any]) -> str:
    pairs = metrics.get("confused") or []
    return "; ".join(f"{p['true']} taken for {p['predicted']} ({p['count']} of {p['support']})" for p in pairs[:3])


def _print_classes(metrics: dict[str, Any]) -> None:
    """The classes with the lowest recall; all of them where there are few."""
    rows = [row for row in metrics.get("per_class", []) if row.get("recall") is not None]
    worst = sorted(rows, key=lambda row: row["recall"])[:12]
    if not worst:
        return
    cells = [[row["name"], f"{row['support']:,}", _percent(row["recall"]), _percent(row["precision"])] for row in worst]
    print_table(["class" if len(worst) == len(rows) else "weakest classes", "images", "recall", "precision"], cells)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


@contextmanager
def _listener(display: Display, data: str, out: str, tensorboard: bool) -> Iterator[Callable[[Any], None]]:
    """Who hears of the run: the display and, where it is asked for, TensorBoard."""
    if not tensorboard:
        yield display
        return
    from vitral.api.run_folder import check_out
    from vitral.progress import TensorBoard

    check_out(out, data)  # before there are files in it
    board = TensorBoard(out)

    def both(event: Any) -> None:
        display(event)
        board(event)

    try:
        yield both
    finally:
        board.close()
