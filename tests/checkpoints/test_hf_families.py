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
from vitral.errors import UserError

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


# One of each family with all of its tensors, and those whose absence leaves a complete file of another model.
COMPLETE = {
    "ViT": set(),
    "MSN": set(),
    "I-JEPA": set(),
    "MAE": set(),
    "DINOv2, classifier, SwiGLU": {"dinov2.embeddings.mask_token"},
    "DINOv3": {"embeddings.mask_token"},
    "CLIP, projection": {"visual_projection.weight"},
    "CLIP, classifier": {"vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"},
    "SigLIP": set(),
    "SigLIP 2": set(),
    "BEiT": set(),
    "data2vec, features": set(),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_every_tensor_must_exist_with_its_shape(name, tmp_path):
    case = HF_CASES[name]
    file = case.save(case.build(), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    accepted = set()
    for key in tensors:
        for changed in ({}, {key: torch.cat([tensors[key], tensors[key]])}):
            save_file({**{other: tensors[other] for other in tensors if other != key}, **changed}, file)
            try:
                read(tmp_path)
            except UserError:
                continue
            accepted.add(key)
    assert accepted == COMPLETE[name]


@pytest.mark.parametrize("name", HF_CASES)
def test_names_in_memory_are_read_too(name, tmp_path):
    case = HF_CASES[name]
    model = case.build()
    case.save(model, tmp_path)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert difference(run(read(tmp_path).weights, IMAGES), case.forward(model, IMAGES)) <= LIMIT
