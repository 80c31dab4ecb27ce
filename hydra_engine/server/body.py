"""Reads a request body within the limits of its client, of type, size and time, and of what all bodies may hold
together. Does not know what is in it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine.errors import PayloadTooLarge, RequestTimeout, Unavailable, UnsupportedMediaType
from hydra_engine.server.access import ACCESS
from hydra_engine.server.admission import client_of
from hydra_engine.server.commons import COMMONS, BodyLease
from hydra_engine.server.context import CONFIG
from hydra_engine.server.protocol.names import parse_request

_LARGE_BYTES = 1 << 18  # from here on parsing takes a good part of a millisecond, and the thread
# One: parsing holds the interpreter's lock, so that more of them would only take more turns from the loop.
_parser = ThreadPoolExecutor(1, "large-bodies")

R = TypeVar("R", bound=msgspec.Struct)

_LEASE = web.RequestKey[BodyLease]("body_lease")


@web.middleware
async def body_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a body holds, as text and as what was made of it, is held until its answer has been made."""
    with request.app[COMMONS].lease() as lease:
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
    await request.app[COMMONS].count(client_of(request))
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(request, config.max_body_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {config.body_timeout_s:g} seconds") from None
    if len(body) < _LARGE_BYTES:
        return parse_request(body, kind)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse_request, body, kind)


async def _read(request: web.Request, most: int) -> bytearray:
    """Bytes count as they come, so that a length that was only announced takes nothing from others."""
    lease = request[_LEASE]
    announced = request.content_length or 0
    if announced > most:
        raise _too_large(most)
    if not await lease.fits(announced):
        raise _overloaded()
    body = bytearray()
    async for chunk in request.content.iter_any():
        if len(body) + len(chunk) > most:
            raise _too_large(most)
        if not await lease.take(len(chunk)):
            raise _overloaded()
        body += chunk
    return body


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {most} bytes")


def _overloaded() -> Unavailable:
    return Unavailable("the server holds as many request bodies as it has room for; try again later")
