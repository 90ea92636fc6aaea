"""The queue of a model, and the threads that compute its batches.

Where batches gain time (on a GPU), images of different requests are computed together, and none waits longer than a
stated bound. A thread that is free takes what is waiting. If that is less than a full batch it waits for more, but only
until the oldest image has waited `max_wait`; a busy server therefore never waits, since the queue fills while it
computes. On a CPU batches gain almost nothing, and each of their images waits for all: there images are computed one by
one until a full batch waits for every thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from vitral.server.monitoring import Metrics
from vitral.server.runtime import Runtime, cpu_threads


@dataclass(frozen=True)
class Answer:
    """What the model says about one image."""

    probabilities: np.ndarray  # (classes,) float32
    ranking: np.ndarray  # (classes,)
    attention: np.ndarray | None  # (rows, columns)


@dataclass(frozen=True)
class QueuedImage:
    """An image that waits for its batch."""

    pixels: np.ndarray
    attention: bool
    runtime: Runtime  # that it was decoded for: a model may be reloaded meanwhile
    future: Future[Answer] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    def goes_with(self, other: QueuedImage) -> bool:
        """Whether both can be computed in one batch."""
        return self.runtime is other.runtime and self.attention == other.attention


class Batcher:
    """The queue of one model and the threads that compute its batches."""

    def __init__(self, name: str, runners: int, metrics: Metrics, *, max_batch: int, max_wait: float) -> None:
        """Start the threads.

        Args:
            name: of the model.
            runners: of its runtimes, one thread for each.
            metrics: where batches are counted.
            max_batch: images per batch at most.
            max_wait: seconds that an image waits at most for its batch to fill.
        """
        self.name, self.metrics = name, metrics
        self.max_batch, self.max_wait = max_batch, max_wait
        self._queue: deque[QueuedImage] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(runners)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, runtime: Runtime, pixels: np.ndarray, attention: bool) -> Future[Answer]:
        """Queue one image: uint8 (height, width, channels), as the runtime takes it."""
        image = QueuedImage(pixels, attention, runtime)
        with self._changed:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            self._queue.append(image)
            # A thread that waits for a batch to fill need not wake for each of its images.
            if not runtime.gains_by_batch or len(self._queue) == 1 or len(self._queue) >= self.max_batch:
                self._changed.notify()
        return image.future

    def close(self) -> None:
        """Compute what is queued, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        torch.set_num_threads(cpu_threads()[1])  # of this thread alone
        while batch := self._next_batch():
            live = [image for image in batch if image.future.set_running_or_notify_cancel()]
            if live:
                self._compute(index, live)

    def _next_batch(self) -> list[QueuedImage]:
        """The next images, oldest first and alike in whether attention is needed; none when closed."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                left = self._queue[0].arrived + self.max_wait - time.monotonic()
                full = not self._queue[0].runtime.gains_by_batch or len(self._queue) >= self.max_batch
                if full or left <= 0 or self._closing:
                    return self._taken()
                self._changed.wait(left)

    def _taken(self) -> list[QueuedImage]:
        first = self._queue[0]
        most = self.max_batch
        if not first.runtime.gains_by_batch and len(self._queue) < self.max_batch * len(self._threads):
            most = 1
        batch: list[QueuedImage] = []
        while self._queue and len(batch) < most and self._queue[0].goes_with(first):
            batch.append(self._queue.popleft())
        if self._queue:
            self._changed.notify()
        return batch

    def _compute(self, index: int, batch: Sequence[QueuedImage]) -> None:
        started = time.monotonic()
        try:
            outputs = batch[0].runtime.runners[index](np.stack([image.pixels for image in batch]), batch[0].attention)
        except Exception as error:
            for image in batch:
                image.future.set_exception(error)
            return
        self.metrics.observe_batch(self.name, [image.arrived for image in batch], started)
        for row, image in enumerate(batch):
            shown = None if outputs.attention is None else outputs.attention[row]
            image.future.set_result(Answer(outputs.probabilities[row], outputs.ranking[row], shown))
