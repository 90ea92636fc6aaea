"""A researcher's own parts: dataset, module, loss, optimizer, transform, callbacks; and what resuming makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import MODEL, TINY, crash_at, make_pictures, outcome, starting_from, train
from runs import Crash as Killed
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import vitral
from vitral.errors import UserError
from vitral.events import ignore_events
from vitral.training.callbacks import Callback, OwnParts, RunHandle
from vitral.training.objective import own_loss


class Colours(Dataset):
    """Noise with a tint per class; items are (uint8 pixels, label)."""

    classes = ("red", "green", "blue")

    def __init__(self, images: int = 24) -> None:
        rng = np.random.default_rng(0)
        self.targets = [index % 3 for index in range(images)]
        self.images = rng.integers(0, 160, (images, 12, 12, 3)).astype(np.uint8)
        for index, label in enumerate(self.targets):
            self.images[index, ..., label] += 90

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], self.targets[index]


class Pooled(nn.Module):
    """A small convolutional network with BatchNorm, whose buffers a resumed run needs."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(images)).relu().mean(dim=(2, 3)))


def module() -> Pooled:
    torch.manual_seed(1)
    return Pooled()


def fit(data: Any, out: Path, *words: str, **parts: Any) -> vitral.TrainResult:
    parts.setdefault("on_event", ignore_events)
    if not isinstance(parts.get("model"), nn.Module):
        return vitral.train(data, model=MODEL, out=out, device="cpu", set=[*TINY, *words], **parts)
    plain = [word for word in TINY if not word.startswith("shape.")]
    return vitral.train(data, out=out, device="cpu", set=[*plain, "image=8", *words], **parts)


# Adam would turn the rounding of gradients that should be zero into full steps.
PLAIN_SGD = ("data.mixup=0", "optim.name=sgd", "optim.lr=0.05")


def half_l1(logits: Tensor, targets: Tensor) -> Tensor:
    shares = F.one_hot(targets, logits.shape[1]).float() if targets.ndim == 1 else targets
    return (logits.softmax(1) - shares).abs().sum(1) / 2


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def rmsprop(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=3e-3)


@pytest.mark.parametrize("losses", [half_l1, mean_cross_entropy])
def test_the_sum_of_an_own_loss_counts_valid_rows_only(losses):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    valid = torch.tensor([True, False, True, True, False])
    total = own_loss(losses, logits, targets, valid)
    kept = losses(logits[valid], targets[valid])
    torch.testing.assert_close(total, kept.sum() if kept.ndim else 3 * kept)
    total.backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(1) > 0).tolist() == valid.tolist()


def test_an_own_loss_of_another_shape_is_refused():
    with pytest.raises(
        UserError, match=r"one value per image \(2,\) or their mean \(\), not a tensor of shape \(2, 3\)"
    ):
        own_loss(lambda logits, targets: logits, torch.zeros(2, 3), torch.zeros(2).long(), torch.ones(2).bool())


def test_microbatches_of_a_mean_loss_give_the_whole_batch(tmp_path):
    """A loss that returns a mean is weighted by the rows it saw, so the microbatch does not matter."""
    weights = []
    for size in ("6", "4"):
        fit(Colours(), tmp_path / size, *PLAIN_SGD, f"micro_batch={size}", loss=mean_cross_entropy)
        weights.append(load_file(tmp_path / size / "model.safetensors"))
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=2e-5, rtol=1e-4, msg=name)


def test_cross_entropy_as_an_own_loss_is_the_built_in_one(tmp_path):
    words = PLAIN_SGD
    fit(
        Colours(),
        tmp_path / "own",
        *words,
        loss=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
    )
    fit(Colours(), tmp_path / "built-in", *words)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "built-in"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_dataset_trains_like_the_folder_of_its_images(tmp_path):
    pictures = make_pictures(tmp_path / "pictures")
    paths = sorted(pictures.rglob("*.png"))
    items = [(path, path.parent.name) for path in paths]
    from_list = fit(items, tmp_path / "list").results[0]
    assert from_list.metrics["n"] > 0
    _, card = vitral.load(tmp_path / "list")
    assert card.class_names == ("class-0", "class-1", "class-2")


def test_all_parts_at_once_learn(tmp_path):
    result = fit(
        (Colours(48), Colours(12)),
        tmp_path / "run",
        "steps=60",
        "data.mixup=0",
        "schedule.warmup=0",
        loss=half_l1,
        optimizer=rmsprop,
    )
    assert result.results[0].metrics["n"] == 12
    assert result.mean > 0.6
    facts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert set(facts["own_parts"]) == {"loss", "optimizer"}


