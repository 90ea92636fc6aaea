"""The scikit-learn estimator: scikit-learn's own checks by name, and the digits."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("sklearn", minversion="1.6", reason="needs scikit-learn")

from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

from vitral.errors import UserError
from vitral.sklearn import ImageClassifier

SMALL = {"image": 8, "shape.depth": 2, "shape.width": 32, "shape.heads": 2, "batch": 16, "optim.lr": 0.003}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(steps: int = 2, **changes: object) -> ImageClassifier:
    return ImageClassifier(model="ViT-Ti/4", device="cpu", set={**SMALL, "steps": steps, **changes})


class TableClassifier(ImageClassifier):
    """Takes the tables (n, features) of scikit-learn's checks: each row is an image of vertical bars."""

    def fit(self, X, y):
        return super().fit(_bars(X), y)

    def predict_proba(self, X):
        return super().predict_proba(_bars(X))


def _bars(table) -> np.ndarray:
    rows = np.clip(128 + 12 * np.asarray(table), 0, 255).astype(np.uint8)
    return np.repeat(rows[:, None, :], 8, axis=1)


CHECKS_WITHOUT_FIT = (
    "check_classifiers_regression_target",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_requires_y_none",
    "check_set_params",
    "check_valid_tag_types",
)
CHECKS_WITH_FIT = (
    "check_classifiers_one_label",
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_fit_check_is_fitted",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_methods_sample_order_invariance",
    "check_methods_subset_invariance",
    "check_readonly_memmap_input",
)


@pytest.mark.parametrize("check", CHECKS_WITHOUT_FIT)
def test_scikit_learn_check_without_fit(check):
    getattr(estimator_checks, check)("ImageClassifier", small())


