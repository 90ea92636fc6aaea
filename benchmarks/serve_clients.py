"""Clients of a server for `serve_load.py`: requests, closed and open loops in several processes, and their CPU time."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """One contestant in one round."""

    images: int
    seconds: float
    latencies: tuple[float, ...]  # seconds
    cpu: float  # seconds of the server's processes
    generator: float  # share of the machine
    others: float  # share of the machine

    @property
    def rate(self) -> float:
        return self.images / self.seconds

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def requests_of(folder: Path, count: int, images: int = 1) -> list[bytes]:
    """Complete HTTP requests, each with one JPEG or several."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    files = [path.read_bytes() for path in random.Random(0).sample(paths, min(count, len(paths)))]
    return [_request([files[(first + i) % len(files)] for i in range(images)]) for first in range(len(files))]


def _request(jpegs: Sequence[bytes]) -> bytes:
    boundary = b"vitral-boundary-7d1f"
    disposition = b'Content-Disposition: form-data; name="content"; filename="a.jpg"'
    head = b"--" + boundary + b"\r\n" + disposition + b"\r\nContent-Type: image/jpeg\r\n\r\n"
    body = b"".join(head + jpeg + b"\r\n" for jpeg in jpegs) + b"--" + boundary + b"--\r\n"
    lines = [
        *(b"POST /predict HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: %d" % len(body)),
        b"Content-Type: multipart/form-data; boundary=" + boundary,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Send a request and read its answer: status and body."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    body = await reader.readexactly(length)
    return int(head.split(b" ", 2)[1]), body


async def closed_loop(port: int, requests: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Latencies of clients that each send their next request as soon as they have an answer; the last ones may be
    answered after `seconds`, and count."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while (started := time.perf_counter()) < end:
            status, _ = await ask(reader, writer, requests[turn % len(requests)])
            assert status == 200, status
            latencies.append(time.perf_counter() - started)
            turn += clients
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return latencies


async def open_loop(
    port: int, requests: Sequence[bytes], rate: float, seconds: float, paced: bool, seed: int
) -> list[float]:
    """Latencies of requests that arrive evenly (`paced`) or at random times, counted from the time of arrival."""
    latencies: list[float] = []
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    rng, tasks = random.Random(seed), []

    async def arrive(moment: float, request: bytes) -> None:
        pair = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        status, _ = await ask(*pair, request)
        assert status == 200, status
        latencies.append(time.perf_counter() - moment)
        idle.append(pair)

    start = time.perf_counter()
    moment = start + rng.random() / rate
    while (moment := moment + (1 / rate if paced else rng.expovariate(rate))) < start + seconds:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        tasks.append(asyncio.ensure_future(arrive(moment, requests[len(tasks) % len(requests)])))
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return latencies


async def answers(port: int, requests: Sequence[bytes]) -> list[tuple[str, float]]:
    """The first class of each request's image, and its probability."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for request in requests:
        status, body = await ask(reader, writer, request)
        assert status == 200, (status, body[:300])
        answer = json.loads(body)
        best = answer.get("predictions", [answer])[0]["classes"][0]  # vitral's, LitServe's
        found.append((best["name"], best["probability"]))
    writer.close()
    return found


def _generate(
    work: Callable[..., Coroutine[Any, Any, list[float]]], words: tuple[Any, ...]
) -> tuple[list[float], float]:
    """Run a load in this process: latencies, and the CPU time of generating it."""
    before = time.process_time()
    return asyncio.run(work(*words)), time.process_time() - before


class Generator:
    """Processes that send requests."""

    def __init__(self, processes: int) -> None:
        self.count = processes
        self.pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"))

    def closed(
        self, servers: Sequence[int], port: int, requests: Sequence[bytes], clients: int, seconds: float
    ) -> Load:
        parts = [clients // self.count + (index < clients % self.count) for index in range(self.count)]
        calls = [
            (port, [*requests[index:], *requests[:index]], part, seconds) for index, part in enumerate(parts) if part
        ]
        return self._measured(servers, closed_loop, calls)

    def opened(
        self, servers: Sequence[int], port: int, requests: Sequence[bytes], rate: float, seconds: float, paced: bool
    ) -> Load:
        calls = [(port, requests, rate / self.count, seconds, paced, index) for index in range(self.count)]
        return self._measured(servers, open_loop, calls)

    def _measured(
        self,
        servers: Sequence[int],
        work: Callable[..., Coroutine[Any, Any, list[float]]],
        calls: Sequence[tuple[Any, ...]],
    ) -> Load:
        """Run a load and account for the machine's time meanwhile; `servers` are the processes that were started."""
        before, machine, started = tree_cpu(servers), busy_cpu(), time.perf_counter()
        results = [future.result() for future in [self.pool.submit(_generate, work, call) for call in calls]]
        elapsed = time.perf_counter() - started
        cpu, busy = tree_cpu(servers) - before, busy_cpu() - machine
        latencies = tuple(latency for found, _ in results for latency in found)
        generator, whole = sum(spent for _, spent in results), elapsed * len(os.sched_getaffinity(0))
        others = max(0.0, busy - cpu - generator) / whole
        return Load(len(latencies), elapsed, latencies, cpu, generator / whole, others)


def tree_cpu(roots: Sequence[int]) -> float:
    """CPU seconds of processes and of their descendants."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number], spent[number] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    return sum(
        seconds for number, seconds in spent.items() if any(parent in roots for parent in _line(number, parents))
    )


def _line(number: int, parents: dict[int, int]) -> Iterator[int]:
    while number in parents:
        yield number
        number = parents[number]


def busy_cpu() -> float:
    """CPU seconds that this machine was busy."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS
