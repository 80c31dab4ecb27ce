"""Answers as bytes: JSON with long lists in slices, and server-sent events.

A mark stands for each long list in the text around it, and the list's entries are made and encoded some at a time: the
text is never whole in memory, and the event loop runs between two slices. Does not know what an answer holds or who
reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from hydra_engine.core.schemas.numbers import encode_long

ENTRIES = 64  # of a slice; with twenty candidates each, they take about a millisecond
# JSON has no such byte, not even in a string: it escapes it.
_MARK = re.compile(rb"\x00([0-9]+)\x00")
_encode = msgspec.json.Encoder(enc_hook=encode_long).encode


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
        """`encode` for an answer that is encoded already."""
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
        yield opening + _one_line(_encode(part))[1:-1]
        opening = b","
    yield b"]" if opening == b"," else b"[]"


# ---- events


def event(data: bytes, name: str = "") -> bytes:
    """OpenAI's events have no name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _one_line(data) + b"\n\n"


# What is no end of a line to server-sent events, and one to Python's str.splitlines, by which many clients read them.
_SEPARATORS = [(character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029"]


def _one_line(data: bytes) -> bytes:
    """JSON of the same meaning in which no character ends a line to anybody. Control characters are escaped anyway."""
    if not data.isascii():
        for character, escaped in _SEPARATORS:
            data = data.replace(character, escaped)
    return data


def json_event(data: msgspec.Struct) -> bytes:
    """Named by the type of its data where that has one."""
    tag = data.__struct_config__.tag
    return event(_encode(data), tag if isinstance(tag, str) else "")


DONE = event(b"[DONE]")


# (index of the choice, its text, `usage`) -> the chunk
MakeChunk = Callable[[int, Any, Any], msgspec.Struct]


class TextEvents:
    """The events of one stream that carry nothing but text, from bytes that are made once.

    Only the text and, where it is counted along, the usage differ from one such event to the next; what is around them
    is taken from the struct, so the bytes are those that encoding the struct gives. `make` puts the text and the usage
    into one field each, as they are.
    """

    def __init__(self, make: MakeChunk) -> None:
        self._make = make
        self._around: dict[tuple[int, object], tuple[bytes, bytes]] = {}
        self._around_usage: dict[int, tuple[bytes, bytes, bytes]] = {}

    def event(self, index: int, text: str, usage: Any) -> bytes:
        """`usage` is a struct, None or UNSET."""
        if isinstance(usage, msgspec.Struct):
            head, middle, tail = self._around_usage.get(index) or self._cut_twice(index)
            return b"".join((head, _one_line(_encode(text)), middle, _encode(usage), tail))
        head, tail = self._around.get((index, usage)) or self._cut(index, usage)
        return b"".join((head, _one_line(_encode(text)), tail))

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


def _halves(first: bytes, second: bytes) -> tuple[bytes, bytes]:
    """What is before and after the only byte in which they differ."""
    place = next(place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    assert first[place + 1 :] == second[place + 1 :], "the values are in several places"
    return first[:place], first[place + 1 :]
