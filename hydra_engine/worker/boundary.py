"""The boundary that keeps a failure inside a step: an exception becomes data for the requests it belongs to.

Does not know what a step does. The text of an unforeseen exception goes to the log only, never into an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from hydra_engine.errors import ErrorInfo, HydraError, RequestFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")


def attempt(what: str, run: Callable[[], T]) -> T | ErrorInfo:
    """The result of `run`, or what to tell the owner of the request that made it raise."""
    try:
        return run()
    except HydraError as error:
        logger.warning("%s: %s", what, error)
        return error.info()
    except Exception:  # broad on purpose: whatever one request provokes must not end the lane that serves all others
        logger.exception("%s failed", what)
        return RequestFailed("the engine failed while it computed this request; the server's log says why").info()


def not_finite(what: str) -> ErrorInfo:
    return RequestFailed(f"the model's {what} are not finite numbers", code="numerical_error").info()
