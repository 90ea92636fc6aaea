"""Google's formats against Google's numbers, and weights adapted to other images, patches, channels and classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracles import ARCHITECTURES, SMALL, gap, pictures, random_weights, run, same_bits, save_npz, written
from torch import Tensor

from vitral.architecture import Architecture, ResNetConfig, Size, ViTConfig
from vitral.checkpoints.adapt import Adaptation, Weights, adapt, resize_patch_kernel
from vitral.checkpoints.weights import Checkpoint, assemble, read
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
GoldenFile = Callable[[str], Path]


@cache
def loaded(path: Path) -> Checkpoint:
    """Read once; no test changes what it gets."""
    return read(path)


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as file:
        return dict(file)


def checkpoint(golden_file: GoldenFile, case: str) -> Path:
    return golden_file(f"{case}.ckpt.npz")


def expected(golden_file: GoldenFile, case: str, size: str) -> dict[str, Tensor]:
    """What the original computed at one size; images as (b, c, h, w)."""
    arrays = arrays_of(golden_file(f"{case}.io.npz"))
    prefix = f"r{size}/"
    found = {
        key.removeprefix(prefix): torch.from_numpy(value) for key, value in arrays.items() if key.startswith(prefix)
    }
    return {**found, "images": found["images"].permute(0, 3, 1, 2)}


def pixels(size: str) -> Size:
    height, _, width = size.partition("x")
    return int(height), int(width or height)


@pytest.mark.parametrize(("case", "size"), SIZES)
@pytest.mark.parametrize("way", ["run time", "adapted"])
def test_logits_are_those_of_google(golden_file, case, size, way):
    format, _, limit = GOLDENS[case]
    found = loaded(checkpoint(golden_file, case))
    truth = expected(golden_file, case, size)
    weights = adapt(found.weights, Adaptation(image=pixels(size))) if way == "adapted" else found.weights
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


def test_every_step_inside_is_that_of_google(golden_file):
    truth = expected(golden_file, "vit_token_p16", "64")
    model = assemble(loaded(checkpoint(golden_file, "vit_token_p16")).weights)
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
def test_big_vision_adds_positions_before_the_class_token(golden_file, case, size):
    truth = expected(golden_file, case, size)
    model = assemble(loaded(checkpoint(golden_file, case)).weights)
    assert isinstance(model, ViT)
    with torch.no_grad():
        patches = model.patchify(truth["images"])
        added = model.positions[0](patches)[model.config.prefix :]
    assert gap(patches.flatten(1, 2) + added, truth["with_posemb"]) <= 2e-5
    if model.config.position == "sincos2d":
        table = arrays_of(golden_file(f"{case}.io.npz"))["posemb_table"][0]
        assert gap(added, table) <= 2e-5


def test_a_new_head_sits_on_the_encoder(golden_file):
    """Google's fine-tuning drops the tanh layer together with the head."""
    truth = expected(golden_file, "vit_token_rep_p16_224", "384")
    read_weights = loaded(checkpoint(golden_file, "vit_token_rep_p16_224")).weights
    weights = adapt(read_weights, Adaptation(image=384, classes=0))
    weights = adapt(weights, Adaptation(classes=21))
    head = {"weight": truth["drop_head/head/kernel"].T, "bias": truth["drop_head/head/bias"]}
    weights.state.update({f"head.output.{name}": array for name, array in head.items()})
    model = assemble(weights)
    with torch.no_grad():
        features = model.features(truth["images"])
    assert gap(features, truth["drop_head/pre_logits"]) <= 2e-5
    assert gap(run(weights, truth["images"]), truth["drop_head/logits"]) <= 2e-5
    kept = [key for key in read_weights.state if not key.startswith(("head.", "positions."))]
    assert all(torch.equal(weights.state[key], read_weights.state[key]) for key in kept)


def test_position_tables_are_resized_as_google_does(golden_file):
    stored = arrays_of(golden_file("posembed_resize.npz"))
    pairs = sorted({key.rpartition("/")[0] for key in stored})
    assert len(pairs) == 14
    for pair in pairs:
        kind, _, sides = pair.partition("_")
        first, (old, new) = int(kind == "tok"), (int(side) for side in sides.split("to"))
        table = torch.from_numpy(stored[f"{pair}/in"][0, first:]).unflatten(0, (old, old))
        resized = resize_table(table.double(), (new, new), "google").flatten(0, 1)
        assert gap(resized, stored[f"{pair}/out"][0, first:]) <= 1e-6, pair


