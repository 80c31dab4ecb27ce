"""What an instance needs from outside, as protocols. Fakes live in tests, real ones in `worker/` and `cluster/`.

The instance loop is one thread. `wake` of a port is called from any thread and must only set an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import ToFront, ToInstance
from hydra_engine.core.plans import LanguagePlan, LanguageResult, VisionPlan, VisionResult
from hydra_engine.core.request import Request


class WorkerPort(Protocol):
    """Two lanes that run plans in order. Never blocks the caller; never raises because of a request's content:
    a failed row or image comes back as an outcome with an error, and the lane goes on."""

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        """Before the first plan that names the request. Keeps pixels until `remove_request`."""
        ...

    def remove_request(self, request_id: RequestId) -> None:
        """After the last plan that names it has come back. Unknown ids are a bug (assert)."""
        ...

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None: ...

    def poll(self) -> list[VisionResult | LanguageResult]:
        """Results since the last call, in order per lane; empty when none. Calls `wake` whenever one arrives."""
        ...

    @property
    def pixel_bytes(self) -> int: ...

    def close(self) -> None: ...


class Inbox(Protocol):
    def drain(self) -> list[ToInstance]:
        """Everything that arrived since the last call; raises EOFError once the other side is gone."""
        ...


class Outbox(Protocol):
    def send(self, messages: Sequence[ToFront]) -> None:
        """Queues and flushes; a slow front makes this block at most until its socket buffer drains."""
        ...
