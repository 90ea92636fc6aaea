"""`dedupe` finds every planted copy and no other pair, the same ones as `check`; work is linear in the training set."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from vitral.checkpoints.card import Preprocess
from vitral.data.check import check
from vitral.data.copies import MAX_CANDIDATES, hamming_distance, signature, thumbnail_correlation
from vitral.data.sources import DataSet, Split, open_data
from vitral.data.workers import CHUNK
from vitral.errors import UserError
from vitral.evaluation.duplicates import DedupeResult, TrainTestCopy, find_duplicates, read_exclusions, write_exclusions
from vitral.events import Event, Progress

Picture = Image.Image
PREPROCESS = Preprocess("decode|resize(16, 16)", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Memory:
    """Encoded images or pixels in memory, and which were read."""

    images: Sequence[bytes | np.ndarray]
    reads: list[int] = field(default_factory=list)

    def read(self, index: int) -> bytes | np.ndarray:
        self.reads.append(index)
        return self.images[index]

    def mark(self, index: int) -> str:
        return f"{id(self.images)} {index}"


def split(images: Sequence[bytes | np.ndarray], name: str) -> Split:
    keys = [f"{name} {number}" for number in range(len(images))]
    return Split(name, keys, np.zeros(len(images), np.int64), ("a", "b"), Memory(images))


def scene(seed: int, size: tuple[int, int] = (120, 96)) -> Picture:
    """Coarse and finer shapes with a tint of its own."""
    rng = np.random.default_rng(seed)
    layers = [
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        for shape in ((5, 6, 3), (14, 17, 3))
    ]
    tint = np.array(np.unravel_index(seed % 27, (3, 3, 3))) * 60.0
    return Image.fromarray(
        (0.35 * np.asarray(layers[0], float) + 0.2 * np.asarray(layers[1], float) + tint).astype(np.uint8)
    )


def encoded(image: Picture, quality: int = 90) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def png(image: Picture) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def scaled(image: Picture, factor: float) -> Picture:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def cut(image: Picture, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0) -> Picture:
    width, height = image.size
    box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
    return image.crop(tuple(map(round, box)))  # type: ignore[arg-type]


def mirrored(image: Picture) -> Picture:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


COPIES: dict[str, Callable[[Picture], bytes]] = {
    "quality 60": lambda image: encoded(image, 60),
    "half": lambda image: encoded(scaled(image, 0.5)),
    "double": lambda image: encoded(scaled(image, 2)),
    "cut": lambda image: encoded(cut(image, 0.05, 0.05, 0.05, 0.05)),
    "cut left": lambda image: encoded(cut(image, left=0.05)),
    "cut top": lambda image: encoded(cut(image, top=0.05)),
    "cut right": lambda image: encoded(cut(image, right=0.05)),
    "cut bottom": lambda image: encoded(cut(image, bottom=0.05)),
    "mirrored": lambda image: png(mirrored(image)),
    "mirrored, quality 60": lambda image: encoded(mirrored(image), 60),
    "mirrored, cut, quality 60": lambda image: encoded(mirrored(cut(image, 0.05, 0.05, 0.05, 0.05)), 60),
}


@pytest.fixture(scope="module")
def scenes() -> list[Picture]:
    """As they come out of JPEG files: decoding these again gives the same pixels in any lossless format."""
    return [Image.open(io.BytesIO(encoded(scene(seed)))).convert("RGB") for seed in range(60)]


# Pairs


@pytest.mark.parametrize("kind", COPIES)
def test_near_copies_are_found_in_both_directions(scenes, kind):
    originals = split([encoded(image) for image in scenes], "original")
    copies = split([COPIES[kind](image) for image in scenes[:20]], "copy")
    for train, test in ((copies, originals), (originals, copies)):
        result = find_duplicates(train, [test])
        expected = [(train.keys[number], test.keys[number]) for number in range(20)]
        assert [pair[:2] for pair in result.pairs] == expected
        assert {(pair.kind, pair.method) for pair in result.pairs} == {("near", "hash")}
        assert min(pair.score for pair in result.pairs) > 0.85


def test_identical_files_and_pixels_are_exact(scenes):
    originals = [encoded(image) for image in scenes[:6]]
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in originals]
    train = split([originals[0], png(Image.fromarray(pixels[1])), pixels[2], originals[5]], "train")
    result = find_duplicates(train, [split(originals[:5], "test")])
    assert result.pairs == (
        TrainTestCopy("train 0", "test 0", 0, "exact", "bytes", 1.0),
        TrainTestCopy("train 1", "test 1", 0, "exact", "pixels", 1.0),
        TrainTestCopy("train 2", "test 2", 0, "exact", "pixels", 1.0),
    )


def test_grey_pixels_equal_a_grey_file(scenes):
    grey = scenes[0].convert("L")
    result = find_duplicates(split([np.asarray(grey)[:, :, None]], "train"), [split([png(grey)], "test")])
    assert [pair.method for pair in result.pairs] == ["pixels"]


def test_tiny_and_flat_images_are_compared_by_digest_only():
    rng = np.random.default_rng(0)
    tiny = rng.integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
    flat = [np.full((64, 64, 3), 100 + shade, np.uint8) for shade in range(3)]
    train = split([tiny[0], flat[0], flat[1], b"no picture", b""], "train")
    result = find_duplicates(train, [split([tiny[1], tiny[0], flat[2], b"no picture", flat[1]], "test")])
    assert [pair[:2] for pair in result.pairs] == [("train 0", "test 1"), ("train 2", "test 4")]
    assert (result.unreadable, result.not_compared) == (3, 7)


def test_pairs_name_their_test_split_and_keys_are_unique(scenes):
    data = [encoded(image) for image in scenes[:4]]
    train = split([encoded(scenes[0], 60), data[3], data[1]], "train")
    result = find_duplicates(train, [split(data[:2], "one"), split([], "none"), split(data[:1] + data[2:3], "two")])
    assert [(pair.train, pair.test, pair.split) for pair in result.pairs] == [
        ("train 0", "one 0", 0),
        ("train 0", "two 0", 2),
        ("train 2", "one 1", 0),
    ]
    assert result.keys == ["train 0", "train 2"]
    assert (result.train, result.against) == (3, (2, 0, 2))
    table = json.loads(json.dumps(result.as_dict()))
    assert table["pairs"][0]["test"] == "one 0"
    assert table["thresholds"]["min_correlation"] == 0.88


def test_workers_give_the_same_result_and_progress_is_reported(scenes):
    train = split([encoded(image, 60) for image in scenes[:10]] + [encoded(scene(99))] * 80, "train")
    test = split([encoded(image) for image in scenes], "test")
    events: list[Event] = []
    alone = find_duplicates(train, [test], on_event=events.append)
    assert events[-1] == Progress("comparing", 150, 150)
    counts = [event.done for event in events if isinstance(event, Progress)]
    assert counts == sorted(counts)
    assert find_duplicates(train, [test], workers=2) == alone
    assert len(alone.pairs) == 10


def test_an_empty_test_set_is_an_error(scenes):
    train = split([encoded(scenes[0])], "train")
    for against in ([], [split([], "test")]):
        with pytest.raises(UserError, match="name at least one test set"):
            find_duplicates(train, against)


# Photographs

known_signature = lru_cache(maxsize=None)(signature)


@pytest.fixture
def decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A photograph that several searches read is decoded by the first."""
    monkeypatch.setattr("vitral.data.copies.signature", known_signature)


