"""Labels that a mirror image does not keep: known data sets, sides in class names, letters; recipes that flip them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_pictures

import vitral
from vitral.api.recipes import choose_recipe
from vitral.data.augment import mirrored_labels
from vitral.events import Note
from vitral.recipe import flips, from_dict, without_flip

OBJECTS = ("cat", "dog")


@pytest.mark.parametrize(
    ("source", "classes", "expected"),
    [
        ("digits", OBJECTS, "the digits in digits"),
        ("data/SVHN_cropped", OBJECTS, "the digits in SVHN_cropped"),
        ("hf:owner/mnist", OBJECTS, "the digits in mnist"),
        ("dsprites-orientation", OBJECTS, "the positions and orientations in dsprites-orientation"),
        ("data/fashion-mnist", OBJECTS, ""),
        ("cifar10:data/digits", OBJECTS, ""),  # the name of the catalog counts
        ("signs", ("Turn Left", "stop", "turn right"), '"Turn Left" and "turn right"'),
        ("signs", ("keep_right", "keep_left"), '"keep_right" and "keep_left"'),
        ("signs", ("left", "bright"), ""),
        ("signs", ("turn left", "stop"), ""),  # no class for the mirror image
        ("shapes", tuple("abcdefghij"), "single letters"),
        ("shapes", tuple("abc"), ""),
        ("shapes", tuple("0123456789"), ""),  # numbers stand for classes without names
        ("photos", OBJECTS, ""),
    ],
)
def test_what_a_mirror_image_would_mislabel(source: str, classes: tuple[str, ...], expected: str) -> None:
    assert mirrored_labels(source, classes) == expected


@pytest.mark.parametrize("key", ["data.train_transform", "data.augment"])
@pytest.mark.parametrize("word", ["flip", "hflip", "flip()"])
def test_flips_are_found_and_removed(key: str, word: str) -> None:
    steps = "decode|resize(8)" if key == "data.train_transform" else "shift(4)"
    recipe = from_dict({"data.train_transform": "decode|resize(8)", key: f"{steps} | {word}|cutout(2)"})
    assert flips(recipe)
    assert not flips(without_flip(recipe))
    assert steps in f"{without_flip(recipe).data.train_transform} {without_flip(recipe).data.augment}"
    assert not flips(from_dict({"trainable": "head", "init": "x"}))  # nothing is augmented


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    folder = make_pictures(tmp_path / "turns", classes=2, size=40)
    (folder / "class-0").rename(folder / "left")
    (folder / "class-1").rename(folder / "right")
    return folder


def test_chosen_recipes_do_not_flip_what_has_sides(turns: Path) -> None:
    _, recipe, reasons = choose_recipe(turns, device="cpu")
    assert not flips(recipe)
    assert 'no flips, which would change the labels of "left" and "right"' in reasons
    assert not any("flips," in reason and "no flips" not in reason for reason in reasons)
    # A user who asks for them is warned.
    _, recipe, reasons = choose_recipe(turns, device="cpu", set=["data.train_transform=decode|resize({size})|flip"])
    assert flips(recipe)
    assert any(reason.startswith('flip mirrors images, which changes the labels of "left"') for reason in reasons)


def test_a_protocol_warns(turns: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    words = ["steps=1", "batch=4", "image=16", "shape.depth=1", "shape.width=16", "shape.heads=2", "workers=0"]

    def note(event: object) -> None:
        notes.extend([event.text] if isinstance(event, Note) else [])

    vitral.pretrain(turns, model="ViT-Ti/8", out=tmp_path / "run", device="cpu", set=words, on_event=note)
    assert sum("flip mirrors images" in text for text in notes) == 1
