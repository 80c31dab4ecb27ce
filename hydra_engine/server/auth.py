"""API keys. Does not know users: a key opens everything or nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hydra_engine.errors import InvalidApiKey

OPEN_PATHS = frozenset({"/health", "/livez"})


def auth_middleware(keys: Iterable[str]) -> Middleware:
    """Every key is compared with every digest in full, so the time does not tell how close a guess was."""
    digests = [_digest(key) for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_PATHS:
            presented = _digest(_bearer(request))
            matches = [hmac.compare_digest(presented, digest) for digest in digests]
            if not any(matches):
                raise InvalidApiKey("a valid API key is needed: send Authorization: Bearer KEY")
        return await handler(request)

    return check


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
