"""The defaults for folders with few or uneven images: seen from the data, and only where the run's own parts allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_pictures
from torch.nn.functional import cross_entropy

import vitral
from vitral.api.recipes import choose_recipe
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card
from vitral.models.build import build
from vitral.training.callbacks import OwnParts

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)
COUNTS = (8, 4, 2)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    folder = make_pictures(tmp_path / "data" / "train")
    make_pictures(tmp_path / "data" / "test", images=2)
    for label, count in enumerate(COUNTS):
        for number in range(count, 8):
            (folder / f"class-{label}" / f"{number}.png").unlink()
    return folder.parent


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    vitral.save(build(TINY), tmp_path / "w.safetensors", Card(TINY, class_names=("a", "b", "c")))
    return tmp_path / "w.safetensors"


def chosen(data: Path, weights: Path, *words: str, own_parts: OwnParts | None = None) -> tuple[str, str, str]:
    """What is trained, how classes are balanced, and the reasons."""
    _, recipe, reasons = choose_recipe(data, init=weights, set=words, device="cpu", own_parts=own_parts)
    return recipe.trainable, recipe.balance, "\n".join(reasons)


def test_counts_of_a_folder_choose_head_and_balance(uneven, weights):
    trainable, balance, reasons = chosen(uneven, weights)
    assert (trainable, balance) == ("head", "logit-adjust")
    assert "14 images, 4 in a typical class" in reasons
    assert "classes have 2 to 8 images" in reasons
    trainable, balance, reasons = chosen(uneven, weights, "trainable=full", "balance=none")
    assert (trainable, balance) == ("full", "none")
    assert "classes have" not in reasons


def test_own_loss_is_not_balanced(uneven, weights):
    trainable, balance, _ = chosen(uneven, weights, own_parts=OwnParts(loss=cross_entropy))
    assert (trainable, balance) == ("head", "none")


def test_own_transform_trains_all_layers(uneven, weights):
    trainable, balance, _ = chosen(
        uneven, weights, own_parts=OwnParts(train_transform=lambda image: image.resize((8, 8)))
    )
    assert (trainable, balance) == ("full", "logit-adjust")
