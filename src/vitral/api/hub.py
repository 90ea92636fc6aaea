"""`push`: publish a model on the Hugging Face hub, in a repository that vitral, timm and transformers all load."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vitral.api.checkpoints import convert, load_source
from vitral.api.inference import named_card
from vitral.atomic import check_writable
from vitral.checkpoints.card import Card
from vitral.checkpoints.hub import check_licence, is_hub_name, model_card, repository_of, upload
from vitral.checkpoints.run import RunFolder
from vitral.cost import cost
from vitral.display import SummaryRepr
from vitral.errors import UserError
from vitral.names import name_of
from vitral.recipe import from_file, to_toml
from vitral.validation import read_object

Layout = Literal["timm", "hf", "vitral"]

# In this order: transformers reads timm's folders, too.
_LAYOUTS: tuple[Layout, ...] = ("timm", "hf", "vitral")
_READERS: dict[Layout, tuple[str, ...]] = {
    "timm": ("vitral", "timm", "transformers"),
    "hf": ("vitral", "transformers"),
    "vitral": ("vitral",),
}


@dataclass(frozen=True, repr=False)
class PushResult(SummaryRepr):
    """A repository that was written."""

    url: str
    commit: str
    layout: Layout
    readers: tuple[str, ...]  # the libraries that load it
    refusals: tuple[str, ...]  # why the others do not
    files: tuple[str, ...]
    bytes: int

    def summary(self) -> dict[str, str]:
        return {
            "repository": self.url,
            "loads with": ", ".join(self.readers),
            "files": f"{', '.join(self.files)} ({self.bytes / 1e6:,.1f} MB)",
        }


def push(
    source: str | Path,
    target: str,
    *,
    private: bool = False,
    message: str = "Upload a model with vitral",
    licence: str = "",
    classes: str | Path = "",
    dry_run: str | Path = "",
) -> PushResult:
    """Publish a model on the Hugging Face hub, with a model card.

    The weights are written once, in timm's layout, which vitral, timm (`hf-hub:`) and transformers (through its timm
    models) read; a model that timm cannot express is written in transformers' layout or in vitral's own. The files are
    read back and compared before anything is uploaded. A fitted temperature becomes part of the last layer, as other
    libraries would not divide by it. Log in with `hf auth login`, or set HF_TOKEN.

    Args:
        source: a run folder, a file, hf:owner/name or timm:name.
        target: hf:owner/name, the repository to create or to update.
        private: create the repository as a private one.
        message: of the commit.
        licence: of the weights, such as apache-2.0; the card's if it states one.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        dry_run: write the repository into this new folder, and upload nothing.

    Returns:
        The repository, its files, and the libraries that load it.

    Raises:
        UserError: if there is no such model, or the hub refuses the upload.
    """
    repository = repository_of(target)
    check_licence(licence)
    if dry_run:
        if Path(dry_run).exists():
            raise UserError(f"{dry_run} exists: name a new folder, or remove it first.")
        check_writable(Path(dry_run) / "README.md")
    model, card = load_source(source)
    if not card.architecture.classes:
        raise UserError("the model has no classification head: push a model that was trained or fine-tuned.")
    model, card = _calibrated(model, named_card(card, classes))
    with tempfile.TemporaryDirectory(prefix="vitral-push-") as temporary:
        folder = Path(dry_run) if dry_run else Path(temporary) / "repository"
        layout, refusals = _write((model, card), folder)
        text = model_card(
            repository,
            card,
            name=name_of(card.architecture),
            cost=cost(card.architecture),
            readers=_READERS[layout],
            licence=licence or card.licence,
            run=_run_facts(Path(str(source))),
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
        files = sorted(folder.iterdir())
        size, names = sum(path.stat().st_size for path in files), tuple(path.name for path in files)
        url, commit = (str(folder), "") if dry_run else upload(folder, repository, private=private, message=message)
    return PushResult(url, commit, layout, _READERS[layout], refusals, names, size)


def _calibrated(model: Any, card: Card) -> tuple[Any, Card]:
    """The same probabilities at the temperature 1: the last layer, which is changed in place, is divided by it."""
    if card.temperature == 1.0:
        return model, card
    with torch.no_grad():
        for parameter in model.head.output.parameters():
            parameter.div_(card.temperature)
    change = f"last layer divided by the temperature {card.temperature:.3g}"
    return model, replace(card, temperature=1.0, changes=(*card.changes, change))


def _write(source: tuple[Any, Card], folder: Path) -> tuple[Layout, tuple[str, ...]]:
    """Write the first layout that can express the model, verified; and why those before it cannot."""
    _, card = source
    refusals: list[str] = []
    if card.multilabel:  # their files have no place for it
        refusals.append("readers of timm's and transformers' files would take its independent outputs for exclusive")
    for layout in _LAYOUTS[-1:] if card.multilabel else _LAYOUTS:
        target = folder if layout != "vitral" else folder / "model.safetensors"
        try:
            convert(source, target, format=layout)
        except UserError as error:
            refusals.append(str(error))
            continue
        return layout, tuple(refusals)
    raise UserError(refusals[-1])


def _run_facts(source: Path) -> dict[str, Any]:
    """Results, data and recipe of a run folder; empty for other sources."""
    run = RunFolder(source)
    facts: dict[str, Any] = {}
    for key, path in (("result", source / "result.json"), ("data", source / "data.json")):
        if run.model.is_file() and path.is_file():
            facts[key] = read_object(path)
    recipe = source / "recipe.toml"
    if facts and recipe.is_file():
        facts["recipe"] = _public_recipe(recipe)
    return facts


def _public_recipe(path: Path) -> str:
    """With the name alone of a file in `init`: its folder may name people, and nobody else has it."""
    recipe = from_file(path)
    name = re.split(r"[/\\]", recipe.init.rstrip("/\\"))[-1]
    return to_toml(recipe if is_hub_name(recipe.init) else replace(recipe, init=name))
