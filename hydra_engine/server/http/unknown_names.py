"""Unknown names in objects of every level of a body: refused if they would change the answer, else ignored and logged
once. Does not know what any of them means (`protocol/other_fields.py`)."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.allowed_values import plain_types
from hydra_engine.server.http.strict_json import decoder_of
from hydra_engine.server.protocol.fields import log_once
from hydra_engine.server.protocol.other_fields import other_names_of
from hydra_engine.server.protocol.top_level import EMPTY, Harmless

_MAX_ECHO = 64
_MAX_JUDGED_BYTES = 1024  # a longer value counts as one with an effect
_INDEX = re.compile(r"\[\d+\]")

Body = bytes | bytearray | msgspec.Raw


class UnknownName(NamedTuple):
    owner: type[msgspec.Struct]
    path: str
    name: str
    value: msgspec.Raw


def check_unknown_names(body: bytes | bytearray, kind: type[msgspec.Struct]) -> None:
    """Checks the unknown names of a body that has been read as `kind`. Raises InvalidRequest."""
    if _is_known(body, kind):
        return
    for unknown in unknown_names(body, kind):
        others = other_names_of(unknown.owner)
        harmless = others.refused.get(unknown.name)
        if harmless is not None and not _asks_for_nothing(unknown.value, harmless):
            raise _refusal(unknown.path, harmless, others.instead.get(unknown.name, ""))
        log_once(_INDEX.sub("[]", unknown.path))


def _is_known(body: bytes | bytearray, kind: type[msgspec.Struct]) -> bool:
    """True if a second decoding with types that forbid unknown names succeeds; the body has passed all other checks
    before."""
    try:
        decoder_of(strict(kind)).decode(body)
    except msgspec.ValidationError:
        return False
    return True


def _refusal(path: str, harmless: Harmless, hint: str) -> InvalidRequest:
    path = path[-4 * _MAX_ECHO :]
    if not hint:
        default = isinstance(harmless, tuple) and harmless
        hint = f"leave it out or send {msgspec.json.encode(default[0]).decode()}" if default else "leave it out"
    return InvalidRequest(f"{path} is not supported by this server; {hint}", param=path, code="unsupported_parameter")


def _asks_for_nothing(raw: msgspec.Raw, harmless: Harmless) -> bool:
    if len(memoryview(raw)) > _MAX_JUDGED_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number out of range
        return False
    if not isinstance(harmless, tuple):
        return value in EMPTY or harmless(value)
    return any(type(value) is type(other) and value == other for other in EMPTY + harmless)


# ---- finding them


def unknown_names(body: Body, kind: type[msgspec.Struct]) -> Iterator[UnknownName]:
    """Yields unknown names in the order of the fields. Decodes only objects that the type describes, each once, with
    its values as views of the body."""
    return _inside(body, plain_types(kind), "")


def _inside(value: Body, types: Iterable[inspect.Type], path: str) -> Iterator[UnknownName]:
    """Yields the unknown names inside a value of one of `types`."""
    first = bytes(memoryview(value)[:1])
    if first == b"[":
        items = [item for one in types if isinstance(one, inspect.ListType) for item in plain_types(one.item_type)]
        if items:
            for index, item in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
                yield from _inside(item, items, f"{path}[{index}]")
    elif first == b"{" and (structs := [one for one in types if isinstance(one, inspect.StructType)]):
        members = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        struct = _struct_of(members, structs)
        known = {field.encode_name: field.type for field in struct.fields}
        for name, member in members.items():
            where = f"{path}.{name[:_MAX_ECHO]}" if path else name[:_MAX_ECHO]
            if name in known:
                yield from _inside(member, plain_types(known[name]), where)
            elif name != struct.tag_field:
                yield UnknownName(struct.cls, where, name, member)


def _struct_of(members: dict[str, msgspec.Raw], structs: list[inspect.StructType]) -> inspect.StructType:
    """The struct with the object's tag; the first one if none matches."""
    for struct in structs:
        if struct.tag_field in members and msgspec.json.decode(members[struct.tag_field]) == struct.tag:
            return struct
    return structs[0]


# ---- the types that take no other names


@functools.cache
def strict(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns `kind` reduced to the fields that lead to its objects, with unknown names forbidden; other values are
    skipped."""
    info = plain_types(kind)[0]
    assert isinstance(info, inspect.StructType)
    return _strict_struct(info)


def _strict_struct(info: inspect.StructType) -> type[msgspec.Struct]:
    fields = [(field.encode_name, _strict(field.type), msgspec.UNSET) for field in info.fields]
    return msgspec.defstruct(
        info.cls.__name__, fields, tag_field=info.tag_field, tag=info.tag, forbid_unknown_fields=True
    )


def _strict(one: inspect.Type) -> Any:
    """The strict type of a union: structs become strict, other members keep their JSON type; `Raw` if it holds no
    struct of ours."""
    members = plain_types(one)
    if not any(_holds_structs(member) for member in members):
        return msgspec.Raw
    return functools.reduce(operator.or_, map(_strict_member, members))


def _holds_structs(one: inspect.Type) -> bool:
    if isinstance(one, inspect.ListType):
        return any(map(_holds_structs, plain_types(one.item_type)))
    return isinstance(one, inspect.StructType)


def _strict_member(one: inspect.Type) -> Any:
    match one:
        case inspect.StructType():
            return _strict_struct(one)
        case inspect.ListType():
            return list[_strict(one.item_type)]  # type: ignore[misc]  # made at run time
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return bool
        case inspect.IntType() | inspect.FloatType():
            return float
        case inspect.DictType():
            return dict[str, msgspec.Raw]
    return str
