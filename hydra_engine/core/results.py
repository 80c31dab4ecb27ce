"""Results that lanes return: of plans (`core/plans.py`), of what requests are held for, and of the connector's jobs.
Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import Int64s
from hydra_engine.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probability of one token, and of the most likely tokens in its place, under the model's distribution
    before temperature and filters (as OpenAI and vLLM)."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class VisionResult:
    """The result of a VisionPlan. Times are monotonic seconds. `errors[i]`: the error of its item i, or None."""

    step_id: StepId
    started_s: float
    ended_s: float
    errors: tuple[ErrorInfo | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LanguageResult:
    """The result of a LanguagePlan. Times are monotonic seconds.

    `token_ids[i]`: the token that row i sampled; -1 if it samples none, failed or was deferred. `vision_s`: seconds
    that the vision lane ran beside the step. `deferred`: rows of which nothing was computed, to be planned again; each
    is a decode row, or a chunk of one token of a request that is otherwise prefilled.
    """

    step_id: StepId
    started_s: float
    ended_s: float
    token_ids: Int64s  # [num_rows]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (row, log probabilities) if asked for
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # (row, error)
    vision_s: float = 0.0
    scores: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()  # (row, log probabilities) of scored chunks
    deferred: tuple[int, ...] = ()  # rows


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """Reports that what a request is held for (a compiled grammar) is ready or, with `error`, will never be."""

    request_id: RequestId
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ConnectorResult:
    """Base class of the results of jobs that the connector submits to lanes of its own (`transfer/plans.py`)."""


LaneResult = VisionResult | LanguageResult | ReadyResult | ConnectorResult
