"""JPEG by simplejpeg (libjpeg-turbo): Pillow's pixels, sooner, and the upper rows alone where no others are asked for.

A JPEG is decoded from the top to the bottom, so what lies above a part has to be, and what lies below it need not.
simplejpeg has no word for that. But a copy of the file in whose header the height is smaller ends early, with the one
complaint that there were bytes left over; any other complaint means damage, and the whole file is decoded as ever.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np
import simplejpeg

_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xFF)))  # the markers that a length follows
_END = b"\xff\xd9"
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd[0-79]")  # the end, or a restart
_BLOCKS = 16  # pixels, the height of a row of blocks where colours have half the resolution


class Header(NamedTuple):
    """What stands before the pixels."""

    frame: Frame | None  # None unless rows come in order, of 8 bits and 1 or 3 colours
    tagged: bool  # has a segment that may hold EXIF or XMP, or is an odd one


class Frame(NamedTuple):
    place: int  # in the file, where the height is written
    height: int
    width: int


def header(jpeg: bytes) -> Header:
    place, frame, tagged = 2, None, False
    while place + 10 < len(jpeg) and jpeg[place] == 0xFF and jpeg[place + 1] in _SEGMENTS:
        marker = jpeg[place + 1]
        if marker == 0xDA:  # the scan
            return Header(frame, tagged)
        if marker == 0xE1:
            tagged = True
        elif marker in (0xC0, 0xC1) and jpeg[place + 4] == 8 and jpeg[place + 9] in (1, 3):
            frame = Frame(place + 5, *struct.unpack_from(">HH", jpeg, place + 5))
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4])
    return Header(None, tagged=True)


def upper_rows(jpeg: bytes, frame: Frame, rows: int) -> np.ndarray | None:
    """uint8 (rows + 1, w, 3), of which all but the last row are those of the picture; None where all has to be
    decoded."""
    if not jpeg.endswith(_END):  # only the first complaint is told, which may be one of a restart left over
        return None
    end = rows + 1  # colours at half the resolution are blended with those of the next row
    if end > (frame.height - 1) // _BLOCKS * _BLOCKS:  # the last row of blocks: nothing would be left over
        return None
    shorter = b"".join((jpeg[: frame.place], end.to_bytes(2), jpeg[frame.place + 2 :]))
    pixels = np.empty((end, frame.width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(shorter, "RGB", buffer=pixels)
    except ValueError as complaint:
        return pixels if _LEFT_OVER.fullmatch(str(complaint)) else None
    return None  # nothing was left over: the file ends too soon


def whole(jpeg: bytes, channels: int, most_pixels: float) -> np.ndarray | None:
    """uint8 (h, w, 1 or 3), as the file has it where it can be `channels`; None for all that Pillow shall decide on."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(jpeg)
        if space not in ("Gray", "YCbCr", "RGB") or int(height) * int(width) > most_pixels:
            return None
        return simplejpeg.decode_jpeg(jpeg, "GRAY" if space == "Gray" and channels == 1 else "RGB")
    except (KeyError, ValueError):  # a subsampling without a name there; warnings too, some of which Pillow lets pass
        return None
