"""Hub names: the real huggingface_hub, offline, over a cache that the test lays out by hand."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card
from vitral.models.build import build

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3, gelu="erf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; huggingface_hub reads its place at import, so the constant is set too."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def put(cache: Path, repository: str, format: str) -> None:
    """What a download leaves: refs/main names the commit, snapshots/COMMIT holds the files."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    torch.manual_seed(0)
    vitral.save(build(TINY), folder / "snapshots" / COMMIT, Card(TINY), format=format)


@pytest.mark.parametrize(
    "name, repository, format",
    [("hf:google/tiny", "google/tiny", "hf"), ("timm:vit_tiny.test", "timm/vit_tiny.test", "timm")],
)
def test_a_cached_model_loads_without_a_network(cache: Path, name: str, repository: str, format: str) -> None:
    put(cache, repository, format)
    model, card = vitral.load(name)
    assert (card.source, card.format) == (name, format)
    assert isinstance(model.config, ViTConfig)
    assert model.config.heads == 2
    assert vitral.info(name).format == format


def test_a_revision_is_asked_for(cache: Path) -> None:
    put(cache, "google/tiny", "hf")
    vitral.load(f"hf:google/tiny@{COMMIT}")
    with pytest.raises(vitral.UserError, match="not in the cache"):
        vitral.load("hf:google/tiny@other")


def test_an_old_repository_with_a_pickle_alone(cache: Path) -> None:
    put(cache, "google/old", "hf")
    folder = cache / "models--google--old" / "snapshots" / COMMIT
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    _, card = vitral.load("hf:google/old")
    assert card.format == "hf"


@pytest.mark.parametrize("also", [False, True])
def test_a_repository_of_open_clip(cache: Path, also: bool) -> None:
    """Its files have names of their own; many repositories have those of transformers as well, which are read first."""
    if also:
        put(cache, "laion/tiny", "hf")
    folder = cache / "models--laion--tiny" / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parents[1] / "refs").mkdir(exist_ok=True)
    (folder.parents[1] / "refs" / "main").write_text(COMMIT)
    clip = replace(TINY, pre_norm=True, patch_bias=False, head_bias=False, norm_eps=1e-5, resize="timm")
    vitral.save(build(clip), folder / "open_clip_model.safetensors", format="open_clip")
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
    config = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    model, card = vitral.load("hf:laion/tiny")
    assert card.format == ("hf" if also else "open_clip")
    model, card = vitral.load(folder / "open_clip_model.safetensors")
    assert (card.format, model.config) == ("open_clip", clip)


def test_an_uncached_model_offline_gives_one_sentence(cache: Path) -> None:
    with pytest.raises(vitral.UserError, match=r"hf:google/absent is not in the cache"):
        vitral.load("hf:google/absent")


@pytest.mark.parametrize("name", ["hf:", "hf:nameonly", "hf:a/b/c", "timm:", "hf:a/"])
def test_invalid_hub_names_are_refused(name: str) -> None:
    with pytest.raises(vitral.UserError, match="hub name"):
        vitral.load(name)


def test_a_missing_hub_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def without(name: str, *rest: object, **options: object) -> object:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return honest(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(vitral.UserError, match=r"pip install 'vitral\[hub\]'"):
        vitral.load("hf:google/tiny")


def test_a_path_never_imports_the_hub(tmp_path: Path) -> None:
    """In a process of its own, with sockets taken away: a file is loaded, and huggingface_hub never appears."""
    vitral.save(build(TINY), tmp_path / "a.safetensors", Card(TINY))
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a socket was used')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "import vitral\n"
        f"vitral.load({str(tmp_path / 'a.safetensors')!r})\n"
        "assert 'huggingface_hub' not in sys.modules\n"
    )
    source = Path(vitral.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(source)})
