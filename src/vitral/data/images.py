"""Bytes to pixels: one decode policy, the same for training, evaluation and prediction.

- The EXIF orientation is applied. EXIF that cannot be read counts as upright.
- Grey is copied to as many channels as are requested; one channel of a colour image is its luminance (ITU-R 601).
- 16 bits become 8 by keeping the high byte (value >> 8), which is what Pillow does to colour; nothing is clipped.
  32-bit integers must lie in 0..65535 and count as 16 bits; floats must lie in 0..1 and are multiplied by 255.
  The scale of any other range is not in the file, so such an image is refused.
- Transparency, also of palettes and colour keys, is composited over white. CMYK is converted by Pillow.
- An animation or a document with several pages gives its first image.
- Channel counts other than 1 and 3 are returned only if the file has exactly that many bands, and then as stored.
- A .npy file holds an array (height, width, channels) of uint8, or of floating-point values from 0 to 1.
- HEIC and HEIF are read where the extra is installed: pip install 'vitral[heic]'.
- A damaged, truncated or far too large image (Pillow's limit, 179 million pixels) is unreadable, and so is one whose
  header promises more pixels than its bytes can hold. The environment variable VITRAL_MAX_PIXELS sets a lower limit.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from vitral.data.arrays import NPY, ImageError, npy_shape, read_npy
from vitral.data.jpeg import JPEG, JpegFrame, jpeg_header
from vitral.errors import UserError

PILImage = Image.Image
PILLOW_METHODS = {f"pil_{filter.name.lower()}": filter for filter in Image.Resampling}

_END = b"\xff\xd9"
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd[0-79]")  # the end, or a restart
_MCU_HEIGHT = 16  # pixels: of a row of blocks where chroma is subsampled
# Pixels that one byte can hold at most, by Pillow's name of the codec, if they have 1 bit. Deflate grows by at most
# 1032. A JPEG has at least 1 bit per block of 8x8 in its first scan (512); twice that is allowed.
_PIXELS_PER_BYTE = {"raw": 8, "zip": 8 * 1032, "jpeg": 1024}
# Brands of HEIF at byte 8, behind "ftyp"; AVIF is another, which Pillow reads itself.
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs", b"mif1", b"msf1")
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"com.adobe.xmp")


class ImageTooLarge(ImageError):
    """An image of more pixels than are allowed."""


@dataclass(frozen=True)
class UnreadableImage:
    """The record of an image that could not be read: its path (or another key of its split), and why."""

    path: str
    reason: str


class ImageFacts(NamedTuple):
    """The content of an image file's header."""

    format: str
    width: int  # upright, as `decode` gives it
    height: int
    mode: str  # Pillow's: L, RGB, RGBA, CMYK, P, I;16, ...
    bits: int  # per channel
    channels: int
    rotated: bool  # turned or mirrored by its EXIF orientation
    frames: int  # images of an animation, or pages


def decode(data: bytes, channels: int = 3) -> np.ndarray:
    """An image file's bytes -> uint8 (h, w, channels); raises ImageError."""
    if data.startswith(NPY):
        return _npy_pixels(data, channels)
    pixels = _fast_jpeg(data, channels)
    if pixels is not None:
        return pixels
    with _opened(data) as image:
        image.load()
        return _upright(_bands(image, channels), _orientation(image))


def channels_of(image: bytes | np.ndarray, wanted: int = 3) -> int:
    """The channels that a model needs for an image: those of arrays that are not grey, `wanted` if it can be read with
    as many, else 3."""
    if isinstance(image, np.ndarray):
        stored = image.shape[2]
    elif image.startswith(NPY):
        stored = npy_shape(image)[2]
    else:
        return wanted if wanted in (1, 3) or describe(image).channels == wanted else 3
    return wanted if stored == 1 else stored


class LazyJpeg:
    """A JPEG that is decoded when it is indexed, and only down to the last row that is needed."""

    def __init__(self, data: bytes, frame: JpegFrame) -> None:
        self.data, self.frame = data, frame
        self.shape = (frame.height, frame.width, 3)

    def __getitem__(self, region: tuple[slice, slice]) -> np.ndarray:
        """Rows and columns -> uint8 (h, w, 3); raises ImageError."""
        rows = decode_upper_rows(self.data, self.frame, region[0].stop)
        return (decode(self.data) if rows is None else rows)[region]


def open_lazily(data: bytes, channels: int) -> np.ndarray | LazyJpeg:
    """As `decode`, but lazy if a part of the image can be decoded alone; raises ImageError.

    Damage below that part is not noticed where Pillow would tolerate it too; a missing end is noticed.
    """
    if channels == 3 and data.startswith(JPEG):
        frame, tagged = jpeg_header(data)
        readable = frame is not None and 0 < frame.height * frame.width <= _max_pixels(data)
        if readable and (not tagged or _jpeg_orientation(data) == 1):
            return LazyJpeg(data, frame)
    return decode(data, channels)


