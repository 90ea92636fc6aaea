"""`vitral predict`, `evaluate`, `embed` and `check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress

from vitral import events
from vitral.cli.output import Data, Flag, Number, Source, Text, counted, print_facts, print_json, print_table
from vitral.events import Event, EventHandler

if TYPE_CHECKING:
    from vitral.api import Evaluation
    from vitral.api.data import Unreadable


_Images = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES ...", help_behavior_hint="(required)")
]
_File = Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
_Output = Annotated[str, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")]
_CLASSES = 30  # lines of a table of classes
_UNREADABLE = 20  # names in a line


def predict(
    source: Source,
    images: _Images,
    /,
    *,
    output: _Output = "",
    top: Number = 5,
    preprocess: Text = "",
    batch: Number = 32,
    device: Text = "",
    json: Flag = False,
) -> None:
    """Name what is in images: the likeliest classes with their probabilities.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them.
        output: write this .csv or .json file instead of a table.
        top: how many classes to name.
        preprocess: how pixels are prepared, where the weights do not say.
        batch: images at a time.
        device: cpu, cuda or mps; chosen without it.
        json: print JSON instead of a table.
    """
    from vitral import api
    from vitral.api.prediction import Unreadable, none_read
    from vitral.errors import UserError

    with bar("predicting") as progress:
        found = api.predict(
            source,
            images,
            output=output,
            top=top,
            preprocess=preprocess,
            batch=batch,
            device=device,
            on_event=progress,
        )
    if json:
        print_json(found.as_dict())
    elif output:
        left_out = f", {len(found.unreadable):,} that cannot be read" if found.unreadable else ""
        print_facts({"wrote": f"{output} ({counted(len(found.rows), 'image')}{left_out})"})
    else:
        cells = [
            [
                one.path,
                f"not read: {one.reason}" if isinstance(one, Unreadable) else _chances(one.names, one.probabilities),
            ]
            for one in found.images
        ]
        print_table(["image", "classes"], cells, left=2)
    if not found.rows:
        raise UserError(f"{none_read(found.unreadable[0])}: name whole image files.")


def evaluate(
    source: Source,
    data: Data,
    /,
    *,
    split: Text = "",
    classes: _File = "",
    real: _File = "",
    preprocess: Text = "",
    batch: Number = 32,
    device: Text = "",
    json: Flag = False,
) -> None:
    """Measure a model on labelled images: accuracy, per class, calibration.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        data: what `vitral train` takes; its test split is scored, or all of it where there is none.
        split: the split to score where there are several, such as test beside val.
        classes: a file that names the model's outputs in order, one line each.
        real: ImageNet's ReaL labels (real.json).
        preprocess: how pixels are prepared, where the weights do not say.
        batch: images at a time.
        device: cpu, cuda or mps; chosen without it.
        json: print JSON instead of tables.
    """
    from vitral import api

    with bar("evaluating") as progress:
        found = api.evaluate(
            source,
            data,
            split=split,
            classes=classes,
            real=real,
            preprocess=preprocess,
            batch=batch,
            device=device,
            on_event=progress,
        )
    if json:
        print_json(asdict(found))
    else:
        print_facts(_evaluation_facts(found))


def embed(
    source: Source,
    images: _Images,
    /,
    *,
    output: Annotated[str, tyro.conf.arg(metavar="FILE", aliases=["-o"])],
    pool: Literal["features", "cls", "mean", "pre_logits"] = "features",
    preprocess: Text = "",
    batch: Number = 32,
    device: Text = "",
    json: Flag = False,
) -> None:
    """Write the features of images to an npz file: `paths` and `features` (n, d).

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them.
        output: the .npz file to write.
        pool: what the head reads (features), its last layer reads (pre_logits), the class token, the mean of patches.
        preprocess: how pixels are prepared, where the weights do not say.
        batch: images at a time.
        device: cpu, cuda or mps; chosen without it.
        json: print what was written as JSON.
    """
    from vitral import api
    from vitral.api.data import unread_files

    with bar("embedding") as progress:
        paths, features = api.embed(
            source,
            images,
            output=output,
            pool=pool,
            preprocess=preprocess,
            batch=batch,
            device=device,
            on_event=progress,
        )
    unreadable = unread_files(images, paths)
    if json:
        facts = {"output": output, "images": len(paths), "features": features.shape[1]}
        print_json({**facts, "unreadable": [asdict(one) for one in unreadable]})
    else:
        counts = {"images": f"{len(paths):,}", "features": f"{features.shape[1]:,}"}
        print_facts({"wrote": output, **counts, "left out": left_out(unreadable)})


def check(data: Data, /, *, json: Flag = False) -> None:
    """Say what is wrong with a data set: unreadable and odd files, duplicates, leaks into test, uneven classes.

    Args:
        data: what `vitral train` takes.
        json: print JSON instead of tables.
    """
    from vitral import api

    with bar("checking") as progress:
        found = api.check(data, on_event=progress)
    if json:
        print_json(found.as_dict())
        return
    print_facts(_check_facts(found))
    cells = [[name, *(f"{found.classes[split][name]:,}" for split in found.images)] for name in found.classes["train"]]
    more = f"and {len(cells) - _CLASSES:,} more classes" if cells[_CLASSES:] else ""
    print_table(["class", *found.images], cells[:_CLASSES], note=more)


def _chances(names: Sequence[str], probabilities: Sequence[float]) -> str:
    return "  ".join(f"{name} {chance:.1%}" for name, chance in zip(names, probabilities, strict=True))


def _evaluation_facts(found: Evaluation) -> dict[str, str]:
    m = found.metrics
    facts = {"data": f"{found.data} (n = {m['n']:,})", "how": " ".join(found.notes)}
    if "mean_average_precision" in m:
        facts |= {"mAP": f"{m['mean_average_precision']:.2%}", "macro F1": f"{m['macro_f1']:.2%}"}
    else:
        facts |= {"top-1": f"{m['top1']:.2%}", "top-5": f"{m['top5']:.2%}" if m["top5"] is not None else ""}
        if "mean_per_class" in m:
            facts |= {"mean per class": f"{m['mean_per_class']:.2%}", "calibration error": f"{m['ece']:.2%}"}
        if found.temperature is not None:
            after = f"{found.tempered_ece:.2%} with it, fitted on these very images"
            facts["best temperature"] = f"{found.temperature:.3g} (calibration error {after})"
        pairs = m.get("confused", [])[:3]
        facts["often confused"] = "; ".join(f"{p['true']} taken for {p['predicted']} ({p['count']})" for p in pairs)
    if found.real is not None:
        facts["ReaL"] = f"{found.real[0]:.2%} ({found.real[1]:,} images have such a label)"
    facts["left out"] = left_out(found.unreadable)
    return facts


def _check_facts(found: Any) -> dict[str, str]:
    uneven = f"; the largest has {found.imbalance:.1f} times the smallest"
    facts = {
        "data": f"{found.source}: {_per_split(found.images)}",
        "notes": " ".join(found.notes),
        "classes": f"{len(found.classes['train']):,}" + uneven * (found.imbalance > 1),
        "classes without images": _some(found.empty),
        "formats": ", ".join(f"{count:,} {name}" for name, count in found.formats.items()),
        "widths": _spread(found.widths),
        "heights": _spread(found.heights),
        "unreadable": _some([f"{key}: {reason}" for key, reason in found.unreadable.items()]),
        "rotated (EXIF)": _some(found.rotated),
        "over 8 bits": _some(found.deep),
        "CMYK": _some(found.cmyk),
        "animated": _some(found.animated),
        "tiny": _some(found.tiny),
        "identical": _some([" = ".join(group) for group in found.duplicates]),
        "identical, other label": _some([" = ".join(group) for group in found.contradictions]),
        "nearly identical": _some([f"{pair.first} ~ {pair.second}" for pair in found.near]),
        "in train and test": _some([f"{pair.first} ~ {pair.second}" for pair in found.leaks]) + _leaked_by(found),
    }
    return {name: value for name, value in facts.items() if value}


def _leaked_by(found: Any) -> str:
    """How leaks come about, and what to do about them."""
    if not found.leaks:
        return ""
    held = f"test is the {counted(found.held_out, 'image')} that training holds out by itself; " * bool(found.held_out)
    mend = "remove the copies, or list those before ~ (--json names all) in a text file, one a line, and train with"
    return f" ({held}{mend} --set data.exclude=FILE)"


def left_out(unreadable: Sequence[Unreadable]) -> str:
    """How many images cannot be read, and which; empty where all can."""
    if not unreadable:
        return ""
    named = _first([f"{one.path} ({one.reason})" for one in unreadable], _UNREADABLE)
    return f"{counted(len(unreadable), 'image')} that cannot be read: {named}"


def _per_split(images: dict[str, int]) -> str:
    if len(images) == 1:
        return counted(images["train"], "image")
    return ", ".join(f"{counted(count, 'image')} in {name}" for name, count in images.items())


def _some(items: Any) -> str:
    """A count and the first few."""
    return f"{len(items):,}: {_first(items, 4)}" if items else ""


def _first(items: Any, most: int) -> str:
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def _spread(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in values.items()) + " pixels" if values else ""


@contextmanager
def bar(what: str) -> Iterator[EventHandler]:
    """A progress bar with the time left, on standard error."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def show(event: Event) -> None:
            if isinstance(event, events.Progress):
                bar.update(task, completed=event.done, total=event.total)

        yield show
