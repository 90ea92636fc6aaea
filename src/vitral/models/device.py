"""Where to compute."""

from __future__ import annotations

import os

import torch


def default_device() -> torch.device:
    """This process's GPU, Apple's, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
