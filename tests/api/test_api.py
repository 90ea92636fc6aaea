"""load, save, convert and info: what a user of the library calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.models.build import Model, build

TINY = ViTConfig(depth=2, width=32, mlp=48, heads=2, patch=4, image=(16, 16), classes=5)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = build(TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def card() -> Card:
    names = ("ant", "bee", "cat", "dog", "été")
    preprocess = Preprocess("decode|resize_small(20, bicubic)|central_crop(16)", (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    return Card(TINY, class_names=names, preprocess=preprocess, source="somewhere", licence="CC0")


@pytest.fixture
def file(model: Model, card: Card, tmp_path: Path) -> Path:
    vitral.save(model, tmp_path / "model.safetensors", card)
    return tmp_path / "model.safetensors"


def test_what_was_saved_is_loaded(model: Model, card: Card, file: Path) -> None:
    loaded, found = vitral.load(file)
    assert found == replace(card, sha256=found.sha256)
    assert not loaded.training
    for key, array in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], array), key


def test_a_loaded_model_can_be_trained(file: Path) -> None:
    loaded, _ = vitral.load(str(file))
    loaded.train()(torch.rand(2, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_every_adaptation_is_told(file: Path) -> None:
    loaded, card = vitral.load(file, image=(24, 32), classes=3, patch=8, channels=1)
    assert loaded(torch.rand(2, 1, 24, 32)).shape == (2, 3)
    assert card.architecture == loaded.config
    assert [change.split()[0] for change in card.changes] == ["channels", "patch", "head"]
    assert "grid 4x4 -> 3x4" in card.changes[1]
    assert card.class_names == ()
    assert card.preprocess is not None
    assert card.preprocess.mean == pytest.approx((0.4,))


def test_a_square_size_keeps_the_crop(file: Path) -> None:
    _, card = vitral.load(file, image=32)
    assert card.preprocess is not None
    assert card.preprocess.pipeline == "decode|resize_small(40, bicubic)|central_crop(32)"


WRONG: dict[str, Any] = {
    "classes": ("7", ["a", 2], "cat", 2.0, True, -1),
    "image": ((224,), 224.5, "224", -1, (32, 32, 32)),
    **{"channels": (1.5, "1"), "patch": (1.5, "8"), "resize": ("cubic", 3)},
    **{"grid": (3, (4,), "ab"), "heads": ("4", True), "norm_eps": (-1, 0, "a"), "gelu": ("relu", 3)},
    **{"pool": ("max",), "part": (3,), "classifier": (3,), "format": (3,)},
}


@pytest.mark.parametrize("option", WRONG)
def test_an_option_of_another_type_is_refused_by_its_name(file: Path, tmp_path: Path, option: str) -> None:
    for value in WRONG[option]:
        options: dict[str, Any] = {"format": "google", option: value}
        with pytest.raises(vitral.UserError, match=rf"^{option}(=| must be )"):
            vitral.load(file, **options)
        with pytest.raises(vitral.UserError, match=rf"^{option}(=| must be )"):
            vitral.convert(file, tmp_path / "model.npz", **options)
        if option not in ("classes", "image", "channels", "patch", "resize"):
            with pytest.raises(vitral.UserError, match=rf"^{option}(=| must be )"):
                vitral.info(file, **options)


@pytest.mark.parametrize("names", [["cat", "dog"], ("a", "b", "c", "d", "e")])
def test_names_of_classes_give_a_new_head(file: Path, tmp_path: Path, names: Sequence[str]) -> None:
    model, card = vitral.load(file, classes=names)
    assert card.class_names == tuple(names)
    assert not model(torch.rand(1, 3, 16, 16)).any()
    assert card.changes[-1].startswith("head ")
    vitral.save(model, tmp_path / "new.safetensors", card)
    assert vitral.load(tmp_path / "new.safetensors")[1].class_names == tuple(names)


@pytest.mark.parametrize("names", [[], ["cat", "dog", "cat"]])
def test_names_of_classes_differ_and_there_are_some(file: Path, names: Sequence[str]) -> None:
    with pytest.raises(
        vitral.UserError, match="classes must be one name or more, each of them once: 0 removes the head"
    ):
        vitral.load(file, classes=names)


def test_a_head_of_classes_with_these_names_is_kept(model: Model, card: Card, tmp_path: Path) -> None:
    vitral.save(model, tmp_path / "model.safetensors", replace(card, temperature=2.0))
    loaded, found = vitral.load(tmp_path / "model.safetensors", classes=card.class_names)
    assert (found.class_names, found.temperature, found.changes) == (card.class_names, 2.0, ())
    assert loaded.head.output is not None
    assert loaded.head.output.weight.any()
    assert vitral.load(tmp_path / "model.safetensors", classes=list("abcde"))[1].temperature == 1.0


def test_sizes_may_be_lists(file: Path) -> None:
    sizes: dict[str, Any] = {"image": [24, 32], "grid": [4, 4]}
    assert vitral.load(file, **sizes)[1].architecture.image == (24, 32)


@pytest.mark.parametrize("source", [None, {}, 3, b"file", torch.nn.Identity()])
def test_what_is_no_path_is_not_read(source: Any, tmp_path: Path) -> None:
    for call in (vitral.load, vitral.info, lambda source: vitral.convert(source, tmp_path / "x", format="hf")):
        with pytest.raises(vitral.UserError, match=f"^{type(source).__name__} is not a path: "):
            call(source)


def test_asking_for_what_is_there_changes_nothing(model: Model, file: Path) -> None:
    loaded, card = vitral.load(file, image=16, classes=5, patch=4, channels=3)
    assert card.changes == ()
    assert card.class_names[-1] == "été"
    images = torch.rand(1, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))


def test_changes_add_up_over_files(file: Path, tmp_path: Path) -> None:
    loaded, card = vitral.load(file, image=24)
    vitral.save(loaded, tmp_path / "second.safetensors", card)
    _, card = vitral.load(tmp_path / "second.safetensors", classes=2)
    assert [change.split()[0] for change in card.changes] == ["image", "head"]


def test_other_sizes_at_run_time_equal_the_adapted_model(file: Path) -> None:
    images = torch.rand(2, 3, 20, 28)
    plain, _ = vitral.load(file)
    adapted, _ = vitral.load(file, image=(20, 28))
    with torch.no_grad():
        assert torch.allclose(plain(images), adapted(images), atol=1e-5)


@pytest.mark.parametrize("to", ["google", "google-linen", "big_vision", "hf", "vitral"])
def test_convert_keeps_what_agrees(file: Path, tmp_path: Path, to: str) -> None:
    done = vitral.convert(file, tmp_path / "out" / "new", format=to)
    assert done.difference == 0
    assert (done.source_format, done.target_format) == ("vitral", to)
    assert done.target.exists()
    assert [path.name for path in done.target.parent.iterdir()] == ["new"]
    back, _ = vitral.load(done.target)
    images = torch.rand(1, 3, 16, 16)
    assert torch.equal(back(images), vitral.load(file)[0](images))


def test_convert_refuses_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    with pytest.raises(vitral.UserError, match="tanh"):
        vitral.convert(file, tmp_path / "out" / "tv.safetensors", format="torchvision")
    assert not list(tmp_path.glob("out/*"))


def test_convert_that_would_compute_something_else_is_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip in a table is caught by running both models, not by trusting the table."""
    from vitral.checkpoints import weights

    honest = weights.write_entries

    def slip(entries: list, state: dict) -> dict:
        arrays = honest(entries, state)
        arrays["head/bias"] = arrays["head/bias"] + 1
        return arrays

    monkeypatch.setattr(weights, "write_entries", slip)
    with pytest.raises(vitral.UserError, match="compute something else"):
        vitral.convert(file, tmp_path / "out" / "x.npz", format="google")
    assert not list(tmp_path.glob("out/*"))


