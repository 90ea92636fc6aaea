"""A device as a person names it."""

from __future__ import annotations

import torch

from vitral.errors import UserError
from vitral.models.device import default_device


def place_of(name: str) -> str:
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
