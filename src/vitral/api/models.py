"""`list_available` and `compute_cost`: available models and their costs. Models, recipes and costs need no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vitral import paper
from vitral.architecture import Architecture, Size, ViTConfig, as_size
from vitral.cost import cost as cost_of
from vitral.cost import training_flops
from vitral.display import SummaryRepr
from vitral.errors import UserError
from vitral.names import NAMES, parse
from vitral.recipe_presets import preset_names

Listed = Literal["models", "formats", "recipes", "data"]


@dataclass(frozen=True, repr=False)
class CostResult(SummaryRepr):
    """The cost of a model; the fields after `macs` are None without training images."""

    model: str
    architecture: Architecture
    image: Size
    grid: Size
    tokens: int
    parameters: int
    macs: int  # multiply-accumulates per image
    images: float | None = None
    epochs: float | None = None
    training_flops: float | None = None
    paper: str | None = None  # what Table 6 prints for this run

    def summary(self) -> dict[str, str]:
        training = {"training": f"{self.training_flops:.3g} FLOPs"} if self.training_flops else {}
        return {
            "parameters": f"{self.parameters:,}",
            "GMACs": f"{self.macs / 1e9:,.2f}",
            "model": self.model,
            **training,
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = {key: value for key, value in asdict(self).items() if key != "architecture"}
        return {key: value for key, value in values.items() if value is not None or (key == "paper" and self.images)}


def list_available(what: Listed = "models") -> list[dict[str, Any]]:
    """List the models, checkpoint formats, recipes or data sets that vitral knows.

    Args:
        what: what to list; models come with their sizes and costs at 224 pixels.

    Returns:
        One row per entry.
    """
    if what == "formats":
        from vitral.checkpoints.formats import FORMATS

        return [{"format": name, "description": table.title} for name, table in FORMATS.items()]
    if what == "data":
        from vitral.api.data import known_data

        return [{"data": name, "description": about} for name, about in known_data().items()]
    if what == "recipes":
        return [{"recipe": name, "description": about} for name, about in preset_names().items()]
    if what != "models":
        raise UserError(f'there is no list of "{what}": choose models, formats, recipes or data.')
    return [_model_row(name) for name in NAMES]


def compute_cost(
    model: str,
    *,
    image: int | Size | None = None,
    classes: int | None = None,
    images: float | None = None,
    epochs: float | None = None,
) -> CostResult:
    """Compute the cost of a model: parameters, compute and training FLOPs.

    The model is not built.

    Args:
        model: a name such as ViT-B/16, R50+ViT-B/16@384 or R152x4.
        image: image size in pixels, one number or height and width; by default that of the name, else 224.
        classes: number of classes of the head, 0 for no head; 1000 by default.
        images: number of training images, to compute the FLOPs of training.
        epochs: passes over the training images; 1 by default.

    Returns:
        The counts, with the paper's number if Table 6 has this run.

    Raises:
        UserError: if there is no such model, or a number is not positive.
    """
    if epochs is not None and images is None:
        raise UserError("epochs are passes over training images: add --images N.")
    architecture = parse(model) if classes is None else parse(model, classes=classes)
    size = architecture.image if image is None else as_size(image)
    counted = cost_of(architecture, size)
    result = CostResult(model, architecture, size, counted.grid, counted.tokens, counted.params, counted.macs)
    if images is None:
        return result
    epochs = 1.0 if epochs is None else epochs
    _check_positive(images=images, epochs=epochs)
    flops = training_flops(architecture, images=images, epochs=epochs, image=size)
    row = _paper_row(architecture, size, images, epochs)
    return replace(result, images=images, epochs=epochs, training_flops=flops, paper=row)


def _paper_row(architecture: Architecture, size: Size, images: float, epochs: float) -> str | None:
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
    counted = cost_of(architecture)
    vit = architecture if isinstance(architecture, ViTConfig) else None
    return {
        "model": name,
        "layers": vit.depth if vit else None,
        "width": vit.width if vit else None,
        "MLP": vit.mlp if vit else None,
        "heads": vit.heads if vit else None,
        "parameters": counted.params,
        "tokens": counted.tokens,
        "GMACs": round(counted.macs / 1e9, 2),
    }


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{name} must be a number above 0, not {value:g}.")
