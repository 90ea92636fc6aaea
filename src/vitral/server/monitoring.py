"""What a server tells about itself: structured logs, never with the contents of an image, and metrics."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

_LOGGER = logging.getLogger("vitral.server")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LIVE = "gauge_livesum_"  # the file of a worker's gauges, before its number; it is removed when the worker ends
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"event": "message", "text": record.getMessage()}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "pid": record.process,
            **fields,
        }
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

    def __init__(self, shared: str = "") -> None:
        """Make them; workers write theirs into a `shared` folder, from which each of them reads the sums."""
        self.registry = self._exposed = CollectorRegistry()
        if shared:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed, shared)
            self._exposed.register(_WorkerProcesses(shared))
        else:
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
            *("vitral_pending_images", "Images accepted and not yet answered.", ("model",)),
            registry=self.registry,
            multiprocess_mode="livesum",
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

    def set_pending(self, model: str, count: int) -> None:
        self._pending.labels(model).set(count)

    def totals(self) -> tuple[int, int]:
        """Requests answered and images predicted so far, by this process."""
        return _totals([*self._requests.collect(), *self._images.collect()])

    def text(self) -> bytes:
        """The exposition of everything."""
        return generate_latest(self._exposed)


class _WorkerProcesses(Collector):
    """Memory, CPU time and open files of all workers together."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for path in self._folder.glob(f"{_LIVE}*.db"):
            pid = path.stem.removeprefix(_LIVE)
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():
                if metric.name not in metrics:
                    metrics[metric.name] = metric
                else:
                    first = metrics[metric.name].samples
                    merge = min if metric.name == "process_start_time_seconds" else sum
                    pairs = zip(first, metric.samples, strict=True)
                    metrics[metric.name].samples = [s._replace(value=merge((s.value, t.value))) for s, t in pairs]
        yield from metrics.values()


def forget_worker(folder: str, pid: int) -> None:
    """Leave a process that has ended out of what is counted now; what it has counted stays."""
    mark_process_dead(pid, folder)


def worker_totals(folder: str) -> tuple[int, int]:
    """Requests answered and images predicted by all workers that share their metrics in a folder."""
    return _totals(list(MultiProcessCollector(None, folder).collect()))


def _totals(metrics: Iterable[Metric]) -> tuple[int, int]:
    samples = [sample for metric in metrics for sample in metric.samples]
    requests = sum(s.value for s in samples if s.name == "vitral_requests_total")
    images = sum(s.value for s in samples if s.name == "vitral_images_total" and s.labels["result"] == "predicted")
    return round(requests), round(images)
