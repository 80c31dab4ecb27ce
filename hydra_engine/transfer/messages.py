"""The messages between two instances of a transfer: the source offers blocks, the target pulls and acknowledges them.

An offer is identified by its source's incarnation and a sequence number that is never reused; messages that release
something name the offer, not blocks. Encoded like all frames (`cluster/channel.py`).
"""

from __future__ import annotations

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.pools import Exports
from hydra_engine.transfer.plans import KvEnd

TRANSFER_VERSION = 4


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of both sides, sent with the file descriptors that `exports` refers to by number."""

    version: int
    name: str
    incarnation: int
    exports: Exports


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Source to target: blocks may be read, as long as control word `slot` of the source holds `word`.

    `request_id` is the target's id; `image_index` None means its KV. `blocks` are the source's block ids, in order, as
    many as are ready; `More` adds blocks of KV. `checksums`: one for each block; () if transfers are not checked.
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
    """Source to target: blocks of KV that follow the blocks already offered; with `end` they are the last. `number`
    counts the messages of one offer from 1, so that a lost or doubled one is noticed. `checksums` as in `Offer`."""

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
    """Target to source: all blocks have been copied and were valid; the source may forget the offer. `block_s`: mean
    seconds that the target has taken to copy a block of KV, from any source; 0.0 before its first copy of KV."""

    incarnation: int
    sequence: int
    block_s: float = 0.0


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Target to source: the offer is not wanted (prefix cache hit, or its request is gone). Counts as an `Ack`
    unless `failed`: then the copy failed or its checksums did not match, and the request has to restart."""

    incarnation: int
    sequence: int
    failed: bool = False


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Target to source: copy these blocks of an offer into the staging pool. `ticket` identifies the piece; the target
    never reuses it."""

    incarnation: int
    sequence: int
    ticket: int
    blocks: tuple[int, ...]


class Staged(msgspec.Struct, frozen=True, tag=True):
    """Source to target: the piece has been copied into these blocks of the staging pool, in order, and stays there
    until `Taken` or the end of the offer."""

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
