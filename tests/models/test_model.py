"""What ViT and ResNet share: intermediate features, a new head, gradient checkpointing, hooks; and their input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import ARCHITECTURES, gap, outcome, outside, pictures, randomised, timm_model, timm_saved
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitral.architecture import ModelConfig, ModuleConfig, ResNetConfig, ViTConfig, as_dict, from_dict
from vitral.checkpoints.weights import assemble, read
from vitral.cost import cost
from vitral.errors import UserError
from vitral.kernels.packed import PackedLinear, pack
from vitral.models.build import build
from vitral.models.model import normalize
from vitral.models.position import Position
from vitral.names import name_of

VIT, RESNET = ARCHITECTURES["tanh"], ARCHITECTURES["BiT"]
each_architecture = pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


def random_model(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    return randomised(build(config))


def images_for(config: ModelConfig, batch: int = 2) -> Tensor:
    return pictures(batch, config.channels, *config.image)


def outputs_by_hooks(model: Any, images: Tensor) -> list[Tensor]:
    """Outputs of all layers of a plain forward pass."""
    outputs: list[Tensor] = []
    layers = model.blocks if isinstance(model.config, ViTConfig) else model.stages
    handles = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in layers]
    model(images)
    for handle in handles:
        handle.remove()
    return outputs


@each_architecture
def test_intermediates_are_the_outputs_of_the_layers(config: ModelConfig) -> None:
    model, images = random_model(config), images_for(config)
    expected = outputs_by_hooks(model, images)
    found = model.intermediates(images, reshape=False)
    maps = model.intermediates(images)
    for layer, output in enumerate(expected):
        if isinstance(config, ViTConfig):
            assert torch.equal(found[layer], output)
            rows, columns = config.grid(config.image)
            for y in range(rows):
                for x in range(columns):
                    assert torch.equal(maps[layer][:, :, y, x], output[:, config.prefix + y * columns + x])
        else:
            assert torch.equal(maps[layer], output)
            assert maps[layer].shape[2:] == config.stage_grid(config.image, layer)
            assert torch.equal(found[layer], output.flatten(2).transpose(1, 2))
    assert len(found) == len(maps) == len(expected)


@each_architecture
def test_the_normed_last_layer_is_the_encoders_output(config: ModelConfig) -> None:
    model, images = random_model(config), images_for(config)
    [tokens] = model.intermediates(images, [-1], norm=True, reshape=False)
    assert torch.equal(tokens, model.encode(model.patchify(images)))


@each_architecture
def test_intermediates_keep_gradients_and_the_order_asked_for(config: ModelConfig) -> None:
    model, images = random_model(config), images_for(config).requires_grad_()
    last, first = model.intermediates(images, [-1, 0])
    every = model.intermediates(images)
    assert torch.equal(last, every[-1])
    assert torch.equal(first, every[0])
    last.square().sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
    assert model.intermediates(images, []) == []


def test_layers_after_the_last_chosen_one_are_not_computed() -> None:
    for config in (VIT, RESNET):
        model = random_model(config)
        calls: list[int] = []
        layers = model.blocks if isinstance(config, ViTConfig) else model.stages
        layers[1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.intermediates(images_for(config), [0])
        assert calls == []


@pytest.mark.parametrize("layer", [2, -3])
def test_an_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(UserError, match=f"there is no layer {layer}: the model has 2"):
        random_model(VIT).intermediates(images_for(VIT), [layer])


@pytest.mark.parametrize(
    "settings", [{}, {"reg_tokens": 3, "no_embed_class": True}, {"class_token": False, "global_pool": "avg"}], ids=str
)
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_timms(settings: dict[str, Any], norm: bool, tmp_path: Any) -> None:
    settings = {**settings, "fc_norm": False}
    theirs = timm_model(**settings)
    ours = assemble(read(timm_saved(theirs, tmp_path, **settings)).weights)
    images = pictures(2, 3, 32, 32)
    with torch.no_grad():
        expected = theirs.forward_intermediates(images, indices=[0, 1], norm=norm, intermediates_only=True)
        for found, other in zip(ours.intermediates(images, [0, 1], norm=norm), expected, strict=True):
            assert gap(found, other) <= 1e-5
        expected = theirs.get_intermediate_layers(images, n=[1], norm=norm, return_prefix_tokens=True)
        [(patches, prefix)] = expected if theirs.num_prefix_tokens else [(expected[0], torch.empty(2, 0, 32))]
        [found] = ours.intermediates(images, [-1], norm=norm, reshape=False)
        assert gap(found, torch.cat([prefix, patches], dim=1)) <= 1e-5


def test_a_resnets_intermediates_are_timms() -> None:
    resnetv2 = outside("timm.models.resnetv2")
    config = ResNetConfig(blocks=(1, 2, 1, 1), classes=5)
    ours = random_model(config)
    options = {"stem_type": "fixed", "conv_layer": partial(resnetv2.StdConv2d, eps=1e-10)}
    theirs = resnetv2.ResNetV2([1, 2, 1, 1], num_classes=5, **options).eval()
    state = theirs.state_dict()
    assert len(state) == len(ours.state_dict())
    names = {
        "root.weight": "stem.conv.weight",
        "head.output.weight": "head.fc.weight",
        "head.output.bias": "head.fc.bias",
    }
    for name, tensor in ours.state_dict().items():
        stage, _, rest = name.removeprefix("stages.").partition(".")
        other = f"stages.{stage}.blocks.{rest}" if name.startswith("stages.") else name
        other = names.get(name, other.replace("projection", "downsample.conv"))
        state[other] = tensor.reshape(state[other].shape)
    theirs.load_state_dict(state)
    ours, theirs, images = ours.double(), theirs.double(), pictures(2, 3, 45, 70).double()
    with torch.no_grad():
        expected = theirs.forward_intermediates(images, [1, 2, 3, 4], norm=False, intermediates_only=True)
        for found, other in zip(ours.intermediates(images), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["tanh layer", "hybrid", "BiT"])
def test_a_new_classifier_starts_at_zero(name: str) -> None:
    config = ARCHITECTURES[name]
    model, images = random_model(config).double(), images_for(config).double()
    features = model.features(images)
    model.reset_classifier(9)
    changes: dict[str, Any] = {"representation": 0} if isinstance(config, ViTConfig) else {}
    assert model.config == replace(config, classes=9, **changes)
    assert model.state_dict().keys() == build(model.config).state_dict().keys()
    assert not model.head.training
    assert model(images).shape == (2, 9)
    assert model(images).dtype == torch.float64
    assert not model(images).any()
    model(images).sum().backward()
    assert model.head.output.weight.grad is not None
    model.reset_classifier(0)
    assert model.config.classes == 0
    assert torch.equal(model(images), features)
    with pytest.raises(UserError, match=r"classes must be a whole number from 0 to .*, not -1"):
        model.reset_classifier(-1)


def gradients(model: Any, images: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(images).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["2d, every block", "axial", "hybrid", "BiT", "AxialResNet"])
def test_checkpointing_changes_no_bit_and_can_be_switched_off(name: str) -> None:
    config = ARCHITECTURES[name]
    if isinstance(config, ViTConfig):
        config = replace(config, dropout=0.2, stochastic_depth=0.3)
    model, images = random_model(config).train(), images_for(config)
    layers = list(model.blocks) if isinstance(config, ViTConfig) else [unit for stage in model.stages for unit in stage]
    calls: list[int] = []
    inner = layers[-1].column.mlp if config.axial and isinstance(config, ViTConfig) else layers[-1]
    inner = inner.norm2 if hasattr(inner, "norm2") else inner.output
    inner.register_forward_hook(lambda *_: calls.append(1))
    expected = gradients(model, images)
    assert len(calls) == 1
    model.set_grad_checkpointing()
    model.set_grad_checkpointing()  # twice is once
    for copied in (model, copy.deepcopy(model)):
        calls.clear()
        assert all(map(torch.equal, gradients(copied, images), expected))
        assert len(calls) == 2  # once more in the backward pass
    model.set_grad_checkpointing(False)
    calls.clear()
    assert all(map(torch.equal, gradients(model, images), expected))
    assert len(calls) == 1
    assert not any("forward" in vars(module) for module in model.modules())


@each_architecture
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_forward_hooks_of_all_submodules_fire(config: ModelConfig, packed: bool) -> None:
    model, images = random_model(config), images_for(config)
    with torch.no_grad():
        expected = model(images)
        if packed:
            pack(model)
        fired: set[str] = set()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: fired.add(name))
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    containers = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    assert fired == {name for name, _ in model.named_modules()} - containers


@each_architecture
def test_full_backward_hooks_of_all_submodules_fire(config: ModelConfig) -> None:
    model, images = random_model(config).train(), images_for(config).requires_grad_()
    expected = gradients(model, images)
    fired: set[str] = set()
    for name, module in model.named_modules():
        module.register_full_backward_hook(lambda *_, name=name: fired.add(name))
    found = gradients(model, images)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4 * other.abs().max().item() + 1e-6)
    containers = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # Position tables depend on the shape of their input alone: no gradient flows through the module to be reported.
    tables = {name for name, module in model.named_modules() if isinstance(module, Position)}
    assert fired == {name for name, _ in model.named_modules()} - containers - tables


def test_global_hooks_fire_for_the_patch_embedding() -> None:
    model, names = random_model(VIT), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    with handle:
        model(images_for(VIT))
    assert "Conv2d" in names


class LowRankConv(nn.Module):
    """An adapter around the patch embedding, which has no `weight`."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv.requires_grad_(False)
        self.down = nn.Conv2d(conv.in_channels, 2, conv.kernel_size, conv.stride)  # type: ignore[arg-type]
        self.up = nn.Conv2d(2, conv.out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.up(self.down(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_an_adapted_patch_embedding_is_called() -> None:
    model, images = random_model(VIT), images_for(VIT)
    plain = model.patchify(images)
    adapter = LowRankConv(model.embed)
    model.embed = adapter
    expected = plain + adapter.up(adapter.down(images)).permute(0, 2, 3, 1)
    torch.testing.assert_close(model.patchify(images), expected)
    model(images).square().sum().backward()
    assert adapter.down.weight.grad is not None
    assert adapter.down.weight.grad.abs().sum() > 0


def test_a_parametrized_or_patched_embedding_is_called() -> None:
    model, images = random_model(VIT), images_for(VIT)
    bias = model.embed.bias
    plain = model.patchify(images)
    parametrize.register_parametrization(model.embed, "weight", Doubled())
    torch.testing.assert_close(model.patchify(images), 2 * (plain - bias) + bias, rtol=1e-4, atol=1e-5)
    model = random_model(VIT)
    model.embed.forward = lambda x: F.conv2d(x, model.embed.weight, None, stride=8)
    torch.testing.assert_close(model.patchify(images), plain - bias, rtol=1e-4, atol=1e-5)


def test_layers_with_hooks_are_not_packed() -> None:
    model = random_model(VIT)
    calls: list[int] = []
    model.blocks[0].mlp.hidden.register_forward_hook(lambda *_: calls.append(1))
    pack(model)
    assert isinstance(model.blocks[1].mlp.hidden, PackedLinear)
    outcome(model, images_for(VIT))
    assert calls == [1]


def test_normalize_takes_pixels_and_passes_normalized_images_through() -> None:
    pixels = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    expected = (pixels.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(normalize(pixels, mean, std), expected.float(), rtol=0, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        images = torch.randn(2, 3, 4, 5, dtype=dtype)
        assert normalize(images, mean, std) is images
    with pytest.raises(UserError, match="cannot normalize int64 images: pass uint8"):
        normalize(pixels.long(), mean, std)
    with pytest.raises(UserError, match="images of 3 channels need as many values of mean and std, not 1 and 1"):
        normalize(pixels, (0.5,), (0.5,))


def test_a_users_own_module_is_described_but_not_built() -> None:
    config = ModuleConfig(name="MyNet", image=(32, 48), channels=3, classes=10)
    assert name_of(config) == "MyNet"
    assert from_dict(as_dict(config)) == config
    assert as_dict(config) == {"family": "module", "name": "MyNet", "image": (32, 48), "channels": 3, "classes": 10}
    with pytest.raises(UserError, match='cannot build "MyNet"'):
        build(config)
    with pytest.raises(UserError, match='cannot compute the cost of "MyNet"'):
        cost(config)


BAD_MODULES: Sequence[dict[str, Any]] = [{"image": (0, 8)}, {"channels": 0}, {"classes": 0}]


@pytest.mark.parametrize("changes", BAD_MODULES, ids=str)
def test_a_description_of_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        settings: dict[str, Any] = {"name": "MyNet", "image": (8, 8), "channels": 3, "classes": 2, **changes}
        ModuleConfig(**settings)