@pytest.mark.parametrize("check", CHECKS_WITH_FIT)
def test_scikit_learn_check_with_fit(check):
    estimator = TableClassifier(model="ViT-Ti/4", device="cpu", set={**SMALL, "batch": 8, "steps": 1})
    getattr(estimator_checks, check)("TableClassifier", estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits 0 to 3, (n, 8, 8) uint8, and their labels."""
    pixels, labels = load_digits(n_class=4, return_X_y=True)
    return np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)[:200], np.asarray(labels)[:200]


@pytest.fixture(scope="module")
def fitted(digits) -> ImageClassifier:
    images, labels = digits
    return small(steps=60).fit(images, np.array(["zero", "one", "two", "three"])[labels])


def test_the_digits_are_learned(fitted, digits):
    images, labels = digits
    names = np.array(["zero", "one", "two", "three"])[labels]
    probabilities = fitted.predict_proba(images)
    assert fitted.classes_.tolist() == ["one", "three", "two", "zero"]
    assert set(fitted.card_.class_names) == set(fitted.classes_)
    assert probabilities.shape == (200, 4)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert fitted.predict(images).tolist() == fitted.classes_[probabilities.argmax(axis=1)].tolist()
    assert fitted.score(images, names) > 0.8
    assert 0.5 < fitted.held_out_score_ <= 1


def test_every_form_of_an_image_gives_the_same_prediction(fitted, digits, tmp_path):
    images = digits[0][:6]
    paths = [tmp_path / f"{index}.png" for index in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path)
    expected = fitted.predict_proba(images)
    forms = [
        images[..., None],
        images.astype(np.int64),
        images / 255,
        list(images),
        paths,
        [str(path) for path in paths],
        np.array([str(path) for path in paths]),
        [Image.fromarray(image) for image in images],
        [paths[0], images[1], Image.fromarray(images[2]), str(paths[3]), images[4] / 255, paths[5]],
    ]
    for form in forms:
        np.testing.assert_array_equal(fitted.predict_proba(form), expected)


def test_a_path_that_occurs_twice_is_predicted_twice(fitted, digits, tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    Image.fromarray(digits[0][0]).save(first)
    Image.fromarray(digits[0][1]).save(second)
    once = fitted.predict_proba([first, second])
    np.testing.assert_array_equal(fitted.predict_proba([second, first, second]), once[[1, 0, 1]])


@pytest.mark.parametrize("form", ["colour", "paths", "PIL"])
def test_fit_takes_other_forms_of_images(digits, tmp_path, form):
    images, labels = digits[0][:40], digits[1][:40]
    paths = [tmp_path / f"{index}.png" for index in range(40)]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path)
    colour = np.repeat(images[..., None], 3, axis=3)
    data = {"colour": colour, "paths": paths, "PIL": [Image.fromarray(image) for image in images]}[form]
    assert small().fit(data, labels).predict(data).shape == (40,)


@pytest.mark.parametrize(
    "names", [[7, -2, 30, 11], [True, False, True, False], ["b", "a", "d", "c"], [0.0, 2.0, 1.0, 9.0]]
)
def test_labels_of_any_type_come_back(digits, names):
    images, labels = digits[0][:40], np.array(names)[digits[1][:40]]
    estimator = small().fit(images, labels)
    assert estimator.classes_.tolist() == sorted(set(names))
    predicted = estimator.predict(images)
    assert predicted.dtype == labels.dtype
    assert set(predicted.tolist()) <= set(names)


def test_a_column_of_labels_is_taken_with_a_warning(digits):
    with pytest.warns(DataConversionWarning):
        assert small().fit(digits[0][:40], digits[1][:40, None]).classes_.tolist() == [0, 1, 2, 3]


def test_a_fitted_estimator_is_pickled_and_cloned(fitted, digits):
    images = digits[0][:10]
    restored = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(restored.predict_proba(images), fitted.predict_proba(images))
    copied = clone(fitted)
    assert copied.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        copied.predict(images)


def test_cross_validation(digits):
    images, labels = digits
    scores = cross_val_score(small(), images[:60], labels[:60], cv=2, error_score="raise")
    assert scores.shape == (2,)
    assert ((scores >= 0) & (scores <= 1)).all()


def test_grid_search_in_a_pipeline_over_a_list_of_paths(digits, tmp_path):
    paths = [str(tmp_path / f"{index}.png") for index in range(40)]
    for image, path in zip(digits[0], paths, strict=False):
        Image.fromarray(image).save(path)
    pipeline = Pipeline([("read", FunctionTransformer(_read)), ("vit", small())])
    grid = {"vit__set": [{**SMALL, "steps": 1}, {**SMALL, "steps": 2}]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(paths, digits[1][:40])
    assert search.best_params_["vit__set"]["steps"] in (1, 2)
    assert search.predict(paths).shape == (40,)


def _read(paths: list[str]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in paths])


def test_a_failed_fit_leaves_the_estimator_unfitted(digits):
    estimator = ImageClassifier(model="ViT-Ti/4", device="cpu", set={"no.such": 1})
    with pytest.raises(UserError, match=r"no\.such"):
        estimator.fit(*digits)
    with pytest.raises(NotFittedError):
        estimator.predict(digits[0])


PIXELS = np.zeros((4, 8, 8), np.uint8)
WRONG = [
    (PIXELS, [0, 1, 0], "X has 4 images and y has 3 labels"),
    (PIXELS, [0, 0, 0, 0], "^y has one class, 0: a classifier needs at least two"),
    (PIXELS, ["cat"] * 4, "^y has one class, 'cat': a classifier needs at least two"),
    (PIXELS, [0, 1, 2, 3], "^each class in y has one image: add images"),
    (
        np.zeros((4, 3, 8, 8), np.uint8),
        [0, 1, 0, 1],
        r"^X has the shape \(4, 3, 8, 8\), channels first: pass `X.transpose",
    ),
    (
        [np.zeros((3, 8, 8))] * 4,
        [0, 1, 0, 1],
        r"^image has the shape \(3, 8, 8\), channels first: pass `image.transpose",
    ),
    (PIXELS, None, "y should be a 1d array"),
    (PIXELS, np.eye(4, dtype=int), "y should be a 1d array"),
    (PIXELS, [0.5, 1.5, 0.25, 3], "continuous"),
    (PIXELS[:0], [], "X is empty"),
    (PIXELS.reshape(4, 64), [0, 1, 0, 1], r"X has the shape \(4, 64\): reshape it"),
    (PIXELS + 16.0, [0, 1, 0, 1], "float64 from 16 to 16: pass integers from 0 to 255, or floats from 0 to 1"),
    (PIXELS * np.nan, [0, 1, 0, 1], "float64 from nan to nan"),
    (PIXELS.astype(int) - 1, [0, 1, 0, 1], "int64 from -1 to -1"),
    (PIXELS.astype(bool), [0, 1, 0, 1], "these pixels are bool"),
    ("folder", [0, 1], "X is a str"),
    (["missing.png", "other.png"], [0, 1], r"missing\.png does not exist"),
    ([Path(__file__).parent] * 2, [0, 1], "is a folder: list the image files"),
]


@pytest.mark.parametrize(("images", "labels", "message"), WRONG)
def test_wrong_data_is_refused_before_training(images, labels, message):
    with pytest.raises(ValueError, match=message):
        small().fit(images, labels)


def test_an_unreadable_image_is_named(fitted, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot read image .*broken\.png"):
        fitted.predict([path])


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "vitral.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match="pip install"):
        import vitral.sklearn  # noqa: F401
