"""`inspect` and the page of a run: attention maps, filters and embeddings as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.api.checkpoints import Source, load, load_source
from vitral.api.data import Data, Images, open_any_images, open_restricted
from vitral.api.inference import compute_device, resolve_preprocessing
from vitral.api.prediction import none_readable_message
from vitral.architecture import ViTConfig
from vitral.atomic import check_writable, checked_output, write_text
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.run import RunFolder
from vitral.cost import cost
from vitral.data.contents import RunContents
from vitral.data.loader import evaluation_batches
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import DataSet, Split
from vitral.data.splits import evenly
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.calibration import confidences, probabilities, reliability
from vitral.evaluation.mapping import read_table
from vitral.evaluation.predict import predict_split
from vitral.events import EventHandler, Note, Progress
from vitral.inspection.attention import mean_attention_distance
from vitral.inspection.image_inspection import inspect_images
from vitral.inspection.representations import embedding_filters, position_similarity
from vitral.models.build import Model, resolve_device
from vitral.models.model import normalize
from vitral.models.vit import ViT
from vitral.names import name_of
from vitral.recipe import from_file, to_toml
from vitral.report.evaluation import Mistake, Reliability
from vitral.report.pages import AttentionDistance, LearnedWeights, RunExamples, inspect_page, run_page, write_figures
from vitral.report.viewer import ViewerImage, choose_layers
from vitral.serving import unread
from vitral.validation import read_object

MOST = 64  # images per page: what a person looks through, and a browser opens quickly
MOST_MEASURED = 1024  # images that attention distances are computed over; the paper took 128
ASKED = 2000  # held-out images that a run's page predicts
ANSWERS = 5
EXAMPLES = 8  # images in the viewer of a run's page


@dataclass(frozen=True, repr=False)
class InspectResult(SummaryRepr):
    """The files that were written."""

    page: Path
    bytes: int
    images: int
    unreadable: tuple[str, ...]
    figures: tuple[Path, ...]

    def summary(self) -> dict[str, str]:
        return {"page": str(self.page), "images": f"{self.images:,}", "size": f"{self.bytes / 1e6:.1f} MB"}


def inspect(
    source: Source,
    images: Images = (),
    *,
    output: str | Path = "inspect.html",
    figures: str | Path = "",
    layers: Sequence[int] = (),
    classes: str | Path = "",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler | None = None,
) -> InspectResult:
    """Inspect a model: attention maps, filters, embeddings, as one HTML page.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them; the page shows the first 64 and measures attention distances over all;
            without any, the page is about the model alone.
        output: the page to write, a .html file.
        figures: folder to write the paper's figures to, as PNG and SVG.
        layers: layers, counted from 0, whose attention is shown per patch and head; chosen automatically by default.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        device: cpu, cuda or mps; chosen automatically by default.
        on_event: handler of progress events.

    Returns:
        The page, and the figures where a folder was given.

    Raises:
        UserError: if an argument is wrong, or no image can be read.
    """
    path = checked_output(output, (".html",), "--output")
    if figures:
        check_writable(Path(figures) / "filters.png")
    split = open_any_images(images) if not isinstance(images, Sequence) or len(images) else None
    if split is not None and len(split) > MOST_MEASURED:
        raise UserError(f"a page is made of at most {MOST_MEASURED:,} images, not {len(split):,}: name fewer.")
    with displayed(on_event) as handler:
        handler(Progress("drawing the page", 0, 0 if split is None else len(split)))
        model, card = load_source(source, handler)
        model.to(compute_device(source, device))
        names = tuple(read_table(Path(classes), card.architecture.classes)[-1][1]) if classes else card.class_names
        learned, shown, reach, left_out = _learned(model), [], None, []
        if split is not None:
            preprocessing = resolve_preprocessing(card, preprocess, handler)
            card = replace(card, preprocess=preprocessing)
            kept, pixels = readable_pixels(split, preprocessing.pipeline, card.architecture.channels)
            channels = card.architecture.channels
            left_out = [unread(split, i, channels) for i in range(len(split)) if i not in kept]
            keys = [Path(split.keys[i]).name for i in kept[:MOST]]
            shown = _shown(model, keys, pixels[:MOST], preprocessing, card, names, layers)
            reach = _reach(model, pixels, preprocessing)
            if len(kept) > MOST:
                measured = f"; attention distances are over all {len(kept):,}" if reach else ""
                handler(Note(f"the page shows the first {MOST} images{measured}"))
        title = f"Inside {_short_name(card)}"
        attends = isinstance(model, ViT)
        page = inspect_page(title, model_facts(card), learned, shown, _pooled_name(model), reach, attends, left_out)
        write_text(path, page)
        written = write_figures(Path(figures), learned, shown, reach) if figures else ()
    return InspectResult(path, path.stat().st_size, len(shown), tuple(image.path for image in left_out), written)


def write_run_page(folder: str | Path, data: Data | DataSet, *, device: str = "") -> Path:
    """Write page.html into a run folder: its curves, mistakes, calibration, and what the model has learned.

    The tables are those of result.json. Mistakes and calibration are recomputed, on at most 2,000 held-out images.
    """
    run = RunFolder(Path(folder))
    model, card = load(run.path)
    resolved = resolve_device(device)
    model.to(resolved)
    settings = from_file(run.path / "recipe.toml")
    opened = data if isinstance(data, DataSet) else open_restricted(data, settings)
    reported = opened.reported_split(settings.patience > 0)
    if reported is not None and _scored_others(run, reported):
        raise UserError(f"{run.path} was scored on other images than those of {opened.source}: pass its own data.")
    result = read_object(run.path / "result.json", "metrics")
    examples = None
    if reported is not None and card.preprocess is not None:
        examples = _examples(model, card, reported, card.preprocess, resolved)
    title = f"{_short_name(card)} on {Path(opened.source).name}"
    page = run_page(title, result, run.metrics(), model_facts(card), to_toml(settings), _learned(model), examples)
    run.write_text("page.html", page)
    return run.path / "page.html"


def _scored_others(run: RunFolder, reported: Split) -> bool:
    """Whether the result of a run is of other images than these, by name, label or content."""
    scored = read_object(run.path / "data.json").get("evaluated")
    if scored not in (None, reported.fingerprint()):
        return True
    contents = RunContents.read(run.path / "split.json")
    return contents is not None and bool(contents.changed(reported))


def model_facts(card: Card) -> dict[str, str]:
    """A table of the model for people."""
    config = card.architecture
    counted = cost(config)
    facts = {
        "model": name_of(config),
        "parameters": f"{counted.params:,}",
        "multiply-accumulates per image": _large(counted.macs),
        "image": f"{config.image[0]} x {config.image[1]} pixels, {config.channels} channels",
        "classes": f"{config.classes:,}" if config.classes else "none: features only",
        "answers": _meaning(card),
    }
    if isinstance(config, ViTConfig):
        facts |= {
            "patches": f"{counted.grid[0]} x {counted.grid[1]}, each of {config.patch} x {config.patch}"
            + (" positions of the stem's feature map" if config.stem else " pixels"),
            "layers, heads, width": f"{config.depth}, {config.heads}, {config.width}",
            "pool": config.pool,
            "positions": config.position,
        }
    pixels = card.preprocess
    prepared_by = f"{pixels.pipeline}, mean {pixels.mean}, std {pixels.std}" if pixels else "not stated"
    facts |= {"pixels prepared by": prepared_by, "source": Path(card.source).name, "licence": card.licence}
    return {**facts, "sha256": card.sha256, "changes": "; ".join(card.changes)}


def _meaning(card: Card) -> str:
    """What the numbers next to the classes are; empty for a model without a head."""
    if not card.architecture.classes:
        return ""
    if card.multilabel:
        return "the probability of each class by itself (sigmoid): several may be likely, or none"
    scaled = "" if card.temperature == 1.0 else f" of the logits divided by the temperature {card.temperature:.3g}"
    return f"probabilities of the classes, which sum to 1 (softmax{scaled})"


def _short_name(card: Card) -> str:
    """The model's name without its dimensions, which are in the table of the model."""
    return re.sub(r"-\([^)]* layers, [^)]*\)", "", name_of(card.architecture))


