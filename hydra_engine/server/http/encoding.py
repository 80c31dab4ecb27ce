"""Encoding of answers: JSON with long lists in slices, and server-sent events.

A mark replaces each long list in the text around it, and the list's entries are made and encoded a slice at a time: the
text is never complete in memory, and the event loop runs between two slices. Does not know what an answer holds or its
reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from hydra_engine.core.schemas.numbers import encode_long

ENTRIES = 64  # per slice; with twenty candidates each, they take about a millisecond
# JSON never contains this byte: strings escape it.
_MARK = re.compile(rb"\x00([0-9]+)\x00")
_encode = msgspec.json.Encoder(enc_hook=encode_long).encode


class Slices:
    """The long lists of one answer; for a stream, across several of its events."""

    def __init__(self) -> None:
        self._lists: list[Callable[[], Iterable[object]]] = []
        self._num_made = 0  # entries since the last encoding

    def defer(self, num_entries: int, entries: Callable[[], Iterable[object]]) -> Any:
        """Returns a placeholder for the list, for a struct that `encode` gets; the list itself if it and those before
        it are short. `entries` is called each time the list is written."""
        if self._num_made + num_entries <= ENTRIES:
            self._num_made += num_entries
            return list(entries())
        self._lists.append(entries)
        return msgspec.Raw(b"\x00%d\x00" % (len(self._lists) - 1))

    def encode(self, answer: msgspec.Struct) -> bytes | Iterator[bytes]:
        """The encoded answer; an iterator of its parts if it has long lists."""
        return self.fill(_encode(answer))

    def fill(self, data: bytes) -> bytes | Iterator[bytes]:
        """Like `encode`, for an answer that is already encoded."""
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
    """A server-sent event; OpenAI's events have no name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _one_line(data) + b"\n\n"


# Line ends for Python's str.splitlines, which many clients use, but not for server-sent events.
_SEPARATORS = [(character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029"]


def _one_line(data: bytes) -> bytes:
    """Escapes line separators in JSON, which some clients take for line ends. Control characters are escaped
    already."""
    if not data.isascii():
        for character, escaped in _SEPARATORS:
            data = data.replace(character, escaped)
    return data


def json_event(data: msgspec.Struct) -> bytes:
    """A server-sent event, named by the tag of its data if that has one."""
    tag = data.__struct_config__.tag
    return event(_encode(data), tag if isinstance(tag, str) else "")


DONE = event(b"[DONE]")


# (index of the choice, its text, `usage`) -> the chunk
MakeChunk = Callable[[int, Any, Any], msgspec.Struct]


class TextEvents:
    """An encoder for the events of one stream that are only text, from bytes that are made once.

    Only the text and, with a running count, the usage differ from one such event to the next; the bytes around them
    come from encoding the struct once, so the result equals its full encoding. `make` must put the text and the usage
    unchanged into one field each.
    """

    def __init__(self, make: MakeChunk) -> None:
        self._make = make
        self._around: dict[tuple[int, object], tuple[bytes, bytes]] = {}
        self._around_usage: dict[int, tuple[bytes, bytes, bytes]] = {}

    def event(self, index: int, text: str, usage: Any) -> bytes:
        """Encodes one event. `usage` is a struct, None or UNSET."""
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
    """The bytes before and after the only byte in which `first` and `second` differ."""
    place = next(place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    assert first[place + 1 :] == second[place + 1 :], "the values are in several places"
    return first[:place], first[place + 1 :]
