"""A training step is Google's: the same weights and batch give the same new weights as a plain NumPy step of theirs."""

from __future__ import annotations

import google_step as google
import numpy as np
import pytest
import torch
from google_step import BATCH, MODELS, RUNS, STEPS, a_batch, a_model, linen
from oracles import random_weights

from vitral.checkpoints.weights import assemble
from vitral.data.loader import Batch
from vitral.models.vit import ViT
from vitral.recipe import Recipe
from vitral.recipe_presets import get_preset
from vitral.training.loop import LoopConfig, train_step
from vitral.training.objective import LossSettings, Objective
from vitral.training.optimizer import build_optimizer, parameter_groups, set_lr
from vitral.training.parallel import World
from vitral.training.state import TrainState


def our_steps(model: ViT, recipe: Recipe, rates: tuple[float, ...]) -> list[float]:
    """Take the steps as a run of this recipe does; the gradients' norms."""
    config = model.config
    o = recipe.optim
    settings = LossSettings(config.classes, recipe.data.mean, recipe.data.std, kind=recipe.loss)
    groups = parameter_groups(model, weight_decay=o.weight_decay)
    options = {"beta1": o.beta1, "beta2": o.beta2, "momentum": o.momentum}
    optimizer = build_optimizer(groups, name=o.name, lr=o.lr, **options)
    state = TrainState(Objective(model, settings, np.ones(config.classes)), model, optimizer)
    loop = LoopConfig(steps=STEPS, batch=BATCH, microbatch=BATCH, seed=0, clip=o.clip)
    norms = []
    for step, rate in enumerate(rates):
        images, labels = a_batch(config, step)
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        batch = Batch(pixels, torch.from_numpy(labels), torch.ones(BATCH, dtype=torch.bool), torch.arange(BATCH))
        set_lr(optimizer, rate)
        norms.append(float(train_step(state, loop, World(0, 1, torch.device("cpu")), batch, torch.zeros(0)).grad_norm))
    return norms


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_googles(name: str, run: str) -> None:
    preset, rates = RUNS[run]
    recipe = get_preset(preset).recipe
    model = a_model(MODELS[name], recipe)
    config, o = model.config, recipe.optim
    start = theirs = linen(model, config)
    rule = google.Sgd(o.momentum) if o.name == "sgd" else google.Adam(o.beta1, o.beta2, o.weight_decay)
    expected = []
    for step, rate in enumerate(rates):
        grads = google.loss_gradients(theirs, *a_batch(config, step), recipe.loss)
        expected.append(google.global_norm(grads))
        theirs = rule.step(theirs, google.clipped(grads, o.clip), rate)
    # torch divides by the norm plus 1e-6 where it clips, so the second step starts from weights that differ so little.
    assert our_steps(model, recipe, rates) == pytest.approx(expected, rel=1e-7)
    assert max(expected) > 1.5  # clipping is at work where it is on
    ours = linen(model, config)
    assert ours.keys() == theirs.keys()
    largest = max(float(np.abs(theirs[key] - start[key]).max()) for key in start)
    for key in start:
        assert np.abs(ours[key] - theirs[key]).max() < 1e-6 * largest, key
        kernel_or_scale = not key.endswith("/bias")  # a key's bias has no effect on a softmax
        assert not kernel_or_scale or np.abs(theirs[key] - start[key]).max() > 1e-4 * largest, key


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", MODELS)
def test_the_written_out_gradient_is_that_of_the_loss(name: str, kind: google.Loss) -> None:
    """By central differences of the loss, along random directions: one for each kind of parameter."""
    config = MODELS[name]
    params = linen(assemble(random_weights(config)).double(), config)
    batch = a_batch(config, 0)
    grads = google.loss_gradients(params, *batch, kind)
    rng, step = np.random.default_rng(1), 1e-6
    kinds = {key.split("/", 2)[-1] if key.startswith("Transformer/encoderblock") else key for key in params}
    for ending in sorted(kinds)[:: 1 if name == "ViT" else 8]:
        along = {key: rng.normal(size=value.shape) for key, value in params.items() if key.endswith(ending)}
        length = google.global_norm(along)
        losses = [
            google.loss_of(google.Model(params | {k: params[k] + sign * v for k, v in along.items()}), *batch, kind)
            for sign in (step / length, -step / length)
        ]
        slope = sum(float((grads[key] * value).sum()) for key, value in along.items()) / length
        rise = (losses[0].value.item() - losses[1].value.item()) / (2 * step)
        assert rise == pytest.approx(slope, rel=2e-4, abs=1e-7), ending
