"""`--record-workload`: the requests of a running engine, written to a file that only its owner can read.

The server finds `Recording` by the entry point in pyproject.toml. Ten times a second it looks for requests that still
run, since a line waits for every earlier request. A thread writes, so that a slow disk delays no token, and only whole
lines, so that the file can be read at any time. After a failed write the recording ends with one log line, and serving
goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import secrets
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hydra_engine.clock import MonotonicClock
from hydra_engine.errors import ConfigError
from hydra_planner.workload.file import header_line
from hydra_planner.workload.recorder import WorkloadRecorder

if TYPE_CHECKING:
    from hydra_engine.core.outputs import Result
    from hydra_engine.engine import Engine
    from hydra_engine.frontend.frontend import Frontend
    from hydra_engine.frontend.request import ActiveRequest

logger = logging.getLogger(__name__)

MAX_WAITING = 1 << 16  # lines
_EVERY_S = 0.1
_LAST_LINES_S = 5.0  # that `close` waits for the disk


class Recording:
    """Requests that arrive after `start`, in a workload file that the constructor opens. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._file = WorkloadFile(path)
        self._recorder: WorkloadRecorder | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, engine: Engine) -> None:
        """Observes the engine until it closes. Runs on its loop."""
        self._recorder = WorkloadRecorder(secrets.token_bytes(32), MonotonicClock().now())
        engine.frontend.observers.append(self._ended)
        self._task = asyncio.create_task(self._release_often(self._recorder, engine.frontend))

    def close(self) -> None:
        """Writes the remaining lines, after the engine has closed."""
        if self._recorder is not None and self._task is not None:
            self._task.cancel()
            self._release(self._recorder, math.inf)
        self._file.close()

    def _ended(self, active: ActiveRequest, result: Result) -> None:
        if self._recorder is not None and active.facts is not None:
            self._recorder.record_request(active.request, active.facts, result)

    async def _release_often(self, recorder: WorkloadRecorder, frontend: Frontend) -> None:
        while not recorder.full:
            await asyncio.sleep(_EVERY_S)
            self._release(recorder, frontend.oldest_arrival_s)
        logger.warning("the recorded workload has %d requests, as many as a file may have", recorder.num_lines)

    def _release(self, recorder: WorkloadRecorder, oldest_s: float) -> None:
        for line in recorder.release(oldest_s):
            self._file.add(line)


class WorkloadFile:
    """A workload file, opened by the constructor; an existing file is renamed to FILE.old. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        try:
            _put_aside(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = 0
            try:
                self._write(header_line("recorded"))
            except OSError:
                os.close(self._file)
                raise
        except OSError as error:
            raise ConfigError(
                f"record_workload cannot be written: {error.strerror}; name a file in a folder that the server may "
                "write to",
                param="record_workload",
            ) from error
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._over = False
        self._thread = threading.Thread(target=self._write_all, name="workload-file", daemon=True)
        self._thread.start()

    def add(self, line: bytes) -> None:
        """Queues a line; never waits and never fails."""
        if self._over:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._give_up("the disk is too slow")

    def close(self) -> None:
        """Returns when all is written, or after a few seconds."""
        try:
            self._lines.put(None, timeout=_LAST_LINES_S)
        except queue.Full:
            return
        self._thread.join(_LAST_LINES_S)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._over:
                continue
            try:
                self._write(line)
            except OSError as error:
                self._give_up(error.strerror or type(error).__name__)
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Writes the whole line, or nothing of it. Raises OSError."""
        data = line + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line) + 1

    def _give_up(self, reason: str) -> None:
        self._over = True
        logger.warning("the workload is recorded no longer: %s; what was written before is whole", reason)


def _put_aside(path: Path) -> None:
    """Renames a regular file to FILE.old; deletes it if it holds no request."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        return
    if found.st_size > len(header_line("recorded")) + 1:
        path.replace(path.with_name(path.name + ".old"))
    else:
        path.unlink()
