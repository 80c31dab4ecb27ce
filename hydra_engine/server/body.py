"""Reads a request body within its limits of type, size and time. Does not know what is in it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from hydra_engine.errors import PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from hydra_engine.server.context import CONFIG
from hydra_engine.server.protocol.names import parse_request

R = TypeVar("R", bound=msgspec.Struct)


async def read_request(request: web.Request, kind: type[R]) -> R:
    config = request.app[CONFIG]
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("compressed request bodies are not accepted; send plain JSON")
    if request.content_type != "application/json":
        raise UnsupportedMediaType("the request body must be JSON: send Content-Type: application/json")
    if request.content_length is not None and request.content_length > config.max_body_bytes:
        raise PayloadTooLarge(f"the request body is larger than {config.max_body_bytes} bytes")
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {config.body_timeout_s:g} seconds") from None
    return parse_request(body, kind)
