"""API keys, and the admin key. Does not know users: an API key opens everything but /admin, the admin key only that."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hydra_engine.errors import ConfigError, InvalidApiKey

OPEN_PATHS = frozenset({"/health", "/livez"})
ADMIN_PATHS = frozenset({"/admin/topology"})


def auth_middleware(keys: Iterable[str], admin_key: str | None = None) -> Middleware:
    """Every key is compared with every digest in full, so the time does not tell how close a guess was. Without `keys`
    everything but /admin is open; without `admin_key` nobody gets to /admin."""
    digests = [_digest(key) for key in keys]
    admin = [] if admin_key is None else [_digest(admin_key)]
    if set(admin) & set(digests):
        raise ConfigError("admin_key must not be one of the API keys; choose another one", param="admin_key")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = None if resource is None else resource.canonical
        if path in ADMIN_PATHS:
            if not _matches(request, admin):
                raise InvalidApiKey("the admin key is needed: send Authorization: Bearer KEY")
        elif digests and path not in OPEN_PATHS and not _matches(request, digests):
            raise InvalidApiKey("a valid API key is needed: send Authorization: Bearer KEY")
        return await handler(request)

    return check


def _matches(request: web.Request, digests: list[bytes]) -> bool:
    presented = _digest(_bearer(request))
    matches = [hmac.compare_digest(presented, digest) for digest in digests]
    return any(matches)


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
