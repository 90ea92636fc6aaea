"""CUDA graphs: a replayed step computes the same as an eager one. Needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import make_pictures, metrics, train
from safetensors.torch import load_file

from vitral.kernels.cuda_graph import CudaGraph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


def test_replay_takes_new_inputs_and_keeps_old_outputs():
    weight = torch.ones(3, device="cuda")

    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * weight, x.sum())

    scaled(torch.ones(3, device="cuda"))
    recording = CudaGraph(scaled, [torch.zeros(3, device="cuda")])
    first = recording(torch.tensor([1.0, 2.0, 3.0]))
    weight.fill_(2.0)
    second = recording(torch.tensor([4.0, 5.0, 6.0]))
    assert [tensor.tolist() for tensor in first] == [[1, 2, 3], 6]
    assert [tensor.tolist() for tensor in second] == [[8, 10, 12], 15]


def test_a_failed_capture_raises_and_restores_the_generator():
    """Without inputs, as in serving."""
    with pytest.raises(RuntimeError, match="captur"):
        CudaGraph(lambda: (torch.rand(3, device="cuda").cpu(),), [])
    torch.manual_seed(0)
    first = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3, device="cuda"))


@pytest.mark.parametrize(
    "words",
    [
        ("ema_decay=0.9", "regularization.dropout=0.2"),
        ("data.mixup=0.5", "data.cutmix=0.5"),
        ("data.augment=shift(1)|flip|randaugment(1, 5)|cutout(2)", "precision=bfloat16"),
        ("optim.name=muon", "optim.momentum=0.95"),
        ("optim.name=sgd", "precision=float32"),
    ],
)
def test_a_run_with_cuda_graph_matches_one_without(words, pictures, tmp_path):
    for name in ("true", "false"):
        train(pictures, tmp_path / name, *words, f"cuda_graph={name}", "evaluate_every=4", device="cuda")
    losses = [[row["loss"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("true", "false")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][-1]
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("true", "false"))
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5, msg=key)