def _large(number: int) -> str:
    """1250000 -> "1.25 million" """
    if number < 1e6:
        return f"{number:,}"
    size, word = (1e9, "billion") if number >= 1e9 else (1e6, "million")
    return f"{number / size:.3g} {word}"


def readable_pixels(split: Split, pipeline: str, channels: int) -> tuple[list[int], Tensor]:
    """Indices of the images that can be read, and their preprocessed pixels, uint8 (batch, channels, height, width)."""
    batches = list(evaluation_batches(split, parse_deterministic(pipeline), batch=1, channels=channels))
    kept = [int(batch.indices[0]) for batch in batches if batch.valid[0]]
    if not kept:
        raise UserError(f"{none_readable_message(unread(split, 0, channels))}: pass complete image files.")
    return kept, torch.cat([batch.images for batch in batches if batch.valid[0]])


def _shown(
    model: Model,
    keys: Sequence[str],
    pixels: Tensor,
    preprocessing: Preprocess,
    card: Card,
    names: Sequence[str],
    layers: Sequence[int] = (),
    truths: Sequence[tuple[str, ...]] = (),
) -> list[ViewerImage]:
    config = model.config
    ready = normalize(pixels, preprocessing.mean, preprocessing.std).to(next(model.parameters()).device)
    headed, averaged = (), ()
    if isinstance(config, ViTConfig):
        for layer in layers:
            if not 0 <= layer < config.depth:
                raise UserError(f"there is no layer {layer}: the model has {config.depth}, counted from 0.")
        rows, columns = config.grid((ready.shape[2], ready.shape[3]))
        headed, averaged = choose_layers(config.depth, config.heads, rows * columns, len(ready), layers)
    looks = inspect_images(model, ready, headed=headed, averaged=averaged, sigmoid=card.multilabel)
    truths = truths or [()] * len(keys)
    pictures = pixels.permute(0, 2, 3, 1).numpy()
    return [
        ViewerImage(key, picture, look, _answers(look.logits, card, names), truth, card.multilabel)
        for key, picture, look, truth in zip(keys, pictures, looks, truths, strict=True)
    ]


