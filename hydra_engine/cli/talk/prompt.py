"""Lines as they are typed or piped in: line editing, completion of commands and paths, a history that is kept, and
lines that go on after a backslash. Does not know what a line means.
"""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hydra_engine.config import state_folder

_HISTORY_LINES = 1000
_MAX_LINES = 10_000  # of one message that goes on and on


class Prompt:
    """`commands` are completed at the start of a line, paths behind those named in `with_paths`."""

    def __init__(self, interactive: bool, commands: Sequence[str], with_paths: frozenset[str]) -> None:
        self._interactive = interactive
        self._commands = commands
        self._with_paths = with_paths
        self._readline: ModuleType | None = None
        self._history: Path | None = None
        self._matches: list[str] = []
        if interactive:
            self._set_up()

    def read(self) -> str | None:
        """One message, or None at the end of the input."""
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
        """Keeps what was typed, for its owner only."""
        if self._readline is None or self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._history)
        except OSError:
            return  # a home that cannot be written is no reason to fail

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
        except ImportError:  # a Python without it: lines are read as they come
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
        # The whole line is what is completed: a path may hold spaces.
        readline.set_completer_delims("\n")
        readline.set_completer(self._complete)
        readline.set_completion_display_matches_hook(self._show)
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste off")

    def _complete(self, line: str, state: int) -> str | None:
        if state == 0:
            self._matches = self.completions(line)
        return self._matches[state] if state < len(self._matches) else None

    def completions(self, line: str) -> list[str]:
        """Whole lines that begin with `line`."""
        command, space, rest = line.partition(" ")
        if not space:
            return [f"{name} " for name in self._commands if name.startswith(line)] if line.startswith("/") else []
        if command not in self._with_paths:
            return []
        begin = _last_word(rest)
        head, word = rest[:begin], rest[begin:].lstrip("'\"").replace("\\", "")
        found = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
        return [f"{command} {head}{_shown(path, word)}" for path in found]

    def _show(self, _substitution: str, matches: Sequence[str], _longest: int) -> None:
        names = [match.rstrip("/").rsplit("/", 1)[-1] + ("/" if match.endswith("/") else "") for match in matches]
        if all(match.strip() in self._commands for match in matches):
            names = [match.strip() for match in matches]
        assert self._readline is not None
        sys.stdout.write("\n" + "  ".join(names) + "\n> " + self._readline.get_line_buffer())
        sys.stdout.flush()


def _last_word(text: str) -> int:
    """Where the last word begins, which may hold escaped or quoted spaces."""
    begin, quote, escaped = 0, "", False
    for index, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == " ":
            begin = index + 1
    return begin


def _shown(path: str, word: str) -> str:
    """`path` as it is typed: with the ~ that was typed, spaces escaped, a slash behind folders."""
    ending = "/" if os.path.isdir(path) else ""
    if word.startswith("~"):
        home = os.path.expanduser(word.split("/", 1)[0])
        path = word.split("/", 1)[0] + path.removeprefix(home)
    return path.replace(" ", "\\ ") + ending


def words(text: str) -> list[str]:
    """Words as a shell reads them; a quote that is never closed is part of a name."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]
