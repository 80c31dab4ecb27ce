"""JSON that means one thing only: bytes in, a typed struct out, or an InvalidRequest that names the field.

Refuses what parsers disagree on or choke on: repeated keys, deep nesting, NUL in keys, half surrogates, numbers that do
not fit, endless numbers of values. What looks at every byte does so slice by slice, so that in a thread it lets others
run meanwhile. Does not know any field.
"""

from __future__ import annotations

import codecs
import re
import threading
from typing import Any, TypeVar

import msgspec

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.json_layout import TOP, layout_of

T = TypeVar("T")

MAX_DEPTH = 64
MAX_VALUES = 250_000  # strings, arrays and objects of one body
MAX_FIELDS = 1024  # of the body itself
LARGE_BYTES = 1 << 14  # from here on the layout is found faster by arrays; fewer bytes never hold too many values
_MAX_ECHO = 200
_SLICE = 1 << 18
_BACKSLASH = 0x5C

NO_NUL = r"^[^\x00]*\Z"  # the pattern of names and ids; texts may hold whatever the tokenizer takes

_STRUCTURE = re.compile(rb'["{}\[\]]')
_COLON = re.compile(rb"[ \t\r\n]*:")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_QUOTED = re.compile(r"`([^`]*)`")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_Utf8 = codecs.getincrementaldecoder("utf-8")
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def parse(body: bytes | bytearray, kind: type[T]) -> tuple[T, set[str]]:
    """The body as `kind`, and the names of its top-level fields."""
    names = _check_structure(body)
    try:
        return _decoder_of(kind).decode(body), names
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _malformed() from None


def _decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Made once, by one thread at a time: msgspec crashes where two threads look at a struct's fields for the first
    time."""
    with _making:
        if (decoder := _decoders.get(kind)) is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
        return decoder


def _check_structure(body: bytes | bytearray) -> set[str]:
    """Nesting, number of fields, repeated keys, and NUL in keys; what is not JSON at all is left to the parser."""
    _check_utf8(body)
    if _holds(body, b"\0"):
        raise InvalidRequest("the request body holds a NUL character; in texts write it as \\u0000")
    return _walk(body) if len(body) < LARGE_BYTES else _survey(body)


def _walk(body: bytes | bytearray) -> set[str]:
    """String by string and bracket by bracket: the fastest for a small body, which has few of them."""
    top: set[str] = set()
    stack: list[set[str] | None] = []  # the keys of each open object; None for an array
    position = 0
    while found := _STRUCTURE.search(body, position):
        position = found.end()
        match found[0]:
            case b'"':
                end = _string_end(body, position)
                colon = _COLON.match(body, end + 1)
                if colon and stack and (keys := stack[-1]) is not None:
                    key = _key_of(body[position - 1 : end + 1])
                    if key in keys:
                        raise _repeated(key)
                    keys.add(key)
                position = colon.end() if colon else end + 1
            case b"{" | b"[":
                stack.append((set() if stack else top) if found[0] == b"{" else None)
                if len(stack) > MAX_DEPTH:
                    raise _too_deep()
            case _:
                if stack:
                    stack.pop()
    if len(top) > MAX_FIELDS:
        raise _too_many_fields()
    return top


def _survey(body: bytes | bytearray) -> set[str]:
    """The same of a large body, whose values are counted before any of them is looked at."""
    layout = layout_of(body, MAX_VALUES)
    if layout is None:
        raise InvalidRequest(f"the request body holds more than {MAX_VALUES} values")
    if layout.depth > MAX_DEPTH:
        raise _too_deep()
    seen: set[tuple[int, bytes]] = set()
    top: set[str] = set()
    for number, quoted in layout.members():
        if b"\\" in quoted or number == TOP:
            key = _key_of(quoted)
            quoted = msgspec.json.encode(key)
            if number == TOP:
                top.add(key)
                if len(top) > MAX_FIELDS:
                    raise _too_many_fields()
        if (number, quoted) in seen:
            raise _repeated(_key_of(quoted))
        seen.add((number, quoted))
    return top


def _check_utf8(body: bytes | bytearray) -> None:
    decoder, view = _Utf8(), memoryview(body)
    try:
        for start in range(0, len(body), _SLICE):
            decoder.decode(view[start : start + _SLICE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InvalidRequest("the request body is not valid UTF-8") from None


def _holds(body: bytes | bytearray, found: bytes) -> bool:
    overlap = len(found) - 1
    return any(body.find(found, start, start + _SLICE + overlap) >= 0 for start in range(0, len(body), _SLICE))


def _string_end(body: bytes | bytearray, start: int) -> int:
    """Where the string that starts at `start` has its closing quote."""
    end = body.find(b'"', start)
    while end >= 0:
        if body[end - 1] != _BACKSLASH or _ends_unescaped(body[start:end]):
            return end
        start = end + 1
        end = body.find(b'"', start)
    return len(body)


def _ends_unescaped(text: bytes | bytearray) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 0


def _key_of(quoted: bytes | bytearray) -> str:
    try:
        key = msgspec.json.decode(quoted, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _malformed() from None
    if "\0" in key:
        raise InvalidRequest("a key of the request body holds a NUL character")
    return key


def _repeated(key: str) -> InvalidRequest:
    return InvalidRequest(f"the key {key[:_MAX_ECHO]!r} appears twice in one object")


def _too_many_fields() -> InvalidRequest:
    return InvalidRequest(f"the request body has more than {MAX_FIELDS} fields")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")


def _malformed() -> InvalidRequest:
    return InvalidRequest("the request body is not valid JSON")


def _invalid_field(text: str) -> InvalidRequest:
    """msgspec's words in the form of the API: the path as `param`, no marks, no long echo."""
    found = _PATH.search(text)
    param = found["path"] if found else ""
    words = text[: found.start()] if found else text
    if missing := _MISSING.match(words):
        name = f"{param}.{missing['name']}" if param else missing["name"]
        return InvalidRequest(f"{name} is required", param=name)
    if repr(NO_NUL) in words:
        return InvalidRequest(f"{param} must not hold a NUL character", param=param)
    words = _QUOTED.sub(_type_names, words)[:_MAX_ECHO]
    if not param:
        return InvalidRequest(f"the request body is wrong: {words}")
    return InvalidRequest(f"{param}: {words}", param=param)


def _type_names(quoted: re.Match[str]) -> str:
    return " or ".join(_JSON_NAMES.get(name, name) for name in quoted[1].split(" | "))
