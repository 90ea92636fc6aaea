"""Files as training scripts leave them: wrapped, nested, with two models or other tensors beside the model.

The judge is the wrapped model itself (timm's, transformers'): a file loads with its outputs, or is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import (
    ERF,
    IMAGES,
    gap,
    hf_model,
    loads_as,
    outcome,
    outside,
    pictures,
    prefixed,
    quiet,
    random_weights,
    randomised,
    save,
    timm_model,
    timm_saved,
    written,
)
from safetensors.torch import load_file
from torch import nn

import vitral
from vitral.api.checkpoints import load_source
from vitral.checkpoints.wrappers import ignored_sentences
from vitral.cli import main
from vitral.errors import UserError
from vitral.events import Note

LIMIT = 1e-5


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_compiled_model_of_timm_keeps_its_classifier(tmp_path, suffix):
    model = timm_model()
    compiled: Any = torch.compile(model, backend="eager")
    path = save(compiled.state_dict(), tmp_path / f"a.{suffix}")
    assert loads_as(model, path) == ('keys: "_orig_mod." removed',)
    assert vitral.info(path, heads=4).card.format == "timm"


PREFIXES = [
    *("module.", "model.", "backbone.", "encoder.", "net.", "network.", "timm_model.", "student.", "teacher."),
    *("trunk.", "visual.", "vision_model.", "ema_model.", "0.", "visual.trunk.", "model.encoder.", "x/y."),
    *("module.model.backbone.", "state_dict.model.net.", "blocks.", "vit."),
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("family", ["timm", "hf"])
def test_any_prefix_is_removed_and_recorded(tmp_path, prefix, family):
    model = timm_model() if family == "timm" else hf_model("ViTForImageClassification")
    path = save(prefixed(prefix, model.state_dict()), tmp_path / "a.safetensors")
    loaded, card = vitral.load(path, heads=4)
    expected = outcome(model, IMAGES)
    with torch.no_grad():
        assert gap(loaded(IMAGES), expected if family == "timm" else expected.logits) <= LIMIT
    assert f'keys: prefix "{prefix}" removed' in card.changes


@pytest.mark.parametrize(
    "prefix", ["module._orig_mod.", "_orig_mod.module.", "model._orig_mod.", "_fsdp_wrapped_module.net._orig_mod."]
)
def test_wrappers_combine_in_any_order(tmp_path, prefix):
    model = timm_model()
    changes = loads_as(model, save(prefixed(prefix, model.state_dict()), tmp_path / "a.pt"))
    assert len(changes) >= 2
    assert all(change.startswith("keys: ") and change.endswith("removed") for change in changes)


def test_a_file_of_lightning_lists_its_other_tensors(tmp_path):
    model = timm_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(IMAGES).sum().backward()
    optimizer.step()
    model.eval()
    content = {
        "state_dict": {**prefixed("model.", model.state_dict()), "criterion.weight": torch.ones(5)},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"lr": 0.1},
        "epoch": 3,
    }
    count = 3 * len(list(model.parameters()))
    assert loads_as(model, save(content, tmp_path / "last.ckpt")) == (
        'keys: prefix "state_dict.model." removed',
        'ignored: tensor "state_dict.criterion.weight"',
        f'ignored: {count} tensors under "optimizer_states."',
    )


def test_a_file_of_distributed_training_loads(tmp_path):
    model = timm_model()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        path = save({"model": wrapped.state_dict(), "step": torch.tensor(3)}, tmp_path / "a.pt")
    finally:
        torch.distributed.destroy_process_group()
    assert loads_as(model, path) == ('keys: prefix "model.module." removed', 'ignored: tensor "step"')


PAIRS = [
    ("student.", "teacher."),
    ("student.backbone.", "teacher.backbone."),
    ("module.base_encoder.", "module.momentum_encoder."),
    ("model.", "model_ema.module."),
    ("state_dict.", "state_dict_ema."),
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("nested", [False, True])
def test_of_two_models_one_is_chosen(tmp_path, pair, nested):
    models = [randomised(timm_model(), seed) for seed in (1, 2)]
    states = [model.state_dict() for model in models]
    if nested:  # in a pickle, the first word is the key of a dict
        content = {}
        for prefix, state in zip(pair, states, strict=True):
            first, _, rest = prefix.partition(".")
            content.setdefault(first, {}).update(prefixed(rest, state))
        path = save(content, tmp_path / "a.pt")
    else:
        path = save({**prefixed(pair[0], states[0]), **prefixed(pair[1], states[1])}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="contains 2 models") as caught:
        vitral.load(path, heads=4)
    text = str(caught.value)
    assert all(f'"{prefix[:-1]}"' in text for prefix in pair)
    parts = re.findall(r'part="([^"]+)"', text)
    for model, prefix, part in zip(models, pair, parts, strict=True):
        for choice in {part, prefix}:
            changes = loads_as(model, path, part=choice)
            assert f'keys: prefix "{prefix}" removed' in changes
            assert sum(change.startswith(f"ignored: {len(states[0])} tensors under") for change in changes) == 1
    with pytest.raises(UserError, match=r'no model for part="other": it holds'):
        vitral.info(path, part="other")


def test_equal_copies_and_a_copy_beside_plain_keys_are_two_models(tmp_path):
    model = timm_model()
    state = model.state_dict()
    path = save({**state, **prefixed("ema.", state)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r'contains 2 models, "\." and "ema": pass part="\." or part="ema"\.'):
        vitral.load(path, heads=4)
    for part in (".", "ema"):
        loads_as(model, path, part=part)


def test_convert_and_the_command_take_a_part(tmp_path, capsys, monkeypatch):
    states = [prefixed(name, timm_model().state_dict()) for name in ("student.", "teacher.")]
    path = save({**states[0], **states[1]}, tmp_path / "a.safetensors")
    result = vitral.convert(path, tmp_path / "b.safetensors", format="vitral", heads=4, part="teacher")
    assert 'keys: prefix "teacher." removed' in result.changes
    assert set(result.unmapped) == set(states[0])
    monkeypatch.setattr(
        "sys.argv", ["vitral", "info", f"{path}", *["--heads", "4", "--part", "student", "--gelu", "tanh"]]
    )
    main()
    printed = " ".join(capsys.readouterr().out.split())
    assert 'prefix "student." removed' in printed
    assert "as passed: gelu=tanh" in printed


def test_a_text_tower_is_ignored_and_listed(tmp_path):
    """OpenCLIP with a tower of timm's: the text tower has layers, too, but is no second model."""
    model = timm_model(num_classes=0)
    text = {f"text.transformer.resblocks.{i}.attn.in_proj_weight": torch.ones(24, 8) for i in range(12)}
    state = {**prefixed("visual.trunk.", model.state_dict()), **text, "logit_scale": torch.ones(())}
    state["visual.head.proj.weight"] = torch.ones(16, 32)
    assert loads_as(model, save(state, tmp_path / "a.safetensors")) == (
        'keys: prefix "visual.trunk." removed',
        'ignored: tensor "logit_scale"',
        'ignored: 12 tensors under "text."',
        'ignored: tensor "visual.head.proj.weight"',
    )


