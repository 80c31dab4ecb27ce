"""Events of a stream that carry nothing but text, from bytes that are made once.

Only the text and, where it is counted along, the usage differ from one such event to the next; what is around them is
taken from the struct, so the bytes are those that encoding the struct gives. Does not know which struct that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hydra_engine.server.http.sse import event

_encode = msgspec.json.Encoder().encode

# (index of the choice, its text, `usage`) -> the chunk
MakeChunk = Callable[[int, Any, Any], msgspec.Struct]


class TextEvents:
    """Of one stream. `make` puts the text and the usage into one field each, as they are."""

    def __init__(self, make: MakeChunk) -> None:
        self._make = make
        self._around: dict[tuple[int, object], tuple[bytes, bytes]] = {}
        self._around_usage: dict[int, tuple[bytes, bytes, bytes]] = {}

    def event(self, index: int, text: str, usage: Any) -> bytes:
        """`usage` is a struct, None or UNSET."""
        if isinstance(usage, msgspec.Struct):
            head, middle, tail = self._around_usage.get(index) or self._cut_twice(index)
            return b"".join((head, _encode(text), middle, _encode(usage), tail))
        head, tail = self._around.get((index, usage)) or self._cut(index, usage)
        return b"".join((head, _encode(text), tail))

    def _cut(self, index: int, usage: Any) -> tuple[bytes, bytes]:
        around = _halves(*(event(_encode(self._make(index, value, usage))) for value in (1, 2)))
        self._around[index, usage] = around
        return around

    def _cut_twice(self, index: int) -> tuple[bytes, bytes, bytes]:
        head, rest = _halves(*(event(_encode(self._make(index, value, 1))) for value in (1, 2)))
        other = event(_encode(self._make(index, 1, 2)))
        middle, tail = _halves(rest, other[len(head) + 1 :])
        self._around_usage[index] = head, middle, tail
        return head, middle, tail


def _halves(one: bytes, other: bytes) -> tuple[bytes, bytes]:
    """What is before and after the only byte in which they differ."""
    place = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    assert one[place + 1 :] == other[place + 1 :], "the values are in several places"
    return one[:place], one[place + 1 :]
