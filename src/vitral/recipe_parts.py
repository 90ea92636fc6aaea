"""The parts of a recipe, each a group of keys with their meaning. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

Balance = Literal["none", "weights", "sampler", "logit-adjust"]
Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["ddp", "fsdp"]
Loss = Literal["softmax", "sigmoid"]
Learning = Literal["classes", "masked"]
Target = Literal["mean", "grid", "pixels"]
Optimizer = Literal["adamw", "sgd", "muon"]
Start = Literal["paper", "mimetic"]
Decay = Literal["cosine", "linear", "constant", "multistep", "rsqrt", "polynomial"]


@dataclass(frozen=True, kw_only=True)
class ShapeRecipe:
    """Departures from what the model's name says, for training from scratch; 0 or "" keeps the name's."""

    depth: Annotated[int, "layers"] = 0
    width: Annotated[int, "hidden width"] = 0
    mlp: Annotated[int, "width of the MLPs; 4 * width where only the width is given"] = 0
    heads: Annotated[int, "attention heads"] = 0
    pool: Annotated[str, "token, mean or map"] = ""
    position: Annotated[str, "none, 1d, 2d, relative or sincos2d"] = ""
    head: Annotated[str, "linear, or tanh: the paper's pre-training head with one hidden layer"] = ""
    head_bias: Annotated[float, "bias that outputs start with; -10 where most of many yes-or-no classes are no"] = 0.0
    start: Annotated[Start, "first weights: paper, or mimetic (attention and positions as trained ones look)"] = "paper"


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What happens to an image. In a pipeline {size} is the model's image size, {larger} 8/7 and {wider} 7/6 of it."""

    train_transform: Annotated[str, "pipeline of training images"] = "decode|inception_crop({size})|flip"
    eval_transform: Annotated[str, "pipeline of evaluation and prediction"] = (
        "decode|resize_small({larger})|central_crop({size})"
    )
    mean: Annotated[tuple[float, ...], "subtracted from pixels in 0..1, per channel"] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[float, ...], "then divides, per channel"] = (0.5, 0.5, 0.5)
    held_out: Annotated[float, "share of the images kept for testing where the data has no split"] = 0.2
    dev: Annotated[float, "share of train kept to choose on (sweeps, early stopping) instead of test; 0: none"] = 0.0
    subset: Annotated[int, "training images to draw at random; smaller draws lie inside larger ones; 0: all"] = 0
    subset_seed: Annotated[int, "of that draw"] = 0
    exclude: Annotated[str, "a file of training images to leave out, as `vitral dedupe` writes it"] = ""
    augment: Annotated[str, "of whole batches on the device, as shift(4)|flip|randaugment(2, 10)|cutout(8)"] = ""
    mixup: Annotated[float, "parameter p of Beta(p, p) that blends pairs of images; 0: off"] = 0.0
    cutmix: Annotated[float, "the same for pasting boxes; with mixup too, each step takes one of the two"] = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """How weights move."""

    name: Annotated[
        Optimizer, "adam (decoupled weight decay), sgd (with momentum) or muon (matrices of blocks; adam for the rest)"
    ] = "adamw"
    lr: Annotated[float, "learning rate at its peak"] = 1e-3
    weight_decay: Annotated[
        float, "of kernels alone; times the learning rate with adam and muon, added to the gradient with sgd"
    ] = 0.0
    beta1: Annotated[float, "adam, alone or in muon: memory of the gradient"] = 0.9
    beta2: Annotated[float, "adam, alone or in muon: memory of its square"] = 0.999
    momentum: Annotated[float, "sgd, muon (where 0.95 is usual)"] = 0.9
    clip: Annotated[float, "largest global norm of the gradient; 0: no limit"] = 1.0
    layer_decay: Annotated[float, "factor on the learning rate per layer away from the head; 1: none"] = 1.0
    head_lr: Annotated[float, "factor on the learning rate of the head"] = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """How the learning rate moves: warm-up from 0, then decay."""

    kind: Annotated[Decay, "cosine, linear, constant, multistep, rsqrt or polynomial"] = "cosine"
    warmup: Annotated[float, "steps; below 1 it is a share of the run"] = 0.1
    end: Annotated[float, "linear and polynomial: the learning rate of the last step"] = 0.0
    power: Annotated[float, "polynomial: exponent"] = 2.0
    drops: Annotated[tuple[float, ...], "multistep: where the rate drops, in steps or, below 1, shares of the run"] = ()
    factors: Annotated[tuple[float, ...], "multistep: factor on the peak rate from each drop on"] = ()
    timescale: Annotated[float, "rsqrt: steps"] = 10_000.0
    cooldown: Annotated[float, "linear descent to 0 at the end; steps, or below 1 a share of the run"] = 0.0


@dataclass(frozen=True, kw_only=True)
class RegularizationRecipe:
    """What keeps the model from learning the images by heart."""

    dropout: Annotated[float, "after every dense layer but qkv, and after the positions"] = 0.0
    attention_dropout: Annotated[float, "on attention weights"] = 0.0
    stochastic_depth: Annotated[float, "chance to skip the last block; earlier blocks in proportion"] = 0.0
    label_smoothing: Annotated[float, "share of each target spread over all classes"] = 0.0


@dataclass(frozen=True, kw_only=True)
class MaskedRecipe:
    """Masked patch prediction (objective=masked): which patches are hidden, and what of them is predicted."""

    share: Annotated[float, "of the patches that are corrupted and predicted"] = 0.5
    token: Annotated[float, "of those, the share that becomes the learned mask embedding"] = 0.8
    random: Annotated[float, "and the share that becomes another patch; the rest stays as it is"] = 0.1
    target: Annotated[Target, "mean (its colour, of 512), grid (4 x 4 such colours) or pixels (all, by L2)"] = "mean"
