"""Where to compute."""

from __future__ import annotations

import os

import torch

from vitral.errors import UserError


def default_device() -> torch.device:
    """This process's GPU, Apple's, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_device(name: str) -> str:
    """Where to compute: on the device named, else on the best one there is."""
    check_device(name)
    return name or str(default_device())


def check_device(name: str) -> None:
    """Refuse what is not a device of this machine; an empty name leaves the choice to us."""
    if not name:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'"{name}" is not a device: use cpu, cuda, cuda:1 or mps, or leave it out.')
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[device.type]
    if (device.index or 0) >= there:
        raise UserError(f'this machine has no device "{name}": leave it out, and the best one there is will be used.')
