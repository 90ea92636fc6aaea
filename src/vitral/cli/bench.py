"""`vitral bench`: how fast this machine is with vitral, and with the other libraries that it has."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Literal

import tyro

from vitral.cli.output import Flag, Folder, Number, Text, print_facts, print_json, print_table

_Work = Annotated[
    Literal["train", "infer", "latency", "data", "predict", "start", "growth"],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="WORK"),
]
_Names = Annotated[str, tyro.conf.arg(metavar="NAME,NAME", help_behavior_hint="")]
_Optional = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
_File = Annotated[str, tyro.conf.arg(metavar="FILE")]


def bench(
    work: _Work = "train",
    /,
    *,
    model: Text = "",
    batch: _Optional = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME", help_behavior_hint="")] = None,
    settings: _Names = "",
    attention: _Names = "auto",
    rounds: Number = 5,
    data: Folder = "",
    workers: _Optional = None,
    out: _File = "benchmarks/results.json",
    device: Text = "",
    json: Flag = False,
) -> None:
    """Measure speed beside the other libraries: each in a process of its own, in turns, after a check of our answers.

    train: whole steps. infer: batches on the device. latency: one image in, five names out. data: files to the device.
    predict: files to answers. start: a command's first answer. growth: larger images, batches and depths.

    Args:
        work: train, infer, latency, data, predict, start or growth.
        model: its name; without it ViT-B/16 on a GPU and ViT-Ti/16 on a CPU.
        batch: images in a step; chosen without it.
        against: timm, transformers, torchvision, onnxruntime; without it all that are installed, "" for none.
        settings: eager, compile, graphs (compiled, with CUDA graphs); the usually fastest without it.
        attention: auto, flash, cudnn, efficient: the backends to try on an NVIDIA GPU.
        rounds: turns of each backend.
        data: a folder of class folders, for data and predict.
        workers: processes that read images; chosen without it.
        out: the file that keeps all rows; a page for this hardware is written beside it.
        device: cpu or cuda; chosen without it.
        json: print the rows of this call as JSON.
    """
    from vitral import api

    found = api.benchmark(
        work,
        model=model,
        batch=batch,
        against=None if against is None else _split(against),
        settings=_split(settings),
        attention=_split(attention),
        rounds=rounds,
        data=data,
        workers=workers,
        out=out,
        device=device,
        tell=_tell,
    )
    if json:
        print_json([asdict(row) for row in found.rows])
        return
    columns, cells = found.table()
    print_table(columns, cells, left=5, note="\n".join(found.notes))
    print_facts({"kept in": f"{found.results} (all rows), {found.page} (a page)"})


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _tell(sentence: str) -> None:
    """What is being done, on standard error, so that JSON stays JSON."""
    print(sentence, file=sys.stderr, flush=True)
