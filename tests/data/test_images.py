"""The decode policy, format by format, against Pillow."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from vitral.data.images import ImageError, ImageFacts, decode, describe, open_lazily
from vitral.data.pixels import METHODS, resize
from vitral.errors import UserError

RNG = np.random.default_rng(0)
PIXELS = np.array(
    Image.fromarray(RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((61, 43), Image.Resampling.BICUBIC)
)
PHOTO = Image.fromarray(PIXELS)
GREY16 = RNG.integers(0, 65536, (20, 30), dtype=np.uint16)


def saved(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def png(width: int, height: int, bits: int, colour: int, rows: bytes) -> bytes:
    """A PNG of any kind, also of those that Pillow does not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_jpeg_pixels_match_pillow(subsampling, progressive):
    data = saved(PHOTO, "JPEG", subsampling=subsampling, progressive=progressive, quality=85)
    np.testing.assert_array_equal(decode(data), np.asarray(opened(data)))
    np.testing.assert_array_equal(decode(data, 1)[:, :, 0], np.asarray(opened(data).convert("L")))


@pytest.mark.parametrize("options", [{"quality": 85}, {"keep_rgb": True}, {"optimize": True, "restart_marker_rows": 1}])
def test_other_jpegs_match_pillow(options):
    data = saved(PHOTO, "JPEG", **options)
    np.testing.assert_array_equal(decode(data), np.asarray(opened(data)))


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF", "TGA"])
def test_every_format_matches_pillow(form):
    data = saved(PHOTO, form)
    got = decode(data)
    np.testing.assert_array_equal(got, np.asarray(opened(data).convert("RGB")))
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    assert got.flags.writeable


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_grey_is_copied_to_all_channels(form):
    data = saved(PHOTO.convert("L"), form)
    grey = np.asarray(opened(data))
    np.testing.assert_array_equal(decode(data), np.stack([grey] * 3, axis=2))
    np.testing.assert_array_equal(decode(data, 1), grey[:, :, None])


def test_one_channel_is_the_luminance_of_itu_601():
    got = decode(saved(PHOTO, "PNG"), 1)
    np.testing.assert_allclose(got[:, :, 0], PIXELS @ [0.299, 0.587, 0.114], atol=0.51)


