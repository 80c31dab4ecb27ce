"""What other instances are to be told, collected until the owner of the scheduler takes it.

Keeps the order in which things happened; images that need an encode elsewhere are named once for each request and call.
Does not know who the other instances are.
"""

from __future__ import annotations

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import NeedImages
from hydra_engine.scheduler.handover.events import RemoteEvent


class RemoteEvents:
    def __init__(self) -> None:
        self._events: list[RemoteEvent] = []
        self._needs: dict[RequestId, set[int]] = {}

    def tell(self, event: RemoteEvent) -> None:
        self._events.append(event)

    def need(self, request_id: RequestId, image_index: int) -> None:
        """An encode of this image, by another instance."""
        self._needs.setdefault(request_id, set()).add(image_index)

    def forget_needs(self, request_id: RequestId) -> None:
        """Those that nobody was told of yet; the request has ended."""
        self._needs.pop(request_id, None)

    def take(self) -> list[RemoteEvent]:
        if not self._events and not self._needs:
            return []
        events = self._events
        events += (NeedImages(request_id, tuple(sorted(indices))) for request_id, indices in self._needs.items())
        self._events, self._needs = [], {}
        return events