def test_all_copies_of_photographs_are_found_and_no_other_pair(assets, decoded_once):
    """Among a thousand: a false pair shows only among many."""
    photographs = open_data(assets / "data" / "imagenet_val_1000", held_out=0).train
    chosen = np.random.default_rng(0).choice(1000, 12, replace=False)
    made, truth = [], {}
    for place in chosen.tolist():
        data = photographs.reader.read(place)
        assert isinstance(data, bytes)
        image = Image.open(io.BytesIO(data)).convert("RGB")
        for copy in (data, png(image), *(make(image) for make in COPIES.values())):
            truth[f"copy {len(made)}"] = photographs.keys[place]
            made.append(copy)
    copies = split(made, "copy")
    result = find_duplicates(copies, [photographs])
    assert {pair[:2] for pair in result.pairs} == set(truth.items())
    assert [pair.method for pair in result.pairs[:2]] == ["bytes", "pixels"]
    back = find_duplicates(photographs, [copies])
    assert set(back.keys) == {photographs.keys[place] for place in chosen.tolist()}
    halves = [photographs.select(np.arange(half, 1000, 2)) for half in range(2)]
    assert find_duplicates(halves[0], [halves[1]]).pairs == ()


# Features


class Tint(nn.Module):
    """The mean colour, which tells the scenes apart however much is cut off."""

    config = SimpleNamespace(channels=3)

    def features(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) - 0.5


