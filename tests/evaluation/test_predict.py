"""Predictions and embeddings of a split, whatever the batch and the number of processes; classes found by rule."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.architecture import ResNetConfig, ViTConfig
from vitral.checkpoints.card import Preprocess
from vitral.data.sources import Split, open_data, open_images
from vitral.errors import UserError
from vitral.evaluation.mapping import class_mapping, read_table
from vitral.evaluation.predict import Predictions, embed_split, predict_split
from vitral.events import Event, Progress
from vitral.models.build import Model, build
from vitral.models.model import normalize
from vitral.serving import collect_predictions, write_results

PREPROCESS = Preprocess("decode|resize(16, 16)|central_crop(16)", (0.5, 0.4, 0.3), (0.5, 0.25, 0.2))
SMALL = ViTConfig(depth=2, width=16, mlp=32, heads=2, patch=8, image=(16, 16), classes=7, registers=2, dropout=0.3)
PICTURES = 23
BROKEN = 5


@dataclass(frozen=True)
class Pixels:
    """Pictures in memory; one of them is no picture at all."""

    images: np.ndarray

    def read(self, index: int) -> bytes | np.ndarray:
        return b"no picture" if index == BROKEN else self.images[index]

    def mark(self, index: int) -> str:
        return str(index)


@pytest.fixture(scope="module")
def split() -> Split:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (PICTURES, 16, 16, 3), dtype=np.uint8)
    keys = [f"picture {i}" for i in range(PICTURES)]
    return Split("test", keys, rng.integers(0, 7, PICTURES), tuple("abcdefg"), Pixels(images))


@pytest.fixture(scope="module")
def model() -> Model:
    return trained(SMALL)


def trained(config: ViTConfig | ResNetConfig) -> Model:
    """Weights that are nowhere zero, so that every output differs."""
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def inputs(split: Split) -> torch.Tensor:
    """The model's input by the formula, in float64 until the end; zeros for what is no picture."""
    assert isinstance(split.reader, Pixels)
    pixels = split.reader.images.astype(np.float64)
    pixels[BROKEN] = 0
    return torch.tensor((pixels / 255 - PREPROCESS.mean) / PREPROCESS.std).permute(0, 3, 1, 2).float()


def test_normalise_equals_its_formula(split):
    assert isinstance(split.reader, Pixels)
    images = torch.from_numpy(split.reader.images.copy()).permute(0, 3, 1, 2)
    result = normalize(images, PREPROCESS.mean, PREPROCESS.std)
    assert result.dtype == torch.float32
    keep = [i for i in range(PICTURES) if i != BROKEN]
    torch.testing.assert_close(result[keep], inputs(split)[keep], rtol=0, atol=1e-6)


def test_normalisation_needs_one_mean_per_channel():
    images = torch.rand(2, 3, 4, 4)
    with pytest.raises(UserError, match="images of 3 channels need as many values of mean and std, not 1 and 1"):
        normalize((images * 255).to(torch.uint8), (0.5,), (0.5,))


def test_predictions_are_the_outputs_of_the_model(model, split):
    model.train()
    events: list[Event] = []
    result = predict_split(model, split, PREPROCESS, batch=10, on_event=events.append)
    assert model.training
    with torch.no_grad():
        expected = model.eval()(inputs(split))
    assert result.indices.tolist() == list(range(PICTURES))
    assert result.valid.tolist() == [i != BROKEN for i in range(PICTURES)]
    assert (result.logits.dtype, result.logits.shape) == (np.float32, (PICTURES, 7))
    np.testing.assert_allclose(result.logits, expected.numpy(), atol=1e-5)
    assert events == [Progress("evaluating", done, 23) for done in (10, 20, 23)]


