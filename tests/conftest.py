"""What every test shares: no network, one thread a worker, repeatable examples, and the assets where they exist."""

from __future__ import annotations

import os
import socket
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read when the libraries are first imported, hence not in a fixture; programs that tests start inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

LOCAL = ("localhost", "127.0.0.1", "::1", "")
KEPT: list[object] = []  # torch forgets a schema once its library object is collected


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of released weights, golden numbers and pictures."""
    folder = os.environ.get("VITRAL_ASSETS")
    if not folder:
        pytest.skip("needs assets: set VITRAL_ASSETS to the folder that holds golden/ and data/")
    path = Path(folder)
    assert path.is_dir(), f"VITRAL_ASSETS={folder} is not a folder"
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any address but this machine's own raises."""
    real = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    look_up = socket.getaddrinfo

    def refuse(host: object) -> None:
        text = host.decode() if isinstance(host, bytes) else host
        if text is not None and text not in LOCAL:
            raise RuntimeError(f"a test tried to reach {text}: tests run without a network")

    def guard(name: str) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse(address[0])
            return real[name](self, address)

        return call

    def guarded_look_up(host: object, *rest: Any, **options: Any) -> Any:
        refuse(host)
        return look_up(host, *rest, **options)  # type: ignore[arg-type]

    for name in real:
        monkeypatch.setattr(socket.socket, name, guard(name))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


class TorchvisionRepair:
    """Completes torchvision at its first import, where its compiled operators do not load beside this build of torch.

    The torchvision of PyPI is built for CUDA torch, and then even `import timm` fails. Only the schemas are declared:
    the oracles call none of these operators. An import hook, so that tests without torchvision never import torch.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            found = PathFinder.find_spec(name)
            if found is not None and found.origin is not None and not _operators_load(Path(found.origin).parent):
                _declare_operators()
        return None


def _operators_load(package: Path) -> bool:
    import torch

    try:
        for library in sorted([*package.glob("_C*.so"), *package.glob("_C*.pyd")]):
            torch.ops.load_library(library)
    except (ImportError, OSError):
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _declare_operators() -> None:
    import torch

    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(f"nms{boxes}")
    library.define(f"qnms{boxes}")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    KEPT.append(library)


sys.meta_path.insert(0, TorchvisionRepair())  # type: ignore[arg-type]
