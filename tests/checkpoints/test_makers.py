"""The makers' own layouts: CLIP by torch's modules, DINOv3 and big_vision's SigLIP by those of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_cases import HF_CASES
from oracles import gap, outcome, outside, pictures, randomised, run, save_npz, written
from safetensors.torch import load_file, save_file
from timm_cases import build, relative_gap, shrunk
from torch import Tensor, nn

from vitral.architecture import RopeConfig, ViTConfig
from vitral.checkpoints import description
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import read
from vitral.errors import UserError

IMAGES = pictures(3, 3, 32, 32)
LIMIT = 1e-5


# ------------------------------------------------------------------------------------------------------------- CLIP


class QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ClipBlock(nn.Module):
    def __init__(self, width: int, heads: int, gelu: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 48))
        self.mlp.add_module("gelu", gelu)
        self.mlp.add_module("c_proj", nn.Linear(48, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ClipTower(nn.Module):
    """The image tower as the paper of CLIP describes it, with the names of its code."""

    def __init__(self, gelu: nn.Module, width: int = 32, heads: int = 4, embedding: int = 24) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(17, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = nn.Module()
        self.transformer.add_module("resblocks", nn.Sequential(*(ClipBlock(width, heads, gelu) for _ in range(2))))
        self.proj = nn.Parameter(torch.zeros(width, embedding))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv1(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_embedding.expand(len(images), 1, -1), patches], dim=1)
        x = self.ln_pre(tokens + self.positional_embedding)
        x = self.transformer.get_submodule("resblocks")(x)
        return self.ln_post(x[:, 0]) @ self.proj


def clip_tensors(tower: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model with two towers."""
    text = {"token_embedding.weight": torch.ones(5, 8), "transformer.resblocks.0.ln_1.weight": torch.ones(8)}
    text |= {"positional_embedding": torch.ones(7, 8), "logit_scale": torch.tensor(1.0)}
    return {**{f"visual.{key}": tensor for key, tensor in tower.state_dict().items()}, **text}


@pytest.mark.parametrize("openai", [True, False])
def test_clip_as_openai_names_it(openai, tmp_path):
    tower = randomised(ClipTower(QuickGelu() if openai else nn.GELU()))
    extra = {"input_resolution": torch.tensor(32), "vocab_size": torch.tensor(5)} if openai else {}
    torch.save(clip_tensors(tower) | extra, tmp_path / "clip.pt")
    with pytest.raises(UserError, match="does not state its number of heads"):
        read(tmp_path / "clip.pt")
    found = read(tmp_path / "clip.pt", hints=Hints(heads=4))
    with torch.no_grad():
        expected = tower(IMAGES)
    assert found.card.format == "open_clip"
    assert gap(run(found.weights, IMAGES), expected) / float(expected.abs().max()) <= LIMIT
    gelu = "quick GELU, as of OpenAI" if openai else "exact (erf) GELU, which OpenAI's models"
    assert gelu in "; ".join(found.card.changes)
    assert f"text tower not read ({4 + len(extra)} tensors)" in found.card.changes


class MeanClipTower(ClipTower):
    """OpenCLIP's pooling by the mean of the patches; without `ln_pre` as CLIPA, which normalises the mean."""

    def __init__(self, *, clipa: bool) -> None:
        super().__init__(nn.GELU())
        if clipa:
            self.add_module("ln_pre", nn.Identity())
        self.clipa = clipa

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv1(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_embedding.expand(len(images), 1, -1), patches], dim=1)
        x = self.transformer.get_submodule("resblocks")(self.ln_pre(tokens + self.positional_embedding))
        x = self.ln_post(x[:, 1:].mean(1)) if self.clipa else self.ln_post(x)[:, 1:].mean(1)
        return x @ self.proj