def merged(parts: list[Predictions]) -> Predictions:
    """The shares of all processes as one, in the order of the split."""
    rows = sorted(
        (int(index), part, row) for part in range(len(parts)) for row, index in enumerate(parts[part].indices)
    )
    indices, logits, valid = zip(
        *((index, parts[part].logits[row], parts[part].valid[row]) for index, part, row in rows), strict=True
    )
    return Predictions(np.array(indices), np.stack(logits), np.array(valid))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_predictions_do_not_depend_on_batch_size_and_processes(model, split, batch, world):
    whole = predict_split(model, split, PREPROCESS, batch=5)
    parts = [predict_split(model, split, PREPROCESS, batch=batch, rank=rank, world=world) for rank in range(world)]
    assert sum(len(part.indices) for part in parts) == PICTURES
    result = merged(parts[::-1])
    assert result.indices.tolist() == whole.indices.tolist()
    assert result.valid.tolist() == whole.valid.tolist()
    assert result.logits.argmax(1).tolist() == whole.logits.argmax(1).tolist()
    np.testing.assert_allclose(result.logits, whole.logits, atol=1e-5)


def test_more_processes_than_pictures(model, split):
    few = split.select(np.array([3, 9]))
    parts = [predict_split(model, few, PREPROCESS, batch=4, rank=rank, world=3) for rank in range(3)]
    assert {part.logits.shape[1] for part in parts} == {7}
    assert merged(parts).indices.tolist() == [0, 1]
    with pytest.raises(UserError, match="the split is empty"):
        predict_split(model, split.select(np.array([], np.int64)), PREPROCESS, batch=4)


def test_bfloat16_is_close_but_not_equal(model, split):
    exact, half = (
        predict_split(model, split, PREPROCESS, batch=8, precision=precision).logits
        for precision in ("float32", "bfloat16")
    )
    assert half.dtype == np.float32
    assert 1e-6 < np.abs(exact - half).max() < 0.1 * np.abs(exact).max()


def test_random_preprocessing_is_an_error(model, split):
    random = Preprocess("decode|inception_crop(16)", PREPROCESS.mean, PREPROCESS.std)
    with pytest.raises(UserError, match="draws at random"):
        predict_split(model, split, random, batch=8)


@pytest.mark.parametrize("norm_place", ["tokens", "features"])
def test_embeddings_leave_prefix_tokens_out_of_the_mean(split, norm_place):
    model = trained(replace(SMALL, norm_place=norm_place))
    with torch.no_grad():
        tokens = model.encode(model.patchify(inputs(split)))
        assert tokens.shape == (PICTURES, 1 + 2 + 4, 16)
        expected = {"cls": tokens[:, 0], "mean": (tokens[:, 3] + tokens[:, 4] + tokens[:, 5] + tokens[:, 6]) / 4}
        if norm_place == "features":
            expected = {pool: model.norm(values) for pool, values in expected.items()}
        expected["features"] = model.features(inputs(split))
    for pool, values in expected.items():
        result = embed_split(model, split, PREPROCESS, batch=6, pool=pool)  # type: ignore[arg-type]
        np.testing.assert_allclose(result.features, values.numpy(), atol=1e-5)
        assert result.indices.tolist() == list(range(PICTURES))
    torch.testing.assert_close(expected["features"], expected["cls"], rtol=1e-5, atol=1e-5)


def test_models_without_a_class_token_are_an_error(split):
    plain = trained(replace(SMALL, class_token=False, pool="mean", registers=0))
    resnet = trained(ResNetConfig(blocks=(1, 1, 1, 1), image=(16, 16), classes=3))
    few = split.select(np.arange(3))
    for model in (plain, resnet):
        own, mean = (embed_split(model, few, PREPROCESS, batch=3, pool=pool).features for pool in ("features", "mean"))
        np.testing.assert_allclose(own, mean, atol=1e-6)
        with pytest.raises(UserError, match="no class token"):
            embed_split(model, few, PREPROCESS, batch=3, pool="cls")
    with pytest.raises(UserError, match='pool="median" is not one of features, cls, mean'):
        embed_split(plain, few, PREPROCESS, batch=3, pool="median")  # type: ignore[arg-type]


MODEL = ("tench", "great white shark", "crane", "Goldfish")