def test_the_mask_token_of_ibot_is_listed(tmp_path):
    model = timm_model(num_classes=0)
    path = save({"teacher": {**model.state_dict(), "masked_embed": torch.ones(1, 32)}}, tmp_path / "a.pt")
    assert 'ignored: tensor "masked_embed"' in loads_as(model, path)


def test_a_dinov2_classifier_loads_with_its_head_and_without(tmp_path):
    model = hf_model("Dinov2ForImageClassification", mlp_ratio=2)
    path = save(model.state_dict(), tmp_path / "a.safetensors")
    whole, _ = vitral.load(path, heads=4)
    with torch.no_grad():
        assert gap(whole(IMAGES), outcome(model, IMAGES).logits) <= LIMIT
    loaded, card = vitral.load(path, heads=4, classes=0)
    with torch.no_grad():
        assert gap(loaded(IMAGES)[:, :32], outcome(model.dinov2, IMAGES).pooler_output) <= LIMIT
    assert "head 5 -> 0 classes" in card.changes


def test_ignored_tensors_of_a_format_are_listed(tmp_path):
    c = replace(ERF, classes=0, layer_scale=True, mlp=64)
    written(random_weights(c), tmp_path / "a.safetensors", "dino")
    assert 'ignored: tensor "mask_token"' in vitral.load(tmp_path / "a.safetensors", heads=4)[1].changes
    state = {**load_file(tmp_path / "a.safetensors"), "head.weight": torch.ones(5, 32), "head.bias": torch.ones(5)}
    with pytest.raises(UserError, match="its head is not one of this format"):
        vitral.load(save(state, tmp_path / "b.safetensors"), heads=4)


def test_two_names_of_one_tensor_are_refused(tmp_path):
    state = hf_model("ViTForImageClassification").state_dict()
    state["embeddings.cls_token"] = state["vit.embeddings.cls_token"] + 1
    with pytest.raises(UserError, match=r"embeddings\.cls_token, which are both embeddings\.cls_token: remove one"):
        vitral.load(save(state, tmp_path / "a.safetensors"), heads=4)