class Same(Tint):
    """Finds all pictures alike."""

    def features(self, images: Tensor) -> Tensor:
        return torch.ones(len(images), 3)


def far_cut(image: Picture) -> bytes:
    return encoded(cut(image, 0.12, 0.2, 0.18, 0.1))


def test_features_find_copies_that_hashes_miss(scenes):
    originals = split([encoded(image) for image in scenes[:27]], "original")
    copies = split([*(far_cut(image) for image in scenes[:27]), encoded(scenes[3], 60), b"no picture"], "copy")
    assert find_duplicates(copies, [originals]).keys == ["copy 27"]
    events: list[Event] = []
    model: Any = Tint()
    result = find_duplicates(
        copies,
        [originals],
        model=model,
        preprocess=PREPROCESS,
        batch=8,
        on_event=events.append,
    )
    by_features = [pair for pair in result.pairs if pair.method == "features"]
    assert len(by_features) >= 24  # the mean colour is not quite the same
    assert all(pair.train.split()[1] == pair.test.split()[1] for pair in by_features)
    assert [pair.method for pair in result.pairs if pair.train == "copy 27"] == ["hash"]
    assert events[-1] == Progress("comparing", 2 * 56, 2 * 56)
    white, black = (split([png(Image.new("RGB", (64, 64), colour))], colour) for colour in ("white", "black"))
    assert find_duplicates(white, [black], model=model, preprocess=PREPROCESS).pairs == ()  # none is proposed


def test_thumbnails_decide_about_candidates_of_features(scenes):
    model: Any = Same()
    test, train = (split([encoded(image) for image in part], "x") for part in (scenes[:30], scenes[30:]))
    assert find_duplicates(train, [test], model=model, preprocess=PREPROCESS).pairs == ()


# The same pairs as `check`


