"""The schema of a recipe: every key with its type, default and description, and checks of values. No torch here.

A `Recipe` that exists is valid: types, ranges and contradictions are checked when it is made. The descriptions are
printed as comments by `recipe.to_toml`. Reading and writing recipes is in `recipe.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from vitral.errors import UserError

Balance = Literal["none", "weights", "sampler", "logit-adjust"]
Precision = Literal["auto", "float32", "bfloat16", "fp8"]
Parallel = Literal["ddp", "fsdp"]
Loss = Literal["softmax", "sigmoid"]
ObjectiveName = Literal["classes", "masked"]
MaskedTarget = Literal["mean", "grid", "pixels", "mae"]
OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
WeightInit = Literal["paper", "mimetic"]
ScheduleKind = Literal["cosine", "linear", "constant", "multistep", "rsqrt", "polynomial"]


@dataclass(frozen=True, kw_only=True)
class ShapeRecipe:
    """Changes to the named model, for training from scratch; 0 or "" keeps the model's own value."""

    depth: Annotated[int, "number of transformer blocks"] = 0
    width: Annotated[int, "embedding dimension"] = 0
    mlp: Annotated[int, "hidden dimension of the MLPs; 4 * width if only width is set"] = 0
    heads: Annotated[int, "number of attention heads"] = 0
    pool: Annotated[str, "pooling: token (class token), mean or map (attention pooling)"] = ""
    position: Annotated[str, "position embedding: none, 1d, 2d, relative, bias (BEiT's) or sincos2d"] = ""
    injection: Annotated[str, "where positions are added: input, every (a table per layer) or shared (one for all)"] = (
        ""
    )
    rope: Annotated[bool, "rotary position embeddings of DINOv3, besides `position`"] = False
    registers: Annotated[int, "register tokens, in addition to the class token"] = 0
    layer_scale: Annotated[bool, "a learned factor per channel on every residual branch"] = False
    swiglu: Annotated[bool, "SwiGLU instead of GELU in the MLPs; mlp is the width of gate and value each"] = False
    qk_norm: Annotated[bool, "LayerNorm of every head's queries and keys"] = False
    head: Annotated[str, "linear, or tanh: one hidden layer with tanh, the paper's pre-training head"] = ""
    head_bias: Annotated[float, "initial bias of the logits; -10 for a sigmoid loss with many classes"] = 0.0
    weight_init: Annotated[
        WeightInit, "initial weights: paper, or mimetic (attention and positions resembling trained weights)"
    ] = "paper"


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Data and transforms. In a transform, {size} is the model's image size, {larger} 8/7 and {wider} 7/6 of it."""

    train_transform: Annotated[str, "transform of training images"] = "decode|random_resized_crop({size}, 0.05)|flip"
    eval_transform: Annotated[str, "transform for evaluation and prediction"] = (
        "decode|resize_small({larger})|central_crop({size})"
    )
    mean: Annotated[
        tuple[float, ...], "subtracted from pixels in the range 0..1; one number per channel of the model"
    ] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[float, ...], "per channel, pixels are then divided by it"] = (0.5, 0.5, 0.5)
    held_out: Annotated[float, "fraction of the images held out for testing if the data has no split"] = 0.2
    dev: Annotated[
        float, "fraction of train held out for choices (sweeps, early stopping) instead of using test; 0: none"
    ] = 0.0
    subset: Annotated[int, "number of training images to sample; smaller samples are subsets of larger; 0: all"] = 0
    subset_seed: Annotated[int, "seed of that sample"] = 0
    exclude: Annotated[str, "file that lists training images to leave out, as `vitral dedupe` writes it"] = ""
    augment: Annotated[
        str, "augmentation of whole batches on the device, such as shift(4)|flip|randaugment(2, 10)|cutout(8)"
    ] = ""
    mixup: Annotated[float, "mixup alpha; 0: off"] = 0.0
    cutmix: Annotated[float, "cutmix alpha; 0: off; with mixup as well, each step uses one of the two"] = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """Optimizer."""

    name: Annotated[
        OptimizerName,
        "adamw (decoupled weight decay), adam (L2 added to the gradient), sgd (with momentum) or muon (for the "
        "matrices of the blocks, AdamW for the rest)",
    ] = "adamw"
    lr: Annotated[float, "peak learning rate"] = 1e-3
    weight_decay: Annotated[
        float, "of kernels only, not biases or norms; times the learning rate (adamw, muon) or added to the gradient"
    ] = 0.0
    beta1: Annotated[float, "adamw, adam, muon: decay of the gradient's moving average"] = 0.9
    beta2: Annotated[float, "adamw, adam, muon: decay of the squared gradient's moving average"] = 0.999
    momentum: Annotated[float, "sgd, muon (for muon, 0.95 is common)"] = 0.9
    clip: Annotated[float, "maximum global norm of the gradient; 0: no clipping"] = 1.0
    layer_decay: Annotated[float, "layer-wise learning rate decay, counted from the head down; 1: none"] = 1.0
    head_lr: Annotated[float, "factor on the learning rate of the head"] = 1.0


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """Learning rate schedule: linear warmup from 0, then decay."""

    kind: Annotated[ScheduleKind, "cosine, linear, constant, multistep, rsqrt or polynomial"] = "cosine"
    warmup: Annotated[float, "warmup steps; below 1: fraction of the run"] = 0.1
    full_steps: Annotated[
        int, "length of the full run: one too short for its warmup scales it in proportion; 0: to a tenth"
    ] = 0
    end: Annotated[float, "linear, polynomial: learning rate at the last step"] = 0.0
    power: Annotated[float, "polynomial: exponent"] = 2.0
    drops: Annotated[tuple[float, ...], "multistep: milestones in steps; below 1: fraction of the run"] = ()
    factors: Annotated[tuple[float, ...], "multistep: factor on the peak rate from each milestone on"] = ()
    timescale: Annotated[float, "rsqrt: time scale in steps"] = 10_000.0
    cooldown: Annotated[float, "linear decay to 0 at the end, in steps; below 1: fraction of the run"] = 0.0


