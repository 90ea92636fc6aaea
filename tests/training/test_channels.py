"""Images with other channels than RGB: the model takes as many, from scratch, from weights and of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import MODEL, TINY, make_pictures, train
from safetensors.torch import load_file
from torch import nn

import vitral
from vitral.errors import UserError
from vitral.events import Event, Note

BANDS = 5
WORDS = [
    *TINY,
    "steps=40",
    "evaluate_every=40",
    "save_every=40",
    "data.mixup=0",
    "data.train_transform=decode|resize({size})",
    "schedule.warmup=0",
]
SMALL = {"depth": 2, "width": 16, "mlp": 64, "heads": 2}
PLAIN = [word for word in WORDS if not word.startswith("shape.")]


def bands(count: int, seed: int = 0) -> list[tuple[np.ndarray, str]]:
    """Noise in which only the last band tells the class."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 12, 12, BANDS)).astype(np.uint8)
    for number in range(count):
        images[number, ..., -1] = 40 + 80 * (number % 3)
    return [(image, "abc"[number % 3]) for number, image in enumerate(images)]


def fit(out: Path, *words: str, **options: Any) -> tuple[vitral.TrainResult, list[str]]:
    notes: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    options.setdefault("set", [*WORDS, *words])
    data = (bands(60), bands(30, seed=1))
    return vitral.train(data, out=out, device="cpu", on_event=note, **options), notes


def test_a_new_model_learns_from_a_band_behind_the_third(tmp_path):
    result, notes = fit(tmp_path / "run", model=MODEL)
    assert result.mean > 0.9
    assert any("the images have 5 channels, and so has the model" in note for note in notes)
    model, card = vitral.load(tmp_path / "run")
    assert card.preprocess is not None
    assert (model.config.channels, card.preprocess.mean) == (BANDS, (0.5,) * BANDS)
    held_out = bands(30, seed=2)
    found = vitral.predict(tmp_path / "run", [image for image, _ in held_out], device="cpu")
    assert np.mean([row.names[0] == label for row, (_, label) in zip(found.rows, held_out, strict=True)]) > 0.9
    with pytest.raises(UserError, match="3 channels"):
        vitral.predict(tmp_path / "run", [np.zeros((12, 12, 3), np.uint8)], device="cpu")


def test_a_folder_of_npy_files_trains_like_its_arrays(tmp_path):
    splits = {"train": bands(60), "test": bands(30, seed=1)}
    for split, items in splits.items():
        for number, (image, label) in enumerate(items):
            (tmp_path / "data" / split / label).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "data" / split / label / f"{number:02d}.npy", image)
    in_order = tuple(sorted(items, key=lambda item: item[1]) for items in splits.values())
    options: dict[str, Any] = {"device": "cpu", "set": [*WORDS, "steps=3"], "model": MODEL}
    vitral.train(tmp_path / "data", out=tmp_path / "files", **options)
    vitral.train(in_order, out=tmp_path / "arrays", **options)
    files, arrays = (load_file(tmp_path / name / "model.safetensors") for name in ("files", "arrays"))
    assert files.keys() == arrays.keys()
    assert all(torch.equal(files[name], arrays[name]) for name in files)


def test_weights_for_three_channels_are_adapted(tmp_path):
    pictures = tmp_path / "rgb.safetensors"
    vitral.save(vitral.create("ViT-Ti/4@8", classes=3, **SMALL), pictures)
    result, notes = fit(tmp_path / "run", init=pictures, set=[*PLAIN, "steps=1", "optim.lr=1e-12"])
    model, card = result.load()
    assert any("channels 3 -> 5 (tiled and scaled)" in note for note in notes)
    before, after = vitral.load(pictures)[0].get_parameter("embed.weight"), model.get_parameter("embed.weight")
    torch.testing.assert_close(after, before[:, [0, 1, 2, 0, 1]] * 3 / 5, atol=1e-6, rtol=0)
    assert card.preprocess is not None
    assert card.preprocess.std == (0.5,) * BANDS


