"""What travels with weights: how pixels are prepared, and names in any spelling."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journeys import COLOURS, MODEL, QUICK, colour_folder, paint
from oracles import SMALL, random_weights
from safetensors import safe_open

import vitral
from vitral.api.inspection import inspect, write_run_page
from vitral.checkpoints.adapt import Adaptation
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import describe, read_adapted, write
from vitral.data.preprocess import parse_pipeline
from vitral.errors import UserError
from vitral.names import parse

DINO = "decode|resize_small(256, bicubic)|central_crop(224)"
TIMM = "decode|resize_short(248, pil_bicubic)|center_crop(224)"
HALF = (0.5, 0.5, 0.5)


# --- another image size


@pytest.mark.parametrize(
    ("pipeline", "before", "after", "expected"),
    [
        (DINO, 518, (224, 224), DINO),  # the table is for 518 pixels, the crop is its own
        (DINO, 518, (112, 112), "decode|resize_small(128, bicubic)|central_crop(112)"),
        (DINO, 518, (518, 518), DINO),
        (DINO, 224, (384, 384), "decode|resize_small(439, bicubic)|central_crop(384)"),
        (DINO, 224, (96, 160), "decode|resize(96, 160, bicubic)"),
        (TIMM, 224, (112, 112), "decode|resize_short(124, pil_bicubic)|center_crop(112)"),
        (TIMM, 224, (96, 160), "decode|resize(96, 160, pil_bicubic)"),
        ("decode|resize(224, antialias=false)", 224, (96, 160), "decode|resize(96, 160, antialias=false)"),
        ("decode|resize(224, antialias=false)", 224, (384, 384), "decode|resize(384, antialias=false)"),
        (
            "decode|resize_fit(40)|pad(32, 32, 124, 116, 104)|center_crop(32)",
            32,
            (64, 64),
            "decode|resize_fit(80)|pad(64, 64, 124, 116, 104)|center_crop(64)",
        ),
        ("decode|resize(64,64)", 64, (32, 32), "decode|resize(32,32)"),
        ("decode|resize(96, 160)", 96, (64, 64), "decode|resize(64, 64)"),
        ("decode|resize(300, 400)|central_crop(200)", 200, (100, 100), "decode|resize(150, 200)|central_crop(100)"),
        (
            "decode|resize_small (40) | central_crop(20, 20)",
            20,
            (10, 10),
            "decode|resize_small (20) | central_crop(10, 10)",
        ),
        (
            "decode|randaugment(2, 10)|resize(32)|erase(0.25)",
            32,
            (16, 16),
            "decode|randaugment(2, 10)|resize(16)|erase(0.25)",
        ),
    ],
)
def test_a_pipeline_is_scaled_from_the_size_it_ends_in(pipeline, before, after, expected):
    found = Preprocess(pipeline, HALF, HALF).adapted((before, before), after, 3)
    assert found.pipeline == expected


@given(st.integers(8, 600), st.integers(0, 100), st.integers(8, 600), st.integers(8, 600))
def test_a_scaled_pipeline_ends_in_the_size_that_was_asked_for(crop, more, side, native):
    scaled = Preprocess(f"decode|resize_small({crop + more})|central_crop({crop})", HALF, HALF)
    found = scaled.adapted((native, native), (side, side), 3).pipeline
    assert native == side or parse_pipeline(found).size == (side, side)


def test_loaded_at_another_size_the_stated_crop_counts(tmp_path):
    c = replace(SMALL, image=(56, 56), classes=0, layer_scale=True, mlp=64)
    card = Card(c, preprocess=Preprocess("decode|resize_small(37)|central_crop(32)", HALF, HALF))
    write(random_weights(c), card, tmp_path / "model", "hf-dinov2")
    found = read_adapted(tmp_path / "model", Adaptation(image=32)).card
    assert found.preprocess is not None
    assert found.preprocess.pipeline == "decode|resize_short(37, bilinear)|central_crop(32)"


# --- names that are not UTF-8

LATIN = os.fsdecode(b"caf\xe9")
bytewise = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system knows no such names")


def test_a_card_holds_any_name(tmp_path):
    card = Card(replace(SMALL, classes=3), class_names=(LATIN, "crème", "\ud800"), source=LATIN)
    assert Card.from_json(card.to_json()) == card
    write(random_weights(card.architecture), card, tmp_path / "model.safetensors", "vitral")
    assert describe(tmp_path / "model.safetensors").card.class_names == card.class_names
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert Card.from_json(file.metadata()["vitral.card"]) == card
    write(random_weights(card.architecture), card, tmp_path / "folder", "hf")
    assert describe(tmp_path / "folder").card.class_names == card.class_names


def test_a_card_is_shown_in_one_line_and_in_a_notebook_as_a_table():
    names = tuple(f"class {number}" for number in range(1000))
    card = Card(parse("ViT-B/16"), class_names=names, format="timm", changes=("one <b>", "two"))
    assert repr(card).startswith("Card(model=ViT-B/16, classes=1,000 (class 0, class 1, class 2, ...), format=timm, ")
    assert "<td>one &lt;b&gt;; two</td>" in card._repr_html_()
    assert repr(Card(parse("ViT-B/16", classes=2), class_names=("a", "b"))) == "Card(model=ViT-B/16, classes=2 (a, b))"
    assert "\x1b" not in repr(replace(card, class_names=("\x1b[31m",), source="\x1b"))


@bytewise
def test_class_names_that_are_not_utf_8_survive_a_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    data = colour_folder(tmp_path / "data", 5, {"red": LATIN, "green": "crème"})
    out = tmp_path / "run"
    vitral.train(data, model=MODEL, out=out, set=[*QUICK, "steps=2", "evaluate_every=2"])
    new = paint(tmp_path / LATIN / "new.png", COLOURS["red"])
    found = vitral.predict(out, [new])
    assert {*found.rows[0].names} == {LATIN, "crème", "blue"}
    result = vitral.evaluate(out, data)
    assert LATIN in {row["name"] for row in result.metrics["per_class"]}
    predicted = tmp_path / "found.json"
    vitral.predict(out, data / LATIN, output=predicted)
    assert {row["path"] for row in json.loads(predicted.read_text("utf-8"))["predictions"]} >= {
        str(data / LATIN / "0.png")
    }
    inspect(out, [new], output=tmp_path / "page.html")
    for page in (write_run_page(out, data), tmp_path / "page.html"):
        assert "caf\N{REPLACEMENT CHARACTER}" in page.read_text("utf-8")


@bytewise
def test_output_paths_that_are_not_utf_8_are_refused_early(tmp_path):
    data = colour_folder(tmp_path / "data", 5)
    with pytest.raises(UserError, match=r"not valid UTF-8, .*: choose another name"):
        vitral.train(data, model=MODEL, out=tmp_path / LATIN, set=QUICK)
    assert not (tmp_path / LATIN).exists()
    write(random_weights(SMALL), Card(SMALL), tmp_path / LATIN / "model.safetensors", "vitral")
    with pytest.raises(UserError, match=r"not valid UTF-8, .*: choose another name"):
        vitral.load(tmp_path / LATIN)
