"""Data sets in memory: torch datasets, Hugging Face datasets and lists, and the images and labels they may hold."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from vitral.data.cache import decode_once
from vitral.data.images import encode_png
from vitral.data.loader import training_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import open_data
from vitral.data.splits import DataSet, Split
from vitral.errors import UserError
from vitral.events import Event, Progress

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 9, 7, 3), np.uint8)
LABELS = [0, 1, 2] * 4
NAMES = ("ant", "bee", "cat")


class Pictures(Dataset):
    """A map-style dataset that counts how often items are read."""

    def __init__(self, images: Any = PIXELS, labels: Any = LABELS) -> None:
        self.images, self.stored = images, labels
        self.reads = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.images[index], self.stored[index]


class WithTargets(Pictures):
    """As torchvision's datasets are."""

    classes = NAMES

    def __init__(self, images: Any = PIXELS, labels: Any = LABELS) -> None:
        super().__init__(images, labels)
        self.targets = labels


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class FakeTable:
    """What is used of a Hugging Face dataset."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any] | None = None) -> None:
        self.columns, self.features = columns, features or {}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: rows[key] for name, rows in self.columns.items()}


class FakeFrame:
    """What is used of a data frame of pandas; its columns are arrays of objects, where pandas has series."""

    iloc = None

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = np.array(list(columns), object)
        self._columns = {name: np.array(rows, object) for name, rows in columns.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]


def whole(data: Any, **options: Any) -> Split:
    """All images as one split."""
    return open_data(data, held_out=0, **options).train


def refusal(data: Any) -> str:
    with pytest.raises(UserError) as caught:
        split = open_data(data, held_out=0).train
        for index in range(len(split)):
            split.reader.read(index)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_pixels(split: Split, pixels: np.ndarray = PIXELS) -> None:
    for index, image in enumerate(pixels):
        np.testing.assert_array_equal(split.reader.read(index), image)


# Forms


def test_a_dataset_is_read_for_its_labels_once_with_progress():
    dataset, events = Pictures(), []
    split = whole(dataset, on_event=events.append)
    assert dataset.reads == 12 + 2  # and the first image is looked at
    assert events == [Progress("reading labels of train", 12, 12)]
    assert split.labels.tolist() == LABELS
    assert split.classes == ("0", "1", "2")
    assert list(split.keys[:2]) == ["item 0", "item 1"]
    check_pixels(split)


@pytest.mark.parametrize("labels", [LABELS, np.array(LABELS), torch.tensor(LABELS)], ids=["list", "array", "tensor"])
def test_targets_are_labels_without_reading_images(labels):
    dataset, events = WithTargets(labels=labels), []
    split = whole(dataset, on_event=events.append)
    assert dataset.reads <= 3  # the first item alone
    assert events == []
    assert split.labels.tolist() == LABELS
    assert split.classes == NAMES


def test_targets_that_items_do_not_have_are_not_used():
    dataset = WithTargets()
    dataset.targets = [2 - label for label in LABELS]
    assert whole(dataset).labels.tolist() == LABELS
    transformed = WithTargets()
    transformed.__dict__["target_transform"] = lambda label: label
    assert whole(transformed).labels.tolist() == LABELS
    assert transformed.reads >= 12


def test_a_subset_has_the_labels_classes_and_keys_of_its_dataset():
    dataset = WithTargets()
    split = whole(Subset(Subset(dataset, list(range(2, 12))), [0, 4, 5]))
    assert dataset.reads <= 3
    assert split.labels.tolist() == [LABELS[2], LABELS[6], LABELS[7]]
    assert split.classes == NAMES
    assert list(split.keys) == ["item 2", "item 6", "item 7"]
    check_pixels(split, PIXELS[[2, 6, 7]])


def test_a_tensor_dataset():
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    split = whole(TensorDataset(images, torch.tensor(LABELS)))
    assert split.labels.tolist() == LABELS
    check_pixels(split)


def test_torchvisions_folder_of_images(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    for index, (image, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        path = tmp_path / NAMES[label] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_png(image))
    folder = torchvision.datasets.ImageFolder(tmp_path)
    split, files = whole(folder), whole(tmp_path)
    assert set(split.keys) == set(files.keys)
    assert (split.classes, split.labels.tolist()) == (files.classes, files.labels.tolist())
    for index, key in enumerate(split.keys):
        np.testing.assert_array_equal(split.reader.read(index), PIXELS[int(Path(key).stem)])
    part = whole(Subset(folder, [3, 1, 8]))
    assert list(part.keys) == [split.keys[index] for index in (3, 1, 8)]


def test_a_list_of_paths_and_labels(tmp_path):
    paths = [tmp_path / f"{index}.png" for index in range(12)]
    for path, image in zip(paths, PIXELS, strict=True):
        path.write_bytes(encode_png(image))
    names = [NAMES[label] for label in LABELS]
    pairs = whole([(str(path), name) for path, name in zip(paths, names, strict=True)])
    both = whole((paths, names))
    assert pairs.fingerprint() == both.fingerprint()
    assert pairs.classes == NAMES
    assert list(pairs.keys) == [str(path) for path in paths]
    assert pairs.reader.read(3) == paths[3].read_bytes()
    before = both.stamp()
    paths[3].write_bytes(encode_png(PIXELS[4]) + b" ")
    assert both.stamp() != before
    paths[0].unlink()
    with pytest.raises(ValueError, match="no such file"):
        pairs.reader.read(0)


def test_a_list_of_images_and_labels():
    pil = [Image.fromarray(image) for image in PIXELS]
    check_pixels(whole(list(zip(pil, LABELS, strict=True))))
    check_pixels(whole([[image, label] for image, label in zip(PIXELS, LABELS, strict=True)]))
    check_pixels(whole((PIXELS, np.array(LABELS))))
    check_pixels(whole((pil, tuple(LABELS))))


@pytest.mark.parametrize("form", ["PIL", "undecoded", "path"])
def test_a_hugging_face_dataset(form, tmp_path):
    images: list[Any] = [Image.fromarray(image) for image in PIXELS]
    if form != "PIL":
        images = [{"bytes": encode_png(image), "path": None} for image in PIXELS]
    if form == "path":
        for index, image in enumerate(images):
            (tmp_path / f"{index}.png").write_bytes(image["bytes"])
        images = [{"bytes": None, "path": str(tmp_path / f"{index}.png")} for index in range(12)]
    table = FakeTable({"img": images, "id": LABELS, "label": LABELS}, {"label": ClassLabel(list(NAMES))})
    split = whole(table)
    assert (split.classes, split.labels.tolist()) == (NAMES, LABELS)
    transform = parse_pipeline("decode|resize(9, 7)")
    batch = next(training_batches(split, transform, batch=12, seed=0, first_step=0, last_step=1))
    assert batch.valid.all()
    np.testing.assert_array_equal(batch.images.permute(0, 2, 3, 1).numpy(), PIXELS[batch.indices.numpy()])


def test_the_datasets_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    rows = {"image": [Image.fromarray(image) for image in PIXELS], "label": LABELS}
    table = datasets.Dataset.from_dict(rows, features=features)
    data = open_data(datasets.DatasetDict({"train": table, "test": table}))
    assert data.test is not None
    assert data.train.classes == NAMES
    check_pixels(data.train)
    check_pixels(data.test)


def data_frame(form: str, **columns: list[Any]) -> Any:
    return FakeFrame(**columns) if form == "fake" else pytest.importorskip("pandas").DataFrame(columns)


@pytest.mark.parametrize("form", ["fake", "pandas"])
def test_a_data_frame_of_paths_and_labels(form, tmp_path, monkeypatch):
    paths, names = ["b/2.png", "a/1.png", "b/1.png"], ["bee", "ant", "bee"]
    assert refusal((paths, names)).startswith("None of the image files exists, such as b/2.png: correct the paths, ")
    for path in paths[1:]:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    frame = data_frame(form, id=[7, 8, 9], Filename=paths, label=names)
    for data in (frame, (frame["Filename"], frame["label"]), (np.array(paths), np.array(names)), {"train": frame}):
        split = whole(data)
        assert (split.classes, split.labels.tolist()) == (("ant", "bee"), [1, 0, 1])
        assert list(split.keys) == paths
    divided = open_data(data_frame(form, path=paths, label=names, split=["train", "train", "validation"]))
    assert divided.val is not None
    assert (list(divided.train.keys), list(divided.val.keys)) == (paths[:2], paths[2:])
    several = whole(data_frame(form, path=paths, label=["bee|ant", "ant", "bee"]))
    assert several.labels.tolist() == [[1, 1], [1, 0], [0, 1]]
    message = 'The data frame has no column "label": its columns are path, kind, and'
    named = [data_frame(form, path=paths, label=["bee"] * 3)]
    for data in (*named, {"train": named[0]}, (named[0], named[0])):
        with pytest.raises(UserError) as caught:
            open_data(data)
        expected = f'{type(named[0]).__name__} object has one class, "bee": a classifier needs at least two, each with'
        assert str(caught.value) == f"{expected} its own label."
    assert refusal(data_frame(form, path=paths, kind=names)).startswith(message)


def test_splits_by_position_and_by_name():
    train, test = WithTargets(), WithTargets(PIXELS[:6], LABELS[:6])
    pair = open_data((train, test))
    assert pair.val is None
    assert (len(pair.train), pair.test and len(pair.test)) == (12, 6)
    three = open_data((train, test, test))
    assert (three.val and three.val.name, three.test and three.test.name) == ("val", "test")
    table = FakeTable({"image": list(PIXELS), "label": LABELS}, {"label": ClassLabel(list(NAMES))})
    unlabelled = FakeTable({"image": list(PIXELS), "label": [-1] * 12}, {"label": ClassLabel(list(NAMES))})
    named = open_data({"train": table, "validation": table, "test": unlabelled, "extra": table})
    assert (named.val is not None, named.test) == (True, None)
    assert named.notes == (
        "Left out the split extra.",
        "Left out test: its labels are all -1, which means unknown.",
    )
    arrays = open_data(((PIXELS, LABELS), (PIXELS[:6], LABELS[:6])))
    assert arrays.test is not None
    lists = open_data((list(zip(PIXELS, LABELS, strict=True)), list(zip(PIXELS, LABELS, strict=True))[:3]))
    assert lists.test is not None
    assert len(lists.test) == 3


def test_without_a_test_split_images_are_held_out_repeatably():
    first, second = open_data(Pictures()), open_data(Pictures())
    assert first.test is not None
    assert second.test is not None
    assert first.test.counts().tolist() == [1, 1, 1]
    assert first.train.fingerprint() == second.train.fingerprint()
    assert first.train.stamp() == second.train.stamp()
    assert first.source == "Pictures object"
    assert open_data(first) is first


# Labels


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["b10", "b2", "b2", "a"], ("a", "b2", "b10"), [2, 1, 1, 0]),
        ([0, 3, 3, 1], ("0", "1", "2", "3"), [0, 3, 3, 1]),
        ([np.int64(1), torch.tensor(0), np.uint8(1), True], ("0", "1"), [1, 0, 1, 1]),
        ([("a", "b"), ("b",), (), ["c"]], ("a", "b", "c"), [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]),
        ([[0, 2], [1], [], [1, 2]], ("0", "1", "2"), [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]]),
        ([{"b", "a"}, {"a"}, {"b"}, {"a"}], ("a", "b"), [[1, 1], [1, 0], [0, 1], [1, 0]]),
        ([[0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]], ("0", "1", "2"), [[0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]]),
        (np.array([[1, 0], [0, 1], [1, 1], [0, 0]]), ("0", "1"), [[1, 0], [0, 1], [1, 1], [0, 0]]),
        (torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]]), ("0", "1"), [[1, 0], [0, 1], [1, 1], [0, 0]]),
    ],
)
def test_labels_of_every_form(labels, classes, expected):
    split = whole((list(PIXELS[:4]), labels))
    assert split.classes == classes
    assert split.labels.tolist() == expected
    assert split.multilabel == isinstance(expected[0], list)


def test_multi_label_class_names_come_from_the_dataset():
    split = whole(WithTargets(PIXELS[:4], [np.array(row) for row in ([1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1])]))
    assert split.classes == NAMES
    assert split.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "labels",
    [
        np.eye(3)[[0, 1, 2, 0]],
        torch.eye(3, dtype=torch.int64)[[0, 1, 2, 0]],
        [[0, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]],
        [[0, 1], [1, 0], [1, 0], [0, 1]],  # as lists of classes, every image would have both
    ],
)
def test_one_hot_labels_are_refused(labels):
    message = "Each label is a vector with exactly one 1, as one-hot labels are: use `label.argmax()` if each image has"
    pair = (list(PIXELS[:4]), labels)
    for data in (pair, Pictures(PIXELS[:4], labels), {"train": pair, "test": pair}):
        with pytest.raises(UserError) as caught:
            open_data(data)
        assert message in str(caught.value)
        evaluated = open_data(data, held_out=0)  # a part of multi-label data may look so
        assert evaluated.train.labels.tolist() == np.asarray(labels).astype(int).tolist()
        assert any("exactly one 1" in note for note in evaluated.notes)


def test_both_ways_out_of_one_hot_labels():
    vectors = np.eye(3, dtype=np.uint8)[[0, 1, 2, 0]]
    one = whole((list(PIXELS[:4]), [vector.argmax() for vector in vectors]))
    assert (one.classes, one.labels.tolist()) == (("0", "1", "2"), [0, 1, 2, 0])
    several = whole((list(PIXELS[:4]), [[int(vector.argmax())] for vector in vectors]))
    assert (several.classes, several.labels.tolist()) == (("0", "1", "2"), vectors.tolist())


@pytest.mark.parametrize("vector", [list, np.array])
def test_vectors_of_a_split_are_read_as_those_of_the_others(vector):
    train, test = [[1, 1], [1, 0], [0, 1], [0, 0]], [[0, 1], [1, 0]]
    data = open_data(((list(PIXELS[:4]), list(map(vector, train))), (list(PIXELS[:2]), list(map(vector, test)))))
    assert data.test is not None
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == (train, test)
    data = open_data(((list(PIXELS[:4]), [[0], [1], [0, 1], []]), (list(PIXELS[:2]), test)))
    assert data.test is not None
    assert data.test.labels.tolist() == [[1, 1], [1, 1]]


def test_classes_between_numbers_are_noted():
    data = open_data((PIXELS, [0, 100, 200] * 4))
    assert len(data.train.classes) == 201
    assert data.notes[1:] == (
        '198 of 201 classes have no image in train or test: "1", "2", "3" and 195 more.',
        "Labels that are numbers count the classes from 0: use strings if they are names.",
    )
    named = open_data(WithTargets(PIXELS, [0, 1] * 6))
    assert named.notes[1:] == ('1 of 3 classes have no image in train or test: "cat".',)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, -1], "The label of item 3 is -1: labels begin at 0"),
        ([0, 1, 2, -7], "-7 is not a label"),
        ([0, 1, 2, 0.5], "0.5 is not a label"),
        ([0, 1, None, 1], "None is not a label"),
        (["a", "b", "", "a"], "'' is not a label"),
        ([0, "a", 1, 1], "Labels are numbers (0) and strings"),
        ([np.array([0, 3]), np.array([1, 0])] * 2, "A label is the vector [0, 3]"),
        ([0, 1, 2], "There are 4 images and 3 labels"),
    ],
)
def test_wrong_labels_are_refused_in_one_sentence(labels, message):
    assert message in refusal((list(PIXELS[:4]), labels))


def test_a_test_class_that_train_lacks_is_refused():
    train, test = (PIXELS[:4], [0, 1, 0, 1]), (PIXELS[:4], [0, 1, 2, 1])
    assert '"2" (1 image); add them to train' in refusal((train, test))


# Images


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def test_images_of_every_form(tmp_path):
    colour = PIXELS[0]
    (tmp_path / "a.png").write_bytes(encode_png(colour))
    tensor = torch.from_numpy(colour).permute(2, 0, 1)
    forms = [colour, Image.fromarray(colour), tensor, tensor.float() / 255, tensor.double() / 255]
    for image in (*forms, colour.astype(np.float32) / 255):
        np.testing.assert_array_equal(whole(Pictures([image, image], [0, 1])).reader.read(0), colour)
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), encode_png(colour)):
        assert whole(Pictures([image, image], [0, 1])).reader.read(0) == encode_png(colour)


@pytest.mark.parametrize("mode", ["1", "L", "I", "I;16", "F", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_pil_images_of_every_mode_are_decoded_as_files_are(mode):
    base = Image.fromarray(PIXELS[0])
    image = base.convert("L").convert("F").point(lambda value: value / 255) if mode == "F" else base.convert("L")
    image = Image.fromarray(np.asarray(base.convert("L")).astype(np.uint16) << 8) if mode == "I;16" else image
    image = image.convert("I").point(lambda value: value * 256) if mode == "I" else image
    image = base.convert(mode) if mode not in ("F", "I", "I;16") else image
    assert image.mode == mode
    pixels = whole([(image, 0), (image, 1)]).reader.read(0)
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == (9, 7, 1 if mode in ("1", "L", "I", "I;16", "F") else 3)
    if mode in ("1", "L", "I;16", "P", "LA", "RGBA"):  # what a PNG keeps
        stored = whole([(encoded(image), 0), (encoded(image), 1)])
        transform = parse_pipeline("decode|resize(9, 7)")
        options: dict[str, Any] = {"batch": 2, "seed": 0, "first_step": 0, "last_step": 1}
        first = next(training_batches(whole([(image, 0), (image, 1)]), transform, **options))
        assert torch.equal(first.images, next(training_batches(stored, transform, **options)).images)


def test_the_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(PIXELS[0]), exif=exif)))
    for turned in (image, image.convert("RGB")):
        np.testing.assert_array_equal(
            whole([(turned, 0), (turned, 1)]).reader.read(0), PIXELS[0].swapaxes(0, 1)[:, ::-1]
        )


def test_floating_point_images_are_rounded_with_a_note():
    images = torch.rand(4, 3, 5, 6)
    data = open_data(TensorDataset(images, torch.tensor([0, 1, 0, 1])), held_out=0)
    assert data.notes == ("The images are floating-point: they are rounded to 8 bits.",)
    expected = (images[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    np.testing.assert_array_equal(data.train.reader.read(0), expected)
    assert open_data(Pictures(), held_out=0).notes == ()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.full((3, 4, 4), -1.5), "values from -1.5 to -1.5, not 0 to 1: pass images that are not normalised"),
        (torch.full((3, 4, 4), float("nan")), "not 0 to 1"),
        (torch.zeros(9, 9, 3, dtype=torch.uint8), "a tensor of shape (9, 9, 3): return (channels, height, width)"),
        (torch.zeros(2, 3, 4, 4), "a tensor of shape (2, 3, 4, 4)"),
        (np.zeros((3, 9, 9), np.uint8), "an array of shape (3, 9, 9): return (height, width, channels)"),
        (np.zeros((4, 4, 3), np.int64), "of dtype int64: return uint8"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (None, "is None, not a PIL image, a uint8 array or a tensor"),
        (7, "is a int"),
    ],
)
def test_wrong_images_are_refused_in_one_sentence(image, message):
    sentence = refusal(Pictures([image] * 4, [0, 1, 0, 1]))
    assert message in sentence
    assert "item 0" in sentence


# Objects that are no data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "The train data (list) is empty"),
        (Pictures([], []), "The train data (Pictures) is empty"),
        ((Pictures(), []), "The test data (list) is empty"),
        ({}, "splits of an empty mapping: add train"),
        ({"test": Pictures()}, "splits test: add train"),
        (None, "a NoneType, which has no items by index"),
        (3, "a int, which has no items by index"),
        (DataLoader(Pictures()), "a DataLoader, which has no items by index: pass its dataset"),
        ([PIXELS[0], PIXELS[1]], "Item 0 of the train list is not a pair (image, label)"),
        ([(PIXELS[0], 0), "a.png"], "Item 1 of the train list is not a pair"),
        (Pictures(PIXELS[:4], LABELS[:4]).images, "which has no items by index"),
        (FakeTable({"text": ["a"], "label": [0]}), "no single column of images among text, label"),
        (FakeTable({"image": [PIXELS[0]], "text": ["a"]}), "no single column of labels among image, text"),
    ],
)
def test_what_is_no_data_is_refused_in_one_sentence(data, message):
    assert message in refusal(data)


def test_an_iterable_dataset_is_refused():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    assert "a Stream, which has no items by index: pass a map-style Dataset" in refusal(Stream())


def test_items_that_are_no_pairs_are_refused():
    class Alone(Pictures):
        def __getitem__(self, index: int) -> Any:
            return self.images[index]

    assert "Item 0 of Alone is a ndarray: return (image, label)" in refusal(Alone())


def test_items_may_be_mappings():
    class Mappings(Pictures):
        def __getitem__(self, index: int) -> Any:
            return {"image": self.images[index], "label": self.stored[index]}

    check_pixels(whole(Mappings()))


# Loading


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_dataset_and_exact_resume(workers):
    split, transform = whole(WithTargets()), parse_pipeline("decode|inception_crop(6)|flip")
    options: dict[str, Any] = {"batch": 5, "seed": 1, "last_step": 6, "workers": workers}
    full = list(training_batches(split, transform, first_step=0, **options))
    resumed = list(training_batches(split, transform, first_step=4, **options))
    for expected, batch in zip(full[4:], resumed, strict=True):
        assert all(torch.equal(*pair) for pair in zip(expected, batch, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrong_image_in_a_worker_is_one_sentence(workers):
    images = [*PIXELS[:3], torch.full((3, 4, 4), 5.0)]
    split = whole(Pictures(images, [0, 1, 0, 1]))
    with pytest.raises(UserError, match=r"the image of item 3 has values from 5 to 5, not 0 to 1"):
        list(
            training_batches(
                split, parse_pipeline("decode|resize(4)"), batch=4, seed=0, first_step=0, last_step=1, workers=workers
            )
        )


class Faulty(WithTargets):
    """Raises an error for one image."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 7:
            raise RuntimeError("no such record")
        return super().__getitem__(index)


