"""What a scheduler asks of its lanes and what comes back. Frozen; block ids are chosen before, bytes touched after.

Shapes: a `BlockTable` array is int32 [capacity]; the first `num_blocks` entries are valid and do not change while a
plan that names them is in flight. Slot of token position p in a request: `block_ids[p // S] * S + p % S`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import ImageDigest, RequestId, StepId
from hydra_engine.errors import ErrorInfo

BlockIds = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def _slots(block_ids: BlockIds, start: int, count: int, block_size: int) -> Int64s:
    """Of positions [start, start + count) of what lies in these blocks."""
    positions = np.arange(start, start + count)
    return block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True, eq=False)
class EncodeItem:
    """Encode image `image_index` of a request into image-cache blocks, features in token order."""

    request_id: RequestId
    image_index: int
    digest: ImageDigest
    num_patches: int
    num_tokens: int
    block_ids: BlockIds  # [ceil(num_tokens / S_image)]

    def slots(self, block_size: int) -> Int64s:
        """Of its features, in the image cache."""
        return _slots(self.block_ids, 0, self.num_tokens, block_size)


@dataclass(frozen=True, slots=True)
class VisionPlan:
    step_id: StepId
    items: tuple[EncodeItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


@dataclass(frozen=True, slots=True, eq=False)
class ImageSlice:
    """Rows [row, row + count) of a chunk take features [offset, offset + count) of an image in the image cache."""

    row: int
    count: int
    offset: int
    block_ids: BlockIds

    def slots(self, block_size: int) -> Int64s:
        """Of these features, in the image cache."""
        return _slots(self.block_ids, self.offset, self.count, block_size)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The requests of a language step that compute one token each; entry i of every array belongs to row i.

    The arrays are not changed, but that blocks which a request gets meanwhile appear in its block table, behind what
    the row needs; as long as the same requests decode, plans share what does not change. A row computes the KV of its
    token at position `starts` and samples the next one. Token -1 stands for the token that an earlier step samples for
    the same slot and that is not read yet; the lane knows it. `num_generated` is how many tokens the request had
    sampled before this step: the sampler's counter. A sequence slot is the row of a running request in tables of
    `max_num_seqs` entries, its own from its start until it gives way or is forgotten.
    """

    request_ids: Int64s  # [B]
    seq_slots: Int64s  # [B]
    token_ids: Int64s  # [B]
    starts: Int64s  # [B]
    num_generated: Int64s  # [B]
    block_tables: BlockIds  # [B, W]; W blocks hold the longest context, and a few more may be there

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRow:
    """One prefill chunk: compute KV for `token_ids` at positions [start, start + len(token_ids)).

    `sample` asks for a token after the last position: in the last chunk of a prefill. `scored` asks how likely each
    prompt token behind one of these positions is, the first one behind the chunk included.
    """

    request_id: RequestId
    seq_slot: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: BlockIds  # [capacity], first num_blocks valid
    num_blocks: int
    sample: bool
    num_generated: int
    images: tuple[ImageSlice, ...] = ()
    scored: bool = False

    @property
    def num_pairs(self) -> float:
        """(query, key) pairs of causal attention."""
        count = len(self.token_ids)
        return count * self.start + count * (count + 1) / 2


@dataclass(frozen=True, slots=True, eq=False)
class LanguagePlan:
    """Rows are numbered through: decodes first, then chunks. While the step runs the vision lane may run for `vision_s`
    seconds and then pauses until the step has ended. A device that is divided runs the step on a part of it while the
    vision lane has work, by `partition`, and the vision lane all along on the rest."""

    step_id: StepId
    decodes: DecodeRows
    chunks: tuple[ChunkRow, ...]
    vision_s: float = math.inf
    partition: int = 0  # 0: both lanes on the whole device

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.chunks)

    @property
    def load(self) -> LanguageLoad:
        """A chunk of one token, behind KV that has moved or was found, costs what a decode does."""
        chunks = [row for row in self.chunks if len(row.token_ids) > 1]
        single_keys = sum(row.start + 1 for row in self.chunks if len(row.token_ids) == 1)
        return LanguageLoad(
            num_decodes=len(self.decodes),
            decode_context=int(self.decodes.starts.sum()) + len(self.decodes) + single_keys,
            prefill_tokens=sum(len(row.token_ids) for row in self.chunks),
            prefill_pairs=sum(row.num_pairs for row in chunks),
            num_chunks=len(chunks),
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms under the model's distribution before temperature and filters (as OpenAI and vLLM)."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class VisionResult:
    """`errors[i]` is what went wrong with item i of the plan, None where nothing did."""

    step_id: StepId
    started_s: float
    ended_s: float
    errors: tuple[ErrorInfo | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LanguageResult:
    """`token_ids[i]` is what row i sampled, -1 where it asked for no token, failed or was deferred. `vision_s` is how
    long the vision lane ran beside the step. Of a deferred row nothing was computed, it is to be planned again: a
    decode, or a chunk of the one token that a request lacks."""

    step_id: StepId
    started_s: float
    ended_s: float
    token_ids: Int64s  # [num_rows]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (row, ..) of rows that asked for them
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # (row, why)
    vision_s: float = 0.0
    scores: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()  # (row, ..) of the tokens behind a scored chunk's
    deferred: tuple[int, ...] = ()  # rows


@dataclass(frozen=True, slots=True, eq=False)
class PullPlan:
    """Copy blocks that another instance has offered into blocks of ours.

    `offer` is the number by which the scheduler was told of it. Block `first_block + i` of the offer goes to
    `block_ids[i]`. `last`: with it everything is here, if the offer was valid to the end.
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
    """A PullPlan as the transfer lane needs it. `word` is what slot `slot` of the peer's control words holds while
    offer `sequence` is valid; it is read after the copy has completed, and decides. `ticket`: the job is a piece of a
    pull through host memory, and `source_blocks` are of the peer's staging pool; 0: it is all of a pull."""

    step_id: StepId
    peer: str
    pool: str  # a `core.pools.PoolKind`
    source_blocks: BlockIds  # [n]
    target_blocks: BlockIds  # [n]
    slot: int
    word: int
    checksums: tuple[int, ...] = ()  # of the source blocks, where transfers are checked
    sequence: int = 0
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class PullResult:
    """`valid`: the word was still there after the copy. `problem`: the bytes could not be copied or are not those that
    were offered."""

    step_id: StepId
    started_s: float
    ended_s: float
    valid: bool
    num_bytes: int
    problem: str | None = None
    ticket: int = 0  # the job's


@dataclass(frozen=True, slots=True)
class StagingJob:
    """Copy blocks of our own into our staging pool, where peers read them."""

    number: int
    pool: str  # a `core.pools.PoolKind`
    blocks: tuple[int, ...]
    staging_blocks: tuple[int, ...]  # one for each


@dataclass(frozen=True, slots=True)
class StagingResult:
    """`problem`: the blocks could not be copied."""

    number: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """Tells that what a request was held for is there, or with `error` that it never will be."""

    request_id: RequestId
    error: ErrorInfo | None = None


LaneResult = VisionResult | LanguageResult | PullResult | StagingResult | ReadyResult


@dataclass(frozen=True, slots=True)
class KvEnd:
    """What goes with the last KV of a request that moves on: it continues behind this token, which has no KV yet."""

    num_tokens: int  # whose KV is offered
    token_id: int
    token_s: float  # when it was sampled
    first_token_s: float  # when the request's first one was
    late_gaps: int = 0
    earlier_token_ids: tuple[int, ...] | None = None  # all generated before; None: those that both sides were told of
