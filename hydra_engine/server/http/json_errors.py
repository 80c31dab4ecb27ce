"""Error messages for invalid JSON: what is wrong and where. Does not know any field."""

from __future__ import annotations

import re

from hydra_engine.errors import InvalidRequest

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
