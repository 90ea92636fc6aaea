"""Large lists of images in parts: the same files as of one process, also after an interruption."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import Crash, make_pictures, starting_from

import vitral
from vitral.api import parts as parts_module
from vitral.errors import UserError
from vitral.evaluation.predict import embed_split


@pytest.fixture
def pictures(tmp_path):
    make_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "class-1" / "broken.png").write_bytes(b"no image")
    return tmp_path / "pictures"


@pytest.fixture
def weights(tmp_path):
    starting_from(tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def outputs(weights: str, pictures: Path, out: Path, **options) -> dict[str, bytes]:
    """The files that the verbs write, by name."""
    out.mkdir()
    copies = out.parent / "copies"  # of two of the pictures
    how = {"batch": 4, "device": "cpu"}
    vitral.embed(weights, pictures, output=out / "features.npz", **how, **options)
    vitral.predict(weights, [pictures], output=out / "classes.csv", tta="flip", **how, **options)
    names = out.parent / "names.txt"
    names.write_text("class-0\nclass-1\nclass-2\n")
    vitral.evaluate(weights, pictures, output=out / "page.html", classes=names, **how, **options)
    vitral.dedupe(pictures, against=[copies], output=out / "copies.txt", device="cpu", **options)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_parts_give_the_same_files_as_one_process(weights, pictures, tmp_path, monkeypatch):
    (tmp_path / "copies" / "any").mkdir(parents=True)
    for number, name in enumerate(("class-0/1.png", "class-2/7.png")):
        shutil.copy(pictures / name, tmp_path / "copies" / "any" / f"{number}.png")
    (tmp_path / "copies" / "any" / "broken.png").write_bytes(b"no image")
    whole = outputs(weights, pictures, tmp_path / "whole")
    monkeypatch.setattr("vitral.api.check.SIGNATURE_BLOCK", 5)
    divided = outputs(weights, pictures, tmp_path / "divided", parts=3)
    assert sorted(divided) == ["classes.csv", "copies.txt", "features.npz", "page.html"]
    assert divided == whole
    assert b"class-2/7.png" in whole["copies.txt"]


def test_dedupe_counts_test_images_once(pictures, tmp_path, monkeypatch):
    (tmp_path / "tests" / "any").mkdir(parents=True)
    (tmp_path / "tests" / "any" / "broken.png").write_bytes(b"no image")
    shutil.copy(pictures / "class-0" / "1.png", tmp_path / "tests" / "any")
    monkeypatch.setattr("vitral.api.check.SIGNATURE_BLOCK", 5)
    results = [
        vitral.dedupe(pictures, against=[tmp_path / "tests"], output=tmp_path / "a.txt", parts=parts)
        for parts in (1, 3)
    ]
    assert results[0] == results[1]
    assert results[0].unreadable == 2  # one in train, one in test


def test_finished_parts_are_kept(weights, pictures, tmp_path, monkeypatch):
    computed = []

    def embed(model, split, *rest, **options):
        if len(computed) == 1:
            computed.append(())
            raise Crash
        computed.append(tuple(split.keys))
        return embed_split(model, split, *rest, **options)

    monkeypatch.setattr("vitral.api.prediction.embed_split", embed)
    how = {"output": tmp_path / "a.npz", "batch": 4, "device": "cpu", "parts": 3}
    with pytest.raises(Crash):
        vitral.embed(weights, pictures, **how)
    assert not (tmp_path / "a.npz").exists()
    result = vitral.embed(weights, pictures, **how)
    assert sorted(map(len, computed)) == [0, 8, 8, 9]  # whole batches of 4, as one process has them
    assert len({key for keys in computed for key in keys}) == sum(map(len, computed)) == 25
    assert [path.name for path in tmp_path.iterdir() if "npz" in path.name] == ["a.npz"]
    alone = vitral.embed(weights, pictures, batch=4, device="cpu")
    np.testing.assert_array_equal(result.features, alone.features)
    assert [len(result.unreadable), result.paths] == [1, alone.paths]


def test_single_parts_as_another_scheduler_starts_them(weights, pictures, tmp_path, command):
    words = ["embed", weights, str(pictures), "--output", str(tmp_path / "a.npz"), "--batch", "4", "--device", "cpu"]
    for part in ("2/3", "1/3", "3/3"):
        assert "1 of 3 parts are written" in command(*words, "--part", part).out
    assert not (tmp_path / "a.npz").exists()
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "a.npz.parts").glob("*.npz"))]
    assert len(times) == 3
    starting_from(tmp_path / "model.safetensors")  # the same weights, written anew
    with pytest.raises(UserError, match="has parts of another command, of other weights or images"):
        vitral.embed(weights, pictures, output=tmp_path / "a.npz", batch=4, device="cpu", parts=3)


def test_more_parts_than_batches(weights, pictures, tmp_path):
    result = vitral.embed(weights, pictures, output=tmp_path / "a.npz", batch=16, device="cpu", parts=7)
    assert len(result.paths) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 3}, "set it with --output"),
        ({"parts": 0}, "at least 1"),
        ({"part": ["4/3"]}, "NUMBER/COUNT"),
        ({"part": ["1/3", "1/4"]}, "the same one after its slash"),
        ({"part": ["1/3"], "parts": 4}, "the same one after its slash"),
        ({"parts": 3, "slurm": ["partition"]}, "KEY=VALUE"),
        ({"parts": 3, "slurm": ["array=0-7"]}, "is set by vitral"),
    ],
)
def test_mistakes(weights, pictures, options, message):
    with pytest.raises(UserError, match=message):
        vitral.embed(weights, pictures, **options)


def test_images_in_memory_have_no_command(weights, tmp_path):
    with pytest.raises(UserError, match="cannot take images from memory"):
        vitral.embed(weights, np.zeros((3, 8, 8, 3), np.uint8), output=tmp_path / "a.npz", parts=2)


def test_several_sources_are_one_and_its_ensemble(weights, pictures, tmp_path):
    with pytest.raises(UserError, match="the others are in ensemble"):
        vitral.predict([weights, weights], pictures, output=tmp_path / "a.csv", parts=2)


def test_every_option_of_a_verb_is_in_the_command_of_its_parts(tmp_path):
    """A forgotten one would change parts in silence."""
    asked = {
        "source": "model", "images": ["a", "b"], "output": tmp_path / "a.csv", "top": 3, "classes": "names.txt",
        "ensemble": ("second", "third"), "tta": "flip", "preprocess": "decode", "precision": "fp8",
        "batch": 7, "device": "cpu",
        "parts": 4, "part": (), "engine": "slurm", "slurm": ("time=5",), "parallel": 2, "on_event": None,
    }  # fmt: skip
    made = parts_module.parts_of(vitral.predict, asked)
    assert made.arguments(["2/4"]) == [
        "predict", "model", "a", "b", "--output", str(tmp_path / "a.csv"), "--top", "3", "--classes", "names.txt",
        "--ensemble", "second", "third", "--tta", "flip", "--preprocess", "decode", "--precision", "fp8",
        "--batch", "7", "--device", "cpu",
        "--part", "2/4",
    ]  # fmt: skip
