"""What was held out stays held out: images are told apart by their content, whatever became of their names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import Crash, crash_at, make_pictures, outcome, said, states, train

import vitral
from vitral.data import contents
from vitral.data.contents import RunContents
from vitral.data.images import encode_png
from vitral.data.sources import open_data
from vitral.errors import UserError

HELD_OUT = 6  # of 30 images, 2 of each class


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=10)


@pytest.fixture(scope="module")
def run(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(original, out, "steps=2")
    return out


@pytest.fixture
def pictures(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "pictures"))


def new_picture(path: Path, seed: int = 99) -> None:
    path.write_bytes(encode_png(np.random.default_rng(seed).integers(0, 255, (12, 12, 3)).astype(np.uint8)))


def test_the_run_keeps_the_hash_of_each_image(original, run):
    kept = json.loads((run / "split.json").read_text())
    opened = open_data(original)
    for split in (opened.train, opened.test):
        assert split is not None
        expected = [hashlib.sha256((original / key).read_bytes()).hexdigest()[:16] for key in split.keys]
        assert kept["splits"][split.name]["hashes"] == expected
    assert (kept["evaluated"], kept["reason"]) == ("test", "")


def add_one(folder: Path) -> Path:
    new_picture(folder / "class-1" / "a new one.png")
    return folder


def rename_all(folder: Path) -> Path:
    for path in sorted(folder.glob("*/*.png")):
        path.rename(path.with_name(f"photo-{hashlib.md5(str(path).encode()).hexdigest()}.png"))
    return folder


def replace_one(folder: Path) -> Path:
    """A held-out image becomes another one, under its name."""
    held_out = open_data(folder).test
    assert held_out is not None
    new_picture(folder / held_out.keys[0])
    return folder


def leak_one(folder: Path) -> Path:
    """A held-out image becomes a copy of a training image, under its name."""
    opened = open_data(folder)
    assert opened.test is not None
    shutil.copy(folder / opened.train.keys[0], folder / opened.test.keys[0])
    return folder


def listed(folder: Path) -> Path:
    lines = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.glob("*/*.png"))]
    (folder / "list.csv").write_text("\n".join(["path,label", *reversed(lines)]))
    return folder / "list.csv"


def packed(folder: Path) -> Path:
    with tarfile.open(folder.parent / "shard.tar", "w") as archive:
        for number, path in enumerate(sorted(folder.glob("*/*.png"))):
            archive.add(path, f"{path.parent.name}/{number}.png")
    return folder.parent / "shard.tar"


CHANGES: list[tuple[Callable[[Path], Path], tuple[int, int, int, int]]] = [
    (add_one, (24, 31, 6, 1)),
    (rename_all, (24, 30, 6, 0)),
    (replace_one, (24, 30, 5, 1)),
    (leak_one, (25, 30, 5, 0)),
    (lambda folder: listed(rename_all(folder)), (24, 30, 6, 0)),
    (packed, (24, 30, 6, 0)),
    (lambda folder: packed(add_one(folder)), (24, 31, 6, 1)),
]


@pytest.mark.parametrize("change, counts", CHANGES)
def test_training_images_are_left_out_and_new_ones_scored_apart(pictures, run, change, counts):
    trained, images, held_out, new = counts
    found = vitral.evaluate(run, change(pictures), device="cpu")
    assert found.notes[0] == (
        f"{trained} of {images} images were trained on and are left out; {held_out} held out, {new} new."
    )
    assert found.metrics["n"] == held_out
    assert (found.new["n"] if found.new else 0) == new
    assert ("The new images are scored apart: top1 " in found.notes[1]) == (new > 0)
    if held_out == HELD_OUT:
        assert found.metrics["top1"] == json.loads((run / "result.json").read_text())["metrics"]["top1"]


def test_unchanged_data_is_scored_as_the_run_was(pictures, run):
    found = vitral.evaluate(run, pictures, device="cpu")
    assert (
        found.notes[0] == "The model was trained on this data: only the 6 held-out images of its test split are scored."
    )
    assert (found.metrics["n"], found.new) == (HELD_OUT, None)


def test_other_images_with_the_same_names_are_other_images(run, tmp_path):
    other = make_pictures(tmp_path / "other", images=10, size=14)
    found = vitral.evaluate(run, other, device="cpu")
    assert found.notes[0] == "All 30 images are scored."
    assert (found.metrics["n"], found.new) == (30, None)


def test_data_of_training_images_alone_is_refused(pictures, run):
    held_out = open_data(pictures).test
    assert held_out is not None
    for key in held_out.keys:
        (pictures / key).unlink()
    with pytest.raises(UserError, match="trained on all 24 images"):
        vitral.evaluate(run, pictures)
    add_one(pictures)
    found = vitral.evaluate(run, pictures, device="cpu")
    assert found.notes[0] == "24 of 25 images were trained on and are left out; 0 held out, 1 new."
    assert (found.metrics["n"], found.new) == (1, None)


def test_a_training_image_in_the_test_split_is_named(tmp_path):
    for split in ("train", "test"):
        make_pictures(tmp_path / "data" / split, images=3, size=12 if split == "train" else 14)
    shutil.copy(tmp_path / "data/train/class-0/0.png", tmp_path / "data/test/class-0/0.png")
    notes = said(tmp_path / "data", tmp_path / "run", "steps=1")
    repeats = [note for note in notes if "byte for byte" in note]
    assert repeats == [
        "1 of the 9 test images equals a training image byte for byte, so that scores are too high: `vitral check` "
        "lists the copies"
    ]
    assert json.loads((tmp_path / "run" / "data.json").read_text())["notes"] == repeats
    found = vitral.evaluate(tmp_path / "run", tmp_path / "data", device="cpu")
    assert found.notes[1] == "1 of them equals a training image byte for byte."
    assert found.metrics["n"] == 9
    new_picture(tmp_path / "data/train/class-0/more.png")
    found = vitral.evaluate(tmp_path / "run", tmp_path / "data", device="cpu")
    assert found.notes[0] == "1 of 9 images were trained on and are left out; 8 held out, 0 new."


def test_each_held_out_split_is_found_again(pictures, tmp_path):
    train(pictures, tmp_path / "run", "data.dev=0.25", "steps=1")
    add_one(pictures)
    for split, other in (("", "test"), ("dev", "test"), ("test", "dev")):
        found = vitral.evaluate(tmp_path / "run", pictures, split=split, device="cpu")
        assert found.notes[0] == (
            f"18 of 31 images were trained on and are left out, 6 of its {other} split as well; 6 held out, 1 new."
        )
    with pytest.raises(UserError, match='has no split "val" to score'):
        vitral.evaluate(tmp_path / "run", pictures, split="val")


def test_where_contents_are_not_known_that_is_said(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "MAX_IMAGES", 29)
    assert any("there are 30 images, and at most 29 are hashed" in note for note in said(pictures, tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "split.json").read_text())["splits"] == {}
    found = vitral.evaluate(tmp_path / "run", pictures, device="cpu")
    assert found.metrics["n"] == HELD_OUT
    add_one(pictures)
    found = vitral.evaluate(tmp_path / "run", pictures, device="cpu")
    assert found.notes[1].startswith("Whether the model was trained on some of them is unknown: there are 30 images")
    (tmp_path / "run" / "split.json").unlink()
    found = vitral.evaluate(tmp_path / "run", pictures, device="cpu")
    assert found.notes[1].endswith("is unknown: the run has no split.json.")


# Resuming


@pytest.fixture
def stopped(pictures: Path, tmp_path: Path) -> Path:
    with pytest.raises(Crash):
        train(pictures, tmp_path / "run", "steps=4", on_event=crash_at(3))
    return tmp_path / "run"


def test_replaced_images_are_another_run(pictures, stopped):
    opened = open_data(pictures)
    assert opened.test is not None
    for number, key in enumerate([*opened.train.keys[3:9], opened.test.keys[1]]):
        new_picture(pictures / key, seed=number)
    with pytest.raises(UserError) as refused:
        train(pictures, stopped, "steps=4")
    assert str(refused.value) == (
        f"7 images have changed since the run in {stopped} began, first {opened.train.keys[3]}: "
        "restore what was there, or start a new run in another folder with --out."
    )
    assert len(states(stopped)) == 1
    assert not (stopped / ".lock").exists()


def test_touched_and_copied_images_are_the_same(original, pictures, stopped, tmp_path):
    train(original, tmp_path / "whole", "steps=4")
    for path in pictures.glob("*/*.png"):
        os.utime(path, (1, 1))
    assert "resuming from step 2" in said(pictures, stopped, "steps=4")
    assert outcome(stopped) == outcome(tmp_path / "whole")


def test_only_images_with_a_new_mark_are_read_again(pictures, tmp_path, monkeypatch):
    opened = open_data(pictures)
    (tmp_path / "split.json").write_text(RunContents.of(opened, "test").to_json())
    recorded = RunContents.read(tmp_path / "split.json")
    assert recorded is not None
    read: list[int] = []
    real = contents._content_hash
    monkeypatch.setattr(contents, "_content_hash", lambda reader, index: read.append(index) or real(reader, index))
    assert recorded.changed(opened.train) == []
    assert read == []
    key = opened.train.keys[5]
    os.utime(pictures / key, (1, 1))
    assert recorded.changed(opened.train) == []
    assert len(read) == 1
    (pictures / key).write_bytes((pictures / key).read_bytes() + b"\0")
    assert recorded.changed(opened.train) == [key]
    (pictures / key).unlink()
    assert recorded.changed(opened.train) == [key]


def test_a_file_without_the_record_of_its_run_says_so(original: Path, run: Path, tmp_path: Path) -> None:
    """Its temperature tells that it was trained, and nothing tells on what."""
    model, card = vitral.load(run)
    for temperature, warned in ((0.5, True), (1.0, False)):
        vitral.save(model, tmp_path / "model.safetensors", replace(card, temperature=temperature))
        notes = vitral.evaluate(tmp_path / "model.safetensors", original).notes
        assert any("does not record which images" in note for note in notes) is warned
    assert not any("does not record" in note for note in vitral.evaluate(run, original).notes)