@pytest.mark.parametrize(
    ("folder", "model", "expected", "rule"),
    [
        (("Goldfish", "tench"), MODEL, [3, 0], "by name with the model's classes."),
        (("goldfish", "Great_White_Shark"), MODEL, [3, 1], "ignoring case"),
        (("003", "000", "001"), MODEL, [3, 0, 1], '"003" is output 3 ("Goldfish")'),
        (("0", "10", "2"), (), [0, 10, 2], '"0" is output 0.'),
        (("2", "1"), ("1", "2", "10"), [1, 0], "by name"),
    ],
)
def test_classes_are_found_by_rule(folder, model, expected, rule):
    result, sentence = class_mapping(folder, model, len(model) or 11)
    assert result.tolist() == expected
    assert result.dtype == np.int64
    assert rule in sentence


WNIDS = ("n01443537", "n01440764", "n01484850")


def test_wnid_folders_are_numbered_by_a_table_or_in_sorted_order(tmp_path):
    result, sentence = class_mapping(WNIDS, (), 3)
    assert result.tolist() == [1, 0, 2]
    assert "sorted order" in sentence
    tables = {
        "a.tsv": "n01484850\twhite shark\nn01440764\ttench, Tinca\nn01443537\tgoldfish\n",
        "b.csv": 'wnid,name\nn01484850,white shark\nn01440764,"tench, Tinca"\nn01443537,goldfish\n',
        "c.txt": "n01484850 white shark\nn01440764 tench, Tinca\nn01443537 goldfish\n",
    }
    for name, text in tables.items():
        path = tmp_path / name
        path.write_text(text)
        result, sentence = class_mapping(WNIDS, (), 3, path)
        assert (result.tolist(), f"column 1 of {name}" in sentence) == ([2, 1, 0], True)
        result, sentence = class_mapping(("Goldfish", "white_shark"), (), 3, path)
        assert (result.tolist(), f"column 2 of {name}" in sentence) == ([2, 0], True)
    plain = tmp_path / "names.txt"
    plain.write_text("white shark\ntench, Tinca\ngoldfish\n")
    assert class_mapping(("goldfish", "tench, Tinca"), (), 3, plain)[0].tolist() == [2, 1]
    with pytest.raises(UserError, match="has 3 names, and the model has 5 outputs"):
        class_mapping(WNIDS, (), 5, plain)
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("1\n2\n7\n")
    with pytest.raises(UserError, match=r'1 of 2 classes of the data \("0"\)'):
        class_mapping(("1", "0"), (), 3, numbers)
    with pytest.raises(UserError, match="cannot be read"):
        class_mapping(WNIDS, (), 3, tmp_path / "absent.tsv")


@pytest.mark.parametrize(
    "text",
    [
        '["white shark", "tench, Tinca", "goldfish"]',
        '{"2": "goldfish", "0": "white shark", "1": "tench, Tinca"}',
        '{"0": ["n01484850", "white shark"], "1": ["n01440764", "tench, Tinca"], "2": ["n01443537", "goldfish"]}',
        '{"id2label": {"0": "white shark", "1": "tench, Tinca", "2": "goldfish"}, "label2id": {"goldfish": 2}}',
        '{"architecture": "vit", "label_names": ["white shark", "tench, Tinca", "goldfish"]}',
    ],
)
def test_names_may_be_json(tmp_path, text):
    path = tmp_path / "names.json"
    path.write_text(text)
    assert read_table(path, 3)[-1][1] == ["white shark", "tench, Tinca", "goldfish"]
    assert class_mapping(("goldfish", "tench, Tinca"), ("a", "b", "c"), 3, path)[0].tolist() == [2, 1]
    with pytest.raises(UserError, match="has 3 names, and the model has 2 outputs"):
        read_table(path, 2)


@pytest.mark.parametrize("text", ["[1, 2, 3]", '{"a": "b"}', "{", "7", '[["a"], []]', "null"])
def test_json_of_another_form_is_refused(tmp_path, text):
    path = tmp_path / "names.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not JSON of names"):
        read_table(path, 3)


