"""Verbs take loaded models and images in memory; results show themselves; types are known to a checker."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import COLOURS, colour_folder
from PIL import Image

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.models.build import build

ROOT = Path(__file__).parents[2]
TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_folder(tmp_path_factory.mktemp("data") / "colours", 4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    card = Card(TINY, tuple(sorted(COLOURS)), preprocess=Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3))
    model = build(TINY)
    with torch.no_grad():
        model.get_parameter("head.output.weight").normal_()
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    vitral.save(model, path, card)
    return path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))


def test_a_loaded_model_is_a_source_and_stays_as_it_is(
    weights: Path, colours: Path, tmp_path: Path, cache: None
) -> None:
    model, card = source = vitral.load(weights)
    model.train()
    before = copy.deepcopy(model.state_dict())
    images = [colours / "red" / "0.png", colours / "blue"]
    options: dict[str, Any] = {"device": "cpu"}

    expected = vitral.predict(weights, images, **options)
    predictions = vitral.predict(source, images, **options)
    assert [row.path for row in predictions.rows] == [row.path for row in expected.rows]
    for ours, theirs in zip(predictions.rows, expected.rows, strict=True):
        assert ours.names == theirs.names
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
    assert vitral.evaluate(source, colours).metrics == vitral.evaluate(weights, colours, **options).metrics
    np.testing.assert_allclose(
        vitral.embed(source, colours).features, vitral.embed(weights, colours, **options).features, atol=1e-5
    )
    answer = vitral.classifier(source)(images[0])
    assert [name for name, _ in answer] == list(predictions.rows[0].names)
    neighbours = [vitral.search(each, colours, query=images[0]) for each in (source, weights)]
    assert [found.path for found in neighbours[0]] == [found.path for found in neighbours[1]]
    fewshot = [vitral.fewshot(each, colours, shots=(1,), seeds=1).shots for each in (source, weights)]
    assert fewshot[0] == fewshot[1]
    shutil.copytree(colours, tmp_path / "copies")
    copies = vitral.dedupe(colours, against=[tmp_path / "copies"], weights=source)
    assert len(copies.keys) == 12
    page = vitral.inspect(source, images[:1], output=tmp_path / "page.html")
    assert page.images == 1
    done = vitral.convert(source, tmp_path / "converted.npz", format="google")
    assert done.difference == 0
    assert vitral.load(tmp_path / "converted.npz", grid=(2, 2), heads=2)[0].config.width == 16
    with pytest.raises(vitral.UserError, match="pass the changes to `load`"):
        vitral.convert(source, tmp_path / "other.npz", format="google", classes=2)

    assert card == vitral.load(weights)[1]
    assert model.training
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_images_in_memory_are_predicted_like_files(weights: Path, colours: Path) -> None:
    path = colours / "green" / "1.png"
    picture = Image.open(path)
    pixels = np.array(picture)
    expected = vitral.predict(weights, path).rows[0]
    tensor, encoded = torch.from_numpy(pixels).permute(2, 0, 1), path.read_bytes()
    saved = BytesIO()
    picture.save(saved, "png")  # which leaves its position at the end
    in_memory = (picture, pixels, [pixels], (picture,), tensor, tensor[None])
    buffers: list[Any] = [encoded, [encoded], BytesIO(encoded), saved, bytearray(encoded), [memoryview(encoded)]]
    for image in (*in_memory, *buffers, memoryview(encoded)):
        (row,) = vitral.predict(weights, image).rows
        assert (row.path, row.names, row.probabilities) == ("image 0", expected.names, expected.probabilities)
    for paths in (np.array([str(path)]), iter([str(path)])):
        assert vitral.predict(weights, paths).rows == vitral.predict(weights, [path]).rows
    with path.open("rb") as stream:
        assert vitral.predict(weights, stream).rows[0].probabilities == expected.probabilities
    (unreadable,) = vitral.predict(weights, [encoded, b"no image"]).unreadable
    assert unreadable.path == "image 1"
    results = vitral.predict(weights, [b"no image", encoded])
    assert (len(results), results[0].path, list(results)[1:]) == (2, "image 0", list(results.rows))
    mixed = vitral.predict(weights, [path, picture, colours / "red", pixels])
    assert [row.path for row in mixed.rows][:2] == [str(path), "image 1"]
    assert mixed.rows[-1].path == "image 3"
    assert len(mixed.rows) == 7
    paths, features = vitral.embed(weights, [picture, pixels, path])
    assert paths == ["image 0", "image 1", str(path)]
    assert np.array_equal(features[0], features[1])
    assert np.array_equal(features[0], features[2])
    classify = vitral.classifier(weights, device="cpu")
    assert classify(picture) == classify(pixels) == classify(path)
    assert classify([picture, pixels]) == [classify(path)] * 2


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_pil_images_of_every_mode_are_those_of_files(weights: Path, tmp_path: Path, mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).convert(mode)
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    picture.save(path)
    rows = vitral.predict(weights, [picture, path]).rows
    assert rows[0].probabilities == rows[1].probabilities


def test_grey_arrays_have_one_channel(weights: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    flat, deep, repeated = vitral.predict(weights, [grey, grey[..., None], np.stack([grey] * 3, axis=-1)]).rows
    assert flat.probabilities == deep.probabilities == repeated.probabilities


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((8, 8, 3), 7.0), "image 0 has values from 7 to 7, not 0 to 1"),
        (np.zeros((8, 8, 3), np.int64), "image 0 is of dtype int64"),
        (7, "image 0 is a int"),
        (StringIO("text"), "image 0 is a StringIO"),
        ([], "IMAGES are missing"),
    ],
)
def test_what_is_no_image_is_refused(weights: Path, image: Any, message: str) -> None:
    with pytest.raises(vitral.UserError, match=re.escape(message)):
        vitral.predict(weights, image)


def test_files_that_cannot_be_read_are_refused(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(path)
    closed = BytesIO()
    closed.close()
    with path.open("ab") as written, path.open(encoding="utf-8") as text:
        for stream in (closed, written, text):
            with pytest.raises(vitral.UserError, match=r"cannot read image 0 .*: open its file with mode"):
                vitral.predict(weights, [stream])  # type: ignore[bad-argument-type]


def test_data_in_memory_is_named_by_its_class(weights: Path, cache: None) -> None:
    images = [np.full((8, 8, 3), value, np.uint8) for value in (0, 255)]
    data: Any = (images, ["red", "blue"])
    result = vitral.evaluate(weights, data, device="cpu")
    assert result.data == "tuple in memory"
    assert "array" not in repr(result)


def test_set_takes_a_mapping_or_a_list() -> None:
    recipe = vitral.show_recipe(set={"optim.lr": 0.25, "data.mean": (0.1, 0.2, 0.3), "cuda_graph": False})
    assert recipe == vitral.show_recipe(set=["optim.lr=0.25", "data.mean=0.1,0.2,0.3", "cuda_graph=false"])
    assert recipe.optim.lr == 0.25
    with pytest.raises(vitral.UserError, match="take a list"):
        vitral.show_recipe(set="optim.lr=0.25")


def test_results_show_their_headline(weights: Path, colours: Path, tmp_path: Path, cache: None) -> None:
    evaluated = vitral.evaluate(weights, colours)
    results = {
        f"EvalResult(top1={evaluated.metrics['top1']:.2%}, n=12, ": evaluated,
        "EmbedResult(n=12, dim=16)": vitral.embed(weights, colours),
        "PredictionResults(n=12, ": vitral.predict(weights, colours),
        "SearchResult(best=": vitral.search(weights, colours, query=colours / "red" / "0.png"),
        "ProbeResult(n=3, 1-shot=": vitral.fewshot(weights, colours, shots=(1,), seeds=1),
        "InspectResult(page=": vitral.inspect(weights, output=tmp_path / "a.html"),
        "ConvertResult(difference=0, ": vitral.convert(weights, tmp_path / "a.npz", format="google"),
        "CheckpointInfo(model=": vitral.info(weights),
        "CostResult(parameters=86,567,656, GMACs=17.56, model=B/16)": vitral.compute_cost("B/16"),
    }
    for start, result in results.items():
        shown = repr(result)
        assert shown.startswith(start)
        assert len(shown.splitlines()) == 1
        assert result._repr_html_().startswith(f"<table><caption>{type(result).__name__}</caption><tr><th>")


NAMES = ("load", "create", "train", "predict", "evaluate", "embed", "classifier", "inspect", "convert", "Recipe")


def test_a_type_checker_knows_the_public_names(tmp_path: Path) -> None:
    checker = shutil.which("pyrefly") or shutil.which("pyrefly", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("needs pyrefly")
    script = tmp_path / "script.py"
    calls = ('load("a")', 'train("a")', 'predict("a", "b")', 'evaluate("a", "b")', 'embed("a", "b")')
    lines = [f"reveal_type(vitral.{name})" for name in (*NAMES, *calls)]
    script.write_text("\n".join(["from typing import reveal_type", "import vitral", *lines]) + "\n")
    (tmp_path / "pyrefly.toml").write_text(f'search-path = ["{ROOT / "src"}"]\n')
    done = subprocess.run([checker, "check", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    revealed = re.findall(r"revealed type: (.*)", done.stdout + done.stderr)
    assert len(revealed) == len(lines)
    assert not [text for text in revealed if re.search(r"\b(Any|Unknown)\b", text)]


def test_every_public_name_exists_and_the_package_is_typed() -> None:
    assert (ROOT / "src" / "vitral" / "py.typed").is_file()
    assert all(getattr(vitral, name) is not None for name in vitral.__all__)
    assert {name for name in dir(vitral) if not name.startswith("__")} == {*vitral.__all__} - {"__version__"}
