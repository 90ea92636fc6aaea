"""The verbs as Python functions: the whole public surface. The command line prints what these return.

Each name is imported when it is first used, so that no verb waits for the libraries of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.api.bench import Benchmark, benchmark
    from vitral.api.checkpoints import FORMATS, Conversion, Info, convert, create, info, load, save
    from vitral.api.data import known_data
    from vitral.api.inspection import Inspection, inspect, write_run_page
    from vitral.api.neighbours import Neighbour, search
    from vitral.api.prediction import Evaluation, check, classifier, embed, evaluate, predict, write_pictures
    from vitral.api.probes import Probing, dedupe, fewshot
    from vitral.api.protocols import Protocol, finetune, pretrain
    from vitral.api.training import (
        TrainResult,
        choose_recipe,
        read_recipe,
        train,
    )
    from vitral.api.vtab import VtabScore, vtab1k
    from vitral.models.capture import capture

_CHECKPOINTS = ("FORMATS", "Conversion", "Info", "convert", "create", "info", "load", "save")
_PREDICTION = ("Evaluation", "check", "classifier", "embed", "evaluate", "predict", "write_pictures")
_TRAINING = ("TrainResult", "choose_recipe", "read_recipe", "train")
_PROTOCOLS = ("Protocol", "finetune", "pretrain")
_HOMES = {
    "capture": "vitral.models.capture",
    **dict.fromkeys(("VtabScore", "vtab1k"), "vitral.api.vtab"),
    **dict.fromkeys(("Benchmark", "benchmark"), "vitral.api.bench"),
    **dict.fromkeys(("Inspection", "inspect", "write_run_page"), "vitral.api.inspection"),
    **dict.fromkeys(("Neighbour", "search"), "vitral.api.neighbours"),
    **dict.fromkeys(("Probing", "dedupe", "fewshot"), "vitral.api.probes"),
    "known_data": "vitral.api.data",
    **dict.fromkeys(_CHECKPOINTS, "vitral.api.checkpoints"),
    **dict.fromkeys(_PREDICTION, "vitral.api.prediction"),
    **dict.fromkeys(_PROTOCOLS, "vitral.api.protocols"),
    **dict.fromkeys(_TRAINING, "vitral.api.training"),
}

__all__ = [
    "FORMATS",
    "Benchmark",
    "Conversion",
    "Evaluation",
    "Info",
    "Inspection",
    "Neighbour",
    "Probing",
    "Protocol",
    "TrainResult",
    "VtabScore",
    "benchmark",
    "capture",
    "check",
    "choose_recipe",
    "classifier",
    "convert",
    "create",
    "dedupe",
    "embed",
    "evaluate",
    "fewshot",
    "finetune",
    "info",
    "inspect",
    "known_data",
    "load",
    "predict",
    "pretrain",
    "read_recipe",
    "save",
    "search",
    "train",
    "vtab1k",
    "write_pictures",
    "write_run_page",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitral.api' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
