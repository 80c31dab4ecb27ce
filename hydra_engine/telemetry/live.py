"""What a viewer of the running engine is shown of its requests: where each is now, and the stages of those that have
ended lately. Ids, names, numbers and stages only: nothing of what was asked or answered. Does not know who looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.core.outputs import StageSpan, Usage


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that runs, and what it waits for now. `stage` is one of

        preprocess  its pictures are fetched and decoded, its prompt is made
        queue       nothing of it is computed: it waits for room, or for its turn
        encode      its pictures are encoded
        prefill     its prompt is computed
        transfer    features or KV move to the instance that goes on with it
        decode      tokens come
        lost        its instance was lost; it begins again where one can serve it

    `instance` is where that happens, "" where no instance has it. `done` of `of` are behind it: while pictures (or
    videos) lack features, those that have them; in prefill, tokens of the prompt (and of the answer so far, if that has
    to be computed again) that are computed; None where that is not known. Instances tell it four times a second. Times
    on the monotonic clock.
    """

    id: str
    arrival_s: float
    first_token_s: float | None
    num_tokens: int
    stage: str
    instance: str
    done: int | None = None
    of: int | None = None


class EndedRequest(NamedTuple):
    """`spans` are relative to `arrival_s`, which is on the monotonic clock. No usage: it failed before it had any."""

    id: str
    arrival_s: float
    spans: Sequence[StageSpan]
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """`number` counts the requests that have ended so far; ask with it for those that end later. `finished` are the
    latest of them, oldest first."""

    number: int
    finished: Sequence[EndedRequest]
    running: Sequence[LiveRequest]
