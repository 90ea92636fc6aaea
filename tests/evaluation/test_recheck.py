"""Predictions in FP8 whose close calls are computed again: which ones, what they become, and as users run it."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.api.inference import Ensemble, open_ensemble
from vitral.api.prediction import PredictionResults
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.sources import Split, open_images
from vitral.evaluation.predict import Predictions
from vitral.evaluation.recheck import CHANGED, MIN_IMAGES, SAMPLE, Recheck, in_bfloat16, sample_of
from vitral.events import Event, Note, Progress, ignore_events
from vitral.models.build import build
from vitral.models.model import VisionModel
from vitral.models.vit import ViT

NOISE = 0.3  # standard deviation of what `rounded` adds to a logit


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """Logits with an error that depends on them alone, as rounding does, and is about normal."""
    waves = torch.stack([(logits * frequency).sin() for frequency in (31.4, 47.1, 80.7, 121.3)])
    return logits + waves.sum(0) * (NOISE / 2**0.5)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(5000, 10, generator=torch.Generator().manual_seed(0)) * 2


def measured(images: torch.Tensor) -> Recheck:
    return Recheck.of(rounded(images).numpy(), images.numpy())


@pytest.mark.parametrize("spread", [1.0, 2.0, 6.0])
def test_as_few_images_are_computed_again_as_leave_one_in_400_with_another_class(images, spread):
    """Brute force over all margins, which is not told how the error is distributed."""
    logits = images * spread
    found, true = rounded(logits), logits.argmax(1)
    two = found.topk(2).values
    gaps, order = (two[:, 0] - two[:, 1]).sort()
    wrong = (found.argmax(1) != true)[order]
    remaining = wrong.flip(0).cumsum(0).flip(0) / len(wrong)
    least = float((remaining > CHANGED).double().mean())
    shares = []
    for start in range(0, len(logits) - SAMPLE, SAMPLE):
        recheck = measured(logits[start : start + SAMPLE])
        shares.append(float((gaps < recheck.margin).double().mean()))
        assert float((wrong & (gaps >= recheck.margin)).double().mean()) < 2.5 * CHANGED
    assert np.mean(shares) == pytest.approx(least, rel=0.25)


@pytest.mark.parametrize("offset", [0, 6, 12, 25, 50])
def test_one_in_400_is_expected_to_keep_another_class_with_equal_differences_too(images, offset):
    """Logits in half precision have many: their differences are multiples of a step, here up to 1/4."""
    logits = (images + offset).bfloat16().float()
    found = rounded(logits).bfloat16().float()
    for start in range(0, len(logits) - SAMPLE, SAMPLE):
        fp8, exact = found[start : start + SAMPLE], logits[start : start + SAMPLE]
        likeliest = torch.from_numpy(np.argsort(fp8.numpy(), axis=1)[:, :-3:-1].copy())  # equal ones in its order
        gap, true = (-values.double().gather(1, likeliest).diff()[:, 0] for values in (fp8, exact))
        error = (gap - true).square().mean().sqrt()
        kept = gap[~torch.from_numpy(Recheck.of(fp8.numpy(), exact.numpy()).doubtful(fp8.numpy()))]
        assert torch.special.ndtr(-kept / error).sum() / SAMPLE <= CHANGED


def test_exact_logits_are_not_computed_again(images):
    recheck = Recheck.of(images.numpy(), images.numpy())
    assert (recheck.recomputed, recheck.same_before, recheck.same_after) == (0, 1, 1)
    tied = images.bfloat16().float().numpy()
    tied[:, 1] = tied[:, 0]
    assert Recheck.of(tied, tied).same_before == 1
    opposite = Recheck.of(images[:9].numpy(), -images[:9].numpy())
    assert opposite.same_after > 0.99  # mostly or all computed again


def test_logits_that_are_not_finite_are_computed_again(images):
    logits = rounded(images[:SAMPLE]).numpy()
    logits[3], logits[4, 2] = np.nan, np.inf
    assert measured(images).doubtful(logits)[[3, 4]].tolist() == [True, False]  # an infinite logit is the likeliest


def test_the_shares_of_the_sample_are_those_of_all_images(images):
    recheck = measured(images[:SAMPLE])
    first, again = rounded(images), torch.from_numpy(recheck.doubtful(rounded(images).numpy()))
    same = first.argmax(1) == images.argmax(1)
    before, after = same.double().mean(), (same | again).double().mean()
    assert before < 0.95
    assert after > 0.99
    assert recheck.same_before == pytest.approx(float(before), abs=0.04)
    assert recheck.same_after == pytest.approx(float(after), abs=0.01)
    assert recheck.recomputed == pytest.approx(float(again.double().mean()), abs=0.06)


def test_an_image_is_computed_again_by_its_margin_alone(images):
    """Brute force."""
    recheck = measured(images)
    first = rounded(images[:320]).numpy()
    expected = [sorted(row)[-1] - sorted(row)[-2] < recheck.margin for row in first.tolist()]
    assert recheck.doubtful(first).tolist() == expected
    assert 0 < sum(expected) < 320


@pytest.mark.parametrize("count", [SAMPLE, SAMPLE + 1, 1000, 1_281_167])
def test_samples_are_spread_over_all_images(count):
    sample = sample_of(count)
    assert len(set(sample.tolist())) == SAMPLE
    assert sample[0] == 0
    assert sample[-1] >= count - count / SAMPLE - 1
    assert set(np.diff(sample)) <= {count // SAMPLE, count // SAMPLE + 1}


def test_fp8_is_switched_off_for_as_long_as_a_function_runs():
    model = build(SMALL)
    assert isinstance(model, ViT)
    model.fp8 = weights = ["block 0"]
    assert in_bfloat16(model, lambda images: images + bool(model.fp8))(torch.zeros(1)).item() == 0
    assert model.fp8 is weights

    def fail(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        in_bfloat16(model, fail)(torch.zeros(1))
    assert model.fp8 is weights


SMALL = ViTConfig(depth=1, width=32, mlp=64, heads=2, patch=8, image=(16, 16), classes=5)
CARD = Card(SMALL, class_names=tuple("abcde"), preprocess=Preprocess("decode|resize(16)", (0.5,) * 3, (0.5,) * 3))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ViT:
    """A model that `use_fp8` makes as inexact as FP8 on any device; logits are computed in float32 otherwise."""

    class Noisy(ViT):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                logits = super().forward(images) * 30
                return rounded(logits) if self.fp8 else logits

    def use_fp8(model: VisionModel, on_event: object, *, freeze: bool) -> None:
        assert freeze
        model.fp8 = True  # type: ignore[bad-assignment]

    monkeypatch.setattr("vitral.api.inference.use_fp8", use_fp8)
    torch.manual_seed(0)
    model = Noisy(SMALL)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 images in five classes; one of them, in the sample, is none."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(400):
        path = folder / "abcde"[number % 5] / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((16, 16)).save(path)
    (folder / "a" / "000.png").write_bytes(b"no image")
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 be checked on 400 images, of which many are doubtful."""
    monkeypatch.setattr("vitral.api.inference.MIN_IMAGES", SAMPLE)
    monkeypatch.setattr("vitral.api.inference.MAX_RECOMPUTED", 0.9)