@pytest.mark.parametrize("of_vitral", [True, False])
def test_a_model_of_ones_own_has_its_channels(tmp_path, of_vitral):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(BANDS, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = vitral.create("ViT-Ti/4@8", classes=3, **SMALL, channels=BANDS) if of_vitral else net
    result, _ = fit(tmp_path / "run", model=model, set=[*PLAIN, "image=8", "steps=2"])
    assert result.results[0].metrics["n"] == 30


def test_own_mean_and_std_are_kept(tmp_path):
    own = ("data.mean=0.1,0.2,0.3,0.4,0.5", "data.std=1,1,1,1,2")
    result, notes = fit(tmp_path / "run", *own, "steps=1", model=MODEL)
    preprocess = result.load()[1].preprocess
    assert preprocess is not None
    assert preprocess.std == (1, 1, 1, 1, 2)
    assert not any("channels" in note for note in notes)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"model": MODEL, "set": [*WORDS, "data.mean=0,0,0", "data.std=1,1,1"]},
            "have 5 channels and the model 3: set",
        ),
        ({"model": vitral.create("ViT-Ti/4@8", classes=3, **SMALL), "set": PLAIN}, "have 5 channels and the model 3"),
    ],
)
def test_channels_that_do_not_fit_are_refused_before_the_run(tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        fit(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("channels, mode", [(1, "RGB"), (4, "RGBA"), (4, "CMYK")])
def test_pictures_with_as_many_bands_as_there_are_means(tmp_path, channels, mode):
    """One channel is grey; four are read as stored, instead of composited or converted."""
    for path in sorted(make_pictures(tmp_path / "pictures").rglob("*.png")):
        picture = Image.open(path).convert(mode)
        path.unlink()
        picture.save(path.with_suffix(".tif"))
    means = (f"data.{name}=" + ",".join(["0.5"] * channels) for name in ("mean", "std"))
    train(tmp_path / "pictures", tmp_path / "run", *means, "steps=1")
    assert vitral.load(tmp_path / "run")[0].config.channels == channels


@pytest.mark.parametrize("first", ["grey", "unreadable"])
def test_the_first_image_that_is_not_grey_states_the_channels(tmp_path, first):
    for split, items in {"train": bands(60), "test": bands(30, seed=1)}.items():
        for number, (image, label) in enumerate(items):
            (tmp_path / "data" / split / label).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "data" / split / label / f"{number:02d}.npy", image)
    path = tmp_path / "data" / "train" / "a" / "00.npy"
    if first == "grey":
        np.save(path, np.zeros((12, 12), np.uint8))
    else:
        path.write_bytes(b"not an array")
    result = vitral.train(tmp_path / "data", out=tmp_path / "run", device="cpu", model=MODEL, set=[*WORDS, "steps=1"])
    assert result.load()[0].config.channels == BANDS
    assert len(result.results[0].unreadable) == (first == "unreadable")


def test_few_shots_of_images_with_other_channels(tmp_path):
    weights = tmp_path / "rgb.safetensors"
    vitral.save(vitral.create("ViT-Ti/4@8", classes=0, **SMALL), weights)
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(3):
                np.save(tmp_path / "data" / split / name / f"{number}.npy", np.full((12, 12, 5), number, np.uint8))
    with pytest.raises(UserError, match=r"a/0.npy first \(the file has 5 channels, not 3\): see `vitral check`"):
        vitral.fewshot(weights, tmp_path / "data", shots=[1], device="cpu")
    for path in (tmp_path / "data").rglob("[01].npy"):
        np.save(path, np.load(path)[..., :3])
    result = vitral.fewshot(weights, tmp_path / "data", shots=[1], device="cpu")
    assert "2 of 6 train images cannot be read (train/a/2.npy: the file has 5 channels, not 3)." in result.notes