@pytest.mark.parametrize("clipa", [True, False])
def test_clip_with_other_pooling_is_read_as_passed(clipa, tmp_path):
    tower = randomised(MeanClipTower(clipa=clipa))
    torch.save(clip_tensors(tower), tmp_path / "clip.pt")
    if clipa:
        with pytest.raises(UserError, match="CLIPA, and does not state its pooling"):
            read(tmp_path / "clip.pt", hints=Hints(heads=4))
    else:
        changes = read(tmp_path / "clip.pt", hints=Hints(heads=4)).card.changes
        assert any(re.match("assumed: .*the class token as the feature", change) for change in changes)
    found = read(tmp_path / "clip.pt", hints=Hints(heads=4, pool="mean"))
    with torch.no_grad():
        expected = tower(IMAGES)
    assert gap(run(found.weights, IMAGES), expected) / float(expected.abs().max()) <= LIMIT
    assert any("the mean of the patches as the feature" in change for change in found.card.changes)


def open_clip_folder(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """As OpenCLIP's `push_to_hf_hub` writes it."""
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


TOWER = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
STATED = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "interpolation": "bicubic", "resize_mode": "shortest"}


@pytest.mark.parametrize(
    ("tower", "vision", "model"),
    [
        (lambda: ClipTower(nn.GELU()), {}, {}),
        (lambda: ClipTower(nn.GELU()), {"patch_size": [8, 8]}, {}),
        (lambda: ClipTower(QuickGelu()), {}, {"quick_gelu": True}),
        (lambda: ClipTower(nn.GELU("tanh")), {"act_kwargs": {"approximate": "tanh"}}, {}),
        (lambda: MeanClipTower(clipa=False), {"pool_type": "avg"}, {}),
        (lambda: MeanClipTower(clipa=True), {"pool_type": "avg", "no_ln_pre": True, "final_ln_after_pool": True}, {}),
    ],
)
def test_a_folder_of_open_clip_states_what_its_tensors_do_not(tower, vision, model, tmp_path):
    tower = randomised(tower())
    config = {"model_cfg": {"embed_dim": 24, "vision_cfg": {**TOWER, **vision}, **model}, "preprocess_cfg": STATED}
    folder = open_clip_folder(tmp_path / "model", clip_tensors(tower), **config)
    found = read(folder)
    with torch.no_grad():
        expected = tower(IMAGES)
    assert gap(run(found.weights, IMAGES), expected) / float(expected.abs().max()) <= LIMIT
    assert "text tower not read (4 tensors)" in found.card.changes
    assert not any("assumed" in change for change in found.card.changes)
    assert found.card.preprocess == Preprocess(
        "decode|resize_short(32, pil_bicubic)|center_crop(32)", (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    )


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"qk_norm": True}, "states qk_norm=True"),
        ({"pool_type": "none"}, "states pool_type='none'"),
        ({"act_kwargs": {"approximate": "none", "inplace": True}}, "states act_kwargs="),
        ({"norm_kwargs": {"eps": 1e-6, "bias": False}}, "states norm_kwargs="),
        ({"width": 64}, "states width=64 and the tensors are of 32"),
        ({"patch_size": [8, 4]}, "states patch_size=[8, 4] and the tensors are of 8"),
    ],
)
def test_a_tower_of_open_clip_with_other_parts_is_refused(vision, words, tmp_path):
    config = {"model_cfg": {"vision_cfg": {**TOWER, **vision}}}
    folder = open_clip_folder(tmp_path / "model", clip_tensors(randomised(ClipTower(nn.GELU()))), **config)
    with pytest.raises(UserError, match=re.escape(words)):
        read(folder)


