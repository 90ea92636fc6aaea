"""A real server on a free port with a tiny model: answers, limits, clients that misbehave, and shutdown."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import SMALL
from patience import wait_until
from prometheus_client.parser import text_string_to_metric_families
from served import NAMES, PIPELINE, clients_until_refused, photograph, post, saved

import vitral
from vitral.api.serve import _load, named_sources
from vitral.checkpoints.card import Card
from vitral.data.images import encode_png
from vitral.data.preprocess import parse_deterministic
from vitral.errors import UserError
from vitral.server import process
from vitral.server.batching import Batcher
from vitral.server.models import Settings, top_classes
from vitral.server.monitoring import Metrics
from vitral.server.process import ModelServer
from vitral.server.runtime import Outputs, Runtime, batch_sizes

SOURCE = Path(__file__).parents[2] / "src"


class Running:
    """A server in a thread."""

    def __init__(self, sources: dict[str, Path], **settings: Any) -> None:
        loaders = {name: self._loader(path) for name, path in sources.items()}
        options: dict[str, Any] = {"port": 0, "timeout": 10.0, **settings}
        self.server = ModelServer(loaders, Settings(**options))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    @staticmethod
    def _loader(path: Path) -> Callable[[], Runtime]:
        return lambda: _load(path, "", "", "cpu", 8, None)

    def _run(self) -> None:
        self.server.run_until_stopped()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.should_exit = True
            self.thread.join()

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer; header names are written with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        status, _, answer = self.ask(method, path, body, **headers)
        return status, json.loads(answer)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=30)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "tiny.safetensors")


@pytest.fixture(scope="module")
def running(weights: Path) -> Iterator[Running]:
    other = saved(weights.with_name("other.safetensors"), names=("v", "w", "x", "y", "z"), seed=1)
    server = Running({"tiny": weights, "other": other}, max_body=100_000)
    yield server
    server.stop()


@contextmanager
def started(*arguments: Any, **settings: Any) -> Iterator[Running]:
    server = Running(*arguments, **settings)
    try:
        yield server
    finally:
        server.stop()


def multipart(*images: bytes) -> tuple[bytes, dict[str, str]]:
    parts = [b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n%b\r\n' % pair for pair in enumerate(images)]
    return b"".join(parts) + b"--b--\r\n", {"Content_Type": "multipart/form-data; boundary=b"}


def test_answers_are_those_of_predict(running, weights, tmp_path):
    images = [photograph(seed) for seed in range(3)] + [encode_png(np.zeros((33, 50, 3), np.uint8))]
    paths = []
    for number, image in enumerate(images):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(image)
    expected = vitral.predict(weights, paths, top=3, device="cpu").as_dict()["predictions"]
    with ThreadPoolExecutor(8) as pool:  # in batches of whatever size
        answers = list(pool.map(lambda i: running.json("POST", "/predict?top=3", images[i % 4]), range(40)))
    for number, (status, answer) in enumerate(answers):
        found, wanted = answer["predictions"][0]["classes"], expected[number % 4]["classes"]
        assert status == 200
        assert answer["model"] == "tiny"
        assert [each["name"] for each in found] == [each["name"] for each in wanted]
        assert [e["probability"] for e in found] == pytest.approx([e["probability"] for e in wanted], abs=1e-6)
    assert len({answer["predictions"][0]["classes"][0]["probability"] for _, answer in answers}) >= 4


def test_several_images_models_and_attention(running):
    body, headers = multipart(photograph(1), b"no image", photograph(2))
    status, answer = running.json("POST", "/predict?model=other&attention=1", body, **headers)
    first, second, third = answer["predictions"]
    assert status == 200
    assert answer["model"] == "other"
    assert second == {"error": "not an image in a known format"}
    assert {each["name"] for each in first["classes"]} == set("vwxyz")
    assert sum(each["probability"] for each in third["classes"]) == pytest.approx(1, abs=1e-6)
    shown = first["attention"]
    assert len(shown["values"]) == shown["rows"] * shown["columns"] == 16
    assert sum(shown["values"]) == pytest.approx(1, abs=1e-5)
    # 60 x 90 pixels become 40 x 60, of which the middle 32 x 32 are seen
    assert shown["box"] == pytest.approx([14 / 60, 4 / 40, 32 / 60, 32 / 40])
    assert first != third
    listed = running.json("GET", "/models")[1]
    assert listed[0] == {"name": "tiny", "classes": 5, "image": [32, 32], "attention": True}


def test_attention_is_the_capture_of_the_last_block(running, weights):
    image = photograph(5)
    shown = running.json("POST", "/predict?attention=true", image)[1]["predictions"][0]["attention"]["values"]
    model, card = vitral.load(weights)
    with vitral.capture(model, layers=[-1], rows="cls") as seen:
        model(card.transform()(image)[None])
    expected = seen[-1][0, :, 0, -16:].mean(0)
    assert shown == pytest.approx((expected / expected.sum()).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "method, path, body, status, says",
    [
        ("POST", "/predict", b"", 400, "there is no image"),
        ("POST", "/predict", b"no image", 415, "not an image in a known format"),
        ("POST", "/predict", photograph()[:200], 415, "cannot be read"),
        ("POST", "/predict", b"\xff" * 100_001, 413, "more than 100,000 bytes"),
        ("POST", "/predict?top=0", photograph(), 400, "top=0 is not"),
        ("POST", "/predict?top=x", photograph(), 400, "top=x is not"),
        ("POST", "/predict?attention=2", photograph(), 400, "attention=2 is neither"),
        ("POST", "/predict?model=none", photograph(), 404, "no model 'none'"),
        ("POST", "/predict?path=/etc/passwd", photograph(), 400, "unknown or repeated parameter 'path'"),
        ("GET", "/predict", None, 405, "Method Not Allowed"),
        ("GET", "/nothing", None, 404, "Not Found"),
    ],
)
def test_mistakes_are_sentences(running, method, path, body, status, says):
    found, answer = running.json(method, path, body)
    assert (found, says in answer["error"]) == (status, True), answer


def test_clients_that_change_bytes_are_told(running):
    stripped = photograph().replace(b"\0", b"")  # as `curl -d @photo.jpg` does
    status, answer = running.json("POST", "/predict", stripped, Content_Type="application/x-www-form-urlencoded")
    assert (status, "use --data-binary" in answer["error"]) == (415, True)
    status, answer = running.json("POST", "/predict", b"\x1f\x8b", Content_Encoding="gzip")
    assert (status, "compressed bodies" in answer["error"]) == (415, True)
    assert running.json("POST", "/predict", photograph(), Content_Encoding="Identity")[0] == 200


def test_damaged_forms_are_refused(running):
    for body, kind in ((b"--b\r\nContent", "; boundary=b"), (b"--b--\r\n", "; boundary=b"), (b"x", "")):
        status, answer = running.json("POST", "/predict", body, Content_Type=f"multipart/form-data{kind}")
        assert (status, "multipart" in answer["error"]) == (400, True)
    assert running.json("POST", "/predict", photograph(), Content_Encoding="gzip")[0] == 415


def test_too_many_pixels(running, monkeypatch):
    monkeypatch.setenv("VITRAL_MAX_PIXELS", "5000")
    status, answer = running.json("POST", "/predict", photograph())
    assert status == 413
    assert "too many pixels (5,400" in answer["error"]


def test_oversize_chunks_without_a_length_are_refused(running):
    with running.raw() as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall((b"4000\r\n" + b"\xff" * 0x4000 + b"\r\n") * 7)
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_health_metrics_and_description(running):
    assert running.json("GET", "/healthz") == (200, {"live": True})
    assert running.json("GET", "/readyz") == (200, {"ready": True})
    running.json("POST", "/predict", photograph())
    status, headers, text = running.ask("GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    predicted = [s for s in families["vitral_images"].samples if s.labels == {"model": "tiny", "result": "predicted"}]
    assert predicted[0].value >= 1
    sizes = {s.name: s.value for s in families["vitral_batch_size"].samples if s.labels.get("model") == "tiny"}
    assert sizes["vitral_batch_size_sum"] == predicted[0].value
    assert not any("nothing" in str(sample.labels) for sample in families["vitral_requests"].samples)
    described = running.json("GET", "/openapi.json")[1]
    assert described["openapi"] == "3.1.0"
    assert {"/predict", "/v2/models/{model}/infer", "/metrics"} <= set(described["paths"])
    status, headers, _ = running.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_a_full_queue_asks_to_retry(weights):
    with started({"tiny": weights}, max_queue=4) as server:
        served = server.server._service.models["tiny"]
        body, headers = multipart(*[photograph()] * 5)
        assert server.json("POST", "/predict", body, **headers)[0] == 413  # would never fit
        with served.admitted(4):
            status, found, _ = server.ask("POST", "/predict", photograph())
            assert (status, found["retry-after"]) == (429, "1")
        assert server.json("POST", "/predict", photograph())[0] == 200
        assert served.pending == 0


def test_slow_headers_end(weights):
    with started({"tiny": weights}, timeout=0.5) as server, server.raw() as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost")
        assert received(client) == b""


def test_slow_bodies_and_answers_end(weights, monkeypatch):
    limited = process._limited_protocol
    # A machine that is busy may be late for both limits at once, and the connection must not be closed first.
    monkeypatch.setattr(process, "_limited_protocol", lambda timeout: limited(600.0))
    with started({"tiny": weights}, timeout=0.5) as server:
        with server.raw() as client:
            client.sendall(post(photograph())[:-1])
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        with held(server), server.raw() as client:
            client.sendall(post(photograph(), "Connection: close"))
            answer = received(client)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in answer.lower()


@pytest.mark.parametrize("chunked", [False, True])
def test_offers_of_another_protocol_are_ignored(running, chunked):
    image = photograph()
    framing, body = b"Content-Length: %d" % len(image), image
    if chunked:
        framing, body = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(image), image)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    post = b"POST /predict?top=1 HTTP/1.1\r\nHost: a\r\n" + offer + framing + b"\r\n\r\n" + body
    get = b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + offer
    with running.raw() as client:
        client.sendall(post[:-100])
        time.sleep(0.1)
        client.sendall(post[-100:] + get + b"\r\n" + get.replace(b"Upgrade,", b"Upgrade, close,") + b"\r\n")
        found = received(client)
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200"]
    assert found.count(b'"probability"') == 1


def test_endless_headers_end_the_connection(running):
    with running.raw() as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(2000):
                client.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")
            client.sendall(b"\r\n")
            assert client.recv(1) == b""
            raise OSError


def test_a_client_that_leaves_frees_its_place(weights):
    with started({"tiny": weights}) as server:
        served = server.server._service.models["tiny"]
        image = photograph()
        with held(server):
            with server.raw() as client:
                client.sendall(post(image))
                wait_until(lambda: served.pending == 1)
            wait_until(lambda: served.pending == 0)
        assert server.json("POST", "/predict", image)[0] == 200


def received(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(4096), b""))


@contextmanager
def held(server: Running) -> Iterator[None]:
    """No batch of the model ends within the block."""
    served, end = server.server._service.models["tiny"], threading.Event()
    real = served.runtime

    def wait(pixels: np.ndarray, attention: bool) -> Outputs:
        end.wait()
        return real.runners[0](pixels, attention)

    served.runtime = replace(real, runners=(wait,) * len(real.runners))
    try:
        yield
    finally:
        end.set()
        served.runtime = real


def test_token(weights):
    with started({"tiny": weights}, token="a-token-of-16-letters") as server:
        assert server.json("GET", "/healthz")[0] == 200
        for path in ("/models", "/metrics", "/predict", "/v2", "/openapi.json", "/nothing"):
            status, headers, _ = server.ask("GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert server.json("GET", "/models", Authorization="Bearer a-token-of-16-lettert")[0] == 401
        assert server.json("GET", "/models", Authorization="Bearer a-token-of-16-letters")[0] == 200


def test_reload_serves_the_new_file_and_keeps_the_old_one_if_that_is_broken(tmp_path):
    path, load = saved(tmp_path / "model.safetensors"), "/v2/repository/models/m/load"
    with started({"m": path}) as server:
        before = server.json("POST", "/predict", photograph())[1]["predictions"]
        saved(path, seed=7)
        assert server.json("POST", "/predict", photograph())[1]["predictions"] == before
        assert server.json("POST", load, Origin="http://evil.example")[0] == 403
        assert server.json("POST", load, b'{"parameters": {"file:1/model.bin": "x"}}')[0] == 400
        assert server.json("POST", load) == (200, {})
        after = server.json("POST", "/predict", photograph())[1]["predictions"]
        assert after != before
        path.write_bytes(b"broken")
        status, answer = server.json("POST", load)
        assert (status, "the old model stays" in answer["error"]) == (400, True)
        assert server.json("POST", "/predict", photograph())[1]["predictions"] == after


def test_exported_files_are_served(running, weights, tmp_path):
    vitral.export_model(weights, tmp_path / "tiny.onnx", outputs=["attention"])
    path = f"/predict?attention=1&top={len(NAMES)}"
    wanted = running.json("POST", path, photograph(6))[1]["predictions"][0]
    with started({"m": tmp_path / "tiny.onnx"}) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.json("POST", path, photograph(6)), range(8)))
        assert server.json("GET", "/v2/models/m")[1]["platform"] == "onnxruntime_onnx"
    for status, answer in answers:
        (found,) = answer["predictions"]
        assert status == 200
        assert [each["name"] for each in found["classes"]] == [each["name"] for each in wanted["classes"]]
        for key in ("values", "box"):
            assert found["attention"][key] == pytest.approx(wanted["attention"][key], abs=1e-4)


def infer(running: Running, tensor: dict[str, Any], tail: bytes | None = None, **more: Any) -> tuple[int, Any]:
    head = json.dumps({"inputs": [tensor], **more}).encode()
    headers = {} if tail is None else {"Inference_Header_Content_Length": str(len(head))}
    return running.json("POST", "/v2/models/tiny/infer", head + (tail or b""), **headers)


def test_open_inference_protocol_in_json(running):
    assert running.json("GET", "/v2")[1]["name"] == "vitral"
    assert running.json("GET", "/v2/health/ready")[0] == running.json("GET", "/v2/models/tiny/ready")[0] == 200
    described = running.json("GET", "/v2/models/tiny/versions/1")[1]
    assert described["inputs"][1] == {"name": "pixels", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}
    assert running.json("GET", "/v2/models/tiny/versions/2")[0] == 404
    assert [row["name"] for row in running.json("POST", "/v2/repository/index")[1]] == ["tiny", "other"]
    image = photograph(3)
    wanted = running.json("POST", "/predict", image)[1]["predictions"][0]["classes"]
    by_name = [next(each["probability"] for each in wanted if each["name"] == name) for name in NAMES]
    texts = {"name": "images", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(image).decode()]}
    status, answer = infer(running, texts, id="7", outputs=[{"name": "attention"}, {"name": "probabilities"}])
    assert (status, answer["id"], answer["model_name"]) == (200, "7", "tiny")
    attention, found = answer["outputs"]
    assert (attention["shape"], found["shape"]) == ([1, 4, 4], [1, 5])
    assert found["data"] == pytest.approx(by_name, abs=1e-6)
    from vitral.data.images import decode

    pixels = parse_deterministic(PIPELINE)(decode(image))
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [2, 32, 32, 3]}
    status, answer = infer(running, {**tensor, "data": [pixels.tolist()] * 2})
    assert (status, answer["outputs"][0]["data"]) == (200, pytest.approx(by_name * 2, abs=1e-6))


def test_open_inference_protocol_in_binary(running):
    image = photograph(3)
    tail = struct.pack("<I", len(image)) + image
    tensor = {"name": "images", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference_Header_Content_Length": str(len(head))}
    status, headers, body = running.ask("POST", "/v2/models/tiny/versions/1/infer", head + tail, **length)
    split = int(headers["inference-header-content-length"])
    (output,) = json.loads(body[:split])["outputs"]
    found = np.frombuffer(body[split:], "<f4")
    assert (status, output["parameters"]["binary_data_size"], len(found)) == (200, 20, 5)
    wanted = running.json("POST", "/predict?top=1", image)[1]["predictions"][0]["classes"][0]
    assert found.max() == pytest.approx(wanted["probability"], abs=1e-6)
    top = [{"name": "probabilities", "parameters": {"classification": 1}}]
    (text,) = infer(running, tensor, tail, outputs=top)[1]["outputs"][0]["data"]
    assert text == f"{found.max():.6f}:{found.argmax()}:{wanted['name']}"


PIXELS = {"name": "pixels", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * 3072}
TEXTS = {"name": "images", "datatype": "BYTES", "shape": [1], "data": ["AAAA"]}


@pytest.mark.parametrize(
    "tensor, more, status",
    [
        ({**PIXELS, "shape": [1, 31, 32, 3]}, {}, 400),
        ({**PIXELS, "data": [0] * 3071}, {}, 400),
        ({**PIXELS, "data": [256] * 3072}, {}, 400),
        ({**PIXELS, "data": [0.5] * 3072}, {}, 400),
        ({**PIXELS, "data": [[0], [0, 1]]}, {}, 400),
        ({**PIXELS, "data": None}, {}, 400),
        ({**PIXELS, "datatype": "FP32"}, {}, 400),
        ({**PIXELS, "shape": [1.5, 32, 32, 3]}, {}, 400),
        ({**PIXELS, "parameters": {"binary_data_size": 5}}, {}, 400),
        ({**PIXELS, "parameters": 5}, {}, 400),
        ({**TEXTS, "data": ["/etc/passwd"]}, {}, 400),
        ({**TEXTS, "data": [3]}, {}, 400),
        ({**TEXTS, "shape": [2]}, {}, 400),
        (TEXTS, {}, 415),
        (PIXELS, {"outputs": [{"name": "logits"}]}, 400),
        (PIXELS, {"outputs": [3]}, 400),
        (PIXELS, {"outputs": [{"name": "probabilities", "parameters": {"classification": -1}}]}, 400),
        (3, {}, 400),
    ],
)
def test_wrong_tensors_are_refused(running, tensor, more, status):
    found, answer = infer(running, tensor, **more)
    assert (found, set(answer)) == (status, {"error"})


def test_requests_that_are_not_json_are_refused(running):
    for body in (b"", b"[", b"[]", b"[" * 100_000, b"{}"):
        assert running.json("POST", "/v2/models/tiny/infer", body)[0] == 400
    assert running.json("POST", "/v2/models/tiny/infer", b"{}", Inference_Header_Content_Length="9")[0] == 400


def test_stock_client(running):
    client_library = pytest.importorskip("tritonclient.http")
    client = client_library.InferenceServerClient(f"127.0.0.1:{running.server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.get_model_metadata("tiny")["inputs"][0]["name"] == "images"
    image = photograph(4)
    wanted = running.json("POST", "/predict?top=1", image)[1]["predictions"][0]["classes"][0]
    from vitral.data.images import decode

    pixels = parse_deterministic(PIPELINE)(decode(image))[None]
    for name, datatype, array in (("images", "BYTES", np.array([image], object)), ("pixels", "UINT8", pixels)):
        for binary in (True, False) if name == "pixels" else (True,):
            given = client_library.InferInput(name, list(array.shape), datatype)
            given.set_data_from_numpy(array, binary_data=binary)
            found = client.infer("tiny", [given]).as_numpy("probabilities")
            assert found.shape == (1, 5)
            assert found.max() == pytest.approx(wanted["probability"], abs=1e-6)
    client.load_model("tiny")
    client.close()


def test_sigterm_under_load_answers_everything_and_sighup_reloads(weights, tmp_path):
    """As a process, by its command: the log is JSON lines, and the exit code 0."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitral", "serve", f"m={weights}", "--port", "0", "--device", "cpu", "--json"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)

    def lines(event: str) -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.endswith("}")]
        return [line for line in logged if line["event"] == event]

    try:
        wait_until(lambda: bool(lines("listening")))
        server.send_signal(signal.SIGHUP)
        port = lines("listening")[0]["port"]
        counts = asyncio.run(clients_until_refused(port, server, lambda: len(lines("model_loaded")) == 2))
        out, _ = server.communicate(timeout=300)
    finally:
        server.kill()
    assert server.returncode == 0
    assert counts["lost"] == 0
    assert json.loads(out) == {"requests": counts["answered"], "images": counts["answered"]}
    assert [line["version"] for line in lines("model_loaded")] == [1, 2]
    assert {"id", "seconds", "status", "images"} <= set(lines("request")[0])


