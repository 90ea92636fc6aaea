"""Structured logs: one JSON object per line on standard error, never with the contents of an image."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_LOGGER = logging.getLogger("vitral.server")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"event": "message", "text": record.getMessage()}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname.lower(), **fields}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs() -> None:
    """Send our records, and the warnings of uvicorn, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for logger, level in ((_LOGGER, logging.INFO), (logging.getLogger("uvicorn.error"), logging.WARNING)):
        logger.handlers.clear()
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)


def log(event: str, *, level: str = "info", exc_info: bool = False, **fields: Any) -> None:
    """Write an event with its fields."""
    number = logging.getLevelNamesMapping()[level.upper()]
    _LOGGER.log(number, event, extra={"fields": {"event": event, **fields}}, exc_info=exc_info)
