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
from hydra_engine.server.http.json_layout import TOP, layout_of

T = TypeVar("T")

MAX_DEPTH = 64
MAX_VALUES = 250_000  # strings, arrays and objects of one body
MAX_FIELDS = 1024  # of the body itself
_MAX_ECHO = 200
_SLICE = 1 << 18

NO_NUL = r"^[^\x00]*\Z"  # the pattern of names and ids; texts may hold whatever the tokenizer takes

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
    """Nesting, number of values and fields, repeated keys, and NUL in keys; what is not JSON at all is left to the
    parser. Values are counted before any of them is looked at."""
    _check_characters(body)
    layout = layout_of(body, MAX_VALUES)
    if layout is None:
        raise InvalidRequest(f"the request body holds more than {MAX_VALUES} values")
    if layout.depth > MAX_DEPTH:
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    seen: set[tuple[int, bytes]] = set()
    top: set[str] = set()
    for number, quoted in layout.members():
        if b"\\" in quoted or number == TOP:
            key = _key_of(quoted)
            quoted = msgspec.json.encode(key)
            if number == TOP:
                top.add(key)
                if len(top) > MAX_FIELDS:
                    raise InvalidRequest(f"the request body has more than {MAX_FIELDS} fields")
        if (number, quoted) in seen:
            raise InvalidRequest(f"the key {_key_of(quoted)[:_MAX_ECHO]!r} appears twice in one object")
        seen.add((number, quoted))
    return top


def _check_characters(body: bytes | bytearray) -> None:
    decoder, view = _Utf8(), memoryview(body)
    try:
        for start in range(0, len(body), _SLICE):
            decoder.decode(view[start : start + _SLICE])
            if body.find(b"\0", start, start + _SLICE) >= 0:
                raise InvalidRequest("the request body holds a NUL character; in texts write it as \\u0000")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InvalidRequest("the request body is not valid UTF-8") from None


def _key_of(quoted: bytes | bytearray) -> str:
    try:
        key = msgspec.json.decode(quoted, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _malformed() from None
    if "\0" in key:
        raise InvalidRequest("a key of the request body holds a NUL character")
    return key


def _malformed() -> InvalidRequest:
    return InvalidRequest("the request body is not valid JSON")


def _invalid_field(text: str) -> InvalidRequest:
    """msgspec's words in the form of the API: the path as `param`, no marks, no long echo."""
    match = _PATH.search(text)
    param = match["path"] if match else ""
    words = text[: match.start()] if match else text
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
