"""Masked autoencoders with their decoder: the loss and pixels of transformers, from its files and Meta's, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import outside, quiet, randomised
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.mae import read_mae, write_mae
from vitral.checkpoints.weights import read
from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.mae import MaeConfig, MaskedAutoencoder
from vitral.models.vit import ViT

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 8, "decoder_hidden_size": 24, "decoder_num_hidden_layers": 3},
    **{"decoder_num_attention_heads": 2, "decoder_intermediate_size": 40},
}
# Names of transformers' files -> of Meta's.
PARTS = {
    **{"vit.embeddings.cls_token": "cls_token", "vit.embeddings.position_embeddings": "pos_embed"},
    **{"vit.embeddings.patch_embeddings.projection": "patch_embed.proj", "vit.layernorm": "norm"},
    **{"decoder.mask_token": "mask_token", "decoder.": "", "vit.encoder.layer": "blocks"},
    **{"decoder_layers": "decoder_blocks", "decoder_encoder.layer": "decoder_blocks"},
    **{"attention.output.dense": "attn.proj", "layernorm_before": "norm1", "layernorm_after": "norm2"},
    **{"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"},
}


def theirs(**settings: Any) -> Any:
    library = outside("transformers")
    with quiet():
        model = library.ViTMAEForPreTraining(library.ViTMAEConfig(**{**SIZES, **settings}))
    return randomised(model, 3)


def saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def metas(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by the names of Meta's code, with queries, keys and values in one projection."""
    state: dict[str, Tensor] = {}
    for key, tensor in sorted(load_file(folder / "model.safetensors").items()):
        for name, meta in PARTS.items():
            key = key.replace(name, meta)
        state[key] = tensor
    for key in [key for key in state if ".attention.attention.query." in key]:
        parts = [state.pop(key.replace("query", part)) for part in ("query", "key", "value")]
        state[key.replace("attention.attention.query", "attn.qkv")] = torch.cat(parts)
    return state


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, 32, 32, generator=generator), torch.rand(3, 16, generator=generator)


def assert_same(ours: MaskedAutoencoder, model: Any) -> None:
    images, noise = inputs()
    with torch.no_grad(), quiet():
        expected, found = model(images, noise=noise), ours(images, noise)
    assert torch.equal(found.hidden, expected.mask.bool())
    torch.testing.assert_close(found.pixels, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.losses.mean(), expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"norm_pix_loss": True}, {"mask_ratio": 0.5, "layer_norm_eps": 1e-3}])
def test_the_loss_and_the_pixels_are_those_of_transformers(tmp_path, settings):
    model = theirs(**settings)
    ours, card = read_mae(saved(model, tmp_path))
    assert_same(ours, model)
    assert card.changes == ("features are the class token of the whole image: nothing is masked",)


def test_names_of_older_files_and_of_the_memory_of_transformers_are_read(tmp_path):
    model = theirs()
    folder = saved(model, tmp_path)
    state = load_file(folder / "model.safetensors")
    older = {key.replace("decoder_encoder.layer", "decoder_layers"): tensor for key, tensor in state.items()}
    assert older.keys() != state.keys()
    save_file(older, folder / "model.safetensors")
    assert_same(read_mae(folder)[0], model)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / "model.safetensors")
    assert_same(read_mae(folder)[0], model)


def test_files_of_metas_code_are_read(tmp_path):
    model = theirs(norm_pix_loss=True, layer_norm_eps=1e-6)
    file = tmp_path / "full.pth"
    torch.save({"model": metas(saved(model, tmp_path / "hf")), "optimizer": {"step": torch.zeros(2)}}, file)
    ours, card = read_mae(file, heads=4, decoder_heads=2)
    assert any("optimizer" in change for change in card.changes)
    assert not any("decoder_" in change for change in card.changes)
    assert_same(ours, model)
    assert card.changes[-1] == "assumed: norm_pixels=True of the decoder, as MAE's paper has; pass others if not"
    encoder = read(file, hints=Hints(heads=4))
    assert any("decoder_blocks" in key for key in encoder.unmapped)
    with pytest.raises(UserError, match="number of heads of its decoder: pass decoder_heads="):
        read_mae(file, heads=4)


