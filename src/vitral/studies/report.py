"""The report of a study: its table, figure and claims as Markdown, as JSON and as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, get_args

from vitral.display import duration
from vitral.report.charts import Panel
from vitral.report.html import Section, headline_numbers, page, panels
from vitral.studies.claims import ClaimResult, Verdict, check_claims, is_count
from vitral.studies.definition import Study, settings_text
from vitral.studies.planning import CellResult, Record, plan, table

# Readable on a light and on a dark page.
_COLOURS = ("#3f74cc", "#d2603f", "#2a9d8f", "#b07cc6", "#c99a2e", "#6b8e23", "#d0588f", "#7a8794")
_ROW, _LABELS, _WIDTH = 26, 240, 530  # pixels of a chart of rows
_WIDE = 20  # ratio from which an axis is logarithmic
TEST = (
    "Verdicts: 95 % confidence intervals (Student's t) of differences of means over seeds (Welch), of paired cells "
    "where there is one run each, or of least-squares slopes. Undecided: the interval contains both outcomes."
)


def markdown(study: Study, cells: Sequence[CellResult], records: Mapping[str, Record]) -> str:
    """A section of a Markdown page: claims, table, cost, differences from the paper."""
    columns, rows = table(study, cells)
    head = f"## {study.title} ({study.source})" if study.source else f"## {study.title}"
    lines = [head, "", *([study.about, ""] if study.about else [])]
    if study.claims:
        claims = [[result.claim.text, _bold(result.verdict), result.measured] for result in check_claims(study, cells)]
        lines += [*_table(["claim", "verdict", "measured"], claims, left=3), ""]
    lines += [*_table(columns, rows, left=columns.index(study.metric)), "", _table_notes(study, cells, records), ""]
    lines += ["Differs from the paper:", "", *(f"- {text}" for text in study.differs), ""] if study.differs else []
    return "\n".join(lines)


def claims_table(reports: Sequence[tuple[Study, Sequence[CellResult]]]) -> str:
    rows = [
        [result.claim.text, _paper(study, result), result.measured, _bold(result.verdict)]
        for study, cells in reports
        for result in check_claims(study, cells)
    ]
    verdicts = [result.verdict for study, cells in reports for result in check_claims(study, cells)]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in get_args(Verdict)]
    lines = [*_table(["claim", "the paper", "ours", "verdict"], rows, left=4), "", f"{len(rows)} claims: "]
    return "\n".join(lines) + f"{', '.join(counts)}.\n"


def _paper(study: Study, result: ClaimResult) -> str:
    """Where the paper has the claim, and what it measured."""
    return ": ".join(filter(None, [study.source.partition(",")[0], result.claim.paper]))


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "not held" else verdict


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    rule = "|".join("---" if number < left else "--:" for number in range(len(columns)))
    return [f"| {' | '.join(row)} |" for row in [columns]] + [f"|{rule}|"] + [f"| {' | '.join(row)} |" for row in rows]


def _intervals(records: Mapping[str, Record]) -> str:
    """What the numbers of the table are, and how many images they are of."""
    counts = sorted({int(r.metrics["n"]) for r in records.values() if not r.trial and "n" in r.metrics})
    images = f"n = {' and '.join(f'{n:,}' for n in counts)} images per run. " if counts else ""
    return f"{images}In parentheses: the 95 % confidence interval of the mean over runs."


def cost_sentence(records: Mapping[str, Record]) -> str:
    """What all runs took, trials and failures included."""
    seconds, flops = sum(r.seconds for r in records.values()), sum(r.flops for r in records.values())
    devices = sorted({record.device for record in records.values() if record.device})
    bad = [record for record in records.values() if record.status != "ok"]
    failed = f"; {len(bad)} diverged or failed" if bad else ""
    starts = {r.metrics["pretraining_flops"] for r in records.values() if "pretraining_flops" in r.metrics}
    before = f", and {sum(starts):.2e} FLOPs of pre-training" if starts else ""
    trials = sum(record.trial for record in records.values())
    chosen = f", {trials} of them trials" if trials else ""
    beside = max((record.beside for record in records.values()), default=0)
    shared = f"; up to {beside + 1} runs at a time shared a device, and each counts in full" if beside else ""
    rule = "(two per multiply-accumulate, three forward passes per step)"
    computed = f" and {flops:.2e} FLOPs {rule}" if flops else ""
    where = ", ".join(devices) or "no device"
    return f"{len(records)} runs{chosen}: {seconds:,.0f} s{computed}{before} on {where}{failed}{shared}."


def _table_notes(study: Study, cells: Sequence[CellResult], records: Mapping[str, Record]) -> str:
    sentences = [_missing(study, records), _intervals(records), cost_sentence(records), edge_sentence(study, cells)]
    return " ".join(filter(None, sentences))


def _missing(study: Study, records: Mapping[str, Record]) -> str:
    """How much of an unfinished study there is."""
    current = plan(study, records)
    missing = len(current.pending) + current.waiting
    return f"Incomplete: {current.total - missing} of {current.total} runs." if missing else ""


def edge_sentence(study: Study, cells: Sequence[CellResult]) -> str:
    """Cells whose chosen value is the lowest or highest that was tried."""
    edges = [f"{_row_name(cell, cells)} ({', '.join(cell.edges())})" for cell in cells if cell.edges()]
    return f"Chosen at the edge of the values tried, a better one may lie beyond: {'; '.join(edges)}." if edges else ""


def as_dict(study: Study, cells: Sequence[CellResult], records: Mapping[str, Record]) -> dict[str, Any]:
    return {
        "study": study.name,
        "title": study.title,
        "source": study.source,
        "scale": study.scale,
        "metric": study.metric,
        "test": TEST,
        "cells": [_cell_dict(study, cell) for cell in cells],
        "claims": [
            {"text": r.claim.text, "kind": r.claim.kind, "verdict": r.verdict, "measured": r.measured}
            for r in check_claims(study, cells)
        ],
        "cost": {
            "runs": len(records),
            "seconds": sum(record.seconds for record in records.values()),
            "flops": sum(record.flops for record in records.values()),
        },
        "edges": edge_sentence(study, cells),
        "differs": list(study.differs),
        "records": [asdict(record) for record in records.values()],
    }


def _cell_dict(study: Study, cell: CellResult) -> dict[str, Any]:
    return {
        "labels": cell.labels,
        "values": list(cell.values(study.metric)),
        "mean": cell.mean(study.metric),
        "interval": cell.interval(study.metric),
        "paper": cell.cell.paper,
        "seconds": cell.seconds(),
        "flops": cell.flops(),
        "runs": [{"id": run.id, "status": record.status if record else "missing"} for run, record in cell.runs],
    }


def html(study: Study, cells: Sequence[CellResult], records: Mapping[str, Record]) -> str:
    columns, rows = table(study, cells)
    claims = check_claims(study, cells)
    held = f"{sum(result.verdict == 'held' for result in claims)} of {len(claims)}" if claims else ""
    flops = sum(record.flops for record in records.values())
    numbers = {
        "runs": f"{len(records)}",
        "claims held": held,
        "compute time": duration(sum(record.seconds for record in records.values())),
        "FLOPs": f"{flops:.2e}" if flops else "",
    }
    where = f"<p>{escape(study.source)} of the paper, at the scale “{escape(study.scale)}”.</p>" if study.source else ""
    lead = f"{where}<p>{escape(study.about)}</p>{headline_numbers(numbers)}"
    sections = []
    if claims:
        body = html_table(["claim", "verdict", "measured"], [[r.claim.text, r.verdict, r.measured] for r in claims], 3)
        sections.append(Section("claims", "Claims", escape(TEST), body))
    bars = "Bars are 95 % intervals over seeds." if any(cell.interval(study.metric) for cell in cells) else ""
    sections.append(Section("figure", "Figure", bars, panels(*figures(study, cells))))
    about = escape(_table_notes(study, cells, records))
    sections.append(Section("table", "All cells", about, html_table(columns, rows, columns.index(study.metric))))
    if study.differs:
        items = "".join(f"<li>{escape(text)}</li>" for text in study.differs)
        sections.append(Section("differs", "What differs from the paper", "", f"<ul>{items}</ul>"))
    return page(study.title, lead, sections, {})


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A plain table; columns after the first `left` hold numbers. Words wrap, so that a phone shows all columns."""
    words = ' style="text-align:left;white-space:normal"'
    style = [words if number < left else "" for number in range(len(columns))]
    head = "".join(f'<th scope="col"{s}>{escape(column)}</th>' for column, s in zip(columns, style, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{s}>{escape(cell)}</td>' for cell, s in zip(row, style, strict=True))}</tr>" for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
        f'<table class="classes"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def figures(study: Study, cells: Sequence[CellResult]) -> list[tuple[str, str]]:
    """Captions and charts: ours over the study's axis or row by row, and the paper's values beside."""
    done = [cell for cell in cells if cell.records]
    if not done:
        return []
    caption = f"Ours: {study.metric}"
    if study.x:
        counts = [column for column in study.columns if is_count(column) and any(cell.values(column) for cell in done)]
        charts = [(f"Ours: {metric}", curves(study, done, metric)) for metric in (study.metric, *counts)]
    else:
        rows = [(_row_name(cell, cells), cell.mean(study.metric), cell.bounds(study.metric)) for cell in done]
        shown = [(name, mean, bounds) for name, mean, bounds in rows if mean is not None]
        charts = [(caption, row_chart(shown, percent=not is_count(study.metric)))]
    paper = [(_row_name(cell, cells), cell.cell.paper / 100, None) for cell in cells if cell.cell.paper is not None]
    if paper:
        unique = list({row[0]: row for row in paper}.values())
        charts.append(("The paper's values", row_chart(unique, percent=True)))
    return charts


def _row_name(cell: CellResult, cells: Sequence[CellResult]) -> str:
    """The name of a cell with the labels that tell it from others of the same name."""
    alike = [other for other in cells if other.labels["name"] == cell.labels["name"]]
    keys = [key for key in ("model", "data") if len({str(other.labels.get(key)) for other in alike}) > 1]
    return ", ".join([str(cell.labels["name"]), *(str(cell.labels[key]) for key in keys if key in cell.labels)])


def row_chart(rows: Sequence[tuple[str, float, tuple[float, float] | None]], *, percent: bool) -> str:
    """A dot per row of a name, a value (of a share of 1 with `percent`) and the ends of its interval, if there is one
    (SVG)."""
    ends = [end for _, value, bounds in rows for end in bounds or (value,)]
    low, high = min(ends), max(ends)
    span = (high - low) or abs(high) or 1.0

    def x(value: float) -> float:
        return _LABELS + 12 + (value - low) / span * (_WIDTH - _LABELS - 92)

    parts = []
    for number, (name, value, bounds) in enumerate(rows):
        y = _ROW * number + 18
        text = f"{100 * value:.2f} %" if percent else f"{value:,.4g}"
        parts.append(f'<text x="{_LABELS}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if bounds:
            ends_of_bar = f"{x(bounds[0]):.1f},{y} {x(bounds[1]):.1f},{y}"
            parts.append(f'<polyline points="{ends_of_bar}" style="stroke:{_COLOURS[0]};opacity:.5"/>')
        ends = f" ({100 * bounds[0]:.2f} to {100 * bounds[1]:.2f})" if bounds and percent else ""
        title = f"<title>{escape(f'{name}: {text}{ends}')}</title>"
        style = f'style="fill:{_COLOURS[0]}"'
        parts.append(
            f'<circle cx="{x(value):.1f}" cy="{y}" r="4" {style}>{title}</circle>'
            f'<text x="{_WIDTH - 70}" y="{y + 4}">{text}</text>'
        )
    height = _ROW * len(rows) + 12
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Values by row">{"".join(parts)}</svg>'


def curves(study: Study, cells: Sequence[CellResult], metric: str) -> str:
    """A metric over the study's axis, a line per group of cells with intervals (SVG and a legend); counts that differ
    by orders of magnitude have logarithmic axes."""
    percent = not is_count(metric)
    lines: dict[tuple[str, str], list[tuple[float, float, tuple[float, float]]]] = {}
    for cell in cells:
        x, mean = cell.number(study.x, metric), cell.mean(metric)
        if x is not None and mean is not None:
            key = (_series(cell, study.x), _line(cell, cells, study.x))
            lines.setdefault(key, []).append((x, mean, cell.bounds(metric) or (mean, mean)))
    drawn = [point for points in lines.values() for point in points]
    xs, ys = [x for x, _, _ in drawn], [y for _, y, _ in drawn]
    both_log = not percent and min(*xs, *ys) > 0 and max(ys) / min(ys) > _WIDE
    log = not both_log and min(xs) > 0 and (study.x == "flops" or max(xs) / min(xs) > _WIDE)
    least = min(ys) if both_log else -math.inf  # an interval that goes below has no place on a logarithmic axis
    scaled = {
        key: sorted({(math.log10(x) if log else x, y, max(low, least), high) for x, y, (low, high) in points})
        for key, points in lines.items()
    }
    series = list(dict.fromkeys(name for name, _ in scaled))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(series)}
    ends = [(x, end) for points in scaled.values() for x, _, low, high in points for end in (low, high)]
    label = "FLOPs per run" if study.x == "flops" else study.x
    axis = f"{label}, as a power of ten" if log else label
    panel = Panel(ends, axis, metric, percent=percent, log=both_log)
    parts = []
    for (name, line), points in scaled.items():
        colour = colours[name]
        joined = panel.polyline([(x, y) for x, y, _, _ in points])
        parts.append(f'<polyline points="{joined}" style="stroke:{colour};stroke-width:1.6"/>')
        for x, y, low, high in points:
            bar = panel.polyline([(x, low), (x, high)])
            parts.append(f'<polyline points="{bar}" style="stroke:{colour};opacity:.5"/>')
            left, top = panel.position((x, y))
            title = f"<title>{escape(f'{line or name}: {panel.describe((x, y))}')}</title>"
            parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.4" style="fill:{colour}">{title}</circle>')
    legend = "".join(f'<span><i style="background:{colours[name]}"></i>{escape(name)}</span>' for name in series)
    return panel.svg(parts, f"{metric} over {label}") + f'<p class="key">{legend}</p>'


def _line(cell: CellResult, cells: Sequence[CellResult], x: str) -> str:
    """The point of a series whose cells are joined, such as a model at several budgets; empty where each has one cell,
    and a line joins the points of the series."""
    series = [settings_text(_of_point(other)) for other in cells if _series(other, x) == _series(cell, x)]
    return settings_text(_of_point(cell)) if len(set(series)) < len(series) else ""


def _of_point(cell: CellResult) -> dict[str, Any]:
    return {key: value for key, value in cell.cell.changes.items() if key not in cell.cell.axes}


def _series(cell: CellResult, x: str) -> str:
    """What a colour stands for: a group, else all labels but the axis."""
    labels = cell.labels
    if x in ("flops", "seconds") and "group" in labels:
        return str(labels["group"])
    rest = [value for key, value in cell.cell.changes.items() if key != x]
    named = labels["name"] if "start" in labels or not rest else ", ".join(map(str, rest))
    return str(named)
