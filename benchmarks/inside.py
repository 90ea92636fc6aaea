"""What the paper's section 4.5 shows of a model, as numbers: positions, attention distance, and a map's worth.

python benchmarks/inside.py WEIGHTS FOLDER --preprocess "decode|resize_small(248, bicubic)|central_crop(224)"
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

import vitral
from vitral.data.loader import evaluation_batches
from vitral.data.preprocess import parse_pipeline, parse_preprocess
from vitral.data.sources import open_images
from vitral.inspection.attention import mean_attention_distance
from vitral.inspection.attribution import deletion_area, deletion_curve, gradient_rollout, random_maps
from vitral.inspection.representations import position_similarity
from vitral.models.normalize import normalize

DISTANCE, DELETION = 32, 8  # images
STEPS = 14  # of a deletion curve


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("weights")
    words.add_argument("folder")
    words.add_argument("--preprocess", required=True)
    asked = words.parse_args()
    model, _ = vitral.load(asked.weights)
    images = _images(asked.folder, asked.preprocess, DISTANCE)
    same, rest = _same_line(position_similarity(model).detach())
    print(f"cosine of positions in one row or column {same:.3f}, of all others {rest:.3f}")
    with torch.inference_mode():
        distances = mean_attention_distance(model, images.split(8))
    means = distances.mean(dim=1)
    print(f"attention distance by layer ({len(images)} images), pixels: " + ", ".join(f"{one:.1f}" for one in means))
    ranks = np.argsort(np.argsort(means.numpy()))
    print(f"rank correlation with depth {np.corrcoef(np.arange(len(ranks)), ranks)[0, 1]:.3f}")
    print("widest head of layers 1 to 4: " + ", ".join(f"{one:.1f}" for one in distances[:4].amax(dim=1)))
    some = images[:DELETION]
    maps = gradient_rollout(model, some)
    chance = [deletion_area(deletion_curve(model, some, random_maps(model, some, seed), STEPS)) for seed in range(4)]
    found = deletion_area(deletion_curve(model, some, maps, STEPS))
    print(
        f"deletion area ({len(some)} images): gradient rollout {found:.3f}, chance {min(chance):.3f}-{max(chance):.3f}"
    )


def _images(folder: str, preprocess: str, count: int) -> Tensor:
    """Every n-th image of a folder, (count, c, height, width), ready for the model."""
    split = open_images([folder])
    chosen = split.select(np.arange(count) * len(split) // count)
    pipeline, mean, std = parse_preprocess(preprocess)
    pixels = torch.cat([batch.images for batch in evaluation_batches(chosen, parse_pipeline(pipeline), batch=8)])
    return normalize(pixels[:count], mean, std)


def _same_line(similarity: Tensor) -> tuple[float, float]:
    """(h, w, h, w) -> the mean over pairs that share a row or a column, and over all others; no place with itself."""
    h, w = similarity.shape[:2]
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    rows, columns = (each[:, :, None, None] == each[None, None] for each in (row, column))
    line, self_pair = rows | columns, rows & columns
    return float(similarity[line & ~self_pair].mean()), float(similarity[~line].mean())


if __name__ == "__main__":
    main()
