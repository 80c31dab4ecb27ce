"""What connections have sent is parsed a piece at a time, in turn, and so much of it in one turn of the event loop:
whatever the bytes are, others wait for no more than that.

A line costs far more than a byte, because each header, each chunk and each end of one is a line. Does not know what
connections do with their pieces.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

PIECE_BYTES = 8 << 10
_LINES_A_TURN = 4096  # about five milliseconds of one-byte chunks
_BYTES_A_LINE = 1024  # plain bytes that count as a line


class Source(Protocol):
    """A connection that has something to be parsed."""

    def parse_piece(self) -> bool:
        """Whether there is more that could be parsed now."""
        ...


class ReadingTurns:
    """Shared by the connections of one server, on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Source, None] = OrderedDict()  # the longest waiting first
        self._left = _LINES_A_TURN
        self._is_turn = False  # something was parsed in this one

    def may_parse(self) -> bool:
        """Whether there is room in this turn for whoever does not wait yet."""
        return self._left > 0 and not self._waiting

    def count(self, piece: bytes) -> None:
        """A piece is about to be parsed."""
        self._left -= 1 + piece.count(b"\n") + len(piece) // _BYTES_A_LINE
        self._ask_for_next()

    def wait(self, source: Source) -> None:
        """It is asked for its next piece in its turn; once, however often it is said."""
        self._waiting.setdefault(source)
        self._ask_for_next()

    def forget(self, source: Source) -> None:
        self._waiting.pop(source, None)

    def _ask_for_next(self) -> None:
        if not self._is_turn:
            self._is_turn = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """The next turn of the loop."""
        self._is_turn, self._left = False, _LINES_A_TURN
        while self._left > 0 and self._waiting:
            source, _ = self._waiting.popitem(last=False)
            if source.parse_piece():
                self._waiting[source] = None
        if self._waiting:
            self._ask_for_next()
