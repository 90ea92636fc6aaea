"""Classifiers that training scripts put beside a backbone, or in place of a model's own head.

The judge is the forward pass of the module that the file is of.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import (
    HF,
    IMAGES,
    gap,
    hf_model,
    loads_as,
    outside,
    prefixed,
    quiet,
    randomised,
    save,
    timm_model,
    tv_model,
)
from torch import Tensor, nn

import vitral
from vitral.cli import main
from vitral.errors import UserError


class Beside(nn.Module):
    """A backbone and further modules, run in this order, as many training scripts write it."""

    def __init__(self, backbone: nn.Module, **layers: nn.Module) -> None:
        super().__init__()
        self.backbone, self.order = backbone, ["backbone", *layers]
        for key, layer in layers.items():
            self.add_module(key, randomised(layer, seed=3))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        for name in self.order:
            images = self.get_submodule(name)(images)
            images = getattr(images, "last_hidden_state", images)
            images = images[:, 0] if images.ndim == 3 else images
        return images


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["head", "fc", "classifier", "linear", "clf", "output"])
@pytest.mark.parametrize("outer", ["", "module.", "state_dict.model."])
def test_a_classifier_beside_the_backbone_is_used(tmp_path, name, bias, outer):
    model = Beside(timm_model(num_classes=0), **{name: nn.Linear(32, 7, bias=bias)})
    path = save(prefixed(outer, model.state_dict()), tmp_path / "a.safetensors")
    changes = loads_as(model, path)
    assert any(f'classifier "{outer}{name}." (7 classes' in change for change in changes), changes
    assert vitral.info(path, heads=4).card.architecture.classes == 7
    changes = loads_as(model.backbone, path, classes=0)
    assert any(change.startswith("ignored: ") and f'"{outer}{name}.' in change for change in changes)


@pytest.mark.parametrize(
    "head",
    [
        {"head.0.weight": torch.ones(9, 32), "head.2.weight": torch.ones(5, 9)},
        {"fc.weight": torch.ones(5, 64), "fc.bias": torch.ones(5)},
        {"head.weight": torch.ones(5, 32), "fc.weight": torch.ones(5, 32)},
        {"head.weight": torch.ones(32), "head.bias": torch.ones(32)},
        {"out.0.weight": torch.ones(9, 32), "out.2.weight": torch.ones(5, 9)},
    ],
)
def test_a_head_of_another_kind_is_refused_and_may_be_left_out(tmp_path, head):
    model = timm_model(num_classes=0)
    path = save({**prefixed("backbone.", model.state_dict()), **head}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a head outside of its backbone .* classes=0 to load the backbone alone"):
        vitral.load(path, heads=4)
    loads_as(model, path, classes=0)


@pytest.mark.parametrize("outer", ["", "model."])
def test_a_linear_layer_after_the_backbone_in_a_sequential_is_its_classifier(tmp_path, outer):
    backbone = timm_model(num_classes=0)
    model = nn.Sequential(backbone, randomised(nn.Linear(32, 7))).eval()
    path = save(prefixed(outer, model.state_dict()), tmp_path / "a.safetensors")
    assert any(f'classifier "{outer}1." (7 classes' in change for change in loads_as(model, path))
    model.insert(1, randomised(nn.LayerNorm(32)))
    save(prefixed(outer, model.state_dict()), path)
    with pytest.raises(UserError, match=r"a head outside of its backbone .* classes=0 to load the backbone alone"):
        vitral.load(path, heads=4)
    assert f'ignored: 2 tensors under "{outer}2."' in loads_as(backbone, path, classes=0)


@pytest.mark.parametrize("name", ["head", "fc"])
def test_a_model_with_an_mlp_as_its_head_is_read_without_it(tmp_path, name):
    model = timm_model(num_classes=0)  # as MoCo v3 and MSN have it
    head = {
        f"{name}.0.weight": torch.ones(9, 32),
        f"{name}.2.weight": torch.ones(5, 9),
        f"{name}.2.bias": torch.ones(5),
    }
    path = save({**model.state_dict(), **head}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"its head is not one of this format \(.*: pass classes=0"):
        vitral.load(path, heads=4)
    assert f'ignored: 3 tensors under "{name}."' in loads_as(model, path, classes=0)
    loaded, _ = vitral.load(path, heads=4, classes=6)
    assert loaded(IMAGES).shape == (2, 6)


def test_a_new_head_of_torchvision_is_read(tmp_path):
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    model = outside("torchvision.models.vision_transformer").VisionTransformer(**sizes)
    model.heads = nn.Linear(32, 7)
    assert loads_as(randomised(model), save(model.state_dict(), tmp_path / "a.pth")) == ()


def test_a_second_head_is_refused(tmp_path):
    state = {**prefixed("backbone.", timm_model().state_dict()), "fc.weight": torch.ones(5, 32)}
    with pytest.raises(UserError, match="a head outside of its backbone"):
        vitral.load(save(state, tmp_path / "a.safetensors"), heads=4)


def dropped(outputs: int = 7, inputs: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(inputs, outputs))


def bare(family: str) -> nn.Module:
    """A model that returns features."""
    if family == "timm":
        return timm_model(num_classes=0)
    if family == "hf":
        library = outside("transformers")
        with quiet():
            return randomised(library.ViTModel(library.ViTConfig(**HF), add_pooling_layer=False))
    if family == "hf-dinov2":
        return hf_model("Dinov2Model", mlp_ratio=2)
    model = tv_model()
    model.heads = nn.Identity()
    return model


class Named(nn.Module):
    """A head whose layer is its attribute `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 7)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc(features)


USED = {
    "classifier.1": {"classifier": dropped},
    "cls_head": {"cls_head": lambda: nn.Linear(32, 7)},
    "mlp_head.1": {"mlp_head": lambda: nn.Sequential(nn.Identity(), nn.Linear(32, 7))},
    "mlp_head": {"mlp_head": lambda: nn.Linear(32, 7)},
    "head.fc": {"head": Named},
    "heads.0": {"heads": lambda: nn.Sequential(nn.Linear(32, 7))},
    "classification_head": {"classification_head": lambda: nn.Linear(32, 7)},
    "linear_layer": {"linear_layer": lambda: nn.Linear(32, 7)},
    "to_logits": {"to_logits": lambda: nn.Linear(32, 7)},
    "fc1": {"fc1": lambda: nn.Linear(32, 7)},
}


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("family", ["timm", "hf", "hf-dinov2", "torchvision"])
def test_one_linear_layer_with_the_name_of_a_classifier_is_used(tmp_path, family, name):
    model = Beside(bare(family), **{key: make() for key, make in USED[name].items()})
    path = save(model.state_dict(), tmp_path / "a.pt")
    assert f'assumed: the classifier "{name}." (7 classes) reads' in " ".join(loads_as(model, path))


def test_a_module_of_lightning_with_a_classifier_is_read(tmp_path):
    model = Beside(timm_model(num_classes=0), classifier=dropped())
    state = {**model.state_dict(), "train_acc.total": torch.zeros(()), "criterion.weight": torch.ones(7)}
    changes = loads_as(model, save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt"))
    assert any('"state_dict.classifier.1." (7 classes) reads' in change for change in changes)
    assert 'ignored: tensor "state_dict.criterion.weight"' in changes


@pytest.mark.parametrize("head", [dropped, Named, lambda: nn.Sequential(nn.Linear(32, 7))])
@pytest.mark.parametrize("family", ["timm", "hf", "torchvision"])
def test_a_layer_in_the_place_of_a_head_is_used(tmp_path, family, head):
    """As people replace the head: model.head = nn.Sequential(nn.Dropout(), nn.Linear(...))."""
    attribute = {"timm": "head", "hf": "classifier", "torchvision": "heads"}[family]
    make = {"timm": timm_model, "torchvision": tv_model, "hf": lambda: hf_model("ViTForImageClassification")}[family]
    model: Any = make()
    setattr(model, attribute, randomised(head(), seed=3))
    path = save(model.eval().state_dict(), tmp_path / "a.pt")
    loaded, card = vitral.load(path, heads=4)
    with torch.no_grad():
        expected = model(IMAGES)
        assert gap(loaded(IMAGES), getattr(expected, "logits", expected)) <= 1e-5
    assert any(f'the classifier "{attribute}.' in change for change in card.changes)
    assert vitral.load(path, heads=4, classes=0)[1].architecture.classes == 0


def test_the_head_of_a_torchvision_container_may_be_replaced(tmp_path):
    model = tv_model()
    model.heads.head = randomised(dropped(), seed=3)
    changes = loads_as(model.eval(), save(model.state_dict(), tmp_path / "a.pt"))
    assert any('the classifier "heads.head.1." (7 classes)' in change for change in changes)


NOT_CERTAIN = {
    "a norm before it": ({"bn": lambda: nn.BatchNorm1d(32), "fc": lambda: nn.Linear(32, 7)}, "fc"),
    "a layer norm": ({"norm": lambda: nn.LayerNorm(32), "head": lambda: nn.Linear(32, 7)}, "head"),
    "a norm in it": ({"mlp_head": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 7))}, "mlp_head.1"),
    "an unknown name": ({"my_layer": lambda: nn.Linear(32, 7)}, "my_layer"),
    "a final layer": ({"final_layer": lambda: nn.Linear(32, 7)}, "final_layer"),
    "another unknown name": ({"predictor": lambda: nn.Linear(32, 7)}, "predictor"),
    "an MLP": ({"fc1": lambda: nn.Linear(32, 9), "fc2": lambda: nn.Linear(9, 7)}, None),
    "an MLP of unknown names": ({"layer1": lambda: nn.Linear(32, 9), "layer2": lambda: nn.Linear(9, 7)}, None),
}


@pytest.mark.parametrize("case", NOT_CERTAIN)
def test_a_layer_that_may_be_the_classifier_is_chosen_by_the_user(tmp_path, case):
    layers, name = NOT_CERTAIN[case]
    backbone = timm_model(num_classes=0)
    model = Beside(backbone, **{key: make() for key, make in layers.items()})
    path = save(model.state_dict(), tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"classes=0 to load the backbone alone\.$") as caught:
        vitral.load(path, heads=4)
    assert (f'pass classifier="{name}" to use it' in str(caught.value)) is (name is not None)
    loads_as(backbone, path, classes=0)
    if name:
        alone = nn.Sequential(backbone, model.get_submodule(name))
        assert f'as passed: the classifier "{name}." (7 classes)' in loads_as(alone, path, classifier=name)


@pytest.mark.parametrize("name", ["fc", "my_layer"])
def test_a_layer_on_the_logits_of_a_model_is_refused(tmp_path, name):
    model = Beside(timm_model(), **{name: nn.Linear(5, 3)})
    path = save(model.state_dict(), tmp_path / "a.pt")
    with pytest.raises(UserError, match=rf'"{name}\.".*: pass classes=0 to load'):
        vitral.load(path, heads=4)
    with pytest.raises(UserError, match=f'the model has a classifier in it, so "{name}" cannot be its classifier'):
        vitral.load(path, heads=4, classifier=name)


@pytest.mark.parametrize("name", ["head_dist", "distillation_classifier"])
def test_a_head_of_a_distillation_token_is_refused(tmp_path, name):
    path = save(Beside(timm_model(num_classes=0), **{name: nn.Linear(32, 7)}).state_dict(), tmp_path / "a.pt")
    with pytest.raises(UserError, match=rf'\("{name}\."\) that is not .*: pass classes=0 to load'):
        vitral.load(path, heads=4)


def test_a_head_beside_a_pooler_may_read_either_and_is_refused(tmp_path):
    library = outside("transformers")
    with quiet():
        model = Beside(randomised(library.ViTModel(library.ViTConfig(**HF))), fc=nn.Linear(32, 7))
    with pytest.raises(UserError, match=r'\("fc\."\) and a pooler in it: pass classes=0'):
        vitral.load(save(model.state_dict(), tmp_path / "a.pt"), heads=4)


def test_a_classifier_that_does_not_exist_is_refused(tmp_path):
    path = save(Beside(timm_model(num_classes=0), fc=nn.Linear(32, 7)).state_dict(), tmp_path / "a.pt")
    with pytest.raises(UserError, match=r'classifier="fcc" does not name one of .* 32 features, which are: "fc"\.'):
        vitral.load(path, heads=4, classifier="fcc")


@pytest.mark.parametrize("name", ["projector", "dino_head", "decode_head", "text_fc", "aux_head", "proj"])
def test_projections_and_heads_of_other_tasks_are_listed_as_ignored(tmp_path, name):
    backbone = timm_model(num_classes=0)
    model = Beside(backbone, **{name: nn.Linear(32, 7)})
    changes = loads_as(backbone, save(model.state_dict(), tmp_path / "a.pt"))
    assert f'ignored: 2 tensors under "{name}."' in changes


def test_a_projection_of_dino_beside_its_backbone_is_listed_as_ignored(tmp_path):
    """Its layers have any names, its last one is `last_layer`."""
    backbone = timm_model(num_classes=0)
    last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 20, bias=False))
    head = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 8)), "last_layer": last})
    state = {**prefixed("student_backbone.", backbone.state_dict()), **prefixed("student_head.", head.state_dict())}
    assert 'ignored: 6 tensors under "student_head."' in loads_as(backbone, save(state, tmp_path / "a.pt"))


def test_the_last_norm_of_a_text_tower_is_not_a_head(tmp_path):
    backbone = timm_model(num_classes=0)
    state = {**prefixed("visual.trunk.", backbone.state_dict()), "ln_final.weight": torch.ones(24)}
    assert 'ignored: tensor "ln_final.weight"' in loads_as(backbone, save(state, tmp_path / "a.pt"))


def test_the_command_takes_a_classifier(tmp_path, capsys, monkeypatch):
    path = save(Beside(timm_model(num_classes=0), my_layer=nn.Linear(32, 7)).state_dict(), tmp_path / "a.pt")
    monkeypatch.setattr("sys.argv", ["vitral", "info", f"{path}", "--heads", "4", "--classifier", "my_layer"])
    main()
    assert 'the classifier "my_layer." (7 classes)' in " ".join(capsys.readouterr().out.split())
    target = tmp_path / "b.safetensors"
    vitral.convert(path, target, format="vitral", heads=4, classifier="my_layer")
    assert vitral.info(target).card.architecture.classes == 7
