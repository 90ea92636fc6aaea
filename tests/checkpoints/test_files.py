"""Weight files: bit-exact round trips against NumPy's and safetensors' own readers, and bad files of every kind."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import quiet

from vitral.atomic import atomic_write
from vitral.checkpoints.files import TensorHeader, open_weights, read_tensors, sha256
from vitral.checkpoints.write import write_json, write_npz, write_safetensors
from vitral.errors import UserError

NUMPY_KINDS = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
]


def load(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(open_weights(path))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal names, types, shapes and bits; `==` would miss NaN and the sign of zero."""
    return left.keys() == right.keys() and all(
        (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b)) for a, b in ((left[k], right[k]) for k in left)
    )


@st.composite
def tensors(draw: st.DrawFn, kinds: list[str]) -> dict[str, torch.Tensor]:
    """Random bits (NaN payloads and all) in random types and shapes, 0-d and empty ones too, some transposed."""
    names = draw(st.lists(st.text("abz/._é0", min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
    result = {}
    for name in names:
        kind = getattr(torch, draw(st.sampled_from(kinds)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        count = int(np.prod(shape)) * kind.itemsize
        top = 1 if kind is torch.bool else 255
        raw = torch.tensor(draw(st.lists(st.integers(0, top), min_size=count, max_size=count)), dtype=torch.uint8)
        tensor = raw.view(kind).reshape(shape)
        result[name] = tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor
    return result


@settings(max_examples=40)
@given(tensors([*NUMPY_KINDS, "bfloat16"]))
def test_npz_round_trip_is_bit_exact(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    write_npz(path, values)
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == set(values)
        for name, tensor in values.items():
            array = archive[name]
            assert array.shape == tuple(tensor.shape)
            assert array.dtype == ("V2" if tensor.dtype == torch.bfloat16 else str(tensor.dtype)[6:])
            assert array.tobytes() == bits(tensor)
    assert same(load(path), values)


@settings(max_examples=40)
@given(tensors([*NUMPY_KINDS, "bfloat16", "float8_e4m3fn", "float8_e5m2"]))
def test_safetensors_round_trip_is_bit_exact(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    write_safetensors(path, values, {"card": "{}"})
    assert same(safetensors.torch.load_file(path), values)
    assert same(load(path), values)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "card": "{}"} == open_weights(path).metadata
    plain = {name: tensor for name, tensor in values.items() if str(tensor.dtype)[6:] in NUMPY_KINDS}
    write_safetensors(path, plain)
    for name, array in safetensors.numpy.load_file(path).items():
        assert array.tobytes() == bits(plain[name])


def test_headers_agree_with_the_tensors(tmp_path):
    values = {"a/b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.tensor(4)}
    write_npz(tmp_path / "a.npz", values)
    write_safetensors(tmp_path / "a.safetensors", values)
    torch.save(values, tmp_path / "a.pth")
    torch.save(values, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    names = {"a.npz": "npz", "a.safetensors": "safetensors", "a.pth": "pickle", "old.pth": "pickle"}
    for name, container in names.items():
        file = open_weights(tmp_path / name)
        assert file.headers == {"a/b": TensorHeader((2, 3), "bfloat16"), "c": TensorHeader((), "int64")}
        assert (file.path, file.container) == (tmp_path / name, container)
        assert same(read_tensors(file), values)


def test_the_suffix_does_not_matter(tmp_path):
    write_npz(tmp_path / "weights.safetensors", {"a": torch.ones(1)})
    assert open_weights(tmp_path / "weights.safetensors").container == "npz"


@pytest.mark.parametrize("kind", ["<f4", ">f4", ">i8", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_in_any_byte_and_index_order(tmp_path, kind, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4), kind, order=order)
    np.savez_compressed(tmp_path / "a.npz", a=array, zeros=np.zeros(3_000_000, "f4"))
    values = load(tmp_path / "a.npz")
    assert values["a"].tolist() == array.tolist()
    assert values["a"].is_contiguous()
    assert values["zeros"].count_nonzero() == 0


def test_bfloat16_as_jax_writes_it(tmp_path):
    # The upper half of a float32 is the bfloat16 of the same value.
    halves = (np.array([1.5, -2.0, 3.0], "<f4").view("<u4") >> 16).astype("<u2")
    np.savez(tmp_path / "a.npz", w=halves.view("V2"))
    values = load(tmp_path / "a.npz")
    assert values["w"].dtype == torch.bfloat16
    assert values["w"].tolist() == [1.5, -2.0, 3.0]


GOLDEN = (
    *("bit_r1111_x1", "bv_learn_gap", "bv_learn_map_rep", "bv_learn_tok", "bv_sincos2d_gap_rep", "hybrid3_p1"),
    *("hybrid4_p1", "vit_gap_p8", "vit_gap_rep_p14_drop", "vit_token_p14_224", "vit_token_p16"),
    "vit_token_rep_p16_224",
)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_checkpoints_read_as_numpy_reads_them(golden_file, case):
    path = golden_file(f"{case}.ckpt.npz")
    ours = load(path)
    with np.load(path) as archive:
        assert set(ours) == set(archive.files)
        assert all(np.array_equal(ours[name].numpy(), archive[name]) for name in archive.files)


def test_equal_tensors_make_equal_files_with_ordinary_permissions(tmp_path):
    values = {f"t{i}": torch.full((i,), float(i)) for i in range(9)}
    notes = {str(i): "x" for i in range(9)}
    for turn in ("1", "2"):
        write_npz(tmp_path / f"{turn}.npz", values)
        write_safetensors(tmp_path / f"{turn}.safetensors", values, dict(sorted(notes.items(), reverse=turn == "2")))
        os.utime(tmp_path)
    (tmp_path / "plain").touch()
    for suffix in ("npz", "safetensors"):
        first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        assert sha256(first) == sha256(second) == hashlib.sha256(first.read_bytes()).hexdigest()
        assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    with zipfile.ZipFile(tmp_path / "1.npz") as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_shared_strided_and_trainable_tensors_are_written_in_full(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    values = {"whole": whole, "again": whole, "column": whole[:, 1], "wide": torch.ones(1).expand(5)}
    write_safetensors(tmp_path / "a.safetensors", values | {"learned": torch.nn.Parameter(whole.t())})
    expected = {name: tensor.clone() for name, tensor in values.items()} | {"learned": whole.t()}
    assert same(safetensors.torch.load_file(tmp_path / "a.safetensors"), expected)


def test_safetensors_are_aligned(tmp_path):
    values = {name: torch.ones(3, dtype=getattr(torch, name)) for name in ("bool", "int64", "float16", "float32")}
    write_safetensors(tmp_path / "a.safetensors", values)
    data = (tmp_path / "a.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert all((start + header[name]["data_offsets"][0]) % values[name].itemsize == 0 for name in values)


@pytest.mark.parametrize("write", [write_npz, write_safetensors])
def test_unsupported_dtypes_are_refused_before_writing(tmp_path, write):
    with pytest.raises(UserError, match='"w" as complex64: convert'):
        write(tmp_path / "a", {"w": torch.ones(2, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_headers_of_a_large_file_cost_no_memory(tmp_path):
    count = 3 << 28  # float32: 3 GiB, which the file system stores as a hole
    entry = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    header = json.dumps({"w": entry}).encode()
    with (tmp_path / "big.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 4 * count)
    np.savez(tmp_path / "big.npz", w=np.zeros(1 << 24, "f4"))
    tracemalloc.start()
    assert open_weights(tmp_path / "big.safetensors").headers["w"].shape == (count,)
    assert open_weights(tmp_path / "big.npz").headers["w"].shape == (1 << 24,)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# --- PyTorch files


def w(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([float(value)])}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (w(1), ["w"]),
        ({"state_dict": w(1), "epoch": 3, "optimizer": {"state": {0: w(5)}}}, ["state_dict.w", "optimizer.state.0.w"]),
        ({"model": w(1), "args": argparse.Namespace(lr=0.1), "step": torch.tensor(3)}, ["model.w", "step"]),
        ({"state_dict": w(1), "state_dict_ema": w(2)}, ["state_dict.w", "state_dict_ema.w"]),
        ({"state_dict": w(1), "state_dict_ema": None}, ["state_dict.w"]),
        ({"model": [w(1), {"ema": {"decay": 0.9, "shadow": (w(2),)}}]}, ["model.0.w", "model.1.ema.shadow.0.w"]),
    ],
)
@pytest.mark.parametrize("modern", [True, False])
def test_nested_tensors_have_dotted_names(tmp_path, content, names, modern):
    """Nothing in a file is left out: `wrappers.py` decides which of the tensors are the model."""
    torch.save(content, tmp_path / "a.pth.tar", _use_new_zipfile_serialization=modern)
    file = open_weights(tmp_path / "a.pth.tar")
    assert list(file.headers) == names
    assert file.metadata == {}
    assert float(read_tensors(file)[names[0]]) == 1


def test_two_tensors_of_one_name_are_refused(tmp_path):
    torch.save({"model": w(1), "model.w": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"two tensors that are both called 'model\.w': save"):
        open_weights(tmp_path / "a.pth")


def test_repeated_dicts_do_not_multiply(tmp_path):
    content: dict = w(1)
    for _ in range(60):
        content = {"a": content, "b": content}
    torch.save(content, tmp_path / "a.pth")
    assert len(open_weights(tmp_path / "a.pth").headers) == 1


class Trap:
    """Unpickling it touches a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("modern", [True, False])
def test_code_in_a_pickle_is_reported_and_not_run(tmp_path, modern):
    witness, path = tmp_path / "it-ran", tmp_path / "evil.pth"
    torch.save({"model": w(1), "trap": Trap(witness)}, path, _use_new_zipfile_serialization=modern)
    with pytest.raises(UserError, match=r"evil\.pth has (posix|nt)\.mkdir.*torch\.save\(checkpoint"):
        open_weights(path)
    assert not witness.exists()
    torch.load(path, weights_only=False)
    assert witness.exists()  # the trap works: only our reader stopped it


def test_python_objects_in_a_pickle_are_reported(tmp_path):
    torch.save({"model": w(1), "best": np.float64(0.9)}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"a\.pth has numpy\S*\.scalar.*torch\.save\(checkpoint"):
        open_weights(tmp_path / "a.pth")


def test_recursive_dicts_end(tmp_path):
    loop: dict = {"epoch": 1}
    loop["model"] = loop
    torch.save(loop, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"a\.pth has no named tensors \(but: 'epoch', 'model'\): save"):
        open_weights(tmp_path / "a.pth")


# --- bad files


def npy(header: bytes, data: bytes = b"") -> bytes:
    padded = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + data


def npz(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, end: int, count: int | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - start) // 4 if count is None else count], "data_offsets": [start, end]}


def lying_zip(claim: int) -> bytes:
    """Array header and zip directory both claim `claim` bytes; the file is small."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,)}" % (claim // 4)
    data = npy(header, bytes(4))
    real, size = len(data), len(data) - 4 + claim
    raw = npz(("w.npy", data))
    pair, lie = real.to_bytes(4, "little") * 2, size.to_bytes(4, "little") * 2
    assert raw.count(pair) == 2
    return raw.replace(pair, lie)


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


F4 = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}"
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01" + bytes(600)
SEVEN_ZIP = b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(60)
TWINS = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
BAD = {
    "empty.npz": (b"", "is empty: download or copy"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "page.npz": (b"<!DOCTYPE html>\n<html><body>404 \xe2\x80\x94</body></html>", "download it again"),
    "error.npz": (b'{"error": {"code": 403}}', "download it again"),
    "denied.npz": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "download it again"),
    "words.pth": (b"Entry not found", "download it again"),
    "cat.npz": (JPEG, "not a weight file.*check the path"),
    "a.npz.gz": (gzip.compress(b"x" * 99), "compressed archive: unpack it"),
    "a.7z": (SEVEN_ZIP, "compressed archive: unpack it"),
    "photos.zip": (npz(("cat.jpg", JPEG)), "zip archive without arrays: unpack it"),
    "model.gguf": (b"GGUF\x03" + bytes(60), "GGUF file .* load the checkpoint that it was made from"),
    "model.onnx": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(60), "exported model.*name the weights"),
    "program.pth": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(60), "an ONNX program"),
    "model.tflite": (b"\x1c\0\0\0TFL3" + bytes(60), "a TensorFlow Lite program"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "HDF5 file"),
    "flax_model.msgpack": (b"\x81\xa3vit\x81\xa6layers" + bytes(60), "a msgpack file .weights of Flax."),
    "w.npy": (b"\x93NUMPY\x01\0" + bytes(60), "one NumPy array, which is not supported"),
    "program.pt": (npz(("m/archive_format", b"pt2"), ("m/models/model.json", b"{}")), "a program of torch.export"),
    "model.keras": (npz(("config.json", b"{}"), ("model.weights.h5", b"\x89HDF")), "a model of Keras"),
    "__0_0.distcp": (npz(("data.pkl", b"")), "a part of a distributed checkpoint of PyTorch: `python -m torch.dist"),
    "hollow.npz": (npz(), "has no tensors: choose another"),
    "short.npz": (npz(("w.npy", npy(F4 % b"1", bytes(4))))[:-30], "truncated or damaged: download"),
    "claim.npz": (npz(("w.npy", npy(F4 % b"2500000000", bytes(8)))), r"claims 10,000,000,\d+ bytes.*download it again"),
    # Python 3.12 sees through this one before we do.
    "lie.npz": (
        lying_zip(4_000_000_000),
        r"claims 4,000,000,\d+ bytes.*download it again|truncated or damaged: download",
    ),
    "more.npz": (npz(("w.npy", npy(F4 % b"1", bytes(8)))), "claims .* download it again"),
    "minus.npz": (npz(("w.npy", npy(F4 % b"-1,-1", bytes(4)))), "claims .* download it again"),
    "text.npz": (npz(("w.npy", b"not an array at all")), "truncated or damaged: download"),
    "string.npz": (npz(("w.npy", npy((F4 % b"1").replace(b"<f4", b"<U1"), bytes(4)))), "<U1.*plain numbers only"),
    "objects.npz": (npz(("w.npy", npy((F4 % b"1").replace(b"<f4", b"|O"), bytes(8)))), "Python objects.*plain numbers"),
    "cut.safetensors": (packed({"a": entry(0, 40)}, bytes(39)), "truncated or damaged.*download it again"),
    "long.safetensors": (packed({"a": entry(0, 4)}, bytes(5)), "truncated or damaged.*download it again"),
    "head.safetensors": (
        (10**10).to_bytes(8, "little") + b'{"a":',
        "header of 10,000,000,000 bytes.*download it again",
    ),
    "huge.safetensors": (packed({"a": entry(0, 10**10)}, bytes(4)), r"claims 10,000,000,000.*download it again"),
    "shape.safetensors": (packed({"a": entry(0, 4, 2)}, bytes(4)), "claims a shape.*download it again"),
    "twins.safetensors": (packed(TWINS, bytes(8)), "two header entries.*write it again"),
    "over.safetensors": (packed({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "overlap.*write it again"),
    "hole.safetensors": (packed({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "overlap or leave a gap"),
    "kind.safetensors": (packed({"a": entry(0, 4, 4, "F4")}, bytes(4)), "as 'F4'.*convert it first"),
    "minus.safetensors": (packed({"a": entry(0, 4, -1)}, bytes(4)), "truncated or damaged: download"),
    "json.safetensors": (packed(b'{"a": [1, 2'), "truncated or damaged: download"),
    "deep.safetensors": (packed(b'{"a":' + b"[" * 99999), "truncated or damaged: download"),
    "list.safetensors": (packed(b'{"a": 3}'), "truncated or damaged: download"),
    "short.pth": (saved(w(1))[:-200], "truncated or damaged: download"),
    "new.pth": (b"\x80\x04\x95\x02\0\0\0\0\0\0\0}.", "damaged, or not a plain torch.save file: download it again"),
    "number.pth": (saved(3), r"no named tensors \(but: int\): save"),
    "names.pth": (saved({"net": 1}), r"no named tensors \(but: 'net'\): save"),
    "wide.pth": (saved({"w": torch.ones(1).expand(10**10)}), "claims more of 'w' than the file has: save it again"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_one_sentence(tmp_path, name):
    data, expected = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        load(tmp_path / name)
    sentence = str(caught.value)
    assert name in sentence
    assert re.search(expected, sentence)
    assert "\n" not in sentence
    assert sentence.endswith(".")


def test_two_arrays_of_one_name(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        (tmp_path / "a.npz").write_bytes(npz(("w.npy", npy(F4 % b"1", bytes(4))), ("w.npy", npy(F4 % b"0"))))
    with pytest.raises(UserError, match=r"a\.npz has two arrays of the same name: write it again"):
        open_weights(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wrong_checksum_in_an_npz_is_found(tmp_path, method):
    array = npy(F4 % b"100", bytes(400))
    data, checksum = npz(("w.npy", array), method=method), zlib.crc32(array).to_bytes(4, "little")
    assert data.count(checksum) == 2
    (tmp_path / "a.npz").write_bytes(data.replace(checksum, b"sum?"))
    with pytest.raises(UserError, match=r"a\.npz is truncated or damaged: download"):
        load(tmp_path / "a.npz")


def saved_as(kind: str, path: Path, values: dict[str, torch.Tensor]) -> Path:
    if kind == "npz":
        write_npz(path, values)
    elif kind == "safetensors":
        write_safetensors(path, values)
    else:
        torch.save(values, path, _use_new_zipfile_serialization=kind == "pth")
    return path


@pytest.mark.parametrize("kind", ["npz", "safetensors", "pth", "old"])
def test_a_file_cut_anywhere_is_refused(tmp_path, kind):
    path = saved_as(kind, tmp_path / "whole", {"w": torch.arange(8.0), "b": torch.ones(3)})
    data, cut = path.read_bytes(), tmp_path / "cut"
    for length in range(0, len(data), 7):
        cut.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"/cut .*: .*(again|torch\.save)"):
            load(cut)


@settings(max_examples=150)
@given(st.sampled_from(["npz", "safetensors", "pth", "old"]), st.data())
def test_corrupt_bytes_raise_only_user_errors(tmp_path_factory, kind, data):
    folder = tmp_path_factory.mktemp("bytes")
    path = saved_as(kind, folder / "whole", {"w": torch.arange(8.0), "b": torch.ones(3)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    sentence = refusal(path)
    if sentence is not None:
        assert str(path) in sentence
        assert sentence.isprintable()


def refusal(path):
    """Why a file is not read; None where it is, and then its headers must have told the truth."""
    try:
        file = open_weights(path)
        tensors = read_tensors(file)
    except UserError as error:
        return str(error)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: header.shape for name, header in file.headers.items()
    }
    return None


def test_a_file_changed_between_opening_and_reading(tmp_path):
    write_npz(tmp_path / "a.npz", w(1))
    file = open_weights(tmp_path / "a.npz")
    write_npz(tmp_path / "a.npz", {"w": torch.ones(2)})
    with pytest.raises(UserError, match=r"a\.npz changed while it was being read: try again"):
        read_tensors(file)


ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12"
MAPPED = "unable to mmap 321 bytes from file <a>: Cannot allocate memory (12)"


def failing(error):
    def fail(*values, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("kind", "call", "error"),
    [
        ("npz", "numpy.empty", MemoryError("Unable to allocate 153. MiB")),
        ("safetensors", "safetensors.torch.load_file", MemoryError("Cannot allocate memory (os error 12)")),
        ("safetensors", "safetensors.torch.load_file", RuntimeError(MAPPED)),
        ("pth", "torch.load", RuntimeError(MAPPED)),
        ("old", "torch.load", RuntimeError(ALLOCATOR.format(32))),
        ("old", "torch.load", MemoryError()),
    ],
)
def test_running_out_of_memory_is_not_reported_as_damage(tmp_path, monkeypatch, kind, call, error):
    file = open_weights(saved_as(kind, tmp_path / "a", {"w": torch.arange(8.0)}))
    monkeypatch.setattr(call, failing(error))
    with pytest.raises(MemoryError):
        read_tensors(file)


def test_a_file_that_claims_more_than_it_has_is_damaged(tmp_path, monkeypatch):
    path = saved_as("old", tmp_path / "a", {"w": torch.arange(8.0)})
    monkeypatch.setattr("torch.load", failing(RuntimeError(ALLOCATOR.format(1 << 50))))
    with pytest.raises(UserError, match="truncated or damaged: download"):
        open_weights(path)


# --- folders


@pytest.mark.parametrize(
    "name, says",
    [
        ("vit_tiny_patch16_224", "or write timm:vit_tiny_patch16_224 for a model"),
        ("vit_tiny_patch16_224.augreg_in1k", "or write timm:vit_tiny_patch16_224.augreg_in1k for a model"),
        ("vit_tiny_patch16_224.safetensors", "check the path.$"),
        ("google/vit-base-patch16-224", "or write hf:google/vit-base-patch16-224 for a model"),
    ],
)
def test_names_of_the_hub_need_a_prefix(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        open_weights(Path(name))


def test_a_missing_path_and_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"gone\.npz does not exist: check the path"):
        open_weights(tmp_path / "gone.npz")
    with pytest.raises(UserError, match=f"{tmp_path.name} contains no weight file.*check the path"):
        open_weights(tmp_path)


def test_an_unfinished_run_is_named_and_not_a_folder_in_it(tmp_path):
    for name in ("recipe.toml", "data.json", "best.safetensors", "pixels/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    says = f"the run in .*{tmp_path.name} is not finished: resume it with the same `vitral train` command and its --out"
    with pytest.raises(UserError, match=says):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".metadata", "a distributed checkpoint of PyTorch: `python -m torch.distributed.checkpoint.format_utils"),
        ("saved_model.pb", "a SavedModel of TensorFlow"),
        ("flax_model.msgpack", "weights of Flax"),
        ("tf_model.h5", "weights of Keras"),
        ("model.onnx", "an ONNX program"),
        ("model.gguf", "a GGUF file"),
    ],
)
def test_a_folder_of_another_program_is_named(name, words, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=re.escape(words)):
        open_weights(tmp_path)


def test_a_folder_with_checkpoints_in_folders_names_one(tmp_path):
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_npz(tmp_path / f"checkpoint-{step}" / "a.npz", w(1))
    with pytest.raises(UserError, match=r"name one of the folders in it, such as .*checkpoint-1000"):
        open_weights(tmp_path)


def test_a_torchscript_program_is_named(tmp_path):
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(9)))
    program: Any = torch.jit.trace(module, torch.ones(1, 4))
    program.save(tmp_path / "a.pt")
    with pytest.raises(UserError, match="a TorchScript program, not weights"):
        open_weights(tmp_path / "a.pt")


def test_quantised_tensors_are_not_called_damage(tmp_path):
    with quiet():
        torch.save({"weight": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="has quantised tensors, which are not supported: save the weights from before"):
        open_weights(tmp_path / "model.pth")


def test_a_whole_model_is_refused_with_the_way_to_its_tensors(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"linear\.Linear.* or checkpoint\.state_dict\(\) of a whole model"):
        open_weights(tmp_path / "a.pt")


def test_a_folder_with_one_or_several_files(tmp_path):
    write_npz(tmp_path / "a.npz", w(1))
    assert open_weights(tmp_path).path == tmp_path / "a.npz"
    torch.save(w(1), tmp_path / "b.pth")
    with pytest.raises(UserError, match=r"several weight files: choose one of a\.npz, b\.pth"):
        open_weights(tmp_path)
    torch.save(w(2), tmp_path / "pytorch_model.bin")
    assert open_weights(tmp_path).path.name == "pytorch_model.bin"
    write_safetensors(tmp_path / "model.safetensors", w(3))
    assert same(load(tmp_path), w(3))


def test_json_files_next_to_the_weights_are_read(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", w(1))
    file = open_weights(tmp_path)
    assert (file.config, file.preprocessor) == (None, None)
    write_json(tmp_path / "config.json", {"hidden_size": 64, "labels": ["café"]})
    (tmp_path / "preprocessor_config.json").write_text("[1, 2]")
    file = open_weights(tmp_path / "model.safetensors")
    assert (file.config, file.preprocessor) == ({"hidden_size": 64, "labels": ["café"]}, None)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_sharded_set_is_the_union_of_its_shards(tmp_path, kind):
    parts = {f"part-1.{kind}": {"a": torch.ones(2)}, f"part-2.{kind}": {"b": torch.zeros(3)}}
    for name, values in parts.items():
        save = safetensors.torch.save_file if kind == "safetensors" else torch.save
        save(values, tmp_path / name)
    index = tmp_path / ("model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json")
    write_json(index, {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}})
    file = open_weights(tmp_path)
    assert (file.path, file.container) == (index, "safetensors" if kind == "safetensors" else "pickle")
    assert same(load(index), {"a": torch.ones(2), "b": torch.zeros(3)})
    (tmp_path / f"part-2.{kind}").unlink()
    with pytest.raises(UserError, match=rf"needs the shard part-2\.{kind}, which is missing: download"):
        open_weights(tmp_path)


def test_bad_indexes(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    write_safetensors(tmp_path / "one", w(1))
    shutil.copy(tmp_path / "one", tmp_path / "two")
    for text, expected in (
        ("[]", "not an index of shards.*download it again"),
        ('{"weight_map": {"a": 3}}', "not an index of shards.*download it again"),
        ('{"weight_map": {"a": "../other/one"}}', "outside its folder.*download it again"),
        ('{"weight_map": {"a": "one", "b": "two"}}', "both have 'w': download"),
    ):
        index.write_text(text)
        with pytest.raises(UserError, match=expected):
            open_weights(tmp_path)


# --- written aside


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_crash_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(error), atomic_write(path) as aside:
        aside.write_text("half")
        assert aside.parent == tmp_path
        raise error
    with pytest.raises(error), atomic_write(tmp_path / "new" / "deep" / "run", folder=True) as aside:
        (aside / "x").write_text("half")
        raise error
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))
    assert path.read_text() == "1\n"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_first_error_is_raised_although_others_use_the_folder(tmp_path):
    with pytest.raises(KeyError, match="real"), atomic_write(tmp_path / "new" / "deep" / "a.json"):
        (tmp_path / "new" / "theirs.txt").touch()
        raise KeyError("real")
    assert os.listdir(tmp_path / "new") == ["theirs.txt"]


@given(st.binary().map(os.fsdecode))
def test_json_holds_any_name_of_a_file(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, {"é": name})
    content = path.read_bytes().decode()
    assert "é" in content
    assert json.loads(content) == {"é": name}


def test_bytes_are_flushed_before_the_rename(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *values, name=name, real=real: (calls.append(name), real(*values)))
    write_json(tmp_path / "a.json", 1)
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_is_written_atomically(tmp_path):
    target = tmp_path / "runs" / "one"
    with atomic_write(target, folder=True) as aside:
        write_json(aside / "deep" / "a.json", {"b": 1})
        assert not target.exists()
    assert json.loads((target / "deep" / "a.json").read_text()) == {"b": 1}
    assert os.listdir(tmp_path / "runs") == ["one"]
    with (
        pytest.raises(UserError, match="one exists and is not empty: choose another"),
        atomic_write(target, folder=True),
    ):
        pytest.fail("the block must not run")
    with pytest.raises(UserError, match="one is a folder: name a file inside"), atomic_write(target):
        pytest.fail("the block must not run")
    (tmp_path / "bare").mkdir()
    with atomic_write(tmp_path / "bare", folder=True) as aside:
        (aside / "x").touch()
    assert os.listdir(tmp_path / "bare") == ["x"]
