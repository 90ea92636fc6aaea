"""The parts of later Vision Transformers, against timm's Eva and Beit: RoPE, SwiGLU, further norms, relative bias.

The weights are mapped here, independently of vitral's formats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracles import outside, pictures
from torch import Tensor, nn

from vitral.architecture import RopeConfig, ViTConfig, as_dict, from_dict
from vitral.cost import cost
from vitral.models.vit import ViT

THEIRS: dict[str, Any] = {"img_size": (32, 40), "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
OURS: dict[str, Any] = {
    **{"depth": 2, "width": 64, "mlp": 256, "heads": 4, "patch": 8, "image": (32, 40), "classes": 5},
    **{"gelu": "erf", "norm_eps": 1e-5},
}
GRID = (4, 5)
EVA02 = RopeConfig(temperature=1e4, pairs="adjacent", coordinates="index", reference=(3, 3))
MIXED = RopeConfig(temperature=10.0, pairs="adjacent", coordinates="index", axes="xy", learned=True)
PE = RopeConfig(temperature=1e4, pairs="adjacent", coordinates="index", axes="xy", offset=1.0, reference=(5, 5))

# Arguments of timm's Eva, and fields of ours.
EVAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DINOv3": (
        {
            **{"init_values": 1e-5, "num_reg_tokens": 4, "use_abs_pos_emb": False, "use_fc_norm": False},
            **{"use_rot_pos_emb": True, "rope_type": "dinov3", "rope_rotate_half": True, "rope_temperature": 100},
        },
        {
            **{"registers": 4, "key_bias": False, "layer_scale": True, "position": "none", "pool": "mean"},
            "rope": RopeConfig(),
        },
    ),
    "EVA-02": (
        {
            **{"qkv_fused": False, "scale_mlp": True, "swiglu_mlp": True, "scale_attn_inner": True, "mlp_ratio": 2.5},
            **{"use_rot_pos_emb": True, "ref_feat_shape": (3, 3)},
        },
        {
            **{"mlp": 160, "key_bias": False, "swiglu": True, "mlp_norm": True, "attention_norm": True},
            **{"pool": "mean", "norm_place": "features", "rope": EVA02},
        },
    ),
    "learned RoPE": (
        {
            **{"attn_type": "rope", "global_pool": "token", "init_values": 1e-5, "no_embed_class": True},
            **{"use_rot_pos_emb": True, "rope_type": "mixed", "rope_temperature": 10.0, "rope_grid_indexing": "xy"},
        },
        {"layer_scale": True, "class_position": False, "rope": MIXED},
    ),
    "Perception Encoder with QK norm": (
        {
            **{"attn_type": "rope", "use_rot_pos_emb": True, "ref_feat_shape": (5, 5), "rope_grid_indexing": "xy"},
            **{"rope_grid_offset": 1.0, "use_pre_transformer_norm": True, "use_fc_norm": False, "qk_norm": True},
            "use_post_transformer_norm": False,
        },
        {
            **{"pre_norm": True, "patch_bias": False, "norm_place": "none", "pool": "mean", "qk_norm": True},
            "rope": PE,
        },
    ),
    "post-norm": ({"use_post_norm": True, "global_pool": "token"}, {"post_norm": True, "key_bias": False}),
    "no bias of queries, keys and values": ({"qkv_bias": False, "global_pool": "token"}, {"qkv_bias": False}),
}


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def mapped(theirs: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """timm's state dict in our names."""
    plain = {
        **{"patch_embed.proj": "embed", "norm_pre": "pre_norm", "norm": "norm", "fc_norm": "norm"},
        "head": "head.output",
    }
    state = {}
    for i in range(depth):
        block = f"blocks.{i}"
        layers = {"norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.out", "attn.norm": "attention.norm"}
        layers |= {"attn.qkv": "attention.qkv", "attn.q_norm": "attention.q_norm", "attn.k_norm": "attention.k_norm"}
        layers |= {"mlp.fc1": "mlp.hidden", "mlp.fc2": "mlp.output", "mlp.norm": "mlp.norm"}
        plain |= {f"{block}.{key}": f"{block}.{name}" for key, name in layers.items()}
        state |= _split_layers(theirs, block)
    for key, name in plain.items():
        pairs = ((f"{key}.{end}", f"{name}.{end}") for end in ("weight", "bias"))
        state |= {our: theirs[their] for their, our in pairs if their in theirs}
    rows = GRID[0] * GRID[1]
    if "pos_embed" in theirs:
        table = theirs["pos_embed"][0]
        state["positions.0.table"] = table[-rows:].reshape(*GRID, -1)
        state |= {"positions.0.class_row": table[0]} if len(table) > rows else {}
    state |= {"rope.frequencies": theirs["rope.freqs"]} if "rope.freqs" in theirs else {}
    state |= {"class_token": theirs["cls_token"].flatten()}
    return {**state, **({"registers": theirs["reg_token"][0]} if "reg_token" in theirs else {})}


