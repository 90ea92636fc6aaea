"""The interactive viewer of a page: images with attention and attribution maps by layer, head and patch.

Attention is embedded as bytes: each row of weights over the patches is divided by its maximum and rounded to 255 steps,
so a displayed weight is off by at most 1/510 of the maximum of its row.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.inspection.image_inspection import ImageInspection
from vitral.report.charts import photo_uri
from vitral.report.evaluation import caption

BUDGET = 4_000_000  # characters for attention; keeps a page of 8 photographs below 5 MB
MAPS = {
    "rollout": ("Rollout", "Attention of all layers multiplied: where the information in the output comes from."),
    "evidence": (
        "Evidence",
        "Patches that support the top class: attention times its gradient, multiplied over the layers.",
    ),
    "occlusion": ("Evidence", "How much the probability of the top class falls when a patch is masked."),
    "norms": (
        "Token norms",
        "The L2 norm of each patch token after the last layer; outliers often hold global information.",
    ),
}


class ViewerImage(NamedTuple):
    """An image in the viewer, with its predictions and maps."""

    name: str
    picture: np.ndarray  # uint8 (h, w, c), after preprocessing
    inspection: ImageInspection
    predictions: tuple[tuple[str, float], ...]  # the top classes and their probabilities
    truth: tuple[str, ...] = ()  # the true classes, if they are known
    sigmoid: bool = False  # each class has its own probability; otherwise they sum to 1 (softmax)


class ViewerLayers(NamedTuple):
    """The layers whose attention of single patches is embedded: per head, or averaged over heads."""

    per_head: tuple[int, ...]
    averaged: tuple[int, ...]


def choose_layers(
    depth: int, heads: int, patches: int, images: int, requested: Sequence[int] = (), budget: int = BUDGET
) -> ViewerLayers:
    """Choose the layers, from 0, whose single patches are embedded: head means first, then heads.

    The layer that the viewer opens on, unless it has bright corners, comes first, then the last and the first layer.
    The attention of the pooled output is embedded for all layers and heads, and counts in the budget of characters as
    well. Layers that are requested are embedded per head whatever their size.
    """
    layer_size = images * (_base64_length(patches * patches) + _base64_length(4 * patches))
    pooled_size = images * (_base64_length(depth * heads * patches) + _base64_length(4 * depth * heads))
    left = budget - pooled_size - len(set(requested)) * heads * layer_size
    order = [layer for layer in _spread(depth) if layer not in requested]
    averaged = order[: max(left // layer_size, 0)] if layer_size else order
    left -= len(averaged) * layer_size
    count = max(left // ((heads - 1) * layer_size), 0) if heads > 1 and layer_size else len(averaged)
    upgraded = [] if requested else averaged[:count]
    rest = [layer for layer in averaged if layer not in upgraded]
    return ViewerLayers(tuple(sorted({*requested, *upgraded})), tuple(sorted(rest)))


def viewer_data(images: Sequence[ViewerImage], pooled_name: str) -> dict[str, Any]:
    """The data for the script, empty without images; the pixels are in the page's own img elements."""
    if not images:
        return {}
    first = images[0].inspection
    layers, heads = (0, 0) if first.pooled is None else first.pooled.shape[:2]
    return {
        "grid": first.grid,
        "side": first.side,
        "layers": layers,
        "heads": heads,
        "start": opening(images)[1],
        "pooled": pooled_name,
        "images": [_image_data(image) for image in images],
    }


