"""Reads a request body as a typed struct, within the limits of its client, of type, size, time and speed, and of all
bodies together. Does not know its fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine.core.fairness.byte_budget import Lease
from hydra_engine.core.units import size
from hydra_engine.errors import PayloadTooLarge, RequestTimeout, Unavailable, UnsupportedMediaType
from hydra_engine.server.http.access import ACCESS
from hydra_engine.server.http.strict_json import parse
from hydra_engine.server.http.unknown_names import check_unknown_names
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
