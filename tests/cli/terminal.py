"""A program on a terminal of its own, as a person has it: keys go in, what it shows comes out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import Self

_TIMEOUT_S = 60.0
_INTERRUPT_S = 4.0  # after which Ctrl-C is pressed once more
_INTERRUPTS = 8
_CODES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


def _as_in_a_shell() -> None:
    """Takes the terminal, and ends on SIGHUP even if the tests run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """A command whose controlling terminal is a new pty, so that Ctrl-C is a signal and not a character."""

    def __init__(self, command: Sequence[str], *, cwd: str, environment: dict[str, str], columns: int = 90) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_as_in_a_shell,
        )
        os.close(slave)
        self.raw = ""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, words: str) -> str:
        """Text up to and with `words` since the last call, without escape codes."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (found := self._take(words)) is None:
            assert time.monotonic() < deadline_s and self._read(deadline_s), (
                f"{words!r} never came: {self.raw[-300:]!r}"
            )
        return found

    def anything(self) -> None:
        """Waits until more is shown than was asked for by now."""
        while not self._shown()[self._seen :] and self._read(time.monotonic() + _TIMEOUT_S):
            pass

    def interrupt(self, words: str) -> str:
        """Ctrl-C until `words` are shown. One that comes between a prompt and the wait for a key is noticed only with
        the next event, which is Python's way with readline."""
        for _ in range(_INTERRUPTS):
            self.type("\x03")
            deadline_s = time.monotonic() + _INTERRUPT_S
            while self._read(deadline_s):
                if (found := self._take(words)) is not None:
                    return found
        raise AssertionError(f"{words!r} never came: {self.raw[-300:]!r}")

    def ended(self, *, interrupts: bool = False) -> int:
        """The exit code, after what is left was read; `interrupts`: a Ctrl-C is what ends it."""
        for _ in range(_INTERRUPTS):
            if interrupts:
                self.type("\x03")
            deadline_s = time.monotonic() + _INTERRUPT_S
            while self._read(deadline_s):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError(f"it goes on: {self.raw[-300:]!r}")

    def _shown(self) -> str:
        return _CODES.sub("", self.raw).replace("\r", "")

    def _take(self, words: str) -> str | None:
        shown = self._shown()
        at = shown.find(words, self._seen)
        if at < 0:
            return None
        begin, self._seen = self._seen, at + len(words)
        return shown[begin : self._seen]

    def _read(self, deadline_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(deadline_s - time.monotonic(), 0))
        with contextlib.suppress(OSError):  # the other end is closed
            if ready and (data := os.read(self._master, 65536)):
                self.raw += data.decode(errors="replace")
                return True
        return False