def leaks_of_both(train: Split, test: Split) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Pairs (train, test) as `check` and as `dedupe` find them."""
    checked = {pair[:2] for pair in check(DataSet("memory", train, test=test)).leaks}
    return checked, {pair[:2] for pair in find_duplicates(train, [test]).pairs}


def test_check_finds_the_same_copies(scenes):
    pictures = [encoded(image) for image in scenes]
    copies = [copy(scenes[number]) for number, copy in enumerate(COPIES.values())]
    copies += [
        far_cut(scenes[20]),
        pictures[21],
        png(scenes[22]),
        b"no image",
        *(encoded(scene(n)) for n in range(90, 99)),
    ]
    tiny, flat = np.arange(192, dtype=np.uint8).reshape(8, 8, 3), np.full((64, 64, 3), 7, np.uint8)
    train = split([*copies, tiny, flat, np.full_like(flat, 9)], "train")
    test = split([*pictures, flat, tiny, np.full_like(flat, 8)], "test")
    expected = {(f"train {number}", f"test {number}") for number in range(len(COPIES))}
    expected |= {("train 12", "test 21"), ("train 13", "test 22"), ("train 24", "test 61"), ("train 25", "test 60")}
    assert leaks_of_both(train, test) == (expected, expected)
    checked, deduped = leaks_of_both(test, train)
    assert checked == deduped == {(second, first) for first, second in expected}


def test_check_finds_the_same_copies_of_photographs(assets, decoded_once):
    photographs = open_data(assets / "data" / "imagenet_val_1000", held_out=0).train.select(np.arange(0, 1000, 5))
    images = [Image.open(io.BytesIO(bytes(photographs.reader.read(number)))).convert("RGB") for number in range(40)]
    makers = list(COPIES.values())
    copies = split([makers[number % len(makers)](image) for number, image in enumerate(images)], "copy")
    expected = {(f"copy {number}", photographs.keys[number]) for number in range(40)}
    assert leaks_of_both(copies, photographs) == (expected, expected)


def test_both_leaks_of_pets_are_found(assets, decoded_once):
    """Verified by eye."""
    pets = open_data(assets / "data" / "pets_mini")
    assert pets.test is not None
    expected = {
        ("train/great_pyrenees/great_pyrenees_173.jpg", "test/great_pyrenees/great_pyrenees_89.jpg"),
        ("train/newfoundland/newfoundland_172.jpg", "test/newfoundland/newfoundland_2.jpg"),
    }
    assert leaks_of_both(pets.train, pets.test) == (expected, expected)


# Work


def test_work_is_linear_in_the_training_set(scenes, monkeypatch):
    compared: list[int] = []

    def counted(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        compared.append(len(left))
        return hamming_distance(left, right)

    monkeypatch.setattr("vitral.data.copies.hamming_distance", counted)
    test = split([encoded(image) for image in scenes], "test")
    some = [encoded(scene(seed)) for seed in range(100, 200)]
    counts = []
    for times in (1, 2, 4):
        compared.clear()
        find_duplicates(split(some * times, "train"), [test])
        counts.append(sum(compared))
    assert counts[0] > 0
    assert counts == [counts[0], 2 * counts[0], 4 * counts[0]]


def test_training_images_are_read_once_and_not_ahead(scenes):
    train = split([encoded(scene(200))] * (3 * CHUNK + 5), "train")
    reads = train.reader.reads  # type: ignore[attr-defined]
    ahead = []
    find_duplicates(
        train,
        [split([encoded(scenes[0])], "test")],
        on_event=lambda event: ahead.append(len(reads) - (event.done - 1)),  # type: ignore[union-attr]
    )
    assert reads == list(range(len(train)))
    assert max(ahead) <= CHUNK


def test_many_copies_of_one_image_take_few_comparisons(scenes, monkeypatch):
    pairs = []
    monkeypatch.setattr(
        "vitral.data.copies.thumbnail_correlation", lambda *pair: pairs.append(pair) or thumbnail_correlation(*pair)
    )
    many = [encoded(scenes[0], quality) for quality in range(40, 95)]
    result = find_duplicates(split(many[:30], "train"), [split(many[30:], "test")])
    assert len(result.pairs) == 30
    assert len(pairs) <= MAX_CANDIDATES * 30


# Exclusion lists


def listed(keys: Sequence[str]) -> DedupeResult:
    pairs = tuple(TrainTestCopy(key, f"test of {key}", 0, "near", "hash", 0.9) for key in keys)
    return DedupeResult(pairs, 100, (50,), 0, 0)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True))
def test_any_key_survives_the_exclusion_list(tmp_path_factory, keys):
    path = tmp_path_factory.getbasetemp() / "exclude.txt"
    write_exclusions(path, listed(keys))
    assert read_exclusions(path) == keys
    path.unlink()


def test_the_exclusion_list_is_readable_text(tmp_path):
    path = tmp_path / "new" / "exclude.txt"
    odd = "a\nb#c\\d.jpg"
    latin = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")  # a file name that is no UTF-8
    write_exclusions(path, listed(["cats/1.jpg", odd, "#3.jpg", latin]))
    assert [file.name for file in path.parent.iterdir()] == ["exclude.txt"]
    assert path.read_bytes().decode("utf-8", "surrogateescape").split("\n")[:5] == [
        "# 4 of 100 training images are copies of test images",
        "cats/1.jpg",
        "#   near (hash, 0.900): test of cats/1.jpg",
        "a\\nb#c\\\\d.jpg",
        "#   near (hash, 0.900): test of a\\nb#c\\\\d.jpg",
    ]
    assert read_exclusions(path) == ["cats/1.jpg", odd, "#3.jpg", latin]


def test_a_handwritten_exclusion_list_is_read(tmp_path):
    path = tmp_path / "exclude.txt"
    path.write_bytes("\ufeffcats/1.jpg\r\n\r\n# why\r\ndogs/é 2.jpg".encode())
    assert read_exclusions(path) == ["cats/1.jpg", "dogs/é 2.jpg"]
    path.write_text("ok.jpg\ncats\\1.jpg\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"line 2: a backslash is written"):
        read_exclusions(path)
    with pytest.raises(UserError, match="vitral dedupe"):
        read_exclusions(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="name a file inside it"):
        write_exclusions(tmp_path, listed(["a"]))


def test_a_failed_write_leaves_the_old_list(tmp_path):
    path = tmp_path / "exclude.txt"
    write_exclusions(path, listed(["a"]))
    with pytest.raises(UnicodeEncodeError):
        write_exclusions(path, listed(["b", "\ud800"]))
    assert read_exclusions(path) == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == ["exclude.txt"]
