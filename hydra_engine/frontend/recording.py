"""Records the workload of a running frontend: passes ended requests to the recorder and its lines to `write`.

Looks ten times a second for the requests that still run. Does not know files.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping

from hydra_engine.clock import Clock
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Result
from hydra_engine.frontend.active import ActiveRequest
from hydra_engine.frontend.request import RequestInFlight
from hydra_engine.frontend.transitions import Report
from hydra_engine.frontend.workload_recorder import WorkloadRecorder
from hydra_engine.telemetry.trace import LiveRequest

logger = logging.getLogger(__name__)

_EVERY_S = 0.1


class Recording:
    """A running recording. Create it on the event loop. `requests` and `in_preprocess` are live views of the
    frontend's; `observers` are called with every request that ends."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        clock: Clock,
        observers: list[Report],
        requests: Mapping[RequestId, RequestInFlight],
        in_preprocess: Mapping[RequestId, tuple[str, LiveRequest]],
    ) -> None:
        self._write = write
        self._recorder = WorkloadRecorder(secrets.token_bytes(32), clock.now())
        self._observers = observers
        self._requests = requests
        self._in_preprocess = in_preprocess
        observers.append(self._ended)
        self._task = asyncio.create_task(self._release_often())

    def close(self) -> None:
        """Stops, and writes the remaining lines. Requests that still run are not recorded."""
        self._task.cancel()
        self._observers.remove(self._ended)
        self._release(math.inf)

    def _ended(self, active: ActiveRequest, result: Result) -> None:
        if active.facts is not None:
            self._recorder.ended(active.request, active.facts, result)

    async def _release_often(self) -> None:
        while not self._recorder.full:
            await asyncio.sleep(_EVERY_S)
            self._release(self._oldest_s())
        logger.warning("the recorded workload has %d requests, as many as a file may have", self._recorder.num_lines)

    def _oldest_s(self) -> float:
        """Arrival of the oldest request that has not ended; infinite if there is none."""
        running = (in_flight.request.arrival_s for in_flight in self._requests.values())
        preparing = (request.arrival_s for _, request in self._in_preprocess.values())
        return min((*running, *preparing), default=math.inf)

    def _release(self, oldest_s: float) -> None:
        for line in self._recorder.release(oldest_s):
            self._write(line)
