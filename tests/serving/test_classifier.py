"""One picture at a time: the answers of `vitral.classifier` are those of `vitral.predict`, for every kind of model."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import ARCHITECTURES, SMALL, random_weights, randomised
from released import PREPROCESS, WEIGHTS
from scipy.special import expit, softmax

import vitral
from vitral.architecture import Architecture
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.data.images import encode_png
from vitral.serving import BatchRunner, TopKClassifier

NAMES = ("ant", "bee", "cat", "dog", "été")
MODELS = {name: model for name, model in ARCHITECTURES.items() if model.classes}
SIZES = ((32, 32), (41, 23), (7, 60))


def saved(path: Path, model: Architecture = SMALL, names: tuple[str, ...] = NAMES, **facts: Any) -> Path:
    """Random weights under a name, with a card that says all."""
    height, width = model.image
    values = (0.4,) * model.channels, (0.3,) * model.channels
    card = Card(model, names, preprocess=Preprocess(f"decode|resize({height}, {width})", *values), **facts)
    write(random_weights(model), card, path, "vitral")
    return path


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def painted(folder: Path, channels: int = 3) -> list[Path]:
    paths = []
    for number, size in enumerate(SIZES):
        paths.append(folder / f"{number}.png")
        paths[-1].write_bytes(encode_png(noise(*size, channels, seed=number)))
    return paths


def answers(source: Path, paths: list[Path], **options: Any) -> list[list[tuple[str, float]]]:
    """By `predict`."""
    rows = vitral.predict(source, paths, device="cpu", **options).rows
    return [list(zip(row.names, row.probabilities, strict=True)) for row in rows]


def same(found: list[tuple[str, float]], expected: list[tuple[str, float]], near: float = 1e-5) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [share for _, share in found] == pytest.approx([share for _, share in expected], abs=near)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_model_answers_as_predict_does(model, tmp_path):
    source, paths = saved(tmp_path / "model.safetensors", model), painted(tmp_path, model.channels)
    classify = vitral.classifier(source, top=3, device="cpu")
    expected = answers(source, paths, top=3)
    for path, answer in zip(paths, expected, strict=True):
        same(classify(path), answer)
    assert len({answer[0][1] for answer in expected}) == len(paths)  # pictures differ, so a stale one would show


@pytest.mark.parametrize("temperature", [1.0, 0.2, 0.001])
@pytest.mark.parametrize("multilabel", [False, True])
def test_probabilities_are_the_formulas(multilabel, temperature, tmp_path):
    """At any temperature, and the classes in the order of their logits where probabilities round to 0 or 1."""
    source = saved(tmp_path / "model.safetensors", multilabel=multilabel, temperature=temperature)
    pixels = noise(*SMALL.image)
    model, _ = vitral.load(source)
    with torch.inference_mode():
        logits = model.double()(torch.from_numpy((pixels / 255 - 0.4) / 0.3).permute(2, 0, 1)[None])[0].numpy()
    chances = expit(logits / temperature) if multilabel else softmax(logits / temperature)
    expected = [(NAMES[place], chances[place]) for place in np.argsort(-logits)]
    same(vitral.classifier(source, device="cpu")(pixels), expected)
    path = tmp_path / "image.png"
    path.write_bytes(encode_png(pixels))
    same(answers(source, [path])[0], expected)


def test_its_repr_is_short(tmp_path):
    shown = repr(vitral.classifier(saved(tmp_path / "model.safetensors"), device="cpu"))
    assert re.fullmatch(r"NamedClassifier\(classes=\d+ \([^()]*\), preprocess=decode\|.*\)", shown)


def test_pixels_a_path_and_bytes_are_one_picture(tmp_path):
    source, path = saved(tmp_path / "model.safetensors"), painted(tmp_path)[1]
    classify = vitral.classifier(str(source), device="cpu")
    pixels = noise(*SIZES[1], seed=1)
    found = classify(pixels)
    assert found == classify(path) == classify(str(path)) == classify(path.read_bytes())
    assert found == classify(np.flip(np.flip(pixels, 1).copy(), 1))  # memory in another order
    pixels.flags.writeable = False
    assert found == classify(pixels)


def test_there_are_no_more_answers_than_classes(tmp_path):
    source = saved(tmp_path / "model.safetensors", names=())
    found = vitral.classifier(source, top=99, device="cpu")(noise(9, 9))
    assert sorted(name for name, _ in found) == ["0", "1", "2", "3", "4"]
    assert sum(share for _, share in found) == pytest.approx(1)
    assert found[:1] == vitral.classifier(source, top=1, device="cpu")(noise(9, 9))


def test_grey_pixels_are_copied_to_all_channels(tmp_path):
    grey = noise(9, 9, 1)
    coloured = vitral.classifier(saved(tmp_path / "colour.safetensors"), device="cpu")
    assert coloured(grey) == coloured(grey.repeat(3, axis=2)) == coloured(encode_png(grey))
    one = vitral.classifier(saved(tmp_path / "grey.safetensors", replace(SMALL, channels=1)), device="cpu")
    assert one(grey) == one(encode_png(grey)) != coloured(grey)


def test_certain_answers_keep_their_order(tmp_path):
    """The probabilities of logits from 20 on are all 1 in single precision."""
    weights = random_weights(SMALL)
    weights.state["head.output.weight"].zero_()
    weights.state["head.output.bias"].copy_(torch.tensor([22.0, 24.0, 21.0, 23.0, 20.0]))
    values = (0.5,) * 3
    card = Card(SMALL, NAMES, multilabel=True, preprocess=Preprocess("decode|resize(32)", values, values))
    write(weights, card, tmp_path / "model.safetensors", "vitral")
    found = vitral.classifier(tmp_path / "model.safetensors", device="cpu")(noise(9, 9))
    assert found == [(name, pytest.approx(1)) for name in ("bee", "dog", "ant", "cat", "été")]


def test_threads_share_a_classifier(tmp_path):
    classify = vitral.classifier(saved(tmp_path / "model.safetensors"), device="cpu")
    pictures = [noise(32, 32, seed=seed) for seed in range(8)]
    expected = [classify(picture) for picture in pictures]
    assert isinstance(classify.classifier, TopKClassifier)
    compute = classify.classifier.runner.function

    def slowly(pixels: torch.Tensor) -> Any:
        time.sleep(0.005)  # long enough for another thread to overwrite the pixels
        return compute(pixels)

    classify.classifier.runner.function = slowly
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(classify, pictures)) == expected


@pytest.mark.parametrize(
    "picture, says",
    [
        ("nowhere.jpg", "nowhere.jpg cannot be read (No such file or directory): pass the path of an image file."),
        (b"", "this image cannot be read (the file is empty): pass a complete image."),
        (b"no picture", "this image cannot be read (not an image in a known format)"),
        (encode_png(noise(60, 60))[:999], "this image cannot be read (the file is truncated)"),
        (noise(9, 9, 4), "these pixels are uint8 (9, 9, 4): pass uint8 (height, width, 3)"),
        (noise(9, 9)[0, :, 0], "these pixels are uint8 (9,): pass"),
        (noise(9, 9) / 255, "these pixels are float64 (9, 9, 3): pass"),
        (noise(9, 0), "these pixels are uint8 (9, 0, 3): pass"),
        (torch.zeros(3, 9, 9), "a Tensor is not an image: pass a PIL image"),
    ],
    ids=["missing", "empty", "text", "truncated", "channels", "flat", "rescaled", "nothing", "tensor"],
)
def test_invalid_images_raise_one_sentence(picture, says, tmp_path):
    classify = vitral.classifier(saved(tmp_path / "model.safetensors"), device="cpu")
    with pytest.raises(vitral.UserError) as error:
        classify(picture)
    assert says in str(error.value)
    assert str(error.value).endswith(".")
    assert classify(noise(9, 9))  # it goes on


def test_a_folder_is_not_an_image(tmp_path):
    classify = vitral.classifier(saved(tmp_path / "model.safetensors"), device="cpu")
    with pytest.raises(vitral.UserError, match="pass the path of an image file"):
        classify(tmp_path)


def test_what_cannot_classify_is_refused_at_once(tmp_path):
    source = saved(tmp_path / "model.safetensors")
    headless = saved(tmp_path / "headless.safetensors", replace(SMALL, classes=0), ())
    wrong: dict[str, dict[str, Any]] = {
        "top must be at least 1, not 0": {"top": 0},
        '"gpu" is not a device': {"device": "gpu"},
        "draws at random": {"preprocess": "decode|random_crop(32)"},
    }
    for says, options in wrong.items():
        with pytest.raises(vitral.UserError, match=says):
            vitral.classifier(source, **options)
    with pytest.raises(vitral.UserError, match=r"headless.safetensors has no classification head: fine-tune it first"):
        vitral.classifier(headless, device="cpu")
    with pytest.raises(vitral.UserError, match="has no classification head"):
        vitral.predict(headless, painted(tmp_path), device="cpu")


def test_the_users_word_on_pixels_is_taken(tmp_path):
    source, paths = saved(tmp_path / "model.safetensors"), painted(tmp_path)
    wish = "decode|resize_small(40)|central_crop(40)|value_range(0, 1)"  # another size than the weights are for
    classify = vitral.classifier(source, preprocess=wish, device="cpu")
    for path, expected in zip(paths, answers(source, paths, preprocess=wish), strict=True):
        same(classify(path), expected)


def test_a_released_model_names_photographs(assets: Path) -> None:
    paths = sorted((assets / "data" / "imagenet_val_1000").glob("*/*"))[3::400]
    assert len(paths) == 3
    classify = vitral.classifier(assets / WEIGHTS, preprocess=PREPROCESS, device="cpu")
    for path, expected in zip(paths, answers(assets / WEIGHTS, paths, preprocess=PREPROCESS), strict=True):
        same(classify(path.read_bytes()), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
    def test_half_precision_stays_near(self, model, tmp_path):
        source, paths = saved(tmp_path / "model.safetensors", model), painted(tmp_path, model.channels)
        classify = vitral.classifier(source, device="cuda")
        found = [classify(path) for path in (*paths, paths[0])]
        assert found[-1] == found[0]
        for answer, expected in zip(found[:-1], answers(source, paths), strict=True):
            assert dict(answer) == pytest.approx(dict(expected), abs=0.02)

    def test_two_at_once_and_many_threads(self, tmp_path):
        source = saved(tmp_path / "model.safetensors")
        first, second = (vitral.classifier(source, device="cuda", top=top) for top in (2, 5))
        pictures = [noise(32, 32, seed=seed) for seed in range(8)]
        expected = [first(picture) for picture in pictures]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(first, pictures)) == expected
        assert [second(picture)[:2] for picture in pictures] == expected

    def test_answers_are_copies(self):
        values = (0.5,) * 3
        model, device = randomised(vitral.create("ViT-Ti/4@8", classes=9)), torch.device("cuda")
        classify = TopKClassifier(model, device, size=(8, 8), channels=3, mean=values, std=values, top=9)
        _, before = classify(noise(8, 8))
        kept = before.copy()
        _, after = classify(noise(8, 8, seed=1))
        assert (before == kept).all()
        assert (before != after).any()


class FakeGraph:
    """Replays a function on the pixels of a runner, as a captured graph does: into the same memory each time."""

    def __init__(self, runner: BatchRunner, batch: int, sizes: list[int]) -> None:
        self.graph = SimpleNamespace(replay=self.replay)
        self.runner, self.batch, self.sizes, self.results = runner, batch, sizes, (torch.zeros(batch),)

    def replay(self) -> None:
        self.sizes.append(self.batch)
        time.sleep(0.001)  # another thread's pixels must not replace these meanwhile
        (result,) = self.runner.function(self.runner.pixels[: self.batch])
        self.results[0].copy_(result)


def test_batches_are_padded_to_the_next_graph_and_threads_do_not_mix(monkeypatch):
    """The GPU's path of a runner, with stand-ins for CUDA graphs."""
    runner = BatchRunner(lambda x: (x.float().mean((1, 2, 3)),), torch.device("cpu"), size=(4, 5), channels=3)
    sizes: list[int] = []
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    runner.computed = SimpleNamespace(record=waited.append, synchronize=lambda: waited.append("end"))  # type: ignore[assignment]
    runner.pixels = torch.zeros(4, 4, 5, 3, dtype=torch.uint8)
    graphs: Any = {batch: FakeGraph(runner, batch, sizes) for batch in (1, 2, 4)}
    runner.graphs = {batch: (graph, graph.results) for batch, graph in graphs.items()}

    def ask(number: int) -> tuple[np.ndarray, np.ndarray]:
        pixels = np.random.default_rng(number).integers(0, 256, (1 + number % 4, 4, 5, 3), np.uint8)
        return runner(pixels)[0], pixels.mean((1, 2, 3))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(40)))
    for values, expected in found:
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert sorted(sizes) == [1] * 10 + [2] * 10 + [4] * 20
    assert waited == ["stream", "end"] * 40
