"""Several server processes on one port, and the process that starts, restarts, reloads and stops them.

Each worker is a complete server with its own copy of the models, and the operating system distributes connections among
them (SO_REUSEPORT). A worker and its supervisor exchange lines of JSON over a socket pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vitral.errors import UserError
from vitral.server.models import Settings
from vitral.server.monitoring import forget_worker, log, worker_totals
from vitral.server.process import Served, bound_socket

_IGNORE = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # a terminal's; the supervisor has it, too
_LONGEST_DELAY = 30.0  # seconds until a worker that failed to start is started again


@dataclass
class _Worker:
    """A process, from its start to its end."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: bool = False
    error: str = ""  # why it could not start
    reloads: dict[int, asyncio.Future[str]] = field(default_factory=dict)  # by number: the error, or nothing

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # it has just ended
            self.writer.write(json.dumps(message).encode() + b"\n")


class Supervisor:
    """Keeps a number of workers running until a signal, or `stop`, ends them."""

    def __init__(
        self,
        entry: str,
        job: dict[str, Any],
        settings: Settings,
        workers: int,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """Reserve the port.

        Args:
            entry: Python code that runs a worker; it is followed by "(FD)", the file descriptor of its socket.
            job: what a worker has to know besides its settings; its first message.
            settings: address and limits of each worker.
            workers: their number.
            on_note: gets the notes about the models, from one of the workers.

        Raises:
            UserError: the address cannot be used.
        """
        bound_socket(settings.host, settings.port).close()  # not even by other workers, who would share it
        self._reserved = bound_socket(settings.host, settings.port, reuse_port=True)
        self._settings = replace(settings, port=self._reserved.getsockname()[1], reuse_port=True)
        self._entry, self._job, self._count, self._on_note = entry, job, workers, on_note
        self._workers: dict[int, _Worker] = {}
        self._stopping = asyncio.Event()
        self._started = False  # all workers have been ready
        self._reload_number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port that the workers listen on."""
        return self._settings.port

    def run_until_stopped(self) -> Served:
        """Run the workers.

        Raises:
            UserError: a worker cannot be started the first time.
        """
        with tempfile.TemporaryDirectory(prefix="vitral-metrics-") as folder:
            self._settings = replace(self._settings, metrics_dir=folder)
            try:
                asyncio.run(self._run())
            finally:
                self._reserved.close()
            served = Served(*worker_totals(folder))
        log("stopped", requests=served.requests, images=served.images)
        return served

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        log("starting", workers=self._count, host=self._settings.host, port=self.port)
        keepers = [asyncio.ensure_future(self._keep(index)) for index in range(self._count)]
        await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
        if not self._stopping.is_set():
            self.stop()
        results = await asyncio.gather(*keepers, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def stop(self) -> None:
        """Let all workers drain and end; the second time end them immediately. To be called in the event loop."""
        again = self._stopping.is_set()
        self._stopping.set()
        if not again:
            log("stopping")
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                if again:
                    worker.process.kill()
                elif worker.ready:
                    worker.send(do="stop")
                else:  # it loads its models, and answers nobody
                    worker.process.terminate()

    def reload(self) -> None:
        """Reload all models of all workers. To be called in the event loop."""
        self._in_background(self._reload_all(""))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, index: int) -> None:
        """Start a worker, and start it again whenever it ends."""
        delay = 0.0
        while not self._stopping.is_set():
            worker = await self._start(index)
            await self._listen(index, worker)
            code = await worker.process.wait()
            del self._workers[index]
            forget_worker(self._settings.metrics_dir, worker.process.pid)
            if self._stopping.is_set():
                return
            if not worker.ready and not self._started:
                advice = "see the log, or use fewer --workers if memory is short"
                raise UserError(worker.error or f"a worker ended with {code} before it was ready: {advice}.")
            self._tell_readiness()
            delay = 0.0 if worker.ready else min(max(1.0, 2 * delay), _LONGEST_DELAY)
            log("worker_ended", level="error", pid=worker.process.pid, code=code, error=worker.error, restart_in=delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _start(self, index: int) -> _Worker:
        ours, theirs = socket.socketpair()
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        metrics = {"PROMETHEUS_MULTIPROC_DIR": self._settings.metrics_dir}  # read when the client library is imported
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", f"{_IGNORE}; {self._entry}({theirs.fileno()})"),
                pass_fds=[theirs.fileno()],
                env={**os.environ, **paths, **metrics},
                stdin=asyncio.subprocess.DEVNULL,
            )
        worker = _Worker(process, *await asyncio.open_connection(sock=ours))
        self._workers[index] = worker
        notes = index == 0 and not self._started
        worker.send(**self._job, settings=asdict(self._settings), workers=self._count, notes=notes)
        if self._stopping.is_set():  # meanwhile
            process.terminate()
        return worker

    async def _listen(self, index: int, worker: _Worker) -> None:
        """Handle the messages of a worker until it ends."""
        with suppress(ConnectionError):  # one that is killed with unread messages resets the socket
            while line := await worker.reader.readline():
                message = json.loads(line)
                match message.pop("event"):
                    case "ready":
                        worker.ready = True
                        self._tell_readiness()
                    case "failed":
                        worker.error = message["error"]
                    case "note" if self._on_note is not None:
                        self._on_note(message["text"])
                    case "reload":
                        self._in_background(self._reload_all(message["model"], worker, message["number"]))
                    case "reloaded":
                        worker.reloads.pop(message["number"]).set_result(message["error"])
        for future in worker.reloads.values():
            future.set_result("")  # it will start with the new file
        worker.reloads.clear()
        worker.writer.close()
        with suppress(OSError):
            await worker.writer.wait_closed()

    def _tell_readiness(self) -> None:
        ready = len(self._workers) == self._count and all(worker.ready for worker in self._workers.values())
        for worker in self._workers.values():
            worker.send(do="readiness", ready=ready)
        if ready and not self._started:
            self._started = True
            log("listening", host=self._settings.host, port=self.port, workers=self._count)

    async def _reload_all(self, model: str, asking: _Worker | None = None, number: int = 0) -> None:
        """Reload one model, or all, in all workers, and answer the worker that asked for it."""
        self._reload_number += 1
        futures = []
        for worker in self._workers.values():
            if worker.ready:  # the others are loading the file anyway
                futures.append(asyncio.get_running_loop().create_future())
                worker.reloads[self._reload_number] = futures[-1]
                worker.send(do="reload", model=model, number=self._reload_number)
        errors: Sequence[str] = await asyncio.gather(*futures)
        if asking is not None:
            asking.send(do="reload_ended", number=number, error=next(filter(None, errors), ""))
