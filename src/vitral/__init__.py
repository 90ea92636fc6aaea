"""vitral: Vision Transformers as the paper describes them, for every checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitral.version import __version__

if TYPE_CHECKING:
    from vitral.api import (
        capture,
        check,
        classifier,
        convert,
        create,
        dedupe,
        embed,
        evaluate,
        fewshot,
        finetune,
        info,
        inspect,
        load,
        predict,
        pretrain,
        save,
        search,
        train,
        vtab1k,
    )
    from vitral.errors import UserError

__all__ = [
    "UserError",
    "__version__",
    "capture",
    "check",
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
    "load",
    "predict",
    "pretrain",
    "save",
    "search",
    "train",
    "vtab1k",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are used, so that `import vitral` and `vitral --help` stay instant."""
    if name == "UserError":
        from vitral.errors import UserError

        return UserError
    if name in __all__:
        from vitral import api

        return getattr(api, name)
    raise AttributeError(f"module 'vitral' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
