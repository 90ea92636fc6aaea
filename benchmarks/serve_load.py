"""Load on `vitral serve`: closed-loop clients, then arrivals at 70 % of that rate; LitServe beside it.

    python benchmarks/serve_load.py WEIGHTS FOLDER --rounds 3 --seconds 15 --litserve ENVIRONMENT/bin/python

WEIGHTS is the model, FOLDER has JPEG files in class folders, and ENVIRONMENT has litserve, torch and vitral's own
requirements. Every contestant gets the same multipart requests, one JPEG each, from raw sockets; all are started
before the first round, and in each round every contestant runs once, in turn, while the others are paused (SIGSTOP).
`vitral bench predict` runs before and after. Numbers are medians over the rounds, with the CPU time of the server's
processes per image, the generator's own share of the machine, that of other programs, and how many of 200 images have
the first class that vitral names.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_clients import Generator, Load, answers, requests_of

SOURCE, REPAIR = (Path(__file__).parents[1] / folder for folder in ("src", "tests/helpers/repair"))  # for timm
ARRIVALS = {True: "even arrivals", False: "Poisson arrivals"}
INSTANT = Path(__file__).with_name("serve_instant.py")
LITSERVE = Path(__file__).with_name("serve_litserve.py")


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


class Server:
    """The processes of one contestant, which answer on one port: one group, so that it can be paused as a whole."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name, self.port = name, free_port()
        paths = [str(SOURCE), str(REPAIR), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GOMP_SPINCOUNT": "3000"}
        self.log = folder / f"{name.replace('/', '-')}.log"
        words = [word.replace("PORT", str(self.port)) for word in command]
        with self.log.open("wb") as stream:
            options: Any = {"env": environment, "stdout": stream, "stderr": stream, "start_new_session": True}
            self.process = subprocess.Popen(words, **options)

    @property
    def ids(self) -> list[int]:
        return [self.process.pid]

    def ready(self, seconds: float = 180) -> bool:
        """Wait until it listens; False, with the end of the log printed, if it does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if self._listens():
                return True
            time.sleep(0.2)
        self.report("did not start")
        return False

    def report(self, what: str) -> None:
        """Print what happened, and the end of the log."""
        print(f"{self.name} {what}:\n{self.log.read_text(errors='replace')[-2000:]}", flush=True)

    def _listens(self) -> bool:
        if self.name.startswith("vitral"):  # all of its workers
            return b'"event": "listening"' in self.log.read_bytes()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def pause(self) -> None:
        """Stop all of its processes, which would disturb others by polling."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Let it run for a block, in which all others are paused."""
        self._signal(signal.SIGCONT)
        time.sleep(0.5)  # what has timed out meanwhile is handled first
        try:
            yield
        finally:
            self.pause()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # where it ended by itself
            os.killpg(self.process.pid, number)

    def terminate(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._signal(signal.SIGKILL)  # also what it left behind


def stop_all(servers: list[Server]) -> None:
    for server in servers:
        server.terminate()
    while servers:
        servers.pop().stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bench_predict(folder: Path, scratch: Path, device: str, model: str) -> float:
    """Images per second of `vitral bench predict`."""
    words = ["bench", "predict", "--data", str(folder), "--device", device, "--against", "none", "--rounds", "1"]
    words += ["--model", model, "--json", "--out", str(scratch / "bench.json")]
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-m", "vitral", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"bench predict failed:\n{done.stderr[-2000:]}", flush=True)
        return float("nan")
    (row,) = json.loads(done.stdout)
    return row["batch"] / row["seconds"]


def contestants(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each contestant, by name; PORT stands for the port."""
    weights, device = str(arguments.weights), arguments.device
    serve = [sys.executable, "-m", "vitral", "serve", "--port", "PORT", "--device", device]
    commands = {}
    for count in arguments.workers:
        name = "vitral" if count == 1 else f"vitral, {count} workers"
        commands[name] = [*serve, "--workers", str(count), weights]
    if arguments.instant:
        for name, decoding in (("vitral without a model", "decode"), ("vitral without decoding", "none")):
            commands[name] = [sys.executable, str(INSTANT), weights, "PORT", decoding]
    commands |= {f"vitral {Path(path).name}": [*serve, path] for path in arguments.exported}
    for setting in arguments.settings if arguments.litserve else ():
        words = [str(LITSERVE), weights, "PORT", device, arguments.timm, *setting.split("/")]
        commands[f"litserve {setting}"] = [arguments.litserve, *words]
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true", help="print the bound, and measure nothing")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="ViT-Ti/16", help="of `bench predict`: what the weights are")
    parser.add_argument("--timm", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k", help="timm's name of it")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="of `vitral serve`, each tried")
    parser.add_argument("--litserve", default="", help="Python of an environment with litserve")
    settings = ["timm/1/8/0/0", "timm/2/8/1/0", "timm/2/1/1/0", "plain/2/8/1/0", "packed/2/8/1/0"]
    words = "model/workers_per_device/batch/fast_queue/num_api_servers"
    parser.add_argument("--settings", nargs="+", default=settings, help=words)
    parser.add_argument("--instant", action="store_true", help="also serve a model that answers at once")
    parser.add_argument("--exported", nargs="*", default=[], help="files of `vitral export` to serve as well")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="of the load generator")
    parser.add_argument("--images", type=int, default=0, help="also measure vitral with as many images per request")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--open", type=float, default=30, help="seconds of each kind of arrivals; 0 for none")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.simulate:
        return show_simulation()
    if arguments.folder is None:
        parser.error("WEIGHTS and FOLDER are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as scratch:
        servers: list[Server] = []
        try:
            measure(arguments, Path(scratch), servers)
        finally:
            stop_all(servers)


def measure(arguments: argparse.Namespace, scratch: Path, servers: list[Server]) -> None:
    generator = Generator(arguments.processes)
    singles = requests_of(arguments.folder, 200)
    several = requests_of(arguments.folder, 200, arguments.images) if arguments.images else []
    predicted = [bench_predict(arguments.folder, scratch, arguments.device, arguments.model)]
    print(f"bench predict {predicted[0]:.1f} images/s", flush=True)
    servers += [Server(name, command, scratch) for name, command in contestants(arguments).items()]
    started = time.monotonic()
    ready = [server for server in servers if server.ready()]
    print(f"{len(ready)} of {len(servers)} contestants started in {time.monotonic() - started:.0f} s", flush=True)
    loads: dict[str, list[Load]] = {}
    agreement: dict[str, float] = {}
    reference: list[tuple[str, float]] = []
    for server in ready:
        server.pause()
    for server in list(ready):
        try:
            with server.measured():
                found = asyncio.run(answers(server.port, singles))
                reference = reference or found
                agreement[server.name] = statistics.mean(a[0] == b[0] for a, b in zip(found, reference, strict=True))
                generator.closed(server.ids, server.port, singles, arguments.clients, 1)  # warm-up
        except Exception as error:  # the others are still measured
            ready.remove(server)
            server.report(f"failed ({error!r})")
    for round in range(arguments.rounds):
        for server in ready:
            with server.measured():
                load = generator.closed(server.ids, server.port, singles, arguments.clients, arguments.seconds)
            loads.setdefault(server.name, []).append(load)
            _show(f"  round {round}, {server.name}", load)
            if several and server.name.startswith("vitral"):
                with server.measured():
                    load = generator.closed(server.ids, server.port, several, arguments.clients // 4, arguments.seconds)
                name = f"{server.name}, {arguments.images} images per request"
                loads.setdefault(name, []).append(replace(load, images=load.images * arguments.images))
                _show(f"  round {round}, {name}", loads[name][-1])
    ours = [server for server in ready if server.name.startswith("vitral") and " without " not in server.name]
    best = max(ours, key=lambda server: _median(loads[server.name]))
    opened = []
    for paced in (True, False) if arguments.open else ():
        rate = 0.7 * _median(loads[best.name])
        with best.measured():
            load = generator.opened(best.ids, best.port, singles, rate, arguments.open, paced)
        opened.append((f"{best.name} at 70 % load, {ARRIVALS[paced]}", load))
        _show(f"  {opened[-1][0]}", load)
    stop_all(servers)
    predicted.append(bench_predict(arguments.folder, scratch, arguments.device, arguments.model))
    _summary(arguments, predicted, loads, opened, agreement)


def _median(loads: Sequence[Load]) -> float:
    return statistics.median(load.rate for load in loads)


def _show(name: str, load: Load) -> None:
    print(
        f"{name}: {load.rate:.1f} images/s (n = {load.images}), p50 {load.quantile(0.5) * 1e3:.1f} ms, "
        f"p99 {load.quantile(0.99) * 1e3:.1f} ms, server {load.cpu / load.images * 1e3:.2f} CPU ms per image, "
        f"generator {load.generator:.1%} and others {load.others:.1%} of the machine",
        flush=True,
    )


def _summary(
    arguments: argparse.Namespace,
    predicted: Sequence[float],
    loads: dict[str, list[Load]],
    opened: Sequence[tuple[str, Load]],
    agreement: dict[str, float],
) -> None:
    bench = max(predicted)
    rows = {name: _row(found) for name, found in loads.items()}
    peer = max((row["rate"] for name, row in rows.items() if name.startswith("litserve")), default=float("nan"))
    rates = " and ".join(f"{rate:.1f}" for rate in predicted)
    print(f"\n{arguments.model}, {arguments.device}, {arguments.clients} clients, medians of {arguments.rounds} rounds")
    print(f"bench predict, before and after: {rates} images/s (the higher one counts)\n")
    print(
        "| contestant | images/s | of bench predict | of the fastest LitServe | p50 ms | p99 ms | CPU ms | agreement |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        row |= {"of_bench": row["rate"] / bench, "of_litserve": row["rate"] / peer, "agreement": agreement.get(name)}
        same = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        print(
            f"| {name} | {row['rate']:.1f} | {row['of_bench']:.2f} | {row['of_litserve']:.2f} | {row['p50'] * 1e3:.1f} "
            f"| {row['p99'] * 1e3:.1f} | {row['cpu'] * 1e3:.2f} | {same} |"
        )
    for name, load in opened:
        ratio = load.quantile(0.99) / load.quantile(0.5)
        print(f"{name}: {load.rate:.1f} images/s, p99 / p50 = {ratio:.2f} (n = {load.images})")
    if arguments.json:
        late = {name: _row([load]) for name, load in opened}
        arguments.json.write_text(json.dumps({"bench": predicted, "closed": rows, "open": late}, indent=1))


def _row(loads: Sequence[Load]) -> dict[str, Any]:
    return {
        "rate": _median(loads),
        "rates": [load.rate for load in loads],
        "images": [load.images for load in loads],
        "p50": statistics.median(load.quantile(0.5) for load in loads),
        "p99": statistics.median(load.quantile(0.99) for load in loads),
        "cpu": statistics.median(load.cpu / load.images for load in loads),
        "generator": statistics.median(load.generator for load in loads),
        "others": statistics.median(load.others for load in loads),
    }


if __name__ == "__main__":
    main()
