"""vitral: Vision Transformers in PyTorch: train, fine-tune, convert, inspect, export and serve."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitral.version import __version__

if TYPE_CHECKING:
    from vitral.api.bench import BenchmarkReport, benchmark
    from vitral.api.check import check, dedupe
    from vitral.api.checkpoints import CheckpointInfo, ConvertResult, Source, convert, create, info, load, save
    from vitral.api.data import Images
    from vitral.api.evaluation import EvalResult, evaluate
    from vitral.api.export import ExportResult, export_model
    from vitral.api.features import Neighbour, ProbeResult, SearchResult, fewshot, search
    from vitral.api.hub import PushResult, push
    from vitral.api.inspection import InspectResult, inspect
    from vitral.api.models import CostResult, compute_cost, list_available
    from vitral.api.prediction import EmbedResult, classifier, embed, predict
    from vitral.api.protocols import ProtocolResult, finetune, pretrain
    from vitral.api.recipes import show_recipe
    from vitral.api.serve import ServeResult, serve
    from vitral.api.study import StudyList, StudyReport, StudyRuns, study
    from vitral.api.training import DemoResult, TrainResult, demo, train
    from vitral.api.vtab import VtabResult, vtab1k
    from vitral.architecture import ModuleConfig, ResNetConfig, ViTConfig
    from vitral.checkpoints.card import Card, Preprocess
    from vitral.display import Display
    from vitral.errors import Interrupted, PartsWritten, UserError
    from vitral.events import (
        Evaluated,
        Event,
        EventHandler,
        Note,
        Progress,
        RunDirChosen,
        RunFinished,
        RunStarted,
        Saved,
        StepDone,
    )
    from vitral.kernels.cuda_graph import graphed
    from vitral.models.capture import capture
    from vitral.recipe import Recipe
    from vitral.serving import PredictionResults
    from vitral.trackers import Tracker
    from vitral.training.callbacks import Callback, RunHandle
    from vitral.training.optimizer import parameter_groups
    from vitral.training.run import RunResult

_MODULES = {
    "vitral.api.bench": "BenchmarkReport benchmark",
    "vitral.api.check": "check dedupe",
    "vitral.api.checkpoints": "CheckpointInfo ConvertResult Source convert create info load save",
    "vitral.api.data": "Images",
    "vitral.api.evaluation": "EvalResult evaluate",
    "vitral.api.export": "ExportResult export_model",
    "vitral.api.features": "Neighbour ProbeResult SearchResult fewshot search",
    "vitral.api.hub": "PushResult push",
    "vitral.api.inspection": "InspectResult inspect",
    "vitral.api.models": "CostResult compute_cost list_available",
    "vitral.api.prediction": "EmbedResult classifier embed predict",
    "vitral.api.protocols": "ProtocolResult finetune pretrain",
    "vitral.api.serve": "ServeResult serve",
    "vitral.api.study": "StudyList StudyReport StudyRuns study",
    "vitral.api.recipes": "show_recipe",
    "vitral.api.training": "DemoResult TrainResult demo train",
    "vitral.api.vtab": "VtabResult vtab1k",
    "vitral.architecture": "ModuleConfig ResNetConfig ViTConfig",
    "vitral.checkpoints.card": "Card Preprocess",
    "vitral.errors": "Interrupted PartsWritten UserError",
    "vitral.events": "Evaluated Event EventHandler Note Progress RunDirChosen RunFinished RunStarted Saved StepDone",
    "vitral.kernels.cuda_graph": "graphed",
    "vitral.models.capture": "capture",
    "vitral.display": "Display",
    "vitral.recipe": "Recipe",
    "vitral.serving": "PredictionResults",
    "vitral.trackers": "Tracker",
    "vitral.training.callbacks": "Callback RunHandle",
    "vitral.training.optimizer": "parameter_groups",
    "vitral.training.run": "RunResult",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "BenchmarkReport", "Callback", "Card", "CheckpointInfo", "ConvertResult", "CostResult", "DemoResult", "Display",
    "EmbedResult", "EvalResult", "Evaluated", "Event", "EventHandler", "ExportResult", "Images", "InspectResult",
    "Interrupted", "ModuleConfig", "Neighbour", "Note", "PartsWritten", "PredictionResults", "Preprocess",
    "ProbeResult", "Progress",
    "ProtocolResult", "PushResult", "Recipe", "ResNetConfig", "RunDirChosen", "RunFinished", "RunHandle", "RunResult",
    "RunStarted", "Saved", "SearchResult", "ServeResult", "Source", "StepDone", "StudyList", "StudyReport", "StudyRuns",
    "Tracker", "TrainResult", "UserError", "ViTConfig", "VtabResult",
    "__version__", "benchmark", "capture", "check", "classifier", "compute_cost", "convert", "create", "dedupe", "demo",
    "embed", "evaluate", "export_model", "fewshot", "finetune", "graphed", "info", "inspect", "list_available", "load",
    "parameter_groups", "predict", "pretrain", "push", "save", "search", "serve", "show_recipe", "study", "train",
    "vtab1k",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import vitral` and `vitral --help` stay fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vitral' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
