"""Several processes on one port: answers, a killed worker, shutdown, reloads and metrics."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from prometheus_client.parser import text_string_to_metric_families
from served import clients_until_refused, photograph, saved

import vitral
from vitral.api.serve import _worker_count
from vitral.errors import UserError
from vitral.server.models import Settings
from vitral.server.supervisor import Supervisor

SOURCE = Path(__file__).parents[2] / "src"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share a port on Linux only")


class Workers:
    """`vitral serve --workers 2` as a command."""

    def __init__(self, weights: Path, log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "vitral", "serve", f"m={weights}", "--port", "0", "--device", "cpu", "--json"]
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command, "--workers", "2"], env=environment, stdout=subprocess.PIPE, stderr=stream
            )

    def lines(self, event: str) -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
        return [line for line in logged if line["event"] == event]

    @property
    def port(self) -> int:
        return self.lines("listening")[0]["port"]

    @property
    def pids(self) -> list[int]:
        """The workers."""
        return list(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Status and content, on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            content = response.read()
            return response.status, content.decode() if path == "/metrics" else json.loads(content)
        finally:
            connection.close()

    def answered_by_both(self) -> bool:
        """Whether both workers have answered a request."""
        for _ in range(20):
            self.ask("GET", "/models")
        return len({line["pid"] for line in self.lines("request")} & set(self.pids)) == 2

    def stop(self) -> dict[str, int]:
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0
        return json.loads(out)


@contextmanager
def workers(weights: Path, log: Path) -> Iterator[Workers]:
    running = Workers(weights, log)
    try:
        wait_until(lambda: running.lines("listening") or running.process.poll() is not None)
        assert running.process.poll() is None, log.read_text()
        yield running
    finally:
        running.process.kill()
        with running.process:  # closes its pipe and waits for it
            pass


def metric(text: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_workers_share_a_port_metrics_and_reloads(tmp_path):
    weights = saved(tmp_path / "m.safetensors")
    with workers(weights, tmp_path / "log") as server:
        assert server.lines("listening")[0]["workers"] == 2
        wait_until(server.answered_by_both)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError):
                other.bind(("127.0.0.1", server.port))
        with pytest.raises(UserError, match="choose another --port"):
            vitral.serve([weights], port=server.port, device="cpu", workers=2)

        before = [server.ask("POST", "/predict", photograph()) for _ in range(40)]
        assert {status for status, _ in before} == {200}
        answers = {json.dumps(answer) for _, answer in before}
        assert len(answers) == 1
        text = server.ask("GET", "/metrics")[1]
        assert metric(text, "vitral_images_total", model="m", result="predicted") == 40
        assert metric(text, "vitral_batch_size_sum", model="m") == 40
        assert metric(text, "vitral_model_loads_total", model="m", result="loaded") == 2
        assert metric(text, "vitral_pending_images") == 0
        resident = metric(text, "process_resident_memory_bytes")
        assert resident > 1.5 * min(_resident(pid) for pid in server.pids)

        saved(weights, seed=7)  # by HTTP, which reaches one worker
        assert server.ask("POST", "/v2/repository/models/m/load") == (200, {})
        assert len(server.lines("model_loaded")) == 4
        answers |= (new := {json.dumps(server.ask("POST", "/predict", photograph())[1]) for _ in range(40)})
        assert (len(new), len(answers)) == (1, 2)
        saved(weights, seed=8)  # by a signal
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(server.lines("model_loaded")) == 6)
        wait_until(lambda: json.dumps(server.ask("POST", "/predict", photograph())[1]) not in answers)
        new = {json.dumps(server.ask("POST", "/predict", photograph())[1]) for _ in range(40)}
        assert len(new - answers) == 1
        weights.write_bytes(b"broken")
        status, answer = server.ask("POST", "/v2/repository/models/m/load")
        assert (status, "the old model stays" in answer["error"]) == (400, True)
        assert {json.dumps(server.ask("POST", "/predict", photograph())[1]) for _ in range(20)} == new - answers
        # A broken file is not what a worker that has died can start with: it waits for a file that is whole.
        os.kill(server.pids[0], signal.SIGKILL)
        wait_until(lambda: [line for line in server.lines("worker_ended") if line["error"]])
        assert server.ask("GET", "/readyz") == (503, {"error": "not all workers are ready."})
        assert server.ask("POST", "/predict", photograph())[0] == 200
        saved(weights, seed=9)
        wait_until(lambda: server.ask("GET", "/readyz")[0] == 200)
        server.stop()


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_killed_worker_is_restarted_and_sigterm_loses_no_request(tmp_path):
    weights = saved(tmp_path / "m.safetensors")
    with workers(weights, tmp_path / "log") as server:
        wait_until(server.answered_by_both)
        killed = server.pids[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: server.lines("worker_ended"))
        assert server.lines("worker_ended")[0]["code"] == -signal.SIGKILL
        statuses = Counter(server.ask("POST", "/predict", photograph())[0] for _ in range(20))  # by the other one
        assert statuses == {200: 20}
        wait_until(lambda: server.ask("GET", "/readyz")[0] == 200)
        assert killed not in server.pids
        wait_until(server.answered_by_both)
        assert metric(server.ask("GET", "/metrics")[1], "vitral_pending_images") == 0

        pids = server.pids
        counts = asyncio.run(clients_until_refused(server.port, server.process, lambda: True))
        out, _ = server.process.communicate(timeout=300)
        assert server.process.returncode == 0
        assert counts["lost"] == 0
        assert json.loads(out)["images"] == 20 + counts["answered"]  # also those of the worker that was killed
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_end_with_their_supervisor(tmp_path):
    with workers(saved(tmp_path / "m.safetensors"), tmp_path / "log") as server:
        pids = server.pids
        server.process.kill()
        wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_models_that_cannot_be_loaded_and_wrong_numbers_are_sentences(tmp_path, monkeypatch):
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    weights = saved(tmp_path / "m.safetensors")
    options: dict[str, Any] = {"device": "cpu", "port": 0}
    with pytest.raises(UserError, match=r"broken\.safetensors"):
        vitral.serve([tmp_path / "broken.safetensors"], workers=2, **options)
    with pytest.raises(UserError, match="workers must be from 1 to 256, not 0"):
        vitral.serve([weights], workers=0, **options)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="workers=2 needs Linux"):
        vitral.serve([weights], workers=2, **options)
    assert _worker_count(None, "cuda") == 1


def test_a_worker_that_ends_without_reading_its_messages_is_one_sentence():
    """Its socket is then reset, not closed."""
    supervisor = Supervisor("import os; (lambda descriptor: os._exit(3))", {}, Settings(port=0), 2)
    with pytest.raises(UserError, match="a worker ended with 3 before it was ready"):
        supervisor.run_until_stopped()


def test_a_gpu_has_several_workers_by_default(monkeypatch):
    for cores, workers in ((1, 1), (2, 1), (8, 4), (64, 8)):
        monkeypatch.setattr("vitral.api.serve.cores", lambda cores=cores: cores)
        assert _worker_count(None, "cuda:1") == workers
    assert _worker_count(None, "cpu") == 1
    assert _worker_count(3, "cpu") == 3
