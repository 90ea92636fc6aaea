"""Every class of transformers that vitral reads: its output is transformers' own, and transformers reads what we write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import HF_CASES, HfCase
from oracles import gap, hf_loaded, pictures, run, written
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.checkpoints.weights import describe, read

IMAGES = pictures(3, 3, 32, 32)
LIMIT = 1e-5  # of the largest output


def difference(ours: Tensor, theirs: Tensor) -> float:
    return gap(ours, theirs) / float(theirs.abs().max())


@pytest.mark.parametrize("name", HF_CASES)
def test_a_model_of_transformers_is_read_and_written(name, tmp_path):
    case = HF_CASES[name]
    model = case.build()
    found = read(case.save(model, tmp_path / "theirs"))
    expected = case.forward(model, IMAGES)
    assert found.card.format == case.format
    assert difference(run(found.weights, IMAGES), expected) <= LIMIT
    assert case.skipped in "; ".join(found.card.changes)
    if case.written != "none":
        _check_written(case, found.weights, expected, tmp_path / "ours")


def _check_written(case: HfCase, weights: Any, expected: Tensor, folder: Path) -> None:
    written(weights, folder, case.format)
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert kind == (case.written or case.model)
    back = hf_loaded(kind, folder)
    output = HF_CASES["CLIP, projection"].output if kind == "CLIPVisionModelWithProjection" else case.output
    if case.written and kind != "CLIPVisionModelWithProjection":
        output = next(other.output for other in HF_CASES.values() if other.model == kind)
    with torch.no_grad():
        theirs = output(back, IMAGES)
    assert difference(theirs, expected) <= LIMIT
    assert describe(folder).format.name == case.format
    assert describe(folder).card.architecture == weights.architecture
