"""The learning rate of a step, as Google's two code bases compute it: warm-up, decay, cool-down."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from vitral.errors import UserError


def learning_rate(
    step: int,
    *,
    base: float,
    total: int,
    kind: str = "cosine",
    warmup: float = 0.0,
    end: float = 0.0,
    power: float = 2.0,
    drops: Sequence[float] = (),
    factors: Sequence[float] = (),
    timescale: float = 10_000.0,
    cooldown: float = 0.0,
) -> float:
    """The rate at a step counted from 0; beyond `total` the decay stays where it ended.

    `warmup`, `cooldown` and `drops` are steps, or shares of the run where they are below 1. Warm-up multiplies the
    decay curve, whose progress runs from the end of warm-up to the end of the run. Google's `linear` ended at 1e-5 in
    the paper's code and ends at 0 in big_vision: `end` says which.
    """
    warm, cool = steps_of(warmup, total), steps_of(cooldown, total)
    progress = min(max((step - warm) / max(total - warm, 1), 0.0), 1.0)
    if kind == "cosine":
        rate = base * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif kind == "linear":
        rate = end + (base - end) * (1.0 - progress)
    elif kind == "polynomial":
        rate = end + (base - end) * (1.0 - progress) ** power
    elif kind == "rsqrt":
        rate = base / math.sqrt(1.0 + max(step - warm, 0.0) / timescale)
    elif kind == "stair":
        passed = bisect_right([steps_of(drop, total) for drop in drops], step)
        rate = base * factors[passed - 1] if passed else base
    elif kind == "constant":
        rate = base
    else:
        raise UserError(f'unknown schedule "{kind}": use cosine, linear, constant, stair, rsqrt or polynomial.')
    if warm:
        rate *= min(1.0, step / warm)
    if cool:
        rate *= min(1.0, (total - step) / cool)  # below 0 past the end, as in big_vision; no run goes there
    return rate


def steps_of(amount: float, total: int) -> float:
    """Steps stay; below 1 the amount is a share of the run, rounded to whole steps."""
    return float(round(amount * total)) if amount < 1 else amount
