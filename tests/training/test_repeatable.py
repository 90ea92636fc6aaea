"""The same numbers again: by seed, by workers, by pieces of a batch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import make_pictures, metrics, outcome, train
from safetensors.torch import load

from vitral.data.loader import Batch
from vitral.models.build import build
from vitral.names import parse
from vitral.training.loop import LoopConfig, train_step
from vitral.training.objective import LossSettings, Objective, draw_mix
from vitral.training.optimizer import build_optimizer, parameter_groups
from vitral.training.parallel import World
from vitral.training.state import TrainState

ALONE = World(0, 1, torch.device("cpu"))
CLASSES = 5


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


def test_one_seed_is_one_run_and_another_seed_another(pictures, tmp_path):
    words = ("ema_decay=0.9", "regularization.dropout=0.2", "regularization.stochastic_depth=0.2")
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        train(pictures, tmp_path / name, *words, f"seed={seed}")
    first, again, other = (outcome(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first[0] != other[0]
    rows = zip(metrics(tmp_path / "first"), metrics(tmp_path / "other"), strict=True)
    # The head starts at zero, so the first losses are equal: later ones must not be.
    assert all(mine["loss"] != others["loss"] for mine, others in rows if mine["step"] > 3 and "loss" in mine)


def test_several_seeds_are_the_runs_of_each(pictures, tmp_path):
    train(pictures, tmp_path / "both", "seed=4", seeds=2)
    train(pictures, tmp_path / "one", "seed=5")
    assert outcome(tmp_path / "both" / "seed-5") == outcome(tmp_path / "one")
    assert outcome(tmp_path / "both" / "seed-4") != outcome(tmp_path / "one")


def test_the_number_of_workers_changes_nothing(pictures, tmp_path):
    words = ("ema_decay=0.9", "regularization.dropout=0.2", "balance=sampler")
    for workers in range(3):
        train(pictures, tmp_path / str(workers), *words, f"workers={workers}")
    assert outcome(tmp_path / "0") == outcome(tmp_path / "1") == outcome(tmp_path / "2")


@pytest.mark.parametrize("pieces", [1, 4, 5])
def test_the_size_of_the_pieces_changes_only_rounding(pieces, pictures, tmp_path):
    train(pictures, tmp_path / "whole", "optim.name=sgd", "optim.lr=0.1")
    train(pictures, tmp_path / "pieces", "optim.name=sgd", "optim.lr=0.1", f"micro_batch={pieces}")
    whole, parts = load(outcome(tmp_path / "whole")[0]), load(outcome(tmp_path / "pieces")[0])
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=1e-6)


# the gradient itself, against autograd over the whole batch at once


def make_batch(rows: int, labels: torch.Tensor | None = None) -> Batch:
    rng = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (rows, 3, 8, 8), dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, CLASSES, (rows,), generator=rng) if labels is None else labels
    valid = torch.ones(rows, dtype=torch.bool)
    valid[rows // 2] = False
    return Batch(images, labels, valid, torch.arange(rows))


def make_trainee(**settings: object) -> TrainState:
    torch.manual_seed(0)
    model = build(parse("ViT-Ti/4@8", width=16, depth=2, heads=2, mlp=32, classes=CLASSES))
    with torch.no_grad():  # not the first weights: behind a head of zeros there is no gradient
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    loss = LossSettings(classes=CLASSES, mean=(0.5,) * 3, std=(0.5,) * 3, seed=3, **settings)  # type: ignore[arg-type]
    objective = Objective(model, loss, np.ones(CLASSES))
    optimizer = build_optimizer(parameter_groups(model), lr=0.1)
    return TrainState(objective, model, optimizer, step=7)


def prepared(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1.0


def compare(
    train_state: TrainState, plan: LoopConfig, batch: Batch, expected: torch.Tensor, model: torch.nn.Module
) -> None:
    """The accumulated loss and gradient are those of `expected`, a loss of `model`."""
    draws = train_state.objective.draw(train_state.step, (batch.images.shape[2], batch.images.shape[3]))
    loss = train_step(train_state, plan, ALONE, batch, draws).loss
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-6)
    expected.backward()
    for (name, mine), theirs in zip(train_state.model.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-6, msg=name)
        assert theirs.grad.abs().max() > 1e-4, f"{name}: a gradient of zero proves nothing"


@pytest.mark.parametrize("micro", [1, 3, 4, 10])
def test_an_accumulated_gradient_is_that_of_the_whole_batch(micro):
    """Ten rows in pieces of 3 or 4 end with a smaller piece; one row is not valid and counts as zero."""
    batch, train_state = make_batch(10), make_trainee()
    model = copy.deepcopy(train_state.model)
    rows = F.cross_entropy(model(prepared(batch.images)), batch.labels, reduction="none")
    expected = (rows * batch.valid).sum() / 10
    compare(train_state, LoopConfig(steps=9, batch=10, microbatch=micro, seed=0), batch, expected, model)


@pytest.mark.parametrize("micro", [1, 3, 4, 10])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_pieces_find_their_mixing_partners(kind, micro):
    """Row 0 is only the partner of row 1; a pair counts where both are valid."""
    batch, train_state = make_batch(11), make_trainee(**{kind: 0.8})
    model = copy.deepcopy(train_state.model)
    mix = draw_mix(3, 7, (8, 8), mixup=0.8 * (kind == "mixup"), cutmix=0.8 * (kind == "cutmix"))
    assert 0.05 < mix.lam < 0.95
    images, losses = prepared(batch.images), []
    for row in range(1, 11):
        if not (batch.valid[row] and batch.valid[row - 1]):
            continue
        if mix.box is None:
            mixed = mix.lam * images[row] + (1 - mix.lam) * images[row - 1]
        else:
            top, bottom, left, right = mix.box
            mixed = images[row].clone()
            mixed[:, top:bottom, left:right] = images[row - 1][:, top:bottom, left:right]
        logs = model(mixed[None])[0].log_softmax(0)
        losses.append(-mix.lam * logs[batch.labels[row]] - (1 - mix.lam) * logs[batch.labels[row - 1]])
    assert len(losses) == 8
    plan = LoopConfig(steps=9, batch=10, microbatch=micro, seed=0, mix_partner=True)
    compare(train_state, plan, batch, torch.stack(losses).sum() / 10, model)
