"""Where `chat` writes: a terminal with colours and Markdown, or a pipe with nothing but text.

On a terminal the part of an answer that is done is printed once and stays; only its last block is drawn again while it
grows, at most so many times a second, so nothing flickers. Does not know what is asked or answered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from hydra_engine.cli.talk.blocks import clean, split_blocks
from hydra_engine.cli.timeline import coloured

_FRAMES_PER_S = 12
_THEME = "ansi_dark"


class Writer(Protocol):
    def __call__(self, piece: str) -> None: ...


class Screen(Protocol):
    @property
    def width(self) -> int: ...
    def say(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def answer(self) -> AbstractContextManager[Writer]: ...
    def timeline(self, lines: Sequence[str]) -> None: ...


class PlainScreen:
    """For pipes: answers and what was asked for on standard output, the rest on standard error or nowhere."""

    width = 100

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Nobody reads along."""

    def error(self, text: str) -> None:
        sys.stderr.write(f"hydra-engine: {text}\n")
        sys.stderr.flush()

    @contextmanager
    def answer(self) -> Iterator[Writer]:
        began = False

        def write(piece: str) -> None:
            nonlocal began
            began = True
            sys.stdout.write(piece)
            sys.stdout.flush()

        try:
            yield write
        finally:
            if began:
                write("\n")

    def timeline(self, lines: Sequence[str]) -> None:
        self.say("\n".join(lines))


class TerminalScreen:
    """`markdown` off prints text as it comes, which is also what a terminal without a movable cursor gets."""

    def __init__(self, console: Console, *, markdown: bool) -> None:
        self._console = console
        self._markdown = markdown and not console.is_dumb_terminal

    @property
    def width(self) -> int:
        return self._console.width

    def say(self, text: str) -> None:
        self._console.print(Text(clean(text)))

    def note(self, text: str) -> None:
        self._console.print(Text(clean(text), style="dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(clean(text), style="red"))

    @contextmanager
    def answer(self) -> Iterator[Writer]:
        if self._markdown:
            with _LiveAnswer(self._console) as write:
                yield write
            return
        try:
            yield lambda piece: self._console.out(clean(piece), end="", highlight=False)
        finally:
            self._console.out("")

    def timeline(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(coloured(clean(line)), no_wrap=True, overflow="ellipsis", crop=True)


class _LiveAnswer:
    """The block that is being written, over blocks that are done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""
        self._any = False
        self._live = Live(
            get_renderable=lambda: _Tail(self._open),
            console=console,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> _LiveAnswer:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        rest, self._open = self._open, ""
        self._live.stop()
        if rest.strip():
            self._print(rest)

    def __call__(self, piece: str) -> None:
        done, self._open = split_blocks(self._open + clean(piece))
        for block in done:
            self._print(block)

    def _print(self, block: str) -> None:
        if self._any:
            self._console.print()
        self._any = True
        self._console.print(_markdown(block))


class _Tail:
    """The last lines of a text, as many as a screen has: what is above them cannot be drawn again."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._text.strip():
            yield Text("…", style="dim")
            return
        lines = console.render_lines(_markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Markdown:
    # Addresses are shown and not hidden behind words.
    return Markdown(text, code_theme=_THEME, hyperlinks=False)
