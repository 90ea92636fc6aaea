"""What makes a run this run: its recipe, its images and the user's own parts, recorded in its folder."""

from __future__ import annotations

import json

from vitral import recipe as recipes
from vitral.checkpoints.run import RunFolder
from vitral.data.contents import RunContents
from vitral.data.sources import DataSet
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe
from vitral.training.callbacks import OwnParts

# May differ in a resumed run: memory, speed and disk depend on them, what is computed does not.
FREE_KEYS = {"workers", "micro_batch", "grad_checkpointing", "compile", "cuda_graph", "parallel", "keep", "save_every"}


def record_run(folder: RunFolder, recipe: Recipe, data: DataSet, own: OwnParts, on_event: EventHandler) -> None:
    """Write recipe.toml, data.json and split.json into the folder of a new run."""
    reported = data.reported_split(recipe.patience > 0)
    contents = RunContents.of(data, reported.name if reported is not None else "", on_event)
    if contents.reason:
        on_event(Note(f"{contents.reason}: replaced images are not noticed when the run is resumed"))
    facts = {
        "source": data.source,
        **_fingerprints(data, recipe),
        "notes": list(data.messages),
        "own_parts": own.describe(),
    }
    folder.write_text("recipe.toml", recipes.to_toml(recipe))
    folder.write_text("data.json", json.dumps(facts, indent=2) + "\n")
    folder.write_text("split.json", contents.to_json())


def check_same_run(folder: RunFolder, recipe: Recipe, data: DataSet, own: OwnParts) -> None:
    """Refuse to resume a run with other images, another recipe or other parts than it began with."""
    before, now = recipes.values(recipes.from_toml(folder.read_text("recipe.toml") or "")), recipes.values(recipe)
    keys = [key for key in now if key not in FREE_KEYS and before[key] != now[key]]
    changed = [f"{key} was {before[key]} and is {now[key]}" for key in keys]
    facts, images = json.loads(folder.read_text("data.json") or "{}"), _fingerprints(data, recipe)
    changed += [f"its {name} images were others" for name in images if images[name] != facts.get(name)]
    parts, own_parts = facts.get("own_parts", {}), own.describe()
    changed += [
        f"its {name} was {parts.get(name, 'vitral')} and is {own_parts.get(name, 'vitral')}"
        for name in sorted({*parts, *own_parts})
        if parts.get(name) != own_parts.get(name)
    ]
    if changed:
        raise UserError(f"{folder.path} holds another run ({changed[0]}): choose another folder, or remove it.")
    _check_contents(folder, data, recipe)


def _check_contents(folder: RunFolder, data: DataSet, recipe: Recipe) -> None:
    """Refuse images that were replaced under their names."""
    text = folder.read_text("split.json")
    if text is None:
        return
    contents = RunContents.from_json(text)
    used = {
        split.name: split for split in (data.train, data.eval_split, data.reported_split(recipe.patience > 0)) if split
    }
    changed = [key for split in used.values() for key in contents.changed(split)]
    if changed:
        count = "1 image has" if len(changed) == 1 else f"{len(changed):,} images have"
        raise UserError(
            f"{count} changed since the run in {folder.path} began, first {changed[0]}: restore what was there, or "
            "start a new run in another folder with --out."
        )


def _fingerprints(data: DataSet, recipe: Recipe) -> dict[str, str]:
    """Of the images that are trained on, that the result is of, and that weights are selected by."""
    reported, selected = data.reported_split(recipe.patience > 0), data.eval_split if recipe.patience else None
    splits = {"train": data.train, "evaluated": reported, **({"selected": selected} if selected else {})}
    return {name: split.fingerprint() if split is not None else "" for name, split in splits.items()}
