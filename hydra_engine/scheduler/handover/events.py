"""What a scheduler tells its owner that concerns other instances: encodes it needs, blocks it offers or takes back.

Kept until `PeerConnector.take_events` is called, which has to be before the plan made last is submitted: blocks that
were offered may be overwritten by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Finished, NeedDecoder, NeedImages
from hydra_engine.core.plans import KvEnd
from hydra_engine.core.state import HandoverState, RequestState


@dataclass(frozen=True, slots=True)
class FeaturesEvent:
    """Features of an encode job can be fetched from these blocks until `FeaturesGoneEvent` or `release_features`."""

    request_id: RequestId  # of the job
    image_index: int  # within the job
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeaturesGoneEvent:
    """An older request takes the blocks, or the job has ended; if not, the image is encoded and offered again."""

    request_id: RequestId
    image_index: int


@dataclass(frozen=True, slots=True)
class KvEvent:
    """More KV of a request that moves on can be fetched: these blocks follow those of its KvEvents before, until
    `KvGoneEvent` or `release_kv`. All blocks but the last one of all are full. With `end` nothing more comes."""

    request_id: RequestId
    block_ids: tuple[int, ...]
    end: KvEnd | None = None


@dataclass(frozen=True, slots=True)
class KvGoneEvent:
    """The request has given way or ended; if it has not ended, it is computed and offered again from its beginning."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class UnneededEvent:
    """What another instance offers is not needed any more."""

    offer: int


OfferEvent = FeaturesEvent | FeaturesGoneEvent | KvEvent | KvGoneEvent | UnneededEvent
RemoteEvent = OfferEvent | NeedImages | NeedDecoder | Finished


class RemoteEvents:
    """What is to be told, collected in the order in which it happened; images that need an encode elsewhere are named
    once for each request and call of `take`."""

    def __init__(self) -> None:
        self._events: list[RemoteEvent] = []
        self._needs: dict[RequestId, set[int]] = {}

    def add(self, event: RemoteEvent) -> None:
        self._events.append(event)

    def need(self, request_id: RequestId, image_index: int) -> None:
        """An encode of this image, by another instance."""
        self._needs.setdefault(request_id, set()).add(image_index)

    def forget_needs(self, request_id: RequestId) -> None:
        """Needs that have not been taken yet; the request has ended."""
        self._needs.pop(request_id, None)

    def take(self) -> list[RemoteEvent]:
        if not self._events and not self._needs:
            return []
        events = self._events
        events += (NeedImages(request_id, tuple(sorted(indices))) for request_id, indices in self._needs.items())
        self._events, self._needs = [], {}
        return events


def handover_of(state: RequestState) -> HandoverState:
    """Of a request in which other instances take part."""
    assert state.handover is not None, f"request {state.request.id} is of no concern to other instances"
    return state.handover