def test_an_exception_of_a_dataset_says_which_item_was_read():
    unlabelled = Faulty()
    del unlabelled.targets
    with pytest.raises(RuntimeError, match="no such record") as caught:
        open_data((Pictures(), unlabelled))
    assert caught.value.__notes__ == ["while reading item 7 of the test data"]
    split = whole(Subset(Faulty(), [6, 7, 8]))
    with pytest.raises(RuntimeError, match="no such record") as caught:
        split.reader.read(1)
    assert caught.value.__notes__ == ["while reading item 7 of the train data"]


def test_an_exception_in_a_worker_says_which_item_was_read():
    options: dict[str, Any] = {"batch": 12, "seed": 0, "first_step": 0, "last_step": 1, "workers": 1}
    with pytest.raises(RuntimeError, match=r"no such record\nwhile reading item 7 of the train data"):
        list(training_batches(whole(Faulty()), parse_pipeline("decode|resize(4)"), **options))


def test_readers_can_be_pickled():
    for data in (WithTargets(), Subset(WithTargets(), [1, 2, 3]), (list(PIXELS), LABELS)):
        split = whole(data)
        copy = pickle.loads(pickle.dumps(split.reader))
        np.testing.assert_array_equal(copy.read(1), split.reader.read(1))


def test_marks_follow_the_content(tmp_path: Path):
    changed = PIXELS.copy()
    before = whole((changed, LABELS)).stamp()
    changed[5] += 1
    assert whole((changed, LABELS)).stamp() != before
    encoded_images = [encode_png(image) for image in PIXELS]
    kept, unreadable = decode_once(whole((encoded_images, LABELS)), tmp_path)
    assert unreadable == []
    check_pixels(kept)
    encoded_images[0] = encode_png(PIXELS[1])
    kept, _ = decode_once(whole((encoded_images, LABELS)), tmp_path)
    np.testing.assert_array_equal(kept.reader.read(0), PIXELS[1])


def test_reading_labels_item_by_item_is_reported():
    events: list[Event] = []
    data = open_data(Pictures(), on_event=events.append)
    assert isinstance(data, DataSet)
    assert events
