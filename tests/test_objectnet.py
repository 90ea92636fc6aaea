"""ObjectNet scored by a loop, and the paper's way of preparing its images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitral.errors import UserError
from vitral.evaluation.objectnet import objectnet_accuracy


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4), st.integers(5, 12), st.sampled_from([0, 1, 8]))
def test_scores_are_those_of_a_loop(seed, n, classes, outputs, digits):
    """Rounded outputs are often equal: the lower index counts as the answer."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, outputs)).round(digits).astype(np.float32)
    labels = rng.integers(0, classes, n)
    mapping = [sorted(rng.choice(outputs, rng.integers(1, 4), replace=False).tolist()) for _ in range(classes)]
    first = five = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        answers = sorted(range(outputs), key=lambda output: (-row[output], output))
        first += answers[0] in mapping[label]
        five += any(answer in mapping[label] for answer in answers[:5])
    assert objectnet_accuracy(logits, labels, mapping) == (first / n, five / n, n)


def test_any_output_may_be_the_answer():
    """An output that no ObjectNet class is mapped to takes the first place, and the answer is wrong."""
    logits = np.zeros((1, 1000), np.float32)
    logits[0, [7, 409]] = 2, 1
    assert objectnet_accuracy(logits, np.array([0]), [[409, 530]]) == (0, 1, 1)


def test_other_models_and_no_images_are_refused():
    with pytest.raises(UserError, match="this model has 10"):
        objectnet_accuracy(np.zeros((1, 10), np.float32), np.array([0]), [[409]])
    with pytest.raises(UserError, match="nothing to score"):
        objectnet_accuracy(np.zeros((0, 1000), np.float32), np.zeros(0, np.int64), [[409]])