def _answers(logits: np.ndarray, card: Card, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
    if not card.architecture.classes:
        return ()
    shares = probabilities(logits[None], sigmoid=card.multilabel, temperature=card.temperature)[0]
    best = np.argsort(-logits, kind="stable")[:ANSWERS].tolist()  # of the logits: probabilities may round to 0 or 1
    return tuple((names[i] if names else f"class {i}", float(shares[i])) for i in best)


def _learned(model: Model) -> LearnedWeights:
    filters = embedding_filters(model)
    embeds = isinstance(model, ViT) and len(model.positions) > 0
    similarity = position_similarity(model).cpu().numpy() if embeds else None
    return LearnedWeights(filters.images().numpy(), float(filters.explained.sum()), filters.source, similarity)


def _reach(model: Model, pixels: Tensor, preprocessing: Preprocess) -> AttentionDistance | None:
    """Over all images, uint8 (batch, channels, height, width)."""
    if not isinstance(model, ViT):
        return None
    device = next(model.parameters()).device
    ready = (normalize(part.to(device), preprocessing.mean, preprocessing.std) for part in pixels.split(4))
    distance = mean_attention_distance(model, ready).numpy()
    return AttentionDistance(distance, len(pixels), max(pixels.shape[2:]), model.config.axial)


def _pooled_name(model: Model) -> str:
    pool = model.config.pool if isinstance(model, ViT) else "mean"
    names = {"token": "the class token", "map": "the probe's average of the patches"}
    return names.get(pool, "the average of all patches")


def _examples(model: Model, card: Card, test: Split, preprocess: Preprocess, device: str) -> RunExamples:
    """Mistakes, the most confident first, then correct predictions, the least confident first; evenly drawn images for
    multi-label data and models without a head."""
    sample = test.select(evenly(len(test), ASKED))
    if test.multilabel or not card.architecture.classes:
        order, mistakes, calibration, asked = evenly(len(sample), EXAMPLES), 0, None, len(sample)
    else:
        predictions = predict_split(model, sample, preprocess, batch=64, device=device)
        indices, logits = predictions.indices[predictions.valid], predictions.logits[predictions.valid]
        labels = sample.labels[indices]
        wrong, order = _by_confidence(logits, labels, card)
        order, mistakes, asked = indices[order], int(wrong.sum()), len(indices)
        calibration = reliabilities(logits, labels, card)
    few = sample.select(order[:EXAMPLES])
    kept, pixels = readable_pixels(few, preprocess.pipeline, card.architecture.channels)
    truths = [_truth(few, i) if card.architecture.classes else () for i in kept]
    shown = _shown(model, [few.keys[i] for i in kept], pixels, preprocess, card, card.class_names, truths=truths)
    return RunExamples(shown, _pooled_name(model), min(mistakes, len(shown)), calibration, asked, card.multilabel)


def most_confident_mistakes(
    split: Split,
    indices: np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    card: Card,
    preprocess: Preprocess,
    most: int = 24,
) -> list[Mistake]:
    """The wrong predictions with the highest probability, with their images, for a page.

    Logits (n, classes) and labels (n,) are of the images at `indices` (n,) of the split; `names` are of the outputs.
    """
    wrong, order = _by_confidence(logits, labels, card)
    order = order[: min(int(wrong.sum()), most)]
    if not len(order):
        return []
    kept, pixels = readable_pixels(split.select(indices[order]), preprocess.pipeline, card.architecture.channels)
    order, guesses = order[kept], logits.argmax(1)
    shares = confidences(logits[order], sigmoid=card.multilabel, temperature=card.temperature)
    return [
        Mistake(split.keys[indices[i]], picture, names[labels[i]], names[guesses[i]], float(share))
        for i, picture, share in zip(order, pixels.permute(0, 2, 3, 1).numpy(), shares, strict=True)
    ]


def reliabilities(logits: np.ndarray, labels: np.ndarray, card: Card) -> Reliability:
    """Accuracy by confidence of logits (n, classes) and labels (n,), raw and at the temperature of the card."""
    raw = reliability(logits, labels, sigmoid=card.multilabel)
    if card.temperature == 1.0:
        return Reliability(raw)
    return Reliability(raw, reliability(logits, labels, sigmoid=card.multilabel, temperature=card.temperature))


def _by_confidence(logits: np.ndarray, labels: np.ndarray, card: Card) -> tuple[np.ndarray, np.ndarray]:
    """Which predictions are wrong, (n,) bool, and an order: the wrong ones, the most confident first, then the others,
    the least confident first."""
    wrong = logits.argmax(1) != labels
    confidence = confidences(logits, sigmoid=card.multilabel, temperature=card.temperature)
    return wrong, np.argsort(np.where(wrong, -confidence, 1 + confidence), kind="stable")


def _truth(split: Split, index: int) -> tuple[str, ...]:
    labels = np.flatnonzero(split.labels[index]) if split.multilabel else [split.labels[index]]
    return tuple(split.classes[label] for label in labels)
