"""The page of `vitral inspect`: look through a model at images, and see what it has learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from vitral.report.charts import dot_chart, heat, picture_tag, tiled
from vitral.report.page import Section, facts, page, panels
from vitral.report.viewer import Shown, viewer, viewer_data, viewer_notes

SHEET = 560  # pixels that a sheet of small tiles is enlarged to, about
LEADS = {
    True: "A Vision Transformer cuts a picture into patches and lets every patch look at all others. "
    "This page shows where it looks, and what it has learned to look for.",
    False: "A ResNet passes a picture through small filters, layer after layer. "
    "This page shows which places its answer rests on, and what its first filters look for.",
}


class Learned(NamedTuple):
    """What a model holds without any image."""

    filters: np.ndarray  # (count, p, p, c) from 0 to 1
    explained: float  # the share of the filters' variance that these components have together
    source: str  # whose filters they are
    similarity: np.ndarray | None  # (h, w, h, w), where positions are embedded


class Reach(NamedTuple):
    """How far attention reaches."""

    distance: np.ndarray  # (layers, heads) in pixels
    images: int  # averaged over
    side: int  # pixels of the longer side of an image
    axial: bool


def inspect_page(
    title: str,
    model: Mapping[str, str],
    learned: Learned,
    shown: Sequence[Shown] = (),
    pooled_name: str = "",
    reach: Reach | None = None,
    attends: bool = True,
) -> str:
    """HTML. `model` are the facts for its table, `pooled_name` says what reads the patches at the end.

    A model that does not attend is a ResNet.
    """
    sections = [viewer_section(shown, pooled_name)] if shown else []
    sections.append(learned_section(learned))
    if reach is not None:
        sections.append(reach_section(reach))
    sections.append(Section("model", "The model", "", facts(model)))
    return page(title, f'<p class="lead">{LEADS[attends]}</p>', sections, viewer_data(shown, pooled_name))


def viewer_section(
    shown: Sequence[Shown], pooled_name: str, title: str = "ImageInspection through it", about: str = ""
) -> Section:
    notes = f'<p class="hint">{escape(viewer_notes(shown, pooled_name))}</p>'
    if not about and shown[0].look.pooled is None:
        about = "Choose a picture: bright places are those that the answer rests on."
    about = about or (
        "Choose a picture, a layer and a head: bright patches are those that the model reads from, "
        "and the sentence with the picture says it in words."
    )
    return Section("look", title, about, viewer(shown, pooled_name) + notes)


def learned_section(learned: Learned) -> Section:
    """The left and the centre of the paper's Figure 7."""
    tiles = np.rint(255 * learned.filters).astype(np.uint8)
    sheet = tiled(tiles, min(7, len(tiles)), SHEET)
    said = f"The first {len(tiles)} principal components of {learned.source}"
    charts = [(f"{said}, with {learned.explained:.0%} of the variance", picture_tag(sheet, said))]
    about = "The patterns of colour and shape that it reads a picture with, strongest first."
    if learned.similarity is not None and learned.similarity[0, 0].size > 1:
        about += " Beside them, one tile for each place of the picture, showing which other places seem near to it."
        rows, columns = learned.similarity.shape[:2]
        tiles = heat((learned.similarity.reshape(-1, rows, columns) + 1) / 2)
        said = f"Position similarity: {rows} by {columns} tiles, one for each place, bright where positions are alike"
        charts.append(("How alike the position embeddings are", picture_tag(tiled(tiles, columns, SHEET), said)))
    return Section("learned", "What it has learned", about, panels(*charts))


def reach_section(reach: Reach) -> Section:
    """The right of Figure 7, and Figure 11."""
    layer = "layer (each block: along rows, then along columns)" if reach.axial else "layer"
    chart = dot_chart(reach.distance, x=layer, y="pixels", highest=reach.side / 2, row="layer", dot="head")
    about = (
        "Each dot is a head: the distance between a patch and those it looks at, weighted by attention. "
        f"Averaged over {reach.images} image{'s' * (reach.images != 1)} (the paper takes 128); tokens that are no "
        "patches are left out, and the rest of each row is scaled to sum to 1."
    )
    return Section("reach", "How far it looks", about, panels(("Mean attention distance", chart)))
