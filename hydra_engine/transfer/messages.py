"""What two instances say to each other. The source offers blocks, the target pulls them and says so.

Every offer is named by its source's incarnation and a sequence number that is never used again; neither side ever names
blocks of the other when it lets something go. Encoded like all frames (`cluster/wire.py`).
"""

from __future__ import annotations

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import KvEnd
from hydra_engine.core.pools import Exports

TRANSFER_VERSION = 4


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of both sides, with the descriptors that `exports` counts."""

    version: int
    name: str
    incarnation: int
    exports: Exports


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Source to target: blocks may be read, as long as word `slot` of the source holds `word`.

    `image_index` of `request_id` (the target's id), or its KV where it is None. `blocks` of the source, in order, as
    many as are ready; KV grows by `More`.
    """

    incarnation: int
    sequence: int
    request_id: RequestId
    image_index: int | None
    slot: int
    word: int
    blocks: tuple[int, ...]
    end: KvEnd | None = None  # KV: nothing more comes
    checksums: tuple[int, ...] = ()


class More(msgspec.Struct, frozen=True, tag=True):
    """Source to target: these blocks follow those already offered. With `end` they are the last ones. `number` counts
    what is added to one offer, from 1, so that none is taken twice and none is left out unseen."""

    incarnation: int
    sequence: int
    number: int
    blocks: tuple[int, ...]
    end: KvEnd | None = None
    checksums: tuple[int, ...] = ()


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Source to target: the offer is gone. The blocks may be in use for something else already."""

    incarnation: int
    sequence: int


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Target to source, every few seconds: these offers are still wanted. `heard[i]` is the number of the latest `More`
    of offer `sequences[i]` that has arrived, 0 where none has."""

    incarnation: int
    sequences: tuple[int, ...]
    heard: tuple[int, ...]


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Target to source: everything has been copied and was valid; the source may forget the offer. `block_s`: seconds
    that a block of KV takes the target to copy, on the mean; 0 where none has been, or for features."""

    incarnation: int
    sequence: int
    block_s: float = 0.0


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Target to source: not wanted (found in a cache, or its request is gone). As good as an acknowledgement, unless
    `failed`: then it is wanted, but could not be copied or is not what was offered; the request has to begin again."""

    incarnation: int
    sequence: int
    failed: bool = False


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Target to source: copy these blocks of an offer to where I can read them. `ticket` names the piece; the target
    never uses it again."""

    incarnation: int
    sequence: int
    ticket: int
    blocks: tuple[int, ...]


class Staged(msgspec.Struct, frozen=True, tag=True):
    """Source to target: they have been copied into these blocks of the staging pool, one each, and stay there until
    they are taken or the offer is over."""

    incarnation: int
    sequence: int
    ticket: int
    blocks: tuple[int, ...]


class Taken(msgspec.Struct, frozen=True, tag=True):
    """Target to source: the piece has been copied, its blocks of the staging pool are free."""

    incarnation: int
    sequence: int
    ticket: int


TransferMessage = Offer | More | Withdraw | Renew | Ack | Refuse | Stage | Staged | Taken