def test_an_own_optimizer_keeps_its_rates_as_peaks(tmp_path):
    """The schedule scales the rate that the optimizer was made with, per group."""
    rates: list[list[float]] = []

    class Recorded(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Recorded([{**group, "lr": 0.01 * (index + 1)} for index, group in enumerate(groups)], lr=0.5)

    fit(
        Colours(),
        tmp_path / "run",
        "schedule.kind=constant",
        "schedule.warmup=0",
        "optim.weight_decay=0.1",
        optimizer=factory,
    )
    assert rates[-1] == pytest.approx([0.01 * (index + 1) for index in range(len(rates[-1]))])
    assert len(rates[-1]) > 1


class Tracker(Callback):
    """Counts, logs and stops; its count is part of the state."""

    def __init__(self, stop_at: int = 0) -> None:
        self.count, self.stop_at, self.calls = 0, stop_at, []

    def on_run_start(self, run: RunHandle) -> None:
        self.calls.append(f"start {run.step}")

    def on_step_end(self, run: RunHandle, step: vitral.events.StepDone) -> None:
        self.count += 1
        run.log(count=self.count)
        if step.step == self.stop_at:
            run.stop("enough")

    def on_evaluation(self, run: RunHandle, metrics: dict[str, Any]) -> None:
        run.log(double=2 * metrics["top1"])

    def on_run_end(self, run: RunHandle) -> None:
        self.calls.append(f"end {run.step}")

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_callback_adds_metrics_and_stops_the_run(tmp_path):
    tracker, notes = Tracker(stop_at=6), []
    result = fit(Colours(), tmp_path / "run", callbacks=[tracker], on_event=lambda event: notes.append(str(event)))
    metrics = result.results[0].metrics
    assert metrics["double"] == 2 * metrics["top1"]
    assert result.results[0].step < 12
    assert any("enough" in note for note in notes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["count"] for line in lines if "count" in line] == list(range(1, tracker.count + 1))
    assert tracker.calls == ["start 0", f"end {result.results[0].step}"]


def test_one_callback_needs_no_list(tmp_path):
    tracker = Tracker(stop_at=2)
    fit(Colours(), tmp_path / "run", callbacks=tracker)
    assert tracker.calls[0] == "start 0"


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([print], r"builtins.print is not derived from vitral.Callback: .* callbacks=\[MyCallback\(\)\]"),
        (print, "builtins.print is not derived"),
        (None, "NoneType is not derived"),
        ([Tracker], r"Tracker is a class: pass callbacks=\[Tracker\(\)\]"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_run(callbacks, says, tmp_path):
    with pytest.raises(UserError, match=says):
        fit(Colours(), tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def not_finite(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets) * float("nan")


@pytest.mark.parametrize(
    ("words", "parts", "advice"),
    [
        ((), {"loss": not_finite}, "check what loss= returns for them"),
        (("precision=bfloat16",), {"loss": not_finite}, "check what loss= returns for them, or set precision=float32"),
        ((), {"model": "broken", "loss": half_l1}, "check what loss= returns for them, or check the weights of model="),
        (("data.std=1e-44,1e-44,1e-44",), {}, "check data.mean and data.std"),
    ],
)
def test_a_first_loss_that_is_not_finite_is_explained_by_the_run(words, parts, advice, tmp_path):
    """The step and its images are named, and only what the run has is advised to be checked."""
    if parts.get("model") == "broken":
        parts = {**parts, "model": module()}
        parts["model"].out.bias.data.fill_(torch.nan)
    with pytest.raises(UserError) as error:
        fit(Colours(), tmp_path / "run", "data.mixup=0", *words, **parts)
    assert_explained(error.value, advice)
    assert not (tmp_path / "run").exists()


def test_a_first_loss_that_is_not_finite_with_init_advises_to_check_it(tmp_path):
    word = starting_from(tmp_path / "weights.safetensors")
    model, card = vitral.load(tmp_path / "weights.safetensors")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1e38)  # finite, as files must be
    vitral.save(model, tmp_path / "weights.safetensors", card)
    with pytest.raises(UserError) as error:
        train(Colours(), tmp_path / "run", word)
    assert_explained(error.value, "check the weights in init")


def assert_explained(error: UserError, advice: str) -> None:
    assert re.fullmatch(
        r"the loss is not finite \(NaN or Inf\) at step 1 "
        rf"\(images (item \d+, ){{3}}item \d+ and 2 more\): {re.escape(advice)}\.",
        str(error),
    )


@pytest.mark.parametrize("killed_at", [3, 7])
@pytest.mark.parametrize("kind", ["ViT", "own module"])
def test_a_resumed_run_with_own_parts_is_the_uninterrupted_one(kind, killed_at, tmp_path):
    def parts() -> dict[str, Any]:
        own: dict[str, Any] = {"loss": half_l1, "optimizer": rmsprop, "callbacks": [Tracker()]}
        return own if kind == "ViT" else {**own, "model": module()}

    fit(Colours(), tmp_path / "whole", "ema_decay=0.9", **parts())
    with pytest.raises(Killed):
        fit(Colours(), tmp_path / "run", "ema_decay=0.9", **parts(), on_event=crash_at(killed_at))
    fit(Colours(), tmp_path / "run", "ema_decay=0.9", **parts())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_is_not_resumed_with_other_parts(tmp_path):
    with pytest.raises(Killed):
        fit(Colours(), tmp_path / "run", loss=half_l1, on_event=crash_at(5))
    with pytest.raises(UserError, match=r"its loss was .*half_l1 and is vitral"):
        fit(Colours(), tmp_path / "run")


class Forgetful(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
        return super().step(closure)


def test_state_that_cannot_be_restored_is_refused(tmp_path):
    with pytest.raises(UserError, match="Forgetful keeps 'calls' as a int, which cannot be saved and resumed"):
        fit(Colours(), tmp_path / "run", optimizer=lambda groups: Forgetful(groups, lr=0.1))


def test_an_own_module_is_trained_in_place(tmp_path):
    net = module()
    before = net.conv.weight.detach().clone()
    result = fit((Colours(48), Colours(12)), tmp_path / "run", "steps=40", "data.mixup=0", "ema_decay=0.5", model=net)
    assert result.module is net
    assert not torch.equal(net.conv.weight, before)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    with pytest.raises(UserError, match="Pooled"):
        vitral.load(tmp_path / "run")


def test_steps_of_the_resource_estimate_do_not_count_in_running_statistics(tmp_path):
    net = module()
    fit(Colours(), tmp_path / "run", "steps=3", model=net)
    assert net.norm.num_batches_tracked == 3


@pytest.mark.parametrize(
    "net, says",
    [
        (Pooled(classes=7), r"must give logits of shape \(batch, 3\), one per class, not \(1, 7\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 3)), r"fails on a batch of shape \(1, 3, 8, 8\)"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_before_the_run(net, says, tmp_path):
    with pytest.raises(UserError, match=says):
        fit(Colours(), tmp_path / "run", model=net)
    assert not (tmp_path / "run").exists()


def test_a_model_of_vitral_is_a_module_too(tmp_path):
    model = vitral.create("ViT-Ti/4@8", classes=3)
    fit(Colours(), tmp_path / "run", "steps=4", model=model)
    loaded, card = vitral.load(tmp_path / "run")
    assert card.class_names == ("red", "green", "blue")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match=r"reset_classifier\(3\)"):
        fit(Colours(), tmp_path / "other", model=vitral.create("ViT-Ti/4@8", classes=5))


@pytest.mark.parametrize(
    "words, parts, says",
    [
        (["balance=weights"], {"loss": half_l1}, "omit balance, or loss="),
        (["trainable=head"], {"model": module()}, "needs a model of vitral"),
        (["optim.layer_decay=0.5"], {"model": module()}, "needs a model of vitral"),
        ([], {"optimizer": lambda groups: "sgd"}, "must return a torch.optim.Optimizer, not str"),
        ([], {"optimizer": torch.optim.SGD(module().parameters(), lr=0.1)}, r"lambda groups: SGD\(groups, lr=...\)"),
    ],
)
def test_parts_that_contradict_the_recipe_are_refused(words, parts, says, tmp_path):
    with pytest.raises(UserError, match=says):
        fit(Colours(), tmp_path / "run", *words, **parts)


def to_float(image: Any) -> Tensor:
    pixels = torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32))
    return pixels.permute(2, 0, 1) / 127.5 - 1


def to_uint8(image: Any) -> np.ndarray:
    """Draws at random, from two generators that nobody seeded."""
    angle = float(torch.rand(())) * 20 - 10 if np.random.rand() < 0.5 else 0.0
    return np.asarray(image.rotate(angle).resize((8, 8)))


@pytest.mark.parametrize("transform", [to_float, (to_uint8, None), (to_uint8, to_float)])
def test_own_transforms_resume_exactly(transform, tmp_path):
    words = PLAIN_SGD
    if transform == (to_uint8, to_float):
        with pytest.raises(
            UserError, match="normalise images in the same way"
        ):  # one side would be normalised, the other not
            fit(Colours(), tmp_path / "run", *words, transform=transform)
        return
    fit(Colours(), tmp_path / "whole", *words, transform=transform)
    with pytest.raises(Killed):
        fit(Colours(), tmp_path / "run", *words, transform=transform, on_event=crash_at(7))
    fit(Colours(), tmp_path / "run", *words, transform=transform)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_parts_are_described_by_name():
    parts = OwnParts(model=Pooled(), loss=half_l1, callbacks=(Tracker(),))
    assert {key: name.rpartition(".")[2] for key, name in parts.describe().items()} == {
        "model": "Pooled",
        "loss": "half_l1",
        "callbacks": "Tracker",
    }
