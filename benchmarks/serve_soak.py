"""Soak `vitral serve`: well-behaved clients beside aborts, oversize, garbage and slow bodies, for an hour.

    python benchmarks/serve_soak.py WEIGHTS FOLDER --minutes 60 --clients 4

Every well-behaved request must be answered with 200 and the answer that its image had at the beginning, or asked to
retry (429, 503). Oversize bodies must get 413, garbage 415, slow bodies 408, and reloads must lose nothing. Memory is
read from `/proc` once per `--every` seconds; after the first tenth of the time it must stay within 5 %. At the end the
server gets SIGTERM under load: every request whose connection it had accepted must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_clients import requests_of
from serve_load import Server

MAX_BODY = 2_000_000
TIMEOUT = 15.0


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, port: int, requests: Sequence[bytes], seconds: float) -> None:
        self.port, self.requests = port, requests
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.answers: dict[int, Any] = {}  # of an image, the first time
        self.stopping = False

    def fail(self, sentence: str) -> None:
        self.counts["failures"] += 1
        if len(self.failures) < 20:
            self.failures.append(sentence)

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def client(self, number: int, pause: float) -> None:
        """Ask about image after image; reconnects where the server ends the connection as announced."""
        rng = random.Random(number)
        streams = await self.connection()
        while time.monotonic() < self.end and not self.stopping:
            index = rng.randrange(len(self.requests))
            close = await self._ask(streams, index)
            if close:
                streams[1].close()
                streams = await self.connection()
            await asyncio.sleep(rng.expovariate(1 / pause) if pause else 0)
        streams[1].close()

    async def _ask(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], index: int) -> bool:
        """Whether the connection has to be opened anew."""
        self.counts["sent"] += 1
        try:
            status, headers, body = await answer(*streams, self.requests[index])
        except (OSError, asyncio.IncompleteReadError) as error:
            self.fail(f"no answer ({type(error).__name__})")
            return True
        self.counts[f"answered {status}"] += 1
        if status == 200:
            found = json.loads(body)["predictions"][0]["classes"]
            first = self.answers.setdefault(index, found)
            same = [a["name"] for a in found] == [b["name"] for b in first]
            if not same or any(
                abs(a["probability"] - b["probability"]) > 1e-4 for a, b in zip(found, first, strict=True)
            ):
                self.fail("another answer for the same image")
        elif status not in (429, 503):  # answered, too: retry later
            self.fail(f"status {status}: {body[:200]!r}")
        return b"connection: close" in headers

    async def misbehave(self, number: int) -> None:
        """Aborts, oversize, garbage and slow bodies, at random."""
        rng = random.Random(1000 + number)
        actions = (self._abort, self._abort, self._oversize, self._garbage, self._slow, self._broken)
        while time.monotonic() < self.end and not self.stopping:
            action = rng.choice(actions)
            try:
                await asyncio.wait_for(action(rng), 60)
            except TimeoutError:
                self.fail(f"{action.__name__}: no answer within a minute")
            except (OSError, asyncio.IncompleteReadError) as error:
                if action != self._broken:
                    self.fail(f"{action.__name__}: {type(error).__name__}")
            await asyncio.sleep(rng.uniform(0, 1))

    async def _abort(self, rng: random.Random) -> None:
        _, writer = await self.connection()
        request = rng.choice(self.requests)
        writer.write(request[: rng.randrange(1, len(request) + 1)])
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 0.3))
        writer.transport.abort()
        self.counts["aborted"] += 1

    async def _oversize(self, rng: random.Random) -> None:
        size = rng.choice((MAX_BODY + 1, 3 * MAX_BODY))
        if rng.random() < 0.5:  # announced
            head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
            await self._expect(413, head + b"\xff" * size)
        else:
            chunk = b"%x\r\n" % size + b"\xff" * size + b"\r\n0\r\n\r\n"
            await self._expect(413, b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)

    async def _garbage(self, rng: random.Random) -> None:
        body = rng.choice((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"")) + rng.randbytes(rng.randrange(1, 5000))
        await self._expect(415, b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def _slow(self, rng: random.Random) -> None:
        reader, writer = await self.connection()
        writer.write(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b"\xff")
                await writer.drain()
                await asyncio.sleep(0.5)

        dripping = asyncio.ensure_future(drip())
        try:
            status, _, _ = await read_answer(reader)
        finally:
            dripping.cancel()
            writer.close()
        self._check(408, status)

    async def _broken(self, rng: random.Random) -> None:
        """Bytes that are not HTTP, or headers without end; the server may just close the connection."""
        reader, writer = await self.connection()
        try:
            for _ in range(200) if rng.random() < 0.5 else ():
                writer.write(b"X-Long: " + b"a" * 1000 + b"\r\n")
            writer.write(rng.randbytes(2000) + b"\r\n\r\n")
            await writer.drain()
            await asyncio.wait_for(reader.read(), TIMEOUT + 5)
        finally:
            writer.close()
        self.counts["broken"] += 1

    async def _expect(self, expected: int, request: bytes) -> None:
        reader, writer = await self.connection()
        try:
            writer.write(request)
            status, _, _ = await read_answer(reader)
        finally:
            writer.close()
        self._check(expected, status)

    def _check(self, expected: int, status: int) -> None:
        self.counts[f"refused {status}"] += 1
        if status not in (expected, 429, 503):
            self.fail(f"status {status} in place of {expected}")

    async def watch(self, pid: int, every: float, memory: list[tuple[float, int]]) -> None:
        """Read the server's memory, and reload its model now and then."""
        start = time.monotonic()
        while time.monotonic() < self.end and not self.stopping:
            memory.append((time.monotonic() - start, resident(pid)))
            if len(memory) % 10 == 5:
                os.kill(pid, signal.SIGHUP)
                self.counts["reloads"] += 1
            print(f"{memory[-1][0]:.0f} s: {memory[-1][1] / 1e6:.0f} MB, {dict(self.counts)}", flush=True)
            await asyncio.sleep(every)


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes, bytes]:
    writer.write(request)
    return await read_answer(reader)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head.split(b" ", 2)[1]), head, await reader.readexactly(length)