class _Recorded:
    """A runner that records the sizes of its batches, and computes the mean of the pixels when it may."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may = threading.Event()
        self.may.set()

    def __call__(self, pixels: np.ndarray, attention: bool) -> Outputs:
        self.sizes.append(len(pixels))
        self.may.wait()
        means = pixels.reshape(len(pixels), -1).mean(axis=1, keepdims=True)
        return Outputs(means, means, means[:, None] if attention else None)


def runtime_of(runner: _Recorded, *, gains_by_batch: bool = True) -> Runtime:
    return Runtime(Card(SMALL, NAMES), parse_deterministic(PIPELINE), (runner,), True, "test", gains_by_batch)


def batched(runner: _Recorded, images: int, max_wait: float, attention: Callable[[int], bool]) -> list[float]:
    runtime = runtime_of(runner)
    batcher = Batcher("m", 1, Metrics(), max_batch=4, max_wait=max_wait)
    futures = [batcher.submit(runtime, np.full((2, 2, 3), i, np.uint8), attention(i)) for i in range(images)]
    batcher.close()
    return [float(future.result().probabilities[0]) for future in futures]


def test_batches_fill_and_keep_their_order():
    runner = _Recorded()
    assert batched(runner, 11, 600.0, lambda i: False) == list(range(11))
    assert runner.sizes == [4, 4, 3]
    alternating = _Recorded()
    assert batched(alternating, 6, 0.0, lambda i: i >= 3) == list(range(6))
    assert max(alternating.sizes) <= 3  # with and without attention are not mixed


def test_where_batches_gain_nothing_images_are_computed_one_by_one_until_many_wait():
    runner = _Recorded()
    runtime, batcher = runtime_of(runner, gains_by_batch=False), Batcher("m", 1, Metrics(), max_batch=4, max_wait=60)
    for count, sizes in ((3, [1, 1, 1]), (9, [1, 4, 4])):
        runner.sizes.clear()
        runner.may.clear()
        first = batcher.submit(runtime, np.zeros((2, 2, 3), np.uint8), False)
        wait_until(lambda: len(runner.sizes) == 1)  # the others arrive while it is computed
        others = [batcher.submit(runtime, np.full((2, 2, 3), i, np.uint8), False) for i in range(1, count)]
        runner.may.set()
        assert [float(future.result(60).probabilities[0]) for future in (first, *others)] == list(range(count))
        assert runner.sizes == sizes
    batcher.close()


def test_an_image_waits_as_stated_and_a_full_batch_not_at_all():
    runner = _Recorded()
    runtime, image = runtime_of(runner), np.zeros((2, 2, 3), np.uint8)
    batcher = Batcher("m", 1, Metrics(), max_batch=4, max_wait=0.2)
    start = time.monotonic()
    batcher.submit(runtime, image, False).result(60)
    assert time.monotonic() - start > 0.19
    batcher.close()
    batcher = Batcher("m", 1, Metrics(), max_batch=4, max_wait=600.0)
    for future in [batcher.submit(runtime, image, False) for _ in range(4)]:
        future.result(60)
    batcher.close()
    assert runner.sizes == [1, 4]


def test_a_batch_that_fills_does_not_wake_its_thread_for_each_image(monkeypatch):
    runner = _Recorded()
    runtime, image = runtime_of(runner), np.zeros((2, 2, 3), np.uint8)
    batcher = Batcher("m", 1, Metrics(), max_batch=8, max_wait=600.0)
    woken: list[int] = []
    notify = batcher._changed.notify
    monkeypatch.setattr(batcher._changed, "notify", lambda n=1: (woken.append(len(batcher)), notify(n)))
    futures = [batcher.submit(runtime, image, False) for _ in range(8)]
    for future in futures:
        future.result(60)
    batcher.close()
    assert woken[:2] == [1, 8]
    assert runner.sizes == [8]


def test_a_failing_batch_fails_its_images_alone(weights):
    with started({"tiny": weights}) as server:
        served = server.server._service.models["tiny"]
        real = served.runtime

        def broken(pixels: np.ndarray, attention: bool) -> Outputs:
            raise RuntimeError("out of memory")

        served.runtime = replace(real, runners=(broken,) * len(real.runners))
        status, answer = server.json("POST", "/predict", photograph())
        assert (status, answer["error"].startswith("internal error: see the log for ")) == (500, True)
        served.runtime = real
        assert server.json("POST", "/predict", photograph())[0] == 200


@pytest.mark.parametrize(
    "image, pipeline",
    [
        ((60, 90), "decode|resize_small(40)|central_crop(32)"),
        ((90, 61), "decode|resize_short(40, pil_bicubic)|center_crop(32)"),
        ((64, 64), "decode|resize(48)|central_crop(32, 16)"),
        ((50, 80), "decode|resize_fit(32)|pad(40, 48)|center_crop(40, 48)"),
        ((20, 24), "decode|center_crop(32)"),
        ((40, 900), "decode|resize_small(40)|central_crop(32)"),
    ],
)
def test_the_region_that_is_shown(image, pipeline):
    """Where the pixels of a result come from, measured on images that encode their position."""
    steps = parse_deterministic(pipeline)
    left, top, width, height = steps.shown_region(image)
    grid = np.stack(np.meshgrid(*((np.arange(n) + 0.5) / n for n in image), indexing="ij"), axis=2)
    bright = np.rint(255 * np.concatenate([grid, np.ones((*image, 1))], axis=2)).astype(np.uint8)
    result = steps(bright).astype(float)
    rows = top + height * (np.arange(result.shape[0]) + 0.5) / result.shape[0]
    columns = left + width * (np.arange(result.shape[1]) + 0.5) / result.shape[1]
    inside = result[..., 2] == 255
    assert inside.mean() > 0.25
    found = result[..., :2][inside] / 255
    expected = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=2)[inside]
    assert np.abs(found - expected).max() < 0.5 / min(image) + 0.004


def test_names_of_sources(tmp_path):
    (tmp_path / "a=b").touch()
    found = named_sources(["cats=runs/x", "runs/dogs/", "timm:vit_tiny", str(tmp_path / "a=b"), "q/w.safetensors"])
    assert found == {
        **{"cats": "runs/x", "dogs": "runs/dogs/", "vit_tiny": "timm:vit_tiny"},
        **{"a-b": str(tmp_path / "a=b"), "w": "q/w.safetensors"},
    }
    with pytest.raises(UserError, match='two models would be called "x"'):
        named_sources(["runs/x", "other/x"])


def test_wrong_options_are_sentences(weights, tmp_path):
    (tmp_path / "token").write_text("short")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_batch": 0}, "max_batch must be from 1 to 1024, not 0"),
        ({"token_file": tmp_path / "token"}, "use 16 to 500 characters"),
        ({"token_file": tmp_path / "none"}, "the token cannot be read"),
        ({"host": "256.0.0.1"}, "cannot listen on 256.0.0.1"),
    ]
    for changes, sentence in cases:
        options: dict[str, Any] = {"device": "cpu", "port": 0, **changes}
        with pytest.raises(UserError, match=sentence):
            vitral.serve([weights], **options)


def test_commands_of_the_documentation(weights, tmp_path):
    """Every curl line of docs/serving.md answers 200."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    page = (SOURCE.parent / "docs" / "serving.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.startswith("curl ")]
    (tmp_path / "photo.jpg").write_bytes(photograph())
    (tmp_path / "other.png").write_bytes(encode_png(np.zeros((40, 50, 3), np.uint8)))
    assert len(commands) >= 8
    with started({"pets": weights}) as server:
        for command in commands:
            words = shlex.split(command.replace("localhost:8000", f"127.0.0.1:{server.server.port}"))
            words = [curl, "-s", "-w", "%{http_code}", *words[1:]]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60)
            assert done.stdout.endswith(b"200"), (command, done.stdout)