def test_black_and_white_keeps_both():
    bits = PIXELS[:, :, 0] > 128
    data = saved(Image.fromarray(bits), "PNG")
    np.testing.assert_array_equal(decode(data, 1)[:, :, 0], bits * 255)
    assert describe(data).bits == 1


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_the_high_byte(form):
    data = saved(Image.fromarray(GREY16), form)
    np.testing.assert_array_equal(decode(data, 1)[:, :, 0], GREY16 // 256)
    np.testing.assert_array_equal(decode(data)[:, :, 2], GREY16 // 256)
    assert describe(data).bits == 16


def test_sixteen_bit_colour_follows_the_same_rule():
    values = RNG.integers(0, 65536, (5, 7, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    data = png(7, 5, 16, 2, rows)
    np.testing.assert_array_equal(decode(data), values // 256)
    assert describe(data) == ImageFacts("PNG", 7, 5, "RGB", 16, 3, rotated=False, frames=1)


def test_floats_are_read_between_0_and_1_and_refused_beyond():
    values = RNG.random((8, 9), dtype=np.float32)
    data = saved(Image.fromarray(values), "TIFF")
    np.testing.assert_allclose(decode(data, 1)[:, :, 0], values * 255, atol=0.5001)
    for wrong in (values * 255, values - 1, np.where(values > 0.5, np.nan, values).astype(np.float32)):
        with pytest.raises(ImageError, match=r"outside 0\.\.1"):
            decode(saved(Image.fromarray(wrong), "TIFF"))


def test_wide_integers_count_as_sixteen_bits_or_are_refused():
    values = GREY16.astype(np.int32)
    np.testing.assert_array_equal(decode(saved(Image.fromarray(values), "TIFF"), 1)[:, :, 0], GREY16 // 256)
    for wrong in (values - 1000, values * 100):
        with pytest.raises(ImageError, match=r"outside 0\.\.65535"):
            decode(saved(Image.fromarray(wrong), "TIFF"))


def test_transparency_is_composited_over_white():
    alpha = RNG.integers(0, 256, PIXELS.shape[:2], dtype=np.uint8)
    share = alpha[:, :, None] / 255
    expected = PIXELS * share + 255 * (1 - share)
    data = saved(Image.fromarray(np.dstack([PIXELS, alpha])), "PNG")
    np.testing.assert_allclose(decode(data), expected, atol=1)
    grey = PIXELS[:, :, :1]
    data = saved(Image.merge("LA", [Image.fromarray(grey[:, :, 0]), Image.fromarray(alpha)]), "PNG")
    np.testing.assert_allclose(decode(data, 1), grey * share + 255 * (1 - share), atol=1)


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_palette_and_its_transparent_entry(form):
    picture = Image.new("P", (4, 2))
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putdata([0, 1, 0, 1, 1, 1, 0, 0])
    entry = np.asarray(picture)[:, :, None]
    expected = np.where(entry == 0, [10, 20, 30], [200, 100, 50])
    np.testing.assert_array_equal(decode(saved(picture, form)), expected)
    expected = np.where(entry == 0, 255, expected)
    np.testing.assert_array_equal(decode(saved(picture, form, transparency=0)), expected)


def test_a_colour_key_is_transparent():
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0, 0] = 7, 8, 9
    got = decode(saved(Image.fromarray(pixels), "PNG", transparency=(7, 8, 9)))
    assert got[0, 0].tolist() == [255, 255, 255]
    assert got[1, 1].tolist() == [0, 0, 0]


def test_cmyk_jpeg_matches_pillow():
    data = saved(PHOTO.convert("CMYK"), "JPEG", quality=95)
    assert describe(data).mode == "CMYK"
    np.testing.assert_array_equal(decode(data), np.asarray(opened(data).convert("RGB")))
    # In the right sense, too: an inverted reading would be off by hundreds.
    assert np.abs(decode(data).astype(int) - PIXELS).mean() < 12


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(form):
    first, second = Image.new("RGB", (8, 6), (250, 0, 0)), Image.new("RGB", (8, 6), (0, 0, 250))
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(first, form, save_all=True, append_images=[second], **options)
    assert describe(data).frames == 2
    np.testing.assert_array_equal(decode(data), np.asarray(first))


def test_an_mpo_file_counts_as_one_jpeg():
    data = saved(PHOTO, "MPO", save_all=True, append_images=[PHOTO])
    facts = describe(data)
    assert (facts.format, facts.frames) == ("JPEG", 1)
    np.testing.assert_array_equal(decode(data), np.asarray(opened(data)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(PHOTO, form, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(opened(data)).convert("RGB"))
    got = decode(data)
    np.testing.assert_array_equal(got, expected)
    assert got.flags.c_contiguous
    facts = describe(data)
    assert (facts.height, facts.width) == expected.shape[:2]
    assert facts.rotated == (orientation != 1)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "GIF"])
def test_describing_reads_the_header_alone(form, monkeypatch):
    whole = saved(PHOTO, form)
    loads = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: loads.append(image))
    facts = describe(whole)
    assert facts[:3] == (form, 61, 43)
    assert not loads
    if form != "TIFF":  # Pillow writes the header of a TIFF behind its pixels
        assert describe(whole[: len(whole) * 2 // 3]) == facts


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_rotated_row_can_be_resized(size, orientation, channels):
    """NumPy takes a line for contiguous whichever way it runs, torch does not."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(PHOTO.crop((0, 0, *size)), "PNG", exif=exif)
    upright = ImageOps.exif_transpose(opened(data)).convert("RGB" if channels == 3 else "L")
    expected = np.array(upright).reshape(upright.height, upright.width, channels)
    found = decode(data, channels)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(resize(found, (4, 5)), resize(expected, (4, 5)))


def test_exif_behind_the_pixels_of_a_png_counts():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, body = saved(PHOTO, "PNG"), exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    data = plain[:-12] + chunk + plain[-12:]
    np.testing.assert_array_equal(decode(data), np.rot90(PIXELS, -1))
    assert describe(data)[1:3] == (43, 61)


def test_orientation_behind_other_segments_and_in_xmp():
    profile = b"\xff\xda" * 20_000  # looks like the start of the scan, and fills a whole segment
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = saved(PHOTO, "JPEG")
    expected = np.rot90(np.asarray(opened(plain)), -1)
    with_exif = opened(saved(PHOTO, "JPEG", exif=exif)).info["exif"]

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body

    behind = plain[:2] + segment(0xE2, profile) + segment(0xE1, with_exif) + plain[2:]
    np.testing.assert_array_equal(decode(behind), expected)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    np.testing.assert_array_equal(decode(plain[:2] + segment(0xE1, xmp) + plain[2:]), expected)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x09"]
)
def test_unreadable_exif_counts_as_upright(exif):
    data = saved(PHOTO, "JPEG", exif=exif)
    np.testing.assert_array_equal(decode(data), np.asarray(opened(saved(PHOTO, "JPEG"))))
    assert not describe(data).rotated


def test_other_channel_counts_need_exactly_those_bands():
    four = np.dstack([PIXELS, PIXELS[:, :, 0]])
    data = saved(Image.fromarray(four), "TIFF")
    np.testing.assert_array_equal(decode(data, 4), four)
    with pytest.raises(ImageError, match="the file has 3 channels, not 4"):
        decode(saved(PHOTO, "JPEG"), 4)


HUGE = struct.pack("<HH", 60_000, 60_000)
BAD = {
    "empty": (b"", "empty"),
    "text": (b"path,label\ncat.jpg,0\n", "not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "jpeg start only": (b"\xff\xd8\xff", "not an image"),
    "huge png": (png(30_000, 30_000, 8, 2, b""), "too many pixels"),
    "huge gif": (b"GIF89a" + HUGE + b"\x80\0\0" + b"\0" * 6 + b",\0\0\0\0" + HUGE + b"\0\2\2L\1\0;", "too many pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_images_have_a_short_reason(name):
    data, reason = BAD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match=reason) as caught:
            decode(data)
    assert "\n" not in str(caught.value)
    with pytest.raises(ImageError):
        describe(data)


def test_a_jpeg_header_of_absurd_size_allocates_nothing():
    data = saved(PHOTO, "JPEG")
    frame = data.index(b"\xff\xc0")
    huge = data[: frame + 5] + struct.pack(">HH", 65_000, 65_000) + data[frame + 9 :]
    with pytest.raises(ImageError, match="too many pixels"):
        decode(huge)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "PPM", "TIFF"])
def test_a_header_that_promises_far_more_than_the_file_holds_is_refused_before_memory_is_allocated(form):
    data = saved(PHOTO, form)
    sizes = {  # 15000 x 11000 is below Pillow's limit
        "JPEG": (data.find(b"\xff\xc0") + 5, struct.pack(">HH", 11_000, 15_000)),
        "PNG": (16, struct.pack(">II", 15_000, 11_000)),
        "BMP": (18, struct.pack("<ii", 15_000, 11_000)),
        "PPM": (0, b"P6 15000 11000 255 "),
        "TIFF": (0, b""),
    }
    offset, size = sizes[form]
    lying = data[:offset] + size + data[offset + len(size) :]
    if form == "PNG":
        lying = lying[:29] + struct.pack(">I", zlib.crc32(lying[12:29])) + lying[33:]
    if form == "TIFF":  # the tags ImageWidth, ImageLength and RowsPerStrip
        for tag, value in ((256, 15_000), (257, 11_000), (278, 11_000)):
            for kind, code in ((3, "<HHIHH"), (4, "<HHII")):
                at = lying.find(struct.pack("<HHI", tag, kind, 1))
                if at >= 0:
                    entry = struct.pack(code, tag, kind, 1, value, *([0] if kind == 3 else []))
                    lying = lying[:at] + entry + lying[at + 12 :]
    for read in (decode, describe, lambda data: open_lazily(data, 3)):
        with pytest.raises(ImageError, match="bytes for 165,000,000 pixels"):  # said before pixels are decoded
            read(lying)


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF", "GIF", "WEBP", "JPEG"])
@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_the_smallest_file_of_a_large_picture_is_read(form, mode):
    options = {"quality": 1, "progressive": True, "optimize": True} if form == "JPEG" else {}
    for compression in ("raw", "tiff_adobe_deflate", "packbits") if form == "TIFF" else (None,):
        more = {**options, "compression": compression} if compression else options
        stream = io.BytesIO()
        plain = Image.new(mode, (2000, 1500)) if form != "JPEG" or mode != "1" else Image.new("L", (2000, 1500))
        plain.save(stream, form, **more)
        assert decode(stream.getvalue()).shape == (1500, 2000, 3)


def test_a_lower_limit_can_be_set(monkeypatch):
    for form in ("PNG", "JPEG"):
        monkeypatch.setenv("VITRAL_MAX_PIXELS", str(PIXELS.shape[0] * PIXELS.shape[1]))
        assert decode(saved(PHOTO, form)).shape == PIXELS.shape
        monkeypatch.setenv("VITRAL_MAX_PIXELS", "100")
        for read in (decode, describe, lambda data: open_lazily(data, 3)):
            with pytest.raises(ImageError, match="too many pixels"):
                read(saved(PHOTO, form))
    for text in ("many", "-1", "9" * 5000):
        monkeypatch.setenv("VITRAL_MAX_PIXELS", text)
        with pytest.raises(UserError, match="is not a number of pixels"):
            decode(saved(PHOTO, "PNG"))


def test_a_large_picture_below_the_limit_is_read_without_a_warning(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # 43 x 61 is more, but less than twice that
    for form in ("PNG", "JPEG"):
        assert decode(saved(PHOTO, form)).shape == PIXELS.shape
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for form in ("PNG", "JPEG"):
        with pytest.raises(ImageError, match="too many pixels"):
            decode(saved(PHOTO, form))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated_files_are_unreadable(form):
    data = saved(PHOTO, form)
    for keep in (0.2, 0.5, 0.8):
        with pytest.raises(ImageError):
            decode(data[: int(len(data) * keep)])
    with pytest.raises(ImageError, match="truncated"):
        decode(saved(PHOTO, "JPEG")[:-20])


SEEDS = [saved(PHOTO, form) for form in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM")]


@settings(max_examples=150)
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=12),
)
def test_damage_never_raises_anything_else(seed, changes):
    data = bytearray(seed)
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        pixels = decode(bytes(data))
    except ImageError:
        return
    assert pixels.ndim == 3
    assert pixels.dtype == np.uint8


PILLOW = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
}


# Where one side shrinks and the other grows, Pillow's two passes round in another order.
@pytest.mark.parametrize(
    "size, equal", [((20, 30), 0.99), ((43, 20), 0.99), ((100, 120), 0.99), ((17, 90), 0.85), ((1, 1), 1)]
)
@pytest.mark.parametrize("method", PILLOW)
def test_resizing_matches_pillow(method, size, equal):
    expected = np.asarray(PHOTO.resize(size[::-1], PILLOW[method])).astype(int)
    got = resize(PIXELS, size, method)
    assert np.abs(got - expected).max() <= 1
    assert (got == expected).mean() >= (1 if method == "nearest" else equal)


def test_area_is_the_exact_mean_of_what_a_pixel_covers():
    image = PIXELS[:13, :11]
    for high, wide in [(5, 4), (13, 3), (20, 11), (17, 19)]:
        # Repeating each pixel makes every border fall between pixels.
        fine = image.repeat(high, axis=0).repeat(wide, axis=1).astype(float)
        cells = fine.reshape(high, 13, wide, 11, 3).mean(axis=(1, 3))
        np.testing.assert_allclose(resize(image, (high, wide), "area"), cells, atol=0.501)


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
@pytest.mark.parametrize("method", METHODS)
def test_channels_are_resized_alike_and_apart(method, channels):
    stack = RNG.integers(0, 256, (30, 40, channels), dtype=np.uint8)
    whole = resize(stack, (11, 17), method)
    assert whole.shape == (11, 17, channels)
    for band in range(channels):
        one = resize(np.ascontiguousarray(stack[:, :, band : band + 1]), (11, 17), method)
        assert np.abs(whole[:, :, band].astype(int) - one[:, :, 0]).max() <= 1


def test_read_only_pixels_are_resized_without_a_warning():
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(resize(frozen, (10, 10)), resize(PIXELS, (10, 10)))
