"""Where `chat` writes: a terminal with colours, or a pipe with nothing but text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from hydra_engine.cli.timeline import DIM, RED, coloured, painted

_PIPE_COLUMNS = 100
# Everything that moves a cursor or changes a terminal; answers have no business with it.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """The text without control characters other than newline and tab."""
    return text.translate(_CONTROLS)


class Screen:
    """On a pipe, answers and what was asked for are written as they come, errors on standard error and notes nowhere.
    `plain`: no colours."""

    def __init__(self, out: TextIO, *, plain: bool) -> None:
        self._out = out
        self._terminal = out.isatty()
        dull = plain or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._colours = self._terminal and not dull

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self._terminal else _PIPE_COLUMNS

    def write(self, text: str) -> None:
        self._out.write(clean(text) if self._terminal else text)
        self._out.flush()

    def say(self, text: str) -> None:
        self.write(text + "\n")

    def note(self, text: str) -> None:
        if self._terminal:
            self._line(clean(text), DIM)

    def error(self, text: str) -> None:
        if self._terminal:
            self._line(clean(text), RED)
        else:
            sys.stderr.write(f"hydra-engine: {text}\n")
            sys.stderr.flush()

    def timeline(self, lines: Sequence[str]) -> None:
        for line in lines:
            line = clean(line)[: self.width]
            self._out.write((coloured(line) if self._colours else line) + "\n")
        self._out.flush()

    def _line(self, text: str, colour: int) -> None:
        self._out.write((painted(text, colour) if self._colours else text) + "\n")
        self._out.flush()
