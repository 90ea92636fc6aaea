"""Load on `vitral serve`: closed-loop clients, then arrivals at 70 % of that rate; LitServe beside it.

    python benchmarks/serve_load.py WEIGHTS FOLDER --rounds 3 --seconds 15 --litserve ENVIRONMENT/bin/python

WEIGHTS is the model, FOLDER has JPEG files in class folders, and ENVIRONMENT has litserve, torch and vitral's own
requirements. Every contestant gets the same multipart requests, one JPEG each, from raw sockets in this process; in
each round every contestant runs once, in turn, beside `vitral bench predict`. Numbers are medians over the rounds, with
the CPU time of the server's processes per image, the generator's own share of the machine, and that of other programs.

    python benchmarks/serve_load.py --simulate

prints what Poisson arrivals at 70 % load cost at least: p99 / p50 of a server whose cores each compute one image at a
time, always the oldest, in constant time and without any other work (the queue M/D/c), and of one that takes batches
which gain no time: what waits is shared evenly among the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE, REPAIR = (Path(__file__).parents[1] / folder for folder in ("src", "tests/helpers/repair"))  # for timm
TICKS = os.sysconf("SC_CLK_TCK")
ARRIVALS = {True: "even arrivals", False: "Poisson arrivals"}
LITSERVE = Path(__file__).with_name("serve_litserve.py")


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


def requests_of(folder: Path, count: int) -> list[bytes]:
    """Complete HTTP requests, each with one JPEG."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    paths = random.Random(0).sample(paths, min(count, len(paths)))
    return [_request(path.read_bytes()) for path in paths]


def _request(jpeg: bytes) -> bytes:
    boundary = b"vitral-boundary-7d1f"
    disposition = b'Content-Disposition: form-data; name="content"; filename="a.jpg"'
    head = b"--" + boundary + b"\r\n" + disposition + b"\r\nContent-Type: image/jpeg\r\n\r\n"
    body = head + jpeg + b"\r\n--" + boundary + b"--\r\n"
    lines = [
        *(b"POST /predict HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: %d" % len(body)),
        b"Content-Type: multipart/form-data; boundary=" + boundary,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def simulate(cores: int, max_batch: int, arrivals: Sequence[float]) -> list[float]:
    """Latencies in multiples of the time of one image, for a queue that idle cores share evenly."""
    free, waiting, latencies, number = [0.0] * cores, deque[float](), [], 0
    while number < len(arrivals) or waiting:
        now = heapq.heappop(free)
        if not waiting:
            now = max(now, arrivals[number])
        while number < len(arrivals) and arrivals[number] <= now:
            waiting.append(arrivals[number])
            number += 1
        batch = [waiting.popleft() for _ in range(min(-(-len(waiting) // cores), max_batch))]
        latencies += [now + len(batch) - moment for moment in batch]
        heapq.heappush(free, now + len(batch))
    return latencies


def show_simulation(load: float = 0.7, images: int = 200_000) -> None:
    for cores in (1, 2, 4, 8, 16):
        rng, moment, arrivals = random.Random(0), 0.0, []
        for _ in range(images):
            arrivals.append(moment := moment + rng.expovariate(load * cores))
        for name, max_batch in (("one by one", 1), ("batches of 8", 8)):
            ordered = sorted(simulate(cores, max_batch, arrivals))
            middle, high = ordered[images // 2], ordered[images * 99 // 100]
            print(
                f"{cores:2} cores, {name:12}: p50 {middle:.2f}, p99 {high:.2f} images' time, ratio {high / middle:.2f}"
            )


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Send a request and read its answer; the status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    await reader.readexactly(length)
    return int(head.split(b" ", 2)[1])


async def closed_loop(port: int, requests: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Latencies of clients that each send their next request as soon as they have an answer; the last ones may be
    answered after `seconds`, and count."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while (started := time.perf_counter()) < end:
            status = await ask(reader, writer, requests[turn % len(requests)])
            assert status == 200, status
            latencies.append(time.perf_counter() - started)
            turn += clients
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return latencies


async def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, paced: bool) -> list[float]:
    """Latencies of requests that arrive evenly (`paced`) or at random times, counted from the time of arrival."""
    latencies: list[float] = []
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    rng, tasks = random.Random(1), []
    start = time.perf_counter()

    async def arrive(moment: float, request: bytes) -> None:
        pair = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        status = await ask(*pair, request)
        assert status == 200, status
        latencies.append(time.perf_counter() - moment)
        idle.append(pair)

    moment = start
    while (moment := moment + (1 / rate if paced else rng.expovariate(rate))) < start + seconds:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        tasks.append(asyncio.ensure_future(arrive(moment, requests[len(tasks) % len(requests)])))
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return latencies


def measured(server: int, work: Coroutine[Any, Any, list[float]]) -> Load:
    """Run a load and account for the machine's time meanwhile; `server` is the process that was started."""
    before, ours, machine = tree_cpu(server), time.process_time(), busy_cpu()
    started = time.perf_counter()
    latencies = asyncio.run(work)
    elapsed = time.perf_counter() - started
    cpu, generator, busy = tree_cpu(server) - before, time.process_time() - ours, busy_cpu() - machine
    cores = len(os.sched_getaffinity(0))
    whole = elapsed * cores
    others = max(0.0, busy - cpu - generator) / whole
    return Load(len(latencies), elapsed, tuple(latencies), cpu, generator / whole, others)


def tree_cpu(root: int) -> float:
    """CPU seconds of a process and of its descendants."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number], spent[number] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    return sum(seconds for number, seconds in spent.items() if root in _line(number, parents))


def _line(number: int, parents: dict[int, int]) -> Iterator[int]:
    while number in parents:
        yield number
        number = parents[number]


def busy_cpu() -> float:
    """CPU seconds that this machine was busy."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """A server process that answers on a port."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(REPAIR)]), "GOMP_SPINCOUNT": "3000"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        _await_port(process, port, log)
        yield process.pid
    finally:
        with suppress(ProcessLookupError):  # where it ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(240):
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bench_predict(folder: Path, scratch: Path) -> float:
    """Images per second of `vitral bench predict`."""
    words = ["bench", "predict", "--data", str(folder), "--device", "cpu", "--against", "none", "--rounds", "1"]
    command = [sys.executable, "-m", "vitral", *words, "--json", "--out", str(scratch / "bench.json")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    return row["batch"] / row["seconds"]


def contestants(weights: Path, exported: Sequence[str], litserve: str, settings: Sequence[str]) -> dict[str, list[str]]:
    """Commands by name; PORT stands for the port."""
    serve = [sys.executable, "-m", "vitral", "serve", "--port", "PORT"]
    commands = {"vitral": [*serve, str(weights)]}
    commands |= {f"vitral {Path(path).name}": [*serve, path] for path in exported}
    for setting in settings if litserve else ():
        commands[f"litserve {setting}"] = [litserve, str(LITSERVE), str(weights), "PORT", *setting.split("/")]
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true", help="print the bound, and measure nothing")
    parser.add_argument("--litserve", default="", help="Python of an environment with litserve")
    settings = ["timm/1/8/0", "timm/2/8/1", "timm/2/1/1", "plain/2/8/1", "packed/2/8/1"]
    parser.add_argument("--settings", nargs="+", default=settings, help="model/workers_per_device/batch/fast_queue")
    parser.add_argument("--exported", nargs="*", default=[], help="files of `vitral export` to serve as well")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--open", type=float, default=30, help="seconds of each kind of arrivals per round; 0 for none")
    arguments = parser.parse_args()
    if arguments.simulate:
        return show_simulation()
    if arguments.folder is None:
        parser.error("WEIGHTS and FOLDER are needed")
    requests = requests_of(arguments.folder, 200)
    commands = contestants(arguments.weights, arguments.exported, arguments.litserve, arguments.settings)
    closed: dict[str, list[Load]] = {name: [] for name in commands}
    opened: list[tuple[str, Load]] = []
    predicted: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for round in range(arguments.rounds):
            predicted.append(bench_predict(arguments.folder, Path(scratch)))
            print(f"round {round}: bench predict {predicted[-1]:.1f} images/s", flush=True)
            for name, command in commands.items():
                port = free_port()
                words = [word.replace("PORT", str(port)) for word in command]
                with running(words, port, Path(scratch) / "log") as server:
                    asyncio.run(closed_loop(port, requests, 8, 2))  # warm-up
                    load = closed_loop(port, requests, arguments.clients, arguments.seconds)
                    closed[name].append(measured(server, load))
                    _show(f"  {name}", closed[name][-1])
                    for paced in (True, False) if name == "vitral" and arguments.open else ():
                        rate = 0.7 * closed[name][-1].rate
                        arrivals = open_loop(port, requests, rate, arguments.open, paced)
                        opened.append((ARRIVALS[paced], measured(server, arrivals)))
                        _show(f"  vitral at 70 %, {opened[-1][0]}", opened[-1][1])
    _summary(predicted, closed, opened, arguments.clients)


def _show(name: str, load: Load) -> None:
    print(
        f"{name}: {load.rate:.1f} images/s (n = {load.images}), p50 {load.quantile(0.5) * 1e3:.0f} ms, "
        f"p99 {load.quantile(0.99) * 1e3:.0f} ms, server {load.cpu / load.images * 1e3:.1f} CPU ms per image, "
        f"generator {load.generator:.1%} and others {load.others:.1%} of the machine",
        flush=True,
    )


def _summary(
    predicted: Sequence[float], closed: dict[str, list[Load]], opened: Sequence[tuple[str, Load]], clients: int
) -> None:
    ours = statistics.median(load.rate for load in closed["vitral"])
    bench = statistics.median(predicted)
    print(f"\n{clients} clients, median of {len(predicted)} rounds")
    print(f"bench predict: {bench:.1f} images/s; vitral serve is {ours / bench:.2f} of it")
    cost = statistics.median(load.cpu / load.images for load in closed["vitral"])
    for name, loads in closed.items():
        rate = statistics.median(load.rate for load in loads)
        spent = statistics.median(load.cpu / load.images for load in loads)
        print(f"{name}: {rate:.1f} images/s; vitral is {ours / rate:.2f} times as fast, by CPU time {spent / cost:.2f}")
    for arrivals, load in opened:
        ratio = load.quantile(0.99) / load.quantile(0.5)
        print(f"at 70 % load, {arrivals}: p99 / p50 = {ratio:.2f} (n = {load.images})")


if __name__ == "__main__":
    main()
