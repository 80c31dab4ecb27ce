"""What a scheduler tells its owner: new tokens, the end of a request, and what other instances have to do with it.

Every accepted request ends exactly once. The events of one result come in this order: scores of prompts, all its
tokens, then the requests that have ended. Events about other instances are kept until `StageScheduler.take_events` is
called, which has to be before the plan made last is submitted: blocks that were offered may be overwritten by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Departure, FinishReason, StageSpan
from hydra_engine.core.plans import KvEnd, TokenLogprobs
from hydra_engine.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """The tokens that one step sampled, at most one for each request; entry i of each list belongs together. A position
    counts the generated tokens before. A stop token is reported like any other. Nobody changes the lists."""

    request_ids: list[int]
    positions: list[int]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of a request that asked for log probabilities; it is in no TokensEvent."""

    request_id: RequestId
    position: int
    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoresEvent:
    """How likely prompt tokens were: `logprobs[i]` is of the one at position `start` + i. After a preemption before the
    first token the same is said again; before that token all has been said."""

    request_id: RequestId
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request: no plan in flight names it and it holds no block.

    `stop_token_id` is the end-of-sequence or stop token that ended it. `spans` have absolute monotonic times.
    """

    request_id: RequestId
    reason: FinishReason | Departure
    num_generated: int
    stop_token_id: int | None = None
    error: ErrorInfo | None = None
    spans: tuple[StageSpan, ...] = ()
    num_preemptions: int = 0
    cached_tokens: int = 0
    cached_images: int = 0
    late_gaps: int = 0  # gaps between its tokens longer than its limit
    num_gaps: int = 0


Event = ScoresEvent | TokensEvent | TokenEvent | FinishEvent


# ---- about other instances


@dataclass(frozen=True, slots=True)
class NeedEvent:
    """These images of a request need an encode, and not here."""

    request_id: RequestId
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeaturesEvent:
    """Features of an encode job can be fetched from these blocks until `FeaturesGoneEvent` or `release_features`."""

    request_id: RequestId  # of the job
    image_index: int  # within the job
    block_ids: tuple[int, ...]
    num_tokens: int


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


OutsideEvent = NeedEvent | FeaturesEvent | FeaturesGoneEvent | KvEvent | KvGoneEvent | UnneededEvent | FinishEvent