@pytest.mark.parametrize(
    ("name", "pool", "projection"),
    [
        *(("vit_base_patch16_siglip_224", "map", "none"), ("eva02_base_patch16_clip_224", "token", None)),
        *(("vit_base_patch16_224", "avg", "linear"), ("vit_base_patch16_clip_224", "", "linear")),
        ("vit_base_patch16_224", "avg", "mlp"),
    ],
)
def test_a_tower_of_timm_in_a_folder_of_open_clip(name, pool, projection, tmp_path, monkeypatch):
    outside("timm")
    arguments = shrunk(name) | {"img_size": 64}
    own = projection in ("linear", "mlp")
    model: Any = build(name, arguments if own else {**arguments, "global_pool": pool})
    if projection is not None:
        model.reset_classifier(0, *([pool] if own and pool else []))
    last = nn.Linear(model.num_features, 24, bias=False) if projection == "linear" else nn.Identity()
    tensors = {f"visual.trunk.{key}": tensor for key, tensor in model.state_dict().items()}
    tensors |= {f"visual.head.proj.{key}": tensor for key, tensor in last.state_dict().items()}
    tensors |= {"visual.head.mlp.fc1.weight": torch.ones(8, model.num_features)} if projection == "mlp" else {}
    vision = {"image_size": 64, "timm_model_name": name, "timm_pool": pool, "timm_proj": projection}
    config = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": {"resize_mode": "squash"}}
    folder = open_clip_folder(tmp_path / "model", tensors, **config)
    convert = description.from_open_clip

    def with_sizes(
        stated: Mapping[str, Any],
    ) -> dict[str, Any]:  # of the small model; OpenCLIP has no keys for them
        found = convert(stated)
        return {**found, "model_args": {**arguments, **found["model_args"]}}

    monkeypatch.setattr(description, "from_open_clip", with_sizes)
    found, images = read(folder), pictures(2, 3, 64, 64)
    assert relative_gap(run(found.weights, images), outcome(nn.Sequential(model, last), images)) <= LIMIT
    assert ("as stated: " in found.card.changes[-1]) == (projection == "linear")
    assert found.card.preprocess is not None
    assert found.card.preprocess.pipeline == "decode|resize(64, pil_bicubic)"


def test_attention_pooling_of_coca_is_refused_by_name(tmp_path):
    tensors = clip_tensors(ClipTower(nn.GELU())) | {"visual.attn_pool.query": torch.ones(256, 24)}
    torch.save(tensors, tmp_path / "coca.pt")
    with pytest.raises(UserError, match="as OpenCLIP's CoCa does"):
        read(tmp_path / "coca.pt", hints=Hints(heads=4))


def test_an_image_tower_is_written_with_openai_names(tmp_path):
    tower = randomised(ClipTower(nn.GELU()))
    torch.save(clip_tensors(tower), tmp_path / "clip.pt")
    weights = read(tmp_path / "clip.pt", hints=Hints(heads=4)).weights
    written(weights, tmp_path / "ours.safetensors", "open_clip")
    ours = load_file(tmp_path / "ours.safetensors")
    theirs = ClipTower(nn.GELU())
    theirs.load_state_dict({key.removeprefix("visual."): tensor for key, tensor in ours.items()}, strict=True)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(IMAGES), tower(IMAGES))
    assert isinstance(weights.architecture, ViTConfig)
    quick = replace(weights, architecture=replace(weights.architecture, gelu="quick"))
    with pytest.raises(UserError, match="write hf-clip instead"):
        written(quick, tmp_path / "quick.safetensors", "open_clip")


# ----------------------------------------------------------------------------------------------------------- DINOv3


def meta_tensors(state: dict[str, Tensor], depth: int = 2) -> dict[str, Tensor]:
    """transformers' tensors with the names of Meta's code; the bias of keys is there, and hidden by a mask."""
    named = {"cls_token": state["embeddings.cls_token"], "storage_tokens": state["embeddings.register_tokens"]}
    named |= {"mask_token": state["embeddings.mask_token"][0], "rope_embed.periods": torch.tensor([1.0, 10.0])}
    for part in ("weight", "bias"):
        named[f"patch_embed.proj.{part}"] = state[f"embeddings.patch_embeddings.{part}"]
        named[f"norm.{part}"] = state[f"norm.{part}"]
    names = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.o_proj", "mlp.fc1": "mlp.up_proj"}
    names |= {"mlp.fc2": "mlp.down_proj", "mlp.w1": "mlp.gate_proj", "mlp.w2": "mlp.up_proj", "mlp.w3": "mlp.down_proj"}
    gated = "model.layer.0.mlp.gate_proj.weight" in state
    for i in range(depth):
        ours, theirs = f"blocks.{i}", f"model.layer.{i}"
        for name, old in names.items():
            if name.startswith("mlp.w") is gated or "mlp" not in name:
                named |= {f"{ours}.{name}.{part}": state[f"{theirs}.{old}.{part}"] for part in ("weight", "bias")}
        parts = [f"{theirs}.attention.{letter}_proj" for letter in "qkv"]
        named[f"{ours}.attn.qkv.weight"] = torch.cat([state[f"{part}.weight"] for part in parts])
        q, v = state[f"{parts[0]}.bias"], state[f"{parts[2]}.bias"]
        named[f"{ours}.attn.qkv.bias"] = torch.cat([q, torch.full_like(q, 7.0), v])
        named[f"{ours}.attn.qkv.bias_mask"] = torch.cat([torch.ones_like(q), torch.zeros_like(q), torch.ones_like(v)])
        named |= {f"{ours}.ls{k}.gamma": state[f"{theirs}.layer_scale{k}.lambda1"] for k in (1, 2)}
    return named


