"""The routes of the application, and the sentences for a request that none of them takes: the nearest route, or what
is here instead of another API's.

Does not know what the routes do.
"""

from __future__ import annotations

from difflib import get_close_matches

from aiohttp import web

from hydra_engine.errors import MethodNotAllowed, NotFound
from hydra_engine.server.http.access_control import PAGE_FILES

PAGE_PATHS = PAGE_FILES | {"/ui/events", "/docs"}  # for browsers, not a part of the API
_MAX_PATH = 128  # characters that are compared
_SIMILARITY = 0.7

# Beginnings of paths of other APIs, and what to do here.
_ELSEWHERE = {
    ("/api/",): "Ollama's API is not served; OpenAI's is at /v1/chat/completions",
    ("/generate",): "use POST /v1/chat/completions, or /v1/completions without a chat template",
    ("/v1/embeddings", "/embed", "/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"): (
        "this server generates text; it has no embeddings or scores"
    ),
    ("/v1/audio/", "/v1/images/", "/v1/realtime"): "this server writes text; it takes pictures, and no audio",
    ("/v1/files", "/v1/batches"): "nothing is stored here; hydra-engine run-batch answers a file of requests",
}


def with_slashes(routes: list[web.RouteDef]) -> list[web.RouteDef]:
    """Returns the routes, each also with a slash at its end, which comes first: a name in a path may have slashes."""
    slashed = [web.RouteDef(route.method, f"{route.path}/", route.handler, route.kwargs) for route in routes]
    return [*slashed, *routes]


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    """(method, path) of the API's routes, without HEAD, which every GET has, the page's routes, and spellings that end
    in a slash."""
    routes = []
    for route in app.router.routes():
        path = "/" if route.resource is None else route.resource.canonical
        if path in PAGE_PATHS or path.endswith("/"):
            continue
        if route.method != "HEAD":
            routes.append((route.method, path))
    return routes


def no_such_route(request: web.Request) -> NotFound:
    """The error for a path that no route has; it never repeats the path."""
    path, listed = request.path, "GET /docs lists all routes"
    for beginnings, sentence in _ELSEWHERE.items():
        if path.startswith(beginnings):
            return NotFound(f"no such route: {sentence}")
    methods = {route: method for method, route in reversed(routes_of(request.app))}
    nearest = get_close_matches(path[:_MAX_PATH], methods, n=1, cutoff=_SIMILARITY)
    if request.match_info.route.resource is not None or not nearest:
        return NotFound(f"no such route; {listed}")
    return NotFound(f"no such route; did you mean {methods[nearest[0]]} {nearest[0]}? {listed}")


def wrong_method(exception: web.HTTPMethodNotAllowed) -> MethodNotAllowed:
    """The error for a method that the route does not take."""
    methods = " or ".join(sorted(exception.allowed_methods - {"HEAD"}))
    return MethodNotAllowed(f"this route does not take that method; use {methods}")
