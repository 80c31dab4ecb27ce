"""Reads a request body within the limits of its client, of type, size, time and speed, and of what all bodies may hold
together, as a typed struct. Does not know its fields.
"""

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
from hydra_engine.server.http.unknown_names import judge_unknown_names
from hydra_engine.server.state import CONFIG, STATE, client_of

LEAST_RATE = 1024  # bytes a second of a body that is not there yet
_PACE = 1 / 6  # of the time that a body may take: over so much of it the rate is taken
# From here on parsing may take more than two or three milliseconds, and takes the thread: as many bytes, each 25 ns at
# most, or as many quotes, each a microsecond, or commas, whose values may be looked through one by one. Usual texts and
# pictures cost less than a nanosecond a byte.
_LARGE_BYTES = 1 << 17
_MANY = ((b'"', 2048), (b",", 4096))

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

_LEASE = web.RequestKey("body_lease", Lease)
_IS_LARGE = web.RequestKey("body_is_large", bool)


@web.middleware
async def body_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a body holds, as text and as what was made of it, is held until its answer has been made."""
    with request.app[STATE].bodies.lease(client_of(request)) as lease:
        request[_LEASE] = lease
        try:
            return await handler(request)
        finally:
            request[ACCESS].bytes_in = lease.held


async def read_request(request: web.Request, kind: type[R]) -> R:
    """The one way to a body; every request that has one counts for its client."""
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
    return await made_of_body(request, parse_request, body, kind)


async def made_of_body(request: web.Request, make: Callable[..., T], *args: object) -> T:
    """`make(*args)`, which takes time in proportion to the body: of a large one in the thread, which clients take in
    turn; one that nobody waits for any more has it until it is done."""
    if not request[_IS_LARGE]:
        return make(*args)
    return await request.app[STATE].parsing.run(client_of(request), make, *args)


async def _read(request: web.Request, most: int, pace_s: float) -> bytearray:
    """Bytes count as they come, so that a length that was only announced takes nothing from others; and they have to
    come, as nobody else has what these hold."""
    lease = request[_LEASE]
    announced = request.content_length or 0
    if announced > most:
        raise _too_large(most)
    if not lease.fits(announced):
        raise _overloaded()
    body, num_paced = bytearray(), 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(pace_s) as pace:
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > most:
                    raise _too_large(most)
                if not lease.take(len(chunk)):
                    raise _overloaded()
                body += chunk
                if len(body) - num_paced >= LEAST_RATE * pace_s:
                    num_paced = len(body)
                    pace.reschedule(loop.time() + pace_s)
    except TimeoutError:
        message = f"the request body came slower than {LEAST_RATE} bytes a second for {pace_s:g} s"
        raise RequestTimeout(message) from None
    return body


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {size(most)}")


def _overloaded() -> Unavailable:
    return Unavailable("request bodies in progress have reached their limit (max_inflight_body_bytes); try again later")


# ---- the bytes as a struct


def parse_request(body: bytes | bytearray, kind: type[R]) -> R:
    """The body as `kind`, after the names that it does not have were ignored or refused."""
    request, _ = parse(body, kind)
    judge_unknown_names(body, kind)
    return request
