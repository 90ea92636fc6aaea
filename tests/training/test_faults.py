"""What goes wrong says so in one sentence, as early as it can, and leaves what was there before whole."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journeys import COLOURS, MODEL, QUICK, Command, CommandResult, colour_folder, paint

import vitral
from vitral.architecture import ResNetConfig, ViTConfig
from vitral.checkpoints import run as runs
from vitral.checkpoints import write
from vitral.checkpoints.card import Card, Preprocess
from vitral.models.build import build
from vitral.training import loop
from vitral.training.objective import Objective


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    return colour_folder(tmp_path / "colours", 6)


def sentence(said: CommandResult) -> str:
    """The last line on standard error, where a mistake stands alone."""
    assert said.code == 2
    assert "Traceback" not in said.err
    last = said.err.splitlines()[-1]
    assert last.startswith("vitral: ")
    assert last.endswith((".", "?"))
    assert not said.out
    return last


def empty_class(folder: Path) -> Path:
    colour_folder(folder, 3)
    (folder / "teal").mkdir()
    return folder


def broken_class(folder: Path) -> Path:
    colour_folder(folder, 3)
    for number in range(3):
        (folder / "teal").mkdir(exist_ok=True)
        (folder / "teal" / f"{number}.png").write_text("no picture")
    return folder


def flat(folder: Path) -> Path:
    for number in range(3):
        paint(folder / f"{number}.png", (9, 9, 9), number)
    return folder


def one_class(folder: Path) -> Path:
    paint(folder / "red" / "0.png", COLOURS["red"])
    return folder


def no_images(folder: Path) -> Path:
    (folder / "red").mkdir(parents=True)
    (folder / "blue").mkdir()
    return folder


def broken_test(folder: Path) -> Path:
    colour_folder(folder / "train", 3)
    (folder / "test" / "red").mkdir(parents=True)
    (folder / "test" / "red" / "0.png").write_text("no picture")
    return folder


def manifest(*lines: str) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        flat(folder)
        (folder / "list.csv").write_text("path,label\n" + "\n".join(lines))
        return folder / "list.csv"

    return written


def nothing(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize(
    "make, says",
    [
        (manifest("0.png,0", "1.png,1", "2.png,-1"), "line 4: the label -1 is out of range"),
        (manifest("0.png,a", "1.png,"), "line 3 has an empty label"),
        (manifest("x.png,a", "y.png,b"), "None of the files"),
        (empty_class, "teal has no image: add some, or remove the folder"),
        (flat, "3 images but no class folders"),
        (one_class, 'one class, "red"'),
        (no_images, "has no image: add some"),
        (nothing, "does not exist: name a folder"),
    ],
)
def test_faults_of_the_data(command, tmp_path, make, says):
    said = command("train", make(tmp_path / "data"), "--out", tmp_path / "run")
    assert says in sentence(said)
    assert said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make, says",
    [
        (broken_class, 'no training image of the class "teal" can be read: add some, or remove the class'),
        (broken_test, "none of the test images can be read"),
    ],
)
def test_images_that_cannot_be_read_leave_too_little(command, tmp_path, make, says):
    assert says in sentence(command("train", make(tmp_path / "data"), "--out", tmp_path / "run", "--model", MODEL))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_there_is_kept_after_a_refusal(command, tmp_path):
    (tmp_path / "run").mkdir()
    command("train", broken_class(tmp_path / "data"), "--out", tmp_path / "run", "--model", MODEL)
    assert (tmp_path / "run").exists()


def test_a_folder_without_rights(command, colours, monkeypatch):
    """Refused by a stand-in: nothing is forbidden to root, who runs many a test."""
    allowed = os.scandir

    def refusing(path):
        if Path(path).name == "red":
            raise PermissionError(13, "Permission denied", str(path))
        return allowed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert "check its name and your permissions" in sentence(command("train", colours))


@pytest.mark.parametrize(
    "words, says",
    [
        (["--set", "batch=999"], "batch=999 is more than the 15 training images: choose a smaller one"),
        (["--set", "optim.lrr=1"], "did you mean optim.lr"),
        (["--set", "lr=1"], "did you mean optim.lr"),
        (["--set", "optim.lr=fast"], "optim.lr must be a number"),
        (["--set", "batch=2.5"], "batch must be a whole number"),
        (["--set", "batch"], "is not key=value"),
        (["--set", "data.train_transform=decode|flip"], "different sizes"),
        (["--set", "data.train_transform=decode|resize(8)|flop"], 'unknown step "flop": did you mean flip?'),
        (["--set", "data.eval_transform=decode|random_crop(8)"], "draws at random"),
        (["--set", "data.train_transform=resize(8)|decode"], "decode must be the first step"),
        (["--set", "data.mean=0,0,0,0", "data.std=1,1,1,1"], "the images have 3 channels and the model 4"),
        (["--set", "epochs=3", "steps=3"], "one length"),
        (["--epochs", "0"], "one length"),
        (["--trainable", "most"], "is not one of full, head"),
        (["--trainable", "head"], "trainable=head needs trained weights to start from: add --init"),
        (["--trainable", "lora:4"], "add --init, or omit trainable"),
        (["--set", "trainable=bias"], "add --init, or omit trainable"),
        (["--recipe", "speedrun/cifar10", "--trainable", "last:1"], "add --init, or omit trainable"),
        (["--balance", "evenly"], "balance must be one of none, weights"),
        (["--model", "ViT-Huge/99x"], "did you mean"),
        (["--model", "ViT-Ti/16@8"], "smaller than one patch"),
        (["--init", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--init", "nowhere", "--model", "ViT-B/16"], "nowhere"),
        (["--recipe", "nowhere.toml"], "is not a recipe file"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--device", "gpu"], "is not a device"),
        (["--device", "cuda:97"], "no device"),
    ],
)
def test_faults_of_the_recipe_come_before_any_work(command, colours, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    said = command("train", colours, *words)
    assert says in sentence(said)
    assert said.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_recipe_file_that_is_none(command, colours, tmp_path):
    file = tmp_path / "mine.toml"
    for text, says in {
        "batch = 4\nbatch = 5": "not valid TOML",
        "[optimiser]\nlr = 1": "did you mean optim.lr",
        "batch = '4'": "batch must be a whole number",
    }.items():
        file.write_text(text)
        assert says in sentence(command("train", colours, "--recipe", file))


def saved(path: Path, architecture: ViTConfig | ResNetConfig, *, poison: float | None = None) -> Path:
    torch.manual_seed(0)
    model = build(architecture)
    if poison is not None:
        model.state_dict()["norm.weight"].fill_(poison)
    pixels = Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3)
    vitral.save(model, path, Card(architecture, preprocess=pixels))
    return path


SMALL = ViTConfig(depth=2, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)
MEAN = replace(SMALL, pool="mean")
RESNET = ResNetConfig(blocks=(1, 1, 1, 1), width=1, image=(32, 32), classes=3)


def test_weights_that_do_not_fit(command, colours, tmp_path):
    init = saved(tmp_path / "small.safetensors", SMALL)
    resnet = saved(tmp_path / "resnet.safetensors", RESNET)
    for words, says in {
        ("--init", resnet, "--trainable", "lora:2"): "for a ResNet use trainable=last:1 or bias",
        ("--init", resnet, "--set", "regularization.dropout=0.1"): "regularization.dropout has no effect in",
        ("--init", init, "--model", "ViT-B/4"): "leave out one of the two",
        ("--init", init, "--set", "shape.depth=3"): "have a shape already",
        ("--init", init, "--trainable", "last:3"): "does not fit a model of 2 layers: use last:1 to last:2",
        ("--init", init, "--set", "image=3"): "smaller than one patch",
    }.items():
        said = command("train", colours, *words, "--out", tmp_path / "run")
        assert says in sentence(said)
        assert said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    other = saved(tmp_path / "two.safetensors", replace(SMALL, classes=2))
    assert "3 of 3 classes of the data" in sentence(command("evaluate", other, colours))
    assert "contains no weight file" in sentence(command("predict", colours, colours))


@pytest.mark.parametrize(
    "poison, says", [(float("nan"), "non-finite values (NaN or Inf)"), (3e38, "check the weights in init")]
)
def test_poisoned_weights_are_found_before_the_first_step(command, colours, tmp_path, poison, says):
    init = saved(tmp_path / "bad.safetensors", MEAN, poison=poison)
    said = command("train", colours, "--init", init, "--out", tmp_path / "run", "--set", "batch=4", "workers=0")
    assert says in sentence(said)
    assert not list((tmp_path / "run").rglob("step-*"))


def train(command: Command, data: Path, out: Path, *words: str) -> CommandResult:
    return command("train", data, "--model", MODEL, "--out", out, "--set", *QUICK, *words)


# The rate explodes after six good steps: the update of the seventh breaks the weights, the eighth shows it.
EXPLODING = (
    "schedule.kind=multistep",
    "schedule.warmup=0",
    "schedule.drops=6",
    "schedule.factors=1e30",
    "optim.clip=0",
)


def test_a_loss_that_is_not_finite_names_step_and_images_and_keeps_the_state(command, colours, tmp_path):
    out = tmp_path / "run"
    said = train(command, colours, out, *EXPLODING, "batch=4", "save_every=3", "steps=20", "evaluate_every=20")
    last = sentence(said)
    assert "at step 8" in last
    assert "state, of step 6, is kept" in last
    assert "lower optim.lr" in last
    named = last.split("images ")[1].split(";")[0].split(", ")
    assert len(named) == 4
    assert all((colours / name).is_file() for name in named)
    state = runs.RunFolder(out).newest_state()
    assert state is not None
    assert state.step == 6
    assert all(tensor.isfinite().all() for tensor in state.tensors().values())
    assert not (out / "model.safetensors").exists()
    # The same again goes on from there, and finds the same.
    again = train(command, colours, out, *EXPLODING, "batch=4", "save_every=3", "steps=20", "evaluate_every=20")
    assert sentence(again) == last


def test_weights_that_one_step_broke_are_not_saved(command, colours, tmp_path, monkeypatch):
    """At step 7 the loss is still finite and a state is due, but the update has made a weight infinite."""
    real = loop._clip_grad_norm

    def breaking(train_state: Any, clip: float) -> torch.Tensor:
        norm = real(train_state, clip)
        if train_state.step == 6:
            next(train_state.model.parameters()).data.fill_(float("inf"))
        return norm

    monkeypatch.setattr(loop, "_clip_grad_norm", breaking)
    said = train(command, colours, tmp_path / "run", "batch=4", "save_every=1", "steps=9", "evaluate_every=9")
    assert "after step 7 (the last good state, of step 6, is kept)" in sentence(said)
    state = runs.RunFolder(tmp_path / "run").newest_state()
    assert state is not None
    assert state.step == 6


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Writing tensors fails from the n-th on, in the middle of a file."""
    real, count = write._write_bytes, 0

    def failing(stream: Any, tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > after:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(stream, tensor)

    monkeypatch.setattr(write, "_write_bytes", failing)


def test_a_full_disk_leaves_the_last_state_whole(command, colours, tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ("steps=6", "save_every=2", "evaluate_every=6")
    with monkeypatch.context() as patch:
        full_disk(patch, after=200)  # a state has some 90 tensors: the third does not fit
        said = train(command, colours, out, *words)
    last = sentence(said)
    assert "the disk is full: free some space" in last
    assert shlex.join(["vitral", "train", str(colours)]) in last
    assert str(out) in last
    state = runs.RunFolder(out).newest_state()
    assert state is not None
    assert state.step in (2, 4)
    assert not list(out.rglob("*.part"))
    assert not (out / "result.json").exists()
    assert train(command, colours, out, *words).code == 0
    assert train(command, colours, tmp_path / "never", *words).code == 0
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "never" / "model.safetensors").read_bytes()


def test_no_room_for_pixels(command, colours, tmp_path, monkeypatch):
    def failing(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert train(command, colours, tmp_path / "usual").code == 0
    monkeypatch.setattr("vitral.data.cache.atomic_write", failing)
    said = train(command, colours, tmp_path / "run")
    assert said.code == 0
    assert (
        f"not enough disk space in {tmp_path / 'run' / 'pixels'} for decoded train images: they are decoded" in said.err
    )
    model, usual = (tmp_path / name / "model.safetensors" for name in ("run", "usual"))
    assert model.read_bytes() == usual.read_bytes()


def test_a_run_folder_that_cannot_be(command, colours, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        said = sentence(train(command, colours, out))
        assert f"{out / 'recipe.toml'} cannot be written ({tmp_path / 'file'} is not a folder): choose another" in said

    def read_only(**options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "aside")

    monkeypatch.setattr("vitral.atomic.tempfile.TemporaryFile", read_only)
    out = tmp_path / "there" / "run"
    assert f"{out / 'recipe.toml'} cannot be written (Read-only file system): choose another place." in sentence(
        train(command, colours, out)
    )


def small_memory(monkeypatch: pytest.MonkeyPatch, rows: int, from_call: int = 0) -> None:
    """More rows than that at once do not fit, from some call of the objective on."""
    real, calls = Objective.forward, 0

    def forward(self: Objective, images: torch.Tensor, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > from_call and len(images) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, images, *rest)

    monkeypatch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("from_call", [0, 12])
def test_where_memory_runs_out_pieces_get_smaller_and_the_result_stays(
    command, colours, tmp_path, monkeypatch, from_call
):
    words = ("optim.name=sgd", "optim.lr=0.1", "steps=10")
    assert train(command, colours, tmp_path / "plain", *words).code == 0
    small_memory(monkeypatch, rows=4, from_call=from_call)
    said = train(command, colours, tmp_path / "small", *words)
    assert said.code == 0
    told = "4 microbatches of 3" if from_call == 0 else "continuing with microbatches of 3 images"
    assert told in said.err
    plain, small = (vitral.load(tmp_path / name)[0].state_dict() for name in ("plain", "small"))
    for name in plain:
        torch.testing.assert_close(small[name], plain[name], rtol=0, atol=1e-6)


def test_memory_for_not_even_one_image(command, colours, tmp_path, monkeypatch):
    small_memory(monkeypatch, rows=0)
    assert "memory runs out with one image at a time" in sentence(train(command, colours, tmp_path / "run"))


def test_predictions_need_to_know_how_pixels_are_prepared(command, colours, tmp_path):
    path = tmp_path / "plain.safetensors"
    vitral.save(build(SMALL), path, Card(SMALL))
    assert '(else --preprocess "decode|' in command("predict", path, colours).err
    words = ["--preprocess", "decode|resize(8)|value_range(-1, 1)", "--json"]
    assert len(json.loads(command("predict", path, colours, *words).out)["predictions"]) == 18
    assert "batch must be at least 1" in sentence(command("evaluate", path, colours, "--batch", "0"))
    assert "top must be at least 1" in sentence(command("predict", path, colours, "--top", "0"))
    assert "missing: IMAGES (image files, and folders of them)" in sentence(command("predict", path))