def resident(pid: int) -> int:
    """Bytes of memory of a process, without pages of files, which the kernel drops and reads as it likes."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


async def soak(run: Soak, pid: int, clients: int, rude: int, every: float) -> list[tuple[float, int]]:
    memory: list[tuple[float, int]] = []
    polite = [run.client(number, 0.5) for number in range(clients)]
    await asyncio.gather(*polite, *(run.misbehave(number) for number in range(rude)), run.watch(pid, every, memory))
    return memory


async def terminate(port: int, pid: int, requests: Sequence[bytes]) -> Soak:
    """SIGTERM while 32 clients ask without a pause."""
    run = Soak(port, requests, 120)

    async def persistent(number: int) -> None:
        try:
            await run.client(number, 0)
        except ConnectionRefusedError:
            run.counts["refused connections"] += 1  # it no longer listens

    tasks = [asyncio.ensure_future(persistent(number)) for number in range(32)]
    await asyncio.sleep(5)
    os.kill(pid, signal.SIGTERM)
    await asyncio.gather(*tasks)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4, help="well-behaved clients, each with pauses of 0.5 s")
    parser.add_argument("--rude", type=int, default=4)
    parser.add_argument("--every", type=float, default=30)
    arguments = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # which warns of each piece of a body that is refused
    requests = requests_of(arguments.folder, 50)
    options = ["--max-body-mb", str(MAX_BODY / 1e6), "--timeout", str(TIMEOUT), "--port", "PORT"]
    command = [sys.executable, "-m", "vitral", "serve", str(arguments.weights), *options]
    with tempfile.TemporaryDirectory() as scratch:
        server = Server("vitral", command, Path(scratch))
        try:
            if not server.ready():
                sys.exit(1)
            port, (pid,) = server.port, server.ids
            started = time.monotonic()
            run = Soak(port, requests, arguments.minutes * 60)
            memory = asyncio.run(soak(run, pid, arguments.clients, arguments.rude, arguments.every))
            minutes = (time.monotonic() - started) / 60
            end = asyncio.run(terminate(port, pid, requests))
        finally:
            server.stop()
        errors = [line for line in server.log.read_text().splitlines() if '"level": "error"' in line]
    settled = [size for moment, size in memory if moment >= arguments.minutes * 6]
    growth = settled[-1] / settled[0] - 1 if settled else float("nan")
    print(f"\n{minutes:.1f} minutes: {dict(run.counts)}")
    print(
        f"memory: {settled[0] / 1e6:.0f} MB after a tenth of the time, {settled[-1] / 1e6:.0f} MB at the end, "
        f"{growth:+.1%}; largest {max(size for _, size in memory) / 1e6:.0f} MB"
    )
    print(f"SIGTERM under load: {dict(end.counts)}")
    print(f"errors in the log: {len(errors)}", *errors[:5], sep="\n")
    failures = [*run.failures, *end.failures]
    print("failures:", *(failures or ["none"]), sep="\n")
    if failures or errors or abs(growth) > 0.05:
        sys.exit(1)


if __name__ == "__main__":
    main()
