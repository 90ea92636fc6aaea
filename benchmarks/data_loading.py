"""Images out of a folder of class folders: vitral's loader beside plain Pillow and a torch DataLoader.

    python benchmarks/data_loading.py [FOLDER] [--workers 2] [--batch 64] [--images 1000] [--rounds 5]

Both read the same files with the same number of processes. Pillow's pipeline ends in normalised floats, as people write
it; ours ends in uint8, which is what travels to the device; what normalising would cost on this CPU is printed below
the table. They take turns, so that a busy machine slows both alike. Images per second are those of the clock; on
a machine that others use too, the CPU time per image (all processes together) is the better witness.
Without FOLDER, pictures of 500 x 375 pixels are made up; photographs are the better test.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from vitral.data.loader import evaluation_batches, training_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import open_data

MEAN = STD = (0.5, 0.5, 0.5)
TRAINING = "decode|inception_crop(224)|flip"
EVALUATION = "decode|resize_small(256)|central_crop(224)"

Contestant = Callable[[int], Iterator[Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or make_pictures(Path(made))
        console = Console()
        console.print(f"{folder if options.folder else 'made-up pictures'}: {options.images} images a round, ", end="")
        console.print(f"{options.rounds} rounds, batch {options.batch}, {options.workers} workers")
        table = Table("", "vitral", "Pillow", "ratio: median", "of the rounds")
        for name, training in (("training", True), ("evaluation", False)):
            ours = our_batches(folder, training, options.batch, options.workers)
            theirs = plain_batches(folder, training, options.batch, options.workers)
            rounds = take_turns(ours, theirs, options.images, options.rounds)
            table.add_row(f"{name}, images/s", *summary([(a.per_second, b.per_second) for a, b in rounds], "{:.0f}"))
            table.add_row(f"{name}, CPU ms", *summary([(a.cpu, b.cpu) for a, b in rounds], "{:.2f}", inverse=True))
        console.print(table)
        console.print(f"normalising on this CPU would add {normalising(options.batch):.2f} CPU ms an image")
        console.print(f"training: {TRAINING}   evaluation: {EVALUATION}   torch {torch.__version__}")


def our_batches(folder: Path, training: bool, batch: int, workers: int) -> Contestant:
    split = open_data(folder, held_out=0).train
    pipeline = parse_pipeline(TRAINING if training else EVALUATION)

    def batches(images: int) -> Iterator[Tensor]:
        steps = math.ceil(images / batch)
        if training:
            found = training_batches(
                split, pipeline, batch=batch, seed=0, first_step=0, last_step=steps, workers=workers
            )
        else:
            chosen = split.select(np.arange(images) % len(split))
            found = evaluation_batches(chosen, pipeline, batch=batch, workers=workers)
        for item in found:
            yield item.images

    return batches


def plain_batches(folder: Path, training: bool, batch: int, workers: int) -> Contestant:
    files = PlainFolder(folder, training)

    def batches(images: int) -> Iterator[Tensor]:
        sampler = RandomSampler(files, replacement=True, num_samples=images)
        for pixels, _ in DataLoader(files, batch_size=batch, sampler=sampler, num_workers=workers):
            yield pixels

    return batches


class PlainFolder(Dataset[tuple[Tensor, int]]):
    """What people write: one file at a time through Pillow, to a normalised float tensor in the worker."""

    def __init__(self, folder: Path, training: bool) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [(path, label) for label, own in enumerate(classes) for path in sorted(own.rglob("*.*"))]
        self.training = training
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        image = random_resized_crop(image, 224) if self.training else resize_and_crop(image, 256, 224)
        if self.training and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255
        return (pixels - self.mean) / self.std, label


def random_resized_crop(image: Image.Image, size: int) -> Image.Image:
    for _ in range(10):
        area = image.width * image.height * random.uniform(0.05, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            box = (left, top, left + width, top + height)
            return image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    return image.resize((size, size), Image.Resampling.BILINEAR)


def resize_and_crop(image: Image.Image, small: int, size: int) -> Image.Image:
    scale = small / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


class Speed(NamedTuple):
    per_second: float  # images, by the clock
    cpu: float  # milliseconds an image, of all processes


def take_turns(ours: Contestant, theirs: Contestant, images: int, rounds: int) -> list[tuple[Speed, Speed]]:
    """Both, round by round, after one short round that fills the cache of the disk."""
    for contestant in (ours, theirs):
        speed(contestant, min(images, 256))
    return [(speed(ours, images), speed(theirs, images)) for _ in range(rounds)]


def speed(contestant: Contestant, images: int) -> Speed:
    start, before, seen = time.perf_counter(), cpu_seconds(), 0
    for batch in contestant(images):
        seen += len(batch)
    return Speed(seen / (time.perf_counter() - start), 1e3 * (cpu_seconds() - before) / seen)


def cpu_seconds() -> float:
    """Of this process and of its workers, who count once they have ended."""
    return sum(os.times()[:4])


def normalising(batch: int) -> float:
    """CPU milliseconds an image from uint8 to normalised floats."""
    images = torch.zeros(batch, 3, 224, 224, dtype=torch.uint8)
    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    before = cpu_seconds()
    for _ in range(20):
        images.float().sub_(mean).div_(std)
    return 1e3 * (cpu_seconds() - before) / (20 * batch)


def summary(pairs: list[tuple[float, float]], form: str, inverse: bool = False) -> tuple[str, str, str, str]:
    """Medians and ratios; above 1 is better for vitral."""
    ours, theirs = zip(*pairs, strict=True)
    ratios = sorted(b / a if inverse else a / b for a, b in pairs)
    spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
    first, second = (form.format(statistics.median(values)) for values in (ours, theirs))
    return first, second, f"{statistics.median(ratios):.2f}", spread


def make_pictures(folder: Path, count: int = 400) -> Path:
    """Soft shapes with a little noise: their JPEG files are about as long as those of photographs."""
    rng = np.random.default_rng(0)
    for index in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.float32) + rng.normal(0, 12, (375, 500, 1))
        own = folder / f"class {index % 2}"
        own.mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(own / f"{index}.jpg", quality=87)
    return folder


if __name__ == "__main__":
    main()
