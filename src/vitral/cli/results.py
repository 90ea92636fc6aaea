"""The results of verbs as text, tables or JSON; those of verbs that train are in `training.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.display import interval_text, print_facts, print_table
from vitral.errors import UserError, printable

if TYPE_CHECKING:
    from vitral.api.bench import BenchmarkReport
    from vitral.api.checkpoints import CheckpointInfo, ConvertResult
    from vitral.api.evaluation import EvalResult
    from vitral.api.export import ExportResult
    from vitral.api.features import ProbeResult, SearchResult
    from vitral.api.hub import PushResult
    from vitral.api.inspection import InspectResult
    from vitral.api.models import CostResult
    from vitral.api.prediction import EmbedResult
    from vitral.api.serve import ServeResult

_CLASSES = 30  # rows of a table of classes
_UNREADABLE = 20  # names in a line
_PAIRS = 20  # rows of a table of copies


def show_predictions(result: Any, values: Mapping[str, Any]) -> None:
    """Print the classes of each image, or the reason why it cannot be read."""
    if values["json"]:
        print_json(result.as_dict())
    elif values["output"]:
        unread = f", {len(result.unreadable):,} that cannot be read" if result.unreadable else ""
        print_facts({"wrote": f"{values['output']} ({counted(len(result.rows), 'image')}{unread})"})
    else:
        print_table(["image", "classes"], [[image.path, _classes(image)] for image in result.images], left=2)
    if not result.rows:
        from vitral.api.prediction import none_readable_message

        raise UserError(f"{none_readable_message(result.unreadable[0])}: pass complete image files.")


def show_evaluation(result: EvalResult, values: Mapping[str, Any]) -> None:
    metrics = result.metrics
    facts = {"data": f"{result.data} (n = {metrics['n']:,})", "how": " ".join(result.notes)}
    if "mean_average_precision" in metrics:
        facts |= {"mAP": f"{metrics['mean_average_precision']:.2%}", "macro F1": f"{metrics['macro_f1']:.2%}"}
    else:
        interval = f" ({interval_text(*result.interval)})" if result.interval is not None else ""
        facts |= {"top-1": f"{metrics['top1']:.2%}{interval}", "top-5": percent(metrics["top5"], missing="")}
        if "mean_per_class" in metrics:
            facts |= {
                "mean per class": f"{metrics['mean_per_class']:.2%}",
                "negative log-likelihood": _calibrated(metrics, "nll", "{:.4f}"),
                "calibration error": _calibrated(metrics, "ece", "{:.2%}"),
            }
        if result.temperature is not None and metrics.get("temperature") == 1.0:
            after = f"{result.tempered_ece:.2%} with it, cross-fitted on these same images"
            facts["best temperature"] = f"{result.temperature:.3g} (calibration error {after})"
        pairs = metrics.get("confused", [])[:3]
        facts["often confused"] = "; ".join(f"{p['true']} taken for {p['predicted']} ({p['count']})" for p in pairs)
    if result.real is not None:
        facts["ReaL"] = f"{result.real[0]:.2%} ({result.real[1]:,} images have such a label)"
    page = f"{result.page}: open it in a browser" if result.page else ""
    print_facts({**facts, "left out": _left_out(result.unreadable), "wrote": page})


def _calibrated(metrics: Mapping[str, Any], name: str, number: str) -> str:
    """A metric at the model's temperature, and without it if it has one."""
    before, after = number.format(metrics[name]), number.format(metrics[f"{name}_calibrated"])
    return before if metrics["temperature"] == 1.0 else f"{after} ({before} without temperature)"


def show_embeddings(result: EmbedResult, values: Mapping[str, Any]) -> None:
    """Print the shape of the features, and the features if they were not written to a file."""
    if not result.output:
        numbers = [", ".join(f"{number:.4g}" for number in row[:4].tolist()) for row in result.features]
        note = "The first numbers of each; -o FILE.npz writes all of them."
        print_table(["image", "features"], [list(row) for row in zip(result.paths, numbers, strict=True)], note=note)
    counts = {"images": f"{len(result.paths):,}", "features": f"{result.features.shape[1]:,}"}
    print_facts({"wrote": result.output, **counts, "left out": _left_out(result.unreadable)})


def show_inspection(result: InspectResult, values: Mapping[str, Any]) -> None:
    size = f"{result.bytes / 1e6:.1f} MB, {counted(result.images, 'image')}"
    facts = {
        "wrote": f"{result.page} ({size}): open it in a browser",
        "figures": ", ".join(map(str, result.figures)),
        "left out": f"{', '.join(result.unreadable)}: cannot be read" if result.unreadable else "",
    }
    print_facts(facts)


