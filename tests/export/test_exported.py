"""Exported files as sources: the same numbers as the model's, by other runtimes too, and no code of a file is run."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import vitral
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.export.exported import open_exported
from vitral.export.gate import generated_images
from vitral.export.graph import ExportGraph
from vitral.export.onnx import write_onnx
from vitral.models.layers import Block
from vitral.models.model import normalize
from vitral.models.vit import ViT


@pytest.fixture(scope="session")
def program(source, tmp_path_factory) -> Path:
    """The model as a .pt2 file for images of any size."""
    path = tmp_path_factory.mktemp("export") / "good.pt2"
    vitral.export_model(source, path, format="pt2", outputs=["attention"], dynamic_size=True)
    return path


@pytest.fixture(scope="session")
def data(source, tmp_path_factory) -> Path:
    """Images in folders of the six classes, of another size than the model's."""
    folder = tmp_path_factory.mktemp("data")
    for index, pixels in enumerate(generated_images((24, 20), source[1])[:18]):
        (folder / "abcdef"[index % 6]).mkdir(exist_ok=True)
        (folder / "abcdef"[index % 6] / f"{index}.png").write_bytes(encode_png(pixels))
    return folder


def pixels_of(source: Any, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    return generated_images(size, source[1])[:5]


def model_outputs(source: Any, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and the class token's attention from its definition, softmax(q k / sqrt(d)), of the last block."""
    model, card = source
    assert isinstance(model, ViT)
    images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), card.preprocess.mean, card.preprocess.std)
    with torch.no_grad():
        probabilities = (model(images) / card.temperature).softmax(dim=-1)
        tokens, block = model.intermediates(images, [-2], reshape=False)[0], model.blocks[-1]
        assert isinstance(block, Block)
        q, k, _ = block.attention.qkv(block.norm1(tokens)).chunk(3, dim=-1)
        q, k = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (q, k))
        row = (q[:, :, :1] @ k.transpose(-1, -2) / 4).softmax(dim=-1)[:, :, 0, 1:].mean(dim=1)
    grid = (pixels.shape[1] // 4, pixels.shape[2] // 4)
    return probabilities.numpy(), (row / row.sum(dim=1, keepdim=True)).unflatten(1, grid).numpy()


@pytest.mark.parametrize("batch", [1, 5])
def test_the_onnx_file_computes_probabilities_features_and_attention(source, good, batch):
    pixels = pixels_of(source)[:batch]
    exported = open_exported(good)
    found = exported.outputs(pixels, ["attention", "probabilities", "features"])
    probabilities, attention = model_outputs(source, pixels)
    np.testing.assert_allclose(found["probabilities"], probabilities, atol=1e-6)
    np.testing.assert_allclose(found["attention"], attention, atol=1e-6)
    assert found["features"].shape == (batch, 32)
    assert exported.card.class_names == tuple("abcdef")
    assert exported.report["limits"]["agreement"] == 0.99


def test_the_reference_implementation_of_onnx_agrees(source, good):
    model = onnx.load(good)
    onnx.checker.check_model(model, full_check=True)
    pixels = pixels_of(source)[:2]
    found = ReferenceEvaluator(model).run(["probabilities", "attention"], {"pixels": pixels})
    for array, expected in zip(found, model_outputs(source, pixels), strict=True):
        np.testing.assert_allclose(np.asarray(array), expected, atol=1e-5)


@pytest.mark.parametrize("dynamic_size", [False, True])
def test_dynamic_sizes_of_an_onnx_file_have_names(source, dynamic_size, tmp_path):
    path = tmp_path / "named.onnx"
    model, card = source
    write_onnx(ExportGraph(model, card, ("attention",)), path, dynamic_size=dynamic_size)
    graph = onnx.load(path).graph
    named = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    sides = ["4*rows", "4*columns"] if dynamic_size else [16, 16]
    grid = ["rows", "columns"] if dynamic_size else [4, 4]
    assert named == {
        "pixels": ["batch", *sides, 3],
        "probabilities": ["batch", 6],
        "attention": ["batch", *grid],
    }


@pytest.mark.parametrize("size", [(16, 16), (8, 12), (24, 32), (8, 24), (16, 20)])
def test_a_pt2_file_takes_sizes_below_and_above_the_native_one(source, program, size):
    exported = open_exported(program)
    assert exported.size == (None, None)
    for batch in (1, 3):
        pixels = pixels_of(source, size)[:batch]
        found = exported.outputs(pixels, ["probabilities", "attention"])
        for array, expected in zip(found.values(), model_outputs(source, pixels), strict=True):
            np.testing.assert_allclose(array, expected, atol=1e-6)


def test_a_batch_may_be_empty(source, good, program):
    for file in (good, program):
        exported = open_exported(file)
        found = exported.outputs(pixels_of(source)[:0], exported.names)
        assert [array.shape[0] for array in found.values()] == [0] * len(exported.names)
        assert found["probabilities"].shape == (0, 6)


def test_pixels_that_the_file_cannot_take_are_refused(source, good, program):
    with pytest.raises(UserError, match=r"takes uint8 \(batch, 16, 16, 3\)"):
        open_exported(good)(pixels_of(source, (20, 16)))
    with pytest.raises(UserError, match="takes uint8"):
        open_exported(good)(pixels_of(source).astype(np.float32))
    with pytest.raises(UserError, match="multiples of 4"):
        open_exported(program)(pixels_of(source, (18, 16)))
    with pytest.raises(UserError, match="no output 'features'"):
        open_exported(program).outputs(pixels_of(source), ["features"])


@pytest.mark.parametrize("tta", [None, "flip"])
def test_evaluate_and_predict_give_the_models_numbers(source, good, program, data, tta):
    expected = vitral.evaluate(source, data, tta=tta)
    rows = vitral.predict(source, data, tta=tta).rows
    for path in (good, program):
        found = vitral.evaluate(path, data, tta=tta)
        for name in ("top1", "top5", "nll", "ece", "n"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5)
        for ours, theirs in zip(rows, vitral.predict(path, data, tta=tta).rows, strict=True):
            assert (ours.path, ours.names) == (theirs.path, theirs.names)
            assert theirs.probabilities == pytest.approx(ours.probabilities, abs=1e-5)


def test_a_model_and_its_exported_file_form_an_ensemble(source, good, data):
    alone = vitral.predict(source, data).rows
    together = vitral.predict([source, good], data).rows
    for one, both in zip(alone, together, strict=True):
        assert both.names == one.names
        assert both.probabilities == pytest.approx(one.probabilities, abs=1e-5)


def test_a_classifier_takes_exported_files(source, good, program, data):
    image = next(data.rglob("*.png"))
    expected = vitral.classifier(source, top=3)(image)
    for path in (good, program):
        found = vitral.classifier(path, top=3)(image)
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)


