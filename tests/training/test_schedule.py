"""Learning rates against Google's own numbers, and against values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitral.errors import UserError
from vitral.recipe_presets import get_preset
from vitral.training.optimizer import learning_rate, steps_of, warmup_steps

KINDS = ("cosine", "linear", "constant", "multistep", "rsqrt", "polynomial")
GOLDEN = [*(f"vit_jax_{i}" for i in range(5)), *(f"big_vision_{i}" for i in range(5))]


@pytest.mark.parametrize("name", GOLDEN)
def test_rates_equal_googles(golden_file, name):
    case = json.loads(golden_file("index.json").read_text())["cases"]["lr_schedules"]["configs"][name]
    base = case["base"]
    if case.get("scale_with_batchsize"):
        base *= case["batch_size"] / 256
    settings = {
        "kind": {"stair": "multistep"}.get(case["decay_type"], case["decay_type"]),
        "warmup": case["warmup_steps"],
        "end": case.get("linear_end", 1e-5 if name.startswith("vit_jax") else 0.0),
        "power": case.get("power", 2),
        "drops": case.get("steps", ()),
        "factors": case.get("mults", ()),
        "timescale": case.get("timescale", 10_000),
        "cooldown": case.get("cooldown_steps", 0),
    }
    with np.load(golden_file("lr_schedules.npz")) as golden:
        steps, rates = golden[f"{name}/steps"], golden[f"{name}/lr"]
    assert steps.max() > case["total_steps"]
    ours = [learning_rate(int(step), base=base, total=case["total_steps"], **settings) for step in steps]
    np.testing.assert_allclose(ours, rates, rtol=0, atol=1e-6 * base)


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (0, {"warmup": 10}, 0.0),
        (5, {"warmup": 10}, 1.0),
        (10, {"warmup": 10}, 2.0),
        (55, {"warmup": 10}, 1.0),  # half of the cosine
        (40, {"warmup": 10}, 1.0 + math.cos(math.pi / 3)),
        (100, {"warmup": 10}, 0.0),
        (250, {"warmup": 10}, 0.0),
        (5, {"warmup": 0.1}, 1.0),  # a share of the run
        (0, {"warmup": 0}, 2.0),
        (50, {"kind": "linear", "end": 1.0}, 1.5),
        (50, {"kind": "polynomial", "power": 3}, 0.25),
        (99, {"kind": "constant"}, 2.0),
        (29, {"kind": "multistep", "drops": (30, 60), "factors": (0.5, 0.25)}, 2.0),
        (30, {"kind": "multistep", "drops": (30, 60), "factors": (0.5, 0.25)}, 1.0),
        (75, {"kind": "multistep", "drops": (0.3, 0.6), "factors": (0.5, 0.25)}, 0.5),
        (40, {"kind": "rsqrt", "warmup": 10, "timescale": 10}, 1.0),
        (90, {"kind": "constant", "cooldown": 20}, 1.0),
        (95, {"kind": "constant", "cooldown": 0.2}, 0.5),
    ],
)
def test_rates_worked_out_by_hand(step, settings, expected):
    assert learning_rate(step, base=2.0, total=100, **settings) == pytest.approx(expected, abs=1e-12)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 500),
    st.floats(0, 0.9),
    st.floats(0, 0.3),
)
def test_a_run_climbs_to_its_base_and_never_leaves_it(kind, total, warmup, cooldown):
    settings = {"kind": kind, "warmup": warmup, "cooldown": cooldown, "drops": (0.5,), "factors": (0.1,)}
    rates = [learning_rate(step, base=0.3, total=total, **settings) for step in range(total)]
    warm = int(steps_of(warmup, total))
    assert all(0.0 <= rate <= 0.3 + 1e-12 for rate in rates)
    assert all(late <= early + 1e-12 for early, late in zip(rates[warm:], rates[warm + 1 :], strict=False))
    assert all(step >= steps_of(0.5, total) or rates[step] > 0 for step in range(1, total - int(0.3 * total) - 1))


@pytest.mark.parametrize(
    ("warmup", "total", "full_steps", "expected"),
    [
        (500, 501, 20_000, 500),  # fits, if barely
        (500, 500, 20_000, 12),  # 1/40 of the run, as of the full one
        (500, 20, 20_000, 0),
        (100, 100, 500, 20),
        (10_000, 400, 93_836, 43),
        (50, 40, 0, 4),  # nobody knows the full run
        (50, 40, 50, 4),
        (1, 1, 0, 0),
        (0.5, 10, 7, 5),  # a share fits any run
    ],
)
def test_a_warmup_that_does_not_fit_is_scaled(warmup, total, full_steps, expected):
    assert warmup_steps(warmup, total, full_steps) == expected


@pytest.mark.parametrize("name", ["paper:finetune/imagenet", "paper:pretrain/imagenet", "bit:finetune/large"])
@pytest.mark.parametrize("total", [5, 40, 400])
def test_a_shortened_recipe_reaches_its_rate_and_decays(name, total):
    recipe = get_preset(name).recipe
    settings = asdict(recipe.schedule)
    rates = [learning_rate(step, base=recipe.optim.lr, total=total, **settings) for step in range(total)]
    assert max(rates) == pytest.approx(recipe.optim.lr)
    assert rates[-1] < 0.5 * recipe.optim.lr


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="cosine"):
        learning_rate(0, base=1.0, total=10, kind="cosin")