@pytest.mark.parametrize("size", ["64", "96", "65"])
def test_the_other_padding_of_bit_is_that_of_big_vision(golden_file, size):
    truth = expected(golden_file, "bit_r1111_x1", size)
    weights = loaded(checkpoint(golden_file, "bit_r1111_x1")).weights
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
def test_a_file_written_back_is_the_same_file(golden_file, case, tmp_path):
    """Same keys, shapes and bits; only big_vision's optional `params/` in front is not written."""
    original = {key.removeprefix("params/"): array for key, array in arrays_of(checkpoint(golden_file, case)).items()}
    format = GOLDENS[case][0]
    card = written(loaded(checkpoint(golden_file, case)).weights, tmp_path / "back.npz", format)
    back = arrays_of(tmp_path / "back.npz")
    assert [change for change in card.changes if not change.startswith("assumed: fixed sin-cos positions")] == []
    assert {key: array.shape for key, array in back.items()} == {key: array.shape for key, array in original.items()}
    assert all(back[key].tobytes() == np.ascontiguousarray(original[key]).tobytes() for key in original)


@pytest.mark.parametrize("case", ["vit_token_p16", "vit_token_rep_p16_224", "hybrid3_p1"])
def test_names_change_to_linen_and_back(golden_file, case, tmp_path):
    written(loaded(checkpoint(golden_file, case)).weights, tmp_path / "linen.npz", "google-linen")
    linen = read(tmp_path / "linen.npz")
    written(linen.weights, tmp_path / "back.npz", "google")
    original, back = arrays_of(checkpoint(golden_file, case)), arrays_of(tmp_path / "back.npz")
    assert linen.card.format == "google-linen"
    assert {key: array.shape for key, array in back.items()} == {key: array.shape for key, array in original.items()}
    assert all(np.array_equal(back[key], original[key]) for key in original)


def test_big_vision_takes_the_class_row_into_the_token(golden_file, tmp_path):
    source = loaded(checkpoint(golden_file, "vit_token_p16")).weights
    card = written(source, tmp_path / "bv.npz", "big_vision")
    found = read(tmp_path / "bv.npz")
    truth = expected(golden_file, "vit_token_p16", "96")
    assert found.card.format == "big_vision"
    assert [words for words in card.changes if "folded" in words]
    assert gap(run(found.weights, truth["images"]), truth["logits"]) <= 2e-5
    original, folded = arrays_of(checkpoint(golden_file, "vit_token_p16")), arrays_of(tmp_path / "bv.npz")
    row = original["Transformer/posembed_input/pos_embedding"][:, :1]
    assert np.array_equal(folded["cls"], original["cls"] + row)


GENERATIONS = ["pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding"]


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("prefix", ["", "params/"])
@pytest.mark.parametrize(("case", "row"), [("bv_learn_tok", False), ("bv_learn_tok", True), ("bv_learn_gap", False)])
def test_three_generations_of_big_vision_are_one_model(golden_file, case, row, name, prefix, tmp_path):
    """`row`: with a position for the class token, which later code adds and the golden's does not."""
    arrays = arrays_of(checkpoint(golden_file, case))
    table = arrays.pop("pos_embedding")
    if row:
        first = np.full_like(table[:, :1], 0.25)
        arrays["cls"] = arrays["cls"] - first
        table = np.concatenate([first, table], axis=1)
    named = {f"{prefix}{key}": array for key, array in {**arrays, name: table}.items()}
    save_npz(tmp_path / "model.npz", named)
    truth = expected(golden_file, case, GOLDENS[case][1][0])
    assert gap(run(read(tmp_path / "model.npz").weights, truth["images"]), truth["logits"]) <= 2e-5


