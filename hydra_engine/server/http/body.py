"""The body of a request: reads it as a typed struct, within the limits of its client, of type, size, time and speed,
and of all bodies together, and checks unknown names in objects of every level.

An unknown name is refused if it would change the answer, else it is ignored and logged once. Does not know the fields
of a body or what unknown names mean (`protocol/other_fields.py`).
"""

from __future__ import annotations

import asyncio
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import inspect

from hydra_engine.core.fairness import Lease
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, Unavailable, UnsupportedMediaType
from hydra_engine.server.http.strict_json import decoder_of, parse, plain_types
from hydra_engine.server.loggers import ACCESS
from hydra_engine.server.protocol.fields import log_once
from hydra_engine.server.protocol.other_fields import EMPTY, Harmless, other_names_of
from hydra_engine.server.state import CONFIG, STATE, client_of

MIN_RATE = 1024  # bytes per second while a body arrives
_PACE = 1 / 6  # share of the time limit over which the rate is measured
# Above these, parsing may take more than 2 to 3 ms and runs in the thread: bytes cost up to 25 ns each, quotes 1 us,
# and the values between commas may be checked one by one. Usual texts and pictures cost less than 1 ns per byte.
_LARGE_BYTES = 1 << 17
_MANY = ((b'"', 2048), (b",", 4096))

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

_LEASE = web.RequestKey("body_lease", Lease)
_IS_LARGE = web.RequestKey("body_is_large", bool)


@web.middleware
async def body_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the bytes of a body until its answer is finished: its text and what was parsed from it stay in memory."""
    with request.app[STATE].bodies.lease(client_of(request)) as lease:
        request[_LEASE] = lease
        try:
            return await handler(request)
        finally:
            request[ACCESS].bytes_in = lease.held


async def read_request(request: web.Request, kind: type[R]) -> R:
    """Reads and parses the body; every request with a body counts for its client's limits. Raises UnsupportedMediaType,
    RateLimited, RequestTimeout, PayloadTooLarge, Unavailable or InvalidRequest."""
    config = request.app[CONFIG]
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("compressed request bodies are not accepted; send plain JSON")
    if request.content_type != "application/json":
        raise UnsupportedMediaType("the request body must be JSON: send Content-Type: application/json")
    request.app[STATE].clients.count(client_of(request))
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(request, config.max_body_bytes, config.body_timeout_s * _PACE)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {config.body_timeout_s:g} seconds") from None
    request[_IS_LARGE] = len(body) >= _LARGE_BYTES or any(body.count(mark) >= many for mark, many in _MANY)
    return await parse_in_turn(request, parse_request, body, kind)


async def parse_in_turn(request: web.Request, make: Callable[..., T], *args: object) -> T:
    """Returns `make(*args)`, which takes time in proportion to the body. For a large body it runs in the thread, which
    clients share in turn; after a cancellation it still runs to its end."""
    if not request[_IS_LARGE]:
        return make(*args)
    return await request.app[STATE].parsing.run(client_of(request), make, *args)


async def _read(request: web.Request, limit: int, pace_s: float) -> bytearray:
    """Reads the body. Bytes count as they arrive, so an announced length alone takes nothing from other clients; a body
    that is too slow is refused, because no other client can use its bytes."""
    lease = request[_LEASE]
    announced = request.content_length or 0
    if announced > limit:
        raise _too_large(limit)
    if not lease.fits(announced):
        raise _overloaded()
    body, num_paced = bytearray(), 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(pace_s) as pace:
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                if not lease.reserve(len(chunk)):
                    raise _overloaded()
                body += chunk
                if len(body) - num_paced >= MIN_RATE * pace_s:
                    num_paced = len(body)
                    pace.reschedule(loop.time() + pace_s)
    except TimeoutError:
        message = f"the request body came slower than {MIN_RATE} bytes a second for {pace_s:g} s"
        raise RequestTimeout(message) from None
    return body


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {size(limit)}")


def _overloaded() -> Unavailable:
    return Unavailable("request bodies in progress have reached their limit (max_inflight_body_bytes); try again later")


# ---- the bytes as a struct


def parse_request(body: bytes | bytearray, kind: type[R]) -> R:
    """Parses the body as `kind`; unknown names are ignored or refused. Raises InvalidRequest."""
    request, _ = parse(body, kind)
    check_unknown_names(body, kind)
    return request


# ---- unknown names

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