def show_neighbours(result: SearchResult, values: Mapping[str, Any]) -> None:
    columns = ["path", "score"] if values["patch"] is None else ["path", "row", "column", "score"]
    rows = [neighbour._asdict() for neighbour in result.neighbours]
    cells = [[f"{row[name]:.3f}" if name == "score" else str(row[name]) for name in columns] for row in rows]
    unread = f"Left out {_left_out(result.unreadable)}." if result.unreadable else ""
    print_table(["image", *columns[1:-1], "similarity"], cells, note=unread)


def show_check(result: Any, values: Mapping[str, Any]) -> None:
    """Print the problems of a data set and the size of its classes; exit with 1 where `train` would refuse it."""
    if values["json"]:
        print_json(result.as_dict())
    else:
        print_facts(_check_overview(result))
        counts = result.classes
        cells = [[name, *(f"{counts[split][name]:,}" for split in result.images)] for name in counts["train"]]
        more = f"and {len(cells) - _CLASSES:,} more classes" if cells[_CLASSES:] else ""
        print_table(["class", *result.images], cells[:_CLASSES], note=more)
        rows = _check_findings(result)
        for title, names in (("Handled:", result.handled), ("Needs you:", result.needs_you)):
            print(title if names else f"{title} nothing")
            print_facts({f"  {rows[name][0]}": rows[name][1] for name in names})
    if result.refusal:
        raise SystemExit(1)


def show_probes(result: ProbeResult, values: Mapping[str, Any]) -> None:
    rows = [
        [str(row.shots), f"{row.mean:.2%}", _mean_interval(row.mean, row.interval), str(row.drawn)]
        for row in result.shots
    ]
    if rows:
        l2 = result.l2 if isinstance(result.l2, str) else f"{result.l2:g}"
        note = f"{counted(result.seeds, 'draw')}; l2 {l2}; n = {result.test:,}."
        print_table(["shots", "accuracy", "95 % interval of the mean", "training images"], rows, note=note)
    cached = f"cached in {result.kept}" if result.kept else "not cached"
    facts = {
        "data": f"{result.data}: {result.train:,} training images, {result.test:,} ({result.split}) to test on",
        "how": " ".join(result.notes),
        "nearest neighbours": "" if result.knn is None else f"{result.knn:.2%} (k = 20, all of train)",
        "linear probe": "" if result.linear is None else f"{result.linear:.2%} (all of train)",
        "features": f"{result.features:,} per image, {result.flops:.3g} FLOPs; {cached}",
    }
    print_facts(facts)


def _mean_interval(mean: float, half_width: float | None) -> str:
    return "" if half_width is None else f"{max(mean - half_width, 0):.2%} to {min(mean + half_width, 1):.2%}"


def show_duplicates(result: Any, values: Mapping[str, Any]) -> None:
    cells = [
        [pair.train, pair.test, values["against"][pair.split], f"{pair.kind} ({pair.method})", f"{pair.score:.3f}"]
        for pair in result.pairs[:_PAIRS]
    ]
    more = f"and {len(result.pairs) - _PAIRS:,} more pairs" if result.pairs[_PAIRS:] else ""
    if cells:
        print_table(["training image", "test image", "of", "how", "score"], cells, left=4, note=more)
    facts = {
        "copies": f"{len(result.keys):,} of {counted(result.train, 'training image')}",
        "compared with": counted(sum(result.against), "test image"),
        "unreadable": f"{result.unreadable:,}" if result.unreadable else "",
        "not compared": f"{result.not_compared:,} tiny or of one colour" if result.not_compared else "",
        "wrote": values["output"],
    }
    print_facts(facts)


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
        "image": f"{_by(result.image)} pixels, grid {_by(result.grid)}, {result.tokens:,} tokens",
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
        "image": f"{_by(architecture.image)} pixels, {architecture.channels} channels",
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
    outputs = f"of the outputs, same image of {_by(result.image)} pixels"
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


def _classes(image: Any) -> str:
    if hasattr(image, "reason"):
        return f"not read: {image.reason}"
    pairs = zip(image.names, image.probabilities, strict=True)
    return "  ".join(f"{name} {probability:.1%}" for name, probability in pairs)


