"""Results of list, cost, info, convert, export, push, serve and bench as tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.cli.results import by, print_facts, print_table

if TYPE_CHECKING:
    from vitral.api.bench import BenchmarkReport
    from vitral.api.checkpoints import CheckpointInfo, ConvertResult
    from vitral.api.export import ExportResult
    from vitral.api.hub import PushResult
    from vitral.api.models import CostResult
    from vitral.api.serve import ServeResult


def show_available(result: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
    cells = [[_cell(cell) for cell in row.values()] for row in result]
    if values["what"] == "models":
        note = "1,000 classes, 224 pixels. Other sizes, patches and ResNets work too: ViT-S/8, B/16@384, R101+ViT-L/32."
        print_table(list(result[0]), cells, note=note)
    else:
        print_table(list(result[0]), cells, left=2)


def show_cost(result: CostResult, values: Mapping[str, Any]) -> None:
    facts = {
        "model": f"{result.model}{_dimensions(result.architecture)}",
        "image": f"{by(result.image)} pixels, grid {by(result.grid)}, {result.tokens:,} tokens",
        "parameters": f"{result.parameters:,}",
        "compute": f"{result.macs / 1e9:,.2f} GMACs per image",
    }
    if result.training_flops is not None and result.images is not None and result.epochs is not None:
        run = f"{result.images:,.0f} images, {result.epochs:g} epoch{'s' * (result.epochs != 1)}"
        facts["training"] = f"{result.training_flops / 1e18:,.4g} exaFLOPs ({run})"
        facts["the paper"] = result.paper or ""
    print_facts(facts)


def show_info(result: CheckpointInfo, values: Mapping[str, Any]) -> None:
    card, architecture = result.card, result.card.architecture
    facts = {
        "file": f"{result.path} ({result.bytes / 1e6:,.1f} MB)",
        "format": f"{result.format} ({result.container})",
        "model": result.model,
        "parameters": f"{result.cost.params:,}",
        "image": f"{by(architecture.image)} pixels, {architecture.channels} channels",
    }
    if isinstance(architecture, ViTConfig):
        facts |= _vit_facts(architecture)
    pixels = card.preprocess
    prepared = f"{pixels.pipeline}, mean {_plain(pixels.mean)}, std {_plain(pixels.std)}" if pixels else "not stated"
    names = ", ".join(card.class_names[:3]) + (", ..." if card.class_names[3:] else "")
    facts |= {
        "classes": f"{architecture.classes:,} ({names or 'names not stated'})" if architecture.classes else "none",
        "preprocess": prepared,
        "from": f"{card.source} ({card.format})" if card.format != result.format else "",
        "licence": card.licence or "not stated",
        "changes": "; ".join(card.changes),
        "sha256": result.sha256,
    }
    print_facts(facts)


def show_conversion(result: ConvertResult, values: Mapping[str, Any]) -> None:
    outputs = f"of the outputs, same image of {by(result.image)} pixels"
    facts = {
        "read": f"{result.source} ({result.source_format})",
        "wrote": f"{result.target} ({result.target_format})",
        "model": result.model,
        "changes": "; ".join(result.changes) or "none",
        "unmapped": ", ".join(result.unmapped) or "none",
        "not in the file": "; ".join(result.unstated),
        "difference": f"max |difference| {result.difference:.3g} {outputs}",
    }
    print_facts(facts)


def show_export(result: ExportResult, values: Mapping[str, Any]) -> None:
    print_table([result.report.images, "model", result.format, "limit"], result.report.rows())
    size = f"{result.bytes / 1e6:,.1f} MB"
    print_facts({"wrote": f"{result.target} ({result.format}, {size}: {', '.join(result.outputs)})"})


def show_push(result: PushResult, values: Mapping[str, Any]) -> None:
    print_facts({**result.summary(), "not for others": "; ".join(result.refusals)})


def show_served(result: ServeResult, values: Mapping[str, Any]) -> None:
    print_facts(result.summary())


def show_benchmark(result: BenchmarkReport, values: Mapping[str, Any]) -> None:
    columns, cells = result.table()
    print_table(columns, cells, left=5, note="\n".join(result.notes))
    print_facts({"written to": f"{result.results} (all rows), {result.page} (a page)"})


def _vit_facts(c: ViTConfig) -> dict[str, str]:
    sizes = f"{c.depth} layers, width {c.width}, MLP {c.mlp}, {c.heads} heads"
    parts = [f"{c.pool} pooling", f"{c.registers} registers" * bool(c.registers), "LayerScale" * c.layer_scale]
    parts += [f"tanh layer of {c.representation}" * bool(c.representation)]
    norms = {"norm before the blocks": c.pre_norm, "post-norm": c.post_norm, "QK norm": c.qk_norm}
    norms |= {"norm in the attention": c.attention_norm, "norm in the MLP": c.mlp_norm}
    norms |= {"no final norm": c.norm_place == "none", "final norm after pooling": c.norm_place == "features"}
    biases = {"no bias of queries, keys and values": not c.qkv_bias, "no bias of keys": not c.key_bias}
    biases |= {"no bias of patches": not c.patch_bias, "no bias of the head": not c.head_bias}
    parts += [name for name, present in {**norms, **biases}.items() if present]
    row = "with" if c.class_row else "without"
    return {
        "layers": f"{sizes}, {'SwiGLU' if c.swiglu else f'{c.gelu} GELU'}, LayerNorm eps {c.norm_eps:g}",
        "parts": ", ".join(part for part in parts if part),
        "positions": f"{c.position}, grid {by(c.grid(c.image))}, {row} a class row, resized by rule {c.resize}"
        + (f"; RoPE of temperature {c.rope.temperature:g}" if c.rope else ""),
    }


def _dimensions(architecture: Architecture) -> str:
    if isinstance(architecture, ResNetConfig):
        return f"  (stages of {', '.join(map(str, architecture.blocks))} units, width x{architecture.width})"
    if not isinstance(architecture, ViTConfig):
        return ""
    a = architecture
    stem = f" on a ResNet of {', '.join(map(str, a.stem.blocks)) or 'no'} units" if a.stem else ""
    return f"  ({a.depth} layers, width {a.width}, MLP {a.mlp}, {a.heads} heads{stem})"


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _plain(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else "(" + ", ".join(f"{value:g}" for value in values) + ")"
