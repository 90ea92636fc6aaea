"""Predictions in FP8 with the classes of bfloat16: images whose two likeliest classes are close are computed again.

Rounding to FP8 changes the difference of two logits by an error whose spread is measured on a sample of the images.
Where the difference is much larger than that, as it is for most images, the likeliest class stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.models.vit import ViT

SAMPLE = 256  # images that the error is measured on
MIN_IMAGES = 10 * SAMPLE  # fewer take longer with the sample than in bfloat16 (by the speeds of ViT-B/16 on an H200)
MAX_RECOMPUTED = 1 / 4  # share of images: if more are computed again, all take longer than in bfloat16 (the same)
CHANGED = 1 / 400  # share of images whose class would not be that in bfloat16 if errors were normal


@dataclass(frozen=True)
class Recheck:
    """Which images are computed again, and what that does to the sample."""

    margin: float  # an image is, if its two largest logits differ by less
    images: int  # of the sample
    recomputed: float  # share of them that is computed again
    same_before: float  # share of them with the same likeliest class as in bfloat16
    same_after: float  # the same, once those are computed again

    @classmethod
    def of(cls, fp8: np.ndarray, bfloat16: np.ndarray) -> Recheck:
        """Choose the margin by the finite logits of a sample in both precisions, (images, two or more classes).

        With a normal error, and a density of differences that is flat within it, another class is likelier than that of
        an image with the probability `other`.
        """
        rows, likeliest = np.arange(len(fp8)), np.argsort(fp8, axis=1)[:, :-3:-1]
        first, second = likeliest[:, 0], likeliest[:, 1]
        gaps = (fp8[rows, first] - fp8[rows, second]).astype(np.float64)
        error = np.sqrt(np.mean((gaps - (bfloat16[rows, first] - bfloat16[rows, second])) ** 2))
        ordered = np.sort(gaps)
        other = torch.special.ndtr(torch.from_numpy(-ordered / max(error, 1e-12))).numpy()
        remaining = other[::-1].cumsum()[::-1] / len(gaps)  # of all images, if those before are computed again
        enough = int((remaining > CHANGED).sum())
        if enough:  # of equal differences, which logits in half precision have, all are computed again
            enough = int(np.searchsorted(ordered, ordered[enough - 1], side="right"))
        margin = float(ordered[enough]) if enough < len(ordered) else np.inf
        close, same = gaps < margin, fp8.argmax(1) == bfloat16.argmax(1)
        return cls(margin, len(fp8), *(float(share.mean()) for share in (close, same, same | close)))

    def __str__(self) -> str:
        return (
            f"Of {self.images:,} sampled images, the likeliest class in FP8 is that in bfloat16 for "
            f"{self.same_before:.1%}; where two classes are close ({self.recomputed:.1%}), images are computed again "
            f"in bfloat16, which makes it {self.same_after:.1%}."
        )

    def doubtful(self, logits: np.ndarray) -> np.ndarray:
        """Which images are computed again, (images,) bool, by their logits in FP8, (images, two or more classes)."""
        two = np.partition(logits, -2, axis=1)[:, -2:]
        return ~(two[:, 1] - two[:, 0] >= self.margin)  # also if they are not finite


def sample_of(images: int) -> np.ndarray:
    """Evenly spaced indices of the images to measure the error on, (SAMPLE,) int64."""
    return np.arange(SAMPLE) * images // SAMPLE


def in_bfloat16(model: ViT, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that calls a model in FP8, with FP8 switched off."""

    def compute(images: Tensor) -> Tensor:
        fp8, model.fp8 = model.fp8, False
        try:
            return function(images)
        finally:
            model.fp8 = fp8

    return compute