def _split_layers(theirs: dict[str, Tensor], block: str) -> dict[str, Tensor]:
    """What is one tensor here and several there, and the tables of relative positions."""
    joined = {}
    if f"{block}.attn.q_proj.weight" in theirs:
        weights = [theirs[f"{block}.attn.{name}_proj.weight"] for name in "qkv"]
        joined[f"{block}.attention.qkv.weight"] = torch.cat(weights)
    for q, v in (("q_bias", "v_bias"), ("q_proj.bias", "v_proj.bias")):
        if f"{block}.attn.{q}" in theirs:
            pair = [theirs[f"{block}.attn.{q}"], theirs[f"{block}.attn.{v}"]]
            joined[f"{block}.attention.qv_bias"] = torch.stack(pair)
    for end in ("weight", "bias"):
        if f"{block}.mlp.fc1_g.{end}" in theirs:
            halves = [theirs[f"{block}.mlp.{half}.{end}"] for half in ("fc1_g", "fc1_x")]
            joined[f"{block}.mlp.hidden.{end}"] = torch.cat(halves)
    for k in (1, 2):
        if f"{block}.gamma_{k}" in theirs:
            joined[f"{block}.scale{k}.scale"] = theirs[f"{block}.gamma_{k}"]
    if (table := theirs.get(f"{block}.attn.relative_position_bias_table")) is not None:
        offsets = (2 * GRID[0] - 1, 2 * GRID[1] - 1)
        joined[f"{block}.attention.relative.table"] = table[:-3].reshape(*offsets, -1)
        joined[f"{block}.attention.relative.class_table"] = table[-3:]
    return joined


def check(theirs: nn.Module, config: ViTConfig) -> None:
    """Equal outputs, and as many parameters as `cost` counts."""
    ours = ViT(config).eval()
    ours.load_state_dict(mapped(dict(theirs.state_dict()), config.depth))
    images = pictures(2, 3, *config.image)
    with torch.no_grad():
        expected = theirs(images)
        assert (ours(images) - expected).abs().max() <= 3e-6 * expected.abs().max()
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert cost(config).params == parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert from_dict(as_dict(config)) == config


@pytest.mark.parametrize("case", EVAS)
def test_parts_compute_what_timms_eva_computes(case):
    theirs, ours = EVAS[case]
    norm = partial(nn.LayerNorm, eps=1e-5)
    model = outside("timm.models.eva").Eva(**THEIRS, num_classes=5, norm_layer=norm, **theirs)
    check(randomised(model), ViTConfig(**{**OURS, **ours}))


@pytest.mark.parametrize("scale", [None, 0.1])
def test_relative_bias_computes_what_timms_beit_computes(scale):
    norm = partial(nn.LayerNorm, eps=1e-5)
    theirs = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": scale, "norm_layer": norm}
    model = outside("timm.models.beit").Beit(**THEIRS, num_classes=5, **theirs)
    ours: dict[str, Any] = {"key_bias": False, "position": "bias", "layer_scale": bool(scale), "pool": "mean"}
    check(randomised(model), ViTConfig(**OURS, **ours, norm_place="features"))
