"""The server's process: its socket, its signals, and uvicorn between them.

SIGTERM and SIGINT end it: for a moment it goes on answering, with `Connection: close`, so that clients and load
balancers leave; then it stops listening and answers what it has accepted. SIGHUP reloads all models.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitral.errors import UserError
from vitral.server.app import Service, build_app
from vitral.server.logs import log, set_up_logs
from vitral.server.metrics import Metrics
from vitral.server.models import ServedModel, Settings
from vitral.server.runtime import Runtime

_DRAIN = 1.0  # seconds of answering with `Connection: close` before the socket is closed
_MAX_HEADERS = 64_000  # bytes of the address and the headers of a request
_BACKLOG = 2048


@dataclass(frozen=True)
class Served:
    """What a server did until it was stopped."""

    requests: int
    images: int


def run_server(loaders: Mapping[str, Callable[[], Runtime]], settings: Settings) -> Served:
    """Load the models and answer requests until a signal ends it.

    Args:
        loaders: by the name of each model, what loads it.
        settings: address and limits.

    Raises:
        UserError: a model cannot be loaded, or the address cannot be used.
    """
    set_up_logs()
    listener = _listen(settings.host, settings.port)
    metrics = Metrics()
    try:
        models = {name: ServedModel(name, load, settings, metrics) for name, load in loaders.items()}
        service = Service(models, settings, metrics)
        config = uvicorn.Config(
            build_app(service),  # type: ignore[arg-type]
            http=_protocol(settings.timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(settings.timeout) + 5,
        )
        _Server(config, service).run([listener])
    finally:
        listener.close()
    service.close()
    log("stopped", requests=metrics.requests(), images=metrics.images())
    return Served(metrics.requests(), metrics.images())


class _Server(uvicorn.Server):
    """uvicorn with our signals."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals that end the server drain it first; a second one ends it at once."""
        loop = asyncio.get_running_loop()
        actions = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGHUP: self._reload}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        try:
            yield
        finally:
            for number in actions:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        log("listening", host=host, port=port, models=list(self._service.models))

    def _stop(self) -> None:
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        log("stopping")
        self._service.draining = True
        asyncio.get_running_loop().call_later(_DRAIN, setattr, self, "should_exit", True)

    def _reload(self) -> None:
        task = asyncio.ensure_future(self._reload_all())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_all(self) -> None:
        for served in self._service.models.values():
            with suppress(UserError):  # logged
                await asyncio.to_thread(served.reload)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port} ({error.strerror}): choose another --port.") from error
    return listener


def _protocol(timeout: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with limits on the size of headers and on the time until a request is complete."""

    class LimitedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._finish()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self._start()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_message_complete(self) -> None:
            self._finish()
            super().on_message_complete()

        def _count(self, size: int) -> None:
            self._header_bytes += size
            if self._header_bytes > _MAX_HEADERS:
                self.transport.abort()

        def _start(self) -> None:
            if self._deadline is None:  # one second more than a body has, so that its error is sent
                self._deadline = self.loop.call_later(timeout + 1, self.transport.close)

        def _finish(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol
