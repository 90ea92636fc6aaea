"""Our own format: a safetensors file with our names, and the card in its metadata."""

from __future__ import annotations

import torch

from vitral.architecture import Architecture
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.table import Contents, Entry, Format
from vitral.models.build import build

CARD = "vitral.card"


def card_of(contents: Contents) -> Card:
    return Card.from_json(contents.metadata[CARD])


def entries(architecture: Architecture) -> list[Entry]:
    """Every array of the model, under its own name."""
    with torch.device("meta"):
        state = build(architecture).state_dict()
    return [Entry(key, key, tuple(array.shape)) for key, array in state.items()]


def _preprocess(contents: Contents, architecture: Architecture) -> Preprocess | None:
    return card_of(contents).preprocess


OWN = Format(
    name="vitral",
    title="vitral safetensors, card inside",
    container="safetensors",
    recognises=lambda contents: CARD in contents.metadata,
    architecture=lambda contents: card_of(contents).architecture,
    entries=entries,
    unsupported_reason=lambda architecture: None,
    positions=("none", "1d", "2d", "relative", "sincos2d"),
    class_row=lambda c: "either",
    preprocess=_preprocess,
    class_names=lambda contents: card_of(contents).class_names,
)
