"""What a scheduler tells its owner: new tokens, and the end of a request. Every accepted request ends exactly once."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import FinishReason, StageSpan
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token; `position` counts the generated tokens before it. A stop token is reported like any other."""

    request_id: RequestId
    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None


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


Event = TokenEvent | FinishEvent
