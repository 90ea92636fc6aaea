"""`vitral list` and `vitral cost`: what the models are and what they take. The models need no torch for this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro

from vitral import paper
from vitral.architecture import Architecture, ResNetConfig, Size, ViTConfig
from vitral.cli.output import Count, Flag, Image, by, image_size, print_facts, print_json, print_table
from vitral.cost import cost as cost_of
from vitral.cost import training_flops
from vitral.errors import UserError
from vitral.names import NAMES, parse
from vitral.recipe_presets import preset_names


def list_(
    what: tyro.conf.Positional[Literal["models", "formats", "recipes", "data"]] = "models", /, *, json: Flag = False
) -> None:
    """List the models with their sizes and costs at 224 pixels, the checkpoint formats, recipes or known data sets.

    Args:
        what: what to list.
        json: print JSON instead of a table.
    """
    rows = _ROWS[what]()
    if json:
        print_json(rows)
    elif what == "models":
        note = "1,000 classes, 224 pixels. Other sizes, patches and ResNets work too: ViT-S/8, B/16@384, R101+ViT-L/32."
        print_table(list(rows[0]), [[_cell(cell) for cell in row.values()] for row in rows], note=note)
    else:
        print_table(list(rows[0]), [[_cell(cell) for cell in row.values()] for row in rows], left=2)


def cost(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    /,
    *,
    image: Image = None,
    classes: Count = None,
    images: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    json: Flag = False,
) -> None:
    """Count what a model costs, without building it.

    Args:
        model: a name such as ViT-B/16, R50+ViT-B/16@384 or R152x4.
        image: pixels, one number or height and width; without it, what the name says, else 224.
        classes: outputs of the head; without it 1000, and 0 means no head.
        images: training images, to count the FLOPs of training.
        epochs: how often each training image is seen; without it once.
        json: print JSON instead of a table.
    """
    if epochs is not None and images is None:
        raise UserError("epochs are of training images: add --images N.")
    epochs = 1.0 if epochs is None else epochs
    architecture = parse(model) if classes is None else parse(model, classes=classes)
    size = image_size(image) or architecture.image
    found = cost_of(architecture, size)
    values: dict[str, Any] = {
        "model": model,
        "image": size,
        "grid": found.grid,
        "tokens": found.tokens,
        "parameters": found.params,
        "macs": found.macs,
    }
    if images is not None:
        _positive(images=images, epochs=epochs)
        values |= {"images": images, "epochs": epochs}
        values["training_flops"] = training_flops(architecture, images=images, epochs=epochs, image=size)
        values["paper"] = _printed(architecture, size, images, epochs)
    if json:
        print_json(values)
        return
    facts = {
        "model": f"{model}{_dimensions(architecture)}",
        "image": f"{by(size)} pixels, grid {by(found.grid)}, {found.tokens:,} tokens",
        "parameters": f"{found.params:,}",
        "compute": f"{found.macs / 1e9:,.2f} GMACs an image",
    }
    if images is not None:
        seen = f"{images:,.0f} images, {epochs:g} epoch{'s' * (epochs != 1)}"
        facts["training"] = f"{values['training_flops'] / 1e18:,.4g} exaFLOPs ({seen})"
        facts["the paper"] = values["paper"] or ""
    print_facts(facts)


def _printed(architecture: Architecture, size: Size, images: float, epochs: float) -> str | None:
    """What Table 6 prints for this run, if it is one of its rows."""
    if images != paper.pretraining_sets()["JFT-300M"].images or size != (224, 224):
        return None
    for row in paper.table6():
        if row.epochs == epochs and parse(row.model, classes=architecture.classes) == architecture:
            doubt = f"; {row.note}" if "exaflops" in row.doubtful else ""
            return f"{row.exaflops:,} exaFLOPs for this model and these epochs on JFT-300M ({row.source}{doubt})"
    return None


def _model_row(name: str) -> dict[str, str | int | float | None]:
    architecture = parse(name)
    found = cost_of(architecture)
    vit = architecture if isinstance(architecture, ViTConfig) else None
    return {
        "model": name,
        "layers": vit.depth if vit else None,
        "width": vit.width if vit else None,
        "MLP": vit.mlp if vit else None,
        "heads": vit.heads if vit else None,
        "parameters": found.params,
        "tokens": found.tokens,
        "GMACs": round(found.macs / 1e9, 2),
    }


def _model_rows() -> list[dict[str, Any]]:
    return [_model_row(name) for name in NAMES]


def _recipe_rows() -> list[dict[str, Any]]:
    return [{"recipe": name, "about": about} for name, about in preset_names().items()]


def _data_rows() -> list[dict[str, Any]]:
    from vitral import api

    return [{"data": name, "about": about} for name, about in api.known_data().items()]


def _format_rows() -> list[dict[str, str]]:
    from vitral.api import FORMATS

    return [{"format": name, "what it is": table.title} for name, table in FORMATS.items()]


def _dimensions(architecture: Architecture) -> str:
    if isinstance(architecture, ResNetConfig):
        return f"  (stages of {', '.join(map(str, architecture.blocks))} units, width x{architecture.width})"
    if not isinstance(architecture, ViTConfig):
        return ""
    a = architecture
    stem = f" on a ResNet of {', '.join(map(str, a.stem.blocks)) or 'no'} units" if a.stem else ""
    return f"  ({a.depth} layers, width {a.width}, MLP {a.mlp}, {a.heads} heads{stem})"


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise UserError(f"--{name} must be a number above 0, not {value:g}.")


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


_ROWS = {"models": _model_rows, "formats": _format_rows, "recipes": _recipe_rows, "data": _data_rows}
