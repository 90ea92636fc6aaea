"""Google's formats against Google's numbers, and round trips through every format."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import ARCHITECTURES, gap, hints_for, pictures, random_weights, run, same_bits, written
from torch import Tensor

from vitral.architecture import Architecture, ResNetConfig, Size, ViTConfig
from vitral.checkpoints.adapt import Weights, adapt
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.weights import Checkpoint, assemble, describe, read
from vitral.errors import UserError
from vitral.models.position import resize_table
from vitral.models.vit import ViT

# case: format, sizes in the file, largest difference that the goldens' README allows
GOLDENS = {
    "vit_token_p16": ("google", ("64", "96", "128"), 2e-5),
    "vit_token_rep_p16_224": ("google", ("224", "384"), 2e-5),
    "vit_gap_p8": ("google-linen", ("64", "96"), 2e-5),
    "vit_gap_rep_p14_drop": ("google-linen", ("64", "100"), 2e-5),
    "vit_token_p14_224": ("google-linen", ("224",), 2e-5),
    "hybrid3_p1": ("google", ("64", "65", "70", "96"), 1e-4),
    "hybrid4_p1": ("google-linen", ("96", "127"), 1e-4),
    "bv_learn_gap": ("big_vision", ("64x64", "96x96"), 2e-5),
    "bv_sincos2d_gap_rep": ("big_vision", ("64x96",), 2e-5),
    "bv_learn_tok": ("big_vision", ("40x40",), 2e-5),
    "bv_learn_map_rep": ("big_vision", ("64x64",), 2e-5),
    "bit_r1111_x1": ("bit", ("64", "96", "65"), 1e-4),
}
SIZES = [(case, size) for case, (_, sizes, _) in GOLDENS.items() for size in sizes]
BLOCK_LIMIT = 5e-5
Arrays = dict[str, np.ndarray]


@cache
def loaded(path: Path) -> Checkpoint:
    """Read once; no test changes what it gets."""
    return read(path)


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as file:
        return dict(file)


def checkpoint(assets: Path, case: str) -> Path:
    return assets / "golden" / f"{case}.ckpt.npz"


def expected(assets: Path, case: str, size: str) -> dict[str, Tensor]:
    """What the original computed at one size; images as (b, c, h, w)."""
    arrays = arrays_of(assets / "golden" / f"{case}.io.npz")
    prefix = f"r{size}/"
    found = {key.removeprefix(prefix): torch.from_numpy(value) for key, value in arrays.items() if key.startswith(prefix)}
    return {**found, "images": found["images"].permute(0, 3, 1, 2)}


def pixels(size: str) -> Size:
    height, _, width = size.partition("x")
    return int(height), int(width or height)


@pytest.mark.parametrize(("case", "size"), SIZES)
@pytest.mark.parametrize("way", ["run time", "adapted"])
def test_logits_are_those_of_google(assets, case, size, way):
    format, _, limit = GOLDENS[case]
    found = loaded(checkpoint(assets, case))
    truth = expected(assets, case, size)
    weights = adapt(found.weights, image=pixels(size)) if way == "adapted" else found.weights
    model = assemble(weights)
    with torch.no_grad():
        features = model.features(truth["images"])
        before, logits = model.head.represent(features), model.head(features)
    assert (found.card.format, found.unmapped) == (format, ())
    assert gap(before, truth["pre_logits"]) <= limit
    assert gap(logits, truth["logits"]) <= limit
    if "head_input" in truth:
        assert gap(features, truth["head_input"]) <= BLOCK_LIMIT
    if way == "adapted" and "pos_embedding" in truth:
        assert gap(table_of(weights), truth["pos_embedding"][0]) <= 2e-5
        assert any("grid" in words for words in weights.changes)


def table_of(weights: Weights) -> Tensor:
    """(n, d) or (1 + n, d), as Google keeps it."""
    table = weights.state["positions.0.table"].flatten(0, 1)
    row = weights.state.get("positions.0.class_row")
    return table if row is None else torch.cat([row[None], table])


def test_every_step_inside_is_that_of_google(assets):
    truth = expected(assets, "vit_token_p16", "64")
    model = assemble(loaded(checkpoint(assets, "vit_token_p16")).weights)
    assert isinstance(model, ViT)
    seen: dict[str, Tensor] = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, inputs, i=i: seen.update({f"into_{i}": inputs[0]}))
        block.register_forward_hook(lambda _, inputs, output, i=i: seen.update({f"block_{i}": output}))
        qkv = block.get_submodule("attention.qkv")
        qkv.register_forward_hook(lambda _, inputs, output, i=i: seen.update({f"attention_{i}": softmax(output, 2)}))
    with torch.no_grad():
        patches = model.patchify(truth["images"])
        encoded = model.encode(patches)
    assert gap(patches, truth["embedding"]) <= 2e-5
    assert gap(seen["into_0"], truth["tokens_in"]) <= 2e-5
    assert gap(encoded, truth["encoded"]) <= BLOCK_LIMIT
    for i in range(2):
        assert gap(seen[f"attention_{i}"], truth[f"attention_{i}"]) <= 2e-5
        assert gap(seen[f"block_{i}"], truth[f"block_{i}"]) <= BLOCK_LIMIT


def softmax(qkv: Tensor, heads: int) -> Tensor:
    """(b, n, 3d) -> (b, heads, n, n): attention probabilities, by the paper's equations 5 and 6."""
    q, k, _ = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)


