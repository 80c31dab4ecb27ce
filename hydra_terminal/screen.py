"""The output of `chat`: a terminal with colours, or a pipe with plain text."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

_PIPE_COLUMNS = 100
# Codes that move the cursor or change the terminal, which an answer must not contain.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_LINE = re.compile(r"(\w+ *)(\|[^|]*\|)(.*)")
_BOLD, _DIM, _RED = 1, 2, 31  # terminal codes
_COLOURS = {
    **dict.fromkeys(("fetch", "tokenize", "preprocess"), 34),  # blue
    "encode": 35,  # magenta
    "prefill": 33,  # yellow
    "decode": 32,  # green
    **dict.fromkeys(("pull_features", "pull_kv"), 36),  # cyan
}


def coloured(line: str) -> str:
    """A line of a timeline for a terminal: bars in the colour of their stage, waits dim, missed limits red."""
    if match := _LINE.fullmatch(line):
        stage, bar, rest = match.groups()
        return _painted(stage, _BOLD) + _painted(bar, _COLOURS.get(stage.strip(), _DIM)) + _painted(rest, _DIM)
    missed = line.startswith("late:") or ": missed" in line
    return _painted(line, _RED if missed else _DIM)


def _painted(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def clean(text: str) -> str:
    """The text without control characters other than newline and tab."""
    return text.translate(_CONTROLS)


class Screen:
    """An output. On a pipe, answers and requested output go to standard output, errors to standard error, and notes are
    dropped. `plain`: no colours."""

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

    def think(self, text: str) -> None:
        """Shows a piece of the reasoning; a pipe gets none."""
        if self._terminal:
            self._out.write(_painted(clean(text), _DIM) if self._colours else clean(text))
            self._out.flush()

    def say(self, text: str) -> None:
        self.write(text + "\n")

    def note(self, text: str) -> None:
        if self._terminal:
            self._line(clean(text), _DIM)

    def error(self, text: str) -> None:
        if self._terminal:
            self._line(clean(text), _RED)
        else:
            sys.stderr.write(f"hydra-engine: {text}\n")
            sys.stderr.flush()

    def timeline(self, lines: Sequence[str]) -> None:
        for line in lines:
            line = clean(line)[: self.width]
            self._out.write((coloured(line) if self._colours else line) + "\n")
        self._out.flush()

    def _line(self, text: str, colour: int) -> None:
        self._out.write((_painted(text, colour) if self._colours else text) + "\n")
        self._out.flush()
