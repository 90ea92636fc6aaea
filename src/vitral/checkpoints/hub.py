"""The Hugging Face hub: downloads, uploads, and the model card of a published model (README.md)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitral.checkpoints.card import Card
from vitral.checkpoints.files import FOLDER_FILES, OPEN_CLIP_CONFIG
from vitral.cost import Cost
from vitral.data.parquet import hub_snapshot
from vitral.errors import UserError, shorten

_REPOSITORY = re.compile(r"hf:([\w][\w.-]*/[\w][\w.-]*)")
_LOAD = {
    "vitral": """vitral predict hf:{repository} photo.jpg""",
    "timm": """import timm
model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))""",
    "transformers": """from transformers import pipeline
classify = pipeline("image-classification", model="{repository}")
classify("photo.jpg")""",
}
_LANGUAGES = {"vitral": "bash", "timm": "python", "transformers": "python"}
_LICENCE = re.compile(r"[\w.+-]+")  # an identifier, such as apache-2.0; it stands in the metadata as it is
_MAX_NAMES = 50  # class names that are listed
_HUB_CONFIGS = ("config.json", "preprocessor_config.json", OPEN_CLIP_CONFIG)


def is_hub_name(source: str) -> bool:
    return source.startswith(("hf:", "timm:"))


def located(source: str | Path) -> Path:
    """The local file or folder of a source; hub names are downloaded."""
    if not isinstance(source, str | os.PathLike):
        raise UserError(
            f"{type(source).__name__} is not a path: pass that of a file or a folder, or a name of the hub; save a "
            "state dict with torch.save first."
        )
    text = str(source)
    return fetch(text) if is_hub_name(text) else Path(source).expanduser()


def fetch(name: str) -> Path:
    """Download `hf:owner/name[@revision]` or `timm:name[@revision]` and return its folder in huggingface_hub's cache.

    Cached files are not downloaded again; HF_HUB_OFFLINE=1 and HF_HOME are honoured.
    """
    prefix, _, rest = name.partition(":")
    repository, _, revision = rest.partition("@")
    if prefix == "timm":
        repository = f"timm/{repository.removeprefix('timm/')}"
    if repository.count("/") != 1 or repository.endswith("/"):
        raise UserError(f"{name} is not a hub name: write hf:owner/name or timm:name.")
    patterns = [*_HUB_CONFIGS, "*.safetensors", "*.safetensors.index.json"]
    folder = hub_snapshot(name, repository, revision, patterns, repo_type="model")
    if not any((folder / file).exists() for file in FOLDER_FILES):
        # Old repositories have pickles only; they are read without running code.
        patterns = [*_HUB_CONFIGS, "*.bin", "*.bin.index.json"]
        folder = hub_snapshot(name, repository, revision, patterns, repo_type="model")
    return folder


def repository_of(name: str) -> str:
    """ "hf:owner/name" -> "owner/name"; UserError for anything else."""
    match = _REPOSITORY.fullmatch(name)
    if match is None:
        raise UserError(f"{name} does not name a repository of the hub: write hf:owner/name.")
    return match[1]


def check_licence(licence: str) -> None:
    """Refuse what is not an identifier of the hub."""
    if licence and not _LICENCE.fullmatch(licence):
        raise UserError(f'"{shorten(licence)}" is not the identifier of a licence: write one such as apache-2.0.')


def upload(folder: Path, repository: str, *, private: bool, message: str) -> tuple[str, str]:
    """Create the repository if it does not exist, and upload the files of a folder in one commit.

    Returns its address and the commit. Other files in the repository stay.
    """
    try:
        from huggingface_hub import HfApi, errors
    except ImportError as error:
        raise UserError("uploading needs huggingface_hub: pip install 'vitral[hub]'.") from error
    api = HfApi(library_name="vitral")
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except (errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise UserError(f"the hub cannot be reached, so hf:{repository} was not written: go online.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"hf:{repository}: the hub has no such owner, or it needs `hf auth login`.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise UserError(
                f"the hub does not let you write hf:{repository}: run `hf auth login` with a token that may do so."
            ) from error
        raise UserError(f"hf:{repository}: the hub answered with an error ({error}).") from error
    except errors.LocalTokenNotFoundError as error:
        raise UserError(f"writing hf:{repository} needs a token: run `hf auth login`, or set HF_TOKEN.") from error
    except Exception as error:  # of the HTTP library, which differs between releases of huggingface_hub
        raise UserError(
            f"hf:{repository} was not written ({type(error).__name__}: {shorten(error)}): check the connection."
        ) from error
    return str(url), commit.oid


def model_card(
    repository: str,
    card: Card,
    *,
    name: str,
    cost: Cost,
    readers: Sequence[str],
    licence: str,
    run: Mapping[str, Any],
) -> str:
    """The text of README.md, with the hub's metadata in front.

    `readers` are the libraries that load it; `run` has "result", "data" and "recipe" of the training, if known.
    """
    height, width = card.architecture.image
    parts = [
        _front_matter(readers, licence, repository, run),
        f"# {repository.partition('/')[2]}",
        f"{name} for images of {height} x {width} pixels, {card.architecture.classes:,} classes: "
        f"{cost.params / 1e6:,.1f} million parameters, {cost.macs / 1e9:,.2f} billion multiply-accumulates per image.",
        _results(run),
        "## Use\n\n" + "\n\n".join(f"```{_LANGUAGES[reader]}\n{_LOAD[reader]}\n```" for reader in readers),
        _preprocessing(card),
        _classes(card),
        _origin(card),
        _recipe(run),
    ]
    return "\n\n".join(part for part in parts if part).replace("{repository}", repository) + "\n"


def _front_matter(readers: Sequence[str], licence: str, repository: str, run: Mapping[str, Any]) -> str:
    library = "timm" if "timm" in readers else "transformers" if "transformers" in readers else "vitral"
    lines = ["---", f"library_name: {library}", "pipeline_tag: image-classification"]
    lines += ["tags:", "- image-classification", "- vitral", *([f"- {library}"] if library != "vitral" else [])]
    lines += [f"license: {licence}"] if licence else []
    accuracy = run.get("result", {}).get("metrics", {}).get("top1")
    if accuracy is not None:
        lines += ["model-index:", f"- name: {repository.partition('/')[2]}", "  results:", "  - task:"]
        lines += [
            "      type: image-classification",
            "    dataset:",
            f"      name: {json.dumps(_data_name(run), ensure_ascii=False)}",
        ]
        lines += ["      type: custom", "    metrics:", "    - type: accuracy", f"      value: {accuracy:.4f}"]
    return "\n".join([*lines, "---"])


def _results(run: Mapping[str, Any]) -> str:
    result = run.get("result", {})
    metrics = result.get("metrics", {})
    rows = [(label, metrics.get(key)) for key, label in (("top1", "top-1"), ("top5", "top-5"))]
    calibrated = metrics.get("ece_calibrated", metrics.get("ece"))  # as `push` writes the weights
    rows += [("mean over classes", metrics.get("mean_per_class")), ("calibration error", calibrated)]
    cells = [f"| {label} | {100 * value:.2f} % |" for label, value in rows if value is not None]
    if not cells:
        return ""
    where = f"On {metrics['n']:,} held-out images of {_data_name(run)}, seed {result.get('seed', 0)}:"
    notes = "\n".join(f"- {note}" for note in run.get("data", {}).get("notes", []))
    return "\n\n".join(part for part in ("## Results", where, "\n".join(["| | |", "|---|--:|", *cells]), notes) if part)


def _data_name(run: Mapping[str, Any]) -> str:
    """The last part of the data's name: a path on another machine has no meaning."""
    return str(run.get("data", {}).get("source", "")).rstrip("/").rpartition("/")[2] or "the data"


