"""The page of `vitral check --model`: images whose label is suspicious, with thumbnails."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from vitral.data.check import SuspectLabel
from vitral.report.charts import image_tag
from vitral.report.pages import Section, headline_numbers, page

_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:1.25rem 1rem"


def label_errors_page(
    source: str, images: int, suspects: Sequence[SuspectLabel], thumbnails: Sequence[np.ndarray]
) -> str:
    """Write the page.

    Args:
        source: the data set.
        images: how many images were judged.
        suspects: all suspicious labels, the most suspicious first.
        thumbnails: uint8 (h, w, c) of the first of them; the others are left out of the page.

    Returns:
        HTML.
    """
    numbers = {
        "images": f"{images:,}",
        "suspicious labels": f"{len(suspects):,}",
        "likely wrong": f"{sum(suspect.likely for suspect in suspects):,}",
    }
    shown = list(zip(suspects, thumbnails, strict=False))
    about = (
        "The most suspicious first. Each image was judged by a linear classifier of the model's features that was "
        "fitted to other images only; a percentage is its probability. Not every one is an error: unusual images of "
        "a class are listed, too."
    )
    if len(shown) < len(suspects):
        about += f" {len(suspects) - len(shown):,} more are in the JSON output."
    cells = "".join(_figure(suspect, thumbnail) for suspect, thumbnail in shown)
    body = f'<div style="{_GRID}">{cells}</div>' if cells else "<p>No label is suspicious.</p>"
    title = f"Suspicious labels of {source}"
    return page(title, headline_numbers(numbers), [Section("labels", "Suspicious labels", about, body)], {})


def _figure(suspect: SuspectLabel, thumbnail: np.ndarray) -> str:
    description = f"{suspect.image}, labelled {suspect.label}"
    caption = (
        f"<strong>{escape(suspect.label)}</strong> {suspect.confidence:.0%}, looks like "
        f"<strong>{escape(suspect.suggested)}</strong> {suspect.suggested_confidence:.0%}"
        f"{' (likely wrong)' if suspect.likely else ''}<br><small>{escape(suspect.image)}</small>"
    )
    caption = f'<figcaption style="font-weight:400">{caption}</figcaption>'
    return f'<figure style="margin:0;overflow-wrap:anywhere">{image_tag(thumbnail, description)}{caption}</figure>'