@pytest.mark.parametrize(("case", "size"), [(case, size) for case, size in SIZES if case.startswith("bv_")])
def test_big_vision_adds_positions_before_the_class_token(assets, case, size):
    truth = expected(assets, case, size)
    model = assemble(loaded(checkpoint(assets, case)).weights)
    assert isinstance(model, ViT)
    with torch.no_grad():
        patches = model.patchify(truth["images"])
        added = model.positions[0](patches)[model.config.prefix :]
    assert gap(patches.flatten(1, 2) + added, truth["with_posemb"]) <= 2e-5
    if model.config.position == "sincos2d":
        table = arrays_of(assets / "golden" / f"{case}.io.npz")["posemb_table"][0]
        assert gap(added, table) <= 2e-5


def test_a_new_head_sits_on_the_encoder(assets):
    """Google's fine-tuning drops the tanh layer together with the head."""
    truth = expected(assets, "vit_token_rep_p16_224", "384")
    read_weights = loaded(checkpoint(assets, "vit_token_rep_p16_224")).weights
    weights = adapt(read_weights, image=384, classes=0)
    weights = adapt(weights, classes=21)
    head = {"weight": truth["drop_head/head/kernel"].T, "bias": truth["drop_head/head/bias"]}
    weights.state.update({f"head.output.{name}": array for name, array in head.items()})
    model = assemble(weights)
    with torch.no_grad():
        features = model.features(truth["images"])
    assert gap(features, truth["drop_head/pre_logits"]) <= 2e-5
    assert gap(run(weights, truth["images"]), truth["drop_head/logits"]) <= 2e-5
    kept = [key for key in read_weights.state if not key.startswith(("head.", "positions."))]
    assert all(torch.equal(weights.state[key], read_weights.state[key]) for key in kept)


def test_position_tables_are_resized_as_google_does(assets):
    stored = arrays_of(assets / "golden" / "posembed_resize.npz")
    pairs = sorted({key.rpartition("/")[0] for key in stored})
    assert len(pairs) == 14
    for pair in pairs:
        kind, _, sides = pair.partition("_")
        first, (old, new) = int(kind == "tok"), (int(side) for side in sides.split("to"))
        table = torch.from_numpy(stored[f"{pair}/in"][0, first:]).unflatten(0, (old, old))
        resized = resize_table(table.double(), (new, new), "google").flatten(0, 1)
        assert gap(resized, stored[f"{pair}/out"][0, first:]) <= 1e-6, pair


@pytest.mark.parametrize("size", ["64", "96", "65"])
def test_the_other_padding_of_bit_is_that_of_big_vision(assets, size):
    truth = expected(assets, "bit_r1111_x1", size)
    weights = loaded(checkpoint(assets, "bit_r1111_x1")).weights
    assert isinstance(weights.architecture, ResNetConfig)
    other = replace(weights, architecture=replace(weights.architecture, root_pool="-inf"))
    model = assemble(other)
    with torch.no_grad():
        features = model.features(truth["images"])
        logits = model.head(features)
    assert gap(features, truth["pre_logits_neginf_pool"]) <= 1e-4
    assert gap(logits, truth["logits_neginf_pool"]) <= 1e-4
    assert gap(logits, truth["logits"]) > 1e-3


@pytest.mark.parametrize("case", GOLDENS)
def test_a_file_written_back_is_the_same_file(assets, case, tmp_path):
    """Same keys, shapes and bits; only big_vision's optional `params/` in front is not written."""
    original = {key.removeprefix("params/"): array for key, array in arrays_of(checkpoint(assets, case)).items()}
    format = GOLDENS[case][0]
    card = written(loaded(checkpoint(assets, case)).weights, tmp_path / "back.npz", format)
    back = arrays_of(tmp_path / "back.npz")
    assert card.changes == ()
    assert {key: array.shape for key, array in back.items()} == {key: array.shape for key, array in original.items()}
    assert all(back[key].tobytes() == np.ascontiguousarray(original[key]).tobytes() for key in original)


@pytest.mark.parametrize("case", ["vit_token_p16", "vit_token_rep_p16_224", "hybrid3_p1"])
def test_names_change_to_linen_and_back(assets, case, tmp_path):
    written(loaded(checkpoint(assets, case)).weights, tmp_path / "linen.npz", "google-linen")
    linen = read(tmp_path / "linen.npz")
    written(linen.weights, tmp_path / "back.npz", "google")
    original, back = arrays_of(checkpoint(assets, case)), arrays_of(tmp_path / "back.npz")
    assert linen.card.format == "google-linen"
    assert {key: array.shape for key, array in back.items()} == {key: array.shape for key, array in original.items()}
    assert all(np.array_equal(back[key], original[key]) for key in original)