def test_convert_does_not_overwrite(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(vitral.UserError, match="exists"):
        vitral.convert(file, file, format="google")
    assert file.read_bytes() == before


def test_convert_says_what_the_file_does_not(model: Model, card: Card, tmp_path: Path) -> None:
    erf = replace(TINY, gelu="erf", resize="timm")
    vitral.save(build(erf), tmp_path / "erf.safetensors", replace(card, architecture=erf))
    done = vitral.convert(tmp_path / "erf.safetensors", tmp_path / "tv.safetensors", format="torchvision")
    assert "it has 2 heads" in done.unstated
    assert any("rule timm" in words for words in done.unstated)
    assert done.unstated[-2:] == ("the names of its classes", "its preprocessing")
    _, *others = vitral.convert(tmp_path / "erf.safetensors", tmp_path / "hf", format="hf").unstated
    assert [words.startswith("its preprocessing is decode|resize_small(20, bicubic)") for words in others] == [True]


def test_convert_says_that_a_grid_is_not_square(card: Card, tmp_path: Path) -> None:
    wide = replace(TINY, image=(16, 20))
    vitral.save(build(wide), tmp_path / "wide.safetensors", replace(card, architecture=wide))
    done = vitral.convert(tmp_path / "wide.safetensors", tmp_path / "wide.npz", format="google")
    assert "its grid is 4x5" in done.unstated
    with pytest.raises(vitral.UserError, match="grid="):
        vitral.load(done.target)
    loaded, _ = vitral.load(done.target, grid=(4, 5))
    assert loaded.config.image == (16, 20)


def test_info_reads_headers_alone(file: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitral.checkpoints import weights

    def forbidden(*_: object) -> None:
        raise AssertionError("info must not load tensors")

    monkeypatch.setattr(weights, "read_tensors", forbidden)
    found = vitral.info(file)
    assert found.card == card
    assert found.format == "vitral"
    assert found.bytes == file.stat().st_size
    assert found.cost.params == sum(parameter.numel() for parameter in build(TINY).parameters())
    assert len(found.sha256) == 64


def test_a_name_makes_a_model() -> None:
    with torch.device("meta"):
        model = vitral.create("R26+ViT-S/32@64", classes=3)
    assert model(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 3)


def test_a_card_and_a_path_that_are_swapped_are_refused(model: Model, card: Card, tmp_path: Path) -> None:
    swapped: tuple[Any, ...] = (card, str(tmp_path / "model.safetensors"))
    with pytest.raises(vitral.UserError, match=r"^card must be a vitral\.checkpoints\.card\.Card, not '"):
        vitral.save(model, *swapped)
    with pytest.raises(vitral.UserError, match=r"^path must be a text or a os\.PathLike, not Card\("):
        vitral.save(model, *swapped[:1])
    options: dict[str, Any] = {"format": 3}
    with pytest.raises(vitral.UserError, match=r"^format must be a text, not 3\.$"):
        vitral.save(model, tmp_path / "model.safetensors", **options)


def test_saving_never_half_writes(model: Model, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitral.checkpoints import write

    target = tmp_path / "folder"

    def torn(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(write, "_write_bytes", torn)
    with pytest.raises(OSError, match="disk full"):
        vitral.save(model, target, card, format="hf")
    assert not list(tmp_path.iterdir())
