"""Strict JSON: bytes in, a typed struct out, or an InvalidRequest that names the field, or the place in invalid JSON.

Refuses what parsers disagree on or fail on: repeated keys, deep nesting, NUL in keys, half surrogates, numbers out of
range, too many values. Scans of all bytes go slice by slice, so that other threads run in between. Does not know any
field.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import inspect

from hydra_engine.core.schemas.numbers import read_float
from hydra_engine.errors import InvalidRequest

T = TypeVar("T")

MAX_DEPTH = 64
MAX_VALUES = 250_000  # strings, arrays and objects of one body
MAX_FIELDS = 1024  # at the top level of a body
_MAX_ECHO = 200
_SLICE = 1 << 18  # bytes; the arrays of a slice fit the CPU's cache

TOP = 1  # the number of the outermost object
_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_OPEN, _CLOSE = b"{}"
_AS_CURLY = 0x20  # the bit in which square brackets differ from curly ones
_SPACES = b" \t\r\n"
_BEHIND = re.compile(rb"[ \t\r\n]*:")

Positions = npt.NDArray[np.int64]
_NONE: Positions = np.empty(0, np.int64)

NO_NUL = r"^[^\x00]*\Z"  # the pattern of names and ids; texts may hold anything that the tokenizer takes

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_QUOTED = re.compile(r"`([^`]*)`")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_Utf8 = codecs.getincrementaldecoder("utf-8")
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()
_CHARACTERS = re.compile(r"matching regex '\^\[(?P<allowed>.+)\]\{(?P<least>\d+),(?P<most>\d+)\}")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def parse(body: bytes | bytearray, kind: type[T]) -> tuple[T, set[str]]:
    """The body as `kind`, and the names of its top-level fields. Raises InvalidRequest."""
    names = _check_structure(body)
    try:
        return decoder_of(kind).decode(body), names
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise not_json(body, str(error)) from None


def decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type, created once and by one thread at a time: msgspec crashes if two threads look at a
    struct's fields for the first time."""
    with _making:
        if (decoder := _decoders.get(kind)) is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind, float_hook=read_float)
        return decoder


def _check_structure(body: bytes | bytearray) -> set[str]:
    """Checks nesting, numbers of values and fields, repeated keys, and NUL in keys; returns the top-level keys. Invalid
    JSON is left to the parser. Values are counted before any is looked at. Raises InvalidRequest."""
    _check_characters(body)
    layout = layout_of(body, MAX_VALUES)
    if layout is None:
        raise InvalidRequest(f"the request body holds more than {MAX_VALUES} values")
    if (place := layout.deeper_than(MAX_DEPTH)) is not None:
        raise InvalidRequest(
            f"the request body is nested deeper than {MAX_DEPTH} levels, {line_and_column(body, place)}"
        )
    seen: set[tuple[int, bytes]] = set()
    top: set[str] = set()
    for number, quoted, place in layout.members():
        if b"\\" in quoted or number == TOP:
            key = _key_of(quoted, body, place)
            quoted = msgspec.json.encode(key)
            if number == TOP:
                top.add(key)
                if len(top) > MAX_FIELDS:
                    raise InvalidRequest(f"the request body has more than {MAX_FIELDS} fields")
        if (number, quoted) in seen:
            key = _key_of(quoted, body, place)[:_MAX_ECHO]
            raise InvalidRequest(f"the key {key!r} appears twice in one object, again {line_and_column(body, place)}")
        seen.add((number, quoted))
    return top


def _check_characters(body: bytes | bytearray) -> None:
    decoder, view, end = _Utf8(), memoryview(body), 0
    try:
        for start in range(0, len(body), _SLICE):
            end = min(start + _SLICE, len(body))
            decoder.decode(view[start:end])
            if (place := body.find(b"\0", start, end)) >= 0:
                message = "the request body holds a NUL character; in texts write it as \\u0000"
                raise InvalidRequest(f"{message}, {line_and_column(body, place)}")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise not_utf8(body, end - len(error.object) + error.start) from None


