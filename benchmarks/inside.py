"""Section 4.5 of the paper in numbers: position embeddings, attention distance, and the deletion area of attribution.

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
from vitral.inspection.image_inspection import deletion_area, deletion_curve, gradient_rollout, random_maps
from vitral.inspection.representations import position_similarity
from vitral.models.model import normalize

DISTANCE_IMAGES, DELETION_IMAGES = 32, 8
STEPS = 14  # of a deletion curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("folder")
    parser.add_argument("--preprocess", required=True)
    options = parser.parse_args()
    model, _ = vitral.load(options.weights)
    images = _images(options.folder, options.preprocess, DISTANCE_IMAGES)
    same, others = _same_line(position_similarity(model).detach())
    print(f"cosine of positions in one row or column {same:.3f}, of all others {others:.3f}")
    with torch.inference_mode():
        distances = mean_attention_distance(model, images.split(8))
    means = distances.mean(dim=1)
    print(f"attention distance by layer ({len(images)} images), pixels: " + ", ".join(f"{mean:.1f}" for mean in means))
    ranks = np.argsort(np.argsort(means.numpy()))
    print(f"rank correlation with depth {np.corrcoef(np.arange(len(ranks)), ranks)[0, 1]:.3f}")
    print("widest head of layers 1 to 4: " + ", ".join(f"{widest:.1f}" for widest in distances[:4].amax(dim=1)))
    few = images[:DELETION_IMAGES]
    random = [deletion_area(deletion_curve(model, few, random_maps(model, few, seed), STEPS)) for seed in range(4)]
    area = deletion_area(deletion_curve(model, few, gradient_rollout(model, few), STEPS))
    print(
        f"deletion area ({len(few)} images): gradient rollout {area:.3f}, random maps "
        f"{min(random):.3f}-{max(random):.3f}"
    )


def _images(folder: str, preprocess: str, count: int) -> Tensor:
    """Evenly spaced images of a folder, (count, channels, height, width), normalised."""
    split = open_images([folder])
    chosen = split.select(np.arange(count) * len(split) // count)
    pipeline, mean, std = parse_preprocess(preprocess)
    pixels = torch.cat([batch.images for batch in evaluation_batches(chosen, parse_pipeline(pipeline), batch=8)])
    return normalize(pixels[:count], mean, std)


def _same_line(similarity: Tensor) -> tuple[float, float]:
    """(h, w, h, w) -> the mean over pairs of positions in one row or column, and over all other pairs."""
    h, w = similarity.shape[:2]
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    rows, columns = (each[:, :, None, None] == each[None, None] for each in (row, column))
    line, self_pair = rows | columns, rows & columns
    return float(similarity[line & ~self_pair].mean()), float(similarity[~line].mean())


if __name__ == "__main__":
    main()
