"""Set-up of the package's log, and a standard error that never blocks. Every module logs through
`logging.getLogger(__name__)`; only entry points call `configure`.

Lines carry the instance's name so that the logs of several processes can be read side by side. Control characters are
escaped and the lines of a traceback indented, so that no client can forge a log line; in JSON a record is one object on
one line of ASCII. Serving processes never wait for the reader of standard error.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

FACTS = "facts"  # attribute of a record: names and values to write instead of the message (`extra={FACTS: {..}}`)

MAX_WAITING_CHARS = 1 << 20  # queued for standard error; what does not fit is dropped and counted
LAST_WORDS_S = 0.5  # that a process waits at its end for its standard error to be read
MAX_REPEATS = 20  # warnings and errors of one line of code in REPEAT_PERIOD_S; further ones are counted
REPEAT_PERIOD_S = 10.0

_ROOT = "hydra_engine"
_FORMAT = "%(asctime)s %(levelname).1s [{instance}] %(name)s: %(message)s"
# C0, DEL and C1, other line ends, and marks that change the direction of text.
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")


class LineFormatter(logging.Formatter):
    """A formatter of one line per record; a traceback follows, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("    " + escaped(line) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """A formatter of one JSON object per line: time (UTC), level, instance, logger, and message or facts."""

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
    """Replaces halves of surrogate pairs, which JSON's grammar allows but many readers refuse."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class RepeatFilter(logging.Filter):
    """A rate limit for warnings and errors: passes `MAX_REPEATS` records of one line of code per `REPEAT_PERIOD_S`. The
    first that passes afterwards comes behind a line that counts those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # start of the period, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == __name__:
            return True
        site = record.name, record.lineno
        start_s, count = self._seen.get(site, (record.created, 0))
        if not 0.0 <= record.created - start_s < REPEAT_PERIOD_S:
            if (num_left_out := count - MAX_REPEATS) > 0:
                logging.getLogger(__name__).warning("%d lines like the next one were left out", num_left_out)
            start_s, count = record.created, 0
        self._seen[site] = start_s, count + 1
        return count < MAX_REPEATS


class StandardError(io.TextIOBase):
    """A standard error that never blocks its process: `write` neither waits nor fails. A thread writes. Text that finds
    the queue full (`MAX_WAITING_CHARS`), or cannot be written (a full disk, a closed pipe), is dropped and counted; one
    line reports the count when the reader is back."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int | None = 2) -> None:
        """Starts the writing thread. `fd` None: the process has no standard error, and nothing is written."""
        self.num_dropped = 0  # writes; the log makes one for each record
        self._fd = fd
        self._lock = threading.RLock()  # a collection inside it may log
        self._filled = threading.Event()
        self._queue: deque[str] = deque()
        self._num_chars = 0  # in the queue, or being written
        self._num_told = 0  # the part of num_dropped that has been logged
        threading.Thread(target=self._write_all, name="standard-error", daemon=True).start()

    def write(self, text: str) -> int:
        with self._lock:
            if self._num_chars + len(text) > MAX_WAITING_CHARS:
                self.num_dropped += 1
            else:
                self._num_chars += len(text)
                self._queue.append(text)
                self._filled.set()
        return len(text)

    def wait_written(self, limit_s: float = LAST_WORDS_S) -> None:
        """Returns when all is written, at the latest after `limit_s` seconds."""
        limit = time.monotonic() + limit_s
        while self._num_chars and time.monotonic() < limit:
            time.sleep(0.002)

    def flush(self) -> None:
        """Does nothing, because it would wait."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._fd is None:
            raise OSError("there is no standard error")
        return self._fd

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def _write_all(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()
            while self._queue:
                text = self._queue.popleft()
                written = self._write(text.encode(self.encoding, self.errors))
                with self._lock:
                    self._num_chars -= len(text)
                    self.num_dropped += not written
                    missed = self.num_dropped - self._num_told if written and not self._queue else 0
                    self._num_told += missed
                if missed:  # outside the lock: the log has its own
                    told = "%d lines of this process were dropped: standard error could not be written"
                    logging.getLogger(__name__).warning(told, missed)

    def _write(self, data: bytes) -> bool:
        """Writes all of `data`; False if some of it cannot be written."""
        while data:
            try:
                num_bytes = os.write(self.fileno(), data)
            except BlockingIOError:  # another process has made the pipe non-blocking
                select.select((), (self.fileno(),), ())
            except OSError:
                return False
            else:
                data = data[num_bytes:]
        return True


def never_wait() -> None:
    """Replaces `sys.stderr` by a StandardError for all its writers: the log, progress bars, libraries. Call it before
    `configure`. Keeps a stream that is not Python's own."""
    if sys.stderr is sys.__stderr__:
        # Python has none where the descriptor was closed; that may be another file by now.
        stream = sys.stderr = StandardError(None if sys.stderr is None else 2)
        atexit.register(stream.wait_written)


def num_dropped() -> int:
    """Number of writes, one per log line, that this process has dropped so far."""
    return sys.stderr.num_dropped if isinstance(sys.stderr, StandardError) else 0


def last_words() -> None:
    """Waits until standard error is written; for a process that ends without its exit handlers."""
    if isinstance(sys.stderr, StandardError):
        sys.stderr.wait_written()


def configure(level: str = "info", *, instance: str = "front", log_format: str = "text") -> None:
    """Sends the package's log to standard error; a second call replaces the first. `level` is debug, info, warning or
    error; `log_format` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(instance))
    else:
        handler.setFormatter(LineFormatter(_FORMAT.format(instance=instance), "%H:%M:%S"))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # A full disk or a closed pipe must not take the server down: lines are dropped, serving goes on.
    logging.raiseExceptions = False


def write_json(logger: logging.Logger) -> None:
    """Makes the lines of this logger JSON, whatever the format of the others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter("front"))
    logger.handlers[:] = [handler]
    logger.propagate = False


def adopt_logger(name: str) -> None:
    """Sends another library's warnings and errors through the package's handlers. Call it after `configure`."""
    other = logging.getLogger(name)
    other.handlers[:] = logging.getLogger(_ROOT).handlers
    other.setLevel(logging.WARNING)
    other.propagate = False


def log_always(text: str) -> None:
    """Logs a line regardless of the level; for what is shown at start."""
    root = logging.getLogger(_ROOT)
    root.handle(root.makeRecord(root.name, logging.INFO, __file__, 0, "%s", (text,), None))
