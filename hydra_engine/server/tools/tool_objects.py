"""A tool call as one JSON object with a name and arguments, read character by character, and the events for texts and
calls.

Does not know the text around a call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = _ARGUMENTS | {"name", "type", "id"}
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the arguments of a call that has started."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class ToolParser(Protocol):
    """A parser of a growing text into events. All text appears in some event, except marks of calls, white space around
    calls, and calls beyond the allowed number. Events do not depend on how the text is split."""

    @property
    def is_cut(self) -> bool:
        """True if the text ended inside the arguments of a call; known after `finish`."""
        ...

    def parse(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The events that were held back; no `parse` may follow."""
        ...


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Output:
    """A list of events in order, neighbours joined. Calls after the first `most` are dropped. White space at the start
    and directly after calls is held until words follow; a call drops it."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._most = max_calls
        self._events: list[Event] = []
        self._parts: list[str] = []  # parts of the growing event: content, or arguments of the latest call
        self._grows_call = False
        self._num_calls = 0
        self._space: list[str] = []
        self._has_words = False  # since the start or the last call

    def text(self, text: str) -> None:
        if not self._has_words:
            self._space.append(text)
            if not text or text.isspace():
                return
            text, self._has_words = self._take_space(), True
        self._grow(text, call=False)

    def start(self, name: str) -> None:
        self._close()
        self._num_calls += 1
        self._space.clear()
        self._has_words = False
        if self.is_wanted:
            self._events.append(CallStart(self._num_calls - 1, call_id(), name))

    def arguments(self, text: str) -> None:
        if self.is_wanted:
            self._grow(text, call=True)

    def drain(self) -> list[Event]:
        self._close()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        if not self._num_calls:
            self._grow(self._take_space(), call=False)
        return self.drain()

    @property
    def is_wanted(self) -> bool:
        """True if the latest call is within `most`."""
        return self._most is None or self._num_calls <= self._most

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _grow(self, text: str, *, call: bool) -> None:
        if call != self._grows_call:
            self._close()
            self._grows_call = call
        self._parts.append(text)

    def _close(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text) if self._grows_call else Content(text))


class CallObject:
    """A parser of one JSON object that may be a call, fed character by character. `state` is reading, done (the last
    character was the closing bracket) or failed (the character fits no call). Once `begun`, arguments go to the output
    at once."""

    def __init__(self, names: Collection[str], output: Output) -> None:
        self._names = names
        self._output = output
        self.state = "reading"
        self.begun = False
        self._raw: list[str] = []
        self._expects = "object"  # object, key, colon, value, comma; in_key and in_value while reading one
        self._start = 0  # index of the current key or value in the raw text
        self._depth = 0  # nesting of brackets inside a value
        self.in_string = False
        self._escaped = False
        self._key = ""
        self._name: str | None = None
        self._held: str | None = None  # arguments that came before the name
        self._streams = False  # the current value is the arguments of a call that has begun

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def is_empty(self) -> bool:
        return self._expects == "object"

    @property
    def is_cut(self) -> bool:
        """True if a text that ends here ends inside the arguments."""
        return self._streams

    @property
    def last(self) -> str:
        return self._raw[-1] if self._raw else ""

    def parse(self, char: str) -> str:
        self._raw.append(char)
        if self._streams:
            self._output.arguments(char)
        if self.in_string:
            self._in_string(char)
        elif self._expects == "in_value":
            self._in_value(char)
        elif char not in SPACE:
            self._between(char)
        return self.state

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            if self._expects == "in_key":
                self._end_key()
            elif self._depth == 0:
                self._end_value(len(self._raw))

    def _in_value(self, char: str) -> None:
        """Reads a value. Brackets are counted, not matched: broken arguments end where complete ones would."""
        if char == '"' and self._depth:
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            if self._depth == 0:
                self._end_value(len(self._raw))
        elif self._depth == 0 and char in SPACE + ",}":  # after a number or a word
            self._end_value(len(self._raw) - 1)
            if self.state == "reading" and char not in SPACE:
                self._between(char)

    def _between(self, char: str) -> None:
        if self._expects == "object" and char == "{":
            self._expects = "key"
        elif self._expects == "key" and char == '"':
            self._start, self._expects, self.in_string = len(self._raw) - 1, "in_key", True
        elif self._expects == "colon" and char == ":":
            self._expects = "value"
        elif self._expects == "value" and char not in ",:]}<":
            self._begin_value(char)
        elif self._expects == "comma" and char == ",":
            self._expects = "key"
        elif self._expects in ("comma", "key") and char == "}":
            self._end()
        else:
            self.state = "failed"

    def _begin_value(self, char: str) -> None:
        self._start, self._expects = len(self._raw) - 1, "in_value"
        self.in_string, self._depth = char == '"', int(char in "{[")
        if char == "{" and self._key in _ARGUMENTS and self._name is not None and not self.begun:
            self._begin(char)
            self._streams = True

    def _end_key(self) -> None:
        self._key, self._expects = _text("".join(self._raw[self._start :])) or "", "colon"
        if not self.begun and self._key not in _KNOWN:
            self.state = "failed"

    def _end_value(self, end: int) -> None:
        self._expects = "comma"
        if self._streams or self.begun:
            self._streams = False
            return
        value = "".join(self._raw[self._start : end])
        if self._key == "name" and self._name is None:
            self._name = _text(value)
            if self._name not in self._names:
                self.state = "failed"
            elif self._held is not None:
                self._begin(self._held)
        elif self._key in _ARGUMENTS:
            self._held = object_text(value)
            if self._held is None:
                self.state = "failed"
            elif self._name is not None:
                self._begin(self._held)

    def _begin(self, arguments: str) -> None:
        assert self._name is not None
        self.begun = True
        self._output.start(self._name)
        self._output.arguments(arguments)

    def _end(self) -> None:
        if self._name is None:
            self.state = "failed"
            return
        if not self.begun:  # without arguments
            self._begin("{}")
        self.state = "done"


def _text(value: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        parsed = json.loads(value, strict=False)
    except ValueError:
        return None
    return parsed if isinstance(parsed, str) else None


def object_text(value: str) -> str | None:
    """The text of a JSON object, given directly or inside a JSON string; None if there is none."""
    try:
        parsed = json.loads(value, strict=False)
        if isinstance(parsed, str):
            value, parsed = parsed, json.loads(parsed, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(parsed, dict) else None
