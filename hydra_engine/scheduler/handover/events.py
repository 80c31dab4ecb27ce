"""Events of a scheduler that concern other instances: encodes it needs, blocks it offers or withdraws.

Kept until `PeerConnector.take_events`, which must be called before the latest plan is submitted: the plan may overwrite
blocks that were offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Finished, NeedDecoder, NeedImages
from hydra_engine.transfer.plans import KvEnd


@dataclass(frozen=True, slots=True)
class FeaturesEvent:
    """The event that features of an encode job can be fetched from these blocks, until `FeaturesGoneEvent` or
    `Offers.release_features`."""

    request_id: RequestId  # id of the job
    image_index: int  # index within the job
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeaturesGoneEvent:
    """The event that features are no longer offered: their blocks go to an older request, or the job has ended. In the
    first case the image is encoded and offered again."""

    request_id: RequestId  # id of the job
    image_index: int  # index within the job


@dataclass(frozen=True, slots=True)
class KvEvent:
    """The event that more KV of a request that decodes elsewhere can be fetched, until `KvGoneEvent` or `release_kv`.

    The blocks follow the blocks of its earlier KvEvents. Only the very last block may be partly filled. With `end`
    nothing more comes.
    """

    request_id: RequestId
    block_ids: tuple[int, ...]
    end: KvEnd | None = None


@dataclass(frozen=True, slots=True)
class KvGoneEvent:
    """The event that the KV is no longer offered: the request was preempted or has ended. In the first case it is
    computed and offered again from its beginning."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class UnneededEvent:
    """The event that an offer of another instance is not needed any more and should be refused."""

    offer: int  # number under which this scheduler knows it


OfferEvent = FeaturesEvent | FeaturesGoneEvent | KvEvent | KvGoneEvent | UnneededEvent
RemoteEvent = OfferEvent | NeedImages | NeedDecoder | Finished


class RemoteEvents:
    """The events since the last `take`, in order. Images that need an encode elsewhere are collected, to be named last,
    by one NeedImages for each request."""

    def __init__(self) -> None:
        self._events: list[RemoteEvent] = []
        self._needs: dict[RequestId, set[int]] = {}

    def add(self, event: RemoteEvent) -> None:
        self._events.append(event)

    def need(self, request_id: RequestId, image_index: int) -> None:
        """Asks for an encode of this image by another instance. Repeated before the next `take`, it asks only once."""
        self._needs.setdefault(request_id, set()).add(image_index)

    def forget_needs(self, request_id: RequestId) -> None:
        self._needs.pop(request_id, None)

    def take(self) -> list[RemoteEvent]:
        """Removes and returns all events, then one NeedImages for each request with needs."""
        if not self._events and not self._needs:
            return []
        events = self._events
        events += (NeedImages(request_id, tuple(sorted(indices))) for request_id, indices in self._needs.items())
        self._events, self._needs = [], {}
        return events
