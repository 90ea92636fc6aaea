"""A study as data: a TOML file with a base recipe, what is varied, seeds, what is measured, and claims to test.

title = "Class token and mean pooling"
data = "cifar100"
seeds = [0, 1, 2]
metric = "top1"
[recipe]                                  # keys of every run
model = "ViT-Ti/4@32"
[axes]                                    # every combination of these values ...
shape.pool = ["token", "mean"]
[[points]]                                # ... with every one of these points
name = "swept rate"
choose.optim.lr = [0.001, 0.003]          # chosen on a dev split, one trial each
[[claims]]
text = "both are equally good"
kind = "compare"
a.shape.pool = "token"
b.shape.pool = "mean"
expect = "="
margin = 0.01
[scales.paper]                            # the same study at another scale: what is given here replaces the above
data = "jft300m"
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from vitral.errors import UserError
from vitral.recipe import Recipe, keys, with_overrides
from vitral.recipe_presets import get_preset

Measure = Literal["train", "probe", "evaluate", "speed"]
ClaimKind = Literal["compare", "rank", "trend", "best"]
Expectation = Literal["<", "=", ">"]
Where = Mapping[str, Any]  # labels that cells must have

_TOP = {
    *("title", "source", "about", "differs", "data", "images", "classes", "seeds", "metric", "measure", "shots", "dev"),
    *("x", "columns", "preprocess", "preset", "recipe", "trials", "axes", "points", "claims", "starts", "scales"),
}
# Of a point, besides recipe keys.
_POINT = {*("name", "group", "paper", "data", "start", "preset", "choose", "seeds", "measure")}
_FOLDED = ("recipe", "axes")  # of a scale, merged with those of the study


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that runs can support or contradict.

    compare: the means of cells `a` and `b`. rank: `order`, the best first. trend: the slope of the metric over the
    logarithm of `along`, in cells `a`, less that in `b` if given. best: the value of `along` with the highest mean in
    cells `a`, against that in `b`.
    """

    text: str
    kind: ClaimKind
    a: Where = field(default_factory=dict)
    b: Where | None = None
    order: tuple[Where, ...] = ()
    along: str = ""
    expect: Expectation = ">"
    margin: float = 0.0
    metric: str = ""
    paper: str = ""  # what the paper measured


@dataclass(frozen=True)
class Start:
    """A pre-training that runs start from: its data, and the recipe keys it sets."""

    data: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A point of a study: its settings, and the labels that tables and claims know it by."""

    labels: Mapping[str, Any]
    changes: Mapping[str, Any]  # recipe keys, but for the seed
    data: str
    seeds: tuple[int, ...]
    measure: Measure = "train"
    preset: str = ""
    start: str = ""  # name of the pre-training it starts from
    choose: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values of keys to choose from on a dev split
    paper: float | None = None
    axes: tuple[str, ...] = ()  # keys that vary besides the point


@dataclass(frozen=True)
class Study:
    """A study at one scale."""

    name: str
    title: str
    metric: str
    recipe: Mapping[str, Any]
    cells: tuple[Cell, ...]
    source: str = ""  # in the paper
    about: str = ""
    differs: tuple[str, ...] = ()  # from the paper
    shots: tuple[int, ...] = ()  # of the few-shot evaluation of a probe, or after each training
    preprocess: str = ""  # of weights that are probed or evaluated, if they do not state it
    dev: float = 0.1  # share of train to choose on
    trials: Mapping[str, Any] = field(default_factory=dict)  # recipe keys of the trials alone
    columns: tuple[str, ...] = ()  # further metrics for the table
    x: str = ""  # horizontal axis of the figure: a label, "flops" or "seconds"
    images: int = 0  # training images and classes, if the data is not there to count them
    classes: int = 0
    claims: tuple[Claim, ...] = ()
    starts: Mapping[str, Start] = field(default_factory=dict)  # pre-trainings by name
    scale: str = "small"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # recipe keys of all runs, whatever the cells say

    def recipe_of(self, run: PlannedRun) -> Recipe:
        preset = run.cell.preset
        start = get_preset(preset, run.settings.get("model", "")).recipe if preset else Recipe()
        return with_overrides(start, run.settings)

    @property
    def data_names(self) -> tuple[str, ...]:
        starts = (self.starts[cell.start].data for cell in self.cells if cell.start)
        return tuple(dict.fromkeys([*(cell.data for cell in self.cells if cell.data), *starts]))


def shipped() -> tuple[str, ...]:
    """Names of the studies that come with the package."""
    return tuple(
        sorted(path.name.removesuffix(".toml") for path in files("vitral.studies").joinpath("catalog").iterdir())
    )


def read_study(name: str | Path, scale: str = "small", overrides: Mapping[str, Any] | None = None) -> Study:
    """Read a study that comes with the package, or a TOML file, at its own ("small") or another of its scales.

    Overrides are recipe keys of all runs. Raises UserError for a study or scale that does not exist, or has a mistake.
    """
    return parse_study(definition_of(name), study_name(name), scale, overrides)


def study_name(name: str | Path) -> str:
    """What a study is called: its name, or that of its file."""
    return Path(name).name.removesuffix(".toml")


def definition_of(name: str | Path) -> dict[str, Any]:
    """The content of a study's TOML file."""
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        text = path.read_text("utf-8")
    elif str(name) in shipped():
        text = files("vitral.studies").joinpath("catalog", f"{name}.toml").read_text("utf-8")
    elif path.suffix == ".toml":
        raise UserError(f"{name} does not exist: check the path, or name a study of `vitral study list`.")
    else:
        raise UserError(f'there is no study "{name}": name a TOML file, or one of {", ".join(shipped())}.')
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not valid TOML ({error}): correct that line.") from error


