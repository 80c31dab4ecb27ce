"""The boundary that keeps a failure inside a step: an exception becomes an error of the requests it belongs to. Only a
failure of the device itself belongs to no request and is re-raised.

Does not know what a step does. The text of an unforeseen exception goes to the log only, never into an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from hydra_engine.backend.device import Device
from hydra_engine.errors import (
    BackendError,
    ErrorInfo,
    HydraError,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    Unavailable,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUT_OF_MEMORY = Unavailable(
    "the device had not enough memory left to compute this request; send it again later, or a shorter one"
).info()


DROPPED = RequestAborted("no request needs this encode any more").info()


def run_guarded(what: str, run: Callable[[], T]) -> T | ErrorInfo:
    """Returns the result of `run`, or the error for the request that made it raise. Logs the exception as that of
    `what`, unless it is an InvalidRequest or RequestAborted. The error is OUT_OF_MEMORY if the device's memory ran out:
    the failed call's tensors are freed by then, memory that the allocator caches is not. Raises BackendError if `run`
    does."""
    try:
        return run()
    except BackendError:
        raise
    except (InvalidRequest, RequestAborted) as error:
        return error.info()
    except HydraError as error:
        logger.warning("%s: %s", what, error)
        return error.info()
    except torch.OutOfMemoryError as error:
        logger.warning("%s: out of memory: %s", what, str(error))  # a reference to the error would keep the memory
        return OUT_OF_MEMORY
    except Exception:  # broad on purpose: whatever one request provokes must not end the lane that serves all others
        logger.exception("%s failed", what)
        return RequestFailed("the engine failed while it computed this request; the server's log says why").info()


def run_guarded_step(device: Device, what: str, run: Callable[[], T]) -> T | ErrorInfo:
    """Calls `run_guarded` for work that the calling lane launches on a device. If `run` raised, waits for the device,
    and raises BackendError if the device failed: all later launches fail too, and would otherwise be blamed on one
    request after another. After OUT_OF_MEMORY returns cached memory to the device."""
    outcome = run_guarded(what, run)
    if isinstance(outcome, ErrorInfo):
        device.finish()
        if outcome is OUT_OF_MEMORY:
            device.trim()
    return outcome


def not_finite(what: str) -> ErrorInfo:
    """The error of a request whose `what` (logits, image features) have infinities or NaNs."""
    return RequestFailed(f"the model's {what} are not finite numbers", code="numerical_error").info()
