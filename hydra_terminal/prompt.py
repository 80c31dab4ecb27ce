"""Input lines from a terminal or a pipe: line editing, completion of commands and paths, a saved history, and lines
that continue after a backslash."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hydra_engine.config import state_folder

_HISTORY_LINES = 1000
_MAX_LINES = 10_000  # per message


class Prompt:
    """An input prompt. `commands` complete at the start of a line, paths after them."""

    def __init__(self, interactive: bool, commands: Sequence[str]) -> None:
        self._interactive = interactive
        self._commands = commands
        self._readline: ModuleType | None = None
        self._history: Path | None = None
        self._matches: list[str] = []
        if interactive:
            self._set_up()

    def read(self) -> str | None:
        """Returns one message, or None at the end of the input."""
        try:
            text = self._line("> ")
            for _ in range(_MAX_LINES):
                if not text.endswith("\\"):
                    break
                text = text[:-1] + "\n" + self._line(". ")
        except EOFError:
            return None
        return text.strip()

    def close(self) -> None:
        """Saves the history in a file that only its owner can read."""
        if self._readline is None or self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._history)
        except OSError:
            return  # without a writable home there is no history

    def _line(self, mark: str) -> str:
        if self._interactive:
            return input(mark)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _set_up(self) -> None:
        try:
            import readline
        except ImportError:  # not in every build of Python: no line editing
            return
        self._readline = readline
        folder = state_folder()
        self._history = None if folder is None else folder / "chat-history"
        if self._history is not None and self._history.exists():
            try:
                readline.read_history_file(self._history)
            except OSError:
                self._history = None
        readline.set_history_length(_HISTORY_LINES)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste off")

    def _complete(self, word: str, state: int) -> str | None:
        assert self._readline is not None
        if state == 0:
            line = self._readline.get_line_buffer()
            self._matches = self._completions(word, first=self._readline.get_begidx() == 0) if line[:1] == "/" else []
        return self._matches[state] if state < len(self._matches) else None

    def _completions(self, word: str, *, first: bool) -> list[str]:
        if first:
            return [f"{name} " for name in self._commands if name.startswith(word)]
        paths = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
        return [path + "/" if os.path.isdir(path) else path for path in paths]
