"""`vitral info` and `vitral convert`: checkpoints, looked at and rewritten."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.architecture import ResizeRule, ViTConfig, as_dict
from vitral.cli.output import Count, Flag, FormatName, Grid, Image, Source, by, image_size, print_facts, print_json

if TYPE_CHECKING:
    from vitral.api import Conversion, Info


def info(
    source: Source,
    /,
    *,
    source_format: FormatName = None,
    grid: Grid = None,
    heads: Count = None,
    json: Flag = False,
) -> None:
    """Say what a checkpoint is, from its headers: architecture, grid, classes, preprocessing, origin, sha256.

    Args:
        source: a file, a folder, hf:owner/name or timm:name.
        source_format: the format it is in, where it is not recognised (`vitral list formats`).
        grid: rows and columns of its position table, where they are not square.
        heads: its attention heads, where the file does not tell.
        json: print JSON instead of a table.
    """
    from vitral import api

    found = api.info(source, format=source_format, grid=grid, heads=heads)
    if json:
        print_json(_info_values(found))
    else:
        print_facts(_info_facts(found))


def convert(
    source: Source,
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")],
    /,
    *,
    format: Annotated[str, tyro.conf.arg(metavar="FORMAT")],
    image: Image = None,
    classes: Count = None,
    patch: Count = None,
    channels: Count = None,
    resize: Annotated[ResizeRule | None, tyro.conf.arg(metavar="RULE", help_behavior_hint="")] = None,
    source_format: FormatName = None,
    grid: Grid = None,
    heads: Count = None,
    json: Flag = False,
) -> None:
    """Rewrite a checkpoint in another format, run both on the same image, and keep the file only if they agree.

    Args:
        source: a file, a folder, hf:owner/name or timm:name.
        target: the file or, for hf and timm, the folder to write.
        format: the format to write (`vitral list formats`).
        image: adapt the positions to this image size, one number or height and width.
        classes: give it a new zero head of this many classes; 0 removes the head.
        patch: change the patch size.
        channels: change the number of input channels.
        resize: another rule for resizing position tables: google, timm, hf, torchvision or dino.
        source_format: the format of the source, where it is not recognised.
        grid: rows and columns of the source's position table, where they are not square.
        heads: the source's attention heads, where the file does not tell.
        json: print JSON instead of a table.
    """
    from vitral import api

    done = api.convert(
        source,
        target,
        to=format,
        format=source_format,
        image=image_size(image),
        classes=classes,
        patch=patch,
        channels=channels,
        resize=resize,
        grid=grid,
        heads=heads,
    )
    if json:
        print_json({**asdict(done), "target": str(done.target)})
    else:
        print_facts(_conversion_facts(done))


def _info_values(found: Info) -> dict[str, Any]:
    card = {**asdict(found.card), "architecture": as_dict(found.card.architecture)}
    return {**asdict(found), "path": str(found.path), "card": card}


def _info_facts(found: Info) -> dict[str, str]:
    card, architecture = found.card, found.card.architecture
    facts = {
        "file": f"{found.path} ({found.bytes / 1e6:,.1f} MB)",
        "format": f"{found.format} ({found.container})",
        "model": found.model,
        "parameters": f"{found.cost.params:,}",
        "image": f"{by(architecture.image)} pixels, {architecture.channels} channels",
    }
    if isinstance(architecture, ViTConfig):
        facts |= _vit_facts(architecture)
    steps = card.preprocess
    names = ", ".join(card.class_names[:3]) + (", ..." if card.class_names[3:] else "")
    facts |= {
        "classes": f"{architecture.classes:,} ({names or 'names not stated'})" if architecture.classes else "none",
        "preprocess": f"{steps.pipeline}, mean {_plain(steps.mean)}, std {_plain(steps.std)}"
        if steps
        else "not stated",
        "from": f"{card.source} ({card.format})" if card.format != found.format else "",
        "licence": card.licence or "not stated",
        "changes": "; ".join(card.changes),
        "sha256": found.sha256,
    }
    return facts


def _vit_facts(c: ViTConfig) -> dict[str, str]:
    sizes = (
        f"{c.depth} layers, width {c.width}, MLP {c.mlp}, {c.heads} heads, {c.gelu} GELU, LayerNorm eps {c.norm_eps:g}"
    )
    parts = [f"{c.pool} pooling", f"{c.registers} registers" * bool(c.registers), "LayerScale" * c.layer_scale]
    parts += [f"tanh layer of {c.representation}" * bool(c.representation)]
    row = "with" if c.class_row else "without"
    return {
        "layers": sizes,
        "parts": ", ".join(part for part in parts if part),
        "positions": f"{c.position}, grid {by(c.grid(c.image))}, {row} a class row, resized by rule {c.resize}",
    }


def _conversion_facts(done: Conversion) -> dict[str, str]:
    return {
        "read": f"{done.source} ({done.source_format})",
        "wrote": f"{done.target} ({done.target_format})",
        "model": done.model,
        "changes": "; ".join(done.changes) or "none",
        "unmapped": ", ".join(done.unmapped) or "none",
        "not in the file": "; ".join(done.unstated),
        "difference": f"max |difference| {done.difference:.3g} of the outputs, same image of {by(done.image)} pixels",
    }


def _plain(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else "(" + ", ".join(f"{value:g}" for value in values) + ")"
