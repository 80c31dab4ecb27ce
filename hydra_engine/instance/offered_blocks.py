"""What one request or encode job offers to another instance, as its migration keeps it. Knows no protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import KvEnd


@dataclass(slots=True)
class OfferedBlocks:
    """The blocks that a request offers to its next instance, now or when that is known and there and a slot is free."""

    peer: str  # empty: not known yet
    request_id: RequestId  # as the target knows it
    image_index: int | None
    since_s: float  # when the first ones were there and the target was known
    blocks: list[int] = field(default_factory=list)
    end: KvEnd | None = None

    @property
    def waits_since_s(self) -> float:
        """For a slot or for its target; infinite while that is not known, for that has a deadline elsewhere."""
        return self.since_s if self.peer else math.inf
