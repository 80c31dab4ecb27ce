"""Parts of `world.py`: instances, their memory and jobs, and packets between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hydra_engine.transfer.messages import TransferMessage
from hydra_engine.transfer.offers import Owner, Source
from hydra_engine.transfer.plans import KvEnd, PullJob
from hydra_engine.transfer.pulls import Destination

LEASE_S, RENEW_S = 10.0, 2.0
NUM_BLOCKS = 12
NUM_SLOTS = 2
MAX_OPEN = 3  # requests, of at most 4 blocks each
SOURCES, TARGETS = ("s0", "s1"), ("t0", "t1")
NOBODY = -1


@dataclass(eq=False)
class Memory:
    """Memory of an incarnation of an instance. It stays readable for peers that have mapped it."""

    rows: np.ndarray = field(default_factory=lambda: np.full((NUM_BLOCKS, 2, 4), NOBODY, np.int64))
    words: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))  # a stack: what is freed is used next

    def allocate(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        assert not set(blocks) & set(self.free), "OWNER: a block is freed twice"
        self.free += blocks


@dataclass
class Job:
    """A computation of a source for a request. `version` differs between computations of the same thing."""

    owner: Owner
    target: str
    request_id: int
    image_index: int | None
    num_blocks: int
    version: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sent: int = 0


@dataclass
class Item:
    """The KV or an image of a request at its target."""

    num_blocks: int
    handle: int | None = None
    known: int = 0
    end: KvEnd | None = None
    blocks: list[int] = field(default_factory=list)
    begun: int = 0
    ready: bool = False  # committed, or found in a cache (then it has no blocks)


@dataclass
class Running:
    """A copy in flight. `progress` counts halves of blocks."""

    handle: int
    copy: PullJob
    memory: Memory
    blocks: list[int]
    last: bool
    was_valid: bool  # when it began
    progress: int = 0


class SourceNode:
    def __init__(self, name: str, life: int, source_type: type[Source]) -> None:
        self.name, self.life = name, life
        self.memory = Memory()
        self.source = source_type(life, NUM_SLOTS, self.memory.words.__setitem__, LEASE_S)
        self.jobs: dict[Owner, Job] = {}


class TargetNode:
    def __init__(self, name: str, life: int, target_type: type[Destination]) -> None:
        self.name, self.life = name, life
        self.memory = Memory()
        self.target = target_type(RENEW_S)
        self.mapped: dict[str, tuple[int, Memory]] = {}
        self.requests: dict[int, dict[int | None, Item]] = {}
        self.leftover: dict[int, list[int]] = {}  # target blocks of offers that are over but for copies in flight
        self.running: list[Running] = []


@dataclass
class Open:
    """A request as the frontend sees it."""

    target: str
    shape: dict[int | None, int]  # image (None: KV) -> blocks
    kv_source: str | None
    status: str = "run"


@dataclass(frozen=True)
class Packet:
    sender: str
    receiver: str
    message: TransferMessage | None  # None: the sender's life has ended
    life: int = 0  # of the sender
