"""The part of a page where a person looks through the model: pictures, sliders, and where each patch looks.

Attention travels as bytes: each row of weights over the patches is divided by its largest weight and rounded to 255
steps, so a shown weight is off by at most 1/510 of the largest one of its row.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.inspection.image_inspection import ImageInspection
from vitral.report.charts import photo_uri

BUDGET = 12_000_000  # characters for the attention of single patches; a page of 8 images stays below 15 MB
MAPS = {
    "rollout": ("Rollout", "Attention of all layers multiplied together: where the answer's information comes from."),
    "evidence": (
        "Evidence",
        "Patches that speak for the likeliest class: attention times its gradient, followed down.",
    ),
    "occlusion": ("Evidence", "How much the probability of the likeliest class falls when a patch is painted over."),
    "norms": (
        "Token norms",
        "The length of each patch's vector after the last layer; outliers are notes of the model.",
    ),
}


class Shown(NamedTuple):
    """An image to show."""

    name: str
    picture: np.ndarray  # uint8 (h, w, c), as the model sees it
    look: ImageInspection
    answers: tuple[tuple[str, float], ...]  # the likeliest classes and their probabilities
    truth: tuple[str, ...] = ()  # the classes it really has, as far as they are known
    alone: bool = False  # each probability is of its class by itself (sigmoid), not a share of one (softmax)


class Plan(NamedTuple):
    """The layers for which the rows of single patches are kept: by head, or as the mean over heads."""

    headed: tuple[int, ...]
    averaged: tuple[int, ...]


def plan_layers(
    depth: int, heads: int, patches: int, images: int, asked: Sequence[int] = (), budget: int = BUDGET
) -> Plan:
    """Means for as many layers as the budget allows, then single heads: the last layer, the first, those between.

    Layers that are asked for come with their heads, whatever they take.
    """
    one = images * (_base64_length(patches * patches) + _base64_length(4 * patches))
    left = budget - len(set(asked)) * heads * one
    order = [layer for layer in _spread(depth) if layer not in asked]
    averaged = order[: max(left // one, 0)] if one else order
    left -= len(averaged) * one
    more = max(left // ((heads - 1) * one), 0) if heads > 1 and one else len(averaged)
    upgraded = [] if asked else averaged[:more]
    rest = [layer for layer in averaged if layer not in upgraded]
    return Plan(tuple(sorted({*asked, *upgraded})), tuple(sorted(rest)))


def viewer_data(shown: Sequence[Shown], pooled_name: str) -> dict[str, Any]:
    """What the script reads, nothing without images; the pictures themselves stand in the page."""
    if not shown:
        return {}
    first = shown[0].look
    layers, heads = (0, 0) if first.pooled is None else first.pooled.shape[:2]
    return {
        "grid": first.grid,
        "side": first.side,
        "layers": layers,
        "heads": heads,
        "start": start_layer(layers),
        "pooled": pooled_name,
        "images": [_image_data(one) for one in shown],
    }


def viewer(shown: Sequence[Shown], pooled_name: str) -> str:
    """The viewer as HTML, ready for the script to fill in."""
    thumbs = "".join(
        f'<label class="thumb"><input type="radio" name="image" value="{i}"{" checked" if i == 0 else ""}>'
        f'<img src="{photo_uri(one.picture)}" alt="{escape(one.name)}"></label>'
        for i, one in enumerate(shown)
    )
    look = shown[0].look
    attention = look.pooled is not None
    kinds = {"attention": ("Attention", "Where the chosen token looks in one layer.")} if attention else {}
    kinds |= {name: MAPS[name] for name in MAPS if name in look.maps}
    kinds["colours"] = ("Colours", "The main directions of the patches' features as red, green and blue: like is like.")
    modes = "".join(
        f'<label title="{escape(about)}"><input type="radio" name="mode" value="{name}"'
        f"{' checked' if i == 0 else ''}><span>{escape(label)}</span></label>"
        for i, (name, (label, about)) in enumerate(kinds.items())
    )
    return f"""<div class="viewer">
<div class="strip" role="radiogroup" aria-label="Images">{thumbs}</div>
<div class="stage"><canvas id="stage" tabindex="0" role="application" aria-roledescription="picture"
 aria-label="The image with a map over its patches" aria-describedby="says hint"></canvas>
