"""Oxford-IIIT Pets as its makers pack it: images/ and lists of them in annotations/."""

from __future__ import annotations

from pathlib import Path

from vitral.data.catalog.copies import Copy, listed_files, read_plain
from vitral.data.splits import DataSet, Part
from vitral.errors import UserError

LISTS = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}


def read_pets(copy: Copy) -> DataSet | None:
    place = copy.place_of("images", *LISTS.values())
    if place is None:
        return read_plain(copy)
    breeds: dict[int, str] = {}
    parts = {}
    for split, listing in LISTS.items():
        rows = _rows(place / listing)
        for name, number in rows:
            breed = name.rpartition("_")[0]
            if breeds.setdefault(number, breed) != breed:
                raise UserError(
                    f"{place / listing} has {breeds[number]} and {breed} as class {number}: fetch it again."
                )
        files = [f"images/{name}.jpg" for name, _ in rows]
        parts[split] = Part(files, [breeds[number] for _, number in rows], listed_files(place, files, listing))
    # The makers number the breeds by the alphabet, whatever the case; other data of theirs relies on the numbers.
    return copy.assembled(parts, tuple(breeds[number] for number in sorted(breeds)))


def _rows(listing: Path) -> list[tuple[str, int]]:
    """Lines such as "Abyssinian_100 1 1 1": the image, its class from 1, its species, its breed within the species."""
    rows = []
    for number, line in enumerate(listing.read_text("utf-8", "replace").splitlines(), start=1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not words[1].isdecimal():
            raise UserError(f'{listing} has no class in line {number} ("{line}"): fetch it again.')
        rows.append((words[0], int(words[1])))
    return rows
