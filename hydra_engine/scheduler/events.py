"""What a scheduler tells its owner: new tokens, and the end of a request. Every accepted request ends exactly once.

The events of one result come in this order: all its tokens, then the requests that have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import FinishReason, StageSpan
from hydra_engine.core.plans import TokenLogprobs
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
class FinishEvent:
    """The last event of a request: no plan in flight names it and it holds no block.

    `stop_token_id` is the end-of-sequence or stop token that ended it. `spans` have absolute monotonic times.
    """

    request_id: RequestId
    reason: FinishReason
    num_generated: int
    stop_token_id: int | None = None
    error: ErrorInfo | None = None
    spans: tuple[StageSpan, ...] = ()
    num_preemptions: int = 0
    cached_tokens: int = 0
    cached_images: int = 0
    late_gaps: int = 0  # gaps between its tokens longer than its limit
    num_gaps: int = 0


Event = TokensEvent | TokenEvent | FinishEvent
