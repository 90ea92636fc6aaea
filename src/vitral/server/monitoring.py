"""What a server tells about itself: structured logs, never with the contents of an image, and metrics."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_LOGGER = logging.getLogger("vitral.server")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"event": "message", "text": record.getMessage()}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname.lower(), **fields}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs() -> None:
    """Send our records, and the warnings of uvicorn, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for logger, level in ((_LOGGER, logging.INFO), (logging.getLogger("uvicorn.error"), logging.WARNING)):
        logger.handlers.clear()
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)


def log(event: str, *, level: str = "info", exc_info: bool = False, **fields: Any) -> None:
    """Write an event with its fields."""
    number = logging.getLevelNamesMapping()[level.upper()]
    _LOGGER.log(number, event, extra={"fields": {"event": event, **fields}}, exc_info=exc_info)


class Metrics:
    """Counters and histograms of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "vitral_requests", "Answered requests.", ("path", "method", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            *("vitral_request_seconds", "Seconds from the first byte to the answer.", ("path",)),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._images = Counter(
            *("vitral_images", "Images by result: predicted, unreadable, cancelled or refused.", ("model", "result")),
            registry=self.registry,
        )
        self._decoding = Histogram(
            *("vitral_decode_seconds", "Seconds to decode an image.", ("model",)),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._waiting = Histogram(
            *("vitral_queue_seconds", "Seconds that an image waited for its batch.", ("model",)),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._computing = Histogram(
            *("vitral_batch_seconds", "Seconds to compute a batch.", ("model",)),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._sizes = Histogram(
            *("vitral_batch_size", "Images per batch.", ("model",)), buckets=_BATCHES, registry=self.registry
        )
        self._pending = Gauge(
            "vitral_pending_images", "Images accepted and not yet answered.", ("model",), registry=self.registry
        )
        self._loads = Counter(
            "vitral_model_loads", "Loads of a model by result.", ("model", "result"), registry=self.registry
        )

    def count_request(self, path: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(path, method, status).inc()
        self._seconds.labels(path).observe(seconds)

    def count_images(self, model: str, result: str, count: int = 1) -> None:
        self._images.labels(model, result).inc(count)

    def count_load(self, model: str, result: str) -> None:
        self._loads.labels(model, result).inc()

    def observe_decoding(self, model: str, seconds: float) -> None:
        self._decoding.labels(model).observe(seconds)

    def observe_batch(self, model: str, arrived: Sequence[float], started: float) -> None:
        """Record a batch that has just been computed; times are of `time.monotonic`."""
        self._computing.labels(model).observe(time.monotonic() - started)
        self._sizes.labels(model).observe(len(arrived))
        for moment in arrived:
            self._waiting.labels(model).observe(started - moment)

    def watch_pending(self, model: str, count: Callable[[], int]) -> None:
        self._pending.labels(model).set_function(count)

    def images(self) -> int:
        """Images predicted so far."""
        samples = [sample for metric in self._images.collect() for sample in metric.samples]
        return round(sum(s.value for s in samples if s.name.endswith("_total") and s.labels["result"] == "predicted"))

    def requests(self) -> int:
        """Requests answered so far."""
        samples = [sample for metric in self._requests.collect() for sample in metric.samples]
        return round(sum(sample.value for sample in samples if sample.name.endswith("_total")))

    def text(self) -> bytes:
        """The exposition of everything."""
        return generate_latest(self.registry)
