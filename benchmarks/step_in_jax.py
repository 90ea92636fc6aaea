"""Compare the NumPy training step of the tests with Google's own code: Flax models, JAX gradients, optax updates.

    git clone https://github.com/google-research/vision_transformer
    pip install jax flax optax
    PYTHONPATH=tests/helpers python benchmarks/step_in_jax.py vision_transformer

Everything is computed in float64, the two steps of each case of `test_google_step.py`; the numbers are the largest
differences of a gradient and of a weight.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import google_step as google
import numpy as np
from google_step import MODELS, RUNS, a_batch, a_model, linen

from vitral.architecture import ViTConfig
from vitral.recipe import Recipe
from vitral.recipe_presets import get_preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder of google-research/vision_transformer")
    sys.path.insert(0, parser.parse_args().checkout)
    jax: Any = import_module("jax")
    jax.config.update("jax_enable_x64", True)
    jax.numpy.float32 = jax.numpy.float64  # the default of their layers, read when the module is imported
    module = import_module("vit_jax.models_vit")
    for name, config in MODELS.items():
        for run, (preset, rates) in RUNS.items():
            gradient, weight = compare(jax, module, config, get_preset(preset).recipe, rates)
            print(f"{name:8}{run:28}gradient {gradient:.1e}  weight {weight:.1e}", flush=True)


def compare(jax: Any, module: Any, config: ViTConfig, recipe: Recipe, rates: tuple[float, ...]) -> tuple[float, float]:
    """The largest differences of gradients and weights over the steps."""
    model = a_model(config, recipe)
    config, o = model.config, recipe.optim
    ours = linen(model, config)
    nested = import_module("flax.traverse_util")
    theirs = nested.unflatten_dict(ours, sep="/")
    apply, chain = their_model(module, config), their_optimizer(recipe, rates, nested, theirs)
    state = chain.init(theirs)
    rule = google.Sgd(o.momentum) if o.name == "sgd" else google.Adam(o.beta1, o.beta2, o.weight_decay)

    def loss(params: Any, images: np.ndarray, labels: np.ndarray) -> Any:
        logits, targets = apply({"params": params}, images, train=False), np.eye(config.classes)[labels]
        if recipe.loss == "softmax":
            return -(jax.nn.log_softmax(logits) * targets).sum(1).mean()
        return -(jax.nn.log_sigmoid(logits) * targets + jax.nn.log_sigmoid(-logits) * (1 - targets)).sum(1).mean()

    differences = []
    for step, rate in enumerate(rates):
        images, labels = a_batch(config, step)
        their_grads = jax.grad(loss)(theirs, images, labels)
        our_grads = google.loss_gradients(ours, images, labels, recipe.loss)
        updates, state = chain.update(their_grads, state, theirs)
        theirs = import_module("optax").apply_updates(theirs, updates)
        ours = rule.step(ours, google.clipped(our_grads, o.clip), rate)
        pairs = ((our_grads, their_grads), (ours, theirs))
        differences.append([_gap(mine, nested.flatten_dict(other, sep="/")) for mine, other in pairs])
    gradient, weight = np.max(differences, 0)
    return float(gradient), float(weight)


def their_model(module: Any, config: ViTConfig) -> Any:
    encoder = {"num_layers": config.depth, "mlp_dim": config.mlp, "num_heads": config.heads}
    stem = SimpleNamespace(num_layers=config.stem.blocks, width_factor=config.stem.width) if config.stem else None
    return module.VisionTransformer(
        num_classes=config.classes,
        patches=SimpleNamespace(size=(config.patch, config.patch)),
        transformer=encoder,
        hidden_size=config.width,
        resnet=stem,
        representation_size=config.representation or None,
    ).apply


def their_optimizer(recipe: Recipe, rates: tuple[float, ...], nested: Any, params: Any) -> Any:
    """The chain of their train.py for SGD (its buffer in full precision), of big_vision for Adam."""
    optax, jnp, o = import_module("optax"), import_module("jax.numpy"), recipe.optim
    clip = [optax.clip_by_global_norm(o.clip)] if o.clip else []
    if o.name == "sgd":
        return optax.chain(*clip, optax.sgd(lambda step: jnp.asarray(rates)[step], momentum=o.momentum))
    kernels = nested.unflatten_dict({key: key[-1] == "kernel" for key in nested.flatten_dict(params)})
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=o.beta1, b2=o.beta2),
        optax.scale(o.lr),
        optax.add_decayed_weights(o.weight_decay * o.lr, kernels),
        optax.scale_by_schedule(lambda step: jnp.asarray(rates)[step] / o.lr),
        optax.scale(-1.0),
    )


def _gap(ours: google.Params, theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - np.asarray(theirs[key])).max()) for key in ours)


if __name__ == "__main__":
    main()
