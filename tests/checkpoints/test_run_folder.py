"""What a run finds in its folder: torn states, another run, somebody's weights, its own end."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Crash, crash_at, interrupt_at, make_pictures, outcome, said, states, train

import vitral
from vitral import events
from vitral.api.inspection import write_run_page
from vitral.checkpoints import write
from vitral.errors import Interrupted, UserError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(pictures, run, "keep=3")
    return run


@pytest.fixture(scope="module")
def stopped_run(pictures, tmp_path_factory) -> Path:
    """The same run, with its states after steps 4, 6 and 8."""
    run = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.raises(Crash):
        train(pictures, run, "keep=3", on_event=crash_at(9))
    assert [path.stem for path in states(run)] == ["step-00000004", "step-00000006", "step-00000008"]
    return run


@pytest.fixture
def stopped(stopped_run, tmp_path) -> Path:
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def cut_in_the_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(5000))


def garbage_that_looks_like_a_pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x02" + random.Random(0).randbytes(5000))


def text(path: Path) -> None:
    path.write_text("no space left on device")


def without_facts(path: Path) -> None:
    write.write_safetensors(path, {"model/x": torch.zeros(3)})


DAMAGES = (
    *(empty, cut_in_the_header, cut_in_the_tensors, grown, garbage, garbage_that_looks_like_a_pickle, text),
    without_facts,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_skipped(damage, pictures, whole, stopped):
    damage(states(stopped)[-1])
    assert "resuming from step 6" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)


def test_temporary_files_of_interrupted_writes_are_removed(pictures, whole, stopped):
    for name in ("state/.step-00000010.safetensors.1234abcd.part", ".best.safetensors.1234abcd.part", ".x.part"):
        (stopped / name).write_bytes(b"half")
    (stopped / "state" / ".step-00000010.shards.part").mkdir()
    with (stopped / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 10, "lo')
    assert "resuming from step 8" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)
    names = {path.name for path in stopped.iterdir()}
    assert names == {"recipe.toml", "data.json", "split.json", "metrics.jsonl", "model.safetensors", "result.json"}


def test_with_all_states_damaged_the_run_restarts_with_a_note(pictures, whole, stopped):
    for state, damage in zip(states(stopped), (empty, garbage, cut_in_the_tensors), strict=True):
        damage(state)
    assert "none of the saved states can be read: starting from the beginning" in said(pictures, stopped, "keep=3")
    assert outcome(stopped) == outcome(whole)


def test_a_damaged_state_is_removed_by_later_saves(pictures, whole, stopped):
    words = ("keep=1", "save_every=100")
    for state in states(stopped)[1:]:
        empty(state)
    with pytest.raises(Interrupted):  # a step is told when the next one is computed
        train(pictures, stopped, *words, on_event=interrupt_at(5))
    assert [path.stem for path in states(stopped)] == ["step-00000006"]
    assert "resuming from step 6" in said(pictures, stopped, *words)
    assert outcome(stopped) == outcome(whole)


@pytest.mark.parametrize(
    "word", ["optim.lr=0.02", "batch=5", "regularization.dropout=0.5", "seed=1", "data.held_out=0.4"]
)
def test_a_changed_recipe_is_another_run(word, pictures, stopped):
    with pytest.raises(UserError) as refused:
        train(pictures, stopped, "keep=3", word)
    key, _, value = word.partition("=")
    assert key in str(refused.value)
    assert value in str(refused.value)
    assert len(states(stopped)) == 3


def test_keys_that_do_not_affect_results_may_change(pictures, whole, stopped):
    words = ("keep=2", "workers=1", "grad_checkpointing=true", "save_every=5")
    assert "resuming from step 8" in said(pictures, stopped, *words)
    assert outcome(stopped) == outcome(whole)


@pytest.mark.parametrize("split", ["train", "test"])
def test_changed_images_are_another_run(split, tmp_path):
    data = tmp_path / "data"
    for name in ("train", "test"):
        make_pictures(data / name)
    with pytest.raises(Crash):
        train(data, tmp_path / "run", on_event=crash_at(3))
    (data / split / "class-0" / "7.png").rename(data / split / "class-0" / "8.png")
    with pytest.raises(UserError, match=f"its {'train' if split == 'train' else 'eval'}"):
        train(data, tmp_path / "run")
    shutil.move(data / split / "class-0" / "8.png", data / split / "class-0" / "7.png")
    data.rename(tmp_path / "moved")
    assert "resuming from step 2" in said(tmp_path / "moved", tmp_path / "run")


def test_without_a_state_another_recipe_may_use_the_folder(pictures, tmp_path):
    with pytest.raises(UserError, match="batch=600"):
        train(pictures, tmp_path / "run", "batch=600")
    with pytest.raises(Crash):
        train(pictures, tmp_path / "run", "seed=3", on_event=crash_at(1))
    (tmp_path / "run" / "best.safetensors").write_bytes(b"of the run that ended before it saved a state")
    train(pictures, tmp_path / "run")
    train(pictures, tmp_path / "fresh")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "fresh")


def test_weights_in_the_folder_are_not_overwritten(pictures, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(UserError, match="choose another folder"):
        train(pictures, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_finished_run_is_not_done_again(pictures, whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    made = (run / "model.safetensors").stat().st_mtime_ns
    heard: list[Any] = []
    done = train(pictures, run, "keep=3", on_event=heard.append)
    assert not [event for event in heard if isinstance(event, events.StepDone | events.RunStarted)]
    assert any(isinstance(event, events.Note) and "finished" in event.text for event in heard)
    assert done.results[0].metrics == outcome(whole)[2]
    assert (run / "model.safetensors").stat().st_mtime_ns == made
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in whole.iterdir())
    with pytest.raises(UserError, match=r"optim\.lr"):
        train(pictures, run, "keep=3", "optim.lr=0.02")


def test_what_makes_a_run_another_one_is_named(pictures, whole, tmp_path):
    """The data before the settings that it led to, and a key that has no value in words."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    other = make_pictures(tmp_path / "my data", images=9)
    both = f'\\(its data was "{re.escape(str(pictures))}" and is "{re.escape(str(other))}"\\)'
    with pytest.raises(UserError, match=both):
        train(other, run, "evaluate_every=5")
    with pytest.raises(UserError, match=r"\(data\.held_out was 0\.2 and is 0\.4\)"):
        train(pictures, run, "data.held_out=0.4")
    with pytest.raises(UserError, match=r"\(data\.augment was not given and is flip\)"):
        train(pictures, run, "data.augment=flip")


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "resume": lambda run, pictures: train(pictures, run, "keep=3"),
    "evaluate": lambda run, pictures: vitral.evaluate(run, pictures, device="cpu"),
    "page": lambda run, pictures: write_run_page(run, pictures, device="cpu"),
    "fewshot": lambda run, pictures: vitral.fewshot(run, pictures, shots=[1], device="cpu"),
    "show": lambda run, pictures: vitral.show_recipe(run),
}
READ_BY = {
    "recipe.toml": ("resume", "evaluate", "page", "fewshot", "show"),
    "data.json": ("resume", "evaluate", "page"),
    "split.json": ("resume", "evaluate", "page"),
    "result.json": ("resume", "page"),
}


@pytest.mark.parametrize("name, verb", [(name, verb) for name, verbs in READ_BY.items() for verb in verbs])
def test_a_damaged_file_of_a_run_is_one_sentence(name, verb, pictures, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    contents = (run / name).read_bytes()
    cut = [contents[: len(contents) // 2], b"", b"null", b"[1]"] if name.endswith("json") else [b"model = ", b"[[["]
    for damaged in (b"\x93\xff" * 99, b'"', *cut):
        (run / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"^{re.escape(str(run / name))}"):
            VERBS[verb](run, pictures)
    VERBS[verb](whole, pictures)


def test_a_missing_record_of_the_images_is_named_on_resume(pictures, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "data.json").unlink()
    with pytest.raises(UserError, match=f"^{re.escape(str(run / 'data.json'))} is missing"):
        train(pictures, run, "keep=3")


def test_a_result_may_have_values_of_another_version(pictures, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"a_value_of_another_version": 1}))
    assert train(pictures, run, "keep=3").results[0].step == result["step"]
