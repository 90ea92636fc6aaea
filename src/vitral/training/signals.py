"""Ctrl-C and SIGTERM: the first asks the run to save and stop, the second stops at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ECHO = 1.0  # seconds: `timeout` and schedulers send one signal to a process and again to its group


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a stop was asked for; the handlers from before are put back afterwards."""
    asked = threading.Event()
    first = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not asked.is_set():
            first = time.monotonic()
            asked.set()
        elif time.monotonic() - first > _ECHO:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # a notebook's or a server's thread has no signals
        yield asked.is_set
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
