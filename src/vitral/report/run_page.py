"""The page of a training run: curves, most confident mistakes, confusion matrix, calibration, per-class metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.evaluation.calibration import ReliabilityBin, calibration_error
from vitral.report.charts import confusion_table, line_chart, reliability_chart
from vitral.report.inspect_page import LearnedWeights, viewer_section, weights_section
from vitral.report.page import Section, fact_table, headline_numbers, page, panels
from vitral.report.viewer import ViewerImage, viewer_data

_METRICS = {
    "recall": "Recall: the share of the class's images that are predicted as this class.",
    "precision": "Precision: the share of predictions of this class that are right.",
    "average_precision": "Average precision: how well images of the class are ranked above all others.",
    "threshold": "Threshold: the probability from which on predicting the class gives the best F1 score.",
}


class RunExamples(NamedTuple):
    """Held-out images that the model was evaluated on again for the page."""

    images: Sequence[ViewerImage]
    pooled_name: str
    mistakes: int  # how many of `images`, at the front, are wrong
    bins: tuple[ReliabilityBin, ...]  # reliability; empty where images have several labels or none
    evaluated: int


def run_page(
    title: str,
    result: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    model: Mapping[str, str],
    recipe: str,
    learned: LearnedWeights,
    examples: RunExamples | None,
) -> str:
    """Write the page of a run.

    Args:
        title: heading of the page.
        result: the contents of result.json.
        lines: the lines of metrics.jsonl.
        model: facts for the table of the model.
        recipe: the recipe as TOML.
        learned: filters and position similarities.
        examples: held-out images with predictions; None where there are none.

    Returns:
        HTML.
    """
    metrics = result["metrics"]
    sections = [_curves_section(lines)]
    if examples is not None and examples.images:
        sections.append(_examples_section(examples))
    if metrics.get("confusion"):
        sections.append(_confusion_section(metrics))
    if examples is not None and examples.bins:
        sections.append(_calibration_section(examples))
    if metrics.get("per_class"):
        sections.append(_classes_section(metrics["per_class"]))
    sections.append(weights_section(learned))
    details = f"<details><summary>Full recipe</summary><pre>{escape(recipe)}</pre></details>"
    sections.append(Section("model", "Model and recipe", "", fact_table(model) + details))
    data = {} if examples is None else viewer_data(examples.images, examples.pooled_name)
    return page(title, headline_numbers(headline(result)), sections, data)


def headline(result: Mapping[str, Any]) -> dict[str, str]:
    """The numbers in large type below the title."""
    metrics = result["metrics"]
    score = "mean average precision" if "mean_average_precision" in metrics else "accuracy"
    shares = {score: metrics.get("score"), "top 5": metrics.get("top5"), "calibration error": metrics.get("ece")}
    if "masked_loss" in metrics:
        shares = {"masked patch accuracy": metrics.get("masked_accuracy")}
    numbers = {name: f"{value:.1%}" for name, value in shares.items() if value is not None}
    if "masked_loss" in metrics:
        numbers["held-out loss"] = f"{metrics['masked_loss']:.3f}"
    minutes, seconds = divmod(round(result["seconds"]), 60)
    numbers["held-out images"] = f"{metrics['n']:,}" if metrics.get("n") else ""
    numbers["time"] = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return numbers


def _curves_section(lines: Sequence[Mapping[str, Any]]) -> Section:
    """Loss, score and learning rate by step, as far as metrics.jsonl has them."""
    evaluations = [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]
    charts = {
        "Training loss": {"training": _column(lines, "loss")},
        "Held-out loss": {"held-out": _series(evaluations, "nll") or _series(evaluations, "masked_loss")},
        "Score": {"held-out": _scores(evaluations), "training batch": _column(lines, "accuracy")},
        "Learning rate": {"learning rate": _column(lines, "lr")},
    }
    drawn = []
    for name, series in charts.items():
        filled = {label: points for label, points in series.items() if points}
        if any(len(points) > 1 for points in filled.values()):  # one point makes no curve
            drawn.append((name, line_chart(filled, x="step", y=name.lower(), percent=name == "Score")))
    about = "Held-out images are never trained on."
    return Section("curves", "Training curves", about, panels(*drawn))


def _scores(evaluations: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """Shares from 0 to 1: the accuracy on masked patches in masked pre-training, where the score is a loss."""
    masked = any("masked_loss" in metrics for _, metrics in evaluations)
    return _series(evaluations, "masked_accuracy" if masked else "score")


def _series(evaluations: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> list[tuple[float, float]]:
    return [(step, metrics[name]) for step, metrics in evaluations if name in metrics]


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _examples_section(examples: RunExamples) -> Section:
    total = f"of {examples.evaluated:,} held-out images"
    if not examples.bins:
        title, about = "Examples", f"{len(examples.images)} {total}."
        about += " A ✓ marks the classes of an image." if examples.images[0].truth else ""
    elif examples.mistakes:
        title = "Most confident mistakes"
        about = f"The wrong predictions with the highest confidence, {total}; a ✓ marks the right class."
        right = len(examples.images) - examples.mistakes
        count = "image is a right prediction" if right == 1 else f"{right} images are right predictions"
        about += f" The last {count} with the lowest confidence." if right else ""
    else:
        title, about = "Least confident predictions", f"The lowest confidence {total}; none is wrong."
    return viewer_section(examples.images, examples.pooled_name, title, about)


def _confusion_section(metrics: Mapping[str, Any]) -> Section:
    names = [row["name"] for row in metrics["per_class"]]
    matrix = np.zeros((len(names), len(names)), np.int64)
    for true, guess, count in metrics["confusion"]:
        matrix[true, guess] = count
    pairs = "; ".join(
        f"<bdi>{escape(pair['true'])}</bdi> predicted as <bdi>{escape(pair['predicted'])}</bdi> "
        f"({pair['count']} of {pair['support']})"
        for pair in metrics.get("confused", [])[:3]
    )
    about = "Rows are true classes, columns are predictions: everything off the diagonal is a mistake."
    about += f" Most frequent: {pairs}." if pairs else " There is none."
    return Section("confusion", "Confusion matrix", about, confusion_table(matrix, names))


def _calibration_section(examples: RunExamples) -> Section:
    error = calibration_error(examples.bins)
    about = (
        "Accuracy by confidence: bars below the dashed line are overconfident, above it underconfident; "
        f"stronger colour means more images. The expected calibration error of these {examples.evaluated:,} images "
        f"is {error:.1%}."
    )
    return Section("calibration", "Calibration", about, panels(("", reliability_chart(examples.bins))))


def _classes_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """One row per class; a click on a column header sorts by it."""
    columns = [key for key in rows[0] if key != "name"]
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name.replace("_", " "))}</button></th>'
        for name in ("class", *columns)
    )
    body = "".join(
        f'<tr><td data-value="{escape(str(row["name"]))}">{escape(str(row["name"]))}</td>'
        + "".join(_cell(row[key]) for key in columns)
        + "</tr>"
        for row in rows
    )
    table = f'<table class="classes sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    about = "Click a column header to sort. " + " ".join(_METRICS[key] for key in columns if key in _METRICS)
    body = f'<div class="scroll tall" tabindex="0" role="region" aria-label="Classes">{table}</div>'
    return Section("classes", "Per-class metrics", about, body)


def _cell(value: float | int | None) -> str:
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
    return f'<td data-value="{-1 if value is None else value}">{text}</td>'
