"""The page of an evaluation, and its sections, which are also part of the page of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.data.images import UnreadableImage
from vitral.evaluation.accuracy import confused_pairs, wilson_interval
from vitral.evaluation.calibration import ReliabilityBin
from vitral.report.charts import photo_uri, png_uri, reliability_chart
from vitral.report.html import Section, fact_table, headline_numbers, left_out_section, page, panels, scroller, table

TABLE_UP_TO = 40  # classes of a confusion matrix whose cells are numbers; of more it is an image
_DENSE = 15  # classes from which on its cells are small, and its most frequent mistakes are listed as well
_PAIRS = 20  # confused classes that are listed
_MATRIX_PIXELS = 1000  # size of a matrix drawn as an image, if the page is wide enough
_BLOCKS = 250  # its rows: more classes share one, so that a cell can be seen, also on a telephone
_CLASSES = 1000  # rows of the table of classes
_BAD = 0.05  # calibration error that needs a remedy
_RIGHT, _WRONG = (42, 138, 126), (200, 85, 61)  # --s3 and --s2 of page.css
_METRICS = {
    "recall": "Recall: the share of the class's images that are predicted as this class.",
    "precision": "Precision: the share of predictions of this class that are right.",
    "average_precision": "Average precision: how well images of the class are ranked above all others.",
    "threshold": "Threshold: the probability from which on predicting the class gives the best F1 score.",
}


class Mistake(NamedTuple):
    """An image with a wrong prediction."""

    name: str  # of its file
    picture: np.ndarray  # uint8 (h, w, c), after preprocessing
    true: str
    predicted: str
    probability: float  # of the predicted class


class Reliability(NamedTuple):
    """Accuracy by confidence on held-out images."""

    raw: tuple[ReliabilityBin, ...]  # of the probabilities of the logits as they are
    calibrated: tuple[ReliabilityBin, ...] = ()  # at the model's temperature; empty if that is 1


class TemperatureAdvice(NamedTuple):
    """A temperature that the model does not have, and the calibration error with it, cross-fitted."""

    temperature: float
    ece: float


def evaluation_page(
    title: str,
    metrics: Mapping[str, Any],
    *,
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    mistakes: Sequence[Mistake] = (),
    reliability: Reliability | None = None,
    advice: TemperatureAdvice | None = None,
    sigmoid: bool = False,
    left_out: Sequence[UnreadableImage] = (),
) -> str:
    """Write the page of an evaluation: headline numbers, mistakes, confusions, calibration, classes, files left out.

    The arguments are fields of an `EvalResult`; a part whose numbers are missing is left out: multi-label metrics have
    no confusions, for example. `facts` are for the last table; `sigmoid`: each class has its own probability.
    """
    sections = [_gallery_section(mistakes, metrics["n"])] if mistakes else []
    sections += metric_sections(metrics, reliability, advice=advice, sigmoid=sigmoid)
    sections += left_out_section(left_out)
    if facts:
        sections.append(Section("model", "Model and data", "", fact_table(facts)))
    lead = headline_numbers(headline(metrics)) + "".join(f'<p class="about">{escape(note)}</p>' for note in notes)
    return page(title, lead, sections, confusion_data(metrics))


def metric_sections(
    metrics: Mapping[str, Any],
    reliability: Reliability | None = None,
    *,
    fitted: str = "",
    advice: TemperatureAdvice | None = None,
    sigmoid: bool = False,
) -> list[Section]:
    """Confusions, calibration and classes, as far as there are such metrics; `fitted`: what the temperature was fitted
    on."""
    sections = [_confusion_section(metrics)] if metrics.get("confusion") else []
    if reliability is not None:
        sections.append(_calibration_section(reliability, metrics, fitted, advice, sigmoid))
    if metrics.get("per_class"):
        sections.append(_classes_section(metrics))
    return sections


def headline(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The numbers in large type below the title."""
    if "masked_loss" in metrics:
        accuracy = metrics.get("masked_accuracy")
        numbers = {} if accuracy is None else {"masked patch accuracy": percent(accuracy)}
        return {**numbers, "held-out loss": f"{metrics['masked_loss']:.3f}"}
    shares = {
        "mean average precision": metrics.get("mean_average_precision"),
        "accuracy": metrics.get("top1"),
        "top 5": metrics.get("top5"),
        "mean per class": metrics.get("mean_per_class"),
        "calibration error": metrics.get("ece_calibrated"),
    }
    numbers = {name: percent(value) for name, value in shares.items() if value is not None}
    if "accuracy" in numbers:
        low, high = wilson_interval(metrics["top1"], metrics["n"])
        interval = f"{numbers.pop('accuracy')} ({100 * low:.1f} to {100 * high:.1f})"
        numbers = {"accuracy (95 % interval)": interval, **numbers}
    return {**numbers, "images": f"{metrics['n']:,}"}