def parse_study(
    definition: Mapping[str, Any], name: str, scale: str = "small", overrides: Mapping[str, Any] | None = None
) -> Study:
    """The study of a definition as `definition_of` reads it."""
    settings = _scaled(definition, name, scale)
    if unknown := sorted(set(settings) - _TOP):
        raise UserError(f'the study {name} has an unknown key "{unknown[0]}": use {", ".join(sorted(_TOP))}.')
    for key in ("title", "metric"):
        if not isinstance(settings.get(key), str):
            raise UserError(f'the study {name} lacks its {key}: add {key} = "...".')
    plain = ("title", "metric", "source", "about", "dev", "x", "preprocess", "images", "classes")
    values = {key: settings[key] for key in plain if key in settings}
    recipe = _flat(settings.get("recipe", {}), keys())
    return Study(
        name=name,
        scale=scale,
        recipe=recipe,
        overrides=overrides or {},
        cells=tuple(_cells(settings, name)),
        differs=tuple(settings.get("differs", ())),
        shots=tuple(settings.get("shots", ())),
        columns=tuple(settings.get("columns", ())),
        trials=_trials(settings.get("trials", {}), name),
        claims=tuple(_claim(claim, name) for claim in settings.get("claims", ())),
        starts={start: _start(table, name, start) for start, table in settings.get("starts", {}).items()},
        **values,
    )


def _scaled(definition: Mapping[str, Any], name: str, scale: str) -> dict[str, Any]:
    """The definition with what a scale replaces."""
    scales = definition.get("scales", {})
    if scale != "small" and scale not in scales:
        raise UserError(f'the study {name} has no scale "{scale}": it has {", ".join(["small", *scales])}.')
    changes = dict(scales.get(scale, {}))
    merged = {**definition, **changes}
    for key in _FOLDED:
        merged[key] = {**_flat(definition.get(key, {}), keys()), **_flat(changes.get(key, {}), keys())}
    if "points" in changes and "axes" not in changes:
        merged["axes"] = {}
    return merged


