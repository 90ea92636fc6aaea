"""`check` reports every planted problem and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitral.data.check import check
from vitral.data.images import UnreadableImage
from vitral.data.sources import dim_warning, open_data, restrict_train
from vitral.errors import UserError
from vitral.events import Event, Progress
from vitral.recipe_schema import DataRecipe


def scene(seed: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
    """A smooth random picture, similar to a photograph at low resolution."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)  # type: ignore[arg-type]


def clean(folder: Path) -> Path:
    """24 different pictures of two classes, with a test split."""
    for number in range(24):
        split = "test" if number >= 16 else "train"
        save(scene(number), folder / split / "ab"[number % 2] / f"{number}.jpg", quality=90)
    return folder


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    "largest, levels",
    [
        (255, "255 of 65,535, of which 8 bits keep 1 level:"),
        (4095, "4,095 of 65,535, of which 8 bits keep 16 levels:"),
        (40_000, ""),
    ],
)
def test_images_of_16_bits_with_small_values_are_reported(tmp_path, suffix, largest, levels):
    for number in range(8):
        values = np.random.default_rng(number).integers(0, largest, (40, 48)).astype(np.uint16)
        values[0, 0] = largest
        save(Image.fromarray(values), tmp_path / "ab"[number % 2] / f"{number}.{suffix}")
    save(scene(9).convert("L"), tmp_path / "a" / "dark.png")  # of 8 bits
    report = check(tmp_path)
    assert len(report.deep) == 8
    assert levels in report.dim
    assert bool(report.dim) == ("dim" in report.needs_you) == bool(levels)
    assert dim_warning(open_data(tmp_path).train) == ((report.dim,) if levels else ())


