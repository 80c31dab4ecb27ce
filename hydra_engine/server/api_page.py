"""GET /docs: the routes for people, with a command for each, made from the entries of /openapi.json. One file without
scripts; nothing is fetched from elsewhere.

Does not know fields: /openapi.json has them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from html import escape

from aiohttp import web

from hydra_engine import __version__
from hydra_engine.server.http.access_control import ADMIN_PATHS, KEYS, OPEN_PATHS
from hydra_engine.server.http.routes import routes_of
from hydra_engine.server.operations import OPERATIONS, Operation

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "h2{margin-top:2.5rem}h3{margin:1.5rem 0 0}p{margin:.2rem 0}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14px}"
    "pre{padding:.6rem;border:1px solid #8886;border-radius:4px}"
)
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


async def show(request: web.Request) -> web.Response:
    keys, server = request.app[KEYS], f"{request.scheme}://{request.host}"
    routes = [route for route in routes_of(request.app) if route in OPERATIONS]
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>API of hydra-engine</title><style>{_STYLE}</style>'
        f"<h1>API of hydra-engine {__version__}</h1><p>Every field with its bounds: "
        '<a href="openapi.json">openapi.json</a> (OpenAPI 3.1).'
    ]
    for tag in dict.fromkeys(operation.tag for operation in OPERATIONS.values()):
        of_tag = [(*route, OPERATIONS[route]) for route in routes if OPERATIONS[route].tag == tag]
        parts += [f"<h2>{escape(tag)}</h2>"] if of_tag else []
        for method, path, operation in of_tag:
            key = "ADMIN_KEY" if path in ADMIN_PATHS else "KEY" if keys.requires_key and path not in OPEN_PATHS else ""
            command = escape(_command(method, f"{server}{path}", operation, key))
            parts.append(f"<h3><code>{method} {path}</code></h3><p>{escape(operation.summary)}<pre>{command}</pre>")
    return web.Response(text="\n".join(parts), content_type="text/html", headers=_HEADERS)


def _command(method: str, url: str, operation: Operation, key: str) -> str:
    """A call of curl; `key` stands for the key that the route needs, empty for none."""
    words: list[str] = ["curl", "-s"]
    if operation.examples:
        body = json.dumps(operation.examples[0], ensure_ascii=False)
        words += [url, "-H", "Content-Type: application/json", "-d", body]
    else:
        words += [*(["-X", method] if method != "GET" else []), url]
    return shlex.join([*words, *(["-H", f"Authorization: Bearer {key}"] if key else [])])
