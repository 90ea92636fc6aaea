"""The page of a run: how it learned, what it confuses, its most confident mistakes, and what it has learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.evaluation.calibration import Bin, calibration_error
from vitral.report.charts import confusion_table, line_chart, reliability_chart
from vitral.report.inspect_page import Learned, learned_section, viewer_section
from vitral.report.page import Section, facts, figures, page, panels
from vitral.report.viewer import Shown, viewer_data

MEANINGS = {
    "recall": "Recall: how many images of the class it found.",
    "precision": "Precision: how many of its answers with this class are right.",
    "average_precision": "Average precision: how well images of the class are ranked above all others.",
    "threshold": "Threshold: from this probability on the class is best said to be there.",
}


class Examples(NamedTuple):
    """Held-out images that the model was asked again about, for the page."""

    shown: Sequence[Shown]
    pooled_name: str
    mistakes: int  # of `shown` that are wrong, the first ones
    bins: tuple[Bin, ...]  # reliability; empty where images have several labels or none
    asked: int


def run_page(
    title: str,
    result: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    model: Mapping[str, str],
    recipe: str,
    learned: Learned,
    examples: Examples | None,
) -> str:
    """HTML. `result` is result.json, `lines` are those of metrics.jsonl, `model` are facts about it."""
    metrics = result["metrics"]
    sections = [curves_section(lines)]
    if examples is not None and examples.shown:
        sections.append(_examples_section(examples))
    if metrics.get("confusion"):
        sections.append(_confusion_section(metrics))
    if examples is not None and examples.bins:
        sections.append(_calibration_section(examples))
    if metrics.get("per_class"):
        sections.append(_classes_section(metrics["per_class"]))
    sections.append(learned_section(learned))
    how = f"<details><summary>The recipe, every key</summary><pre>{escape(recipe)}</pre></details>"
    sections.append(Section("model", "The model and its recipe", "", facts(model) + how))
    data = {} if examples is None else viewer_data(examples.shown, examples.pooled_name)
    return page(title, figures(headline(result)), sections, data)


def headline(result: Mapping[str, Any]) -> dict[str, str]:
    """The few numbers that stand large under the title."""
    metrics = result["metrics"]
    score = "mean average precision" if "mean_average_precision" in metrics else "accuracy"
    shares = {score: metrics.get("score"), "top 5": metrics.get("top5"), "calibration error": metrics.get("ece")}
    if "masked_loss" in metrics:
        shares = {"hidden patches named": metrics.get("masked_accuracy")}
    numbers = {name: f"{value:.1%}" for name, value in shares.items() if value is not None}
    if "masked_loss" in metrics:
        numbers["held-out loss"] = f"{metrics['masked_loss']:.3f}"
    minutes, seconds = divmod(round(result["seconds"]), 60)
    numbers["held-out images"] = f"{metrics['n']:,}" if metrics.get("n") else ""
    numbers["time"] = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return numbers


def curves_section(lines: Sequence[Mapping[str, Any]]) -> Section:
    """Loss, accuracy and learning rate by step, as far as they were written down."""
    judged = [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]
    charts = {
        "Training loss": {"training": _column(lines, "loss")},
        "Held-out loss": {"held-out": _measured(judged, "nll") or _measured(judged, "masked_loss")},
        "Score": {"held-out": _scores(judged), "training batch": _column(lines, "accuracy")},
        "Learning rate": {"rate": _column(lines, "rate")},
    }
    drawn = []
    for name, series in charts.items():
        filled = {label: points for label, points in series.items() if points}
        if any(len(points) > 1 for points in filled.values()):  # of one point there is nothing to see
            drawn.append((name, line_chart(filled, x="step", y=name.lower(), percent=name == "Score")))
    about = "What it was told to make small, and what that was good for: held-out images are never trained on."
    return Section("curves", "How it learned", about, panels(*drawn))


def _scores(judged: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """Shares from 0 to 1; where patches were hidden the score is a loss, and the share is that of those named."""
    if any("masked_loss" in found for _, found in judged):
        return _measured(judged, "masked_accuracy")
    return _measured(judged, "score")


def _measured(judged: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> list[tuple[float, float]]:
    return [(step, found[name]) for step, found in judged if name in found]


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _examples_section(examples: Examples) -> Section:
    of = f"of {examples.asked:,} held-out images"
    if not examples.bins:
        title, about = "Where it looks", f"Some {of}."
        about += " A ✓ marks the classes that an image has." if examples.shown[0].truth else ""
    elif examples.mistakes:
        title = "Its most confident mistakes"
        about = f"The wrong answers it was surest of, {of}, and where it looked; a ✓ marks the right class."
        right = len(examples.shown) - examples.mistakes
        some = "one is a right answer" if right == 1 else f"{right} are right answers"
        about += f" The last {some} that it was least sure of." if right else ""
    else:
        title, about = "Some of its answers", f"Those it was least sure of, {of}, and where it looked."
    return viewer_section(examples.shown, examples.pooled_name, title, about)


def _confusion_section(metrics: Mapping[str, Any]) -> Section:
    names = [row["name"] for row in metrics["per_class"]]
    matrix = np.zeros((len(names), len(names)), np.int64)
    for true, guess, count in metrics["confusion"]:
        matrix[true, guess] = count
    pairs = "; ".join(
        f"<bdi>{escape(pair['true'])}</bdi> taken for <bdi>{escape(pair['predicted'])}</bdi> "
        f"({pair['count']} of {pair['support']})"
        for pair in metrics.get("confused", [])[:3]
    )
    about = "Each row is a class, each column an answer: what stands off the diagonal is wrong."
    about += f" Most often: {pairs}." if pairs else " Nothing was."
    return Section("confusion", "What it confuses", about, confusion_table(matrix, names))


def _calibration_section(examples: Examples) -> Section:
    error = calibration_error(examples.bins)
    about = (
        "Answers by how sure it was: bars below the dashed line are too sure, above it too modest; "
        f"fuller colour means more images. The expected calibration error of these {examples.asked:,} images "
        f"is {error:.1%}."
    )
    return Section("calibration", "Does it know when it knows?", about, panels(("", reliability_chart(examples.bins))))


def _classes_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """One line a class; a click on a column's head sorts by it."""
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
    about = "A click on a column's head sorts by it. " + " ".join(MEANINGS[key] for key in columns if key in MEANINGS)
    inside = f'<div class="scroll tall" tabindex="0" role="region" aria-label="Classes">{table}</div>'
    return Section("classes", "Class by class", about, inside)


def _cell(value: float | int | None) -> str:
    said = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
    return f'<td data-value="{-1 if value is None else value}">{said}</td>'