def _preprocessing(card: Card) -> str:
    if card.preprocess is None:
        return ""
    p = card.preprocess
    numbers = [", ".join(f"{value:g}" for value in values) for values in (p.mean, p.std)]
    return (
        f"## Preprocessing\n\n`{p.pipeline}`, then (pixel / 255 - mean) / std with mean {numbers[0]}, std {numbers[1]}."
    )


def _classes(card: Card) -> str:
    if not card.class_names:
        return ""
    names = [_plain(name) for name in card.class_names[:_MAX_NAMES]]
    more = len(card.class_names) - len(names)
    return "## Classes\n\n" + ", ".join(names) + (f" and {more:,} more" if more else "") + "."


def _origin(card: Card) -> str:
    lines = [f"- weights from {_plain(card.source)} ({card.format})"] if card.source and card.format else []
    lines += [f"- {_plain(change)}" for change in card.changes]
    return "## Origin and changes\n\n" + "\n".join(lines) if lines else ""


def _recipe(run: Mapping[str, Any]) -> str:
    if "recipe" not in run:
        return ""
    return (
        f"## Recipe\n\n<details><summary>recipe.toml</summary>\n\n```toml\n{run['recipe'].strip()}\n```\n\n</details>"
    )


def _plain(text: str) -> str:
    """A name as Markdown shows it, not as it would interpret it."""
    return "".join(f"\\{char}" if char in r"\`*_[]<>|#" else char for char in " ".join(text.split()))
