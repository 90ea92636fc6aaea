"""One of several server processes on a port: a `ModelServer` that its supervisor controls."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from vitral.errors import UserError
from vitral.server.models import ServedModel, Settings
from vitral.server.monitoring import log
from vitral.server.process import ModelServer
from vitral.server.runtime import Runtime


class Channel:
    """Lines of JSON to and from the supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> dict[str, Any]:
        """The next message; nothing when the supervisor has ended."""
        line = self._lines.readline()
        return json.loads(line) if line else {}

    def send(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError:  # it has ended, which `receive` notices too
                return


class WorkerServer(ModelServer):
    """A server that drains, reloads and is ready when its supervisor says so."""

    def __init__(self, loaders: Mapping[str, Callable[[], Runtime]], settings: Settings, channel: Channel) -> None:
        """Load the models, as `ModelServer` does; signals of a terminal are left to the supervisor."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        super().__init__(loaders, settings)
        self._channel = channel
        self._asked: dict[int, asyncio.Future[str]] = {}  # reloads that clients of this worker wait for
        self._service.ready = False
        self._service.reload = self._reload_everywhere

    def signals(self) -> dict[signal.Signals, Callable[[], None]]:
        return {signal.SIGTERM: self.stop}

    def stop(self) -> None:
        if not self._service.draining:  # a signal may come from the supervisor and from whoever signalled it
            super().stop()

    def announce(self) -> None:
        log("worker_ready", models=list(self._service.models))
        threading.Thread(target=self._receive, args=(asyncio.get_running_loop(),), daemon=True).start()
        self._channel.send("ready")

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: pass the supervisor's messages to the event loop; the server ends with the supervisor."""
        while not loop.is_closed():
            message = self._channel.receive() or {"do": "stop"}
            last = message["do"] == "stop"
            try:
                loop.call_soon_threadsafe(self._obey, message)
            except RuntimeError:  # the loop has ended
                return
            if last:
                return

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "readiness":
                self._service.ready = message["ready"]
            case "reload":
                self.in_background(self._reload_here(message["model"], message["number"]))
            case "reload_ended":
                self._asked.pop(message["number"]).set_result(message["error"])
            case "stop":
                self.stop()

    async def _reload_here(self, name: str, number: int) -> None:
        models = self._service.models
        error = ""
        for served in [models[name]] if name else models.values():
            try:
                await asyncio.to_thread(served.reload)
            except UserError as failed:
                error = str(failed)
        self._channel.send("reloaded", number=number, error=error)

    async def _reload_everywhere(self, served: ServedModel) -> None:
        """Reload a model in all workers."""
        number = max(self._asked, default=0) + 1
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._channel.send("reload", model=served.name, number=number)
        if error := await asyncio.shield(future):
            raise UserError(error)