def _key_of(quoted: bytes | bytearray, body: bytes | bytearray, start: int) -> str:
    try:
        key = msgspec.json.decode(quoted, type=str)
    except msgspec.DecodeError as error:
        raise not_json(body, str(error), start, start + len(quoted)) from None
    if "\0" in key:
        raise InvalidRequest(f"a key of the request body holds a NUL character, {line_and_column(body, start)}")
    return key


def _invalid_field(text: str, kind: type) -> InvalidRequest:
    """Rewrites msgspec's message in the API's style: the path as `param`, no marks, a bounded echo."""
    match = _PATH.search(text)
    param = match["path"] if match else ""
    words = text[: match.start()] if match else text
    is_key, is_value = "`key` in" in text[len(words) :], param.endswith("[...]")
    param = param.removesuffix("[...]")
    subject = f"{param}: each {'key' if is_key else 'value'}" if is_key or is_value else param
    if missing := _MISSING.match(words):
        name = f"{param}.{missing['name']}" if param else missing["name"]
        return InvalidRequest(f"{name} is required", param=name)
    if repr(NO_NUL) in words:
        return InvalidRequest(f"{param} must not hold a NUL character", param=param)
    if characters := _CHARACTERS.search(words):
        allowed = characters["allowed"].replace("\\", "")
        numbers = f"{characters['least']} to {characters['most']}"
        return InvalidRequest(f"{subject} must be {numbers} characters of {allowed}", param=param)
    words = _QUOTED.sub(_type_names, words)[:_MAX_ECHO]
    if words.startswith(("Invalid enum value", "Invalid value")) and (allowed := allowed_values(kind, param)):
        words += f"; supported values are {', '.join(map(repr, allowed))}"
    if not param:
        return InvalidRequest(f"the request body is wrong: {words}")
    # An object of an unsupported type (input_audio, file, document, ...), which another server may accept.
    code = "unsupported_parameter" if words.startswith("Invalid value") else None
    return InvalidRequest(f"{subject}: {words}", param=param, code=code)


def _type_names(quoted: re.Match[str]) -> str:
    return " or ".join(_JSON_NAMES.get(name, name) for name in quoted[1].split(" | "))


# ---- the layout: positions of strings, brackets and keys, found by operations on whole arrays. Costs a few ns per byte
# and about 0.5 us per key for any text. Invalid JSON gives an arbitrary layout; the parser refuses it.


class Layout:
    """The positions of a body's strings and brackets, as arrays: starts and ends of strings (their quotes), and
    brackets outside of strings."""

    def __init__(self, body: bytes | bytearray, quotes: Positions, brackets: Positions) -> None:
        self._body = body
        self._bytes = np.frombuffer(body, np.uint8)
        num_strings = len(quotes) // 2
        self._starts, self._ends = quotes[: 2 * num_strings : 2], quotes[1 : 2 * num_strings : 2]
        self._brackets = brackets
        self._opens = (self._bytes[brackets] | _AS_CURLY) == _OPEN
        self._depths: Positions = np.cumsum(np.where(self._opens, 1, -1), dtype=np.int64)  # after each bracket

    def deeper_than(self, max_depth: int) -> int | None:
        """The position of the first bracket deeper than `max_depth` levels, or None."""
        places = np.flatnonzero(self._depths > max_depth)
        return int(self._brackets[places[0]]) if len(places) else None

    def members(self) -> Iterator[tuple[int, bytes, int]]:
        """Yields (number of the object, key with its quotes, position of the key)."""
        is_key = self._colon_follows()
        starts, ends = self._starts[is_key], self._ends[is_key]
        objects = self._containers_of(starts)
        for number, start, end in zip(objects.tolist(), starts.tolist(), ends.tolist(), strict=True):
            yield number, bytes(self._body[start : end + 1]), start

    def _colon_follows(self) -> npt.NDArray[np.bool_]:
        behind = np.minimum(self._ends + 1, len(self._bytes) - 1)
        following = self._bytes[behind]
        follows: npt.NDArray[np.bool_] = following == _COLON
        for place in np.flatnonzero(np.isin(following, np.frombuffer(_SPACES, np.uint8))).tolist():
            follows[place] = _BEHIND.match(self._body, int(behind[place])) is not None
        return follows

    def _containers_of(self, positions: Positions) -> Positions:
        """The number of the array or object around each position. Containers are numbered by depth and, within one
        depth, from left to right."""
        brackets, depths = self._brackets[self._opens], self._depths[self._opens]
        before = np.searchsorted(self._brackets, positions) - 1
        around = np.where(before >= 0, self._depths[before], 0) if len(self._depths) else np.zeros_like(positions)
        places, levels = np.concatenate((brackets, positions)), np.concatenate((depths, around))
        order = np.lexsort((places, levels))
        begins = order < len(brackets)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.cumsum(begins)
        return numbers[len(brackets) :]


