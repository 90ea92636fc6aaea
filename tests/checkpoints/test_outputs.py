"""Files that commands write: never onto something else, and a place that cannot be written is told before the work."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import COLOURS, colour_folder, paint

import vitral
from vitral.api import check, features, inspection, prediction
from vitral.api.bench import benchmark
from vitral.architecture import ViTConfig
from vitral.atomic import atomic_write, check_writable
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats import format_named
from vitral.data.sources import open_data
from vitral.errors import UserError
from vitral.models.build import build

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)
PHOTO = b"a photograph that no command may touch"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten of each colour: eight to learn from, two held out; of teal four and one."""
    folder = colour_folder(tmp_path_factory.mktemp("data") / "colours", 10)
    for number in range(5):
        paint(folder / "teal" / f"{number}.png", (30, 200, 200), 900 + number)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    card = Card(
        TINY, preprocess=Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3), class_names=tuple(sorted(COLOURS))
    )
    vitral.save(build(TINY), path, card)
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any command that gets as far as its work fails the test."""

    def late(*words: Any, **options: Any) -> None:
        pytest.fail("the work began")

    for module in (prediction, inspection, features, check):
        monkeypatch.setattr(module, "load_source", late)
    monkeypatch.setattr("vitral.evaluation.duplicates.find_duplicates", late)
    monkeypatch.setattr("vitral.api.checkpoints.read_adapted", late)
    monkeypatch.setattr("vitral.api.bench._measure", late)


def words_of(verb: str, weights: Path, pictures: Path, target: Path) -> list[str | Path]:
    """A command that would write `target`."""
    picture = pictures / "red" / "0.png"
    return {
        "predict": ["predict", weights, "-o", target, picture],
        "embed": ["embed", weights, picture, "-o", target],
        "inspect": ["inspect", weights, picture, "-o", target],
        "dedupe": ["dedupe", pictures, "--against", pictures, "-o", target],
        "bench": ["bench", "train", "--out", target, "--device", "cpu"],
        "search": ["search", weights, pictures, "--query", picture, "--index", target],
        "figures": ["inspect", weights, "-o", target.parents[1] / "page.html", "--figures", target.parent],
        "convert": ["convert", weights, target, "--format", "vitral"],
    }[verb]


ENDINGS = {
    "predict": ".csv or .json",
    "embed": ".npz",
    "inspect": ".html",
    "dedupe": ".txt",
    "bench": ".json",
}
NAMES = {
    **{verb: f"out{ending.split(' ')[0]}" for verb, ending in ENDINGS.items()},
    **{"search": "index.npz", "figures": "filters.png", "convert": "model.safetensors"},
}


@pytest.mark.parametrize("name", ["photo.jpg", "model.safetensors", "plain"])
@pytest.mark.parametrize("verb", ENDINGS)
def test_a_file_of_another_kind_is_not_overwritten(command, weights, pictures, tmp_path, no_work, verb, name):
    target = tmp_path / name
    target.write_bytes(PHOTO)
    said = command(*words_of(verb, weights, pictures, target))
    option = "--out" if verb == "bench" else "--output"
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"vitral: {option} writes a file that ends in {ENDINGS[verb]}, not {target}: name such a file.\n"
    )
    assert target.read_bytes() == PHOTO


@pytest.mark.parametrize("verb", NAMES)
def test_unwritable_outputs_are_reported_before_the_work(command, weights, pictures, tmp_path, no_work, verb):
    (tmp_path / "answers.csv").write_text("an earlier answer")
    target = tmp_path / "answers.csv" / NAMES[verb]
    said = command(*words_of(verb, weights, pictures, target))
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"vitral: {target} cannot be written ({tmp_path / 'answers.csv'} is not a folder): choose another place.\n"
    )
    assert os.listdir(tmp_path) == ["answers.csv"]


@pytest.mark.parametrize("verb", NAMES)
def test_a_locked_folder_is_reported_with_the_name_of_the_file(
    command, weights, pictures, tmp_path, no_work, verb, monkeypatch
):
    (tmp_path / "locked").mkdir()

    def locked(**options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(Path(options["dir"]) / "tmp"))

    monkeypatch.setattr(tempfile, "TemporaryFile", locked)
    target = tmp_path / "locked" / NAMES[verb]
    words = words_of(verb, weights, pictures, target)
    told = tmp_path / "page.html" if verb == "figures" else target
    said = command(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"vitral: {told} cannot be written (Permission denied): choose another place.\n"


def test_checking_a_path_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new" / "deep" / "a.csv")
    check_writable(tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["touch", "mkdir"])
def test_a_file_that_becomes_unwritable_is_reported_by_its_name(tmp_path, monkeypatch, call):
    def refused(self: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, call, refused)
    target = tmp_path / "a.csv"
    with pytest.raises(UserError) as told, atomic_write(target, folder=call == "mkdir"):
        pytest.fail("the block must not run")
    assert str(told.value) == f"{target} cannot be written (Permission denied): choose another place."
    assert isinstance(told.value, OSError)  # what caches, which do without a file, expect
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stays_an_os_error(tmp_path, monkeypatch):
    """It has a sentence of its own."""

    def full(self: Path, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match="No space left") as told, atomic_write(tmp_path / "new" / "a"):
        pytest.fail("the block must not run")
    assert not isinstance(told.value, UserError)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_exists_is_only_read(command, weights, pictures, tmp_path, monkeypatch):
    index = tmp_path / "index.npz"
    words = words_of("search", weights, pictures, index)
    assert command(*words).code == 0
    monkeypatch.setattr(features, "check_writable", lambda path: pytest.fail("nothing is to be written"))
    assert command(*words).code == 0


@pytest.fixture
def bad(tmp_path: Path) -> list[Path]:
    (tmp_path / "notes.txt").write_text("milk, bread")
    (tmp_path / "empty.png").touch()
    return [tmp_path / "empty.png", tmp_path / "notes.txt"]


def test_no_readable_image_is_an_error(command, weights, bad, tmp_path):
    expected = f"vitral: none of these images can be read, {bad[0]} first (the file is empty): "
    said = command("predict", weights, *bad)
    assert (said.code, said.err) == (2, f"{expected}pass complete image files.\n")
    assert all(str(path) in said.out for path in bad)
    said = command("predict", weights, *bad, "--json")
    assert said.code == 2
    assert [one["path"] for one in json.loads(said.out)["unreadable"]] == [str(path) for path in bad]
    for verb, name in (("predict", "bad.csv"), ("predict", "bad.json"), ("embed", "bad.npz")):
        said = command(verb, weights, *bad, "-o", tmp_path / name)
        assert (said.code, said.out, said.err) == (2, "", f"{expected}nothing was written.\n")
        assert not (tmp_path / name).exists()


def test_every_table_has_the_same_columns(command, weights, pictures, bad, tmp_path):
    heads = []
    for name, images in (("all.csv", [pictures / "red"]), ("some.csv", [*bad, pictures / "red" / "0.png"])):
        assert command("predict", weights, *images, "-o", tmp_path / name).code == 0
        heads.append((tmp_path / name).read_text().splitlines()[0])
    columns = ",".join(f"class_{place},probability_{place}" for place in (1, 2, 3))
    assert heads == [f"path,{columns},error"] * 2


def test_inspect_and_search_say_why_an_image_cannot_be_read(command, weights, pictures, bad, tmp_path):
    expected = (
        f"vitral: none of these images can be read, {bad[0]} first (the file is empty): pass complete image files.\n"
    )
    said = command("inspect", weights, *bad, "-o", tmp_path / "page.html")
    assert (said.code, said.err) == (2, expected)
    said = command("search", weights, pictures, "--query", bad[0])
    assert (said.code, said.err) == (2, expected)


@pytest.mark.parametrize("verb", ["predict", "embed"])
def test_missing_images_are_reported_as_missing(command, weights, tmp_path, no_work, verb):
    said = command(verb, weights, *(["-o", tmp_path / "a.npz"] if verb == "embed" else []))
    assert said.code == 2
    assert said.err.startswith("vitral: missing: IMAGES (image files, and folders of them): see `vitral ")


@pytest.mark.parametrize(("splits", "fix"), [(["test"], "use --split test"), ([], "omit it")])
def test_a_misspelt_split_suggests_the_right_one(command, weights, pictures, tmp_path, splits, fix):
    data = tmp_path / "data"
    for split in ["train", *splits] if splits else [""]:
        colour_folder(data / split, 2)
    said = command("evaluate", weights, data, "--split", "tset")
    assert (said.code, said.err) == (2, f'vitral: {data} has no split "tset" to score: {fix}.\n')


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("huggingface", "hf"),
        ("hugging_face", "hf"),
        ("HuggingFace", "hf"),
        ("transformers", "hf"),
        ("googel", "google"),
    ],
)
def test_aliases_of_formats_are_suggested(name, meant):
    with pytest.raises(UserError, match=rf"write {meant}, or see"):
        format_named(name)


def test_classes_with_too_few_images_for_the_shots_are_reported(command, weights, pictures):
    words = ("fewshot", weights, pictures, "--seeds", "1", "--device", "cpu")
    found = json.loads(command(*words, "--shots", "1", "5", "99", "--json").out)
    opened = open_data(pictures).train
    counts = np.bincount(opened.labels)
    expected = [f"{(counts < shots).sum()} of 4 classes have fewer than {shots} training images" for shots in (5, 99)]
    told = [note for note in found["notes"] if "fewer than" in note]
    assert [note.partition(":")[0] for note in told] == expected
    assert [text.split()[0] for text in expected] == ["1", "4"]
    assert found["shots"][2]["drawn"] == len(opened)
    shown = command(*words, "--shots", "99").out
    assert "4 of 4 classes have fewer than 99 training images: all of these were used." in re.sub(r"\s+", " ", shown)
    assert "fewer than" not in command(*words, "--shots", "1").out


def test_the_bench_refuses_before_its_rounds(tmp_path, no_work):
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(UserError, match="is not a folder"):
        benchmark("train", out=tmp_path / "r.json" / "x.json", device="cpu")