@pytest.mark.parametrize("case", ["bv_learn_gap", "bv_learn_tok", "bv_learn_map_rep"])
def test_stacked_layers_of_big_vision_are_the_same_model(golden_file, case, tmp_path):
    """As big_vision writes a model that was trained with `scan=True`: one block, its tensors with an axis of layers."""
    arrays = arrays_of(checkpoint(golden_file, case))
    layers = {key for key in arrays if "encoderblock_" in key}
    stacked = {key: array for key, array in arrays.items() if key not in layers}
    for key in sorted(key for key in layers if "encoderblock_0/" in key):
        depth = len([layer for layer in layers if layer.endswith(key.partition("encoderblock_0")[2])])
        each = [arrays[key.replace("encoderblock_0/", f"encoderblock_{i}/")] for i in range(depth)]
        stacked[key.replace("encoderblock_0/", "encoderblock/")] = np.stack(each)
    save_npz(tmp_path / "model.npz", stacked)
    found, truth = read(tmp_path / "model.npz"), loaded(checkpoint(golden_file, case))
    assert found.format == "big_vision-scan"
    assert same_bits(found.weights.state, truth.weights.state)


# ------------------------------------------------------------------------------------------------------ adaptation

POSITIONS: dict[str, Architecture] = {
    "1d": SMALL,
    "1d in every block": replace(SMALL, injection="every", pool="mean", class_token=False),
    "1d shared": replace(SMALL, injection="shared"),
    "1d, rule timm": replace(SMALL, resize="timm"),
    "2d": replace(SMALL, position="2d"),
    "2d in every block, rule torchvision": replace(SMALL, position="2d", injection="every", resize="torchvision"),
    "relative": replace(SMALL, position="relative"),
    "sincos2d": replace(SMALL, position="sincos2d"),
    "none": replace(SMALL, position="none"),
    "axial": ARCHITECTURES["axial"],
    "hybrid": ARCHITECTURES["hybrid"],
    "AxialResNet": ARCHITECTURES["AxialResNet"],
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("size", [(64, 64), (16, 16), (24, 56)])
def test_adapted_to_a_size_is_resized_at_run_time(name, size):
    weights = random_weights(POSITIONS[name])
    adapted = adapt(weights, Adaptation(image=size))
    images = pictures(2, 3, *size)
    assert adapted.architecture == replace(weights.architecture, image=size)
    assert gap(run(adapted, images), run(weights, images)) <= 1e-5
    untouched = [key for key in weights.state if not any(word in key for word in ("position", "relative", "offsets"))]
    assert all(adapted.state[key] is weights.state[key] for key in untouched)


@pytest.mark.parametrize("name", ["tanh", "hybrid", "AxialResNet"])
def test_an_unchanged_request_changes_nothing(name):
    weights = random_weights(ARCHITECTURES[name])
    c = weights.architecture
    patch = c.patch if isinstance(c, ViTConfig) else None
    same = adapt(weights, Adaptation(image=c.image, patch=patch, channels=c.channels, classes=c.classes))
    assert same.changes == ()
    assert all(same.state[key] is array for key, array in weights.state.items())


@given(old=st.integers(1, 7), more=st.integers(0, 7), seed=st.integers(0, 99))
def test_a_resized_patch_keeps_its_embedding(old, more, seed):
    """<resize(patch), new kernel> = <patch, kernel>, FlexiViT's reason for the pseudo-inverse."""
    kernel, patch = pictures(4, 3, old, old, seed=seed), pictures(1, 3, old, old, seed=seed + 1)
    larger = F.interpolate(patch, size=(old + more, old + more), mode="bilinear", antialias=True)
    before = torch.einsum("dcij,bcij->bd", kernel, patch)
    after = torch.einsum("dcij,bcij->bd", resize_patch_kernel(kernel, old + more, "siglip"), larger)
    assert gap(after, before) <= 1e-5 * (1 + float(before.abs().max()))


def test_larger_patches_of_larger_images_give_the_same_logits():
    """Each patch is resized by itself, so the tokens are the same; the table must not pass through another grid."""
    weights = random_weights(replace(SMALL, image=(32, 48)))
    images = pictures(2, 3, 32, 48)
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8)  # (b, c, h, w, 8, 8)
    larger = F.interpolate(patches.reshape(-1, 1, 8, 8), size=(12, 12), mode="bilinear", antialias=True)
    stitched = larger.reshape(2, 3, 4, 6, 12, 12).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 48, 72)
    adapted = adapt(weights, Adaptation(patch=12, image=(48, 72)))
    assert gap(run(adapted, stitched), run(weights, images)) <= 1e-5
    assert adapted.changes == ("patch 8 -> 12 (pseudo-inverse resize, rule siglip), image 32x48 -> 48x72 pixels",)
    config: Any = adapt(weights, Adaptation(patch=60, image=120)).architecture
    assert config.grid((120, 120)) == (2, 2)  # 60 does not fit the old image


