"""The gateway's log: one JSON object a line on standard error, or text for a person's eyes.

Fields that a call hands over as `extra={"fields": {...}}` become keys of the
object. Prompts, keys and client metadata never get here.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from gateway.config import Log


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        tail = "".join(f" {key}={value}" for key, value in fields.items())
        return super().format(record) + tail


class _Expected(logging.Filter):
    """Keep the server library from adding a traceback to aborts that are meant."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], MeantAbort))


class MeantAbort(Exception):
    """Base of exceptions that end a connection on purpose, and are logged where they are raised."""


def configure(settings: Log) -> None:
    """Send all logging of this process to standard error in the configured form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    # These libraries log every request of the control plane, or change of a file, at info.
    for name in ("httpx", "httpcore", "uvicorn.error", "watchfiles.main"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    server = logging.getLogger("uvicorn.error")
    if not any(isinstance(known, _Expected) for known in server.filters):
        server.addFilter(_Expected())
