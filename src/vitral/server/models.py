"""The models of a server: loaded once, reloaded without a pause, each with a queue of limited length."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vitral.data.images import ImageError
from vitral.data.loader import cores
from vitral.errors import UserError
from vitral.server.batching import Answer, Batcher
from vitral.server.logs import log
from vitral.server.metrics import Metrics
from vitral.server.runtime import Runtime, ServedImage


@dataclass(frozen=True)
class Settings:
    """How a server behaves; the options of `vitral serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8
    max_wait: float = 0.002  # seconds
    max_queue: int = 256  # images per model
    max_body: int = 16_000_000  # bytes
    timeout: float = 30.0  # seconds
    token: str = ""


class QueueFull(Exception):
    """A model has as many images waiting as it may have."""


@dataclass(frozen=True)
class Prediction:
    """An image's answer, and the part of the image that the model saw."""

    answer: Answer
    region: tuple[float, float, float, float]


class ServedModel:
    """One model under its name."""

    def __init__(self, name: str, load: Callable[[], Runtime], settings: Settings, metrics: Metrics) -> None:
        """Load the model and start its threads.

        Args:
            name: what requests call it.
            load: loads it from its source, again whenever it is called.
            settings: limits of batches and of the queue.
            metrics: where images are counted.
        """
        self.name, self._load, self._settings, self._metrics = name, load, settings, metrics
        self.pending = 0  # images accepted and not yet answered
        self.version = 0
        self._reloading = threading.Lock()
        self.runtime = self._loaded()
        self.batcher = Batcher(
            *(name, len(self.runtime.runners), metrics), max_batch=settings.max_batch, max_wait=settings.max_wait
        )
        metrics.watch_pending(name, lambda: self.pending)

    def _loaded(self) -> Runtime:
        started = time.monotonic()
        runtime = self._load()
        runtime.warm_up()
        self.version += 1
        self._metrics.count_load(self.name, "loaded")
        log("model_loaded", model=self.name, version=self.version, seconds=round(time.monotonic() - started, 3))
        return runtime

    def reload(self) -> None:
        """Load the source again and use it from the next request on; where that fails the old model stays.

        Raises:
            UserError: the source cannot be loaded now.
        """
        with self._reloading:
            try:
                self.runtime = self._loaded()
            except Exception as error:  # whatever a broken file causes must not stop the server
                self._metrics.count_load(self.name, "failed")
                log("reload_failed", level="error", model=self.name, error=str(error))
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{self.name} cannot be loaded ({type(error).__name__}): see the log.") from error
            finally:
                _release_memory()

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Take places in the queue for the images of a request.

        Raises:
            QueueFull: there are not as many left.
        """
        if self.pending + count > self._settings.max_queue:
            self._metrics.count_images(self.name, "refused", count)
            raise QueueFull
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    async def predict(
        self, images: Sequence[bytes], attention: bool, pool: ThreadPoolExecutor
    ) -> list[Prediction | ImageError]:
        """Decode images in the pool and compute them in batches; one result per image, in order."""
        runtime = self.runtime
        return await asyncio.gather(*(self._predicted(runtime, data, attention, pool) for data in images))

    async def predict_pixels(self, pixels: np.ndarray, attention: bool) -> list[Answer]:
        """uint8 (batch, height, width, channels), resized and cropped already -> one answer per image."""
        runtime = self.runtime
        return await asyncio.gather(*(self._answer(runtime, image, attention) for image in pixels))

    async def _predicted(
        self, runtime: Runtime, data: bytes, attention: bool, pool: ThreadPoolExecutor
    ) -> Prediction | ImageError:
        try:
            image = await asyncio.get_running_loop().run_in_executor(pool, self._decoded, runtime, data)
        except ImageError as error:
            self._metrics.count_images(self.name, "unreadable")
            return error
        return Prediction(await self._answer(runtime, image.pixels, attention), image.region)

    def _decoded(self, runtime: Runtime, data: bytes) -> ServedImage:
        started = time.monotonic()
        image = runtime.decode(data)
        self._metrics.observe_decoding(self.name, time.monotonic() - started)
        return image

    async def _answer(self, runtime: Runtime, pixels: np.ndarray, attention: bool) -> Answer:
        try:
            answer = await asyncio.wrap_future(self.batcher.submit(runtime, pixels, attention))
        except asyncio.CancelledError:  # by a client that has gone, or a timeout: the image leaves its queue
            self._metrics.count_images(self.name, "cancelled")
            raise
        self._metrics.count_images(self.name, "predicted")
        return answer


def _release_memory() -> None:
    """Give back the memory of a model that was replaced: the C library would keep it for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def decoding_pool() -> ThreadPoolExecutor:
    """A thread per core: decoders release Python's lock, so processes would only add copies of the bytes."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode", initializer=torch.set_num_threads, initargs=(1,))