def layout_of(body: bytes | bytearray, max_positions: int) -> Layout | None:
    """The layout of a body; None if there are more than `max_positions` strings, arrays and objects."""
    quotes: list[Positions] = [_NONE]
    brackets: list[Positions] = [_NONE]
    num_opens, num_quotes, num_backslashes = 0, 0, 0  # backslashes directly before the slice
    view = memoryview(body)
    for begin in range(0, len(body), _SLICE):
        part = np.frombuffer(view[begin : begin + _SLICE], np.uint8)
        marks, num_backslashes = _quotes(part, num_backslashes)
        folded = part | _AS_CURLY
        places = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
        outside = places[(np.searchsorted(marks, places) + num_quotes) % 2 == 0]
        num_quotes += len(marks)
        num_opens += int(np.count_nonzero(folded[outside] == _OPEN))
        if num_quotes // 2 + num_opens > max_positions:
            return None
        quotes.append(marks + begin)
        brackets.append(outside + begin)
    return Layout(body, np.concatenate(quotes), np.concatenate(brackets))


def _quotes(part: npt.NDArray[Any], num_before: int) -> tuple[Positions, int]:
    """Positions of the unescaped quotes in a slice, and the number of backslashes at its end; `num_before` backslashes
    directly precede it."""
    quotes = np.flatnonzero(part == _QUOTE)
    at_end = _backslashes_at_end(part, num_before)
    if not num_before and not (part[quotes[quotes > 0] - 1] == _BACKSLASH).any():
        return quotes, at_end
    # Starts and ends of runs of backslashes; a quote after an odd run is escaped.
    edges = np.flatnonzero(np.diff(part == _BACKSLASH, prepend=False, append=False))
    firsts, behinds = edges[::2], edges[1::2]
    lengths = behinds - firsts
    if num_before:
        if not len(firsts) or firsts[0] != 0:
            firsts, behinds, lengths = (np.insert(array, 0, 0) for array in (firsts, behinds, lengths))
        lengths[0] += num_before
    is_escaped = np.zeros(len(part) + 1, np.bool_)
    is_escaped[behinds[lengths % 2 == 1]] = True
    return quotes[~is_escaped[quotes]], at_end


def _backslashes_at_end(part: npt.NDArray[Any], num_before: int) -> int:
    data = part.tobytes()
    num = len(data) - len(data.rstrip(b"\\"))
    return num + num_before if num == len(data) else num


# ---- messages for invalid JSON: what is wrong and where

_BYTE = re.compile(r" \(byte (\d+)\)$")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!\\u[dD][89abAB]..)%b" % (_HIGH, _LOW, _LOW), re.DOTALL)
_AROUND = 12  # bytes of two escapes
_NUMBER = re.compile(rb"NaN|-?Infinity")
_WORD = re.compile(rb"True|False|None|undefined")
_WRITTEN = {b"True": "true", b"False": "false", b"None": "null", b"undefined": "null"}
_BOMS = {
    b"\xef\xbb\xbf": "begins with a byte order mark; send UTF-8 without one",
    b"\xff\xfe": "is UTF-16; send UTF-8",
    b"\xfe\xff": "is UTF-16; send UTF-8",
}

Body = bytes | bytearray


