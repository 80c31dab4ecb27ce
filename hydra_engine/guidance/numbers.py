"""Checks the numbers of a JSON schema: llguidance reads them as floats, and bounds of integers as 64 bits.

Refuses numbers that llguidance would change. Schemas are read with their exact digits: `parse` returns ints and
Decimals, `write_schema` writes them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, TypeGuard

Number = int | Decimal

LOWEST = -(1 << 63) + 1024  # the least integer that llguidance takes as a bound; the greatest is 2^63 - 1
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_ALONE = 10**18  # from here on llguidance takes a bound of integers only together with the opposite bound
_MAX_SHOWN = 40  # digits
_MAX_FACTOR = 1 << 32


def parse(text: str) -> Any:
    """Parses JSON with numbers as int or Decimal. Raises ValueError."""
    return json.loads(text, parse_int=_integer, parse_float=_decimal, parse_constant=_no_number)


def write_schema(schema: dict[str, Any]) -> str:
    """Writes a schema as JSON. Raises ValueError for numbers out of a float's range."""
    return json.dumps(schema, ensure_ascii=False, default=_as_float)


def _integer(text: str) -> Number:
    return int(text) if len(text) < 4000 else Decimal(text)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"the number {text[:_MAX_SHOWN]} is out of range") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _as_float(number: object) -> float:
    assert isinstance(number, Decimal)
    value = _near(number)
    if math.isinf(value):
        raise ValueError(f"the number {_shown(number)} is out of range")
    return value


def normalise_numbers(schemas: Iterable[dict[str, Any]]) -> None:
    """Checks the numbers of schemas, and changes them in place to what llguidance takes: counts become integers, lower
    bounds of integers at least `LOWEST`. Raises ValueError that says what to write instead."""
    factors: set[Decimal] = set()
    for schema in schemas:
        for keyword in ("const", "enum"):
            for number in _numbers_in(schema.get(keyword)):
                _check_value(keyword, number)
        for keyword in _COUNTS:
            if isinstance(count := schema.get(keyword), Decimal) and count == count.to_integral_value():
                schema[keyword] = int(count) if abs(count) < 1 << 63 else count
        for keyword in (*_LOWER, *_UPPER):
            if _is_number(bound := schema.get(keyword)):
                _check_bound(schema, keyword, bound)
        if _is_number(factor := schema.get("multipleOf")):
            factors.add(_factor(factor))
        if _is_of_integers(schema):
            _keep_above_lowest(schema)
    # llguidance multiplies factors that apply together as 32-bit integers.
    digits = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
    if len(factors) > 1 and math.prod(int(factor.scaleb(max(digits, 0))) for factor in factors) >= _MAX_FACTOR:
        raise ValueError(
            f"multipleOf {' and '.join(map(_shown, sorted(factors)[:3]))} cannot hold together; use smaller ones, "
            "or only one of them"
        )


def _is_number(value: object) -> TypeGuard[Number]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _numbers_in(value: object) -> Iterator[Number]:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict | list):
            stack += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | Decimal) and not isinstance(one, bool):
            yield one


def _near(number: Number) -> float:
    """The nearest float, which may be infinite."""
    return float(Decimal(number))


def _shown(number: object) -> str:
    text = str(number).lower()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _refuse(keyword: str, number: Number, way_out: str = "") -> ValueError:
    near = _near(number)
    nearest = int(near) if isinstance(number, int) and abs(near) < _MAX_ALONE else near
    other = "" if abs(near) >= _MAX_ALONE else f" or {nearest!r}"
    return ValueError(
        f"{keyword} {_shown(number)} would not be kept exactly, as numbers here are doubles; write "
        + (way_out or f"the string {json.dumps(_shown(number))}{other}")
    )


def _check_value(keyword: str, number: Number) -> None:
    """Raises ValueError for a number of `enum` or `const` that llguidance would write with other digits.

    It writes 64-bit integers with the double's own digits, and everything else with the shortest digits of the double.
    """
    near = _near(number)
    if isinstance(number, int) and -(1 << 63) <= number < 1 << 63:
        kept = LOWEST <= number == min(int(near), (1 << 63) - 1)
    else:
        kept = Decimal(repr(near)) == number
    if not kept:
        raise _refuse(keyword, number)


def _types(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _is_of_integers(schema: dict[str, Any]) -> bool:
    types = _types(schema)
    return "integer" in types and "number" not in types


def _check_bound(schema: dict[str, Any], keyword: str, bound: Number) -> None:
    types = _types(schema)
    if "number" in types or "integer" not in types:
        near = _near(bound)
        if abs(near) >= _MAX_ALONE or Decimal(repr(near)) != bound:
            raise _refuse(keyword, bound, "one of at most 15 digits")
    if "number" not in types or "integer" in types:
        _check_bound_of_integers(schema, keyword, bound)


def _check_bound_of_integers(schema: dict[str, Any], keyword: str, bound: Number) -> None:
    is_lower = keyword in _LOWER
    if not -(1 << 63) < bound < 1 << 63:
        if is_lower == (bound < 0):  # it excludes no 64-bit integer
            return
        raise _refuse(keyword, bound, "a string instead, with a pattern of its digits")
    near = _near(bound)
    if is_lower:
        least = math.ceil(bound) if keyword == "minimum" else math.floor(bound) + 1
        kept = math.ceil(near) if keyword == "minimum" or near != math.floor(near) else int(near + 1.0)
        alone = least >= _MAX_ALONE and not any(_is_number(schema.get(name)) for name in _UPPER)
    else:
        least = math.floor(bound) if keyword == "maximum" else math.ceil(bound) - 1
        kept = math.floor(near) if keyword == "maximum" or near != math.floor(near) else int(near - 1.0)
        alone = least <= -_MAX_ALONE and not any(_is_number(schema.get(name)) for name in _LOWER)
    if min(kept, (1 << 63) - 1) != least or kept < LOWEST:
        raise _refuse(keyword, bound, "a bound up to 9007199254740991, or a string with a pattern of its digits")
    if alone:
        other = "maximum" if is_lower else "minimum"
        raise ValueError(f"{keyword} {_shown(bound)} needs a {other} beside it")


def _keep_above_lowest(schema: dict[str, Any]) -> None:
    for keyword in _LOWER:
        if _is_number(bound := schema.get(keyword)) and bound < LOWEST:
            del schema[keyword]
            schema["minimum"] = LOWEST


def _factor(number: Number) -> Decimal:
    """The number of a `multipleOf`, which llguidance splits into a 32-bit integer and a power of ten."""
    value, digits = abs(_near(number)), 0
    while value < _MAX_FACTOR and value != math.floor(value):
        value, digits = value * 10.0, digits + 1
    if not value < _MAX_FACTOR or Decimal(int(value)).scaleb(-digits) != abs(number):
        raise _refuse("multipleOf", number, "an integer below 2^32, or a factor such as 0.1, 0.25 or 0.001")
    return Decimal(int(value)).scaleb(-digits).normalize()