@pytest.mark.parametrize(("missing", "words"), [(r"reg_token", "registers=3"), (r"blocks\.1\.", "depth=2")])
def test_a_config_that_counts_more_than_the_file_has_is_refused(tmp_path, missing, words):
    settings = {"reg_tokens": 3, "no_embed_class": True}
    folder = timm_saved(timm_model(**settings), tmp_path / "a", **settings)
    state = load_file(folder / "model.safetensors")
    save({key: array for key, array in state.items() if not re.match(missing, key)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"config\.json .* states {words}, the tensors have"):
        vitral.load(folder)


def test_sentences_are_grouped_by_branch():
    keys = ["a.head.w", "a.head.b", "queue", "b.x.y", "a.other"]
    assert ignored_sentences(keys, "a.backbone.") == [
        'ignored: 2 tensors under "a.head."',
        'ignored: tensor "queue"',
        'ignored: tensor "b.x.y"',
        'ignored: tensor "a.other"',
    ]


# --- what the tensors do not show


def test_a_file_without_config_says_what_is_assumed(tmp_path):
    path = save(timm_model().state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="does not state its number of heads"):
        vitral.load(path)
    usual = "as timm's models with these tensors have; if not, pass"
    folder = "or the folder with timm's config.json"
    assert vitral.load(path, heads=4)[1].changes == (
        f"assumed: gelu=erf, pool=token, norm_eps=1e-06, {usual} gelu= or pool= or norm_eps=, {folder}",
    )
    assert vitral.load(path, heads=4, gelu="erf", pool="token")[1].changes == (
        f"assumed: norm_eps=1e-06, {usual} norm_eps=, {folder}",
        "as passed: gelu=erf, pool=token",
    )
    model, card = vitral.load(path, heads=4, gelu="erf", pool="token", norm_eps=1e-4)
    assert card.changes == ("as passed: gelu=erf, pool=token, norm_eps=0.0001",)
    assert {layer.eps for layer in model.modules() if isinstance(layer, nn.LayerNorm)} == {1e-4}


def test_a_standard_size_has_standard_heads_and_says_so(tmp_path):
    weights = random_weights(replace(ERF, depth=12, width=192, heads=3))
    written(weights, tmp_path / "a.safetensors", "torchvision")
    _, card = vitral.load(tmp_path / "a.safetensors")
    assert card.changes == ("assumed: 3 heads, as every standard ViT of 12 layers and width 192; pass heads= if not",)
    assert vitral.load(tmp_path / "a.safetensors", heads=3)[1].changes == ()


def test_verbs_print_what_is_assumed(tmp_path):
    weights = random_weights(replace(ERF, depth=12, width=192, heads=3))
    written(weights, tmp_path / "a.safetensors", "torchvision")
    events: list[Any] = []
    load_source(tmp_path / "a.safetensors", events.append)
    assert [type(event) for event in events] == [Note]
    assert "a.safetensors: assumed: 3 heads, as every standard ViT" in events[0].text


@pytest.mark.parametrize(
    ("settings", "passed"),
    [
        ({"act_layer": "gelu_tanh"}, {"gelu": "tanh"}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "mean"}),
    ],
)
def test_what_is_passed_is_computed(tmp_path, settings, passed):
    model = timm_model(**settings)
    path = save(model.state_dict(), tmp_path / "a.safetensors")
    changes = loads_as(model, path, **passed)
    (field, value), *_ = passed.items()
    assert f"as passed: {field}={value}" in changes
    assert gap(vitral.load(path, heads=4)[0](IMAGES), outcome(model, IMAGES)) > 1e-4  # and matters


def test_a_known_name_states_what_the_tensors_do_not(tmp_path):
    with quiet():
        model = randomised(outside("timm").create_model("test_vit"))
    path = save(model.state_dict(), tmp_path / "test_vit.r160_in1k.safetensors")
    loaded, card = vitral.load(path)
    pixels = "decode|resize_short(168, pil_bicubic)|center_crop(160), mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5)"
    assert card.changes == (f"by the name test_vit.r160_in1k: heads=2, gelu=erf, pool=token, norm_eps=1e-06, {pixels}",)
    images = pictures(2, 3, 160, 160)
    with torch.no_grad():
        assert gap(loaded(images), outcome(model, images)) <= LIMIT
    other = save(timm_model().state_dict(), tmp_path / "vit_base_patch16_224.pth.tar")
    with pytest.raises(UserError, match="does not state its number of heads"):
        vitral.load(other)
    _, card = vitral.load(other, heads=4)
    assert "the name vit_base_patch16_224 is not used: the file has other tensors" in card.changes
    folder = timm_saved(timm_model(), tmp_path / "vit_base_patch16_224")  # its config.json states everything
    assert vitral.load(folder)[1].changes == ()
