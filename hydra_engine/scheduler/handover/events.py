"""What a scheduler tells its owner that concerns other instances: encodes it needs, blocks it offers or takes back.

Kept until `PeerConnector.take_events` is called, which has to be before the plan made last is submitted: blocks that
were offered may be overwritten by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Finished, NeedImages
from hydra_engine.core.plans import KvEnd


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
RemoteEvent = OfferEvent | NeedImages | Finished
