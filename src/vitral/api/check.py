"""`check` and `dedupe`: problems of a data set, suspicious labels (with a model), and copies of test images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitral.api.checkpoints import Source, load_source
from vitral.api.data import Data, open_to_train
from vitral.api.engines import Engine, SlurmOptions
from vitral.api.inference import compute_device, reading_workers, resolve_preprocessing
from vitral.api.parts import Arrays, parts_of
from vitral.atomic import checked_output, write_text
from vitral.checkpoints.card import Preprocess
from vitral.data.check import CheckReport, SuspectLabel, open_to_check
from vitral.data.check import check as check_data
from vitral.data.images import channels_of
from vitral.data.loader import default_workers, read_pixels
from vitral.data.pixels import resize
from vitral.data.sources import DataSet, Split, open_data, with_test_split
from vitral.data.splits import unreadable_refusal
from vitral.data.workers import CHUNK as SIGNATURE_BLOCK
from vitral.display import displayed
from vitral.errors import UntrainableData, UserError
from vitral.evaluation import duplicates
from vitral.evaluation.duplicates import DedupeResult
from vitral.evaluation.predict import cached_features
from vitral.evaluation.probes import find_label_errors
from vitral.events import EventHandler
from vitral.models.build import Model
from vitral.recipe import Recipe
from vitral.report.pages import label_errors_page

LabelScorer = tuple[Model, Preprocess, str]
_SHOWN = 200  # suspicious labels on the page
_THUMBNAIL = 160  # pixels of the longer side


def check(
    data: str | Path,
    *,
    model: Source = "",
    output: str | Path = "check.html",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler | None = None,
) -> CheckReport:
    """Check a data set: unreadable files, duplicates, leaks, uneven classes, wrong labels.

    Args:
        data: any data that `vitral train` accepts.
        model: a run folder, weights, hf:owner/name or timm:name; if given, images whose label is probably wrong are
            ranked by a linear classifier on its features that was fitted to other images.
        output: .html page of these images, with thumbnails; written only with `model`.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        device: cpu, cuda or mps for the model; chosen automatically by default.
        on_event: handler of progress events.

    Returns:
        Counts per class and split, every problem with the images concerned, which of them `train` handles, and why it
        would refuse the data, if it would.

    Raises:
        UserError: if an argument is wrong, or the data cannot be opened at all.
    """
    if not model and str(output) != "check.html":
        raise UserError("--output is the page of suspicious labels, which only a model finds: add --model, or omit it.")
    target = checked_output(output, (".html",), "--output") if model else None
    try:
        opened = open_to_check(data)
    except UserError as error:
        if os.path.exists(Path(data).expanduser()):
            raise UntrainableData(str(error)) from error
        raise
    with displayed(on_event) as handler:
        scorer = _label_scorer(opened, model, preprocess, device, handler) if model else None
        report = check_data(opened, workers=default_workers("cuda"), on_event=handler)
        report = replace(report, refusal=_refusal(data, report))
        if scorer is None or target is None:
            return report
        suspects, locations, scored = _suspects(opened, scorer, handler)
    thumbnails = [_thumbnail(*location) for location in locations[:_SHOWN]]
    write_text(target, label_errors_page(opened.source, scored, suspects, thumbnails))
    return replace(report, suspects=tuple(suspects), scored=scored, page=str(target))


def _refusal(data: Data, report: CheckReport) -> str:
    """Why `train` would refuse the data; empty if it would not."""
    try:
        opened, _ = open_to_train(data, Recipe())
    except UserError as error:
        return str(error)
    lost = {image.path for image in report.unreadable}

    def readable(split: Split) -> Split:
        return split.select(np.array([row for row, key in enumerate(split.keys) if key not in lost], np.int64))

    held_out = opened.eval_split
    return unreadable_refusal(opened.train, readable(opened.train), readable(held_out) if held_out else None)


def _label_scorer(opened: DataSet, source: Source, preprocess: str, device: str, on_event: EventHandler) -> LabelScorer:
    """The model that computes features, its preprocessing and its device, before any image is read."""
    if opened.train.multilabel:
        raise UserError("suspicious labels can only be ranked if each image has one label: omit --model.")
    model, card = load_source(source, on_event)
    return model, resolve_preprocessing(card, preprocess, on_event), compute_device(source, device)


def _suspects(
    opened: DataSet, scorer: LabelScorer, on_event: EventHandler
) -> tuple[list[SuspectLabel], list[tuple[Split, int]], int]:
    """The suspicious labels of all splits together, their splits and indices there, and how many images were scored."""
    model, preprocessing, device = scorer
    workers = reading_workers(device)
    x, labels, locations = [], [], []
    for split in (split for split in opened.splits if len(split)):
        part = cached_features(model, split, preprocessing, device=device, workers=workers, on_event=on_event)
        x.append(part.x[part.valid])
        labels += part.labels[part.valid].tolist()
        locations += [(split, int(index)) for index in np.flatnonzero(part.valid)]
    names = opened.train.classes
    if len(set(labels)) < 2 or np.bincount(labels).max(initial=0) < 2:
        raise UserError("suspicious labels need two classes, and one with two images that can be read: add images.")
    errors = find_label_errors(np.concatenate(x), np.array(labels), classes=len(names), device=device)
    suspects = []
    for error in errors:
        split, index = locations[error.row]
        label, suggested = names[labels[error.row]], names[error.suggested]
        chances = error.confidence, error.suggested_confidence
        suspects.append(SuspectLabel(split.keys[index], label, suggested, *chances, error.score, error.likely))
    return suspects, [locations[error.row] for error in errors], len(labels)


def _thumbnail(split: Split, index: int) -> np.ndarray:
    """uint8 (h, w, c), at most `_THUMBNAIL` pixels high and wide."""
    pixels = read_pixels(split, index, channels_of(split.reader.read(index)))
    scale = min(1.0, _THUMBNAIL / max(pixels.shape[:2]))
    return resize(pixels, (max(round(pixels.shape[0] * scale), 1), max(round(pixels.shape[1] * scale), 1)))


def dedupe(
    train: str | Path,
    *,
    against: Sequence[str | Path],
    output: str | Path = "",
    weights: Source = "",
    preprocess: str = "",
    device: str = "",
    parts: int = 1,
    part: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    on_event: EventHandler | None = None,
) -> DedupeResult:
    """Find training images that are copies of test images.

    Re-encoded, resized, slightly cropped and mirrored copies are found by perceptual hashes and a comparison of pixels.
    `vitral train ... --set data.exclude=FILE` excludes the images listed in a file.

    Args:
        train: the training images: any data that `vitral train` accepts.
        against: data sets whose test images must not be trained on.
        output: .txt file to list the copies in.
        weights: a model whose features find copies that the hashes miss; slower.
        preprocess: preprocessing pipeline for it, instead of the one that the weights state.
        device: cpu, cuda or mps for the model; chosen automatically by default.
        parts: number of parts to divide the images into, each computed by a separate command. Parts are stored next to
            the output until all are complete; the output is the same as with one part.
        part: compute only these parts, such as 3/16, and write no output.
        engine: where parts are computed: local, on the GPUs or cores of this machine, or slurm, as a job array.
        slurm: options of sbatch as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: number of concurrent parts; one per GPU by default.
        on_event: handler of progress events.

    Returns:
        The pairs of training and test images that are copies.

    Raises:
        UserError: if an argument is wrong.
        PartsWritten: with `part`, once these parts are written.
    """
    divided = parts_of(dedupe, locals())
    if preprocess and not weights:
        raise UserError("preprocess is for the images of a model: name its weights, too, or omit it.")
    resolved = compute_device(weights, device)
    target = checked_output(output, (".txt",), "--output") if output else None
    opened = open_data(train, held_out=0.0)
    others = [_tested(name) for name in against]
    model, card = load_source(weights, on_event) if weights else (None, None)
    preprocessing = resolve_preprocessing(card, preprocess, on_event) if card is not None else None
    with displayed(on_event) as handler:

        def compute(images: Split) -> Arrays:
            copies = duplicates.find_duplicates(
                images,
                others,
                model=model,
                preprocess=preprocessing,
                device=resolved,
                workers=default_workers("cuda"),
                on_event=handler,
            )
            return (np.frombuffer(copies.to_json().encode(), np.uint8),)

        block = SIGNATURE_BLOCK if model is None else duplicates.FEATURE_BLOCK
        results = divided.compute(opened.train, block, compute, handler)
    merged = duplicates.merge_duplicates([DedupeResult.from_json(array.tobytes().decode()) for _, (array,) in results])
    if target is not None:
        duplicates.write_exclusions(target, merged)
        divided.finish()
    return merged


def _tested(name: str | Path) -> Split:
    """The images that a data set is tested on; all of them if it has one split."""
    opened = with_test_split(open_data(name, held_out=0.0))
    return opened.train if opened.eval_split is None else opened.eval_split
