"""Copies of blocks between instances: the plans of the scheduler's connector, the jobs and results of the transfer
lane, and the end of the KV of a request that moves. Frozen, as the plans of `core/plans.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.results import ConnectorResult


@dataclass(frozen=True, slots=True)
class KvEnd:
    """The end of the KV of a request that moves: the target continues after token `token_id`, which has no KV yet."""

    num_tokens: int  # number of tokens whose KV is offered
    token_id: int
    token_s: float  # when `token_id` was sampled
    first_token_s: float  # when the request's first token was sampled
    late_gaps: int = 0  # number of late gaps between the tokens so far
    earlier_token_ids: tuple[int, ...] | None = None  # generated before `token_id`; None: the target knows them


@dataclass(frozen=True, slots=True, eq=False)
class PullPlan:
    """A copy of offered blocks of another instance into blocks of this one.

    `offer`: the offer's number at this scheduler. Block `first_block + i` of the offer goes to `block_ids[i]`. `last`:
    after this copy everything is here, if the offer is still valid at its end.
    """

    step_id: StepId
    offer: int
    request_id: RequestId
    image_index: int | None  # None: KV
    first_block: int
    block_ids: BlockIds  # [n]
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class PullJob:
    """A pull as the transfer lane runs it, a whole one (a PullPlan) or a piece of it.

    Slot `slot` of the peer's control words holds `word` while offer `sequence` is valid; it is read after the copy has
    completed, and decides. `ticket`: number of this piece of a pull through host memory, whose `source_blocks` are in
    the peer's staging pool; 0: the job is a whole pull.
    """

    step_id: StepId
    peer: str
    pool: str  # a `core.pools.PoolKind`
    source_blocks: BlockIds  # [n]
    target_blocks: BlockIds  # [n]
    slot: int
    word: int
    checksums: tuple[int, ...] = ()  # one for each source block if transfers are checked
    sequence: int = 0
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class PullResult(ConnectorResult):
    """The result of a PullJob. `valid`: the word was unchanged after the copy. `problem`: why the bytes could not be
    copied, or that they do not have the offered checksums; None if neither. `num_bytes`: bytes copied."""

    step_id: StepId
    started_s: float
    ended_s: float
    valid: bool
    num_bytes: int
    problem: str | None = None
    ticket: int = 0  # ticket of the job


@dataclass(frozen=True, slots=True)
class StagingJob:
    """A copy of this instance's own blocks into its staging pool in host memory, where peers read them."""

    number: int
    pool: str  # a `core.pools.PoolKind`
    blocks: tuple[int, ...]
    staging_blocks: tuple[int, ...]  # one for each of `blocks`


@dataclass(frozen=True, slots=True)
class StagingResult(ConnectorResult):
    """The result of a StagingJob. `problem`: why the blocks could not be copied; None if they were."""

    number: int
    problem: str | None = None