def _check_overview(report: Any) -> dict[str, str]:
    uneven = f"; the largest has {report.imbalance:.1f} times the smallest"
    return {
        "data": f"{report.source}: {_per_split(report.images)}",
        "notes": " ".join(note for note in report.notes if note != report.refusal),
        "classes": f"{len(report.classes['train']):,}" + uneven * (report.imbalance > 1),
        "formats": ", ".join(f"{count:,} {name}" for name, count in report.formats.items()),
        "widths": _quantiles(report.widths),
        "heights": _quantiles(report.heights),
    }


def _check_findings(report: Any) -> dict[str, tuple[str, str]]:
    """By the name of its field, a finding's title and text."""
    leaks = [f"{pair.first} ~ {pair.second}" for pair in report.leaks]
    unreadable = [f"{image.path}: {image.reason}" for image in report.unreadable]
    contradictions = [_group(group) for group in report.contradictions]
    suspects = [f"{s.image} ({s.label}, looks like {s.suggested})" for s in report.suspects]
    likely = sum(suspect.likely for suspect in report.suspects)
    return {
        "rotated": ("rotated (EXIF)", f"{_count_and_first(report.rotated)} (turned upright)"),
        "deep": ("over 8 bits", f"{_count_and_first(report.deep)} (the high byte is used)"),
        "cmyk": ("CMYK", f"{_count_and_first(report.cmyk)} (converted)"),
        "animated": ("animated", f"{_count_and_first(report.animated)} (the first frame is used)"),
        "tiny": ("tiny", f"{_count_and_first(report.tiny)} (enlarged)"),
        "grey": ("grey", f"{report.grey:,} (repeated for all channels)"),
        "transparent": ("transparent", f"{report.transparent:,} (placed on white)"),
        "refusal": ("train refuses", report.refusal),
        "empty": ("classes without images", _count_and_first(report.empty)),
        "similar": ("similar class names", _count_and_first([" ~ ".join(group) for group in report.similar])),
        "unreadable": ("unreadable", f"{_count_and_first(unreadable)} (left out)"),
        "dim": ("dim, over 8 bits", report.dim),
        "contradictions": ("identical, other label", _count_and_first(contradictions)),
        "leaks": ("in train and test", _count_and_first(leaks) + _leak_advice(report)),
        "duplicates": ("identical", _count_and_first([_group(group) for group in report.duplicates])),
        "near": ("nearly identical", _count_and_first([f"{pair.first} ~ {pair.second}" for pair in report.near])),
        "suspects": (
            "suspicious labels",
            f"{_count_and_first(suspects)}; {likely:,} of {report.scored:,} images are likely wrong: see {report.page}",
        ),
    }


def _leak_advice(report: Any) -> str:
    """How leaks come about, and what to do about them."""
    split = f"test is the {counted(report.held_out, 'image')} that training holds out by itself; "
    fix = "remove the copies, or list those before ~ (--json names all) in a text file, one per line, and train with"
    return f" ({split * bool(report.held_out)}{fix} --set data.exclude=FILE)"


def _left_out(unreadable: Sequence[Any]) -> str:
    """How many images cannot be read, and which; empty if all can."""
    if not unreadable:
        return ""
    named = _first([f"{image.path} ({image.reason})" for image in unreadable], _UNREADABLE)
    return f"{counted(len(unreadable), 'image')} that cannot be read: {named}"


def _per_split(images: Mapping[str, int]) -> str:
    if len(images) == 1:
        return counted(images["train"], "image")
    return ", ".join(f"{counted(count, 'image')} in {name}" for name, count in images.items())


def _count_and_first(items: Sequence[str]) -> str:
    return f"{len(items):,}: {_first(items, 4)}" if items else ""


def _group(images: Sequence[str]) -> str:
    """Identical images; one placeholder of a web site may be there a thousand times."""
    more = f" = ... ({len(images):,} in all)" if len(images) > 4 else ""
    return " = ".join(images[:4]) + more


def _first(items: Sequence[str], most: int) -> str:
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def _quantiles(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in values.items()) + " pixels" if values else ""


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
        "positions": f"{c.position}, grid {_by(c.grid(c.image))}, {row} a class row, resized by rule {c.resize}"
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


def print_json(value: Any) -> None:
    print(printable(json.dumps(value, indent=2, ensure_ascii=False)))


def counted(number: int, noun: str) -> str:
    """1 -> "1 image", 2 -> "2 images" """
    return f"{number:,} {noun}" + "s" * (number != 1)


def _by(size: tuple[int, int]) -> str:
    """(3, 4) -> "3x4" """
    return f"{size[0]}x{size[1]}"


def percent(value: float | None, missing: str = "-") -> str:
    """0.5 -> "50.00%" """
    return missing if value is None else f"{value:.2%}"