def describe(data: bytes) -> ImageFacts:
    """Read the header without decoding the pixels; raises ImageError."""
    if data.startswith(NPY):
        height, width, channels = npy_shape(data)
        return ImageFacts("NPY", width, height, "L" if channels == 1 else "RGB", 8, channels, False, 1)
    with _opened(data) as image:
        bits, mode, (width, height) = _bits(image), image.mode, image.size
        # To read EXIF, Pillow decodes a PNG to its end, as the EXIF may be there.
        plain = image.format == "PNG" and not any(word in data for word in _PNG_EXIF)
        orientation = 1 if plain else _orientation(image)
        if orientation >= 5 and image.format != "TIFF":  # for a TIFF, Pillow gives the upright size
            width, height = height, width
        # A phone's MPO is a JPEG with previews or depth maps behind it, not an animation.
        single = image.format in ("JPEG", "MPO")
        return ImageFacts(
            format="JPEG" if single else image.format or "",
            width=width,
            height=height,
            mode=mode,
            bits=bits,
            channels=len(image.getbands()),
            rotated=orientation != 1,
            frames=1 if single else getattr(image, "n_frames", 1),
        )


def largest_deep_value(data: bytes) -> int:
    """The largest value of a grey image of 16 or 32 bits, before it becomes one of 8; else 0. Raises ImageError."""
    with _opened(data) as image:
        return int(np.asarray(image).max()) if image.mode == "I" or image.mode.startswith("I;16") else 0


def pil_to_array(image: Any, channels: int = 0) -> np.ndarray:
    """A PIL image of any mode -> uint8 (h, w, channels), decoded by the policy above.

    With `channels=0` a grey image has one channel, any other three.
    """
    grey = image.mode in ("1", "L", "I", "F") or image.mode.startswith("I;16")
    bands = channels or (1 if grey and not image.has_transparency_data else 3)
    try:
        with warnings.catch_warnings(action="ignore"):
            image.load()
            return _upright(_bands(image, bands), _orientation(image))
    except ImageError:
        raise
    except Exception as error:  # an opened file is decoded here, see `_opened`
        raise ImageError(_reason(error)) from error