def classes_of(model: ViT, folder: Path, events: list[Event], **options: object) -> list[str]:
    results = vitral.predict((model, CARD), folder, device="cpu", on_event=events.append, **options)  # type: ignore
    assert len(results.unreadable) == 1
    return [row.names[0] for row in results.rows]


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def checked(split: Split, *models: ViT, **changes: object) -> Ensemble:
    """Models in FP8 and what FP8 changes, measured on these images."""
    sources = [(model, replace(CARD, **changes)) for model in models]  # type: ignore
    ensemble = open_ensemble(sources, precision="fp8", device="cpu")  # type: ignore
    return ensemble.checked(split, batch=32, on_event=ignore_events)


def without_recheck(ensemble: Ensemble, split: Split) -> Predictions:
    return replace(ensemble, recheck=None).predict(split, batch=32, on_event=ignore_events)


@pytest.mark.parametrize("tta", [None, "flip"])
def test_predictions_in_fp8_have_the_classes_of_bfloat16(model, folder, tta):
    events: list[Event] = []
    expected = np.array(classes_of(model, folder, events, precision="bfloat16", tta=tta))
    found = np.array(classes_of(model, folder, events, precision="fp8", tta=tta))
    assert not model.fp8  # the user's own model is not changed
    model.fp8 = True
    raw = np.array(classes_of(model, folder, events, precision="bfloat16", tta=tta))
    assert np.mean(raw == expected) < 0.97
    assert np.mean(found == expected) > 0.99
    (note,) = notes(events)
    assert note.startswith("Of 255 sampled images, the likeliest class in FP8 is that in bfloat16 for 9")


def test_models_that_are_averaged_have_the_classes_of_their_average_in_bfloat16(model, folder):
    other = deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    split = open_images([folder])
    expected = open_ensemble([(model, CARD), (other, CARD)], precision="bfloat16", device="cpu")
    classes = expected.predict(split, batch=32, on_event=ignore_events).logits[1:].argmax(1)
    ensemble = checked(split, model, other)
    found = ensemble.predict(split, batch=32, on_event=ignore_events).logits[1:].argmax(1)
    plain = without_recheck(ensemble, split).logits[1:].argmax(1)
    assert ensemble.recheck is not None
    assert np.mean(plain == classes) < 0.98
    assert np.mean(found == classes) > 0.99
    assert np.mean(found == classes) == pytest.approx(ensemble.recheck.same_after, abs=0.01)


