"""Numbers in JSON Schemas with all written digits, including those that a float does not keep."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import msgspec


class LongFloat(float):
    """A float whose written digits exceed its precision; `text` has all of them."""

    text: str


def read_float(text: str) -> float:
    """Parses a JSON number. Returns a LongFloat if the text has 16 or more characters and a float does not keep its
    value. Raises ValueError for a number that is too large for a float."""
    number = float(text)
    if math.isinf(number):
        raise ValueError("Number out of range")
    if len(text) < 16 or Decimal(text) == Decimal(repr(number)):
        return number
    long = LongFloat(number)
    long.text = text
    return long


def encode_long(value: object) -> msgspec.Raw:
    """Encodes a LongFloat with all its digits; for use as the `enc_hook` of msgspec's encoders. Raises TypeError for
    other types."""
    if not isinstance(value, LongFloat):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return msgspec.Raw(value.text.encode())


def schema_text(schema: dict[str, Any]) -> str:
    """JSON text of the schema with all digits of its numbers, including LongFloats and integers beyond 64 bits."""
    return msgspec.json.encode(_with_digits(schema), enc_hook=encode_long).decode()


def _with_digits(value: Any) -> Any:
    """A copy in which integers beyond int64 are raw JSON, since msgspec encodes none beyond 64 bits."""
    if isinstance(value, dict):
        return {name: _with_digits(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_digits(inner) for inner in value]
    is_long = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    return msgspec.Raw(str(value).encode()) if is_long else value
