"""Time of `dedupe` against the size of the training set: in total, and the search alone.

    python benchmarks/dedupe.py [FOLDER] [--sizes 1000 2000 4000 8000] [--test 1000] [--workers 0] [--copies 0.01]

Half of FOLDER's images are the test set; the training sets repeat the other half, with a share of re-encoded copies of
test images. Without FOLDER, synthetic images of 320 x 256 pixels are used. The total includes reading and decoding the
training images; the search alone starts from their thumbnails. The time per image should not depend on the size of the
training set.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from vitral.data.copies import CopyIndex, signatures
from vitral.data.images import decode
from vitral.data.sources import Split, open_images
from vitral.evaluation.duplicates import find_duplicates


@dataclass(frozen=True)
class Memory:
    """Encoded images in memory, so that no disk is timed."""

    images: Sequence[bytes]

    def read(self, index: int) -> bytes:
        return self.images[index]

    def mark(self, index: int) -> str:
        return str(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--copies", type=float, default=0.01)
    options = parser.parse_args()
    images = read_folder(options.folder) if options.folder else [synthetic(seed) for seed in range(2 * options.test)]
    test, others = images[::2][: options.test], images[1::2]
    index_seconds, index = timed_index(named(test))
    console = Console()
    console.print(
        f"{options.folder or 'synthetic images'}: {len(test)} test images, indexed in {index_seconds:.1f} s; "
    )
    console.print(f"{options.copies:.0%} of the training images are copies; {options.workers} workers")
    table = Table("training images", "copies found", "seconds", "ms per image", "search alone, ms per image")
    for size in options.sizes:
        train, copies = training_set(test, others, size, options.copies)
        start = time.perf_counter()
        result = find_duplicates(train, [named(test)], workers=options.workers)
        seconds = time.perf_counter() - start - index_seconds
        search = search_seconds(index, train)
        row = (
            f"{len(result.pairs)} of {copies}",
            f"{seconds:.1f}",
            *(f"{1e3 * s / size:.2f}" for s in (seconds, search)),
        )
        table.add_row(str(size), *row)
    console.print(table)


def named(images: Sequence[bytes]) -> Split:
    keys = [str(number) for number in range(len(images))]
    return Split("images", keys, np.zeros(len(images), np.int64), ("a", "b"), Memory(images))


def training_set(test: list[bytes], others: list[bytes], size: int, share: float) -> tuple[Split, int]:
    """Other images, repeated, with copies of test images among them; and the number of copies."""
    copies = round(size * share)
    images = [others[number % len(others)] for number in range(size - copies)]
    images += [encoded(Image.fromarray(decode(test[number % len(test)])), 60) for number in range(copies)]
    order = np.random.default_rng(0).permutation(size)
    return named(images).select(order), copies


def timed_index(test: Split) -> tuple[float, CopyIndex]:
    start = time.perf_counter()
    index = CopyIndex([image for chunk in signatures(test) for image in chunk])
    return time.perf_counter() - start, index


def search_seconds(index: CopyIndex, train: Split) -> float:
    """Hash the training images' thumbnails, look the hashes up and compare the candidates."""
    seconds = 0.0
    for chunk in signatures(train):
        start = time.perf_counter()
        list(index.near_copies(chunk))
        seconds += time.perf_counter() - start
    return seconds


def read_folder(folder: Path) -> list[bytes]:
    split = open_images([folder])
    return [data for data in map(split.reader.read, range(len(split))) if isinstance(data, bytes)]


def synthetic(seed: int) -> bytes:
    """Soft shapes of two sizes."""
    rng = np.random.default_rng(seed)
    coarse, fine = (
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).resize((320, 256), Image.Resampling.BICUBIC)
        for shape in ((5, 6, 3), (16, 20, 3))
    )
    return encoded(Image.blend(coarse, fine, 0.4), 87)


def encoded(image: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


if __name__ == "__main__":
    main()
