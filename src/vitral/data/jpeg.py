"""JPEG files: their header, and fast decoding of the whole or of the upper rows."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np
import simplejpeg

_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xFF)))  # markers that are followed by a length
_END = b"\xff\xd9"
_LEFT_OVER = re.compile(
    r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd[0-79]"
)  # end of image, or a restart
_MCU_HEIGHT = 16  # pixels: of a row of blocks where chroma is subsampled


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


def decode_upper_rows(jpeg: bytes, frame: JpegFrame, rows: int) -> np.ndarray | None:
    """Decode the first rows of a JPEG by writing a smaller height into its header.

    Returns:
        uint8 (rows + 1, w, 3), of which all but the last row are correct; None if the whole image has to be decoded.
    """
    if not jpeg.endswith(_END):  # the decoder reports its first warning alone, which may be about a restart marker
        return None
    end = rows + 1  # subsampled chroma is blended with that of the next row
    if end > (frame.height - 1) // _MCU_HEIGHT * _MCU_HEIGHT:  # in the last row of blocks: nothing to skip
        return None
    shorter = b"".join((jpeg[: frame.offset], end.to_bytes(2), jpeg[frame.offset + 2 :]))
    pixels = np.empty((end, frame.width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(shorter, "RGB", buffer=pixels)
    except ValueError as warning:
        return pixels if _LEFT_OVER.fullmatch(str(warning)) else None
    return None  # no data was left over: the file is truncated


def decode_jpeg(jpeg: bytes, channels: int, max_pixels: float) -> np.ndarray | None:
    """uint8 (h, w, 1 or 3), grey only if the file is and `channels` is 1; None for what Pillow has to decode."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(jpeg)
        if space not in ("Gray", "YCbCr", "RGB") or int(height) * int(width) > max_pixels:
            return None
        return simplejpeg.decode_jpeg(jpeg, "GRAY" if space == "Gray" and channels == 1 else "RGB")
    except (KeyError, ValueError):  # unknown subsampling; warnings too, some of which Pillow tolerates
        return None
