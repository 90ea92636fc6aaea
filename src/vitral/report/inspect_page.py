"""The page of `vitral inspect`: attention and attribution maps of images, learned filters, attention distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from vitral.report.charts import dot_chart, heat_map, image_grid, image_tag
from vitral.report.page import Section, fact_table, page, panels
from vitral.report.viewer import ViewerImage, viewer, viewer_data, viewer_notes

GRID_PIXELS = 560  # approximate size that a grid of small tiles is enlarged to
_INTRODUCTION = {
    True: "A Vision Transformer splits an image into patches, and every patch attends to all others. "
    "This page shows where the model attends, and the filters and positions it has learned.",
    False: "A ResNet passes an image through layers of convolutions. "
    "This page shows which regions its prediction depends on, and the filters of its first layer.",
}


class LearnedWeights(NamedTuple):
    """What a model's weights show without any image."""

    filters: np.ndarray  # (count, p, p, c) from 0 to 1
    explained: float  # share of the filters' variance that these components explain together
    source: str  # which filters they are
    similarity: np.ndarray | None  # (h, w, h, w), where positions are embedded


class AttentionDistance(NamedTuple):
    """Mean attention distance of every layer and head."""

    distance: np.ndarray  # (layers, heads) in pixels
    images: int  # averaged over
    side: int  # pixels of the longer side of an image
    axial: bool


def inspect_page(
    title: str,
    model: Mapping[str, str],
    learned: LearnedWeights,
    images: Sequence[ViewerImage] = (),
    pooled_name: str = "",
    distance: AttentionDistance | None = None,
    has_attention: bool = True,
) -> str:
    """Write the page about a model and images.

    Args:
        title: heading of the page.
        model: facts for the table of the model.
        learned: filters and position similarities.
        images: images with their predictions and maps.
        pooled_name: what the model pools at the end, such as "the class token".
        distance: mean attention distance over the images; None for a ResNet or without images.
        has_attention: False for a ResNet.

    Returns:
        HTML.
    """
    sections = [viewer_section(images, pooled_name)] if images else []
    sections.append(weights_section(learned))
    if distance is not None:
        sections.append(_distance_section(distance))
    sections.append(Section("model", "Model", "", fact_table(model)))
    lead = f'<p class="lead">{_INTRODUCTION[has_attention]}</p>'
    return page(title, lead, sections, viewer_data(images, pooled_name))


def viewer_section(images: Sequence[ViewerImage], pooled_name: str, title: str = "", about: str = "") -> Section:
    """The viewer of attention and attribution maps; without `title` and `about` they follow from the model."""
    has_attention = images[0].inspection.pooled is not None
    if not about and not has_attention:
        about = "Choose an image: bright regions are those that the prediction depends on."
    about = about or (
        "Choose an image, a layer and a head: bright patches get the most attention. "
        "The sentence beside the image states the numbers."
    )
    notes = f'<p class="hint">{escape(viewer_notes(images, pooled_name))}</p>'
    title = title or ("Attention maps" if has_attention else "Occlusion maps")
    return Section("look", title, about, viewer(images, pooled_name) + notes)


def weights_section(learned: LearnedWeights) -> Section:
    """Embedding filters and position similarity: the left and the centre of the paper's Figure 7."""
    tiles = np.rint(255 * learned.filters).astype(np.uint8)
    grid = image_grid(tiles, min(7, len(tiles)), GRID_PIXELS)
    caption = f"The first {len(tiles)} principal components of {learned.source}"
    charts = [(f"{caption}, {learned.explained:.0%} of the variance", image_tag(grid, caption))]
    title, about = "Learned filters", "The patterns that the first layer responds to, strongest first."
    if learned.similarity is not None and learned.similarity[0, 0].size > 1:
        title = "Learned filters and position embeddings"
        about += " Beside them, one tile per patch position: its cosine similarity to all positions."
        rows, columns = learned.similarity.shape[:2]
        tiles = heat_map((learned.similarity.reshape(-1, rows, columns) + 1) / 2)
        caption = (
            f"Position similarity: {rows} by {columns} tiles, one per position, bright where embeddings are similar"
        )
        grid = image_grid(tiles, columns, GRID_PIXELS)
        charts.append(("Similarity of the position embeddings", image_tag(grid, caption)))
    return Section("learned", title, about, panels(*charts))


def _distance_section(measured: AttentionDistance) -> Section:
    """The right of Figure 7, and Figure 11."""
    layer = "layer (each block: along rows, then along columns)" if measured.axial else "layer"
    chart = dot_chart(measured.distance, x=layer, y="pixels", highest=measured.side / 2, row="layer", dot="head")
    about = (
        "Each dot is one head: the distance between a patch and the patches it attends to, weighted by attention. "
        f"Averaged over {measured.images} image{'s' * (measured.images != 1)} (the paper uses 128). Tokens other than "
        "patches are left out, and the remaining weights of each row are normalised to sum to 1."
    )
    return Section("reach", "Attention distance", about, panels(("Mean attention distance", chart)))