def test_a_table_goes_before_the_names_of_the_model(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("b\na\n")
    assert class_mapping(("a", "b"), ("a", "b"), 2, path)[0].tolist() == [1, 0]


def test_imagenets_names_do_not_hide_its_order():
    wnids = [f"n{i:08d}" for i in range(1000)][::-1]
    assert class_mapping(wnids, [f"thing {i}" for i in range(1000)], 1000)[0].tolist() == list(range(1000))[::-1]


@pytest.mark.parametrize(
    ("folder", "model", "count", "message"),
    [
        (("tench", "dog"), MODEL, 4, r'1 of 2 classes of the data \("dog"\) do not match the model\'s classes'),
        (
            ("cat", "dog", "cow"),
            MODEL,
            4,
            r'\("cat", "dog", \.\.\.\) do not match .*\("tench", "great white shark", \.\.\.',
        ),
        (("0", "4"), MODEL, 4, "from 0 to 3"),
        (("0", "00"), MODEL, 4, "once each"),
        (("0", "tench"), MODEL, 4, '"0"'),
        (("01", "02"), ("1", "2", "10"), 3, '"01", "02"'),
        (("crane",), ("crane", "crane"), 2, "once each"),
        (("Crane", "crane"), ("CRANE", "tench"), 2, "once each"),
        (WNIDS, MODEL[:3], 3, '"n01443537", "n01440764", ...'),
        (WNIDS[:2], (), 3, "the 3 unnamed outputs of the model"),
        ((), MODEL, 4, "0 of 0 classes"),
    ],
)
def test_a_partial_match_is_an_error(folder, model, count, message):
    with pytest.raises(UserError, match=message):
        class_mapping(folder, model, count)


@pytest.fixture
def pictures(tmp_path: Path) -> Split:
    rng = np.random.default_rng(1)
    for name in ("b, two.png", "a.jpg", "é.png"):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    return open_images([tmp_path])


def test_results_name_every_picture_once(model, pictures, tmp_path):
    predictions = predict_split(model, pictures, PREPROCESS, batch=3)
    result = collect_predictions(predictions, pictures, tuple("abcdefg"), top=3)
    assert sorted(os.path.basename(row.path) for row in result.rows) == ["a.jpg", "b, two.png", "é.png"]
    assert [os.path.basename(one.path) for one in result.unreadable] == ["broken.png"]
    assert result.unreadable[0].reason
    chances = torch.tensor(predictions.logits).double().softmax(1)
    for row in result.rows:
        best = chances[pictures.keys.index(row.path)].topk(3)
        assert row.names == tuple("abcdefg"[i] for i in best.indices)
        assert row.probabilities == pytest.approx(best.values.tolist())

    write_results(tmp_path / "out" / "x.csv", result)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "x.csv").read_text("utf-8"))))
    assert [line["path"] for line in lines] == list(pictures.keys)
    assert [line["class_1"] for line in lines if line["class_1"]] == [row.names[0] for row in result.rows]
    assert float(lines[0]["probability_3"]) == pytest.approx(result.rows[0].probabilities[2], abs=1e-6)
    broken = [os.path.basename(line["path"]) == "broken.png" for line in lines]
    assert [line["error"] for line in lines] == [result.unreadable[0].reason * row for row in broken]

    write_results(tmp_path / "x.json", result)
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == result.as_dict()
    assert result.as_dict()["predictions"][0]["classes"][0]["name"] == result.rows[0].names[0]


def test_results_number_classes_without_names_and_keep_labels_apart(model, pictures):
    predictions = predict_split(model, pictures, PREPROCESS, batch=3)
    result = collect_predictions(predictions, pictures, (), top=20, sigmoid=True)
    assert sorted(result.rows[0].names) == [str(i) for i in range(7)]
    place = pictures.keys.index(result.rows[0].path)
    expected = torch.tensor(predictions.logits[place]).double().sigmoid()
    assert result.rows[0].probabilities == pytest.approx(sorted(expected.tolist(), reverse=True))


def test_a_folder_of_photographs_with_other_names(model, tmp_path):
    """From class folders to labels of the model: the way `evaluate` goes."""
    for name in ("2", "10"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("RGB", (18, 17), (i * 40, 0, 9)).save(tmp_path / name / f"{i}.png")
    data = open_data(tmp_path, held_out=0).train
    outputs, _ = class_mapping(data.classes, (), 11)
    labels = outputs[data.labels]
    assert [int(Path(key).parts[0]) for key in data.keys] == labels.tolist()