def array_to_pil(pixels: np.ndarray) -> Any:
    """uint8 (h, w, 1, 3 or 4) -> a PIL image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def is_pil(value: Any) -> bool:
    return isinstance(value, Image.Image)


def encode_png(image: np.ndarray) -> bytes:
    """uint8 (h, w, 1, 3 or 4) -> the bytes of a PNG file; the fourth channel is opacity."""
    stream = io.BytesIO()
    array_to_pil(image).save(stream, "PNG")
    return stream.getvalue()


def encode_jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    """uint8 (h, w, 1 or 3) -> the bytes of a JPEG file"""
    stream = io.BytesIO()
    array_to_pil(image).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def pillow_resize(image: np.ndarray, size: tuple[int, int], method: str) -> np.ndarray:
    """By Pillow; other channel counts than 1 and 3 one by one, as it would take a fourth for opacity."""
    bands = [image] if image.shape[2] in (1, 3) else np.split(image, image.shape[2], axis=2)
    resized = [array_to_pil(band).resize(size[::-1], PILLOW_METHODS[method]) for band in bands]
    return np.concatenate([_array(band) for band in resized], axis=2)


def as_tensor(image: np.ndarray) -> torch.Tensor:
    """uint8 (h, w, c), sharing memory where possible; read-only memory is copied, as torch warns about it."""
    return torch.from_numpy(np.require(image, requirements=["C", "W"]))


def _npy_pixels(data: bytes, channels: int) -> np.ndarray:
    height, width, stored = npy_shape(data)
    if height * width > _pixel_limit():
        raise ImageTooLarge(_too_many(height * width))
    if stored not in (1, channels):
        raise ImageError(f"the file has {stored} channels, not {channels}")
    return np.repeat(read_npy(data), channels // stored, axis=2)


def _fast_jpeg(data: bytes, channels: int) -> np.ndarray | None:
    """The pixels of a common JPEG; None for those that Pillow has to decode."""
    if channels not in (1, 3) or not data.startswith(JPEG):
        return None
    limit = _max_pixels(data)
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in ("Gray", "YCbCr", "RGB") or int(height) * int(width) > limit:
            return None
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if space == "Gray" and channels == 1 else "RGB")
    except (KeyError, ValueError):  # unknown subsampling; warnings too, some of which Pillow tolerates
        return None
    if pixels.shape[2] != channels:
        pixels = _array(Image.fromarray(pixels).convert("L"))
    return _upright(pixels, _jpeg_orientation(data)) if jpeg_header(data).tagged else pixels


def decode_upper_rows(jpeg: bytes, frame: JpegFrame, rows: int) -> np.ndarray | None:
    """Decode the first rows of a JPEG by writing a smaller height into its header: uint8 (rows + 1, w, 3), of which all
    but the last row are correct; None if the whole image has to be decoded."""
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


def _jpeg_orientation(data: bytes) -> int:
    with _opened(data) as image:
        return _orientation(image)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """The opened image, not yet decoded; any error inside the block becomes ImageError."""
    if not data:
        raise ImageError("the file is empty")
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        _register_heif()
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            _check_size(image, len(data))
            yield image
    except (ImageError, UserError):
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLarge("too many pixels") from error
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise ImageError(_reason(error)) from error


@cache
def _register_heif() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise ImageError("HEIC needs an extra: pip install 'vitral[heic]'") from error
    register_heif_opener()


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image in a known format"
    if isinstance(error, MemoryError):
        return "too many pixels"
    text = str(error).strip().rstrip(".")
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "the file is truncated"
    return f"damaged or of an unknown kind ({text.splitlines()[0] if text else type(error).__name__})"


def _bands(image: Image.Image, channels: int) -> np.ndarray:
    """A loaded image -> uint8 (h, w, channels), EXIF orientation not yet applied."""
    image = _eight_bits(image)
    if channels not in (1, 3):
        bands = len(image.getbands())
        if bands != channels:
            raise ImageError(f"the file has {bands} channels, not {channels}")
        return _array(image)
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    return _array(image.convert("L" if channels == 1 else "RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # so written that NaN is refused too
            raise ImageError("floating-point values outside 0..1, whose scale is not stated")
        return Image.fromarray(np.rint(values * 255).astype(np.uint8))
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ImageError("32-bit values outside 0..65535, whose scale is not stated")
        return Image.fromarray((values >> 8).astype(np.uint8))
    return image


def _array(image: Image.Image) -> np.ndarray:
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF raises nearly anything, and does not affect the pixels
        return 1
    return value if value in range(1, 9) else 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """(h, w, c) -> (h, w, c) or (w, h, c), contiguous, by the EXIF orientation, 1 to 8."""
    if orientation == 1:
        return pixels
    pixels = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
    pixels = pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels
    return (pixels[::-1] if orientation in (3, 4, 7, 8) else pixels).copy()


def _bits(image: Image.Image) -> int:
    """Bits per channel in the file; of a 16-bit colour image only the decoder's raw mode tells."""
    tiles = getattr(image, "tile", ())  # (codec, box, offset, arguments with the raw mode among them)
    if image.mode.startswith("I;16") or any(";16" in str(tile[3]) for tile in tiles):
        return 16
    return {"1": 1, "I": 32, "F": 32}.get(image.mode, 8)


def _check_size(image: Image.Image, size: int) -> None:
    """Refuse an image before memory for its pixels is allocated; `size` is that of the file in bytes."""
    pixels = image.width * image.height
    if pixels > _pixel_limit():
        raise ImageTooLarge(_too_many(pixels))
    tiles = getattr(image, "tile", ())
    codecs = {tile[0] for tile in tiles}
    if len(codecs) != 1 or (codec := codecs.pop()) not in _PIXELS_PER_BYTE:
        return
    bands = len(image.getbands())
    bits = 8 * bands if codec == "zip" and bands > 1 else 1  # a PNG's single band may have 1 bit
    boxes = [tile[1] or (0, 0, *image.size) for tile in tiles]
    claimed = sum((right - left) * (lower - upper) for left, upper, right, lower in boxes)
    if claimed * bits > size * _PIXELS_PER_BYTE[codec]:
        raise ImageError(f"the file is truncated: {size:,} bytes for {pixels:,} pixels")


def _too_many(pixels: int) -> str:
    return f"too many pixels ({pixels:,}; VITRAL_MAX_PIXELS is {_pixel_limit():,})"


def _max_pixels(jpeg: bytes) -> float:
    """What a JPEG may have: by our limit, by Pillow's, which warns above its own and refuses twice that, and by its
    length."""
    pillow = 2 * (Image.MAX_IMAGE_PIXELS or float("inf"))
    return min(_pixel_limit(), pillow, len(jpeg) * _PIXELS_PER_BYTE["jpeg"])


def _pixel_limit() -> float:
    """The user's own limit; an environment variable, as it has to reach worker processes."""
    text = os.environ.get("VITRAL_MAX_PIXELS", "")
    if not text:
        return float("inf")
    if not text.isdecimal() or len(text) > 18:
        raise UserError(f"VITRAL_MAX_PIXELS={text[:40]} is not a number of pixels: set it to one such as 50000000.")
    return int(text)