def test_top_classes_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    for ranking in (rng.normal(size=1000), rng.integers(0, 4, 200), np.zeros(9), np.array([np.nan, 1, np.nan, 2])):
        for count in (1, 2, min(5, len(ranking)), len(ranking)):
            expected = np.argsort(-ranking, kind="stable")[:count]
            assert top_classes(ranking, count).tolist() == expected.tolist()


def test_answers_are_sent_without_waiting_for_acknowledgements(running, monkeypatch):
    """Headers and body are two writes, of which the second one would wait (40 ms) with Nagle's algorithm."""
    options = []
    made = process.HttpToolsProtocol.connection_made

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        client = transport.get_extra_info("socket")
        options.append(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(process.HttpToolsProtocol, "connection_made", connection_made)
    assert running.json("GET", "/healthz")[0] == 200
    assert options == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="packets are filtered on Linux")
def test_a_listener_that_ignores_new_connections_keeps_those_it_has():
    with process.bound_socket("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname(), timeout=60) as first, socket.socket() as second:
            process._ignore_new_connections(listener)
            second.settimeout(0.5)
            with pytest.raises(TimeoutError):
                second.connect(listener.getsockname())
            first.sendall(b"data")
            (accepted,) = process._accepted(listener)
            with accepted:
                accepted.settimeout(60)
                assert accepted.recv(4) == b"data"


def test_a_server_keeps_its_models_out_of_garbage_collections(weights):
    with started({"tiny": weights}) as server:
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        assert server.json("POST", "/v2/repository/models/tiny/load")[0] == 200
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_batch_sizes():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(12) == (1, 2, 4, 8, 12)
