"""Whole runs of masked autoencoders (masked.target=mae): they learn, resume, and go on from files with a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Crash, crash_at, make_pictures, outcome

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.mae import read_mae, write_mae
from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.mae import MaeConfig, MaskedAutoencoder
from vitral.models.vit import ViT
from vitral.training.masked import MaeModel

DECODER = {"width": 16, "depth": 1, "heads": 2, "mlp": 64}
TINY = (
    *("objective=masked", "masked.target=mae", "masked.ratio=0.75", "masked.norm_pixels=false"),
    *(f"masked.decoder_{key}={value}" for key, value in DECODER.items() if key != "mlp"),
    *("steps=8", "batch=6", "workers=0", "data.mixup=0", "evaluate_every=4", "save_every=2", "schedule.warmup=0"),
    *("data.eval_transform=decode|resize({size})", "data.train_transform=decode|inception_crop({size})|flip"),
)
SHAPE = ("shape.depth=2", "shape.width=16", "shape.heads=2")
CONFIG = ViTConfig(depth=2, width=16, mlp=64, heads=2, patch=4, image=(16, 16), classes=0, gelu="erf")


def train(pictures: Path, out: Path, *words: str, on_event: Any = lambda event: None, **options: Any) -> Any:
    shape = () if "init" in options else SHAPE
    options = options if "init" in options else {"model": "ViT-Ti/4@16", **options}
    words = (*TINY, *shape, *words)
    return vitral.train(pictures, out=out, set=words, device="cpu", on_event=on_event, **options).results[0]


def autoencoder(config: ViTConfig = CONFIG) -> MaskedAutoencoder:
    torch.manual_seed(5)
    encoder = build(config)
    assert isinstance(encoder, ViT)
    return MaskedAutoencoder(encoder, MaeConfig(**DECODER, norm_pixels=False))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def test_a_run_learns_and_keeps_the_encoder(pictures, tmp_path):
    first = train(pictures, tmp_path / "0", "steps=1", "optim.lr=1e-30").metrics
    last = train(pictures, tmp_path / "1", "steps=60", "optim.lr=0.01", "evaluate_every=60").metrics
    assert last["masked_loss"] < 0.9 * first["masked_loss"]
    assert "masked_accuracy" not in last
    model, card = vitral.load(tmp_path / "1")
    assert (model.config.classes, card.class_names) == (0, ())
    assert not any("decoder" in name for name in model.state_dict())
    kept, _ = read_mae(tmp_path / "1" / "mae")
    assert kept.config == MaeConfig(**DECODER, norm_pixels=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(kept.encoder.state_dict()[name], tensor)
    frozen = ("steps=1", "optim.lr=1e-30", "optim.weight_decay=0")
    again = train(pictures, tmp_path / "2", *frozen, init=tmp_path / "1" / "mae").metrics
    assert again["masked_loss"] == pytest.approx(last["masked_loss"], abs=1e-5)


def test_a_run_that_crashed_goes_on_to_the_same_bits(pictures, tmp_path):
    words = ("optim.layer_decay=0.5", "evaluate_every=2", "patience=9")  # the decoder is written several times
    train(pictures, tmp_path / "whole", *words)
    with pytest.raises(Crash):
        train(pictures, tmp_path / "run", *words, on_event=crash_at(3))
    train(pictures, tmp_path / "run", *words)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_weights_with_a_decoder_are_gone_on_from(pictures, tmp_path):
    """The held-out loss before any step is that of the model in the file, which depends on its decoder."""
    frozen, notes = ("steps=1", "optim.lr=1e-30", "optim.weight_decay=0"), []
    model = autoencoder()
    write_mae(model, tmp_path / "mae")
    found = train(pictures, tmp_path / "0", *frozen, init=tmp_path / "mae", on_event=notes.append)
    with torch.no_grad():
        model.decoder.predict.bias.add_(3.0)
    write_mae(model, tmp_path / "changed")
    changed = train(pictures, tmp_path / "1", *frozen, init=tmp_path / "changed", on_event=notes.append)
    assert changed.metrics["masked_loss"] > found.metrics["masked_loss"] + 3
    assert not any("a new one is trained" in str(event) for event in notes)
    vitral.save(model.encoder, tmp_path / "encoder.safetensors")
    train(pictures, tmp_path / "2", *frozen, init=tmp_path / "encoder.safetensors", on_event=notes.append)
    assert any("has no decoder of a masked autoencoder: a new one is trained" in str(event) for event in notes)


def test_a_decoder_of_other_sizes_is_one_sentence(pictures, tmp_path):
    write_mae(autoencoder(), tmp_path / "mae")
    with pytest.raises(UserError, match="its decoder has width=16, not 32: set the sizes of the decoder"):
        train(pictures, tmp_path / "run", "masked.decoder_width=32", init=tmp_path / "mae")
    with pytest.raises(UserError, match="its decoder has heads=2, not 4"):
        train(pictures, tmp_path / "run", "masked.decoder_heads=4", init=tmp_path / "mae")
    with pytest.raises(UserError, match=r"must be a multiple of masked\.decoder_heads"):
        train(pictures, tmp_path / "run", "masked.decoder_heads=3", init=tmp_path / "mae")
    with pytest.raises(UserError, match="needs a plain ViT"):
        train(pictures, tmp_path / "run", "shape.position=relative")


def test_masks_depend_on_the_seed_the_step_and_the_image_alone():
    def hidden(seed: int, step: int, keys: list[int]) -> torch.Tensor:
        model = MaeModel(autoencoder().encoder, MaeConfig(**DECODER), seed)
        seen: list[torch.Tensor] = []
        model.autoencoder.register_forward_hook(lambda module, inputs, output: seen.append(output.hidden))
        images = torch.zeros(len(keys), 3, 16, 16)
        model(images, images.byte(), torch.tensor(keys), step)
        return seen[0]

    first = hidden(0, 1, [7, 3, 7])
    assert torch.equal(first, hidden(0, 1, [7, 3, 7]))
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], hidden(0, 1, [3])[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, hidden(0, 2, [7, 3, 7]))
    assert not torch.equal(first, hidden(1, 1, [7, 3, 7]))
    assert first.sum(dim=1).tolist() == [12, 12, 12]
