"""Names that ask for the network: `hf:owner/name` and `timm:name`. Nothing else in vitral ever does."""

from __future__ import annotations

from pathlib import Path

from vitral.errors import UserError

# One of the first group holds the weights; the second says what they are.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_BESIDE = ("config.json", "preprocessor_config.json")


def is_hub_name(source: str) -> bool:
    return source.startswith(("hf:", "timm:"))


def fetch(name: str) -> Path:
    """The folder in huggingface_hub's cache with the weights of `hf:owner/name[@revision]` or `timm:name[@revision]`.

    Files that are in the cache are not fetched again; HF_HUB_OFFLINE=1 and HF_HOME are honoured.
    """
    prefix, _, rest = name.partition(":")
    repository, _, revision = rest.partition("@")
    if prefix == "timm":
        repository = f"timm/{repository.removeprefix('timm/')}"
    if repository.count("/") != 1 or repository.endswith("/"):
        raise UserError(f"{name} is not a hub name: write hf:owner/name or timm:name.")
    patterns = [*_BESIDE, "*.safetensors", "*.safetensors.index.json"]
    folder = _snapshot(name, repository, revision or None, patterns)
    if not any((folder / file).exists() for file in _WEIGHTS):
        # Old repositories have pickles alone; they are read without running what is in them.
        folder = _snapshot(name, repository, revision or None, [*_BESIDE, "*.bin", "*.bin.index.json"])
    return folder


def _snapshot(name: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise UserError(f"{name} is on the Hugging Face hub: pip install 'vitral[hub]' to fetch it.") from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    # Some releases of the hub raise a plain ConnectionError where it is switched to offline.
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise UserError(
            f"{name} is not in the cache and the hub cannot be reached: go online once, or name a file."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{name}: the hub has no such repository, or it needs `hf auth login`.") from error
    except errors.HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered with an error ({error}).") from error