def line_and_column(body: Body, place: int) -> str:
    """The line and column of the byte offset `place`; columns count characters."""
    line = body.count(b"\n", 0, place) + 1
    before = bytes(body[body.rfind(b"\n", 0, place) + 1 : place])
    return f"at line {line}, column {len(before.decode('utf-8', 'replace')) + 1}"


def not_utf8(body: Body, place: int) -> InvalidRequest:
    if bom := _bom(body):
        return bom
    return InvalidRequest(f"the request body is not valid UTF-8, {line_and_column(body, place)}")


def not_json(body: Body, words: str, start: int = 0, end: int | None = None) -> InvalidRequest:
    """The error for an invalid body. `words` is msgspec's message about the bytes from `start` to `end`."""
    if bom := _bom(body):
        return bom
    if not body.strip():
        return InvalidRequest("the request body is not valid JSON: it is empty")
    match = _BYTE.search(words)
    end = len(body) if end is None else end
    place = min(start + int(match[1]), end) if match else end
    if match is None or "surrogate" in words or "escape" in words:
        first = max(place - _AROUND, 0)
        if half := _HALF.search(body, first, place + _AROUND):
            what = f"{half[0].decode()} is half of a surrogate pair and no character; send the character or both halves"
            return _invalid_json(body, what, half.start())
    return _invalid_json(
        body, "it ends too early" if match is None else _what(body, place, words[: match.start()]), place
    )


def _invalid_json(body: Body, what: str, place: int) -> InvalidRequest:
    return InvalidRequest(f"the request body is not valid JSON: {what}, {line_and_column(body, place)}")


def _bom(body: Body) -> InvalidRequest | None:
    found = next((words for mark, words in _BOMS.items() if body.startswith(mark)), None)
    return InvalidRequest(f"the request body {found}") if found else None


def _what(body: Body, place: int, words: str) -> str:
    if number := _NUMBER.match(body, place) or _NUMBER.match(body, max(place - 1, 0)):
        return f"{number[0].decode()} is no number of JSON"
    if word := _WORD.match(body, place):
        return f"{word[0].decode()} must be written {_WRITTEN[word[0]]}"
    byte = body[place] if place < len(body) else 0x20
    if byte == ord("'"):
        return "keys and strings must be in double quotes"
    if byte < 0x20 and "invalid character" in words:
        return f"control characters in texts are escaped, here as \\u{byte:04x}"
    if "trailing characters" in words:
        return "there is more after its end"
    return words.rpartition("malformed: ")[2]


# ---- the values that a field of a body may have, for messages

_PATH_WORD = re.compile(r"[^.\[\]]+")


def allowed_values(kind: type, path: str) -> list[str]:
    """The literals allowed at a path such as `messages[0].role`, or the tags of a union of structs; empty for other
    types."""
    types = plain_types(kind)
    *words, last = _PATH_WORD.findall(path)
    for word in words:
        types = [found for one in types for inner in _inside(one, word) for found in _plain(inner)]
    tags = [str(one.tag) for one in types if isinstance(one, inspect.StructType) and one.tag_field == last]
    fields = [found for one in types for inner in _inside(one, last) for found in _plain(inner)]
    return tags or [str(value) for one in fields if isinstance(one, inspect.LiteralType) for value in one.values]


def plain_types(kind: type | inspect.Type) -> list[inspect.Type]:
    """The alternatives of a type (the members of a union) without their metadata."""
    return list(_plain(kind if isinstance(kind, inspect.Type) else _type_of(kind)))


@cache
def _type_of(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _plain(one: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.Metadata):
        yield from _plain(one.type)
    elif isinstance(one, inspect.UnionType):
        for member in one.types:
            yield from _plain(member)
    else:
        yield one


def _inside(one: inspect.Type, word: str) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.StructType):
        yield from (field.type for field in one.fields if field.encode_name == word)
    elif isinstance(one, (inspect.ListType, inspect.VarTupleType)):
        yield one.item_type
    elif isinstance(one, inspect.DictType):
        yield one.value_type
