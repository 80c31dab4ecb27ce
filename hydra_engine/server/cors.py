"""Cross-origin rules for browsers: none by default, a list of origins, or `*`; never with credentials.

Does not know keys: a preflight carries none and is answered before they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_HEADER_LIST = re.compile(r"[A-Za-z0-9\-, ]{1,1024}")
_METHODS = "GET, POST, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing"


class Cors:
    def __init__(self, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, request: web.Request) -> dict[str, str]:
        """For every answer, errors and streams included."""
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

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if not is_preflight or "Access-Control-Allow-Origin" not in self.headers(request):
                return await handler(request)
            response = web.Response(status=204)
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Max-Age"] = "600"
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            if _HEADER_LIST.fullmatch(wanted):
                response.headers["Access-Control-Allow-Headers"] = wanted
            return response

        return answer_preflight
