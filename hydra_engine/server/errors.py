"""The one place where exceptions become HTTP: OpenAI error bodies, as a status before the first byte of an answer and
as an event after it. Does not know what any request meant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine.errors import (
    HydraError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    UnsupportedMediaType,
)
from hydra_engine.server.context import METRICS, REQUEST_ID

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 500

_BY_STATUS: dict[int, tuple[type[HydraError], str]] = {
    404: (NotFound, "no such route; see /v1/models, /v1/chat/completions and /v1/completions"),
    405: (MethodNotAllowed, "this route does not take that method; the Allow header lists the ones it takes"),
    408: (RequestTimeout, "the request did not arrive in time"),
    413: (PayloadTooLarge, "the request body is larger than this server accepts"),
    415: (UnsupportedMediaType, "the request body has a type that this server does not read"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class Stream(Protocol):
    """An answer of events; once started, its status is sent."""

    @property
    def started(self) -> bool: ...

    async def fail(self, event: bytes) -> web.StreamResponse:
        """Sends the last event and ends the answer."""
        ...


STREAM = web.RequestKey[Stream]("stream")


def error_body(error: HydraError) -> ErrorBody:
    message = " ".join(error.message.split())
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 1] + "…"
    return ErrorBody(message, error.error_type, error.param, error.code)


def error_json(error: HydraError) -> bytes:
    return msgspec.json.encode(ErrorAnswer(error_body(error)))


def error_response(error: HydraError, headers: Mapping[str, str] | None = None) -> web.Response:
    response = web.Response(status=error.status, body=error_json(error), content_type="application/json")
    response.headers.update(headers or {})
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s or 1)
    if isinstance(error, InvalidApiKey):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except web.HTTPException as exception:
        error = _from_http(exception)
        if "Allow" in exception.headers:
            headers["Allow"] = exception.headers["Allow"]
    except RequestAborted:
        # Only an engine that ends requests on its own gets here: the owner of this one still waits for it.
        error = RequestFailed("the request was stopped before it had finished")
    except HydraError as exception:
        error = exception
        if error.status >= 500 and request.method == "POST":
            logger.warning("%s %d %s: %s", request[REQUEST_ID], error.status, error.code, error.message)
    except asyncio.CancelledError:
        logger.info("%s 499 the client has gone", request[REQUEST_ID])
        raise
    except ConnectionError as exception:
        logger.info("%s 499 %s", request[REQUEST_ID], exception)
        return web.Response(status=499)
    except Exception:  # the server's one boundary: our bug fails this request and is logged
        logger.exception("%s 500 unexpected error", request[REQUEST_ID])
        error = RequestFailed("internal error; the server's log has the details under this request's id")
    if error.status == 503 and request.method == "POST":
        request.app[METRICS].rejected(error.code)
    stream = request.get(STREAM)
    if stream is not None and stream.started:
        return await stream.fail(error_json(error))
    return error_response(error, headers)


def _from_http(exception: web.HTTPException) -> HydraError:
    if exception.status in _BY_STATUS:
        kind, message = _BY_STATUS[exception.status]
        return kind(message)
    if exception.status < 500:
        return InvalidRequest("the HTTP request is malformed")
    return RequestFailed("internal error")
