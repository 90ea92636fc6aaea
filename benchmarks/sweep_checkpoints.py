"""Read every ViT of timm, the classes of transformers and OpenCLIP's own towers, and compare outputs: how many are
right, refused, or wrong?

PYTHONPATH=src:tests/helpers/repair python benchmarks/sweep_checkpoints.py --only "vit_*siglip*"

Each model has its factory's own arguments, but two blocks, at most four heads and a small image, and random parameters.
It is read in these modes:

configured  a folder as the library's own writer makes it, with config.json: the outputs must be equal
alone       the weight file only, called weights.safetensors; its header is that of the full-size model, and the
            architecture must be the one that config.json gives, whose outputs were compared
named       as alone, but the file has the model's name

Those of transformers are small; alone, their outputs are compared as well. OpenCLIP's are left out if it is not
installed, and have its open_clip_config.json for config.json.

Refusals are right only if they are UserErrors. The exit status is 1 if any model is wrong.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import hf_cases
import timm_cases
import timm_factories
from oracles import randomised

from vitral.architecture import Architecture
from vitral.checkpoints.weights import Description, assemble, describe, read
from vitral.errors import UserError

LIMIT = 1e-5  # relative to the largest output
MODES = ("configured", "alone", "named")
PATTERNS = tuple(pattern for pattern in timm_factories.PATTERNS if not pattern.startswith("test"))


@dataclass(frozen=True)
class Case:
    """One model of one library."""

    name: str
    gap: Callable[[Path], float]  # save the model in a folder, read it, and compare outputs
    save_header: Callable[[Path], Path] | None = None  # save the full-size model without its tensors as this file
    config: dict[str, object] | None = None  # what config.json must at least state of the full-size model
    gap_alone: Callable[[Path], float] | None = None  # as `gap`, without config.json


def timm_case(name: str) -> Case:
    def gap(folder: Path) -> float:
        arguments = timm_cases.shrunk(name)
        model = timm_cases.build(name, arguments)
        pixels = timm_cases.images(arguments)
        with torch.no_grad():
            theirs = model(pixels)
            ours = assemble(read(timm_cases.save(model, folder, arguments)).weights)(pixels)
        return timm_cases.relative_gap(ours, theirs)

    return Case(name, gap, lambda path: timm_cases.save_header(name, path), {"architecture": name})


def hf_case(name: str, case: hf_cases.HfCase) -> Case:
    def gap(folder: Path, *, alone: bool = False) -> float:
        model = case.build()
        pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        case.save(model, folder)
        if alone:
            (folder / "config.json").unlink()
        with torch.no_grad():
            ours = assemble(read(folder).weights)(pixels)
        return timm_cases.relative_gap(ours, case.forward(model, pixels))

    return Case(f"transformers: {name}", gap, gap_alone=lambda folder: gap(folder, alone=True))


def open_clip_cases() -> list[Case]:
    """The towers of OpenCLIP's configurations that are neither timm's nor ResNets."""
    if importlib.util.find_spec("open_clip") is None:
        return []
    import open_clip  # type: ignore[import-not-found]

    configs = {name: open_clip.get_model_config(name) for name in open_clip.list_models()}
    own = {name: config for name, config in configs.items() if isinstance(config["vision_cfg"].get("layers"), int)}
    return [open_clip_case(f"open_clip: {name}", config) for name, config in own.items()]


def open_clip_case(name: str, config: dict[str, Any]) -> Case:
    heads, patch = config["vision_cfg"].get("head_width", 64), config["vision_cfg"].get("patch_size", 16)
    vision = {**config["vision_cfg"], "layers": 2, "width": 2 * heads, "image_size": 4 * patch}

    def gap(folder: Path, *, alone: bool = False) -> float:
        from open_clip.model import _build_vision_tower  # type: ignore[import-not-found]

        tower = randomised(_build_vision_tower(32, vision, config.get("quick_gelu", False)))
        pixels = torch.randn(2, 3, 4 * patch, 4 * patch, generator=torch.Generator().manual_seed(0))
        tensors = {f"visual.{key}": tensor.contiguous() for key, tensor in tower.state_dict().items()}
        save_file(tensors, folder / "open_clip_model.safetensors")
        if not alone:
            stated = {"model_cfg": {**config, "vision_cfg": vision}, "preprocess_cfg": {}}
            (folder / "open_clip_config.json").write_text(json.dumps(stated))
        with torch.no_grad():
            theirs = tower(pixels)
            ours = assemble(read(folder).weights)(pixels)
        return timm_cases.relative_gap(ours, theirs[0] if isinstance(theirs, tuple) else theirs)

    return Case(name, gap, gap_alone=lambda folder: gap(folder, alone=True))


def classify(case: Case, mode: str, folder: Path) -> tuple[str, str]:
    """ "right", "refused" or "wrong", and why."""
    try:
        compared = {"configured": case.gap, "alone": case.gap_alone}.get(mode)
        if compared is not None:
            gap = compared(folder)
            return ("right" if gap <= LIMIT else "wrong"), f"differs by {gap:.1e}"
        assert case.save_header is not None
        file = case.save_header(folder / f"{case.name if mode == 'named' else 'weights'}.safetensors")
        return _compare(describe(file), case, folder / "stated")
    except UserError as error:
        return "refused", re.sub(r"^.*?, read as \w+: |^\S+ (?=is not a checkpoint)", "", str(error))
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"


def _compare(alone: Description, case: Case, folder: Path) -> tuple[str, str]:
    tensors = {name: torch.empty(alone.file.headers[key].shape, device="meta") for key, name in alone.names.items()}
    unpacked = alone.format.unpack(tensors, alone.card.architecture)
    if unused := unpacked.keys() - {entry.theirs for entry in alone.entries}:
        return "refused", f"{len(unused)} of its tensors are not part of this format, so `read` refuses it"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(alone.file.path)
    (folder / "config.json").write_text(json.dumps(case.config))
    ours, theirs = _plain(alone.card.architecture), _plain(describe(folder).card.architecture)
    different = [key for key, value in theirs.items() if ours.get(key) != value]
    return ("wrong" if different else "right"), f"differs in {', '.join(different)}"


def _plain(architecture: Architecture) -> dict[str, object]:
    """Its fields, with the grid of the image: 378 and 384 pixels are the same patches of 14."""
    fields = dict(vars(architecture))
    return {**fields, "image": architecture.grid(fields["image"])} if hasattr(architecture, "grid") else fields


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of names")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--json", type=Path, help="write every result to this file")
    options = parser.parse_args()
    cases = [*map(timm_case, timm_factories.names(PATTERNS)), *(hf_case(*item) for item in hf_cases.HF_CASES.items())]
    cases += open_clip_cases()
    cases = [case for case in cases if any(fnmatch.fnmatch(case.name, only) for only in options.only)]
    results: dict[str, dict[str, tuple[str, str]]] = {mode: {} for mode in options.modes}
    for count, case in enumerate(cases, 1):
        modes = [mode for mode in options.modes if mode != "named" or case.save_header]
        for mode in modes:
            with tempfile.TemporaryDirectory() as folder:
                results[mode][case.name] = classify(case, mode, Path(folder))
        states = " ".join(results[mode][case.name][0] for mode in modes)
        print(f"\r{count}/{len(cases)} {case.name} {states}\x1b[K", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for mode, outcomes in results.items():
        _report(mode, outcomes)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(any(state == "wrong" for outcomes in results.values() for state, _ in outcomes.values()))


def _report(mode: str, outcomes: dict[str, tuple[str, str]]) -> None:
    counts = collections.Counter(state for state, _ in outcomes.values())
    print(f"\n{mode}: {counts['right']} right, {counts['refused']} refused, {counts['wrong']} wrong")
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, (state, reason) in outcomes.items():
        if state != "right":
            reason = re.sub(r"\b\w+_patch\d+_\w+( \(\d+\))?", "NAME", reason.replace(name, "NAME"))
            grouped.setdefault((state, reason), []).append(name)
    for (state, reason), members in sorted(grouped.items()):
        print(f"  {state} {len(members):3d}  {reason}\n               {' '.join(members)}")


if __name__ == "__main__":
    sys.exit(main())
