"""What FP8 costs in quality, on an NVIDIA GPU that has it, and at any width: also where it would not be chosen.

    python benchmarks/fp8_quality.py agree WEIGHTS FOLDER
    python benchmarks/fp8_quality.py emulate WEIGHTS FOLDER       # on a CPU
    python benchmarks/fp8_quality.py train DATA --recipe speedrun/cifar10 --out runs/fp8
    python benchmarks/fp8_quality.py train DATA --out runs/fp8 --set init=WEIGHTS trainable=full

`agree` compares the top-1 classes of the images of a folder in FP8 and in bfloat16 with those in float32. `train`
trains with both precisions over seeds, and prints the test accuracies and the difference of their means.

`emulate` rounds the same numbers in a model that otherwise computes in float32. It shows what the format does, apart
from kernels: with our scales or the best one for each token, and for some of the layers or operands alone; and what
computing doubtful images again restores, as `vitral predict` does.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import vitral
from vitral.api.inference import resolve_preprocessing
from vitral.data.sources import open_images
from vitral.evaluation.predict import predict_split
from vitral.evaluation.recheck import SAMPLE, Recheck, sample_of
from vitral.kernels.dispatch import E4M3
from vitral.models import fused
from vitral.models.layers import Block
from vitral.models.vit import ViT

LAYERS = ("attention.qkv", "attention.out", "mlp.hidden", "mlp.output")
E4M3_MAX, INT8_MAX = 448.0, 127.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("agree", "emulate"):
        compare = commands.add_parser(name)
        compare.add_argument("weights")
        compare.add_argument(
            "folder", help="of images; for `emulate` with a sub-folder per class, in the model's order"
        )
        compare.add_argument("--preprocess", default="", help="where the weights do not state it")
    train = commands.add_parser("train")
    train.add_argument("data")
    train.add_argument("--recipe", default="", help="instead of the one that `vitral train` would choose")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    train.add_argument("--precisions", nargs="+", default=["bfloat16", "fp8"], help="one of them, to run both at once")
    train.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    args = parser.parse_args()
    fused.FP8_MIN_WIDTH = 0
    if args.command == "agree":
        _agree(args.weights, args.folder, args.preprocess)
    elif args.command == "emulate":
        _emulate(args.weights, args.folder, args.preprocess)
    else:
        _train(args)


def _agree(weights: str, folder: str, preprocess: str) -> None:
    model, card = vitral.load(weights)
    split, preprocessing = open_images([folder]), resolve_preprocessing(card, preprocess)
    logits: dict[str, np.ndarray] = {}
    for precision in ("float32", "bfloat16", "fp8"):
        if precision == "fp8" and (reason := fused.enable_fp8(model.cuda(), freeze=True)):
            raise SystemExit(f"not in FP8: {reason}")
        logits[precision] = predict_split(
            model, split, preprocessing, batch=100, device="cuda", precision=precision
        ).logits
    sample = sample_of(len(split))
    recheck = Recheck.of(logits["fp8"][sample], logits["bfloat16"][sample])
    doubtful = recheck.doubtful(logits["fp8"])
    logits["fp8, doubtful images again"] = np.where(doubtful[:, None], logits["bfloat16"], logits["fp8"])
    print(recheck)
    exact = logits["float32"]
    pairs = [(first, second) for first in ("fp8", "fp8, doubtful images again") for second in ("float32", "bfloat16")]
    for first, second in [("bfloat16", "float32"), *pairs]:
        same = np.mean(logits[first].argmax(1) == logits[second].argmax(1))
        distance = np.linalg.norm(logits[first] - logits[second]) / np.linalg.norm(exact)
        print(
            f"{first} and {second}: top-1 agrees in {same:.2%} of {len(exact)} images, logits differ by {distance:.4f}"
        )


class RoundedLinear(nn.Module):
    """A linear layer whose operands are rounded, each to the precision of a product, by plain PyTorch.

    Args:
        linear: with the norm before it folded in.
        operands: which are rounded: "weight", "input".
        bound: what no input exceeds, which determines the scale of all; or None for the best scale of each token.
        largest: number of the format: E4M3_MAX or INT8_MAX.
    """

    def __init__(self, linear: nn.Linear, operands: Sequence[str], bound: Tensor | None, largest: float) -> None:
        super().__init__()
        self.operands, self.bound, self.largest = operands, bound, largest
        weight = linear.weight.detach()
        self.weight = self._round(weight, weight.abs().amax(1, keepdim=True)) if "weight" in operands else weight
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        if "input" in self.operands:
            x = self._round(x, x.abs().amax(-1, keepdim=True) if self.bound is None else self.bound)
        return nn.functional.linear(x, self.weight, self.bias)

    def _round(self, x: Tensor, limit: Tensor) -> Tensor:
        scale = limit.clamp(min=1e-12) / self.largest
        values = (x / scale).clamp(-self.largest, self.largest)
        return (values.round() if self.largest == INT8_MAX else values.to(E4M3).float()) * scale


def rounded_model(
    model: ViT,
    layers: Sequence[str] = LAYERS,
    operands: Sequence[str] = ("weight", "input"),
    *,
    bounded: bool = True,
    largest: float = E4M3_MAX,
) -> ViT:
    """A copy whose linear layers are rounded in all blocks but the last one of a model that pools its class token."""
    model = deepcopy(model)
    for block in model.blocks[: -1 if model.config.pool == "token" else None]:
        assert isinstance(block, Block)
        limits = [limit if bounded else None for limit in _fold_norms(block)]
        for name, limit in zip(LAYERS, limits, strict=True):
            if name in layers:
                linear = block.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                block.set_submodule(name, RoundedLinear(linear, operands, limit, largest))
    return model


@torch.no_grad()
def _fold_norms(block: Block) -> list[Tensor]:
    """Fold both norms into the layers after them, in place; what the inputs of LAYERS never exceed."""
    length = torch.tensor(math.sqrt(block.norm1.weight.numel()))
    outputs = []
    for norm, linear in ((block.norm1, block.attention.qkv), (block.norm2, block.mlp.hidden)):
        linear.bias.add_(linear.weight @ norm.bias)
        linear.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)
        norm.bias.zero_()
        outputs.append(linear.weight.norm(dim=1) * length + linear.bias.abs())
    values = outputs[0][2 * len(outputs[0]) // 3 :]
    return [length, values.max(), length, outputs[1].max()]


def _emulate(weights: str, folder: str, preprocess: str) -> None:
    model, card = vitral.load(weights)
    assert isinstance(model, ViT)
    split, preprocessing = open_images([folder]), resolve_preprocessing(card, preprocess)
    names = [Path(key).parent.name for key in split.keys]
    labels = np.searchsorted(sorted(set(names)), names)

    def logits(some: ViT) -> np.ndarray:
        return predict_split(some, split, preprocessing, batch=50, device="cpu", precision="float32").logits

    exact = logits(model)
    print(f"float32: top-1 {np.mean(exact.argmax(1) == labels):.2%} of {len(exact)} images")
    rounded = {
        "e4m3, our scales": rounded_model(model),
        "e4m3, best scale of each token": rounded_model(model, bounded=False),
        "e4m3, weights only": rounded_model(model, operands=["weight"]),
        "e4m3, inputs only": rounded_model(model, operands=["input"]),
        **{f"e4m3, not {name}": rounded_model(model, [n for n in LAYERS if n != name]) for name in LAYERS},
        "int8, best scale of each token": rounded_model(model, bounded=False, largest=INT8_MAX),
    }
    for name, some in rounded.items():
        rough = logits(some)
        same, right = np.mean(rough.argmax(1) == exact.argmax(1)), np.mean(rough.argmax(1) == labels)
        distance = np.linalg.norm(rough - exact) / np.linalg.norm(exact)
        print(f"{name}: top-1 agrees in {same:.2%}, is {right:.2%}, logits differ by {distance:.4f}", flush=True)
        if len(rough) > SAMPLE:
            _emulate_recheck(rough, exact)


def _emulate_recheck(rough: np.ndarray, exact: np.ndarray) -> None:
    sample = sample_of(len(rough))
    recheck = Recheck.of(rough[sample], exact[sample])
    close = recheck.doubtful(rough)
    same = np.mean((rough.argmax(1) == exact.argmax(1)) | close)
    print(f"    {close.mean():.2%} of all images computed again: top-1 agrees in {same:.2%}", flush=True)


def _train(args: argparse.Namespace) -> None:
    scores: dict[str, list[float]] = {precision: [] for precision in args.precisions}
    for seed in args.seeds:
        for precision, values in scores.items():
            overrides = [f"seed={seed}", f"precision={precision}", *args.set]
            folder = args.out / f"{precision}-{seed}"
            result = vitral.train(args.data, recipe=args.recipe, set=overrides, out=folder).results[0]
            values.append(result.metrics["top1"])
            print(f"seed {seed} {precision:<8} {values[-1]:.2%}", flush=True)
    means = {precision: statistics.fmean(values) for precision, values in scores.items()}
    parts = [f"{precision} {mean:.2%}" for precision, mean in means.items()]
    if len(means) == 2:
        parts.append(f"{100 * (means['fp8'] - means['bfloat16']):+.2f} points")
    print(f"{len(args.seeds)} seeds: {', '.join(parts)}")


if __name__ == "__main__":
    main()
