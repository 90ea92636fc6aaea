"""Describe a checkpoint from its header: which model it holds, its architecture, and all that is assumed or ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral.architecture import Architecture, ModuleConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.classifiers import INNER_HEAD, find_classifier
from vitral.checkpoints.files import WeightFile, open_weights
from vitral.checkpoints.formats import FORMATS, format_named
from vitral.checkpoints.formats.families import family_of, foreign_family, stated_family
from vitral.checkpoints.formats.native import CARD, NATIVE, card_of
from vitral.checkpoints.formats.open_clip import from_open_clip
from vitral.checkpoints.formats.table import CONFIG_COUNTS, HINTED, CheckpointHeader, Entry, Format, Hints
from vitral.checkpoints.formats.timm_arguments import factory_named, named_architecture, stem_of
from vitral.checkpoints.formats.timm_reading import named_factory
from vitral.checkpoints.processors import named_preprocess
from vitral.checkpoints.wrappers import FoundModel, find_model, ignored_keys, ignored_sentences
from vitral.errors import UserError, shorten

_PLAIN_FILES = ("model", "pytorch_model")  # their folder has the model's name


@dataclass(frozen=True)
class Description:
    """A checkpoint without its tensors: the file, its format and its card."""

    file: WeightFile
    format: Format[Any]
    header: CheckpointHeader
    card: Card
    names: Mapping[str, str]  # key in the file -> key of an entry, of the tensors to read
    entries: list[Entry]
    ignored: tuple[str, ...]  # keys in the file of all other tensors; `card.changes` lists them


def describe(path: Path, format: str | None = None, hints: Hints | None = None) -> Description:
    """Recognise a checkpoint, a file or a folder, and derive its architecture without reading its tensors."""
    file = open_weights(path)
    try:
        return _describe(file, path, format, hints)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {shorten(error)}"  # values in config.json may be of any type
        raise UserError(
            f"{file.path} cannot be described ({reason}): a value in its config.json or metadata is not what it should "
            "be; download it again."
        ) from error


def _describe(file: WeightFile, path: Path, format: str | None, hints: Hints | None) -> Description:
    if "model_cfg" in (file.config or {}):
        file = replace(file, config=from_open_clip(file.config or {}))
    chosen = format or (hints and hints.part) or CARD in file.metadata
    if foreign := None if chosen else foreign_family(_shapes(file), file.config):
        raise UserError(f"{file.path} is {foreign}.")
    try:
        model = find_model(file, [format_named(format)] if format else FORMATS.values(), hints or Hints())
    except UserError as error:
        raise error if str(file.path) in str(error) else UserError(f"{file.path}: {error}") from error
    if model is None:
        raise UserError(_unknown_file(file, format))
    try:
        return _described(file, path, model)
    except UserError as error:
        raise UserError(f"{file.path}, read as {model.format.name}: {error}") from error


def _described(file: WeightFile, path: Path, model: FoundModel) -> Description:
    table = model.format
    card = card_of(model.header) if table is NATIVE else None
    if card:
        architecture, assumed = card.architecture, []
        _check_depth(architecture, len(file.headers))
    else:
        model, architecture, assumed = _architecture(file, path, model)
    entries = table.table_of(model.header, architecture)
    names, outside = dict(model.names), dict(model.outside)
    ignored = _ignored(model, {entry.theirs for entry in entries})
    unmapped = [key for key, name in model.names.items() if name in set(ignored)]
    notes = [*model.notes, *ignored_sentences([key.removeprefix(model.prefix) for key in unmapped])]
    classifier = None if card else find_classifier(file, model, architecture)
    if classifier and not isinstance(architecture, ModuleConfig):
        entries += classifier.entries(architecture.features)
        names |= classifier.names
        outside = {key: name for key, name in outside.items() if key not in classifier.names}
        bias: dict[str, Any] = {"head_bias": classifier.bias} if isinstance(architecture, ViTConfig) else {}
        architecture = replace(architecture, classes=classifier.classes, **bias)
        notes.append(classifier.note)
    notes += ignored_sentences(list(outside.values()), model.prefix)
    kept = {key: name for key, name in names.items() if key not in set(unmapped)}
    if card is None:
        classes = table.class_names(model.header)
        preprocess = table.preprocess(model.header, architecture)
        if preprocess is None:
            preprocess, name = _named_preprocess(file, path, architecture)
            assumed = _with_preprocess(assumed, name, preprocess) if preprocess else assumed
        card = Card(
            architecture=architecture,
            class_names=classes if len(classes) == architecture.classes else (),
            preprocess=preprocess,
            source=path.name,
            format=table.name,
            changes=(*notes, *assumed),
        )
    return Description(file, table, model.header, card, kept, entries, (*unmapped, *outside))


def _ignored(model: FoundModel, used: set[str]) -> list[str]:
    """The keys of a model, as in the table, that are not read; a head among them, if it is to be replaced."""
    replaced = model.header.hints.replaces_head
    heads = [name for name in model.names.values() if replaced and name not in used and INNER_HEAD.match(name)]
    return [*dict.fromkeys([*ignored_keys(model, used), *heads])]


def _check_depth(architecture: Architecture, tensors: int) -> None:
    """Refuse a card that states more blocks than the file has tensors, before they are built."""
    if isinstance(architecture, ViTConfig):
        blocks = architecture.depth + sum(architecture.stem.blocks if architecture.stem else ())
    else:
        blocks = sum(getattr(architecture, "blocks", ()))
    if blocks > tensors:
        raise UserError(f"the card states {blocks:,} blocks and the file has {tensors:,} tensors: download it again.")


def _architecture(file: WeightFile, path: Path, model: FoundModel) -> tuple[FoundModel, Architecture, list[str]]:
    """The architecture by the header, the hints and the name of the file, and what was assumed.

    The model comes back with a config.json that names timm's architecture where the name of the file does.
    """
    if named := _named_by_timm(file, path, model):
        return named
    table, header = model.format, model.header
    by_tables = table.config is None or table.name == "timm" or _is_stated(header)
    name, known = ("", {}) if by_tables else _named(file, path)
    if "heads" in known and header.hints.heads is None:
        header = replace(header, hints=replace(header.hints, heads=known["heads"]))
    architecture = table.architecture(header)
    _check_counts(header, architecture)
    if _other_sizes(known, architecture):
        known, header = {}, model.header
        header.assume(f"the name {name} is not used: the file has other sizes")
        architecture = table.architecture(header)
    if not isinstance(architecture, ViTConfig):
        if any(getattr(header.hints, field) for field in HINTED):
            raise UserError("a ResNet has neither GELU, LayerNorm nor a choice of pooling: omit gelu= and the like.")
        return model, architecture, [*table.assumptions(header, architecture), *header.assumed]
    if architecture.norm_place == "features" or architecture.pool == "map":
        known = {field: value for field, value in known.items() if field != "pool"}  # the tensors show another one
    passed = {field: value for field in HINTED if (value := getattr(header.hints, field))}
    chosen = {*passed, *(["heads"] if model.header.hints.heads else [])}
    by_name = {f: known[f] for f in ("heads", "gelu", "pool", "norm_eps") if f in known and f not in chosen}
    before, architecture = architecture, replace(architecture, **{**by_name, **passed})
    # timm's reader knows what was passed already.
    changed = {f: v for f, v in passed.items() if getattr(before, f) != v or (table.name == "timm" and f not in known)}
    sentences = [*table.assumptions(header, architecture), *header.assumed]
    sentences += [f"by the name {name}: {_fields(by_name)}"] if by_name else []
    sentences += [f"as passed: {_fields(changed)}"] if changed else []
    return model, architecture, sentences + _unstated(table, header, architecture, {*by_name, *passed})


def _named_by_timm(
    file: WeightFile, path: Path, model: FoundModel
) -> tuple[FoundModel, Architecture, list[str]] | None:
    """As `_architecture`, for a timm file without config.json whose name is that of an architecture of timm."""
    if model.format.name != "timm" or _is_stated(model.header):
        return None
    name, known = _named(file, path)
    factory = factory_named(name) if known else None
    if factory is None:
        return None
    config = {**(model.header.config or {}), "architecture": factory.name}
    stated = replace(model, header=replace(model.header, config=config))
    try:
        model, architecture, sentences = _architecture(file, path, stated)
    except UserError:
        model.header.assume(f"the name {name} is not used: the file has other tensors")
        return None
    hidden = {field: getattr(architecture, field) for field in ("heads", "gelu", "pool", "norm_eps")}
    return model, architecture, [f"by the name {name}: {_fields(hidden)}", *sentences]


def _unstated(table: Format[Any], header: CheckpointHeader, c: ViTConfig, stated: set[str]) -> list[str]:
    """What a file without its config.json does not state, in formats that have one."""
    own = table.name in ("timm", "timm-deit")  # timm's reader records its own
    if table.config is None or own or _is_stated(header):
        return []
    hidden = ["gelu", "norm_eps", *(["pool"] if c.class_token and c.pool != "map" else [])]
    assumed = {field: getattr(c, field) for field in hidden if field not in stated}
    options = " or ".join(f"{field}=" for field in HINTED if field in assumed)
    usual = f"assumed: {_fields(assumed)}, as is usual for {table.name}"
    return [usual + (f"; pass {options} if not" if options else "")] if assumed else []


def _is_stated(header: CheckpointHeader) -> bool:
    """Whether config.json is one of transformers or timm, so that it states what the tensors do not show."""
    config = header.config or {}
    return "model_type" in config or "model_args" in config or named_factory(header) is not None


def _check_counts(header: CheckpointHeader, architecture: Architecture) -> None:
    config = header.config or {}
    stated = config if "model_type" in config else config.get("model_args") or {}
    patch = {} if getattr(architecture, "stem", None) else {"patch_size": "patch"}  # a hybrid's is that of its features
    for key, field in {**CONFIG_COUNTS, **patch}.items():
        count, found = stated.get(key), getattr(architecture, field, None)
        if isinstance(count, int) and found is not None and count != found:
            raise UserError(f"config.json states {key}={count} and the tensors are of {found}: the file is incomplete.")


def _named(file: WeightFile, path: Path) -> tuple[str, dict[str, Any]]:
    """The name of a released model and what it implies."""
    for name in _names(file, path):
        if (known := named_architecture(name)) is not None:
            return name, known
    return "", {}


def _other_sizes(known: Mapping[str, Any], c: Architecture) -> bool:
    """Whether an architecture is not the one that a name implies."""
    sizes = {field: value for field, value in known.items() if field in ("depth", "width", "mlp", "patch")}
    return any(getattr(c, field, value) != value for field, value in sizes.items())


def _named_preprocess(file: WeightFile, path: Path, c: Architecture) -> tuple[Preprocess | None, str]:
    """The preprocessing of the released model that the file is named after, and this name.

    A config.json of timm's states the preprocessing; one that does not is of a model whose preprocessing is unknown.
    """
    for name in _names(file, path) if "pretrained_cfg" not in (file.config or {}) else ():
        named = named_preprocess(name, c.image)
        if named is not None and not _other_sizes(named_architecture(name) or {}, c):
            return named.adapted(c.image, c.image, c.channels), name
    return None, ""


def _with_preprocess(sentences: list[str], name: str, preprocess: Preprocess) -> list[str]:
    """The sentences with the preprocessing added to the one about this name, or in one of its own."""
    start = f"by the name {name}: "
    words = f"{preprocess.pipeline}, mean {preprocess.mean}, std {preprocess.std}"
    if not any(sentence.startswith(start) for sentence in sentences):
        return [*sentences, start + words]
    return [f"{sentence}, {words}" if sentence.startswith(start) else sentence for sentence in sentences]


def _names(file: WeightFile, path: Path) -> list[str]:
    """The names that a file may have as a released model: in config.json, its own, and that of its folder."""
    names = [str((file.config or {}).get("architecture", "")), stem_of(file.path.name), stem_of(path.name)]
    if stem_of(file.path.name) in _PLAIN_FILES:
        names.append(file.path.absolute().parent.name)
    return [name for name in names if name]


def _fields(values: Mapping[str, Any]) -> str:
    texts = {field: f"{value:g}" if isinstance(value, float) else str(value) for field, value in values.items()}
    return ", ".join(f"{field}={text}" for field, text in texts.items())


def _shapes(file: WeightFile) -> dict[str, tuple[int, ...]]:
    return {key: header.shape for key, header in file.headers.items()}


def _unknown_file(file: WeightFile, format: str | None) -> str:
    family = None if format else stated_family(file.config or {}) or family_of(_shapes(file))
    if family:
        return f"{file.path} is {family}."
    tensors = ", ".join(list(file.headers)[:3])
    expected = f"a {format} file" if format else "a checkpoint in a supported format"
    return f"{file.path} is not {expected}: its tensors are {tensors}, ...; `vitral list formats` shows them."
