"""ObjectNet by an ImageNet model (appendix D.9): the protocol of BiT, without further training.

The model answers with any of its 1,000 outputs, and is right where the answer is one of the ImageNet classes that the
makers of ObjectNet give for the photograph's class; choosing among the overlapping classes alone would be easier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.evaluation.calibration import check_scores


class ObjectNetScore(NamedTuple):
    top1: float
    top5: float
    n: int


def objectnet_accuracy(logits: np.ndarray, labels: np.ndarray, mapping: Sequence[Sequence[int]]) -> ObjectNetScore:
    """(n, 1000), (n,) -> how often the first, or one of the first five, is right. Equal outputs go to the lower index.

    `mapping` has the outputs that are right for each ObjectNet class.
    """
    check_scores(logits, labels)
    outputs = logits.shape[1]
    if max(map(max, mapping)) >= outputs:
        raise UserError(f"ObjectNet is mapped to ImageNet's 1000 classes, and this model has {outputs}.")
    right = np.zeros((len(mapping), outputs), bool)
    for label, allowed in enumerate(mapping):
        right[label, list(allowed)] = True
    first = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hits = right[labels[:, None], first]
    return ObjectNetScore(float(hits[:, 0].mean()), float(hits.any(axis=1).mean()), len(labels))
