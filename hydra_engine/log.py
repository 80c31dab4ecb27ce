"""One-time logging set-up. Every module logs through `logging.getLogger(__name__)`; only entry points call this.

Lines carry the instance's name so that the logs of several processes can be read side by side. Control characters are
escaped and the lines of a traceback indented, so that whatever a client sends, a line that looks like ours is ours; in
JSON a record is one object on one line of ASCII.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

FACTS = "facts"  # of a record: what its line says as names and values (`extra={FACTS: {..}}`), instead of the message

_ROOT = "hydra_engine"
_FORMAT = "%(asctime)s %(levelname).1s [{instance}] %(name)s: %(message)s"
# C0, DEL and C1, what else ends a line somewhere, and what turns the direction of text.
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")


class LineFormatter(logging.Formatter):
    """One record, one line; a traceback follows indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("    " + escaped(line) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One record, one JSON object on one line: time (UTC), level, instance, logger, and message or facts."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "instance": self._instance,
            "logger": record.name,
        }
        facts = getattr(record, FACTS, None)
        line |= facts if facts is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: _whole(value) for name, value in line.items()})


def _whole(value: object) -> object:
    """Halves of surrogate pairs are valid in JSON's grammar, but not everywhere."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def configure(level: str = "info", *, instance: str = "front", log_format: str = "text") -> None:
    """Sends the package's log to standard error; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(instance))
    else:
        handler.setFormatter(LineFormatter(_FORMAT.format(instance=instance), "%H:%M:%S"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # A full disk or a closed pipe must not take the server down: lines are dropped, serving goes on.
    logging.raiseExceptions = False


def write_json(logger: logging.Logger, *, instance: str = "front") -> None:
    """The lines of this logger are JSON from here on, whatever the rest is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(instance))
    logger.handlers[:] = [handler]
    logger.propagate = False


def take_over(name: str) -> None:
    """What another library logs as a warning or worse looks like our lines."""
    other = logging.getLogger(name)
    other.handlers[:] = logging.getLogger(_ROOT).handlers
    other.setLevel(logging.WARNING)
    other.propagate = False


def tell(text: str) -> None:
    """A line at any level, for what is shown at start."""
    root = logging.getLogger(_ROOT)
    root.handle(root.makeRecord(root.name, logging.INFO, __file__, 0, "%s", (text,), None))
