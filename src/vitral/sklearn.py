"""A scikit-learn estimator: `ImageClassifier().fit(paths, labels).predict(paths)`; an extra: pip install 'vitral[demo]'."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from vitral.api.prediction import predict
from vitral.api.training import train
from vitral.errors import UserError
from vitral.events import ignore_events

Images = Sequence[Any] | np.ndarray


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """A Vision Transformer as a scikit-learn classifier of images.

    Images are paths, PIL images, or arrays of uint8 pixels (h, w, c), as a sequence or one array (n, h, w, c). A fifth of
    them is held out while training to report an accuracy; `fit` keeps the model in memory.

    Args:
        model: the model to train from scratch, such as ViT-Ti/16; chosen by default.
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        epochs: how often each image is seen; chosen by default.
        trainable: what is trained: full, head, last:K, bias or lora:R.
        balance: against uneven classes: none, weights, sampler or logit-adjust.
        seed: seed of weights, order, augmentation and dropout.
        device: cpu, cuda, cuda:1 or mps; the best one by default.
        out: the run folder to keep; a temporary one by default.
        set: other keys of the recipe, such as {"optim.lr": 0.01}.
        verbose: show progress.
    """

    def __init__(
        self,
        model: str = "",
        init: str = "",
        epochs: float | None = None,
        trainable: str = "",
        balance: str = "",
        seed: int = 0,
        device: str = "",
        out: str = "",
        set: Mapping[str, Any] | Sequence[str] = (),
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.init = init
        self.epochs = epochs
        self.trainable = trainable
        self.balance = balance
        self.seed = seed
        self.device = device
        self.out = out
        self.set = set
        self.verbose = verbose

    def fit(self, X: Images, y: Sequence[Any] | np.ndarray) -> ImageClassifier:
        """Train on images and their labels.

        Args:
            X: images: paths, PIL images or uint8 pixels.
            y: one label per image, of any type that sorts.
        """
        if len(X) != len(y):
            raise UserError(f"{len(X)} images have {len(y)} labels: give one label per image.")
        check_classification_targets(y)
        self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        with tempfile.TemporaryDirectory() as folder:
            result = train(
                list(zip(X, labels.tolist(), strict=True)),
                model=self.model,
                init=self.init,
                epochs=self.epochs,
                trainable=self.trainable,
                balance=self.balance,
                seed=self.seed,
                device=self.device,
                out=self.out or Path(folder) / "run",
                set=self.set,
                on_event=None if self.verbose else ignore_events,
            )
            self.model_, self.card_ = result.load()
        self.held_out_score_ = result.mean
        return self

    def predict_proba(self, X: Images) -> np.ndarray:
        """The probability of each class (n, classes), in the order of `classes_`.

        Args:
            X: images: paths, PIL images or uint8 pixels.
        """
        check_is_fitted(self)
        predictions = predict(
            (self.model_, self.card_),
            list(X),
            top=len(self.classes_),
            device=self.device,
            on_event=None if self.verbose else ignore_events,
        )
        if predictions.unreadable:
            first = predictions.unreadable[0]
            raise UserError(f"cannot read image {first.path}: {first.reason}; leave it out.")
        probabilities = np.zeros((len(predictions.rows), len(self.classes_)))
        for index, row in enumerate(predictions.rows):
            probabilities[index, [int(name) for name in row.names]] = row.probabilities
        return probabilities

    def predict(self, X: Images) -> np.ndarray:
        """The likeliest label of each image.

        Args:
            X: images: paths, PIL images or uint8 pixels.
        """
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]