def test_a_clean_data_set_has_no_findings(tmp_path):
    report = check(clean(tmp_path))
    assert report.images == {"train": 16, "test": 8}
    assert report.classes == {"train": {"a": 8, "b": 8}, "test": {"a": 4, "b": 4}}
    assert report.formats == {"JPEG": 24}
    assert report.widths == {"smallest": 96, "median": 96, "largest": 96}
    assert report.imbalance == 1
    result = (report.unreadable, report.rotated, report.deep, report.cmyk, report.animated, report.tiny)
    assert not any(
        (
            *result,
            report.empty,
            report.similar,
            report.duplicates,
            report.contradictions,
            report.near,
            report.leaks,
            report.notes,
        )
    )
    assert (report.grey, report.transparent, report.not_compared) == (0, 0, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_planted_problems_are_found(tmp_path, workers):
    clean(tmp_path)
    train, test = tmp_path / "train", tmp_path / "test"
    turned = Image.Exif()
    turned[0x0112] = 6
    save(scene(100), train / "a/turned.jpg", exif=turned)
    save(Image.fromarray(np.random.default_rng(0).integers(0, 65536, (64, 64)).astype(np.uint16)), train / "a/deep.png")
    save(scene(101).convert("CMYK"), train / "b/cmyk.jpg")
    save(scene(102), train / "b/moving.gif", save_all=True, append_images=[scene(103)])
    save(scene(104, (31, 200)), train / "b/tiny.png")
    save(scene(105).convert("RGBA"), train / "b/clear.png")
    save(scene(106).convert("L"), train / "b/grey.png")
    save(Image.new("RGB", (64, 64), "white"), train / "a/white.png")
    save(Image.new("RGB", (64, 64), "grey"), train / "b/flat.png")
    (train / "a/empty.jpg").touch()
    (train / "a/text.jpg").write_text("no picture")
    (train / "b/cut.jpg").write_bytes((train / "b/1.jpg").read_bytes()[:1500])
    (train / "a/copy.jpg").write_bytes((train / "a/0.jpg").read_bytes())  # within train
    (train / "b/other.jpg").write_bytes((train / "a/2.jpg").read_bytes())  # with another label
    (test / "b/leak.jpg").write_bytes((train / "b/3.jpg").read_bytes())  # into test
    save(Image.open(train / "b/5.jpg").resize((48, 40)), test / "b/smaller.jpg", quality=60)  # near, into test
    save(Image.open(train / "a/4.jpg"), train / "a/again.png")  # near, within train
    events: list[Event] = []
    report = check(tmp_path, workers=workers, on_event=events.append)

    assert report.rotated == ("train/a/turned.jpg",)
    assert report.deep == ("train/a/deep.png",)
    assert report.cmyk == ("train/b/cmyk.jpg",)
    assert report.animated == ("train/b/moving.gif",)
    assert report.tiny == ("train/b/tiny.png",)
    assert (report.grey, report.transparent) == (2, 1)  # the deep one is grey too
    assert {image.path for image in report.unreadable} == {"train/a/empty.jpg", "train/a/text.jpg", "train/b/cut.jpg"}
    assert all(image.reason for image in report.unreadable)
    assert report.not_compared == 3 + 1 + 2
    assert set(report.duplicates) == {
        ("train/a/0.jpg", "train/a/copy.jpg"),
        ("train/a/2.jpg", "train/b/other.jpg"),
        ("train/b/3.jpg", "test/b/leak.jpg"),
    }
    assert report.contradictions == (("train/a/2.jpg", "train/b/other.jpg"),)
    assert {pair[:2] for pair in report.near} == {
        ("train/a/4.jpg", "train/a/again.png"),
        ("train/b/5.jpg", "test/b/smaller.jpg"),
    }
    assert {pair[:2] for pair in report.leaks} == {
        ("train/b/3.jpg", "test/b/leak.jpg"),
        ("train/b/5.jpg", "test/b/smaller.jpg"),
    }
    total = sum(report.images.values())
    assert Progress("checking", total, total) in events
    assert report.imbalance == pytest.approx(
        max(report.classes["train"].values()) / min(report.classes["train"].values())
    )


@pytest.mark.parametrize("train, test", [("", ()), ("train/", ()), ("Training/", ("teal",)), ("train/", ("a",))])
def test_an_empty_class_folder_is_reported(tmp_path, command, train, test):
    for number in range(6):
        save(scene(number), tmp_path / "data" / train / "ab"[number % 3 > 1] / f"{number}.png")
    for number, label in enumerate(test):
        save(scene(10 + number), tmp_path / "data/test" / label / "x.png")
    (tmp_path / "data" / train / "a/copy.png").write_bytes((tmp_path / "data" / train / "a/0.png").read_bytes())
    (tmp_path / "data" / train / "teal/deep").mkdir(parents=True)
    (tmp_path / "data" / train / "teal/notes.txt").write_text("no picture")
    output = command("check", tmp_path / "data", "--json")
    assert output.code == 1, output.err  # train refuses it
    report = json.loads(output.out)
    assert report["source"] == str(tmp_path / "data")
    assert report["empty"] == ["teal"]
    assert report["classes"]["train"] == {"a": 5, "b": 2, "teal": 0}
    assert report["imbalance"] == 2.5
    assert report["duplicates"] == [[f"{train}a/0.png", f"{train}a/copy.png"]]
    assert report["images"] == {"train": 7, **({"test": 1} if test else {})}
    assert any(".txt 1" in note for note in report["notes"])
    assert ["teal", "0"] in [line.split()[:2] for line in command("check", tmp_path / "data").out.splitlines()]
    with pytest.raises(UserError, match="teal has no image: add some, or remove the folder"):
        open_data(tmp_path / "data")


def test_folders_without_any_image_are_reported_too(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    report = check(tmp_path)
    assert (report.empty, report.images, report.imbalance, report.widths) == (("a", "b"), {"train": 0}, 0, {})


def test_near_copies_are_searched_for_with_progress(tmp_path):
    """The search takes longer than reading where many images are alike."""
    pixels = np.random.default_rng(0).integers(0, 256, (130, 32, 32, 3), np.uint8)
    events: list[Event] = []
    check(open_data((pixels, ["a", "b"] * 65), held_out=0), on_event=events.append)
    compared = [event for event in events if isinstance(event, Progress) and event.task == "comparing"]
    # Images of train with one another, then all of train and of the split that training would make with those of it.
    assert (compared[-1].done, compared[-1].total) == (104 + 130, 104 + 130)
    assert len(compared) > 3


def test_class_names_that_differ_only_in_case_or_spaces_are_reported(tmp_path, command):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    report = check(open_data((pixels, ["Cat", "cat", "dog", "dog ", "cats", "cat", "dog", "Cat"]), held_out=0))
    assert report.similar == (("Cat", "cat"), ("dog", "dog "))
    assert report.as_dict()["similar"] == report.similar
    assert "similar" in report.needs_you
    assert report.notes == (
        'Class names that differ only in case or spaces: "Cat" and "cat", "dog" and "dog "; '
        "rename them if they are one class.",
    )
    for number, label in enumerate(("Cat", "cat") * 4):
        save(scene(number), tmp_path / "data" / label / f"{number}.png")
    output = command("check", tmp_path / "data")
    assert "similar class names" in output.out.partition("Needs you:")[2]
    assert "1: Cat ~ cat" in output.out


def test_data_for_testing_only_has_no_empty_classes(tmp_path):
    data = open_data(clean(tmp_path))
    nothing = data.train.select(np.empty(0, np.int64))
    assert check(replace(data, train=nothing)).empty == ()
    some = data.train.select(np.flatnonzero(data.train.labels == 1))
    assert check(replace(data, train=some)).empty == ("a",)


def test_a_report_is_json_with_its_thresholds(tmp_path):
    clean(tmp_path)
    (tmp_path / "test/b/leak.jpg").write_bytes((tmp_path / "train/b/3.jpg").read_bytes())
    table = json.loads(json.dumps(check(tmp_path).as_dict()))
    assert table["leaks"] == [{"first": "train/b/3.jpg", "second": "test/b/leak.jpg", "score": 1.0}]
    assert table["thresholds"] == {
        "min_correlation": 0.88,
        "min_coarse": 0.8,
        "hash_bits": 7,
        "min_side": 32,
        "min_std": 2.0,
    }


def test_a_folder_is_checked_without_a_split_and_a_data_set_with_its_splits(tmp_path):
    for number in range(6):
        save(scene(number), tmp_path / "ab"[number % 2] / f"{number}.png")
    assert check(tmp_path).images == {"train": 6}
    assert check(open_data(tmp_path)).images == {"train": 4, "test": 2}


def test_leaks_of_the_default_split_are_reported_and_can_be_excluded(tmp_path, command):
    data = tmp_path / "data"
    for number in range(24):
        save(scene(number), data / "ab"[number % 2] / f"{number}.png")
    for copy in range(6):
        (data / f"a/same-{copy}.png").write_bytes((data / "a/0.png").read_bytes())
        save(scene(1, (60 + copy, 50)), data / f"b/near-{copy}.jpg", quality=90)
    alike = ["a/0.png", *(f"a/same-{copy}.png" for copy in range(6))]
    alike += ["b/1.png", *(f"b/near-{copy}.jpg" for copy in range(6))]
    opened = open_data(data, held_out=DataRecipe().held_out)
    assert opened.test is not None
    train, test = set(opened.train.keys), set(opened.test.keys)
    for group in (alike[:7], alike[7:]):
        assert train.intersection(group)
        assert test.intersection(group)
    report = check(data)
    assert (report.images, report.held_out) == ({"train": 36}, len(test))
    assert {pair.first for pair in report.leaks} == train.intersection(alike)
    assert {pair.second for pair in report.leaks} == test.intersection(alike)
    assert {pair[:2] for pair in check(opened).leaks} == {pair[:2] for pair in report.leaks}
    assert check(restrict_train(opened, exclude=[pair.first for pair in report.leaks])).leaks == ()
    words = " ".join(command("check", data).out.split())
    assert (
        f"test is the {len(test)} images that training holds out by itself; remove the copies, or list those" in words
    )
    assert "--set data.exclude=FILE" in words


def test_a_single_class_is_reported_and_its_images_are_checked(tmp_path, command):
    for number in range(3):
        save(scene(number), tmp_path / "data/cats" / f"{number}.png")
    (tmp_path / "data/cats/empty.jpg").touch()
    output = command("check", tmp_path / "data", "--json")
    assert output.code == 1, output.err  # train refuses it
    report = json.loads(output.out)
    assert report["classes"] == {"train": {"cats": 4}}
    assert [image["path"] for image in report["unreadable"]] == ["cats/empty.jpg"]
    expected = f'{tmp_path / "data"} has one class, "cats": a classifier needs at least two'
    assert report["notes"][0].startswith(expected)
    shown = command("check", tmp_path / "data").out
    assert "a classifier needs at least two" in shown
    assert "times the smallest" not in shown
    (tmp_path / "tests").mkdir()
    (tmp_path / "data").rename(tmp_path / "tests/test")
    assert check(tmp_path / "tests").notes == ("There is no train folder: this is for testing only.",)


def test_pixels_in_memory_are_checked(tmp_path):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    report = check("digits")
    assert report.formats == {"pixels": 1797}
    assert len(report.tiny) == report.not_compared == report.grey == 1797
    assert report.near == ()


def test_pets_have_two_near_leaks(assets):
    """Verified by eye: leaks are a photograph and its copy, and two of one dog a moment apart; Bombay_166 is a crop."""
    report = check(assets / "data" / "pets_mini")
    train, test = "train/great_pyrenees/great_pyrenees_173.jpg", "test/great_pyrenees/great_pyrenees_89.jpg"
    assert report.leaks[0][:2] == (train, test)
    assert report.leaks[1][:2] == ("train/newfoundland/newfoundland_172.jpg", "test/newfoundland/newfoundland_2.jpg")
    assert {pair[:2] for pair in report.near} - {pair[:2] for pair in report.leaks} == {
        ("train/Bombay/Bombay_113.jpg", "train/Bombay/Bombay_157.jpg"),
        ("train/Bombay/Bombay_130.jpg", "train/Bombay/Bombay_166.jpg"),
    }
    assert len(report.leaks) == 2
    assert report.unreadable == ()


def test_large_train_splits_are_searched_without_crops(tmp_path, monkeypatch):
    clean(tmp_path)
    image = Image.open(tmp_path / "train/a/4.jpg")
    save(image.resize((60, 50)), tmp_path / "train/a/smaller.png")
    cropped = image.crop((8, 0, 96, 80))
    save(cropped, tmp_path / "train/a/cropped.png")
    save(Image.open(tmp_path / "train/b/5.jpg").crop((8, 0, 96, 80)), tmp_path / "test/b/cropped.png")
    leak = ("train/b/5.jpg", "test/b/cropped.png")
    uncropped, crops = {("train/a/4.jpg", "train/a/smaller.png"), leak}, "train/a/cropped.png"
    report = check(tmp_path)
    assert uncropped < {pair[:2] for pair in report.near}
    assert any(crops in pair for pair in report.near)
    assert report.notes == ()
    monkeypatch.setattr("vitral.data.copies.MAX_CROP_SEARCH", 17)
    report = check(tmp_path)
    assert {pair[:2] for pair in report.near} == uncropped
    assert [pair[:2] for pair in report.leaks] == [leak]
    assert "not searched for above 17 images" in report.notes[-1]


def test_images_with_other_channels_are_listed_as_training_leaves_them_out(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            np.save(
                tmp_path / name / f"{number}.npy", np.random.default_rng(number).integers(0, 256, (20, 20, 5), np.uint8)
            )
    np.save(tmp_path / "a" / "0.npy", np.zeros((20, 20), np.uint8))
    np.save(tmp_path / "b" / "3.npy", np.zeros((20, 20, 3), np.uint8))
    assert check(tmp_path).unreadable == (UnreadableImage("b/3.npy", "the file has 3 channels, not 5"),)
