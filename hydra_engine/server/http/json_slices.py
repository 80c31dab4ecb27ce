"""Writes JSON with long lists in slices: a mark stands for each list in the text around it, and the list's entries are
made and encoded some at a time. The text is never whole in memory, and the event loop runs between two slices.

Does not know what the lists hold or who reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

ENTRIES = 64  # of a slice; with twenty candidates each, they take about a millisecond
# JSON has no such byte, not even in a string: it escapes it.
_MARK = re.compile(rb"\x00([0-9]+)\x00")
_encode = msgspec.json.Encoder().encode


class Slices:
    """The long lists of one answer, of a stream also over several of its events."""

    def __init__(self) -> None:
        self._lists: list[Callable[[], Iterable[object]]] = []
        self._num_made = 0  # entries, since something was encoded

    def later(self, num_entries: int, entries: Callable[[], Iterable[object]]) -> Any:
        """What stands for the list in a struct that `encode` gets; the list itself where it and those before it are
        short. `entries` is called each time that the list is written."""
        if self._num_made + num_entries <= ENTRIES:
            self._num_made += num_entries
            return list(entries())
        self._lists.append(entries)
        return msgspec.Raw(b"\x00%d\x00" % (len(self._lists) - 1))

    def encode(self, answer: msgspec.Struct) -> bytes | Iterator[bytes]:
        """The answer; parts of it where it has long lists."""
        return self.fill(_encode(answer))

    def fill(self, data: bytes) -> bytes | Iterator[bytes]:
        """The same for what is encoded already."""
        self._num_made = 0
        around = _MARK.split(data) if self._lists else [data]
        return self._parts(around) if len(around) > 1 else data

    def _parts(self, around: list[bytes]) -> Iterator[bytes]:
        for place, piece in enumerate(around):
            if place % 2:
                yield from _written(self._lists[int(piece)]())
            else:
                yield piece


def _written(entries: Iterable[object]) -> Iterator[bytes]:
    opening, left = b"[", iter(entries)
    while part := list(islice(left, ENTRIES)):
        yield opening + _encode(part)[1:-1]
        opening = b","
    yield b"]" if opening == b"," else b"[]"
