"""A scikit-learn estimator: `ImageClassifier().fit(paths, labels).predict(paths)`.

An extra: pip install 'vitral[demo]'.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitral.api.data import ImageLike, open_any_images
from vitral.api.inference import compute_device
from vitral.api.prediction import predict
from vitral.api.training import train
from vitral.errors import UserError
from vitral.events import ignore_events
from vitral.recipe import Overrides

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d
except ImportError as error:
    raise ImportError("vitral.sklearn needs scikit-learn: pip install 'vitral[demo]'.") from error

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from sklearn.utils import Tags  # type: ignore[missing-module-attribute]

Images = Sequence[ImageLike] | np.ndarray
_CHANNELS = (1, 3, 4)  # counts that tell which axis has the channels


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """A Vision Transformer as a scikit-learn classifier of images.

    Images are a sequence of paths, PIL images or arrays (height, width) or (height, width, channels), or one array
    (n, height, width) or (n, height, width, channels). Pixels are integers from 0 to 255 or floats from 0 to 1.

    `fit` holds out a fifth of the images of each class (`data.held_out` in `set`) to compute `held_out_score_`. The
    trained model stays in memory: `vitral.save(estimator.model_, path, estimator.card_)` writes it.

    Args:
        model: name of the model to train from scratch, such as ViT-Ti/16; chosen automatically by default.
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        epochs: passes over the training images; chosen automatically by default.
        trainable: which parameters are trained: full, head, last:K, bias or lora:R.
        balance: how uneven classes are balanced: none, weights, sampler or logit-adjust.
        seed: seed of weights, data order, augmentation and dropout.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        set: other keys of the recipe, such as {"optim.lr": 0.01}.
        verbose: whether to display progress.

    Attributes:
        classes_: the labels, sorted (classes,).
        model_: the trained model, on the CPU.
        card_: its card: class names, preprocessing and origin of the weights.
        held_out_score_: accuracy on the held-out images.
    """

    def __init__(
        self,
        model: str = "",
        init: str | Path = "",
        epochs: float | None = None,
        trainable: str = "",
        balance: str = "",
        seed: int = 0,
        device: str = "",
        set: Overrides = (),
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.init = init
        self.epochs = epochs
        self.trainable = trainable
        self.balance = balance
        self.seed = seed
        self.device = device
        self.set = set
        self.verbose = verbose

    def fit(self, X: Images, y: ArrayLike) -> ImageClassifier:
        """Train on images and their labels.

        Args:
            X: the images.
            y: one label per image, of any type that sorts.

        Returns:
            The estimator itself.

        Raises:
            UserError: if images and labels do not match, or a parameter is wrong.
        """
        labels = np.asarray(column_or_1d(np.asarray(y), warn=True))
        check_classification_targets(labels)
        images = _checked_images(X)
        if len(images) != len(labels):
            raise UserError(f"X has {len(images)} images and y has {len(labels)} labels: give one label per image.")
        classes, counts = np.unique(labels, return_counts=True)
        if len(classes) < 2:
            raise UserError(f"y has one class, {classes.tolist()[0]!r}: a classifier needs at least two.")
        open_any_images(images)  # raises if a file is missing or an image is of another type
        if counts.max() < 2:
            raise UserError("each class in y has one image: add images, since a part of each class is held out.")
        with tempfile.TemporaryDirectory() as folder:
            result = train(
                [(image, str(label)) for image, label in zip(images, labels, strict=True)],
                model=self.model,
                init=self.init,
                epochs=self.epochs,
                trainable=self.trainable,
                balance=self.balance,
                seed=self.seed,
                device=self.device,
                out=Path(folder) / "run",
                set=self.set,
                on_event=None if self.verbose else ignore_events,
            )
            self.held_out_score_ = result.mean
            self.model_, self.card_ = result.load()
        self.classes_ = classes
        return self

    def predict_proba(self, X: Images) -> np.ndarray:
        """Predict the probability of each class.

        Args:
            X: the images.

        Returns:
            Probabilities (n, classes), in the order of `classes_`.

        Raises:
            NotFittedError: before `fit`.
            UserError: if an image cannot be read.
        """
        check_is_fitted(self, "classes_")
        images = _checked_images(X)
        predictions = predict(
            (self.model_, self.card_),
            images,
            top=len(self.classes_),
            device=compute_device("", self.device),  # the model itself waits on the CPU
            on_event=None if self.verbose else ignore_events,
        )
        self.model_.cpu()  # so that a pickle can be read on machines without this device
        if predictions.unreadable:
            first = predictions.unreadable[0]
            raise UserError(f"cannot read image {first.path}: {first.reason}; omit it.")
        # By path, since `predict` gives a file that is named twice one row.
        by_path = {row.path: dict(zip(row.names, row.probabilities, strict=True)) for row in predictions.rows}
        rows = [by_path[image if isinstance(image, str) else f"image {index}"] for index, image in enumerate(images)]
        return np.array([[row[str(label)] for label in self.classes_] for row in rows])

    def predict(self, X: Images) -> np.ndarray:
        """Predict the most likely label of each image.

        Args:
            X: the images.

        Returns:
            Labels (n,).
        """
        probabilities = self.predict_proba(X)  # raises NotFittedError before `classes_` is read
        return self.classes_[probabilities.argmax(axis=1)]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()  # type: ignore[missing-attribute]
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        return tags


def _checked_images(X: Images) -> list[ImageLike]:
    """The images as a list of paths (str), PIL images and uint8 pixels."""
    if isinstance(X, str | Path) or not hasattr(X, "__len__"):
        raise UserError(f"X is a {type(X).__name__}: pass a sequence of images, or an array of them.")
    if isinstance(X, np.ndarray) and X.ndim not in (1, 3, 4):
        raise UserError(f"X has the shape {X.shape}: reshape it to (n, height, width) or (n, height, width, channels).")
    if not len(X):
        raise UserError("X is empty: add images.")
    if isinstance(X, np.ndarray) and X.ndim > 1:
        _refuse_channels_first("X", X)
        return list(_pixels(X))
    return [_checked_image(image) for image in X]


def _checked_image(image: ImageLike) -> ImageLike:
    if isinstance(image, np.ndarray):
        _refuse_channels_first("image", image)
        return _pixels(image)
    if not isinstance(image, str | Path):
        return image
    path = os.path.expanduser(image)
    if os.path.isdir(path):
        raise UserError(f"{image} is a folder: list the image files in it.")
    return str(Path(path))


def _refuse_channels_first(name: str, array: np.ndarray) -> None:
    """Refuse an image (channels, height, width), or an array X of such."""
    axes = 4 if name == "X" else 3
    if array.ndim == axes and array.shape[-3] in _CHANNELS and array.shape[-1] not in _CHANNELS:
        order = (0, 2, 3, 1) if axes == 4 else (1, 2, 0)
        raise UserError(f"{name} has the shape {array.shape}, channels first: pass `{name}.transpose{order}`.")


def _pixels(array: np.ndarray) -> np.ndarray:
    """Integers from 0 to 255, or floats from 0 to 1, as uint8."""
    if array.dtype == np.uint8 or not array.size:
        return array
    floating = np.issubdtype(array.dtype, np.floating)
    highest = 1 if floating else 255
    if not (floating or np.issubdtype(array.dtype, np.integer)):
        raise UserError(f"these pixels are {array.dtype}: pass integers from 0 to 255, or floats from 0 to 1.")
    if not (array.min() >= 0 and array.max() <= highest):  # false for NaN, too
        raise UserError(
            f"these pixels are {array.dtype} from {array.min():g} to {array.max():g}: "
            "pass integers from 0 to 255, or floats from 0 to 1."
        )
    return (np.rint(array * 255) if floating else array).astype(np.uint8)