def test_another_normalisation_than_the_files_is_refused(good, data):
    with pytest.raises(UserError, match="normalises pixels by itself"):
        vitral.predict(good, data, preprocess="decode|resize(16, 16)|normalise(0.1, 0.2)")


def test_other_verbs_refuse_exported_files(good, program, data, tmp_path):
    for path in (good, program):
        for use in (
            lambda path=path: vitral.load(path),
            lambda path=path: vitral.info(path),
            lambda path=path: vitral.convert(path, tmp_path / "a", format="timm"),
            lambda path=path: vitral.embed(path, data),
            lambda path=path: vitral.export_model(path, tmp_path / "a.onnx"),
        ):
            with pytest.raises(UserError, match="is an exported model"):
                use()


def test_files_of_others_are_refused(tmp_path, good):
    other = tmp_path / "other.onnx"
    model = onnx.load(good)
    del model.metadata_props[:]
    onnx.save(model, other)
    with pytest.raises(UserError, match="not written by `vitral export`"):
        open_exported(other)
    (tmp_path / "damaged.onnx").write_bytes(good.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read"):
        open_exported(tmp_path / "damaged.onnx")
    with pytest.raises(UserError, match="there is no file"):
        open_exported(tmp_path / "none.onnx")


class Planted:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def replaced(program: Path, target: Path, edit: dict[str, Any], extra: dict[str, bytes] | None = None) -> Path:
    """A copy of a .pt2 file in which functions change the contents of members."""
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, edit.get(name.removeprefix(f"{root}/"), lambda content: content)(content))
        for name, content in (extra or {}).items():
            new.writestr(f"{root}/{name}", content)
    return target


def in_json(change: Any) -> Any:
    def edit(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return edit


def attacks(mark: Path) -> dict[str, tuple[dict[str, Any], dict[str, bytes]]]:
    buffer = io.BytesIO()
    torch.save(Planted(mark), buffer)
    pickled = buffer.getvalue()
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    model, weights = "models/model.json", "data/weights/model_weights_config.json"

    def first(config: dict[str, Any]) -> dict[str, Any]:
        return next(iter(config["config"].values()))

    def node(program: dict[str, Any], **changes: Any) -> None:
        program["graph_module"]["graph"]["nodes"][3].update(changes)

    def constraint(program: dict[str, Any]) -> None:
        program["range_constraints"][code] = {"min_val": 1, "max_val": None}

    def expression(program: dict[str, Any]) -> None:
        text = json.dumps(program).replace("Integer(4)", code.replace('"', "'"))
        assert code in text
        program.update(json.loads(text))

    return {
        "sample inputs": ({"data/sample_inputs/model.pt": lambda content: pickled}, {}),
        "weights": (
            {
                weights: in_json(lambda config: first(config).update(use_pickle=True)),
                "data/weights/weight_0": lambda content: pickled,
            },
            {},
        ),
        "guards": ({model: in_json(lambda program: program.update(guards_code=[code]))}, {}),
        "operator": ({model: in_json(lambda program: node(program, target="torch.hub.load"))}, {}),
        "file": ({model: in_json(lambda program: node(program, target="torch.ops.aten.from_file.default"))}, {}),
        "metadata": ({model: in_json(lambda program: node(program, metadata={"torch_fn": code}))}, {}),
        "expression": ({model: in_json(expression)}, {}),
        "range": ({model: in_json(constraint)}, {}),
        "library": ({}, {"data/aotinductor/model/a.so": b"\x7fELF"}),
        "twice": ({}, {"models/model.json": b"{}"}),
    }


@pytest.mark.parametrize("name", list(attacks(Path("mark"))))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_planted_pt2_file_runs_no_code(program, tmp_path, name):
    mark = tmp_path / "mark"
    planted = replaced(program, tmp_path / "planted.pt2", *attacks(mark)[name])
    with pytest.raises(UserError, match="cannot be read"):
        open_exported(planted)(np.zeros((1, 16, 16, 3), np.uint8))
    assert not mark.exists()


def test_an_unedited_copy_of_a_pt2_file_is_read(program, tmp_path):
    copy = replaced(program, tmp_path / "copy.pt2", {})
    assert open_exported(copy)(np.zeros((1, 16, 16, 3), np.uint8)).shape == (1, 6)