@pytest.mark.parametrize("name", ["DINOv3", "DINOv3, SwiGLU"])
def test_dinov3_as_meta_names_it(name, tmp_path):
    """Heads of 8 channels have the periods 1 and 10, which bfloat16 holds exactly."""
    model = HF_CASES[name].build()
    theirs = meta_tensors(dict(model.state_dict()))
    torch.save(theirs | {"local_cls_norm.weight": torch.ones(32)}, tmp_path / "dinov3.pth")
    found = read(tmp_path / "dinov3.pth")
    expected = HF_CASES[name].forward(model, IMAGES)
    assert found.card.format == "dinov3"
    assert set(found.unmapped) == {"mask_token", "local_cls_norm.weight"}
    assert gap(run(found.weights, IMAGES), expected) / float(expected.abs().max()) <= LIMIT
    written(found.weights, tmp_path / "ours.safetensors", "dinov3")
    ours = load_file(tmp_path / "ours.safetensors")
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}
    for key, tensor in theirs.items():
        mask = theirs.get(f"{key}_mask", torch.tensor(1.0))
        assert torch.equal(ours[key] * mask, tensor * mask) or key == "mask_token"


def test_periods_of_dinov3_are_those_that_bfloat16_rounds(tmp_path):
    """timm's note: the released weights have the periods downcast to bfloat16."""
    config: Any = HF_CASES["DINOv3"]
    wide = replace(config, settings={**config.settings, "num_attention_heads": 1})
    theirs = meta_tensors(dict(wide.build().state_dict()))
    exact = 100 ** (torch.arange(8) / 8)
    torch.save(theirs | {"rope_embed.periods": exact.bfloat16()}, tmp_path / "rounded.pth")
    torch.save(theirs | {"rope_embed.periods": exact}, tmp_path / "exact.pth")
    found = read(tmp_path / "rounded.pth").weights.architecture
    assert isinstance(found, ViTConfig)
    assert (found.heads, found.rope) == (1, RopeConfig(temperature=100.0, periods="bfloat16"))
    with pytest.raises(UserError, match="periods are not those of the released models"):
        read(tmp_path / "exact.pth")


# ------------------------------------------------------------------------------------------- big_vision's two towers


def test_the_image_tower_of_big_vision_siglip(tmp_path):
    case = HF_CASES["SigLIP"]
    model = case.build()
    weights = read(case.save(model, tmp_path / "hf")).weights
    written(weights, tmp_path / "tower.npz", "big_vision")
    with np.load(tmp_path / "tower.npz") as file:
        arrays = {key: file[key] for key in file.files}
    blocks = {key: array for key, array in arrays.items() if key.startswith("Transformer/")}
    towers = {f"params/img/{key}": array for key, array in arrays.items()}
    towers |= {f"params/txt/Encoder_0/{key}": array for key, array in blocks.items()}
    towers |= {f"params/txt/{key}": array for key, array in blocks.items()}
    towers |= {"params/t": np.ones(1, np.float32), "params/b": np.ones(1, np.float32)}
    save_npz(tmp_path / "siglip.npz", towers)
    found = read(tmp_path / "siglip.npz", hints=Hints(heads=4))
    expected = case.forward(model, IMAGES)
    assert found.card.format == "big_vision"
    assert f"text tower not read ({2 * len(blocks) + 2} tensors)" in found.card.changes
    assert set(found.unmapped) == {key for key in towers if not key.startswith("params/img/")}
    assert gap(run(found.weights, IMAGES), expected) / float(expected.abs().max()) <= LIMIT
