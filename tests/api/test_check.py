"""`check` as users call it: exit codes, findings by what becomes of them, suspicious labels with their page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from vitral.checkpoints.card import Card, Preprocess
from vitral.errors import UntrainableData, UserError
from vitral.models.build import build
from vitral.names import parse

TINY = parse("ViT-Ti/4@16", depth=1, width=16, mlp=16, heads=2, classes=0)


def image(path: Path, seed: int, colour: int | None = None) -> None:
    """Noise, in `colour` the channel that is bright."""
    pixels = np.random.default_rng(seed).integers(0, 120, (20, 20, 3), np.uint8)
    if colour is not None:
        pixels[..., colour] += 120
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def classes(folder: Path, *names: str, count: int = 4) -> None:
    for number, name in enumerate(names):
        for index in range(count):
            image(folder / name / f"{index}.png", 100 * number + index + len(str(folder)))


def damage(*paths: Path) -> None:
    for path in paths:
        path.write_text("no image")


def good(folder: Path) -> None:
    classes(folder, "a", "b")


def with_an_unreadable_image(folder: Path) -> None:
    classes(folder, "a", "b")
    damage(folder / "a/0.png")


def with_copies(folder: Path) -> None:
    classes(folder, "a", "b")
    (folder / "b/copy.png").write_bytes((folder / "a/0.png").read_bytes())


def with_test(folder: Path) -> None:
    classes(folder / "train", "a", "b")
    classes(folder / "test", "a", "b", count=2)


def lacking_test_class(folder: Path) -> None:
    classes(folder / "train", "a", "b")
    classes(folder / "test", "a", count=2)


def empty_folder(folder: Path) -> None:
    folder.mkdir()


def empty_class(folder: Path) -> None:
    classes(folder, "a", "b")
    (folder / "c").mkdir()


def one_class(folder: Path) -> None:
    classes(folder, "a")


def one_image_each(folder: Path) -> None:
    classes(folder, "a", "b", count=1)


def loose_images(folder: Path) -> None:
    image(folder / "0.png", 0)


def no_train(folder: Path) -> None:
    classes(folder / "test", "a", "b")


def unknown_test_class(folder: Path) -> None:
    classes(folder / "train", "a", "b")
    classes(folder / "test", "a", "c")


def unreadable_class(folder: Path) -> None:
    classes(folder, "a", "b")
    damage(*(folder / "b").iterdir())


def unreadable_test(folder: Path) -> None:
    with_test(folder)
    damage(*folder.glob("test/*/*"))


def all_unreadable(folder: Path) -> None:
    classes(folder, "a", "b")
    damage(*folder.glob("*/*"))


TRAINABLE = (good, with_an_unreadable_image, with_copies, with_test, lacking_test_class)
REFUSED = (
    *(empty_folder, empty_class, one_class, one_image_each, loose_images, no_train, unknown_test_class),
    *(unreadable_class, unreadable_test, all_unreadable),
)


@pytest.mark.parametrize("make", [*TRAINABLE, *REFUSED], ids=lambda make: make.__name__)
def test_check_exits_with_1_where_train_refuses(tmp_path, command, make: Callable[[Path], None]):
    folder = tmp_path / "photos"
    make(folder)
    words = ["--model", "ViT-Ti/8@16", "--out", tmp_path / "run", "--device", "cpu"]
    words += ["--set", "steps=1", "batch=2", "workers=0", "shape.depth=1", "shape.width=16", "shape.heads=1"]
    trained = command("train", folder, *words)
    checked = command("check", folder)
    assert trained.code == (2 if make in REFUSED else 0), trained.err
    assert checked.code == (1 if make in REFUSED else 0), checked.err
    if make in REFUSED:
        sentence = trained.err.strip().splitlines()[-1].removeprefix("vitral: ")
        said = " ".join((checked.out + checked.err).split())
        assert " ".join(sentence.split()) in said


def test_data_that_cannot_be_opened_is_a_mistake_only_if_it_does_not_exist(tmp_path, command):
    assert command("check", tmp_path / "nowhere").code == 2
    loose_images(tmp_path / "photos")
    with pytest.raises(UntrainableData, match="no class folders"):
        vitral.check(tmp_path / "photos")


def test_a_page_without_a_model_is_refused(tmp_path):
    with_copies(tmp_path / "photos")
    with pytest.raises(UserError, match="which only a model finds: add --model, or omit it"):
        vitral.check(tmp_path / "photos", output=tmp_path / "page.html")


def test_findings_are_sorted_by_what_becomes_of_them(tmp_path, command):
    folder = tmp_path / "photos"
    with_copies(folder)
    damage(folder / "a/1.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (60, 50), "red").save(folder / "a/turned.jpg", exif=turned)
    report = vitral.check(folder)
    assert report.handled == ("rotated", "tiny")
    assert report.needs_you[:3] == ("unreadable", "contradictions", "duplicates") or "leaks" in report.needs_you
    assert {"unreadable", "contradictions", "duplicates"} <= set(report.needs_you)
    text = command("check", folder).out
    handled, needs_you = text.partition("Needs you:")[::2]
    assert "turned upright" in handled.partition("Handled:")[2]
    assert "identical, other label" in needs_you
    assert "a/1.png: not an image in a known format (left out)" in " ".join(needs_you.split())
    answer = json.loads(command("check", folder, "--json").out)
    assert (answer["handled"], answer["needs_you"]) == (list(report.handled), list(report.needs_you))
    with_test(tmp_path / "other")
    assert "Needs you: nothing" not in text


def test_many_copies_of_one_image_are_counted_not_listed(tmp_path, command):
    """Web sites give a placeholder where a photo is gone, and crawled data has thousands of it."""
    classes(tmp_path, "a", "b")
    for index in range(9):
        (tmp_path / f"b/placeholder{index}.png").write_bytes((tmp_path / "b/0.png").read_bytes())
    assert "b/placeholder2.png = ... (10 in all)" in " ".join(command("check", tmp_path).out.split())
    assert repr(vitral.check(tmp_path)).startswith("CheckReport(images=17 in train, classes=2, needs you=leaks, dup")


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """Three classes of 16 images of one colour each, three of which lie in the folder of another; and weights."""
    root = tmp_path_factory.mktemp("colours")
    for label, name in enumerate(("red", "green", "blue")):
        for index in range(16):
            image(root / "photos" / name / f"{index}.png", 100 * label + index, label)
    moved = {("red", "green"), ("green", "blue"), ("blue", "red")}
    for there, here in moved:
        (root / "photos" / there / "7.png").rename(root / "photos" / here / f"moved-{there}.png")
    half = Preprocess("decode|resize(16)", (0.5,) * 3, (0.5,) * 3)
    vitral.save(build(TINY), root / "w.safetensors", Card(TINY, preprocess=half))
    return root / "photos", root / "w.safetensors", {f"{here}/moved-{there}.png" for there, here in moved}


def test_the_page_shows_arrays_of_five_channels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 120, (40, 20, 20, 5), np.uint8)
    images[::2, ..., 0] += 120
    labels = np.arange(40) % 2
    labels[4] = 1
    config = replace(TINY, channels=5)
    half = Preprocess("decode|resize(16)", (0.5,) * 5, (0.5,) * 5)
    data: Any = list(zip(images, labels.tolist(), strict=True))
    report = vitral.check(data, model=(build(config), Card(config, preprocess=half)), output=tmp_path / "page.html")
    assert report.suspects
    assert (tmp_path / "page.html").read_text("utf-8").count("data:image/png;base64,") == len(report.suspects)


def test_wrong_labels_are_ranked_first_and_shown_on_a_page(colours, tmp_path, command, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos, weights, wrong = colours
    done = command("check", photos, "--model", weights, "--output", tmp_path / "x.html", "--device", "cpu", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert {suspect["image"] for suspect in report["suspects"][:3]} == wrong
    first = report["suspects"][0]
    assert f"moved-{first['suggested']}" in first["image"]
    assert first["image"].startswith(first["label"])
    assert first["likely"]
    assert first["suggested_confidence"] > first["confidence"]
    assert report["scored"] == 48
    assert "suspects" in report["needs_you"]
    page = (tmp_path / "x.html").read_text("utf-8")
    assert page.count("<figure") == len(report["suspects"])
    assert page.count("data:image/png;base64,") == len(report["suspects"])
    assert first["image"] in page
    assert not re.search(r"(?:src|href)=[\"']?https?:", page)
    text = command("check", photos, "--model", weights, "--output", tmp_path / "y.html", "--device", "cpu").out
    assert "suspicious labels" in text
    assert "looks like" in text


def test_names_on_the_page_are_text(colours, tmp_path):
    from vitral.data.check import SuspectLabel
    from vitral.report.pages import label_errors_page

    suspect = SuspectLabel("<script>1</script>.png", "<b>", "&", 0.1, 0.9, -1.0, True)
    page = label_errors_page("<i>", 3, [suspect] * 3, [np.zeros((4, 4, 3), np.uint8)])
    assert "<script>1" not in page
    assert "<b>" not in page
    assert "2 more are in the JSON output" in page


def test_a_model_without_labels_to_judge_is_refused(colours, tmp_path, command):
    _, weights, _ = colours
    one_class(tmp_path / "one")
    said = command("check", tmp_path / "one", "--model", weights, "--output", tmp_path / "x.html")
    assert said.code == 2
    assert "need two classes" in said.err
    assert not (tmp_path / "x.html").exists()
    wrong = command("check", tmp_path / "one", "--model", weights, "--output", tmp_path / "x.png")
    assert (wrong.code, ".html" in wrong.err) == (2, True)


def test_files_in_formats_that_are_not_read_are_named(tmp_path, command):
    folder = tmp_path / "photos"
    good(folder)
    for name in ("a/x.CR2", "b/y.svg", "b/notes.txt"):
        (folder / name).write_text("?")
    said = " ".join(command("check", folder).out.split())
    assert "Left out 2 files in formats that are not read (a/x.CR2, b/y.svg): convert to JPEG or PNG." in said
    assert "Left out 1 file that is no image (.txt 1)." in said
