"""What a viewer of the running engine is shown of its requests: where each is now, and the stages of those that have
ended lately. Ids, names, numbers and stages only: nothing of what was asked or answered. Does not know who looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.outputs import StageSpan


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """`stage` is queued (no instance has it), encode (its pictures are encoded for another instance), prefill (until
    the first token, pictures of its own included), migrate (its KV is on its way from there) or decode; `instance` is
    where that happens, "" where nobody has it. Times on the monotonic clock."""

    id: str
    arrival_s: float
    first_token_s: float | None
    num_tokens: int
    stage: str
    instance: str


@dataclass(frozen=True, slots=True)
class Activity:
    """`number` counts the requests that have ended so far; ask with it for those that end later. `finished` are
    (id, arrival on the monotonic clock, spans relative to it), oldest first."""

    number: int
    finished: Sequence[tuple[str, float, Sequence[StageSpan]]]
    running: Sequence[LiveRequest]
