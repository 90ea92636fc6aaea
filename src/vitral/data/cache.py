"""Where what was computed once is kept, such as the indexes of shards and the features of images."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """In $VITRAL_CACHE where it is set, else in the user's cache folder; each kind has a folder of its own."""
    stated = os.environ.get("VITRAL_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitral"
    return (Path(stated).expanduser() if stated else usual) / kind