def test_a_patch_alone_changes_the_grid():
    adapted = adapt(random_weights(SMALL), Adaptation(patch=4))
    assert adapted.state["positions.0.table"].shape == (8, 8, 32)
    assert adapted.changes == ("patch 8 -> 4 (pseudo-inverse resize, rule siglip), grid 4x4 -> 8x8 (rule google)",)


def test_one_channel_gives_the_output_of_repeated_channels():
    weights = random_weights(SMALL)
    grey = pictures(2, 1, 32, 32)
    one = adapt(weights, Adaptation(channels=1))
    assert gap(run(one, grey), run(weights, grey.expand(-1, 3, -1, -1))) <= 1e-5
    three = adapt(one, Adaptation(channels=3))
    assert gap(run(three, grey.expand(-1, 3, -1, -1)), run(one, grey)) <= 1e-5
    assert one.changes == ("channels 3 -> 1 (summed)",)


@pytest.mark.parametrize("channels", [2, 4, 5, 6])
def test_more_channels_repeat_the_old_ones(channels):
    weights = random_weights(SMALL)
    kernel, adapted = weights.state["embed.weight"], adapt(weights, Adaptation(channels=channels)).state["embed.weight"]
    assert all(gap(adapted[:, j], kernel[:, j % 3] * 3 / channels) <= 1e-7 for j in range(channels))
    if channels == 6:
        images = pictures(2, 3, 32, 32)
        twice = run(adapt(weights, Adaptation(channels=6)), images.repeat(1, 2, 1, 1))
        assert gap(twice, run(weights, images)) <= 1e-5


@pytest.mark.parametrize("name", ["hybrid", "BiT"])
def test_channels_of_a_standardised_root_are_noted_as_approximate(name):
    adapted = adapt(random_weights(ARCHITECTURES[name]), Adaptation(channels=1))
    assert run(adapted, pictures(1, 1, 32, 32)).shape == (1, 5)
    assert "approximate" in adapted.changes[0]


@pytest.mark.parametrize("name", ["tanh layer", "hybrid", "BiT"])
def test_other_classes_get_a_zero_head_on_the_same_encoder(name):
    weights = random_weights(ARCHITECTURES[name])
    images = pictures(2, 3, 32, 32)
    new, bare = adapt(weights, Adaptation(classes=7)), adapt(weights, Adaptation(classes=0))
    with torch.no_grad():
        features = assemble(weights).features(images)
    assert torch.equal(run(new, images), torch.zeros(2, 7))
    assert torch.equal(run(bare, images), features)
    tanh = " without its tanh layer" if name == "tanh layer" else ""
    assert new.changes == (f"head 5 -> 7 classes{tanh}, zero-initialised",)
    assert bare.changes == (f"head 5 -> 0 classes{tanh}",)


def test_several_changes_are_recorded_one_by_one():
    weights = random_weights(SMALL)
    adapted = adapt(weights, Adaptation(image=(40, 24), channels=1, classes=3, resize="hf"))
    step = adapt(
        adapt(adapt(weights, Adaptation(channels=1)), Adaptation(image=(40, 24), resize="hf")), Adaptation(classes=3)
    )
    assert same_bits(adapted.state, step.state)
    assert adapted.changes == (
        "channels 3 -> 1 (summed)",
        "image 32x32 -> 40x24 pixels, grid 4x4 -> 5x3 (rule hf)",
        "head 5 -> 3 classes, zero-initialised",
    )
    assert run(adapted, pictures(2, 1, 40, 24)).shape == (2, 3)


IMPOSSIBLE: list[tuple[dict[str, int], str]] = [
    ({"patch": 0}, "patch must be at least 1"),
    ({"channels": 0}, "cannot have 0 channels"),
    ({"classes": -1}, "cannot have -1 classes"),
    ({"image": 4}, "smaller than one patch"),
]


@pytest.mark.parametrize(("wish", "words"), IMPOSSIBLE)
def test_impossible_adaptations_are_refused(wish, words):
    with pytest.raises(UserError, match=words):
        adapt(random_weights(SMALL), Adaptation(**wish))
