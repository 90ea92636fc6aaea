"""Averaged probabilities: over views of an image (test-time augmentation), and over models (an ensemble)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from vitral.data.preprocess import Pipeline, parse_deterministic
from vitral.data.transforms import FiveCrops
from vitral.errors import UserError
from vitral.evaluation.predict import Predictions

TestTimeAugmentation = Literal["flip", "five-crop", "ten-crop"]
VIEWS: dict[str, int] = {"flip": 2, "five-crop": 5, "ten-crop": 10}


class ViewPreprocess(NamedTuple):
    """Preprocessing whose images are stacks of views."""

    pipeline: Pipeline
    mean: tuple[float, ...]
    std: tuple[float, ...]


def view_pipeline(text: str, tta: TestTimeAugmentation) -> Pipeline:
    """The pipeline that gives the views of an image, stacked along its height; mirrored ones are made by the model."""
    if tta not in VIEWS:
        raise UserError(f'tta="{tta}" is not one of {", ".join(VIEWS)}.')
    pipeline = parse_deterministic(text)
    return pipeline if tta == "flip" else FiveCrops.of(pipeline)


def averaging(
    model: Callable[[Tensor], Tensor], tta: TestTimeAugmentation, *, temperature: float = 1.0, sigmoid: bool = False
) -> Callable[[Tensor], Tensor]:
    """A function from stacks of views (batch, channels, stacked height, width) to logits (batch, classes).

    Args:
        model: Images (batch, channels, height, width) to logits (batch, classes).
        tta: "flip", the image and its mirror image; "five-crop"; "ten-crop", five crops and their mirror images.
        temperature: What the logits of each view are divided by.
        sigmoid: Whether classes have independent probabilities.

    Returns:
        The function; at temperature 1 its logits give the mean of the views' probabilities.
    """

    def compute(images: Tensor) -> Tensor:
        views = [*images.chunk(1 if tta == "flip" else 5, dim=2)]
        views += [] if tta == "five-crop" else [view.flip(-1) for view in views]
        return mean_logits([model(view).float() / temperature for view in views], sigmoid=sigmoid)

    return compute


def mean_logits(logits: Sequence[Tensor], *, sigmoid: bool = False) -> Tensor:
    """Several (batch, classes) -> (batch, classes): logits of the mean probabilities, computed without underflow."""

    def log_mean(logs: list[Tensor]) -> Tensor:
        return torch.logsumexp(torch.stack(logs), dim=0) - math.log(len(logs))

    if sigmoid:
        return log_mean([logsigmoid(z) for z in logits]) - log_mean([logsigmoid(-z) for z in logits])
    return log_mean([log_softmax(z, dim=-1) for z in logits])


def mean_predictions(members: Sequence[Predictions], *, sigmoid: bool = False) -> Predictions:
    """The mean of several models' predictions of the same images, whose logits are divided by their temperatures."""
    first = members[0]
    assert all(np.array_equal(first.indices, member.indices) for member in members)
    valid = np.logical_and.reduce([member.valid for member in members])
    logits = mean_logits([torch.from_numpy(member.logits).double() for member in members], sigmoid=sigmoid)
    return Predictions(first.indices, logits.float().numpy(), valid)


def class_order(reference: Sequence[str], names: Sequence[str], source: str) -> np.ndarray:
    """Where a model has each class of another, (classes,) int64; models without names have them in one order.

    Args:
        reference: Class names of the first model.
        names: Class names of this one.
        source: What to call this model in a message.

    Raises:
        UserError: They are of other classes.
    """
    if tuple(reference) == tuple(names):
        return np.arange(len(names))
    if len(set(names)) == len(names) and sorted(reference) == sorted(names):
        return np.array([list(names).index(name) for name in reference], np.int64)
    lacking = sorted(set(reference) ^ set(names))[:1] or [""]
    raise UserError(
        f'{source} has other classes than the first model (such as "{lacking[0]}"): average models of the same '
        "classes, or name those of models without names with --classes."
    )
