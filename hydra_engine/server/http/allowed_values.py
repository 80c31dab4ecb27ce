"""Lookup of the values that a field of a body may have, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from msgspec import inspect

_WORD = re.compile(r"[^.\[\]]+")


def allowed_values(kind: type, path: str) -> list[str]:
    """The literals allowed at a path such as `messages[0].role`, or the tags of a union of structs; empty for other
    types."""
    types = plain_types(kind)
    *words, last = _WORD.findall(path)
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
