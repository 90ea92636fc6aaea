"""Hugging Face ViT and its relatives with the same names: ViT-MSN, I-JEPA and the encoder of MAE.

A folder for `from_pretrained` with config.json and model.safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.hf_layout import (
    FAMILIES,
    UNUSED,
    Layout,
    Variant,
    agrees,
    assumed,
    chosen,
    classes_of,
    layout_entries,
    model_type,
    read_settings,
    shared_config,
    unsupported,
)
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, linear
from vitral.checkpoints.processors import from_transformers, to_transformers
from vitral.errors import UserError

_PREFIX = re.compile(r"^(?:vit|ijepa|beit|data2vec_vision|dinov2|dinov2_with_registers)\.")
_LAYER = re.compile(r"^(?:layers|encoder\.layer)\.(?=\d+\.)")
# Names in the memory of transformers 5 -> names in files, which a plain state dict does not have.
_MEMORY = {
    "attention.q_proj.": "attention.attention.query.",
    "attention.k_proj.": "attention.attention.key.",
    "attention.v_proj.": "attention.attention.value.",
    "attention.o_proj.": "attention.output.dense.",
}
_MEMORY_MLP = {
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
    ".relative_position_bias.": ".attention.attention.relative_position_bias.",
}
_NEVER_USED = re.compile(r"embeddings\.mask_token$|decoder\.|lm_head\.|.*\.relative_position_index$")
# Parts of a file that no classifier uses, for `Card.changes`.
PARTS = {
    r"embeddings\.mask_token": "mask token",
    r"decoder\.": "decoder",
    r"pooler\.": "pooler, which the classifier does not run,",
    r"lm_head\.|layernorm\.": "head of the masked image modeling",
}

LAYOUT = Layout(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    block="encoder.layer.{}",
    norm1="layernorm_before",
    queries="attention.attention.query",
    keys="attention.attention.key",
    values="attention.attention.value",
    out="attention.output.dense",
    norm2="layernorm_after",
    hidden="intermediate.dense",
    output="output.dense",
    norm="layernorm",
)
DEFAULTS = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def hf_renames(keys: Iterable[str]) -> dict[str, str]:
    """Keys of any class and version of transformers -> the keys of files of the bare model, or unused ones."""
    keys = list(keys)
    bare = {key: _PREFIX.sub("", key) for key in keys}
    plain = any("layernorm_before" in key for key in keys)  # Dinov2's files have mlp.fc1, ViT's do not
    memory = {**_MEMORY, **_MEMORY_MLP} if plain else _MEMORY
    renamed = {key: _in_file(new, memory) for key, new in bare.items()}
    classifier = "classifier.weight" in bare
    repeated = len(set(renamed.values())) < len(renamed)  # masked image modeling has a norm besides the model's
    for key, new in renamed.items():
        unused = _NEVER_USED.match(new) or (classifier and new.startswith("pooler.dense."))
        if unused or (repeated and key.startswith("layernorm.")):
            renamed[key] = UNUSED + new
    return renamed


def _in_file(key: str, memory: Mapping[str, str]) -> str:
    key = key.replace("shared_position_bias.", "encoder.relative_position_bias.")
    if not _LAYER.match(key):
        return key
    key = _LAYER.sub("encoder.layer.", key)
    for name, file in memory.items():
        key = key if file in key else key.replace(name, file)
    return key


def hf_format(
    name: str,
    title: str,
    recognises: Callable[[CheckpointHeader], bool],
    variants: tuple[Variant, ...],
    parts: Mapping[str, str],
    notes: Callable[[CheckpointHeader, ViTConfig], tuple[str, ...]] = lambda header, c: (),
    **functions: Any,
) -> Format:
    """A format for `from_pretrained`: a folder with config.json, model.safetensors and preprocessor_config.json.

    Args:
        name: the format's.
        title: its description.
        recognises: whether a checkpoint is of this family.
        variants: the classes that are written.
        parts: words for the tensors that are not read, by a pattern of their keys.
        notes: further assumptions about a checkpoint.
        functions: the other fields of a Format.
    """

    def assumptions(header: CheckpointHeader, architecture: Architecture) -> tuple[str, ...]:
        assert isinstance(architecture, ViTConfig)
        return assumed(header, architecture, parts) + notes(header, architecture)

    return Format(
        name=name,
        title=title,
        container="safetensors",
        recognises=recognises,
        unsupported_reason=unsupported(variants),
        assumptions=assumptions,
        ignored=re.escape(UNUSED),
        preprocess=_preprocess,
        class_names=_class_names,
        preprocessor=lambda card: to_transformers(card.preprocess),
        alone=lambda c: "transformers reads its shape from config.json",
        **functions,
    )


def is_family(name: str) -> Callable[[CheckpointHeader], bool]:
    """Whether a checkpoint with the names of ViT is of this family, by its model_type or else by its tensors."""

    def recognises(header: CheckpointHeader) -> bool:
        if not header.has(LAYOUT.in_block(0, "layernorm_before.weight")):
            return False
        return FAMILIES.get(str(model_type(header)), _by_tensors(header)) == name

    return recognises


def _by_tensors(header: CheckpointHeader) -> str:
    if model_type(header) is not None:
        return "hf"  # where reading it names the type that is not supported
    if not header.has(LAYOUT.in_block(0, f"{LAYOUT.keys}.bias")) and header.has(
        LAYOUT.in_block(0, f"{LAYOUT.queries}.bias")
    ):
        return "hf-beit"
    if not header.has(LAYOUT.class_token):
        return "hf-ijepa"
    return "hf-mae" if header.has(f"{UNUSED}decoder.mask_token") else "hf"


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = layout_entries(LAYOUT, c)
    entries += linear("pooler.dense", "head.hidden", c.width, c.representation) if c.representation else []
    return entries + (linear("classifier", "head.output", c.width, c.classes) if c.classes else [])


def _read(header: CheckpointHeader, names: Layout = LAYOUT, eps: float = 1e-12, **fields: Any) -> ViTConfig:
    settings = read_settings(header, names, {**DEFAULTS, "layer_norm_eps": eps})
    agrees(header, "qkv_bias", settings["qkv_bias"])
    return ViTConfig(**settings, classes=classes_of(header), **fields)


def _vit_architecture(header: CheckpointHeader) -> ViTConfig:
    # ViTForImageClassification never runs the pooler, even if the file has one.
    pooler = "pooler.dense.weight"
    representation = header.shape(pooler, 2)[0] if header.has(pooler) else 0
    act = (header.config or {}).get("pooler_act", "tanh")
    if representation and act != "tanh":
        raise UserError(f'the file\'s pooler ends in "{act}" instead of tanh: that is not supported.')
    return _read(header, representation=representation)


def _mean_note(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    return () if c.classes else ("features are the mean of the patches, as for IJepaForImageClassification",)


def _mae_note(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    return ("features are the class token of the whole image: nothing is masked",)


def _config(kind: str, variants: tuple[Variant, ...], **values: Any) -> Callable[[Card], dict[str, Any]]:
    def config(card: Card) -> dict[str, Any]:
        c = card.architecture
        assert isinstance(c, ViTConfig)
        pooler = {"pooler_output_size": c.representation, "pooler_act": "tanh"} if c.representation else {}
        return {
            **{"architectures": [chosen(variants, c)], "model_type": kind},
            **shared_config(card),
            **{**pooler, **values},
        }

    return config


def prefixed(prefix: str) -> Callable[[str, Architecture], str]:
    """`Format.file_key` where a classifier has the bare model below `prefix`."""

    def file_key(key: str, c: Architecture) -> str:
        return f"{prefix}.{key}" if c.classes and not key.startswith("classifier.") else key

    return file_key


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    return from_transformers(header.preprocessor or {}, (header.config or {}).get("model_type", ""))


def _class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("id2label")
    if not isinstance(names, dict) or all(str(name).startswith("LABEL_") for name in names.values()):
        return ()
    return tuple(str(names[key]) for key in sorted(names, key=int))


_TOKEN = {"qkv_bias": (True, False)}
_MEAN = {**_TOKEN, "pool": ("mean",), "class_token": (False,)}
_VIT = (
    Variant("ViTForImageClassification", classifier=True, accepts=_TOKEN),
    Variant("ViTModel", classifier=False, accepts={**_TOKEN, "representation": ()}),
)
_MSN = (Variant("ViTMSNForImageClassification", True, _TOKEN), Variant("ViTMSNModel", False, _TOKEN))
_IJEPA = (Variant("IJepaForImageClassification", True, _MEAN), Variant("IJepaModel", False, _MEAN))
_MAE = (Variant("ViTMAEModel", classifier=False, accepts=_TOKEN),)

HUGGING_FACE = hf_format(
    name="hf",
    title="Hugging Face ViT (a folder)",
    recognises=is_family("hf"),
    variants=_VIT,
    parts=PARTS,
    renames=hf_renames,
    architecture=_vit_architecture,
    entries=_entries,
    config=_config("vit", _VIT),
    file_key=prefixed("vit"),
)

HUGGING_FACE_MSN = hf_format(
    name="hf-msn",
    title="Hugging Face ViT-MSN (a folder)",
    recognises=is_family("hf-msn"),
    variants=_MSN,
    parts=PARTS,
    renames=hf_renames,
    architecture=lambda header: _read(header, eps=1e-6),
    entries=_entries,
    config=_config("vit_msn", _MSN),
    file_key=prefixed("vit"),
)

HUGGING_FACE_IJEPA = hf_format(
    name="hf-ijepa",
    title="Hugging Face I-JEPA (a folder)",
    recognises=is_family("hf-ijepa"),
    variants=_IJEPA,
    parts=PARTS,
    notes=_mean_note,
    renames=hf_renames,
    architecture=lambda header: _read(header, replace(LAYOUT, class_token=""), pool="mean"),
    entries=_entries,
    config=_config("ijepa", _IJEPA),
    file_key=prefixed("ijepa"),
)

HUGGING_FACE_MAE = hf_format(
    name="hf-mae",
    title="Hugging Face MAE, the encoder (a folder)",
    recognises=is_family("hf-mae"),
    variants=_MAE,
    parts=PARTS,
    notes=_mae_note,
    renames=hf_renames,
    architecture=_read,
    entries=_entries,
    config=_config("vit_mae", _MAE, mask_ratio=0.0),
)