def _flat(table: Mapping[str, Any], recipe_keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table with dotted keys: `shape.depth = 6` is a table in a table for TOML."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in recipe_keys:
            flat |= _flat(value, recipe_keys, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _trials(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    settings = _flat(table, keys())
    for key in settings:
        if key not in keys():
            raise UserError(f'the study {name} sets "{key}" of its trials, which is not a key of a recipe.')
    return settings


def _start(table: Mapping[str, Any], name: str, start: str) -> Start:
    """A pre-training: `on` names its data, all else are recipe keys."""
    settings = _flat(table, keys())
    data = settings.pop("on", "")
    unknown = [key for key in settings if key not in keys()]
    if not data or unknown:
        problem = f'sets "{unknown[0]}", which is not a key of a recipe' if unknown else "lacks its data, on"
        raise UserError(f"the start {start} of the study {name} {problem}: correct it.")
    return Start(data, settings)


def _cells(settings: Mapping[str, Any], name: str) -> Iterator[Cell]:
    """Every combination of the axes with every point."""
    axes = {key: _values_to_try(values, key, name) for key, values in settings["axes"].items()}
    points = settings.get("points") or [{}]
    for point in points:
        for values in itertools.product(*axes.values()):
            combined = {**dict(zip(axes, values, strict=True)), **_flat(point, {**keys(), "choose": None})}
            yield _cell(combined, settings, name, tuple(axes))


def _cell(point: Mapping[str, Any], settings: Mapping[str, Any], name: str, axes: tuple[str, ...]) -> Cell:
    changes = {key: value for key, value in point.items() if key not in _POINT}
    options = _flat(point.get("choose", {}), {})
    choose = {key: _values_to_try(values, f"choose.{key}", name) for key, values in options.items()}
    for key in (*changes, *choose):
        if key not in keys():
            raise UserError(f'the study {name} varies "{key}", which is not a key of a recipe (`vitral show`).')
    measure, start = point.get("measure", settings.get("measure", "train")), point.get("start", "")
    if measure not in get_args(Measure):
        raise UserError(f'the study {name} has no measure "{measure}": use {", ".join(get_args(Measure))}.')
    if start and start not in settings.get("starts", {}):
        raise UserError(f'the study {name} has no start "{start}": add a table [starts.{start}].')
    labels = {key: point[key] for key in ("name", "group", "data", "start") if key in point} | changes
    labels.setdefault("name", settings_text(changes))
    return Cell(
        labels=labels,
        changes=changes,
        data=point.get("data", settings.get("data", "")),
        seeds=_seeds(point.get("seeds", settings.get("seeds", [0])), name),
        preset=point.get("preset", settings.get("preset", "")),
        start=start,
        measure=measure,
        choose=choose,
        paper=point.get("paper"),
        axes=axes,
    )


def _values_to_try(values: Any, key: str, name: str) -> tuple[Any, ...]:
    """The values of an axis, or of a key to choose."""
    if isinstance(values, list) and values:
        return tuple(values)
    fix = "write at least one, or remove the key" if values == [] else f"write [{json.dumps(values, default=str)}]"
    raise UserError(f"{key} of the study {name} is {values!r}, not a list of values to try: {fix}.")


def _seeds(seeds: Any, name: str) -> tuple[int, ...]:
    """One per run of a cell. The same one twice would be one run that agrees with itself."""
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise UserError(
            f"seeds of the study {name} are {seeds!r}, not a list of whole numbers: write seeds = [0, 1, 2]."
        )
    if len(set(seeds)) < len(seeds):
        raise UserError(f"seeds of the study {name} are {seeds!r}, which repeats a seed: write seeds = [0, 1, 2].")
    return tuple(seeds)


def settings_text(changes: Mapping[str, Any]) -> str:
    """What a cell without a name is called."""
    return ", ".join(f"{value}" for value in changes.values())


def _claim(claim: Mapping[str, Any], name: str) -> Claim:
    """A claim with its selections of cells, in which dotted keys are tables for TOML."""
    unknown = sorted(set(claim) - {item.name for item in fields(Claim)})
    text = claim.get("text", "")
    if unknown or not text or claim.get("kind") not in get_args(ClaimKind):
        known = ", ".join(item.name for item in fields(Claim))
        problem = f'the unknown key "{unknown[0]}": keys are {known}' if unknown else "no text or no such kind"
        raise UserError(f"a claim of the study {name} has {problem}; kinds are {', '.join(get_args(ClaimKind))}.")
    selections: dict[str, Any] = {key: _flat(claim[key], keys()) for key in ("a", "b") if key in claim}
    order = tuple(_flat(where, keys()) for where in claim.get("order", ()))
    values: dict[str, Any] = {
        key: claim[key] for key in ("along", "expect", "margin", "metric", "paper") if key in claim
    }
    if values.get("expect", ">") not in get_args(Expectation):
        raise UserError(f'expect of a claim of the study {name} must be "<", "=" or ">", not {values["expect"]!r}.')
    parsed = Claim(text=text, kind=claim["kind"], order=order, **selections, **values)
    if (parsed.kind in ("trend", "best") and not parsed.along) or (parsed.kind in ("compare", "best") and not parsed.b):
        raise UserError(f'the claim "{text}" of the study {name} lacks what it compares: give a, b and along.')
    return parsed


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: a trial on the dev split, or a final run on the test split."""

    cell: Cell
    settings: Mapping[str, Any]  # all recipe keys that the study sets, with the seed
    trial: bool
    id: str

    @property
    def text(self) -> str:
        values = [f"{key}={self.settings[key]}" for key in (*self.cell.choose, "seed")]
        name = ", ".join(str(self.cell.labels[key]) for key in ("name", "data") if key in self.cell.labels)
        return f"{name} ({', '.join([*values, *(['trial'] if self.trial else [])])})"


def planned_run(study: Study, cell: Cell, changes: Mapping[str, Any], *, trial: bool = False) -> PlannedRun:
    """The run of a cell with a seed and chosen values.

    Its id identifies what is computed: the keys that the study sets, the data, and what is measured. It is not the
    recipe's hash, which changes whenever recipes get a new key.
    """
    settings = _layered(study.recipe, cell.changes, changes, study.trials if trial else {}, study.overrides)
    settings |= {"data.dev": study.dev} if trial else {}
    identity = {
        "data": cell.data,
        "measure": cell.measure,
        "shots": list(study.shots),
        "preset": cell.preset,
        "start": asdict(study.starts[cell.start]) if cell.start else {},
        "settings": {key: _plain(value) for key, value in settings.items()},
    }
    if cell.measure in ("probe", "evaluate"):
        identity["preprocess"] = study.preprocess
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return PlannedRun(cell, settings, trial, digest[:12])


def _layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which later layers replace earlier ones; a run has one length, in epochs or in steps."""
    settings: dict[str, Any] = {}
    for layer in layers:
        for key, other in (("steps", "epochs"), ("epochs", "steps")):
            if layer.get(key) and other not in layer:
                settings.pop(other, None)
        settings |= layer
    return settings


def _plain(value: Any) -> Any:
    """One representation per number: 1 and 1.0 are the same setting."""
    return float(value) if type(value) is int else value
