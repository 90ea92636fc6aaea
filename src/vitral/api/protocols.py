"""`pretrain` and `finetune`: the paper's protocols, from a recipe to one row beside the paper's own number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitral.api.data import open_to_choose
from vitral.api.device import check_device
from vitral.api.training import new_folder, read_recipe
from vitral.architecture import Architecture, ResNetConfig
from vitral.checkpoints.weights import describe, located
from vitral.checkpoints.write import written_aside
from vitral.data.sources import DataSet
from vitral.errors import UserError
from vitral.names import name_of
from vitral.paper import Reported, reported
from vitral.recipe import Recipe, architecture_of, recipe_hash, with_overrides
from vitral.recipe_book import FAMILIES, Named, hyperrule, named
from vitral.studies.protocol import Candidate, Outcome, candidates, follow, read_grid
from vitral.training.events import Listener, Note
from vitral.training.prepare import check_recipe
from vitral.version import __version__


@dataclass(frozen=True)
class Protocol:
    """One row: what came out, at what cost, and what the paper got."""

    model: str
    data: str
    folder: str
    outcome: Outcome
    reported: tuple[Reported, ...]
    readings: tuple[str, ...]  # where the paper is silent or contradicts itself

    def as_dict(self) -> dict[str, Any]:
        """One JSON line: the value with everything that is needed to trust or repeat it."""
        outcome, last = self.outcome, self.outcome.results[-1]
        return {
            "model": self.model,
            "data": self.data,
            "split": outcome.split,
            "score": outcome.mean,
            "spread": outcome.spread,
            "scores": list(outcome.scores),
            "seeds": [result.seed for result in outcome.results],
            "n": last.metrics["n"],
            "chosen": outcome.chosen.words,
            "trials": [{"words": trial.words, "score": trial.score} for trial in outcome.trials],
            "training_flops": outcome.flops,
            "all_flops": outcome.all_flops,
            "device_hours": outcome.device_hours,
            "images_per_second_per_device": last.images_per_second / last.devices,
            "device": last.device,
            "devices": last.devices,
            "recipe": recipe_hash(outcome.chosen.recipe),
            "paper": [asdict(row) for row in self.reported],
            "readings": list(self.readings),
            "version": __version__,
            "folder": self.folder,
        }


def pretrain(
    data: str | Path,
    *,
    model: str,
    recipe: str | Path | Recipe = "",
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    seeds: int = 1,
    out: str | Path = "",
    device: str = "",
    listen: Listener = lambda event: None,
) -> Protocol:
    """Pre-train from scratch by a recipe of the paper, or by your own; a sweep and early stopping choose on data.dev.

    Without a recipe it is the paper's for ImageNet: Adam, warm-up, cosine decay, clipping, the head with a tanh layer.
    """
    book = _book(recipe or "paper:pretrain/imagenet", model)
    base = replace(book.recipe, model=model)
    return _followed(book, base, data, None, overrides, sweep, seeds, out, device, listen)


def finetune(
    weights: str | Path,
    data: str | Path,
    *,
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    seeds: int = 0,
    out: str | Path = "",
    device: str = "",
    listen: Listener = lambda event: None,
) -> Protocol:
    """Fine-tune by the paper's protocol: the rate chosen on a dev split, then all of train, several seeds, test once.

    A ResNet also tries BiT's own recipe, and the better of the two on the dev split is kept (section 4.1).
    """
    card = describe(located(str(weights))).card
    book = _book(recipe, name_of(replace(card.architecture, classes=1000)))
    seen = card.preprocess or book.recipe.data  # pixels go on as the weights know them
    base = replace(book.recipe, init=str(weights), data=replace(book.recipe.data, mean=seen.mean, std=seen.std))
    return _followed(book, base, data, card.architecture, overrides, sweep, seeds, out, device, listen)


def _book(recipe: str | Path | Recipe, model: str) -> Named:
    """A recipe of the book, or one's own as if it stood there."""
    if isinstance(recipe, str) and recipe.partition(":")[0] in FAMILIES:
        return named(recipe, model)
    own = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    return Named("", own, {}, own.data.dev, 1, ())


def _followed(
    book: Named,
    base: Recipe,
    data: str | Path,
    start: Architecture | None,
    overrides: Sequence[str],
    sweep: Sequence[str],
    seeds: int,
    out: str | Path,
    device: str,
    listen: Listener,
) -> Protocol:
    check_device(device)
    if seeds < 0:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    base = with_overrides(base, overrides)
    dev = base.data.dev or book.dev
    opened, choosing = open_to_choose(data, base, dev)
    own = {word.partition("=")[0].strip() for word in overrides}
    own |= {"steps"} if "epochs" in own else set()  # a run has one length
    grid = read_grid(sweep) if sweep else {key: values for key, values in book.sweep.items() if key not in own}
    tried = candidates(base, grid)
    rule = _of_bit(book, base, opened, start, sweep, overrides)
    if rule is not None:
        tried = [*(replace(one, words=one.words or book.name) for one in tried), rule]
    for candidate in tried:
        check_recipe(candidate.recipe, opened, describe(located(base.init)).card if base.init else None)
    folder = Path(out) if out else new_folder(data, base)
    for sentence in (*opened.notes, *book.readings, f"run folder: {folder}"):
        listen(Note(sentence))
    outcome = follow(
        tried, opened, folder, choosing=choosing, dev=dev, seeds=seeds or book.seeds, device=device, listen=listen
    )
    architecture = start or architecture_of(base, len(opened.train.classes))
    model = name_of(replace(architecture, classes=1000))
    found = Protocol(model, str(data), str(folder), outcome, _reported(book.name, model), book.readings)
    with written_aside(folder / "protocol.json") as aside:
        aside.write_text(json.dumps(found.as_dict(), indent=2) + "\n", "utf-8")
    return found


def _of_bit(
    book: Named,
    base: Recipe,
    data: DataSet,
    start: Architecture | None,
    sweep: Sequence[str],
    overrides: Sequence[str],
) -> Candidate | None:
    """BiT's recipe for transfer, beside the paper's, where a ResNet is fine-tuned."""
    if not isinstance(start, ResNetConfig) or not book.name.startswith("paper:finetune/") or sweep:
        return None
    name = hyperrule(len(data.train))
    rule = named(name, base.model).recipe
    rule = replace(rule, init=base.init, data=replace(rule.data, mean=base.data.mean, std=base.data.std))
    return Candidate(name, with_overrides(rule, overrides))


def _reported(recipe: str, model: str) -> tuple[Reported, ...]:
    """What the paper got with this model on the data set that the recipe is for, from each pre-training set."""
    task = recipe.partition("paper:finetune/")[2].partition(":")[0].partition("-")[0]
    if not task:
        return ()
    plain = model.partition("@")[0]
    return tuple(row for source in ("jft300m", "imagenet21k", "imagenet") for row in reported(plain, source, task))