def test_a_written_folder_is_the_same_model_in_transformers(tmp_path):
    model = theirs(norm_pix_loss=True, mask_ratio=0.5)
    ours, card = read_mae(saved(model, tmp_path / "theirs"))
    write_mae(ours, tmp_path / "ours", card)
    with quiet():
        back = outside("transformers").ViTMAEForPreTraining.from_pretrained(tmp_path / "ours").eval()
    assert_same(ours, back)
    assert_same(read_mae(tmp_path / "ours")[0], model)


def test_a_written_file_has_metas_names(tmp_path):
    model = theirs(layer_norm_eps=1e-6)
    ours, _ = read_mae(saved(model, tmp_path / "hf"))
    write_mae(ours, tmp_path / "mae.safetensors", format="mae")
    written, expected = load_file(tmp_path / "mae.safetensors"), metas(tmp_path / "hf")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())
    assert_same(read_mae(tmp_path / "mae.safetensors", heads=4, decoder_heads=2, norm_pixels=False)[0], model)


def test_what_is_not_a_masked_autoencoder_is_refused(tmp_path):
    folder = saved(theirs(), tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({key: tensor for key, tensor in state.items() if "decoder_pred" not in key}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has no tensor decoder\.decoder_pred\.weight"):
        read_mae(folder)
    stated = json.loads((folder / "config.json").read_text())
    for change, says in (
        ({"mask_ratio": "all"}, "not a ratio of all"),
        ({"decoder_num_attention_heads": 5}, "heads=5"),
    ):
        (folder / "config.json").write_text(json.dumps({**stated, **change}))
        with pytest.raises(UserError, match=says):
            read_mae(folder)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file({**state, "decoder.extra": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"1 tensors of its decoder are not those of MAE, such as decoder\.extra"):
        read_mae(folder)
    save_file({key: tensor for key, tensor in state.items() if "decoder" not in key}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has no decoder of a masked autoencoder: load its encoder"):
        read_mae(folder)


BASE = ViTConfig(depth=1, width=16, mlp=24, heads=2, patch=8, image=(16, 24), classes=0)


@pytest.mark.parametrize(
    "changes", [{"registers": 2}, {"class_token": False, "pool": "mean"}, {"position": "sincos2d"}]
)
def test_other_vits_learn_to_reconstruct(changes):
    torch.manual_seed(0)
    encoder = build(replace(BASE, **changes))
    assert isinstance(encoder, ViT)
    model = MaskedAutoencoder(encoder, MaeConfig(width=12, depth=1, heads=2, mlp=16, ratio=0.5, norm_pixels=False))
    images = torch.randn(4, 3, 16, 24)
    noise = torch.rand(4, 6)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(images, noise).losses.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(UserError, match="images of 16x24 pixels only"):
        model(torch.randn(1, 3, 24, 24), torch.rand(1, 9))


def test_hidden_pixels_do_not_reach_the_prediction():
    encoder = build(BASE)
    assert isinstance(encoder, ViT)
    model = MaskedAutoencoder(encoder, MaeConfig(width=12, depth=1, heads=2, mlp=16, ratio=0.5)).eval()
    images, noise = torch.randn(2, 3, 16, 24), torch.arange(6.0).expand(2, 6)  # the first row of patches stays visible
    changed = images.clone()
    changed[:, :, 8:] = 5.0
    with torch.no_grad():
        before, after = model(images, noise), model(changed, noise)
    assert before.hidden.tolist() == [[False] * 3 + [True] * 3] * 2
    assert torch.equal(before.pixels, after.pixels)
    assert not torch.equal(before.losses, after.losses)


def test_models_that_cannot_skip_patches_are_refused():
    for config in (replace(BASE, position="relative"), replace(BASE, injection="shared")):
        encoder = build(config)
        assert isinstance(encoder, ViT)
        with pytest.raises(UserError, match="needs a plain ViT"):
            MaskedAutoencoder(encoder, MaeConfig(width=12, depth=1, heads=2))
    encoder = build(BASE)
    assert isinstance(encoder, ViT)
    with pytest.raises(UserError, match="of 6 patches, a ratio of"):
        MaskedAutoencoder(encoder, MaeConfig(width=12, depth=1, heads=2, ratio=0.9))
