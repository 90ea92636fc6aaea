"""Signals that ask a run to stop.

Ctrl-C and SIGTERM: the first requests a stop after the current step, the second ends the process at once. Before the
first step of a run there is nothing to save, and the first signal ends it at once.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_REPEATED = 1.0  # seconds: `timeout` and schedulers send one signal to a process and again to its group


class StopRequests:
    """Whether a stop was requested. The loop asks after each step; until it has done so, signals end the process."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.requested = False
        self._notify = notify
        self._notified = threading.Event()
        self._stepping = False
        self._requested_at = 0.0

    def __call__(self) -> bool:
        self._stepping = True
        return self.requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self.requested:
            self.requested, self._requested_at = True, time.monotonic()
            if not self._stepping:
                raise KeyboardInterrupt
            # The display may need a lock that the interrupted code holds; threading.Thread takes one, too.
            _thread.start_new_thread(self._notify_user, ())
        elif time.monotonic() - self._requested_at > _REPEATED:
            raise KeyboardInterrupt

    def _notify_user(self) -> None:
        try:
            self._notify()
        finally:
            self._notified.set()

    def wait_until_notified(self) -> None:
        """Wait, so that the message does not come after the end of the run."""
        if self.requested and self._stepping:
            self._notified.wait(10.0)  # a display that is stuck must not keep the program


@contextmanager
def stop_requests(notify: Callable[[], None] = lambda: None) -> Iterator[StopRequests]:
    """Handle signals while the context lasts; the earlier handlers are restored afterwards.

    Args:
        notify: called at once, in a thread of its own, when the run is asked to stop after its step.
    """
    requests = StopRequests(notify)
    if threading.current_thread() is not threading.main_thread():  # a notebook's or a server's thread gets no signals
        yield requests
        return
    before = {number: signal.signal(number, requests.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        requests.wait_until_notified()
