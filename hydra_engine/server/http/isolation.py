"""Isolates the caches of API keys from each other: the cache salt of every request to the engine is made here.

Each `GenerationCall` of this room takes its `cache_salt` from here (a test holds that). Does not know what is cached.
"""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web

from hydra_engine.server.context import CONFIG, TENANT

SALT_SECRET = web.AppKey("salt_secret", bytes)  # drawn at start: caches live no longer than the process


def cache_salt(request: web.Request, own: str | None) -> str:
    """`own`: what the client asked for, which parts its requests among themselves. Without keys, or where caches are
    shared, that is all there is. Nobody who does not know the secret can name the salt of another key."""
    tenant = request.get(TENANT, "")
    if not tenant or request.app[CONFIG].share_caches:
        return own or ""
    text = f"salt\0{tenant}\0{own or ''}".encode("utf-8", "surrogatepass")
    return hmac.new(request.app[SALT_SECRET], text, hashlib.sha256).hexdigest()