def caption(names: Sequence[str], probability: float) -> str:
    """The true class and the predicted one with its probability, as a line of HTML: "cat → dog, 44 %"."""
    # One bdi per name: a right-to-left name must not reorder its neighbours. Long names may break at an underscore.
    parts = (f"<bdi>{escape(name).replace('_', '_<wbr>')}</bdi>" for name in names)
    return f"{' → '.join(parts)}, {percent(probability, 0)}"


def percent(share: float, digits: int = 1) -> str:
    """0.4375 -> "43.8 %", with a space that does not break."""
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def _gallery_section(mistakes: Sequence[Mistake], n: int) -> Section:
    figures = "".join(
        f'<figure title="{escape(one.name)}"><img src="{photo_uri(one.picture)}" alt="{escape(one.name)}">'
        f"<figcaption>{caption((one.true, one.predicted), one.probability)}</figcaption></figure>"
        for one in mistakes
    )
    about = (
        f"Of {n:,} images, the wrong predictions with the highest probability: "
        "the true class, the predicted class and its probability."
    )
    return Section("mistakes", "Most confident mistakes", about, f'<div class="gallery">{figures}</div>')


def confusion_data(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the script reads to describe the cell below the pointer, if the confusion matrix is an image."""
    names = [row["name"] for row in metrics.get("per_class", ())]
    if len(names) <= TABLE_UP_TO or not metrics.get("confusion"):
        return {}
    cells = np.asarray(metrics["confusion"]).tolist()
    return {"confusion": {"names": names, "block": _block(len(names)), "cells": cells}}


def _confusion_section(metrics: Mapping[str, Any]) -> Section:
    names = [row["name"] for row in metrics["per_class"]]
    cells = np.asarray(metrics["confusion"], np.int64)
    pairs = confused_pairs(cells, names, _PAIRS)
    about = "Rows are true classes, columns are predictions: everything off the diagonal is a mistake."
    if not pairs:
        about += " There is none."
    elif len(names) <= _DENSE:
        most = "; ".join(
            f"<bdi>{escape(pair.true)}</bdi> predicted as <bdi>{escape(pair.predicted)}</bdi> "
            f"({pair.count} of {pair.support})"
            for pair in pairs[:3]
        )
        about += f" Most frequent: {most}."
    matrix = confusion_table(cells, names) if len(names) <= TABLE_UP_TO else _confusion_image(cells, len(names))
    listed = ""
    if pairs and len(names) > _DENSE:
        rows = [(pair.true, pair.predicted, f"{pair.count:,} of {pair.support:,}") for pair in pairs]
        frequent = table("pairs", ["true class", "predicted as", "images"], rows)
        listed = f"<h3>Most frequent mistakes</h3>{scroller(frequent, 'Most frequent mistakes')}"
    body = matrix + listed if len(names) <= TABLE_UP_TO else listed + matrix
    return Section("confusion", "Confusion matrix", about, body)


def confusion_table(cells: np.ndarray, names: Sequence[str]) -> str:
    """A confusion matrix as an HTML table that scrolls; `cells` (m, 3) are true class, predicted class and count."""
    counts = _dense(cells, len(names))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    labels = [f'<span title="{escape(name)}">{escape(name)}</span>' for name in names]
    head = "".join(f'<th scope="col">{label}</th>' for label in labels)
    rows = []
    for true, (row_counts, row_shares) in enumerate(zip(counts.tolist(), shares.tolist(), strict=True)):
        row = "".join(
            f'<td class="{"right" if guess == true else "wrong"}" style="--share:{share:.3f}" '
            f'title="{escape(names[true])} predicted as {escape(names[guess])}: {count}">{count}</td>'
            if count or guess == true
            else "<td></td>"
            for guess, (count, share) in enumerate(zip(row_counts, row_shares, strict=True))
        )
        rows.append(f'<tr><th scope="row">{labels[true]}</th>{row}</tr>')
    corner = '<td class="corner">true \\ predicted</td>'
    kind = "confusion dense" if len(names) > _DENSE else "confusion"
    matrix = f'<table class="{kind}"><thead><tr>{corner}{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return scroller(matrix, "Confusion matrix")


def _confusion_image(cells: np.ndarray, classes: int) -> str:
    """A pixel per cell, or per block of cells, transparent if it is empty; the script describes them in words."""
    block = _block(classes)
    counts = _dense(cells // np.array([block, block, 1]), -(-classes // block))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    own = np.eye(len(counts), dtype=bool)
    # Single mistakes must be seen beside frequent ones, so that no cell with a count is paler than 0.4.
    opacity = np.where(counts > 0, 0.4 + 0.6 * np.where(own, shares, np.minimum(1, 3 * shares)), 0)
    pixels = np.concatenate([np.where(own[..., None], _RIGHT, _WRONG), 255 * opacity[..., None]], axis=2)
    size = _MATRIX_PIXELS // len(counts) * len(counts)
    description = f"Confusion matrix of {classes:,} true classes (rows) by predicted ones (columns)"
    image = png_uri(pixels.round().astype(np.uint8))
    hint = "Point at a cell, or tap it, to read its classes and counts."
    hint += f" A cell is {block} by {block} classes." if block > 1 else ""
    return (
        f'<img id="matrix" style="width: min(100%, {size}px)" src="{image}" alt="{description}">'
        f'<p id="cell" class="says short" role="status">{hint}</p>'
    )


def _block(classes: int) -> int:
    """Classes that share a row of the confusion matrix as an image."""
    return -(-classes // _BLOCKS)


def _dense(cells: np.ndarray, classes: int) -> np.ndarray:
    """(m, 3) -> counts (true classes, predicted classes)"""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (cells[:, 0], cells[:, 1]), cells[:, 2])
    return matrix


def _calibration_section(
    reliability: Reliability, metrics: Mapping[str, Any], fitted: str, advice: TemperatureAdvice | None, sigmoid: bool
) -> Section:
    function = "sigmoid" if sigmoid else "softmax"
    rows = [(f"raw ({function} of the logits)", metrics["ece"], metrics["nll"])]
    charts = [("Raw probabilities", reliability_chart(reliability.raw))]
    if reliability.calibrated:
        temperature = f"{metrics['temperature']:.3g}"
        rows.append((f"calibrated (logits / {temperature})", metrics["ece_calibrated"], metrics["nll_calibrated"]))
        charts.append((f"Calibrated probabilities: logits / {temperature}", reliability_chart(reliability.calibrated)))
    cells = [(name, percent(ece), f"{nll:.3f}") for name, ece, nll in rows]
    measures = table("measures", ["probabilities", "calibration error", "log loss"], cells)
    about = (
        "Accuracy by confidence: bars below the dashed line are overconfident, above it underconfident; "
        "stronger colour means more images, and a dot is a bar of about 0 %. The calibration error is the mean "
        "distance of the bars from the line."
    )
    about += f" {escape(fitted[0].upper() + fitted[1:])}." if fitted else ""
    remedy = f'<p class="says short">{_remedy(reliability, metrics, advice, sigmoid)}</p>'
    return Section("calibration", "Calibration", about, scroller(measures, "Calibration") + remedy + panels(*charts))


def _remedy(
    reliability: Reliability, metrics: Mapping[str, Any], advice: TemperatureAdvice | None, sigmoid: bool
) -> str:
    """What to do about the calibration, as HTML: nothing, or the remedy of a bad one."""
    bins, error = reliability.calibrated or reliability.raw, metrics["ece_calibrated"]
    if error <= _BAD and not reliability.calibrated:
        return "Good: the probabilities can be used as they are."
    if error <= _BAD:
        raw = f"the raw probabilities are {_confidence_word(reliability.raw)}. " if metrics["ece"] > _BAD else ""
        return (
            f"Good if the temperature is applied, as <code>vitral predict</code> does{'; ' if raw else '. '}{raw}"
            f"A program that reads the logits must divide them by {metrics['temperature']:.3g} before the softmax."
        )
    chance = error_by_chance(bins)
    if error < 2 * chance:
        return (
            f"Too few images to tell: with these {metrics['n']:,} a model whose probabilities are right would show an "
            f"error of about {percent(chance)} by chance. Remedy: evaluate it on more images."
        )
    over = _confidence_word(bins) == "overconfident"
    bad = f"Bad: the model is {_confidence_word(bins)} on these {sum(row.count for row in bins):,} images. Remedy: "
    if advice is not None and advice.ece < error:
        return (
            f"{bad}divide the logits by the temperature {advice.temperature:.3g}, which lowers the error to "
            f"{percent(advice.ece)} (cross-fitted). <code>vitral train</code> fits it by itself; for existing weights: "
            "<code>model, card = vitral.load(SOURCE); vitral.save(model, FILE, dataclasses.replace(card, "
            f"temperature={advice.temperature:.3g}))</code>"
        )
    if sigmoid:
        return (
            f"{bad}where every image has one class, train with <code>--set loss=softmax</code>: "
            "a temperature is fitted to the softmax only."
        )
    change = "regularization.label_smoothing=0.1 data.mixup=0.2" if over else "data.mixup=0 data.cutmix=0"
    more = "" if over else ", and longer"
    return (
        f"{bad}a temperature alone does not repair it; train with <code>--set {change}</code>{more}, or on more images."
    )


def _confidence_word(bins: Sequence[ReliabilityBin]) -> str:
    return "overconfident" if sum(row.count * (row.confidence - row.accuracy) for row in bins) > 0 else "underconfident"


def error_by_chance(bins: Sequence[ReliabilityBin]) -> float:
    """The calibration error that right probabilities would show, because the accuracy of few images is a rough one.

    The mean absolute deviation of a binomial share is about sqrt(2 p (1 - p) / (pi n)).
    """
    spreads = (np.sqrt(2 * row.count * row.confidence * (1 - row.confidence) / np.pi) for row in bins)
    return float(sum(spreads) / sum(row.count for row in bins))


def _classes_section(metrics: Mapping[str, Any]) -> Section:
    """One row per class; a click on a column header sorts by it. Of very many classes, those that do worst."""
    rows = dict(enumerate(metrics["per_class"]))
    columns = [key for key in rows[0] if key != "name"]
    about = "Click a column header to sort. " + " ".join(_METRICS[key] for key in columns if key in _METRICS)
    if len(rows) > _CLASSES:
        score = next(key for key in columns if key in _METRICS)
        order = sorted(rows, key=lambda number: 2.0 if rows[number][score] is None else rows[number][score])
        about = f"The {_CLASSES:,} of {len(rows):,} classes with the lowest {score.replace('_', ' ')}. {about}"
        rows = {number: rows[number] for number in sorted(order[:_CLASSES])}
    taken = _most_taken_for(metrics)
    heads = ["class", *(name.replace("_", " ") for name in columns), *(["most often taken for"] if taken else [])]
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in heads)
    body = "".join(
        f'<tr><td data-value="{escape(row["name"])}">{escape(row["name"])}</td>'
        + "".join(_cell(row[key]) for key in columns)
        + (taken.get(number, '<td class="words" data-value="">-</td>') if taken else "")
        + "</tr>"
        for number, row in rows.items()
    )
    listed = f'<table class="classes sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return Section("classes", "Per-class metrics", about, scroller(listed, "Classes", tall=True))


def _most_taken_for(metrics: Mapping[str, Any]) -> dict[int, str]:
    """By class, the cell of the class that it is most often mistaken for; empty without mistakes."""
    names = [row["name"] for row in metrics["per_class"]]
    best: dict[int, tuple[int, int]] = {}
    for true, predicted, count in np.asarray(metrics.get("confusion", ())).tolist():
        if true != predicted and count > best.get(true, (0, 0))[1]:
            best[true] = (predicted, count)
    return {
        true: f'<td class="words" data-value="{escape(names[predicted])}">{escape(names[predicted])} ({count:,})</td>'
        for true, (predicted, count) in best.items()
    }


def _cell(value: float | int | None) -> str:
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else percent(value)
    return f'<td data-value="{-1 if value is None else value}">{text}</td>'