def viewer(images: Sequence[ViewerImage], pooled_name: str) -> str:
    """The viewer's HTML, which the script fills in."""
    thumbs = "".join(
        f'<label class="thumb" title="{escape(image.name)}"><input type="radio" name="image" value="{i}"'
        f"{' checked' if i == 0 else ''}>"
        f'<img src="{photo_uri(image.picture)}" alt="{escape(image.name)}">{_caption(image)}</label>'
        for i, image in enumerate(images)
    )
    inspection = images[0].inspection
    attention = inspection.pooled is not None
    maps = {"attention": ("Attention", "Attention weights of the chosen token in one layer.")} if attention else {}
    maps |= {name: MAPS[name] for name in MAPS if name in inspection.maps}
    maps["colours"] = ("Features", "Principal components of the patch features as red, green and blue.")
    modes = "".join(
        f'<label title="{escape(about)}"><input type="radio" name="mode" value="{name}"'
        f"{' checked' if name == opening(images)[0] else ''}><span>{escape(label)}</span></label>"
        for name, (label, about) in maps.items()
    )
    return f"""<div class="viewer">
<div class="strip" role="radiogroup" aria-label="Images">{thumbs}</div>
<div class="stage"><canvas id="stage" tabindex="0" role="application" aria-roledescription="image"
 aria-label="The image with a map over its patches" aria-describedby="says hint"></canvas>
<div class="legend"><span id="least">0</span><canvas id="ramp" width="256" height="1" aria-hidden="true"></canvas>
<span id="most"></span></div>
<p class="hint" id="hint">{_hint(attention)}</p></div>
<div class="controls">
<fieldset class="modes"><legend>Show</legend>{modes}</fieldset>
<p id="about" class="about"></p>
{_sliders(images, pooled_name) if attention else ""}
<label class="slider" for="strength">Opacity of the map <output id="strength-said"></output>
<input type="range" id="strength" min="0" max="100" value="50"></label>
<label class="check"><input type="checkbox" id="smooth"> Interpolate between patches</label>
<p id="says" class="says" role="status" aria-live="polite"></p>
<h3>{_prediction_heading(images[0])}</h3><ol id="answers" class="answers"></ol>
</div>
{_overview(pooled_name) if attention else ""}
</div>"""


def opening(images: Sequence[ViewerImage]) -> tuple[str, int]:
    """The map and the layer, counted from 0, that the viewer opens on.

    Images whose classes are known are there for their predictions, so that they open on the evidence for them; others
    open on attention, unless it is bright in the corners in all layers.
    """
    first = images[0]
    attributions = [name for name in ("evidence", "occlusion", "rollout") if name in first.inspection.maps]
    if first.inspection.pooled is None:
        return (attributions or ["colours"])[0], 0
    depth = len(first.inspection.pooled)
    bright = np.array([_corners_are_bright(image.inspection) for image in images])  # (images, layers)
    # Three quarters of the depth: objects stand out there, while attention in the last layers is often diffuse.
    order = sorted(range(depth), key=lambda layer: (bright[:, layer].sum(), abs(layer - _usual_layer(depth))))
    clear = [layer for layer in order if not bright[0, layer]]
    if attributions and ((first.truth and first.predictions) or not clear):
        return attributions[0], (clear or order)[0]
    return "attention", (clear or order)[0]


def _usual_layer(depth: int) -> int:
    return max(round(0.75 * depth) - 1, 0)


def _corners_are_bright(inspection: ImageInspection) -> np.ndarray:
    """(layers,) bool: whether a corner is the brightest patch of a layer's mean over heads, or two of the four are.

    Models without registers store global information in patches that show little, often in the corners (Darcet et al.
    2024, "Vision Transformers Need Registers"). Attention to them is large and says nothing about the image.
    """
    rows, columns = inspection.grid
    assert inspection.pooled is not None
    maps = inspection.pooled.mean(1)
    if min(rows, columns) < 3:  # half of the patches or more are corners
        return np.zeros(len(maps), bool)
    corners = [0, columns - 1, (rows - 1) * columns, rows * columns - 1]
    is_corner = np.isin(np.argsort(-maps, axis=1, kind="stable")[:, :4], corners)
    return is_corner[:, 0] | (is_corner.sum(1) >= 2)


def viewer_notes(images: Sequence[ViewerImage], pooled_name: str) -> str:
    """What is embedded in the page, and how exactly."""
    inspection = images[0].inspection
    if inspection.pooled is None:
        return "This model has no attention; its evidence is measured by masking one region at a time."
    depth, heads = inspection.pooled.shape[:2]
    per_head = [layer + 1 for layer, rows in sorted(inspection.rows.items()) if len(rows) == heads]
    averaged = [layer + 1 for layer, rows in sorted(inspection.rows.items()) if len(rows) != heads]
    kept = [f"per head for {_ranges(per_head)}"] if per_head else []
    kept += [f"as the mean over heads for {_ranges(averaged)}"] if averaged else []
    single = f"that of single patches {' and '.join(kept)}" if kept else "that of single patches is left out"
    layers = f"{depth} layer{'s' * (depth > 1)} and {heads} head{'s' * (heads > 1)}"
    return (
        f"Attention of {pooled_name} is shown for {layers}; {single}. "
        "A patch is as bright as the square root of its weight, relative to the largest weight of the map; weights are "
        "stored in 255 steps. "
        "Attention to tokens other than patches (class token, registers) is not drawn."
    )


