"""The structure of JPEG files: the header in front of the pixels."""

from __future__ import annotations

import struct
from typing import NamedTuple

JPEG = b"\xff\xd8\xff"
_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xFF)))  # markers of a JPEG that are followed by a length


class JpegHeader(NamedTuple):
    """The part of a JPEG before its pixels."""

    frame: JpegFrame | None  # None unless baseline, with 8 bits and 1 or 3 channels
    tagged: bool  # has a segment that may hold EXIF or XMP, or an unknown structure


class JpegFrame(NamedTuple):
    offset: int  # of the height field in the file
    height: int
    width: int


def jpeg_header(jpeg: bytes) -> JpegHeader:
    """Parse the segments up to the start of the scan."""
    offset, frame, tagged = 2, None, False
    while offset + 10 < len(jpeg) and jpeg[offset] == 0xFF and jpeg[offset + 1] in _SEGMENTS:
        marker = jpeg[offset + 1]
        if marker == 0xDA:  # start of scan
            return JpegHeader(frame, tagged)
        if marker == 0xE1:
            tagged = True
        elif marker in (0xC0, 0xC1) and jpeg[offset + 4] == 8 and jpeg[offset + 9] in (1, 3):
            frame = JpegFrame(offset + 5, *struct.unpack_from(">HH", jpeg, offset + 5))
        offset += 2 + int.from_bytes(jpeg[offset + 2 : offset + 4])
    return JpegHeader(None, tagged=True)
