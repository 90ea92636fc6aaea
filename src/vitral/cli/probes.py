"""`vitral fewshot` and `vitral dedupe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitral.cli.output import Data, Flag, Number, Source, Text, counted, print_facts, print_json, print_table
from vitral.cli.predict import bar

if TYPE_CHECKING:
    from vitral.api import Probing

_SHOWN = 20  # pairs of copies


def fewshot(
    source: Source,
    data: Data,
    /,
    *,
    shots: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (1, 5, 10, 25),
    seeds: Number = 5,
    l2: Annotated[str, tyro.conf.arg(metavar="NUMBER or choose")] = "1024",
    methods: Annotated[tuple[Literal["ridge", "knn", "linear"], ...], tyro.conf.arg(metavar="...")] = ("ridge",),
    preprocess: Text = "",
    batch: Number = 32,
    device: Text = "",
    json: Flag = False,
) -> None:
    """Measure frozen features with a few images a class: least squares in closed form, as the paper does.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        data: what `vitral train` takes; features are computed once and kept.
        shots: images a class to learn from.
        seeds: draws of those images; mean and 95 % interval come out.
        l2: strength of the regularisation, or choose: by cross-validation on the few images.
        methods: ridge (few-shot); knn and linear learn from all of train.
        preprocess: how pixels are prepared, where it is not what the weights say.
        batch: images at a time.
        device: cpu, cuda or mps; chosen without it.
        json: print JSON instead of tables.
    """
    from vitral import api
    from vitral.errors import UserError

    try:
        strength = "choose" if l2 == "choose" else float(l2)
    except ValueError as error:
        raise UserError(f'--l2 takes a number or "choose", not "{l2}".') from error
    with bar("features") as progress:
        found = api.fewshot(
            source,
            data,
            shots=shots,
            seeds=seeds,
            l2=strength,  # type: ignore[arg-type]
            methods=methods,
            preprocess=preprocess,
            batch=batch,
            device=device,
            on_event=progress,
        )
    if json:
        print_json(found.as_dict())
        return
    rows = [
        [str(row.shots), f"{row.mean:.2%}", "" if row.interval is None else f"+- {row.interval:.2%}", str(row.drawn)]
        for row in found.shots
    ]
    if rows:
        spread = "; +- is half of the 95 % interval of the mean" if seeds > 1 else ""
        note = f"{counted(seeds, 'draw')}{spread}; l2 {l2}; n = {found.test:,}."
        print_table(["shots", "accuracy", "", "images learnt from"], rows, note=note)
    print_facts(_facts(found))


def dedupe(
    train: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TRAIN")],
    /,
    *,
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEST ...")],
    output: Annotated[str, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")] = "",
    weights: Annotated[str, tyro.conf.arg(metavar="WEIGHTS", help_behavior_hint="")] = "",
    preprocess: Text = "",
    device: Text = "",
    json: Flag = False,
) -> None:
    """Find images of TRAIN that test images are copies of, and list them to be left out.

    Re-encoded, resized, slightly cropped and mirrored copies count. `vitral train ... --set data.exclude=FILE` (and
    pretrain) takes the list.

    Args:
        train: what `vitral train` takes.
        against: data sets whose test images must not be trained on.
        output: the list to write, a .txt file.
        weights: a model whose features look, too: slower, finds copies that hashes miss.
        preprocess: how pixels are prepared for it, where it is not what the weights say.
        device: where the model computes; chosen without it.
        json: print JSON instead of a table.
    """
    from vitral import api

    with bar("comparing") as progress:
        found = api.dedupe(
            train,
            against,
            output=output,
            weights=weights,
            preprocess=preprocess,
            device=device,
            on_event=progress,
        )
    if json:
        print_json(found.as_dict())
        return
    cells = [
        [pair.train, pair.test, against[pair.split], f"{pair.kind} ({pair.method})", f"{pair.score:.3f}"]
        for pair in found.pairs[:_SHOWN]
    ]
    more = f"and {len(found.pairs) - _SHOWN:,} more pairs" if found.pairs[_SHOWN:] else ""
    if cells:
        print_table(["training image", "is", "of", "how", "score"], cells, left=4, note=more)
    print_facts(
        {
            "copies": f"{len(found.keys):,} of {counted(found.train, 'training image')}",
            "compared with": f"{counted(sum(found.against), 'test image')}",
            "unreadable": f"{found.unreadable:,}" if found.unreadable else "",
            "not compared": f"{found.not_compared:,} tiny or of one colour" if found.not_compared else "",
            "wrote": output,
        }
    )


def _facts(found: Probing) -> dict[str, str]:
    return {
        "data": f"{found.data}: {found.train:,} images to learn from, {found.test:,} ({found.split}) to test on",
        "how": " ".join(found.notes),
        "nearest neighbours": "" if found.knn is None else f"{found.knn:.2%} (k = 20, all of train)",
        "linear probe": "" if found.linear is None else f"{found.linear:.2%} (all of train)",
        "features": f"{found.features:,} an image, {found.flops:.3g} FLOPs; kept in {found.kept or 'no file'}",
    }
