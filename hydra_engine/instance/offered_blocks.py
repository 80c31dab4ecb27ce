"""The offer of one request or encode job to another instance, as the migration keeps it. Knows no protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.transfer.plans import KvEnd


@dataclass(slots=True)
class OfferedBlocks:
    """The blocks that a request offers to its next instance, now or once that instance is known and up and a slot is
    free."""

    peer: str  # empty: not known yet
    request_id: RequestId  # id at the target
    image_index: int | None
    since_s: float  # when the first blocks were ready and the target was known
    blocks: list[int] = field(default_factory=list)
    end: KvEnd | None = None

    @property
    def waits_since_s(self) -> float:
        """Start of its wait for a slot or for the target to be up; infinite while the target is unknown, which has a
        deadline elsewhere."""
        return self.since_s if self.peer else math.inf
