"""Requests over several instances, brought as far as a test begins with."""

from __future__ import annotations

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.request import Request
from hydra_engine.frontend.request import Attempt
from tests.frontend.rig import Rig

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
MOVED, RETURNED, WITHDRAWN = Departure.MOVED, Departure.RETURNED, Departure.WITHDRAWN


def attempt(rig: Rig) -> Attempt:
    found = rig.dispatcher.requests[RequestId(1)].attempt
    assert found is not None
    return found


def prefilled(rig: Rig, number: int = 1, **options: object) -> Request:
    """A text request on P+D whose KV is on its way."""
    rig.submit(number, **options)
    rig.take("d0")
    request = rig.submitted("p0").request
    rig.speak("p0", request, 0)
    return request


def decoding(rig: Rig, number: int = 1, **options: object) -> Request:
    request = prefilled(rig, number, **options)
    rig.finish("p0", request.id, MOVED, 1)
    rig.speak("d0", request, 1)
    return request
