"""The gate refuses exported files that do not compute what the model does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import vitral
from vitral.api import export as verb
from vitral.api.export import FLOAT_LIMITS, FORMATS, FormatEntry
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.images import encode_png
from vitral.export.exported import CARD, open_exported
from vitral.export.gate import ExportRefused, generated_images
from vitral.export.onnx import add_metadata

MEAN, STD = (0.5, 0.45, 0.3), (0.2, 0.25, 0.35)
PREPROCESS = Preprocess("decode|resize(16, 16)", MEAN, STD)


class Weights:
    """The initializers of an ONNX file as a dictionary of arrays."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def __getitem__(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self.stored[name]).copy()

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.stored[name].CopyFrom(numpy_helper.from_array(np.array(array, order="C"), name))

    def shaped(self, *shape: int) -> list[str]:
        """Names of the float arrays of a shape, in order: the exporter names those that it has folded by numbers."""
        names = [name for name, tensor in self.stored.items() if tuple(tensor.dims) == shape and tensor.data_type == 1]
        assert names
        return names


def nodes(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    found = [node for node in model.graph.node if node.op_type == kind]
    assert found
    return found


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(each for each in node.attribute if each.name == name)


def scaled(weights: Weights, mean: tuple[float, ...], std: tuple[float, ...], largest: float = 255) -> None:
    m, s = (np.array(values, np.float32).reshape(3, 1, 1) for values in (mean, std))
    weights["scale"], weights["shift"] = 1 / (largest * s), -m / s


def patches(weights: Weights) -> tuple[str, np.ndarray]:
    """The embedding: (channels, rows, columns, width)"""
    name = weights.shaped(48, 32)[0]
    return name, weights[name].reshape(3, 4, 4, 32)


def positions(weights: Weights) -> tuple[str, np.ndarray, np.ndarray]:
    """The row of the class token (1, width), and the table (rows, columns, width)"""
    [name] = weights.shaped(17, 32)
    return name, weights[name][:1], weights[name][1:].reshape(4, 4, 32)


def swapped_mean_and_std(model: onnx.ModelProto, weights: Weights) -> None:
    scaled(weights, STD, MEAN)


def mean_and_std_of_another_model(model: onnx.ModelProto, weights: Weights) -> None:
    scaled(weights, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def pixels_not_divided_by_255(model: onnx.ModelProto, weights: Weights) -> None:
    scaled(weights, MEAN, STD, largest=1)


def bgr(model: onnx.ModelProto, weights: Weights) -> None:
    name, kernel = patches(weights)
    weights[name] = kernel[::-1].reshape(48, 32)
    weights["scale"], weights["shift"] = weights["scale"][::-1], weights["shift"][::-1]


def transposed_image(model: onnx.ModelProto, weights: Weights) -> None:
    attribute(nodes(model, "Transpose")[0], "perm").ints[:] = [0, 3, 2, 1]


def flipped_image(model: onnx.ModelProto, weights: Weights) -> None:
    name, kernel = patches(weights)
    weights[name] = kernel[:, :, ::-1].reshape(48, 32)
    name, first, table = positions(weights)
    weights[name] = np.concatenate([first, table[:, ::-1].reshape(16, 32)])


def transposed_positions(model: onnx.ModelProto, weights: Weights) -> None:
    name, first, table = positions(weights)
    weights[name] = np.concatenate([first, table.transpose(1, 0, 2).reshape(16, 32)])


def shifted_positions(model: onnx.ModelProto, weights: Weights) -> None:
    name, first, table = positions(weights)
    weights[name] = np.roll(np.concatenate([first, table.reshape(16, 32)]), 1, axis=0)


def missing_class_token(model: onnx.ModelProto, weights: Weights) -> None:
    name = nodes(model, "Expand")[0].input[0]
    weights[name] = np.zeros_like(weights[name])


def pooled_from_a_patch(model: onnx.ModelProto, weights: Weights) -> None:
    index = nodes(model, "Gather")[-1].input[1]
    weights[index] = np.array(1, np.int64)


def wrong_gelu(model: onnx.ModelProto, weights: Weights) -> None:
    for node in nodes(model, "Gelu"):
        attribute(node, "approximate").s = b"tanh"


def dropped_layer_scale(model: onnx.ModelProto, weights: Weights) -> None:
    weights["model.blocks.1.scale2.scale"] = np.ones(32, np.float32)


def wrong_eps(model: onnx.ModelProto, weights: Weights) -> None:
    for node in nodes(model, "LayerNormalization"):
        attribute(node, "epsilon").f = 1e-5


def dropped_norm_weight(model: onnx.ModelProto, weights: Weights) -> None:
    weights["model.norm.weight"] = np.ones(32, np.float32)


def dropped_block(model: onnx.ModelProto, weights: Weights) -> None:
    after_each = [node.input[0] for node in nodes(model, "LayerNormalization")]
    nodes(model, "LayerNormalization")[-1].input[0] = after_each[2]


def swapped_queries_and_keys(model: onnx.ModelProto, weights: Weights) -> None:
    name = weights.shaped(32, 96)[0]
    q, k, v = np.split(weights[name], 3, axis=1)
    weights[name] = np.concatenate([k, q, v], axis=1)


def wrong_attention_scale(model: onnx.ModelProto, weights: Weights) -> None:
    [name] = weights.shaped(1)
    weights[name] = weights[name] * np.float32(0.9)


def dropped_bias_of_queries(model: onnx.ModelProto, weights: Weights) -> None:
    bias = weights["model.blocks.0.attention.qkv.bias"]
    bias[:32] = 0
    weights["model.blocks.0.attention.qkv.bias"] = bias


def dropped_temperature(model: onnx.ModelProto, weights: Weights) -> None:
    weights["temperature"] = np.array(1, np.float32)


def zeroed_head_bias(model: onnx.ModelProto, weights: Weights) -> None:
    weights["model.head.output.bias"] = np.zeros(6, np.float32)


def permuted_classes(model: onnx.ModelProto, weights: Weights) -> None:
    for name in ("model.head.output.weight", "model.head.output.bias"):
        weights[name] = weights[name][[0, 1, 2, 3, 5, 4]]


def sigmoid_for_softmax(model: onnx.ModelProto, weights: Weights) -> None:
    node = nodes(model, "Softmax")[-1]
    node.op_type = "Sigmoid"
    del node.attribute[:]


def softmax_over_the_batch(model: onnx.ModelProto, weights: Weights) -> None:
    attribute(nodes(model, "Softmax")[-1], "axis").i = 0


def fixed_batch(model: onnx.ModelProto, weights: Weights) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def half_precision(model: onnx.ModelProto, weights: Weights) -> None:
    for name, tensor in weights.stored.items():
        if tensor.data_type == 1:
            weights[name] = weights[name].astype(np.float16).astype(np.float32)


def nan_for_one_class(model: onnx.ModelProto, weights: Weights) -> None:
    bias = weights["model.head.output.bias"]
    bias[3] = np.nan
    weights["model.head.output.bias"] = bias


def attention_of_one_head(model: onnx.ModelProto, weights: Weights) -> None:
    """Probabilities are right, the further output is not."""
    mean = next(node for node in nodes(model, "ReduceMean") if len(weights[node.input[1]]) == 2)
    index = numpy_helper.from_array(np.array([0], np.int64), "first")
    model.graph.initializer.append(index)
    gather = onnx.helper.make_node("Gather", [mean.input[0], "first"], ["one_head"], axis=1)
    model.graph.node.insert(list(model.graph.node).index(mean), gather)
    mean.input[0] = "one_head"


def permuted_names(model: onnx.ModelProto, weights: Weights) -> None:
    set_card(model, class_names=tuple("abcdfe"))


def another_preprocessing(model: onnx.ModelProto, weights: Weights) -> None:
    set_card(model, preprocess=replace(PREPROCESS, pipeline="decode|resize_small(18)|central_crop(16)"))


def set_card(model: onnx.ModelProto, **changes: Any) -> None:
    entry = next(each for each in model.metadata_props if each.key == CARD)
    entry.value = replace(Card.from_json(entry.value), **changes).to_json()


SABOTAGES: list[Callable[[onnx.ModelProto, Weights], None]] = [
    swapped_mean_and_std,
    mean_and_std_of_another_model,
    pixels_not_divided_by_255,
    bgr,
    transposed_image,
    flipped_image,
    transposed_positions,
    shifted_positions,
    missing_class_token,
    pooled_from_a_patch,
    wrong_gelu,
    dropped_layer_scale,
    wrong_eps,
    dropped_norm_weight,
    dropped_block,
    swapped_queries_and_keys,
    wrong_attention_scale,
    dropped_bias_of_queries,
    dropped_temperature,
    zeroed_head_bias,
    permuted_classes,
    sigmoid_for_softmax,
    softmax_over_the_batch,
    fixed_batch,
    half_precision,
    nan_for_one_class,
    attention_of_one_head,
    permuted_names,
    another_preprocessing,
]


def edited_by(monkeypatch, good: Path, edit: Callable[[onnx.ModelProto, Weights], None]) -> None:
    """From now on `--format onnx` writes the edited file."""

    def write(job: verb.ExportJob, path: Path) -> Path:
        shutil.copy(good, path)
        add_metadata(path, job.metadata)
        model = onnx.load(path)
        edit(model, Weights(model))
        onnx.save(model, path)
        return path

    monkeypatch.setitem(FORMATS, "onnx", FormatEntry(write, ".onnx", FLOAT_LIMITS))


@pytest.mark.parametrize("edit", SABOTAGES, ids=lambda edit: edit.__name__)
def test_a_sabotaged_export_is_refused_and_nothing_is_written(source, good, tmp_path, monkeypatch, edit):
    edited_by(monkeypatch, good, edit)
    with pytest.raises(ExportRefused, match="nothing was written") as refused:
        vitral.export_model(source, tmp_path / "new" / "bad.onnx", outputs=["features", "attention"])
    assert refused.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("edit", [bgr, flipped_image, permuted_classes, dropped_temperature, half_precision])
def test_grey_symmetric_images_do_not_hide_a_mistake(source, good, tmp_path, monkeypatch, edit):
    paths = [tmp_path / f"{level}.png" for level in (90, 130, 170)]
    for path in paths:
        path.write_bytes(encode_png(np.full((20, 20, 3), int(path.stem), np.uint8)))
    edited_by(monkeypatch, good, edit)
    with pytest.raises(ExportRefused):
        vitral.export_model(source, tmp_path / "bad.onnx", images=paths, outputs=["features", "attention"])


def test_the_untouched_file_passes(source, good, tmp_path, monkeypatch):
    edited_by(monkeypatch, good, lambda model, weights: None)
    result = vitral.export_model(source, tmp_path / "same.onnx", outputs=["features", "attention"])
    assert result.report.agreement == 1
    assert open_exported(tmp_path / "same.onnx").report["agreement"] == 1


def test_images_with_labels_are_scored(source, good, tmp_path, monkeypatch):
    """Images in folders of the classes that the model predicts, but for one of six."""
    model, card = source
    for index, pixels in enumerate(generated_images((16, 16), card)[:6]):
        images = card.transform()(pixels)[None]
        label = card.class_names[int(model(images).argmax())] if index else "a"
        (tmp_path / "data" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / label / f"{index}.png").write_bytes(encode_png(pixels))
    edited_by(monkeypatch, good, lambda model, weights: None)
    result = vitral.export_model(
        source, tmp_path / "same.onnx", images=[tmp_path / "data"], outputs=["features", "attention"]
    )
    assert result.report.n == result.report.labelled == 6
    assert result.report.accuracy == (5 / 6, 5 / 6)


def test_a_limit_of_the_user_is_kept(source, good, tmp_path, monkeypatch):
    edited_by(monkeypatch, good, half_precision)
    result = vitral.export_model(
        source, tmp_path / "half.onnx", outputs=["features", "attention"], difference=0.1, agreement=0.5
    )
    assert 1e-4 < result.report.difference < 0.1
    with pytest.raises(ExportRefused, match="a probability differs"):
        vitral.export_model(source, tmp_path / "b.onnx", difference=1e-9, outputs=["features", "attention"])
