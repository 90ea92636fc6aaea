"""`serve`: models behind HTTP."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitral.api.checkpoints import load_source
from vitral.api.inference import check_head, named_card, resolve_preprocessing
from vitral.data.loader import cores
from vitral.display import SummaryRepr
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.export.exported import is_exported
from vitral.models.build import resolve_device

if TYPE_CHECKING:
    from vitral.server.runtime import Runtime

_TOKEN = re.compile(r"[!-~]{16,500}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, repr=False)
class ServeResult(SummaryRepr):
    """What a server did until it was stopped."""

    requests: int
    images: int

    def summary(self) -> dict[str, str]:
        return {"requests": f"{self.requests:,}", "images": f"{self.images:,}"}


def serve(
    source: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int | None = None,
    max_batch: int | None = None,
    max_wait_ms: float = 2.0,
    max_queue: int = 256,
    max_body_mb: float = 16.0,
    max_pixels: int = 50_000_000,
    timeout: float = 30.0,
    token_file: str | Path = "",
    classes: str | Path = "",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler | None = None,
) -> ServeResult:
    """Serve models over HTTP.

    `POST /predict` takes image files, `/v2` is the Open Inference Protocol, `/metrics` is for Prometheus, and `/` is a
    page to try it; docs/serving.md describes them. SIGTERM stops the server after it has responded to all accepted
    requests, and SIGHUP reloads the models.

    Args:
        source: models: run folders, weights, hf:owner/name, timm:name or exported files, optionally as NAME=SOURCE.
        host: address to listen on; 0.0.0.0 accepts requests from other machines.
        port: port to listen on; 0 for any free port.
        workers: number of processes that share the port, each with its own copy of the models and its own queue
            (Linux); by default 1 on a CPU, and on an NVIDIA GPU half as many as there are cores, at most 8.
        max_batch: maximum number of images per batch; by default 8 on a CPU and 64 on a GPU.
        max_wait_ms: maximum milliseconds that an image waits for its batch to fill.
        max_queue: maximum number of queued images per model and worker; more are refused with 429.
        max_body_mb: maximum megabytes of a request; larger ones are refused with 413.
        max_pixels: maximum pixels of an image; larger ones are refused with 413.
        timeout: maximum seconds until a request has arrived, and until the response.
        token_file: file with the token that requests must send; the environment variable VITRAL_TOKEN is an
            alternative.
        classes: file with the names of the models' outputs in order: one per line, a table or JSON.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        device: cpu, cuda or mps; chosen automatically by default.
        on_event: handler of notes about the models.

    Returns:
        The numbers of requests and images that were answered.

    Raises:
        UserError: if an argument is wrong, a model cannot be loaded, or the address cannot be used.
    """
    with _needs_extra():
        from vitral.server.models import Settings
        from vitral.server.monitoring import set_up_logs
        from vitral.server.process import ModelServer
        from vitral.server.supervisor import Supervisor
    resolved = resolve_device(device)
    processes = _worker_count(workers, resolved)
    batch = _largest_batch(resolved) if max_batch is None else max_batch
    _check(port=(port, 0, 65535), max_batch=(batch, 1, 1024), max_queue=(max_queue, 1, 1_000_000))
    _check(max_wait_ms=(max_wait_ms, 0, 10_000), timeout=(timeout, 0.1, 3600), max_body_mb=(max_body_mb, 0.001, 1000))
    _check(max_pixels=(max_pixels, 1, 10**9))
    os.environ["VITRAL_MAX_PIXELS"] = str(max_pixels)  # where the decoders look
    token = _token(token_file)
    settings = Settings(
        host=host,
        port=port,
        max_batch=batch,
        max_wait=max_wait_ms / 1000,
        max_queue=max_queue,
        max_body=round(max_body_mb * 1e6),
        timeout=timeout,
        token=token,
    )

    set_up_logs()
    server: ModelServer | Supervisor
    if processes == 1:
        server = ModelServer(_loaders(named_sources(source), classes, preprocess, resolved, batch, on_event), settings)
    else:
        sources = {name: str(path) for name, path in named_sources(source).items()}
        job = {"sources": sources, "classes": str(classes), "preprocess": preprocess, "device": resolved}
        on_note = None if on_event is None else lambda text: on_event(Note(text))
        server = Supervisor("from vitral.api.serve import run_worker; run_worker", job, settings, processes, on_note)
    served = server.run_until_stopped()
    return ServeResult(served.requests, served.images)


def run_worker(descriptor: int) -> None:
    """Be one of the processes of `serve`; its supervisor is behind a socket of this file descriptor."""
    from vitral.server.models import Settings
    from vitral.server.monitoring import set_up_logs
    from vitral.server.runtime import share_cores
    from vitral.server.worker import Channel, WorkerServer

    channel = Channel(descriptor)
    job = channel.receive()
    set_up_logs()
    share_cores(job["workers"])
    settings = Settings(**job["settings"])

    def on_event(event: object) -> None:
        if job["notes"] and isinstance(event, Note):
            channel.send("note", text=event.text)

    loaders = _loaders(job["sources"], job["classes"], job["preprocess"], job["device"], settings.max_batch, on_event)
    try:
        server = WorkerServer(loaders, settings, channel)
    except UserError as error:
        channel.send("failed", error=str(error))
        sys.exit(1)
    server.run_until_stopped()


def asgi_app(source: Sequence[str | Path], *, classes: str | Path = "", preprocess: str = "", device: str = "") -> Any:
    """Build the application of `serve`, with its default limits, for another server such as Ray Serve.

    Args:
        source: models, as `serve` takes them.
        classes: file that names the models' outputs in order.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        device: cpu, cuda or mps; chosen automatically by default.

    Returns:
        An ASGI application; its log has to be set up by the caller.

    Raises:
        UserError: a model cannot be loaded.
    """
    with _needs_extra():
        from vitral.server.app import Service, build_app
        from vitral.server.models import Settings
    resolved = resolve_device(device)
    settings = Settings(max_batch=_largest_batch(resolved))
    return build_app(
        Service(_loaders(named_sources(source), classes, preprocess, resolved, settings.max_batch, None), settings)
    )


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'vitral[serve]'.") from error


def _worker_count(workers: int | None, device: str) -> int:
    """The number of processes: what is requested, else one, or on an NVIDIA GPU several, since Python's lock and the
    decoding of images would limit one."""
    if workers is None:
        return min(8, max(1, cores() // 2)) if device.startswith("cuda") and sys.platform == "linux" else 1
    _check(workers=(workers, 1, 256))
    if workers > 1 and sys.platform != "linux":
        raise UserError(
            f"workers={workers} needs Linux, which distributes connections among processes that share a port: omit it, "
            "or start a server per port behind a load balancer."
        )
    return workers


def _largest_batch(device: str) -> int:
    return 8 if device == "cpu" else 64


def _loaders(
    named: Mapping[str, str | Path],
    classes: str | Path,
    preprocess: str,
    device: str,
    batch: int,
    on_event: EventHandler | None,
) -> dict[str, Callable[[], Runtime]]:
    return {
        name: partial(_load, source, classes, preprocess, device, batch, on_event) for name, source in named.items()
    }


def named_sources(sources: Sequence[str | Path]) -> dict[str, str | Path]:
    """Sources by the names that requests use: NAME=SOURCE, or else the end of the source without its suffix."""
    named: dict[str, str | Path] = {}
    for source in [sources] if isinstance(sources, str | Path) else sources:
        name, equals, rest = str(source).partition("=")
        if not equals or Path(source).exists() or not _NAME.fullmatch(name):
            stem = re.split(r"[/:\\]", str(source).rstrip("/"))[-1].removesuffix(".safetensors").removesuffix(".onnx")
            name, rest = re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-") or "model", source
        if name in named:
            raise UserError(f'two models would be called "{name}": name them, as in first={source} second=...')
        named[name] = rest
    return named


def _load(
    source: str | Path, classes: str | Path, preprocess: str, device: str, batch: int, on_event: EventHandler | None
) -> Runtime:
    from vitral.server.runtime import exported_runtime, torch_runtime

    if is_exported(source):
        return exported_runtime(source, lambda card: named_card(card, classes), torch.device(device))
    model, card = load_source(source, on_event)
    check_head(source, card)
    card = named_card(card, classes)
    return torch_runtime(
        model, card, resolve_preprocessing(card, preprocess, on_event), torch.device(device), max_batch=batch
    )


def _token(path: str | Path) -> str:
    """The token of a file, else of the environment; empty if none is needed."""
    token, origin = os.environ.get("VITRAL_TOKEN", "").strip(), "VITRAL_TOKEN"
    if path:
        try:
            token, origin = Path(path).expanduser().read_text("utf-8").strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the token cannot be read from {path}: pass a text file that contains it.") from error
    if (token or path) and not _TOKEN.fullmatch(token):
        raise UserError(f"the token of {origin} is not usable: use 16 to 500 characters without spaces.")
    return token


def _check(**numbers: tuple[float, float, float]) -> None:
    """Refuse numbers outside of their limits."""
    for name, (value, low, high) in numbers.items():
        if not low <= value <= high:
            raise UserError(f"{name} must be from {low:g} to {high:g}, not {value:g}.")
