"""Turns of parsing: bytes from connections are parsed a piece at a time, in rotation, and up to a limit per turn of the
event loop, so that no input can block other connections for longer.

A line costs far more than a byte, because each header, each chunk and each end of one is a line. Does not know what
connections do with their pieces.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

PIECE_BYTES = 8 << 10
_LINES_A_TURN = 4096  # per turn; about five milliseconds of one-byte chunks
_BYTES_A_LINE = 1024  # plain bytes that count as one line


class Source(Protocol):
    """A connection with unparsed bytes."""

    def parse_piece(self) -> bool:
        """Parses one piece. True if more could be parsed now."""
        ...


class ReadingTurns:
    """Shared turns of the connections of one server, on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Source, None] = OrderedDict()  # longest waiting first
        self._left = _LINES_A_TURN
        self._is_turn = False  # the next turn is scheduled

    def may_parse(self) -> bool:
        """True if a connection that is not in the queue may parse in this turn."""
        return self._left > 0 and not self._waiting

    def count(self, piece: bytes) -> None:
        """Counts a piece that is about to be parsed."""
        self._left -= 1 + piece.count(b"\n") + len(piece) // _BYTES_A_LINE
        self._ask_for_next()

    def enqueue(self, source: Source) -> None:
        """Queues a connection for its next piece. Idempotent until its turn."""
        self._waiting.setdefault(source)
        self._ask_for_next()

    def discard(self, source: Source) -> None:
        self._waiting.pop(source, None)

    def _ask_for_next(self) -> None:
        if not self._is_turn:
            self._is_turn = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Runs the next turn: one piece of each waiting connection, until the limit."""
        self._is_turn, self._left = False, _LINES_A_TURN
        while self._left > 0 and self._waiting:
            source, _ = self._waiting.popitem(last=False)
            if source.parse_piece():
                self._waiting[source] = None
        if self._waiting:
            self._ask_for_next()