def test_big_vision_takes_the_class_row_into_the_token(assets, tmp_path):
    source = loaded(checkpoint(assets, "vit_token_p16")).weights
    card = written(source, tmp_path / "bv.npz", "big_vision")
    found = read(tmp_path / "bv.npz")
    truth = expected(assets, "vit_token_p16", "96")
    assert found.card.format == "big_vision"
    assert [words for words in card.changes if "folded" in words]
    assert gap(run(found.weights, truth["images"]), truth["logits"]) <= 2e-5
    original, folded = arrays_of(checkpoint(assets, "vit_token_p16")), arrays_of(tmp_path / "bv.npz")
    row = original["Transformer/posembed_input/pos_embedding"][:, :1]
    assert np.array_equal(folded["cls"], original["cls"] + row)


GENERATIONS = ["pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding"]


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("prefix", ["", "params/"])
@pytest.mark.parametrize(("case", "row"), [("bv_learn_tok", False), ("bv_learn_tok", True), ("bv_learn_gap", False)])
def test_three_generations_of_big_vision_are_one_model(assets, case, row, name, prefix, tmp_path):
    """`row`: with a position for the class token, which later code adds and the golden's does not."""
    arrays = arrays_of(checkpoint(assets, case))
    table = arrays.pop("pos_embedding")
    if row:
        first = np.full_like(table[:, :1], 0.25)
        arrays["cls"] = arrays["cls"] - first
        table = np.concatenate([first, table], axis=1)
    named = {f"{prefix}{key}": array for key, array in {**arrays, name: table}.items()}
    np.savez(tmp_path / "model.npz", **named)
    truth = expected(assets, case, GOLDENS[case][1][0])
    assert gap(run(read(tmp_path / "model.npz").weights, truth["images"]), truth["logits"]) <= 2e-5


# What each format can say of each architecture. "=": as it is, "~": the same function in the format's words.
HOLDS = {
    "tanh": "google= google-linen= big_vision~ timm= hf=",
    "erf": "timm= hf= torchvision=",
    "tanh layer": "google= google-linen= big_vision~",
    "erf, tanh layer": "torchvision=",
    "mean": "google= google-linen= big_vision= timm=",
    "no class row, not square": "google~ google-linen~ big_vision= timm= hf~",
    "map, fixed positions": "big_vision= timm~",
    "mean beside a class token, norm after": "timm=",
    "mean beside a class token, norm before": "timm=",
    "eps 1e-12, one channel": "hf=",
    "DINOv2 with registers": "timm~ hf-dinov2= dino=",
    "2d, every block": "",
    "relative": "",
    "axial": "",
    "hybrid": "google= google-linen=",
    "BiT": "bit=",
    "AxialResNet": "",
}


def holds(name: str) -> dict[str, str]:
    """format: how"""
    return {"vitral": "=", **{words[:-1]: words[-1] for words in HOLDS[name].split()}}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_round_trip_is_exact_or_refused(name, format, tmp_path):
    architecture = ARCHITECTURES[name]
    weights = random_weights(architecture)
    how = holds(name).get(format)
    path = tmp_path / ("model" if FORMATS[format].config else f"model.{FORMATS[format].container}")
    if how is None:
        with pytest.raises(UserError, match="cannot hold this model"):
            written(weights, path, format)
        assert list(tmp_path.iterdir()) == []
        return
    card = written(weights, path, format)
    hints = hints_for(architecture, format)
    found = read(path, hints=hints)
    assert describe(path, hints=hints).format.name == format
    if how == "=":
        assert card.changes == ()
        assert same_bits(found.weights.state, weights.state)
        assert without_resize(found.weights.architecture) == without_resize(architecture)
    else:
        assert len(card.changes) >= 1
        images = pictures(2, architecture.channels, *architecture.image)
        assert gap(run(found.weights, images), run(weights, images)) <= 1e-6
        again = tmp_path / ("again" if FORMATS[format].config else f"again.{FORMATS[format].container}")
        written(found.weights, again, format)
        assert same_bits(read(again, hints=hints).weights.state, found.weights.state)


def without_resize(architecture: Architecture) -> Architecture:
    """How positions are resized is the library's habit: no format but ours states it. BiT's has no image size either."""
    if isinstance(architecture, ViTConfig):
        return replace(architecture, resize="google", class_position=architecture.class_row)
    return architecture if architecture.axial else replace(architecture, image=(224, 224))


REAL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
REAL_REFUSED = {
    "google": "tanh GELU",
    "google-linen": "tanh GELU",
    "big_vision": "tanh GELU",
    "bit": "BiT ResNets",
    "hf-dinov2": "without a classifier",
    "dino": "without a classifier",
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_released_model_goes_through_every_format_that_can_hold_it(assets, format, tmp_path):
    source = read(assets / "data" / REAL)
    path = tmp_path / ("model" if FORMATS[format].config else "model.safetensors")
    if format in REAL_REFUSED:
        with pytest.raises(UserError, match=REAL_REFUSED[format]):
            written(source.weights, path, format)
        return
    written(source.weights, path, format)
    found = read(path)
    assert describe(path).format.name == format
    assert same_bits(found.weights.state, source.weights.state)
    assert without_resize(found.weights.architecture) == without_resize(source.weights.architecture)
