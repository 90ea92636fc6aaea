"""`vitral push`, through the real huggingface_hub, to a hub on this machine; then every library loads from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("huggingface_hub")
from fake_hub import TOKEN, FakeHub, fake_hub

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.hub import repository_of
from vitral.models.build import build
from vitral.recipe import Recipe, from_toml, to_toml

SHAPE = ViTConfig(depth=2, width=32, mlp=64, heads=4, patch=8, image=(32, 32), classes=5, gelu="erf")
NAMES = ("ant", "bee", "a_b*c", "cat <b>", "dog")
PIXELS = Preprocess("decode|resize(32, bicubic)", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
HELPERS = Path(__file__).parents[1] / "helpers"

# Top-1 of the same pixels in a process of its own, as a stranger would load the repository.
READERS = """
import json, sys
import torch
pixels = torch.load(sys.argv[1])
def classes(logits): return logits.argmax(dim=1).tolist()
with torch.inference_mode():
    import vitral
    model, card = vitral.load("hf:lab/tiny")
    ours = classes(model(pixels)), list(card.class_names)
    import timm
    theirs = timm.create_model("hf-hub:lab/tiny", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(theirs)
    from transformers import AutoImageProcessor, AutoModelForImageClassification
    auto = AutoModelForImageClassification.from_pretrained("lab/tiny").eval()
    names = [auto.config.id2label[i] for i in range(auto.config.num_labels)]
    AutoImageProcessor.from_pretrained("lab/tiny")
    answer = {"vitral": ours, "timm": classes(theirs(pixels)), "mean": config["mean"], "size": config["input_size"]}
    print(json.dumps({**answer, "transformers": classes(auto(pixels).logits), "names": names}))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Of a program that knows this hub only; large files go over HTTP, as a hub without Xet takes them."""
    paths = os.pathsep.join([str(HELPERS / "repair"), os.environ.get("PYTHONPATH", "")])
    hub_settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN}
    return {**os.environ, **hub_settings, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "0"}


def write_model(path: Path, shape: ViTConfig = SHAPE) -> Path:
    torch.manual_seed(0)
    model = build(shape)
    torch.nn.init.normal_(model.get_parameter("head.output.weight"))
    vitral.save(model, path, Card(shape, class_names=NAMES, preprocess=PIXELS))
    return path


def push(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitral", "push", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_vitral_timm_and_transformers_load_what_was_pushed(
    hub: FakeHub, environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    source = write_model(tmp_path / "model.safetensors")
    done = push(environment, str(source), "hf:lab/tiny", "--private", "--licence", "apache-2.0")
    assert done.returncode == 0, done.stderr
    assert "vitral, timm, transformers" in done.stdout
    assert hub.private == {"lab/tiny"}
    assert set(hub.repositories["lab/tiny"]) == {"README.md", "config.json", "model.safetensors"}

    pixels = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.save(pixels, tmp_path / "pixels.pt")
    words = [sys.executable, "-c", READERS, str(tmp_path / "pixels.pt")]
    read = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert read.returncode == 0, read.stderr[-2000:]
    answer = json.loads(read.stdout.splitlines()[-1])
    with torch.inference_mode():
        expected = vitral.load(source)[0](pixels).argmax(dim=1).tolist()
    assert len(set(expected)) > 1
    assert answer["vitral"] == [expected, list(NAMES)]
    assert answer["timm"] == answer["transformers"] == expected
    assert answer["names"] == list(NAMES)
    assert (answer["mean"], answer["size"]) == ([0.5] * 3, [3, 32, 32])


@pytest.mark.slow
def test_a_second_push_updates_the_repository(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.safetensors")
    assert push(environment, str(source), "hf:lab/tiny").returncode == 0
    before = hub.repositories["lab/tiny"]["model.safetensors"]
    model, card = vitral.load(source)
    torch.nn.init.ones_(model.get_parameter("head.output.bias"))
    vitral.save(model, source, card)
    assert push(environment, str(source), "hf:lab/tiny").returncode == 0
    assert hub.repositories["lab/tiny"]["model.safetensors"] != before


def test_without_a_token_the_user_is_told_to_log_in(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    del environment["HF_TOKEN"]
    done = push(environment, str(write_model(tmp_path / "model.safetensors")), "hf:lab/tiny")
    assert done.returncode == 2
    assert "hf auth login" in done.stderr
    assert "Traceback" not in done.stderr
    assert not hub.repositories


def test_a_model_that_timm_cannot_express_is_published_for_the_others(tmp_path: Path) -> None:
    shape = ViTConfig(
        depth=1, width=32, mlp=64, heads=4, patch=8, image=(32, 32), classes=5, position="relative", gelu="erf"
    )
    source = write_model(tmp_path / "model.safetensors", shape)
    result = vitral.push(source, "hf:lab/relative", dry_run=tmp_path / "repository")
    assert result.layout == "vitral"
    assert result.readers == ("vitral",)
    assert len(result.refusals) == 2
    assert vitral.load(tmp_path / "repository")[1].class_names == NAMES


def test_readers_without_a_temperature_get_calibrated_probabilities(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.safetensors")
    model, card = vitral.load(source)
    vitral.save(model, source, replace(card, temperature=0.5))
    vitral.push(source, "hf:lab/sharp", dry_run=tmp_path / "repository")
    published, published_card = vitral.load(tmp_path / "repository")
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(published(pixels), model(pixels) / 0.5)
    assert published_card.temperature == 1.0
    assert "temperature 0.5" in (tmp_path / "repository" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("init", "published"),
    [
        ("/home/ada/weights/vit.safetensors", "vit.safetensors"),
        ("clients/acme/run/", "run"),
        (r"C:\ada\vit.npz", "vit.npz"),
        ('/home/ada "x"/my "best".npz', 'my "best".npz'),
        ("hf:google/vit-base-patch16-224", "hf:google/vit-base-patch16-224"),
        ("", ""),
    ],
)
def test_a_published_recipe_names_no_local_folders(tmp_path: Path, init: str, published: str) -> None:
    write_model(tmp_path / "model.safetensors")
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text(to_toml(replace(Recipe(), init=init)), encoding="utf-8")
    vitral.push(tmp_path, "hf:lab/tiny", dry_run=tmp_path / "repository")
    text = (tmp_path / "repository" / "README.md").read_text(encoding="utf-8")
    assert from_toml(text.partition("```toml\n")[2].partition("```")[0]).init == published
    assert not any(folder in text for folder in ("/home", "acme", "C:"))


def test_class_names_may_come_from_a_file(tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    names.write_text('["one", "two", "three", "four", "five"]')
    source = write_model(tmp_path / "model.safetensors")
    vitral.push(source, "hf:lab/tiny", classes=names, dry_run=tmp_path / "repository")
    assert vitral.load(tmp_path / "repository")[1].class_names == ("one", "two", "three", "four", "five")


def test_independent_outputs_are_published_for_vitral_alone(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.safetensors")
    model, card = vitral.load(source)
    vitral.save(model, source, replace(card, multilabel=True))
    result = vitral.push(source, "hf:lab/tiny", dry_run=tmp_path / "repository")
    assert result.readers == ("vitral",)
    assert vitral.load(tmp_path / "repository")[1].multilabel


def test_the_card_states_what_the_run_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_model(run / "model.safetensors")
    metrics = {"top1": 0.875, "n": 40, "ece": 0.03}
    (run / "result.json").write_text(json.dumps({"metrics": metrics, "seed": 7}))
    (run / "data.json").write_text(json.dumps({"source": "/home/me/pets", "notes": ["40 images are held out."]}))
    (run / "recipe.toml").write_text('model = "ViT-Ti/16"\n')
    vitral.push(run, "hf:lab/pets", dry_run=tmp_path / "repository")
    text = (tmp_path / "repository" / "README.md").read_text()
    for fact in ("87.50 %", "40 held-out images of pets", "seed 7", "40 images are held out.", 'model = "ViT-Ti/16"'):
        assert fact in text
    assert "/home/me" not in text
    assert r"a\_b\*c, cat \<b\>" in text
    yaml = text.split("---")[1]
    assert "value: 0.8750" in yaml
    assert "license:" not in yaml  # not known, so not stated


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    shape = ViTConfig(depth=1, width=32, mlp=64, heads=4, patch=8, image=(32, 32), classes=0)
    vitral.save(build(shape), tmp_path / "model.safetensors", Card(shape))
    with pytest.raises(vitral.UserError, match="no classification head"):
        vitral.push(tmp_path / "model.safetensors", "hf:lab/tiny", dry_run=tmp_path / "repository")


@pytest.mark.parametrize("name", ["lab/tiny", "hf:tiny", "hf:lab/tiny/more", "hf:../x", "timm:lab/tiny"])
def test_a_target_that_is_no_repository_is_refused(name: str) -> None:
    with pytest.raises(vitral.UserError, match="hf:owner/name"):
        repository_of(name)


def test_a_dry_run_needs_a_new_folder(tmp_path: Path) -> None:
    """An empty one is refused, too: timm's layout would fail there, and another be taken instead."""
    source = write_model(tmp_path / "w.safetensors")
    vitral.push(source, "hf:lab/tiny", dry_run=tmp_path / "new")
    (tmp_path / "empty").mkdir()
    for folder in ("new", "empty"):
        with pytest.raises(vitral.UserError, match="exists: name a new folder, or remove it first"):
            vitral.push(source, "hf:lab/tiny", dry_run=tmp_path / folder)
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("licence", ["my own", "mit\npipeline_tag: x", "a:b"])
def test_a_licence_that_is_no_identifier_is_refused(licence: str, tmp_path: Path) -> None:
    with pytest.raises(vitral.UserError, match="is not the identifier of a licence"):
        vitral.push(write_model(tmp_path / "w.safetensors"), "hf:lab/tiny", licence=licence, dry_run=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever class the HTTP library raises."""
    from huggingface_hub import HfApi, errors

    class ConnectError(Exception):
        pass

    for raised, said in (
        (ConnectError("[Errno -2] Name or service not known"), r"ConnectError: .*: check the connection\.$"),
        (errors.LocalTokenNotFoundError("no token"), r"needs a token: run `hf auth login`, or set HF_TOKEN\.$"),
    ):

        def fail(*arguments: object, error: Exception = raised, **options: object) -> None:
            raise error

        monkeypatch.setattr(HfApi, "create_repo", fail)
        with pytest.raises(vitral.UserError, match=said):
            vitral.push(write_model(tmp_path / "w.safetensors"), "hf:lab/tiny")
