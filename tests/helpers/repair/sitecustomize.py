"""Makes torchvision importable beside a torch that it was not built for. Python imports this by itself in the programs
that tests start with this folder on PYTHONPATH."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

KEPT: list[object] = []  # torch forgets a schema once its library object is collected


class TorchvisionRepair:
    """Completes torchvision at its first import, where its compiled operators do not load beside this build of torch.

    The torchvision of PyPI is built for CUDA torch, and then even `import timm` fails. Only the schemas are declared:
    the oracles call none of these operators. An import hook, so that tests without torchvision never import torch.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            found = PathFinder.find_spec(name)
            if found is not None and found.origin is not None and not _operators_load(Path(found.origin).parent):
                _declare_operators()
        return None


def _operators_load(package: Path) -> bool:
    import torch

    try:
        for library in sorted([*package.glob("_C*.so"), *package.glob("_C*.pyd")]):
            torch.ops.load_library(library)
    except (ImportError, OSError):
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _declare_operators() -> None:
    import torch

    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(f"nms{boxes}")
    library.define(f"qnms{boxes}")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    KEPT.append(library)


sys.meta_path.insert(0, TorchvisionRepair())  # type: ignore[arg-type]
