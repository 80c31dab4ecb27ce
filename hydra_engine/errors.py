"""Exceptions that a user can act on.

    HydraError
    +-- RequestError                 this request is wrong; nothing else is affected
    |   +-- InvalidRequest           400  a field has a wrong type, value or combination; exit 2
    |   |   +-- ContextLengthExceeded 400
    |   |   +-- RequestTooLarge      400  fits the model, can never fit this deployment's caches
    |   |   +-- InvalidImage         400  cannot be decoded, too large, odd shape
    |   |   +-- MediaForbidden       400  address or path that the server does not open
    |   |   +-- MediaFetchFailed     400
    |   |   +-- PayloadTooLarge      413
    |   |   +-- UnsupportedMediaType 415
    |   |   +-- ExpectationFailed    417
    |   +-- InvalidApiKey            401
    |   +-- NotFound                 404  unknown model or route
    |   +-- MethodNotAllowed         405
    |   +-- RequestTimeout           408  the body did not arrive in time
    |   +-- RateLimited              429  this client has too many requests, now or in the last minute
    |   +-- RequestFailed            500  this request failed inside the engine (numerical_error, ...)
    |   +-- Unavailable              503  try again later: overloaded, draining, not_ready, instance_lost
    |   +-- RequestAborted           499  cancelled by its owner
    +-- ConfigError                  exit 2  a setting is wrong or settings contradict each other
    +-- CheckpointError              exit 3  the model directory cannot be served
    +-- ResourceError                exit 4  memory, disk, port or device is missing
    +-- BackendError                 exit 5  an operation has no usable implementation
    +-- EngineClosed                 the engine was closed or its instance died

Only `server/http/answers.py` turns these into HTTP; only the command line turns them into exit codes. A message is one
line that says what to change. It never holds an address or more than 200 characters of input, and a path only in the
process that opens the caller's own files (`preprocess/media/sources.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data, sent between processes in place of the exception."""

    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


class HydraError(Exception):
    """Base class of the errors that a user reads. `status` is the HTTP status, `exit_code` the command line's exit
    status; `code` and `param` are the fields of an OpenAI error body; `retry_after_s` is in whole seconds."""

    status: int = 500
    error_type: str = "server_error"
    default_code: str | None = None
    exit_code: int = 1
    index: int | None = None  # position of the request in its batch

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    def with_message(self, message: str) -> Self:
        """Returns a copy of the error with another message."""
        return type(self)(message, code=self.code, param=self.param, retry_after_s=self.retry_after_s)

    def info(self) -> ErrorInfo:
        return ErrorInfo(type(self).__name__, self.message, self.code, self.param, self.retry_after_s)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.info(),))


class RequestError(HydraError):
    """An error of one request, by its client or inside the engine; every other request goes on."""


class InvalidRequest(RequestError):
    """A field of the request has a wrong type, value or combination; `param` names it."""

    exit_code = 2
    status = 400
    error_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and max_tokens together, exceed the model's context."""

    default_code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The request fits the model but can never fit the caches of this deployment."""

    default_code = "request_too_large_for_deployment"


class InvalidImage(InvalidRequest):
    """A picture or video cannot be decoded, is too large or has an odd shape."""

    default_code = "image_decode_failed"


class MediaForbidden(InvalidRequest):
    """The address or path of a picture or video is one that the engine does not open."""

    default_code = "media_url_forbidden"


class MediaFetchFailed(InvalidRequest):
    """A picture or video could not be read from its address or path."""

    default_code = "media_fetch_failed"


class PayloadTooLarge(InvalidRequest):
    status = 413
    default_code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    default_code = "unsupported_media_type"


class ExpectationFailed(InvalidRequest):
    status = 417


class InvalidApiKey(RequestError):
    status = 401
    error_type = "invalid_request_error"
    default_code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    error_type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    error_type = "invalid_request_error"
    default_code = "request_timeout"


class RateLimited(RequestError):
    """The client goes beyond one of its own limits; other clients are served."""

    status = 429
    error_type = "requests"
    default_code = "rate_limit_exceeded"


class RequestFailed(RequestError):
    """The engine could not finish this request, for example because its logits were not finite."""

    default_code = "internal_error"


class Unavailable(RequestError):
    """The deployment cannot take the request now; `code` says why, `retry_after_s` when to try again."""

    status = 503
    default_code = "overloaded"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int | None = 1
    ) -> None:
        super().__init__(message, code=code, param=param, retry_after_s=retry_after_s)


class RequestAborted(RequestError):
    """The request was cancelled by its owner."""

    status = 499
    error_type = "invalid_request_error"
    default_code = "request_aborted"


class ConfigError(HydraError):
    """A setting is wrong, or settings contradict each other."""

    status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_config"
    exit_code = 2


class CheckpointError(HydraError):
    """The model's files are missing, broken or of a kind that cannot be served."""

    default_code = "invalid_checkpoint"
    exit_code = 3


class ResourceError(HydraError):
    """Memory, a port or a device is missing."""

    default_code = "insufficient_resources"
    exit_code = 4


class BackendError(HydraError):
    """An operation has no usable implementation on this device."""

    default_code = "backend_unavailable"
    exit_code = 5


class TransferError(HydraError):
    """Two instances cannot exchange blocks. Stays inside the node: no client receives it."""

    default_code = "internal_error"


class EngineClosed(HydraError):
    """The engine was closed, its instance ended, or this process is a forked child of the engine's."""

    status = 503
    default_code = "engine_closed"


def _tree(base: type[HydraError]) -> dict[str, type[HydraError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found.update(_tree(child))
    return found


_BY_NAME = _tree(HydraError)

# All error codes: a body never holds another one (a test compares).
CODES = frozenset(
    {cls.default_code for cls in _BY_NAME.values() if cls.default_code is not None}
    | {"unsupported_image_format", "image_too_large", "image_aspect_ratio", "too_many_images", "model_not_found"}
    | {"unsupported_video_format", "video_too_large", "video_decode_failed", "too_many_videos", "video_not_supported"}
    | {
        "wrong_role",
        "draining",
        "not_ready",
        "instance_lost",
        "numerical_error",
        "request_poisoned",
        "unsupported_parameter",
    }
)


def from_info(info: ErrorInfo) -> HydraError:
    """The exception that `info` describes; an unknown kind becomes `RequestFailed`."""
    cls = _BY_NAME.get(info.kind, RequestFailed)
    return cls(info.message, code=info.code, param=info.param, retry_after_s=info.retry_after_s)


def _rebuild(info: ErrorInfo) -> HydraError:
    return from_info(info)


MAX_RETRY_AFTER_S = 30


def retry_after_s(num_live: int, finish_times: Sequence[float]) -> int:
    """Seconds until a tenth of `num_live` requests will have finished at the pace of `finish_times`; whole, 1 to 30,
    and 1 if fewer than two have finished."""
    if len(finish_times) < 2:
        return 1
    interval_s = (finish_times[-1] - finish_times[0]) / (len(finish_times) - 1)
    return min(max(1, math.ceil(interval_s * num_live / 10)), MAX_RETRY_AFTER_S)
