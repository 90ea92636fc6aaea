"""Recognise a weight file by its first bytes, never by its suffix, and name files and folders of other programs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Literal

from vitral.errors import UserError

Container = Literal["npz", "safetensors", "pickle"]

_ARCHIVES = (b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c", b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd", b"Rar!")
_ONNX, _KERAS, _FLAX = "an ONNX program", "an HDF5 file (weights of Keras)", "a msgpack file (weights of Flax)"
_GGUF, _EXPORTED = "a GGUF file (quantised weights of llama.cpp)", "a program of torch.export"
# Files of programs and of other frameworks, by their first bytes.
_OTHER_FILES = (
    (rb"GGUF", _GGUF),
    (rb"\x08.\x12.(pytorch|tf2onnx|onnx|skl2onnx|keras2onnx)", _ONNX),
    (rb"....TFL3", "a TensorFlow Lite program"),
    (rb"\x89HDF", _KERAS),
    (rb"\x93NUMPY", "one NumPy array"),
    (rb"([\x81-\x8f]|\xde..|\xdf....)[\xa1-\xbf\xd9][ -~]", _FLAX),  # a map whose first key is a text
)
# By a member of a zip archive, and by a file of a folder.
_OTHER_MEMBERS = (
    (r"(.*/)?archive_format|(.*/)?models/\w+\.json", _EXPORTED),
    (r"model\.weights\.h5", "a model of Keras"),
)
_DISTRIBUTED = (
    "a distributed checkpoint of PyTorch: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER "
    "weights.pth` makes one file of it"
)
_OTHER_FOLDERS = (
    (r"\.metadata|.*\.distcp", _DISTRIBUTED),
    (r"saved_model\.pb", "a SavedModel of TensorFlow, which is not supported"),
    (r"_METADATA|_CHECKPOINT_METADATA", "a checkpoint of Orbax, which is not supported: save its arrays as an npz"),
    (r".*\.msgpack", f"{_FLAX}, which is not supported: open it with transformers 4, from_flax=True, and save it"),
    (r"tf_model\.h5", f"{_KERAS}, which is not supported: open it with transformers 4, from_tf=True, and save it"),
    (r".*\.(h5|keras)", f"{_KERAS}, which is not supported"),
    (r".*\.gguf", f"{_GGUF}, which is not supported"),
    (r".*\.onnx", f"{_ONNX}: name the weights that it was exported from"),
)


def recognise(path: Path) -> Container:
    """What a weight file is; UserError for any other file, by what it is."""
    with path.open("rb") as stream:
        head = stream.read(512)
    if not head:
        raise UserError(f"{path} is empty: download or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its repository.")
    if path.suffix == ".distcp":  # looks like a damaged zip archive
        raise UserError(f"{path} is a part of {_DISTRIBUTED}.")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _recognise_zip(path)
    for pattern, what in _OTHER_FILES:
        if re.match(pattern, head, re.DOTALL):
            raise UserError(_unsupported(path, what))
    if head.startswith(_ARCHIVES) or head[257:262] == b"ustar":
        raise UserError(f"{path} is a compressed archive: unpack it and name the weight file inside.")
    if not re.search(rb"[\x00-\x08\x0e-\x1f]", head):
        raise UserError(f"{path} is a text or web page, not weights (a failed download?): download it again.")
    if head[8:9] == b"{":
        return "safetensors"
    if head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    raise UserError(f"{path} is not a weight file (npz, safetensors or PyTorch): check the path or download it again.")


def _unsupported(path: Path, what: str) -> str:
    return f"{path} is {what}, which is not supported: load the checkpoint that it was made from."


def _recognise_zip(path: Path) -> Container:
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
    pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    for pattern, what in _OTHER_MEMBERS if not pickles else ():
        if any(re.fullmatch(pattern, name) for name in members):
            raise UserError(_unsupported(path, what))
    if pickles:
        # The source code in a TorchScript program is compressed; its tensors are not.
        folder = pickles[0].removesuffix("data.pkl")
        tensors = [member for name, member in members.items() if name.startswith((pickles[0], f"{folder}data/"))]
        if any(member.compress_type != zipfile.ZIP_STORED for member in tensors):
            raise UserError(f"{path} is a PyTorch file that was compressed afterwards: use the file as it was saved.")
        return "pickle"
    if any(name.endswith(".npy") for name in members) or not members:
        return "npz"
    raise UserError(f"{path} is a zip archive without arrays: unpack it and name the weight file inside.")


def other_folder(source: Path) -> str | None:
    """A sentence about a folder of another program; None if that is not known."""
    names = [path.name for path in source.iterdir() if path.is_file()]
    for pattern, what in _OTHER_FOLDERS:
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            return f"the folder {source} holds {what} ({found})."
    return None
