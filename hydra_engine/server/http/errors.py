"""Converts exceptions to HTTP, and nothing else does: to a status before the first byte of an answer, to an event after
it.

Bodies have OpenAI's shape, under /v1/messages Anthropic's: the style follows the route. An endpoint whose streams end
in their own event sets `FAILURE`. Does not know what any request meant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler

from hydra_engine.errors import (
    ExpectationFailed,
    HydraError,
    InvalidApiKey,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    Unavailable,
    UnsupportedMediaType,
)
from hydra_engine.server.http.answers import EventStream, event
from hydra_engine.server.loggers import ACCESS, PROBES, has_anthropic_style, route_of
from hydra_engine.server.state import PLACES, REQUEST_ID, STATE

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 500
_REFUSALS = frozenset({401, 408, 413, 415, 429, 503})  # by the server's state or its limits, not by the request

_BY_STATUS: dict[int, tuple[type[HydraError], str]] = {
    404: (NotFound, "no such route; see /v1/models, /v1/chat/completions and /v1/completions"),
    405: (MethodNotAllowed, "this route does not take that method; the Allow header lists the ones it takes"),
    408: (RequestTimeout, "the request did not arrive in time"),
    413: (PayloadTooLarge, "the request body is larger than this server accepts"),
    415: (UnsupportedMediaType, "the request body has a type that this server does not read"),
    417: (ExpectationFailed, "of the Expect header this server knows 100-continue only; leave it out"),
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


STREAM = web.RequestKey("stream", EventStream)  # set once its status is sent
FAILURE = web.RequestKey[Callable[[HydraError], bytes]]("failure")  # the last event of a stream that fails


def error_body(error: HydraError) -> ErrorBody:
    message = " ".join(error.message.split())
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 1] + "…"
    return ErrorBody(message, error.error_type, error.param, error.code)


def error_json(error: HydraError) -> bytes:
    return msgspec.json.encode(ErrorAnswer(error_body(error)))


# ---- Anthropic's shape

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_ANTHROPIC_TYPES: dict[int, AnthropicErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: AnthropicErrorType
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None


def _anthropic_json(error: HydraError, request_id: str | None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = AnthropicErrorBody(kind, error_body(error).message)
    return msgspec.json.encode(AnthropicErrorAnswer(error=body, request_id=request_id))


# ---- answers


def _last_event(request: web.Request, error: HydraError) -> bytes:
    if FAILURE in request:
        return request[FAILURE](error)
    if has_anthropic_style(request.path):
        return event(_anthropic_json(error, request.get(REQUEST_ID)), "error")
    return event(error_json(error))


def error_response(
    error: HydraError, headers: Mapping[str, str] | None = None, request: web.BaseRequest | None = None
) -> web.Response:
    """An error as an answer, in the style of the route of `request` (OpenAI's for None)."""
    if request is not None and has_anthropic_style(request.path):
        body = _anthropic_json(error, request.get(REQUEST_ID))
    else:
        body = error_json(error)
    response = web.Response(status=error.status, body=body, content_type="application/json")
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
        _check_connection(request)
        return await handler(request)
    except web.HTTPException as exception:
        error = from_http(exception)
        if "Allow" in exception.headers:
            headers["Allow"] = exception.headers["Allow"]
    except RequestAborted as exception:
        error = exception  # ended by its id, while its client still waits for it
        headers["X-Should-Retry"] = "false"  # read by OpenAI's and Anthropic's clients
    except HydraError as exception:
        error = exception
        if error.status >= 500 and request.method == "POST":
            # Not logged here: a drain logs their number, and `Places` logs that all are taken.
            is_told = error.code == "draining" or request.app[PLACES].is_spare(request.protocol)
            level = logging.INFO if is_told else logging.WARNING
            logger.log(level, "%s %d %s: %s", request[REQUEST_ID], error.status, error.code, error.message)
    except asyncio.CancelledError:
        logger.info("%s 499 the client has gone", request[REQUEST_ID])
        raise
    except ConnectionError as exception:
        logger.info("%s 499 %s", request[REQUEST_ID], exception)
        return web.Response(status=499)
    except Exception:  # the server's boundary: a bug fails only this request and is logged
        logger.exception("%s 500 unexpected error", request[REQUEST_ID])
        error = RequestFailed("internal error; the server's log has the details under this request's id")
    if ACCESS in request:
        request[ACCESS].error_code = error.code
    if error.status in _REFUSALS and request.method == "POST":
        request.app[STATE].metrics.traffic.count_refusal(error.code)
    stream: EventStream | None = request.get(STREAM)
    if stream is not None and stream.has_started:
        return await stream.fail(_last_event(request, error))
    return error_response(error, headers, request)


def _check_connection(request: web.Request) -> None:
    """Raises InvalidRequest for another HTTP version, and Unavailable on a spare connection for anything but health
    probes."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise InvalidRequest("this server speaks HTTP/1.1 and HTTP/1.0")
    if request.app[PLACES].is_spare(request.protocol) and route_of(request) not in PROBES:
        raise Unavailable("too many connections are open; try again later", retry_after_s=2)


def from_http(exception: web.HTTPException) -> HydraError:
    if exception.status in _BY_STATUS:
        kind, message = _BY_STATUS[exception.status]
        return kind(message)
    if exception.status < 500:
        return InvalidRequest("the HTTP request is malformed")
    return RequestFailed("internal error")
