"""Cross-origin rules for browsers: none by default, a list of origins, or `*`; never with credentials.

A server on loopback without keys is open to every program of this machine, browsers included. A web site whose name is
made to resolve to it (DNS rebinding) counts as the same origin, and its pages send no `Origin` with a GET. Such a
server therefore refuses requests whose `Host` is a name that a public DNS could give out. Does not know keys: a
preflight carries none and is answered before they are checked.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hydra_engine.errors import InvalidRequest

_HEADER_LIST = re.compile(r"[A-Za-z0-9\-, ]{1,1024}")
_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing"
_LOCAL_NAMES = ("localhost", "local", "internal")  # last labels of names that only a local resolver gives out


class Cors:
    def __init__(self, origins: Collection[str], *, only_this_machine: bool = False) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)
        self._names = frozenset(urlsplit(origin).hostname for origin in origins)
        self._only_this_machine = only_this_machine and not self._any

    def headers(self, request: web.Request) -> dict[str, str]:
        """The headers for every answer, including errors and streams."""
        origin = request.headers.get("Origin")
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        if not self._origins:
            return {}
        if origin is None or origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.headers(request))

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._only_this_machine:
                self._refuse_foreign_names(request)
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not is_preflight or "Access-Control-Allow-Origin" not in self.headers(request):
                return await handler(request)
            response = web.Response(status=204)
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Max-Age"] = "600"
            requested = request.headers.get("Access-Control-Request-Headers", "")
            if _HEADER_LIST.fullmatch(requested):
                response.headers["Access-Control-Allow-Headers"] = requested
            return response

        return answer_preflight

    def _refuse_foreign_names(self, request: web.Request) -> None:
        try:
            name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        except ValueError:
            return  # not what a browser sends
        if name is not None and name not in self._names and not _is_local_name(name):
            raise InvalidRequest(
                f"this server has no keys and is not to be reached as {name[:100]}; see --allow-origins and --api-key"
            )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(name: str) -> bool:
    """True for an address, which cannot be rebound, and for names that no public DNS gives out: names without a dot
    belong to this machine or its network."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        before, _, last = name.rstrip(".").rpartition(".")
        return not before or last in _LOCAL_NAMES or name == socket.gethostname().lower()
    return True
