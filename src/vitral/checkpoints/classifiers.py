"""Find the classifier that a training script put beside a backbone, or in place of a model's own head.

One linear layer with the name of a classifier is used, which is recorded. Where several layers could be meant, or the
name says nothing, the user chooses: UserError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vitral.architecture import Architecture, ModelConfig, ModuleConfig
from vitral.checkpoints.files import WeightFile
from vitral.checkpoints.formats.table import Entry, Shape, linear
from vitral.checkpoints.wrappers import FoundModel, branch_of
from vitral.errors import UserError

INNER_HEAD = re.compile(r"(heads?|fc|classifier)\.")  # of a model's own, where it is not one linear layer
# Words in the names of modules, such as "cls_head" and "fc2". Those of `_OTHER` belong to pre-training, to a text tower
# or to dense tasks, none of which a classifier runs.
_HEAD = re.compile(
    r"(?:heads?|fc|\w*classifier|classification|clf|linear|lin|out|outputs?|logits|pred|predictions?|dense)\d*"
)
_OTHER = re.compile(
    r"(?:proj\w*|prototypes?|dino|ibot|moco|simclr|byol|mlm|lm|mim|mask|text|decode\w*|embed\w*|aux\w*|seg\w*|bbox|rpn"
    r"|roi|box|depth|loss|criterion|metrics?)\d*"
)
_INSIDE_PROJECTION = "mlp"  # such as "head.mlp.0" of DINO
_LAST = ".last_layer."  # of DINO's projection, whose other layers may have any name
_DISTILLED = {"dist", "distillation", "distilled"}  # in the name of a head that reads another token


@dataclass(frozen=True)
class Classifier:
    """A linear layer that reads the features of a backbone, or of a model whose format does not have this head."""

    name: str
    names: Mapping[str, str]  # key in the file -> key of an entry
    classes: int
    origin: Literal["passed", "stated", "assumed"] = "assumed"

    @property
    def bias(self) -> bool:
        return len(self.names) > 1

    @property
    def note(self) -> str:
        """A sentence for `Card.changes`."""
        layer = f'the classifier "{self.name}." ({self.classes} classes{"" if self.bias else ", without a bias"})'
        if self.origin != "assumed":
            return f"as {self.origin}: {layer}"
        return f"assumed: {layer} reads the backbone's features directly; pass classes=0 to omit it"

    def entries(self, features: int) -> list[Entry]:
        layer = linear(f"outside {self.name}", "head.output", features, self.classes)
        return layer if self.bias else layer[:1]


@dataclass(frozen=True)
class _Layer:
    """A module outside of a model that holds tensors itself."""

    name: str
    keys: dict[str, str]  # name of a tensor, such as "weight" -> key in the file
    shape: Shape  # of its weight
    is_head: bool  # by its name

    @property
    def inputs(self) -> int:
        return (*self.shape, 0)[min(len(self.shape) - 1, 1)]

    def is_linear(self, features: int) -> bool:
        return len(self.shape) == 2 and self.inputs == features and self.keys.keys() <= {"weight", "bias"}

    @property
    def is_distilled(self) -> bool:
        return not _DISTILLED.isdisjoint(re.split("[._]", self.name))


def find_classifier(file: WeightFile, model: FoundModel, architecture: Architecture) -> Classifier | None:
    """The classifier that a file has beside its model, or in it under a name that the format does not use.

    None if there is none, or it will be replaced. UserError if it is not certain which layer it is or what it reads.
    """
    if isinstance(architecture, ModuleConfig) or model.header.hints.replaces_head:
        return None
    projection = (model.header.config or {}).get("projection")
    layers = [*_outside(file, model, projection), *_inside(file, model, architecture)]
    if stated := [layer for layer in layers if projection and layer.name.endswith(projection)]:
        return _classifier(stated[0], "stated")
    if (name := model.header.hints.classifier) is not None:
        return _chosen(layers, name.rstrip("."), architecture)
    heads = [layer for layer in layers if layer.is_head]
    if not heads:
        _refuse_unsure(layers, model, architecture)
        return None
    fitting = [layer for layer in heads if layer.is_linear(architecture.features) and not layer.is_distilled]
    others = [layer for layer in layers if fitting and layer is not fitting[0] and _is_near(layer, fitting[0])]
    if fitting and not others and not _own_head(architecture):
        return _classifier(fitting[0])
    if any(key in model.names for layer in heads for key in layer.keys.values()):
        return None  # the reader refuses them by name
    raise UserError(_refusal(heads, fitting, others, architecture))


def _outside(file: WeightFile, model: FoundModel, projection: str | None) -> list[_Layer]:
    """The modules beside a backbone, without those of other models, text towers and the like; with a `projection`."""
    modules: dict[str, dict[str, str]] = {}
    projections = tuple({name.partition(_LAST)[0] + "." for name in model.outside.values() if _LAST in name})
    for key, name in model.outside.items():
        module, _, leaf = name.rpartition(".")
        other = _is_other(module, model.prefix) and not (projection and module.endswith(projection))
        if module and not name.startswith(model.others + projections) and not other:
            modules.setdefault(module, {})[leaf] = key
    return [_layer(file, module, keys, _names_head(module, model.prefix)) for module, keys in modules.items()]


def _inside(file: WeightFile, model: FoundModel, c: ModelConfig) -> list[_Layer]:
    """The modules that stand in the place of the format's own head, such as "head.1" instead of "head"."""
    if c.classes or not any(map(INNER_HEAD.match, model.names.values())):
        return []
    table, classifier = model.format, replace(c, classes=1)
    entries = [] if table.unsupported_reason(classifier) else table.entries(classifier)
    own = [entry.theirs for entry in entries if entry.ours == "head.output.weight"]
    places = tuple(f"{name.partition('.')[0]}." for name in own)
    modules: dict[str, dict[str, str]] = {}
    for key, name in model.names.items():
        if name.startswith(places):
            module, _, leaf = name.rpartition(".")
            modules.setdefault(module, {})[leaf] = key
    return [_layer(file, model.prefix + module, keys, True) for module, keys in modules.items()]


