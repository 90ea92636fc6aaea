"""The server's process: its socket, its signals, and uvicorn between them.

SIGTERM and SIGINT end it: for a moment it goes on answering, with `Connection: close`, so that clients and load
balancers leave; then it stops listening and answers what it has accepted. SIGHUP reloads all models.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitral.errors import UserError
from vitral.server.app import Service, build_app
from vitral.server.models import Settings, freeze_objects
from vitral.server.monitoring import log
from vitral.server.runtime import Runtime

_DRAIN = 1.0  # seconds of answering with `Connection: close` before the socket is closed
_HANDSHAKE = 0.25  # seconds for connections that have begun when no new ones are taken any more
_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_MAX_HEADERS = 64_000  # bytes of the address and the headers of a request
_BACKLOG = 2048  # connections that wait to be accepted
_GC_ALLOCATIONS = 10_000  # between two collections of new objects; a request makes hundreds that end by themselves
_KEEP_ALIVE = 75  # seconds that a connection may be idle


@dataclass(frozen=True)
class Served:
    """What a server did until it was stopped."""

    requests: int
    images: int


class ModelServer(uvicorn.Server):
    """Models behind a listening socket: uvicorn with our signals, limits and logs."""

    def __init__(self, loaders: Mapping[str, Callable[[], Runtime]], settings: Settings) -> None:
        """Bind the address and load the models.

        Args:
            loaders: by the name of each model, what loads it.
            settings: address and limits.

        Raises:
            UserError: a model cannot be loaded, or the address cannot be used.
        """
        self._listener = bound_socket(settings.host, settings.port, reuse_port=settings.reuse_port)
        try:
            self._service = Service(loaders, settings)
        except BaseException:
            self._listener.close()
            raise
        self._tasks: set[asyncio.Task[None]] = set()
        self._protocol_class = _limited_protocol(settings.timeout)
        super().__init__(
            uvicorn.Config(
                build_app(self._service),
                http=self._protocol_class,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=int(settings.timeout) + 5,
            )
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.getsockname()[1]

    def run_until_stopped(self) -> Served:
        """Answer requests until a signal, or `stop`, ends it."""
        freeze_objects()
        thresholds = gc.get_threshold()
        gc.set_threshold(_GC_ALLOCATIONS, *thresholds[1:])
        try:
            self.run([self._listener])
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            self._listener.close()
            self._service.close()
        served = Served(*self._service.metrics.totals())
        log("stopped", requests=served.requests, images=served.images)
        return served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer all who have connected, then close the connections that are idle."""
        loop = asyncio.get_running_loop()
        _ignore_new_connections(self._listener)
        await asyncio.sleep(_HANDSHAKE)
        waiting = _accepted(self._listener)  # they would be reset with the listener
        for server in self.servers:
            server.close()
        for client in waiting:
            await loop.connect_accepted_socket(self._protocol, client)
        end = loop.time() + _DRAIN
        while self.server_state.connections and loop.time() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        return self._protocol_class(config=self.config, server_state=self.server_state, app_state={})

    def stop(self) -> None:
        """Drain, then end; the second time immediately. To be called in the server's event loop."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        log("stopping")
        self._service.draining = True
        asyncio.get_running_loop().call_later(_DRAIN, setattr, self, "should_exit", True)

    def reload(self) -> None:
        """Reload all models. To be called in the server's event loop."""
        self.in_background(self._reload_all())

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_all(self) -> None:
        for served in self._service.models.values():
            with suppress(UserError):  # logged
                await asyncio.to_thread(served.reload)

    def signals(self) -> dict[signal.Signals, Callable[[], None]]:
        """What each signal does."""
        return {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.reload}

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Our signals in place of uvicorn's; in another than the main thread there are none."""
        loop = asyncio.get_running_loop()
        actions = self.signals() if threading.current_thread() is threading.main_thread() else {}
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        try:
            yield
        finally:
            for number in actions:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.announce()

    def announce(self) -> None:
        """Write to the log that requests are welcome."""
        host, port = self._listener.getsockname()[:2]
        log("listening", host=host, port=port, models=list(self._service.models))


def bound_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket with an address, which others with `reuse_port` may share.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: otherwise asyncio leaves Nagle's algorithm on, and every answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {host} port {port} ({error.strerror}): choose another --port.") from error
    return listener


def _ignore_new_connections(listener: socket.socket) -> None:
    """Let the operating system drop requests for connections (Linux), while those that have begun are completed.

    Otherwise one that is completed between the last accept and the closing of the listener would be reset. Clients ask
    again after a second, and are then refused, or connected to another worker.
    """
    if sys.platform != "linux":
        return
    flags, syn, syn_or_ack = 13, 0x02, 0x12  # a byte of the TCP header, and bits of it
    instructions = [
        *((0x30, 0, 0, flags), (0x54, 0, 0, syn_or_ack), (0x15, 0, 1, syn)),  # load, mask, compare
        *((0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)),  # drop, or keep
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *words) for words in instructions))
    with suppress(OSError):  # a kernel without filters
        filter = struct.pack("HL", len(instructions), ctypes.addressof(program))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)


def _accepted(listener: socket.socket) -> list[socket.socket]:
    """The connections that wait to be accepted."""
    clients = []
    with suppress(BlockingIOError):
        while True:
            clients.append(listener.accept()[0])
    return clients


def _limited_protocol(timeout: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, HTTP/1 alone, with limits on headers and on the time until a request is complete."""

    class LimitedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _received = _parse_next = b""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._finish()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            while data:
                self._received, self._parse_next = data, b""
                super().data_received(data)
                data = self._parse_next

        def _should_upgrade(self) -> bool:
            return any(name == b"upgrade" for name, _ in self.headers)

        def handle_websocket_upgrade(self) -> None:
            """Ignore the offer of another protocol: parse the request again, without it.

            Java's client offers HTTP/2 with every request. httptools ends such a request with its headers, and would
            lose the body or take it for the next request.
            """
            error = sys.exception()
            assert isinstance(error, httptools.HttpParserUpgrade)
            head = [f"{self.scope['method']} ".encode() + self.url + f" HTTP/{self.scope['http_version']}".encode()]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self._parse_next = b"\r\n".join([*head, b"", self._received[error.args[0] :]])

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
            if self._deadline is None:  # more than a body has, so that its error is sent even by a busy machine
                self._deadline = self.loop.call_later(timeout + max(1.0, timeout / 4), self.transport.close)

        def _finish(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol
