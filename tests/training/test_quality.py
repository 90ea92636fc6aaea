"""Half precision, kernels and recorded steps do not change how a model learns: its loss follows that of float32."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (
    *("steps=200", "batch=64", "shape.depth=2", "shape.width=32", "shape.heads=2", "shape.mlp=64", "optim.lr=2e-3"),
    *(
        "evaluate_every=200",
        "workers=0",
        "data.train_transform=decode|resize({size})",
        "data.eval_transform=decode|resize({size})",
    ),
    "data.augment=shift(1)",
)


def losses(folder: Path, *words: str) -> np.ndarray:
    """(10,): the mean losses of 20 steps each."""
    vitral.train("digits", model="ViT-Ti/2@8", set=[*SMALL, *words], out=folder, device=DEVICE)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = np.array([line["loss"] for line in lines if "loss" in line])
    assert len(found) == 200
    return found.reshape(10, 20).mean(axis=1)


@pytest.mark.slow
def test_two_hundred_steps_follow_the_loss_of_float32(tmp_path):
    """Noise is what other weights to start with and another order of the images make of it: over three seeds, since two
    of them can come close by chance."""
    pytest.importorskip("sklearn")
    exact = [losses(tmp_path / f"float32-{seed}", "precision=float32", f"seed={seed}") for seed in range(3)]
    half = [losses(tmp_path / f"bfloat16-{seed}", "precision=bfloat16", f"seed={seed}") for seed in range(3)]
    noise = np.mean([np.abs(one - other).mean() for one, other in combinations(exact, 2)])
    distance = np.mean([np.abs(one - other).mean() for one, other in zip(half, exact, strict=True)])
    assert all(curve[-1] < 0.8 * curve[0] for curve in exact)  # they learn
    assert 0 < distance < 0.5 * noise
