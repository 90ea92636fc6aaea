"""The real ViT-Ti/16 on real photographs: the number its weights are known for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral

WEIGHTS = "data/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"


@pytest.fixture(scope="module")
def logits(assets: Path) -> dict[str, torch.Tensor]:
    """Outputs for one photograph of each class, by the path below the folder."""
    model, _ = vitral.load(assets / WEIGHTS)
    folder = assets / "data" / "imagenet_val_1000"
    files = sorted(folder.glob("*/*"))
    assert len(files) == 1000
    found = {}
    with torch.inference_mode():
        for start in range(0, len(files), 50):
            batch = files[start : start + 50]
            outputs = model(torch.stack([pixels(path) for path in batch]))
            found.update({str(path.relative_to(folder)): row for path, row in zip(batch, outputs, strict=True)})
    return found


def pixels(path: Path) -> torch.Tensor:
    """Short side to 248 (bicubic), centre crop of 224, values from -1 to 1: what the weights were evaluated with."""
    picture = Image.open(path).convert("RGB")
    scale = 248 / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
    crop = np.array(picture.crop((left, top, left + 224, top + 224)))
    return torch.from_numpy(crop).permute(2, 0, 1).float() / 127.5 - 1


def test_it_loads_by_itself(assets: Path) -> None:
    model, card = vitral.load(assets / WEIGHTS)
    assert card.format == "timm"
    assert card.changes == ()
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416
    assert (card.architecture.image, card.architecture.classes) == ((224, 224), 1000)
    assert card.sha256 == "bacee59cf95f20e8f5c24108883cdbfefc20562abbda912bf83c29e28970b0dc"


def test_top_1_is_72_4_percent(logits: dict[str, torch.Tensor]) -> None:
    right = sum(int(path.split("/")[0]) == int(row.argmax()) for path, row in logits.items())
    assert right / len(logits) == pytest.approx(0.724, abs=0.002)


def test_top_5_is_91_9_percent(logits: dict[str, torch.Tensor]) -> None:
    right = sum(int(path.split("/")[0]) in row.topk(5).indices.tolist() for path, row in logits.items())
    assert right / len(logits) == pytest.approx(0.919, abs=0.002)