def quantized(rows: np.ndarray) -> dict[str, str]:
    """Quantize (..., n) of values >= 0 to bytes per row, with the value of step 255 of each row; both as base64."""
    high = rows.max(-1, keepdims=True).astype(np.float32)
    steps = np.rint(255 * rows / np.maximum(high, np.finfo(np.float32).tiny)).astype(np.uint8)
    return {"steps": _base64(steps), "high": _base64(high.astype("<f4"))}


def _image_data(image: ViewerImage) -> dict[str, Any]:
    inspection = image.inspection
    data: dict[str, Any] = {
        "name": image.name,
        "truth": image.truth,
        "answers": [[name, round(probability, 5)] for name, probability in image.predictions],
        "maps": {
            name: [float(f"{value:.4g}") for value in values.flatten()] for name, values in inspection.maps.items()
        },
        "colours": np.rint(255 * inspection.colours).astype(int).flatten().tolist(),
    }
    if inspection.pooled is not None:
        data["pooled"] = quantized(inspection.pooled)
        data["rows"] = {str(layer): {"heads": len(rows), **quantized(rows)} for layer, rows in inspection.rows.items()}
    return data


def _caption(image: ViewerImage) -> str:
    """A line below an image: "cat → dog, 44 %", or the prediction alone if not one class is known to be true."""
    if not image.predictions:
        return ""
    name, probability = image.predictions[0]
    return f"<span>{caption([*image.truth, name] if len(image.truth) == 1 else [name], probability)}</span>"


def _sliders(images: Sequence[ViewerImage], pooled_name: str) -> str:
    pooled = images[0].inspection.pooled
    layers, heads = (0, 0) if pooled is None else pooled.shape[:2]
    return f"""<div id="attention-controls">
<label class="slider" for="layer">Layer <output id="layer-said"></output>
<input type="range" id="layer" min="1" max="{layers}" value="{opening(images)[1] + 1}"></label>
<label class="slider" for="head">Head <output id="head-said"></output>
<input type="range" id="head" min="0" max="{heads}" value="0"></label>
<button type="button" id="pooled" aria-pressed="true">Show {escape(pooled_name)}</button></div>"""


def _prediction_heading(image: ViewerImage) -> str:
    if not image.predictions:
        return "Image"
    return "Predictions (sigmoid, per class)" if image.sigmoid else "Predictions"


def _hint(attention: bool) -> str:
    if not attention:
        return "Move over the image, or use the arrow keys, to read the value of a region."
    return (
        "Move over the image to read the value of a patch or, in Attention, to see what it attends to; click to keep "
        "it. Arrow keys move, Escape goes back."
    )


def _overview(pooled_name: str) -> str:
    return f"""<div class="overview"><h3>All layers and heads</h3>
<p class="about">Attention of {escape(pooled_name)}: layers from left to right, heads from top to bottom.
Click one to enlarge it.</p>
<div class="scroll"><div class="tiles"><canvas id="overview" aria-hidden="true"></canvas><i id="tile"></i></div></div>
</div>"""


def _spread(depth: int) -> list[int]:
    """All layers: the usual one to open on, the last, the first, then always the one farthest from those before."""
    order = list(dict.fromkeys([_usual_layer(depth), depth - 1, 0]))
    while len(order) < depth:
        left = [layer for layer in range(depth) if layer not in order]
        order.append(max(left, key=lambda layer: min(abs(layer - other) for other in order)))
    return order


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "layers 1-3, 7" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(numbers) > 1)} {text}"


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _base64_length(count: int) -> int:
    return 4 * -(-count // 3)