def _layer(file: WeightFile, name: str, keys: dict[str, str], is_head: bool) -> _Layer:
    return _Layer(name, keys, file.headers[keys["weight"]].shape if "weight" in keys else (), is_head)


def _names_head(module: str, prefix: str) -> bool:
    """Whether a module beside a backbone has a classifier's name, or follows the backbone in an nn.Sequential."""
    branch = branch_of(f"{module}.", prefix)[:-1]
    parent, _, name = branch.rpartition(".")
    if name.isdigit():
        return re.match(rf"{re.escape(parent)}\.?\d+\.", prefix) is not None
    return any(map(_HEAD.fullmatch, _words(name)))


def _is_other(module: str, prefix: str) -> bool:
    """Whether a module is a projection of pre-training, part of a text tower or the like."""
    branch = branch_of(f"{module}.", prefix)[:-1]
    first, inside = branch.rpartition(".")[2], module[len(branch) + 1 :].split(".")
    words = [word for name in (first, *inside) for word in _words(name)]
    return _INSIDE_PROJECTION in inside or any(map(_OTHER.fullmatch, words))


def _words(name: str) -> list[str]:
    return name.lower().split("_")


def _is_near(layer: _Layer, head: _Layer) -> bool:
    """Whether a layer could come before or after a classifier, such as a norm: by its name, or by place and size."""
    widths = (head.inputs, head.shape[0]) if len(layer.shape) > 1 else (head.inputs,)
    return layer.is_head or (layer.name.count(".") <= head.name.count(".") + 1 and layer.inputs in widths)


def _own_head(c: ModelConfig) -> str:
    return "a classifier" if c.classes else "a pooler" if getattr(c, "representation", 0) else ""


def _refuse_unsure(layers: list[_Layer], model: FoundModel, c: ModelConfig) -> None:
    """Refuse a file in which one layer beside the backbone could be its classifier, but is not named like one."""
    unsure = [layer for layer in layers if layer.is_linear(c.features) or (c.classes and layer.is_linear(c.classes))]
    if len(unsure) != 1:
        return
    (layer,) = unsure
    branch = branch_of(f"{layer.name}.", model.prefix)
    if sum(name.startswith(branch) for name in model.outside.values()) > len(layer.keys):
        return  # a part of something larger
    raise UserError(
        f'the file has a linear layer of {layer.inputs} inputs beside its backbone ("{layer.name}."), which may be its '
        f"classifier: {_options(unsure, layers, c)}."
    )


def _refusal(heads: list[_Layer], fitting: list[_Layer], others: list[_Layer], c: ModelConfig) -> str:
    head = f'the file has a head outside of its backbone ("{(fitting or heads)[0].name}.") '
    if own := _own_head(c):
        return f"{head}and {own} in it: {_options([], [], c)}."
    if not others:
        return f"{head}that is not one linear layer on its {c.features} features: {_options([], [], c)}."
    return f'{head}and another layer that may belong to it ("{others[0].name}."): {_options(fitting, others, c)}.'


def _options(fitting: list[_Layer], others: list[_Layer], c: ModelConfig) -> str:
    """What a user may pass; of an MLP, no layer is a classifier by itself."""
    read = {layer.inputs for layer in others if len(layer.shape) == 2 and layer not in fitting}
    use = [f'classifier="{layer.name}"' for layer in fitting if layer.shape[0] not in read and not _own_head(c)]
    used = f"pass {' or '.join(use)} to use it alone, or " if use else "pass "
    return f"{used}classes=0 to load the backbone alone"


def _chosen(layers: list[_Layer], name: str, c: ModelConfig) -> Classifier:
    """The layer that the user named; UserError if it cannot be the classifier."""
    fitting = [layer for layer in layers if layer.is_linear(c.features)]
    matching = [layer for layer in fitting if layer.name == name or layer.name.endswith(f".{name}")]
    if own := _own_head(c):
        raise UserError(f'the model has {own} in it, so "{name}" cannot be its classifier: omit classifier=.')
    if len(matching) != 1:
        names = ", ".join(f'"{layer.name}"' for layer in fitting) or "none"
        raise UserError(
            f'classifier="{name}" does not name one of the linear layers on its {c.features} features, which are: '
            f"{names}."
        )
    return _classifier(matching[0], "passed")


def _classifier(layer: _Layer, origin: Literal["passed", "stated", "assumed"] = "assumed") -> Classifier:
    names = {key: f"outside {layer.name}.{leaf}" for leaf, key in layer.keys.items()}
    return Classifier(layer.name, names, layer.shape[0], origin)
