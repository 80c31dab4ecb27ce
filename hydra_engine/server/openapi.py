"""GET /openapi.json: an OpenAPI 3.1 document, made from the application's routes and the types that they read and
write.

Schemas are msgspec's own, so the document matches what is checked. Does not know any field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web

from hydra_engine import __version__
from hydra_engine.errors import CODES
from hydra_engine.server.http.access_control import ADMIN_PATHS, KEYS, OPEN_PATHS, OVERVIEW_PATHS
from hydra_engine.server.http.answers import AnthropicErrorAnswer, ErrorAnswer
from hydra_engine.server.http.routes import routes_of
from hydra_engine.server.loggers import has_anthropic_style
from hydra_engine.server.operations import OPERATIONS, TEXT, Operation, Parameter
from hydra_engine.server.protocol.other_fields import EMPTY, Harmless, other_names_of

Json = dict[str, Any]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_REF = "#/components/schemas/{name}"
_EVERYWHERE = (500,)
_WORDS = {
    400: "A field or the request is wrong; the message says what to change",
    401: "No valid key",
    404: "No such model, route or request",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not plain JSON",
    429: "This client asks for more than it may; Retry-After says when to try again",
    499: "The request was ended by its id",
    500: "This request failed; others did not",
    503: "Not now; Retry-After says when to try again",
}


async def show(request: web.Request) -> web.Response:
    routes, keys = tuple(routes_of(request.app)), request.app[KEYS]
    body = await asyncio.to_thread(_encoded, routes, keys.requires_key, keys.has_admin_key)
    return web.Response(body=body, content_type=_JSON)


@lru_cache(maxsize=4)
def _encoded(routes: tuple[tuple[str, str], ...], has_api_keys: bool, has_admin_key: bool) -> bytes:
    """Builds the document as JSON. Run it in a thread: it would block the event loop for too long."""
    return msgspec.json.encode(document(routes, has_api_keys, has_admin_key))


def document(routes: Iterable[tuple[str, str]], has_api_keys: bool, has_admin_key: bool) -> Json:
    """Builds the document; routes that `OPERATIONS` does not have are left out."""
    operations = {route: OPERATIONS[route] for route in routes if route in OPERATIONS}
    schemas, components = _schemas(operations.values())
    security = _security_schemes(has_api_keys, has_admin_key)
    paths: Json = {}
    for (method, path), operation in operations.items():
        described = _operation(method, path, operation, schemas)
        if path in ADMIN_PATHS:
            described["security"] = [{"admin": []}]
        elif has_api_keys and path not in OPEN_PATHS:
            described["security"] = [{"bearer": []}, {"x_api_key": []}]
            if has_admin_key and path in OVERVIEW_PATHS:
                described["security"].append({"admin": []})
        if "security" in described:
            described["responses"]["401"] = {"$ref": f"#/components/responses/{_error_name(path, 401)}"}
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hydra-engine",
            "version": __version__,
            "description": "An inference server for vision-language models. Fields that a schema does not name are "
            "ignored; fields that would change the answer and are not built are named with the values that they may "
            "have.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _error_answers(schemas),
            "headers": {
                "X-Request-Id": {"description": "The request's id, the client's own if it sent one", **_STRING},
                "Retry-After": {"description": "Seconds", "schema": {"type": "integer"}},
                "WWW-Authenticate": {"description": "Bearer", **_STRING},
            },
            **({"securitySchemes": security} if security else {}),
        },
    }


_STRING: Json = {"schema": {"type": "string"}}


# ---- operations


def _operation(method: str, path: str, operation: Operation, schemas: dict[Any, Json]) -> Json:
    described: Json = {
        "operationId": f"{method.lower()}{path.translate(_IDENTIFIER)}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _answers(path, operation, schemas),
    }
    if operation.parameters:
        described["parameters"] = [_parameter(parameter, schemas) for parameter in operation.parameters]
    if operation.body is not None:
        examples = {f"{index}": {"value": value} for index, value in enumerate(operation.examples, 1)}
        content = {_JSON: {"schema": schemas[operation.body], "examples": examples}}
        described["requestBody"] = {"required": True, "content": content}
    return described


_IDENTIFIER = {ord(c): "_" for c in "/{}."}


def _parameter(parameter: Parameter, schemas: dict[Any, Json]) -> Json:
    schema = schemas[parameter.kind]
    if parameter.default is not None:
        schema = {**schema, "default": parameter.default}
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.description,
        "schema": schema,
    }


def _answers(path: str, operation: Operation, schemas: dict[Any, Json]) -> Json:
    if operation.answer is None:
        content: Json = {TEXT: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": schemas[operation.answer]}}
    if operation.events is not None:
        content[_EVENTS] = {"schema": _event(schemas[operation.events], done=operation.done)}
    answers: Json = {"200": {"description": "OK", "headers": _headers("X-Request-Id"), "content": content}}
    for status in sorted({*operation.errors, *_EVERYWHERE}):
        answers[str(status)] = {"$ref": f"#/components/responses/{_error_name(path, status)}"}
    for status, kind in operation.others.items():
        answers[str(status)] = _error_answer(status, schemas[kind])
    return answers


def _event(data: Json, *, done: bool) -> Json:
    """The schema of one event of a stream, in the form that tools read for this media type."""
    written = {"type": "string", "contentMediaType": _JSON, "contentSchema": data}
    return {
        "type": "object",
        "description": "One of the server-sent events that come with `stream: true`",
        "properties": {
            "event": {"type": "string", "description": "The type of the data, where that has one"},
            "data": {"oneOf": [{"const": "[DONE]"}, written]} if done else written,
        },
        "required": ["data"],
    }


# ---- errors


def _error_name(path: str, status: int) -> str:
    return f"{'AnthropicError' if has_anthropic_style(path) else 'Error'}{status}"


def _error_answers(schemas: dict[Any, Json]) -> Json:
    return {
        f"{name}{status}": _error_answer(status, schemas[kind])
        for name, kind in (("Error", ErrorAnswer), ("AnthropicError", AnthropicErrorAnswer))
        for status in _WORDS
    }


def _error_answer(status: int, schema: Json) -> Json:
    own = {401: ("WWW-Authenticate",), 429: ("Retry-After",), 503: ("Retry-After",)}.get(status, ())
    headers = _headers("X-Request-Id", *own)
    return {"description": _WORDS[status], "headers": headers, "content": {_JSON: {"schema": schema}}}


def _headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


# ---- types


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Json], Json]:
    """(schema of each type, components that the schemas refer to)."""
    kinds: dict[Any, None] = {ErrorAnswer: None, AnthropicErrorAnswer: None}
    bodies = []
    for operation in operations:
        types = [operation.body, operation.answer, operation.events, *operation.others.values()]
        kinds.update(dict.fromkeys(kind for kind in types if kind is not None))
        kinds.update(dict.fromkeys(parameter.kind for parameter in operation.parameters))
        bodies += [operation.body] if operation.body is not None else []
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for body in bodies:
        refused = other_names_of(body).refused
        components[body.__name__]["properties"] |= {name: _harmless(values) for name, values in refused.items()}
    components["ErrorBody"]["properties"]["code"] = {"enum": [None, *sorted(CODES)]}
    return dict(zip(kinds, map(_plain, schemas), strict=True)), _plain(components)


def _harmless(values: Harmless) -> Json:
    """The schema of a refused field: the values that have no effect, if they can be listed."""
    return {"enum": [*EMPTY, *(values if isinstance(values, tuple) else ())]}


def _plain(schema: Any) -> Any:
    r"""Rewrites patterns for JSON Schema, whose `$` never matches before a newline, like Python's `\Z`."""
    if isinstance(schema, dict):
        plain = {key: _plain(value) for key, value in schema.items()}
        if isinstance(pattern := schema.get("pattern"), str) and pattern.endswith(r"\Z"):
            plain["pattern"] = pattern.removesuffix(r"\Z") + "$"
        return plain
    return [_plain(item) for item in schema] if isinstance(schema, list | tuple) else schema


def _security_schemes(has_api_keys: bool, has_admin_key: bool) -> Json:
    schemes: Json = {}
    if has_api_keys:
        schemes["bearer"] = {"type": "http", "scheme": "bearer", "description": "An API key"}
        schemes["x_api_key"] = {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "An API key"}
    if has_admin_key:
        schemes["admin"] = {"type": "http", "scheme": "bearer", "description": "The admin key"}
    return schemes
