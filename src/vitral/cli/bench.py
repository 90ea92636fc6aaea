"""`vitral bench`: how fast this machine is with vitral and with other installed libraries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import tyro

from vitral.cli.output import Flag, Folder, Number, Text, print_facts, print_json, print_table
from vitral.progress import Display

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
    """Compare the speed with other libraries: each in its own process, in turns, after a parity check of our outputs.

    train: training steps. infer: batches on the device. latency: single predictions. data: loading files to the device.
    predict: predictions of files. start: the first prediction of a command. growth: larger images, batches and depths.

    Args:
        work: train, infer, latency, data, predict, start or growth.
        model: name of the model; by default ViT-B/16 on a GPU and ViT-Ti/16 on a CPU.
        batch: images per step; by default chosen for the work and the device.
        against: timm, transformers, torchvision, onnxruntime; by default all that are installed, "" for none.
        settings: eager, compile, graphs (compiled, with CUDA graphs); by default the ones that are usually fastest.
        attention: auto, flash, cudnn, efficient: attention kernels to try on an NVIDIA GPU.
        rounds: turns of each backend.
        data: a folder with one sub-folder of images per class, for data and predict.
        workers: processes that load images; by default chosen for the work and the device.
        out: JSON file that keeps all rows; a page about this hardware is written beside it.
        device: cpu or cuda; by default a GPU where there is one.
        json: print the rows of this benchmark as JSON.
    """
    from vitral import api

    with Display() as display:
        result = api.benchmark(
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
            on_event=display,
        )
    if json:
        print_json([asdict(row) for row in result.rows])
        return
    columns, cells = result.table()
    print_table(columns, cells, left=5, note="\n".join(result.notes))
    print_facts({"written to": f"{result.results} (all rows), {result.page} (page)"})


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
