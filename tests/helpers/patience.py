"""Waiting for what another process or thread does, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for a condition; the limit only ends a test that would hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} seconds"
        time.sleep(0.01)
