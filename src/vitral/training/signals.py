"""Ctrl-C and SIGTERM: the first asks the run to save and stop, the second stops at once; before the first step of a run
there is nothing to save, and the first stops at once."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ECHO = 1.0  # seconds: `timeout` and schedulers send one signal to a process and again to its group


class StopRequests:
    """Whether a stop was asked for. A run asks after each of its steps, and until it has done so signals end it."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.heard = False
        self._tell = tell
        self._told = threading.Event()
        self._stepping = False
        self._first = 0.0

    def __call__(self) -> bool:
        self._stepping = True
        return self.heard

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if not self.heard:
            self.heard, self._first = True, time.monotonic()
            if not self._stepping:
                raise KeyboardInterrupt
            # Whoever tells it may need a lock that the code under this handler holds; threading.Thread takes one, too.
            _thread.start_new_thread(self._telling, ())
        elif time.monotonic() - self._first > _ECHO:
            raise KeyboardInterrupt

    def _telling(self) -> None:
        try:
            self._tell()
        finally:
            self._told.set()

    def wait_until_told(self) -> None:
        """So that this is not told after the end of the run."""
        if self.heard and self._stepping:
            self._told.wait(1.0)


@contextmanager
def stop_requests(tell: Callable[[], None] = lambda: None) -> Iterator[StopRequests]:
    """Yields who hears the signals; the handlers from before are put back afterwards.

    `tell` is called at once, in a thread of its own, when the run is asked to stop after its step.
    """
    requests = StopRequests(tell)
    if threading.current_thread() is not threading.main_thread():  # a notebook's or a server's thread has no signals
        yield requests
        return
    before = {number: signal.signal(number, requests.hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        requests.wait_until_told()
