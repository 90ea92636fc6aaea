"""The verbs as Python functions. The command line is generated from these, and prints what they return.

Each name is imported when it is first used, so that no verb waits for the libraries of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.api.bench import BenchmarkReport, benchmark
    from vitral.api.checkpoints import FORMATS, CheckpointInfo, ConvertResult, Source, convert, create, info, load, save
    from vitral.api.data import Images, known_data
    from vitral.api.demonstration import DemoResult, demo
    from vitral.api.evaluation import EvalResult, evaluate
    from vitral.api.inspection import InspectResult, inspect, write_run_page
    from vitral.api.models import CostResult, cost, list_available
    from vitral.api.neighbours import Neighbour, SearchResult, search
    from vitral.api.prediction import EmbedResult, check, classifier, embed, predict
    from vitral.api.probes import ProbeResult, dedupe, fewshot
    from vitral.api.protocols import ProtocolResult, finetune, pretrain
    from vitral.api.training import TrainResult, choose_recipe, read_recipe, show_recipe, train
    from vitral.api.vtab import VtabResult, vtab1k
    from vitral.checkpoints.card import Card, Preprocess
    from vitral.errors import Interrupted
    from vitral.models.capture import capture
    from vitral.serving.results import PredictionResults

_MODULES = {
    "vitral.api.bench": "BenchmarkReport benchmark",
    "vitral.api.checkpoints": "FORMATS CheckpointInfo ConvertResult Source convert create info load save",
    "vitral.api.data": "Images known_data",
    "vitral.api.demonstration": "DemoResult demo",
    "vitral.api.evaluation": "EvalResult evaluate",
    "vitral.api.inspection": "InspectResult inspect write_run_page",
    "vitral.api.models": "CostResult cost list_available",
    "vitral.api.neighbours": "Neighbour SearchResult search",
    "vitral.api.prediction": "EmbedResult check classifier embed predict",
    "vitral.api.probes": "ProbeResult dedupe fewshot",
    "vitral.api.protocols": "ProtocolResult finetune pretrain",
    "vitral.api.training": "TrainResult choose_recipe read_recipe show_recipe train",
    "vitral.api.vtab": "VtabResult vtab1k",
    "vitral.checkpoints.card": "Card Preprocess",
    "vitral.errors": "Interrupted",
    "vitral.models.capture": "capture",
    "vitral.serving.results": "PredictionResults",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "FORMATS",
    "BenchmarkReport",
    "Card",
    "CheckpointInfo",
    "ConvertResult",
    "CostResult",
    "DemoResult",
    "EmbedResult",
    "EvalResult",
    "Images",
    "InspectResult",
    "Interrupted",
    "Neighbour",
    "PredictionResults",
    "Preprocess",
    "ProbeResult",
    "ProtocolResult",
    "SearchResult",
    "Source",
    "TrainResult",
    "VtabResult",
    "benchmark",
    "capture",
    "check",
    "choose_recipe",
    "classifier",
    "convert",
    "cost",
    "create",
    "dedupe",
    "demo",
    "embed",
    "evaluate",
    "fewshot",
    "finetune",
    "info",
    "inspect",
    "known_data",
    "list_available",
    "load",
    "predict",
    "pretrain",
    "read_recipe",
    "save",
    "search",
    "show_recipe",
    "train",
    "vtab1k",
    "write_run_page",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitral.api' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
