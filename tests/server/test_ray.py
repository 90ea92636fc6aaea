"""`examples/ray_serve.py` on one node, where Ray is installed: in a process of its own, as Ray starts many."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracles import SMALL, random_weights

from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.data.images import encode_jpeg

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
import ray
from ray import serve

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
from examples.ray_serve import app
serve.run(app)
image = open(sys.argv[2], "rb").read()

def ask(path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

with ThreadPoolExecutor(8) as pool:
    answers = list(pool.map(lambda _: ask("/predict?top=2", image), range(40)))
assert {status for status, _ in answers} == {200}, answers
assert all(len(answer["predictions"][0]["classes"]) == 2 for _, answer in answers)
assert ask("/v2/models/tiny")[1]["name"] == "tiny"
assert ask("/predict", b"no image")[0] == 415
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'ray[serve]'")
def test_the_example_answers_on_one_node(tmp_path):
    values = (0.4,) * 3, (0.3,) * 3
    card = Card(SMALL, tuple("abcde"), preprocess=Preprocess("decode|resize(32)", *values))
    write(random_weights(SMALL), card, tmp_path / "tiny.safetensors", "vitral")
    (tmp_path / "a.jpg").write_bytes(encode_jpeg(np.zeros((40, 40, 3), np.uint8)))
    environment = {
        **{**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        **{"VITRAL_SOURCES": f"tiny={tmp_path / 'tiny.safetensors'}", "VITRAL_CORES": "1"},
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-c", SCRIPT, "8444", str(tmp_path / "a.jpg")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
