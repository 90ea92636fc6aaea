"""The upper rows of a JPEG alone: the same pixels as of the whole picture, and nothing that the whole would refuse."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitral.data.images import ImageError, LazyJpeg, decode, encode_png, jpeg_header, open_lazily
from vitral.data.preprocess import parse_pipeline

RNG = np.random.default_rng(0)


def photo(height: int, width: int) -> np.ndarray:
    """Blobs with some grain: neighbouring rows differ in colour, so that blending them shows."""
    rough = Image.fromarray(RNG.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize((width, height))
    return np.clip(np.asarray(rough, np.int16) + RNG.integers(-40, 40, (height, width, 3)), 0, 255).astype(np.uint8)


def saved(pixels: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(stream, "JPEG", **options)
    return stream.getvalue()


def tags(name: int, value: object) -> Image.Exif:
    exif = Image.Exif()
    exif[name] = value
    return exif


@pytest.fixture
def decoded_rows(monkeypatch) -> list[int]:
    """How many rows simplejpeg was asked for, call by call; 0 for all."""
    asked: list[int] = []
    decode_jpeg = simplejpeg.decode_jpeg

    def asking(data, *args, buffer=None, **options):
        asked.append(0 if buffer is None else len(buffer))
        return decode_jpeg(data, *args, buffer=buffer, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", asking)
    return asked


@settings(max_examples=150)
@given(
    subsampling=st.sampled_from(["444", "422", "420", "440", "411", "Gray"]),
    height=st.integers(1, 90),
    width=st.integers(1, 70),
    share=st.floats(0, 1),
    quality=st.integers(5, 100),
)
def test_upper_rows_are_those_of_the_whole_picture(subsampling, height, width, share, quality):
    pixels = photo(height, width)
    if subsampling == "Gray":
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[:, :, :1]), quality, "GRAY", subsampling)
    else:
        data = simplejpeg.encode_jpeg(pixels, quality, "RGB", subsampling)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    picture = open_lazily(data, 3)
    assert isinstance(picture, LazyJpeg)
    assert picture.shape == (height, width, 3)
    end = max(1, round(share * height))
    np.testing.assert_array_equal(picture[:end, width // 2 :], expected[:end, width // 2 :])


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"restart_marker_rows": 1}, {"keep_rgb": True}])
def test_rows_below_the_region_are_not_decoded(options, decoded_rows):
    data = saved(photo(96, 80), **options)
    picture = open_lazily(data, 3)
    assert not decoded_rows
    np.testing.assert_array_equal(picture[10:40, :], decode(data)[10:40])
    assert decoded_rows == [41, 0]


def test_all_is_decoded_at_once_where_the_last_row_of_blocks_is_needed(decoded_rows):
    picture = open_lazily(saved(photo(96, 80)), 3)
    for end in (80, 90, 96):
        assert len(picture[:end, :]) == end
    assert decoded_rows == [0, 0, 0]


@pytest.mark.parametrize("options", [{"progressive": True}, {"exif": tags(0x0112, 6)}])
def test_progressive_and_rotated_files_are_decoded_whole(options):
    data = saved(photo(96, 80), **options)
    picture = open_lazily(data, 3)
    assert isinstance(picture, np.ndarray)
    np.testing.assert_array_equal(picture, decode(data))


def test_an_orientation_tag_of_1_changes_nothing(decoded_rows):
    data = saved(photo(96, 80), exif=tags(0x0131, "a camera's software"))
    open_lazily(data, 3)[:20, :]
    assert decoded_rows == [21]


def test_grey_output_and_other_formats_are_decoded_whole():
    pixels = photo(50, 40)
    np.testing.assert_array_equal(open_lazily(saved(pixels), 1), decode(saved(pixels), 1))
    np.testing.assert_array_equal(open_lazily(encode_png(pixels), 3), pixels)


def test_separate_scans_per_channel_are_decoded(decoded_rows):
    """Rows in order, and yet the colours come one after the other: the early end shows as another complaint."""
    planes = photo(64, 48)
    data = one_scan_a_colour(planes)
    stored = np.asarray(Image.open(io.BytesIO(data)).convert("YCbCr"), int)
    assert abs(stored - planes).mean() < 25  # it is the file meant: noise at this quality, and colours out of range
    np.testing.assert_array_equal(open_lazily(data, 3)[:20, :], decode(data)[:20])
    assert decoded_rows == [21, 0, 0]


@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_detected_from_its_upper_rows(kept, options):
    data = saved(photo(96, 80), **options)
    picture = open_lazily(data[: int(kept * len(data))], 3)
    with pytest.raises(ImageError, match="truncated"):
        picture[:16, :]


def test_absurd_sizes_are_refused_before_memory_is_allocated():
    data = bytearray(saved(photo(20, 20)))
    frame = jpeg_header(bytes(data)).frame
    assert frame is not None
    data[frame.offset : frame.offset + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(ImageError, match="too many pixels"):
        open_lazily(bytes(data), 3)


def test_markers_without_a_length_are_handled():
    data = saved(photo(96, 80))
    odd = data[:2] + b"\xff\xd0\0\2\xff\xd1\0\2" + data[2:]
    np.testing.assert_array_equal(open_lazily(odd, 3)[:20, :], decode(data)[:20])


def test_a_subsampling_without_a_name_is_left_to_pillow():
    data = bytearray(saved(np.full((64, 64, 3), 90, np.uint8), subsampling=0))
    data[data.index(b"\xff\xc0") + 11] = 0x14  # the first colour has four rows for one of the others
    expected = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode(bytes(data)), expected)
    np.testing.assert_array_equal(open_lazily(bytes(data), 3)[:20, :], expected[:20])


@settings(max_examples=300)
@given(
    seed=st.sampled_from([saved(photo(43, 61)), saved(photo(43, 61), restart_marker_blocks=2)]),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=12),
    end=st.integers(1, 43),
)
def test_damage_gives_the_pixels_of_a_full_decode_or_an_error(seed, changes, end):
    """The whole may be refused for damage below the part; where it is not, the part is the same."""
    data = bytearray(seed)
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        picture = open_lazily(bytes(data), 3)
        end = min(end, picture.shape[0])
        part = picture[:end, : picture.shape[1]]
    except ImageError:
        with pytest.raises(ImageError):
            decode(bytes(data))
        return
    with contextlib.suppress(ImageError):
        np.testing.assert_array_equal(part, decode(bytes(data))[:end])


@pytest.mark.parametrize(
    "steps",
    [
        *("inception_crop(24)|flip", "random_crop(24)|flip", "central_crop(24)", "random_crop(200)", "resize(24)"),
        *("resize_small(30)|central_crop(24)", "flip|inception_crop(24, 30)", "randaugment(2, 10)|resize(24)"),
        *(
            "resize_short(30, pil_bicubic)|center_crop(24)",
            "center_crop(24)",
            "center_crop(400)",
            "pad(300, 9, 7)|resize(24)",
        ),
        "erase(1)|inception_crop(24)",
    ],
)
def test_pipelines_give_equal_results_for_files_and_pixels(steps):
    pipeline, data = parse_pipeline(f"decode|{steps}"), saved(photo(96, 80))
    for seed in range(20):
        found, expected = (
            pipeline(picture, np.random.default_rng(seed)) for picture in (open_lazily(data, 3), decode(data))
        )
        np.testing.assert_array_equal(found, expected)


def one_scan_a_colour(planes: np.ndarray) -> bytes:
    """uint8 (h, w, 3) of the colours that are stored -> a file with three scans, made of three grey files."""
    files = [simplejpeg.encode_jpeg(np.ascontiguousarray(planes[:, :, [k]]), 85, "GRAY", "Gray") for k in range(3)]
    frame, scan = files[0].index(b"\xff\xc0"), files[0].index(b"\xff\xda")
    size, tables = files[0][frame + 4 : frame + 9], files[0][frame + 13 : scan]
    colours = b"".join(bytes([k + 1, 0x11, 0]) for k in range(3))
    scans = (b"\xff\xda\0\x08\x01" + bytes([k + 1]) + file[scan + 6 : -2] for k, file in enumerate(files))
    return files[0][:frame] + b"\xff\xc0\0\x11" + size + b"\x03" + colours + tables + b"".join(scans) + b"\xff\xd9"
