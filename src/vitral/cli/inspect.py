"""`vitral inspect` and `vitral search`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.cli.output import Flag, Source, Text, counted, print_facts, print_json, print_table
from vitral.cli.predict import bar, left_out
from vitral.errors import UserError

if TYPE_CHECKING:
    from vitral.api.data import Unreadable

_Images = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGES ...]", help_behavior_hint="")]
_Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
_File = Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


def inspect(
    source: Source,
    images: _Images = (),
    /,
    *,
    output: Annotated[str, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = "inspect.html",
    figures: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = "",
    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = (),
    classes: _File = "",
    preprocess: Text = "",
    device: Text = "",
    json: Flag = False,
) -> None:
    """Write one HTML page to look through a model: where it looks in images, what it has learned.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them; without any, the page is about the model alone.
        output: the page to write, a .html file.
        figures: write the paper's figures as SVG, and PNG where they are images, into this folder too.
        layers: layers, counted from 1, whose patches can be asked about head by head; chosen without it.
        classes: a file that names the model's outputs in order, one line each.
        preprocess: how pixels are prepared, where the weights do not say.
        device: cpu, cuda or mps; chosen without it.
        json: print what was written as JSON.
    """
    from vitral import api
    from vitral.api.inspection import NoLayer

    try:
        with bar("drawing the page"):
            done = api.inspect(
                source,
                images,
                output=output,
                figures=figures,
                layers=[layer - 1 for layer in layers],
                classes=classes,
                preprocess=preprocess,
                device=device,
            )
    except NoLayer as error:
        raise UserError(f"there is no layer {error.layer + 1}: the model has {error.depth}, counted from 1.") from error
    if json:
        paths = [str(path) for path in done.figures]
        facts = {"page": str(done.page), "bytes": done.bytes, "images": done.images}
        print_json({**facts, "unreadable": list(done.unreadable), "figures": paths})
        return
    print_facts(
        {
            "wrote": f"{done.page} ({done.bytes / 1e6:.1f} MB, {counted(done.images, 'image')}): open it in a browser",
            "figures": ", ".join(str(path) for path in done.figures),
            "left out": f"{', '.join(done.unreadable)}: cannot be read" if done.unreadable else "",
        }
    )


def search(
    source: Source,
    folder: _Folder,
    /,
    *,
    query: Annotated[str, tyro.conf.arg(metavar="IMAGE")],
    patch: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROW COLUMN", help_behavior_hint="")] = None,
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 5,
    index: _File = "",
    preprocess: Text = "",
    device: Text = "",
    json: Flag = False,
) -> None:
    """Find the images of a folder that look most like one, or the patches most like one of its patches.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        folder: where to search.
        query: the image to compare with.
        patch: compare this patch of it, row and column counted from 1, with all patches.
        top: how many to find.
        index: keep the folder's features in this npz file, and read them from there the next time.
        preprocess: how pixels are prepared, where the weights do not say.
        device: cpu, cuda or mps; chosen without it.
        json: print JSON instead of a table.
    """
    from vitral import api

    unreadable: list[Unreadable] = []
    place = None if patch is None else (patch[0] - 1, patch[1] - 1)
    with bar("searching") as progress:
        found = api.search(
            source,
            folder,
            query=query,
            patch=place,
            top=top,
            index=index,
            preprocess=preprocess,
            device=device,
            on_event=progress,
            on_unreadable=unreadable.extend,
        )
    rows = [_counted_from_one(one._asdict()) for one in found]
    lacking = f"Left out {left_out(unreadable)}." if unreadable else ""
    if json:
        print_json(rows)
        if lacking:
            print(lacking, file=sys.stderr)
        return
    columns = ["path", "score"] if patch is None else ["path", "row", "column", "score"]
    cells = [[f"{row[name]:.3f}" if name == "score" else str(row[name]) for name in columns] for row in rows]
    print_table(["image", *columns[1:-1], "similarity"], cells, note=lacking)


def _counted_from_one(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value + 1 if name in ("row", "column") and value is not None else value for name, value in row.items()
    }