@dataclass(frozen=True, kw_only=True)
class RegularizationRecipe:
    """Regularization."""

    dropout: Annotated[float, "dropout after dense layers (except qkv) and after position embeddings"] = 0.0
    attention_dropout: Annotated[float, "dropout of attention weights"] = 0.0
    stochastic_depth: Annotated[float, "drop rate of the last block; it grows linearly from 0 at the first"] = 0.0
    label_smoothing: Annotated[float, "fraction of each target spread over all classes"] = 0.0


@dataclass(frozen=True, kw_only=True)
class MaskedRecipe:
    """Masked patch prediction (objective=masked): which patches are corrupted, and what is predicted for them."""

    ratio: Annotated[float, "fraction of the patches that are corrupted and predicted"] = 0.5
    token_ratio: Annotated[float, "fraction of the corrupted patches replaced by the mask token"] = 0.8
    random_ratio: Annotated[float, "fraction replaced by another patch of the image; the rest is left unchanged"] = 0.1
    target: Annotated[
        MaskedTarget,
        "mean (mean colour, 512 classes), grid (4 x 4 such colours), pixels (regression, L2), or mae: pixels by a "
        "decoder, from an encoder that sees the other patches alone",
    ] = "mean"
    norm_pixels: Annotated[bool, "mae: pixels normalised by the mean and std of their patch"] = True
    decoder_width: Annotated[int, "mae: width of the decoder, whose MLPs have four times as much"] = 512
    decoder_depth: Annotated[int, "mae: blocks of the decoder"] = 8
    decoder_heads: Annotated[int, "mae: attention heads of the decoder"] = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run."""

    model: Annotated[str, "model name, with @size for another image size; ignored if init is set"] = "ViT-Ti/16"
    init: Annotated[str, "pre-trained weights (file, run folder or hub name); empty: train from scratch"] = ""
    reset_head: Annotated[bool, "with init: a new head of zeros, even if the weights have one for these classes"] = (
        False
    )
    image: Annotated[int, "image size in pixels; 0: the model's own"] = 0
    epochs: Annotated[float, "length of the run in epochs; 0 if steps is set"] = 100.0
    steps: Annotated[int, "length of the run in steps; 0 if epochs is set"] = 0
    batch: Annotated[int, "images per step, over all devices"] = 256
    micro_batch: Annotated[int, "images per device and forward pass (gradient accumulation); 0: as many as fit"] = 0
    seed: Annotated[int, "seed of weights, data order, augmentation and dropout"] = 0
    trainable: Annotated[str, "trainable parameters: full, head, last:K (blocks), bias or lora:R (rank)"] = "full"
    objective: Annotated[ObjectiveName, "classes, or masked: masked patch prediction without labels"] = "classes"
    loss: Annotated[Loss, "softmax (one label per image) or sigmoid (several)"] = "softmax"
    balance: Annotated[Balance, "for imbalanced classes: none, weights, sampler or logit-adjust"] = "none"
    ema_decay: Annotated[
        float, "exponential moving average (EMA) of the weights: decay per step, such as 0.9999; 0: off"
    ] = 0.0
    precision: Annotated[
        Precision,
        "auto (bfloat16 on GPUs that support it), float32, bfloat16, or fp8 (Hopper, width >= 768)",
    ] = "auto"
    compile: Annotated[bool, "torch.compile the model: slower start, faster steps"] = False
    cuda_graph: Annotated[bool, "on one GPU: capture the training step as a CUDA graph; helps small models"] = True
    grad_checkpointing: Annotated[
        bool, "recompute activations in the backward pass: less memory, about a third more time"
    ] = False
    parallel: Annotated[Parallel, "on several devices: ddp (replicated) or fsdp (sharded)"] = "ddp"
    workers: Annotated[int, "data loading processes per device; -1: automatic"] = -1
    evaluate_every: Annotated[int, "steps between evaluations; 0: each epoch, but at most ten times per run"] = 0
    save_every: Annotated[int, "steps between checkpoints; 0: with each evaluation"] = 0
    keep: Annotated[int, "number of checkpoints to keep during the run"] = 2
    patience: Annotated[int, "early stopping after this many evaluations without improvement; 0: off"] = 0
    shape: ShapeRecipe = field(default_factory=ShapeRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    regularization: RegularizationRecipe = field(default_factory=RegularizationRecipe)
    masked: MaskedRecipe = field(default_factory=MaskedRecipe)

    def __post_init__(self) -> None:
        for key, value in values(self).items():
            _check_type(key, value)
        _check_ranges(values(self))
        if sentence := next(_contradictions(self), ""):
            raise UserError(sentence)


class Key(NamedTuple):
    """The type, description and default of one recipe key."""

    hint: Any
    doc: str
    default: Any


@cache
def keys() -> dict[str, Key]:
    """Every key in the spelling of the command line ("optim.lr"), in the order of the TOML file."""
    sections = {name: hint for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)}
    top = {name: key for name, key in _keys_of(Recipe).items() if name not in sections}
    return top | {
        f"{section}.{name}": key for section, schema in sections.items() for name, key in _keys_of(schema).items()
    }


def _keys_of(schema: Any) -> dict[str, Key]:
    hints = get_type_hints(schema, include_extras=True)
    return {item.name: Key(*_type_and_doc(hints[item.name]), item.default) for item in fields(schema)}


def _type_and_doc(hint: Any) -> tuple[Any, str]:
    return get_args(hint) if get_origin(hint) is Annotated else (hint, "")


def values(recipe: Recipe) -> dict[str, Any]:
    """The value of every key of a recipe, as a flat dict."""
    nested = asdict(recipe)
    flat = {}
    for key in keys():
        section, dot, name = key.partition(".")
        flat[key] = nested[section][name] if dot else nested[key]
    return flat


def _check_type(key: str, value: Any) -> None:
    hint, _, default = keys()[key]
    if not _has_type(hint, value):
        example = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
        raise UserError(f"{key} must be {_type_name(hint)}, for example {key}={example or '...'}, not {value!r}.")


def _has_type(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_has_type(get_args(hint)[0], item) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return "numbers separated by commas"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[hint]


_POSITIVE = {
    *("batch", "keep", "data.held_out", "masked.ratio", "schedule.timescale"),
    *("masked.decoder_width", "masked.decoder_depth", "masked.decoder_heads"),
    *("optim.lr", "optim.head_lr", "optim.layer_decay"),
}
_ANY_SIGN = {"workers", "shape.head_bias"}
_BELOW_ONE = {
    *("ema_decay", "data.dev", "data.held_out", "masked.token_ratio", "masked.random_ratio"),
    *("optim.beta1", "optim.beta2", "optim.momentum"),
    *(f"regularization.{item.name}" for item in fields(RegularizationRecipe)),
}
_AT_MOST_ONE = {"optim.layer_decay"}


def _check_ranges(flat: Mapping[str, Any]) -> None:
    for key, value in flat.items():
        if type(value) not in (int, float) or key in _ANY_SIGN:
            continue
        if value < 0 or (value == 0 and key in _POSITIVE):
            raise UserError(f"{key} must be {'above' if key in _POSITIVE else 'at least'} 0, not {value}.")
        if value >= 1 and key in _BELOW_ONE:
            raise UserError(f"{key} must be below 1, not {value}.")
        if value > 1 and key in _AT_MOST_ONE:
            raise UserError(f"{key} must be at most 1, not {value}.")


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """A sentence for each pair of values that do not go together."""
    if bool(recipe.epochs) == bool(recipe.steps):
        yield "a run has one length: set either epochs or steps above 0, and the other to 0."
    if recipe.micro_batch > recipe.batch:
        yield f"micro_batch={recipe.micro_batch} is more than batch={recipe.batch}: lower it, or set it to 0."
    if not re.fullmatch(r"full|head|bias|(last|lora):[1-9]\d*", recipe.trainable):
        choices = "full, head, bias, last:K (such as last:2), lora:R (lora:8)"
        yield f'trainable="{recipe.trainable}" is not one of {choices}.'
    if len(recipe.schedule.drops) != len(recipe.schedule.factors):
        yield "schedule.drops and schedule.factors must have the same length: set both."
    if recipe.schedule.kind == "multistep" and not recipe.schedule.drops:
        yield 'schedule.kind="multistep" needs schedule.drops and schedule.factors, such as 0.3,0.6 and 0.1,0.01.'
    if len(recipe.data.mean) != len(recipe.data.std) or not all(number > 0 for number in recipe.data.std):
        yield "data.mean and data.std need one number per channel each, and std numbers above 0."
    if recipe.loss == "sigmoid" and (recipe.balance == "logit-adjust" or recipe.regularization.label_smoothing):
        others = 'balance="logit-adjust" or regularization.label_smoothing'
        yield f'loss="sigmoid" cannot be combined with {others}: leave those out, or use softmax.'
    if recipe.shape.head not in ("", "linear", "tanh"):
        yield f'shape.head="{recipe.shape.head}" is not one of linear, tanh.'
    if recipe.objective == "masked":
        yield from _masked_contradictions(recipe)
    if recipe.init and recipe.shape != ShapeRecipe():
        yield "the weights in init have a shape already: omit the shape keys, or train from scratch."


def _masked_contradictions(recipe: Recipe) -> Iterator[str]:
    masked, data = recipe.masked, recipe.data
    if masked.ratio > 1 or masked.token_ratio + masked.random_ratio > 1:
        yield "masked.ratio must be at most 1, and masked.token_ratio and masked.random_ratio together at most 1."
    if masked.decoder_width % masked.decoder_heads or masked.decoder_width % 4:
        yield "masked.decoder_width must be a multiple of masked.decoder_heads and of 4: change one of them."
    if recipe.trainable != "full" or recipe.balance != "none" or data.mixup or data.cutmix or data.augment:
        yield 'objective="masked" needs trainable="full", balance="none" and neither mixup, cutmix nor data.augment.'