def test_doubtful_images_have_the_logits_of_bfloat16_and_others_those_of_fp8(model, folder):
    split = open_images([folder])
    tasks: list[str] = []
    options = {"batch": 32, "on_event": lambda event: tasks.append(event.task) if isinstance(event, Progress) else None}
    bfloat16 = open_ensemble((model, CARD), precision="bfloat16", device="cpu").predict(split, **options)
    tasks.clear()
    ensemble = checked(split, model)
    assert ensemble.recheck is not None
    plain = without_recheck(ensemble, split)
    found = ensemble.predict(split, **options)
    again = found.valid & ensemble.recheck.doubtful(plain.logits)
    assert 10 < again.sum() < 300
    np.testing.assert_allclose(found.logits[again], bfloat16.logits[again], atol=1e-3)
    np.testing.assert_array_equal(found.logits[~again & found.valid], plain.logits[~again & found.valid])
    assert tasks[-1] == "computing doubtful images again"


def test_images_without_doubt_are_computed_once(model, folder):
    split = open_images([folder])
    ensemble = checked(split, model)
    assert ensemble.recheck is not None
    sure = replace(ensemble, recheck=replace(ensemble.recheck, margin=0.0))
    found = sure.predict(split, batch=32, on_event=ignore_events)
    np.testing.assert_array_equal(found.logits[1:], without_recheck(ensemble, split).logits[1:])


def test_an_image_that_cannot_be_read_again_keeps_its_logits(model, folder, tmp_path):
    copied = Path(shutil.copytree(folder, tmp_path / "images"))
    split = open_images([copied])
    ensemble = checked(split, model)
    assert ensemble.recheck is not None
    plain = without_recheck(ensemble, split)
    gone = int(np.flatnonzero(plain.valid & ensemble.recheck.doubtful(plain.logits))[3])

    def remove(event: Event) -> None:
        if isinstance(event, Progress) and event.done == event.total == len(split):
            (copied / split.keys[gone]).unlink(missing_ok=True)

    found = ensemble.predict(split, batch=32, on_event=remove)
    assert not (copied / split.keys[gone]).exists()
    assert found.valid[gone]
    np.testing.assert_array_equal(found.logits[gone], plain.logits[gone])


def test_parts_in_fp8_give_what_one_part_gives(model, folder):
    split = open_images([folder])
    options = {"batch": 32, "on_event": ignore_events}
    ensemble = checked(split, model)
    whole = ensemble.predict(split, **options).logits
    parts = [ensemble.predict(split.select(part), **options).logits for part in np.split(np.arange(400), [96, 352])]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-3)


def test_evaluations_in_fp8_say_how_well_it_agrees(model, folder):
    results = [vitral.evaluate((model, CARD), folder, precision=name, device="cpu") for name in ("bfloat16", "fp8")]
    assert abs(results[0].metrics["top1"] - results[1].metrics["top1"]) < 0.01
    assert any("sampled images" in note and "computed again in bfloat16" in note for note in results[1].notes)
    assert "Computed in fp8." in results[1].notes


def test_models_with_several_labels_are_in_fp8_without_a_check(model, folder):
    ensemble = checked(open_images([folder]), model, multilabel=True)
    assert (ensemble.precision, ensemble.recheck) == ("fp8", None)


def test_where_fp8_gains_nothing_images_are_computed_in_bfloat16(model, folder, monkeypatch):
    events: list[Event] = []

    def results() -> list[PredictionResults]:
        options = {"device": "cpu", "on_event": events.append}
        return [vitral.predict((model, CARD), folder, precision=name, **options) for name in ("bfloat16", "fp8")]  # type: ignore

    monkeypatch.setattr("vitral.api.inference.MAX_RECOMPUTED", 0.1)
    doubtful = results()
    monkeypatch.setattr("vitral.api.inference.MIN_IMAGES", MIN_IMAGES)
    few = results()
    for bfloat16, fp8 in (doubtful, few):
        assert bfloat16.rows == fp8.rows
        assert fp8.precision == "bfloat16"
    first, second = notes(events)
    assert re.fullmatch(r"computed in bfloat16: FP8 leaves \d\d% of 255 sampled .* in doubt, too many to gain", first)
    assert second == ("computed in bfloat16: below 2,560 images, checking FP8 on a sample takes longer than FP8 saves")


def test_a_model_that_is_not_in_fp8_is_reported_in_bfloat16(model, folder, monkeypatch):
    monkeypatch.setattr("vitral.api.inference.use_fp8", lambda model, on_event, *, freeze: None)
    events: list[Event] = []
    assert vitral.predict((model, CARD), folder, precision="fp8", device="cpu", on_event=events.append).precision == (
        "bfloat16"
    )
    assert not notes(events)
    assert "Computed in bfloat16." in vitral.evaluate((model, CARD), folder, precision="fp8", device="cpu").notes


def test_a_sample_that_cannot_be_read_is_no_check(model, folder, tmp_path):
    copied = Path(shutil.copytree(folder, tmp_path / "images"))
    split = open_images([copied])
    for index in sample_of(len(split)):
        (copied / split.keys[index]).write_bytes(b"no image")
    events: list[Event] = []
    found = vitral.predict((model, CARD), copied, precision="fp8", device="cpu", on_event=events.append)
    assert (found.precision, len(found.rows)) == ("bfloat16", 400 - SAMPLE)
    assert "no image of the sample" in notes(events)[0]
