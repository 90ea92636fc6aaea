"""How many wrong labels `vitral check --model` finds: some labels of real images are replaced by random other ones.

    python benchmarks/label_errors.py WEIGHTS FOLDER [--share 0.05] [--seeds 5]

FOLDER has class folders, perhaps in train and test. Prints, per seed, the precision among as many of the most
suspicious images as labels were changed, which is also the recall there, and both for those called likely wrong.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np

import vitral
from vitral.data.sources import open_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    splits = open_data(options.folder, held_out=0.0).splits
    paths = [str((options.folder / key).resolve()) for split in splits for key in split.keys]
    classes, labels = splits[0].classes, np.concatenate([split.labels for split in splits])
    count = round(options.share * len(labels))
    print(f"{len(labels):,} images, {len(classes)} classes, {count} labels changed")
    with tempfile.TemporaryDirectory() as temporary:
        manifest = Path(temporary) / "labels.csv"
        for seed in range(options.seeds):
            rng = np.random.default_rng(seed)
            changed = rng.choice(len(labels), count, replace=False)
            given = labels.copy()
            given[changed] = (labels[changed] + rng.integers(1, len(classes), count)) % len(classes)
            with manifest.open("w", newline="", encoding="utf-8") as stream:
                rows = zip(paths, (classes[label] for label in given), strict=True)
                csv.writer(stream).writerows([("path", "label"), *rows])
            report = vitral.check(manifest, model=options.weights, output=Path(temporary) / "page.html")
            wrong = {paths[row] for row in changed}
            first = [suspect.image in wrong for suspect in report.suspects[:count]]
            likely = [suspect.image in wrong for suspect in report.suspects if suspect.likely]
            print(
                f"seed {seed}: {sum(first)} of the first {count} ({sum(first) / count:.1%}); likely wrong: "
                f"precision {np.mean(likely):.1%}, recall {sum(likely) / count:.1%} (n = {len(likely)})"
            )


if __name__ == "__main__":
    main()