<div class="legend"><span id="least">0</span><canvas id="ramp" width="256" height="1" aria-hidden="true"></canvas>
<span id="most"></span></div>
<p class="hint" id="hint">{_hint(attention)}</p></div>
<div class="controls">
<fieldset class="modes"><legend>Show</legend>{modes}</fieldset>
<p id="about" class="about"></p>
{_sliders(look, pooled_name) if attention else ""}
<label class="slider" for="strength">Strength of the map <output id="strength-said"></output>
<input type="range" id="strength" min="0" max="100" value="75"></label>
<label class="check"><input type="checkbox" id="smooth"> Smooth between patches</label>
<p id="says" class="says" role="status" aria-live="polite"></p>
<h3>{_asked(shown[0])}</h3><ol id="answers" class="answers"></ol>
</div>
{_overview(pooled_name) if attention else ""}
</div>"""


def start_layer(layers: int) -> int:
    """Three quarters of the way up: the objects are found there, and the last layers often look at nothing."""
    return max(round(0.75 * layers) - 1, 0)


def viewer_notes(shown: Sequence[Shown], pooled_name: str) -> str:
    """What the viewer keeps and how exactly, in a sentence or two."""
    look = shown[0].look
    if look.pooled is None:
        return "This model has no attention; its evidence is measured by painting over one place at a time."
    depth, heads = look.pooled.shape[:2]
    headed = [layer + 1 for layer, rows in sorted(look.rows.items()) if len(rows) == heads]
    averaged = [layer + 1 for layer, rows in sorted(look.rows.items()) if len(rows) != heads]
    kept = [f"by head for {_ranges(headed)}"] if headed else []
    kept += [f"as the mean over heads for {_ranges(averaged)}"] if averaged else []
    single = f"that of single patches {' and '.join(kept)}" if kept else "that of single patches is left out"
    return (
        f"Kept here: the attention of {pooled_name} for all {depth} layers and {heads} heads, {single}. "
        "Weights are rounded to 255 steps of the largest in their row; brightness is their square root. "
        "What goes to tokens that are no patches (class token, registers) has no place in the picture."
    )


def packed(rows: np.ndarray) -> dict[str, str]:
    """(..., n) at least 0 -> bytes of n steps a row, and the value of step 255 of each row, both as base64."""
    high = rows.max(-1, keepdims=True).astype(np.float32)
    steps = np.rint(255 * rows / np.maximum(high, np.finfo(np.float32).tiny)).astype(np.uint8)
    return {"steps": _base64(steps), "high": _base64(high.astype("<f4"))}


def _image_data(one: Shown) -> dict[str, Any]:
    look = one.look
    data: dict[str, Any] = {
        "name": one.name,
        "truth": one.truth,
        "answers": [[name, round(share, 5)] for name, share in one.answers],
        "maps": {name: [float(f"{value:.4g}") for value in found.flatten()] for name, found in look.maps.items()},
        "colours": np.rint(255 * look.colours).astype(int).flatten().tolist(),
    }
    if look.pooled is not None:
        data["pooled"] = packed(look.pooled)
        data["rows"] = {str(layer): {"heads": len(rows), **packed(rows)} for layer, rows in look.rows.items()}
    return data


def _sliders(look: ImageInspection, pooled_name: str) -> str:
    layers, heads = look.pooled.shape[:2] if look.pooled is not None else (0, 0)
    return f"""<div id="attention-controls">
<label class="slider" for="layer">Layer <output id="layer-said"></output>
<input type="range" id="layer" min="1" max="{layers}" value="{start_layer(layers) + 1}"></label>
<label class="slider" for="head">Head <output id="head-said"></output>
<input type="range" id="head" min="0" max="{heads}" value="0"></label>
<button type="button" id="pooled" aria-pressed="true">Show {escape(pooled_name)}</button></div>"""


def _asked(one: Shown) -> str:
    if not one.answers:
        return "The picture"
    return "What it answers, each class by itself" if one.alone else "What it answers"


def _hint(attention: bool) -> str:
    if not attention:
        return "Move over the picture, or use the arrow keys, to read the value of a place."
    return "Move over the picture to see where a patch looks; click to keep it. Arrow keys move, Escape goes back."


def _overview(pooled_name: str) -> str:
    return f"""<div class="overview"><h3>Every layer and head at a glance</h3>
<p class="about">How {escape(pooled_name)} reads this image: layers from left to right, heads from top to bottom.
Click one to see it large.</p>
<div class="scroll"><div class="tiles"><canvas id="overview" aria-hidden="true"></canvas><i id="tile"></i></div></div>
</div>"""


def _spread(depth: int) -> list[int]:
    """The last layer, the first, then the middle of what lies farthest from those already named."""
    order = [depth - 1, 0][:depth]
    while len(order) < depth:
        left = [layer for layer in range(depth) if layer not in order]
        order.append(max(left, key=lambda layer: min(abs(layer - taken) for taken in order)))
    return order


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "layers 1-3, 7" """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(numbers) > 1)} {said}"


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _base64_length(count: int) -> int:
    return 4 * -(-count // 3)
