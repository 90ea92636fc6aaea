"""Shared by all tests: no network, one thread per worker, repeatable examples, golden files and optional assets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import goldens
import numpy as np
import pytest
from hypothesis import settings
from repair import sitecustomize  # noqa: F401  torchvision becomes importable

if TYPE_CHECKING:
    from journeys import Command

# Read when the libraries are first imported, hence not in a fixture; programs that tests start inherit all of it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONFAULTHANDLER"] = "1"  # a program that aborts names the place, and leaves a core file
if sys.platform != "win32":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU, slowly
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

LOCAL = ("localhost", "127.0.0.1", "::1", "")


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of released weights, photographs and further golden files."""
    folder = os.environ.get("VITRAL_ASSETS")
    if not folder:
        pytest.skip("needs assets: set VITRAL_ASSETS to the folder that holds golden/ and data/")
    path = Path(folder)
    assert path.is_dir(), f"VITRAL_ASSETS={folder} is not a folder"
    return path


@pytest.fixture(scope="session")
def golden_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a golden file (outputs of Google's code) by its name: from tests/golden, else from the assets."""
    folder = tmp_path_factory.mktemp("golden")

    def path_of(name: str) -> Path:
        packed = (goldens.FOLDER / name).with_suffix(".xz")
        if (goldens.FOLDER / name).is_file():
            return goldens.FOLDER / name
        if not packed.is_file():
            return request.getfixturevalue("assets") / "golden" / name
        if not (folder / name).exists():
            np.savez(folder / name, **goldens.unpack(packed.read_bytes()))  # type: ignore[arg-type]
        return folder / name

    return path_of


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """`vitral` as a function, with a cache of its own."""
    from journeys import Command  # not above: it imports torch, which reads the environment that is set there

    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    return Command(monkeypatch, capsys)


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
