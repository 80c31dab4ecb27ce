"""Plans that a scheduler gives to its lanes. Frozen. Block ids are chosen when a plan is made; lanes read and write the
blocks, and answer with the results in `core/results.py`.

Shapes: a `BlockTable` array is int32 [capacity]; the first `num_blocks` entries are valid and do not change while a
plan that names them is in flight. Slot of token position p in a request: `block_ids[p // S] * S + p % S`, with S the
block size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hydra_engine.core.ids import ImageDigest, RequestId, StepId

BlockIds = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def slots_of(block_ids: BlockIds, start: int, count: int, block_size: int) -> Int64s:
    """Cache slots of positions [start, start + count) stored in these blocks: int64 [count]."""
    positions = np.arange(start, start + count)
    return block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """The work of one language step."""

    num_decodes: int = 0  # decode rows; chunks of one token are not counted
    decode_context: int = 0  # sum of keys that decodes and chunks of one token read
    prefill_tokens: int = 0  # tokens of all chunks
    prefill_pairs: float = 0.0  # (query, key) pairs of chunks of n > 1 tokens: n * start + n * (n + 1) / 2 each
    num_chunks: int = 0  # chunks of more than one token

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes: rows of its matrix products."""
        return self.num_decodes + self.prefill_tokens


@dataclass(frozen=True, slots=True)
class VisionLoad:
    """The work of one vision step: patches, and pairs of patches under full attention (the sum of the squares of the
    images' patch counts)."""

    num_patches: int = 0
    pairs: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class EncodeItem:
    """An image to encode: image `image_index` of a request, whose features are written to these blocks of the image
    cache in token order."""

    request_id: RequestId
    image_index: int
    digest: ImageDigest
    num_patches: int
    num_tokens: int
    block_ids: BlockIds  # [ceil(num_tokens / S_image)]


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """A vision step: the images to encode."""

    step_id: StepId
    items: tuple[EncodeItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


@dataclass(frozen=True, slots=True, eq=False)
class ImageSlice:
    """Image features in a chunk: the embeddings of its tokens [row, row + count) are features [offset, offset + count)
    of an image in the image cache."""

    row: int
    count: int
    offset: int
    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decode rows of a language step, one token each; entry i of every array belongs to row i.

    A row computes the KV of its token at position `starts` and samples the next one. Token -1 stands for the token that
    a step in flight samples for the same slot; the lane knows it first. `num_generated`: tokens of the request before
    the one that this row samples, the counter of the sampler. `seq_slots`: rows in tables of `max_running_requests`
    entries; a request keeps its slot from its start until it is preempted or forgotten.

    The arrays are not changed, except that new blocks of a request appear in its block table behind those that the row
    needs. Plans share unchanged arrays while the same requests decode.
    """

    request_ids: Int64s  # [B]
    seq_slots: Int64s  # [B]
    token_ids: Int64s  # [B]
    starts: Int64s  # [B]
    num_generated: Int64s  # [B]
    block_tables: BlockIds  # [B, W]; W is at least the blocks of the longest context

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRow:
    """A prefill chunk: computes KV for `token_ids` at positions [start, start + len(token_ids)).

    `sample`: also sample the token after the last position; set in the last chunk of a prefill. `num_generated`: number
    of generated tokens before that one. `scored`: also return the log probability of each prompt token that follows one
    of these positions. `state_slots`: slots of recurrent states that the chunk reads and writes; -1: of its own two.

    A recurrent state travels in KV blocks behind those of the tokens: `exported_state` are written with the state after
    the chunk, `imported_state` hold the state before it.
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
    state_slots: tuple[int, int] = (-1, -1)
    imported_state: BlockIds | None = None
    exported_state: BlockIds | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LanguagePlan:
    """A language step. Rows are numbered across both parts: decodes first, then chunks.

    While the step runs, the vision lane may run for `vision_s` seconds and then pauses until the step has ended. With a
    `partition` the device is divided while the vision lane has work: the step runs on that part of it, and vision runs
    on the rest without pauses.
    """

    step_id: StepId
    decodes: DecodeRows
    chunks: tuple[ChunkRow, ...]
    vision_s: float = math.inf
    partition: int = 0  # number of the partition; 0: both lanes on the whole device
    state_slots: Int64s | None = None  # [B] of recurrent states that decodes write, -1: of their own two; None: all -1

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.chunks)

    @property
    def load(self) -> LanguageLoad:
        """The work of the step for the cost model. A chunk of one token counts in `prefill_tokens`, but what it reads
        counts in `decode_context`, not in `prefill_pairs`."""
        num_decodes = len(self.decodes.starts)
        context = int(self.decodes.starts.sum()) + num_decodes
        tokens = num_chunks = 0
        pairs = 0.0  # (query, key) pairs of causal attention
        for row in self.chunks:
            count = len(row.token_ids)
            tokens += count
            if count > 1:
                num_chunks += 1
                pairs += count * row.start + count * (count + 1) / 2
            else:
                context += row.start + 1
        return LanguageLoad(num_decodes, context, tokens, pairs, num_chunks)
