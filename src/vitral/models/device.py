"""The device to compute on."""

from __future__ import annotations

import os

import torch

from vitral.errors import UserError


def default_device() -> torch.device:
    """The GPU of this process (by LOCAL_RANK), else Apple's (MPS), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_device(name: str) -> str:
    """The name of the device to compute on.

    Args:
        name: "cpu", "cuda", "cuda:1" or "mps"; "" for `default_device()`.

    Raises:
        UserError: not a device, or not present on this machine.
    """
    check_device(name)
    return name or str(default_device())


def check_device(name: str) -> None:
    """Raise UserError unless `name` is a device of this machine; "" stands for the default and always passes."""
    if not name:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'"{name}" is not a device: use cpu, cuda, cuda:1 or mps, or leave it out.')
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts[device.type]:
        raise UserError(f'this machine has no device "{name}": leave it out to use the best available device.')
