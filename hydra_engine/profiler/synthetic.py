"""Synthetic requests and plans to measure: random tokens, and pictures of noise.

They are for an instance that does not serve yet: all blocks and slots are free. Numpy only; no lanes, tensors or time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hydra_engine.core.ids import ImageDigest, RequestId, StepId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import ChunkRow, DecodeRows, EncodeItem, LanguagePlan, VisionPlan
from hydra_engine.core.request import ImageItem, Request, RopeSpan
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.profiler.grid import LanguagePoint, Sizes, VisionPoint

_FIRST_PICTURE_ID = 1 << 20  # of requests with pictures; below it a request's id is its slot
_DRIFT = 64  # tokens that a slot's state may be ahead of the start in a point
_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


def text_request(seq_slot: int, max_model_len: int) -> Request:
    """The request of one slot in language steps. Greedy, because the surface excludes the cost of random sampling."""
    return Request(RequestId(seq_slot), (0,), _SAMPLING, max_model_len - 1, seed=seq_slot, arrival_s=0.0)


def picture_request(index: int, point: VisionPoint) -> tuple[Request, list[PixelPayload]]:
    """Returns a request with `point.count` spans of noise with different digests, and their pixels."""
    item, (width, height) = point.item, point.source
    rng = np.random.default_rng(index)
    data = rng.integers(0, 256, item.num_pictures * item.width * item.height * 3, dtype=np.uint8).tobytes()
    images, payloads = [], []
    for number in range(point.count):
        digest = ImageDigest(hashlib.blake2b(b"noise %d %d" % (index, number), digest_size=32).digest())
        rope = RopeSpan(0, 0, 0, max(item.columns, 1), 0)
        start = number * item.num_tokens
        image = ImageItem(digest, width, height, item.num_patches, item.num_tokens, start, item.grid, rope)
        images.append(image)
        payloads.append(PixelPayload(digest, item.width, item.height, data, item.num_pictures))
    request = Request(
        RequestId(_FIRST_PICTURE_ID + index),
        (0,) * (point.count * item.num_tokens),
        _SAMPLING,
        1,
        seed=index,
        arrival_s=0.0,
        images=tuple(images),
    )
    return request, payloads


class PlanMaker:
    """A source of plans for one instance, with ascending step ids. Rows of a step have separate blocks, as in serving,
    so that they share no cached memory.

    `stateful`: a row of a slot begins where the slot's last row ended, or at 0. `preparation` brings slots there.
    """

    def __init__(self, sizes: Sizes, vocab_size: int, *, stateful: bool = False, seed: int = 0) -> None:
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._stateful = stateful
        self._rng = np.random.default_rng(seed)
        self._steps = 0
        self._lengths = [0] * sizes.max_num_seqs  # tokens that a slot's state has seen

    def opening(self) -> list[LanguagePlan]:
        """Steps that assign all slots, with one token per request: a slot's first row must be a chunk."""
        seq_slots, size = range(self._sizes.max_num_seqs), self._sizes.token_budget
        rows = min(size, self._sizes.kv_tokens // self._sizes.block_size)
        return [
            self._plan(0, [], [(seq_slot, 0, 1) for seq_slot in seq_slots[begin : begin + rows]])
            for begin in range(0, len(seq_slots), rows)
        ]

    def preparation(self, point: LanguagePoint) -> list[LanguagePlan]:
        """Steps that bring the states of `point`'s slots to the starts of its rows; none for a model without states."""
        if not self._stateful:
            return []
        plans = []
        for seq_slot, start in enumerate(_starts(point)):
            if start <= self._lengths[seq_slot] <= start + _DRIFT or not start:
                continue
            for begin in range(0, start, self._sizes.token_budget):
                count = min(self._sizes.token_budget, start - begin)
                plans.append(self._plan(0, [], [(seq_slot, begin, count)]))
        return plans

    def language(self, point: LanguagePoint) -> LanguagePlan:
        """The plan of a point. Decodes have the first slots, chunks the next. A decode with `context` keys computes the
        last one."""
        starts = _starts(point)
        if self._stateful:
            starts = [self._lengths[seq_slot] if start else 0 for seq_slot, start in enumerate(starts)]
        rows = point.num_decodes
        chunks = [(rows + i, starts[rows + i], count) for i, (count, _) in enumerate(point.chunks)]
        return self._plan(rows, starts[:rows], chunks)

    def vision(self, request: Request) -> VisionPlan:
        """A plan that encodes all pictures of the request."""
        items, first = [], 0
        for index, image in enumerate(request.images):
            count = -(-image.num_tokens // self._sizes.image_block_size)
            blocks = np.arange(first, first + count, dtype=np.int32)
            items.append(EncodeItem(request.id, index, image.digest, image.num_patches, image.num_tokens, blocks))
            first += count
        assert first <= self._sizes.num_image_blocks, "more pictures than the image cache holds"
        return VisionPlan(self._step_id(), tuple(items))

    def _plan(self, num_decodes: int, starts: Sequence[int], chunks: Sequence[tuple[int, int, int]]) -> LanguagePlan:
        """Builds a plan. `starts` are of the decodes; chunks are (slot, start, tokens)."""
        lengths = [start + 1 for start in starts] + [start + count for _, start, count in chunks]
        tables = self._tables(lengths)
        seq_slots = np.arange(num_decodes, dtype=np.int64)
        decodes = DecodeRows(
            request_ids=seq_slots,
            seq_slots=seq_slots.copy(),
            token_ids=self._tokens(num_decodes),
            starts=np.asarray(starts, dtype=np.int64),
            num_generated=np.ones(num_decodes, dtype=np.int64),
            block_tables=_stacked(tables[:num_decodes]),
        )
        rows = tuple(
            ChunkRow(
                RequestId(seq_slot),
                seq_slot,
                tuple(self._tokens(count).tolist()),
                start,
                blocks,
                len(blocks),
                sample=True,
                num_generated=0,
            )
            for (seq_slot, start, count), blocks in zip(chunks, tables[num_decodes:], strict=True)
        )
        for seq_slot, length in zip(
            [*range(num_decodes), *(seq_slot for seq_slot, _, _ in chunks)], lengths, strict=True
        ):
            self._lengths[seq_slot] = length
        return LanguagePlan(self._step_id(), decodes, rows)

    def _tokens(self, count: int) -> npt.NDArray[np.int64]:
        return self._rng.integers(0, self._vocab_size, count, dtype=np.int64)

    def _tables(self, lengths: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """Block ids of each row, allocated in order. They wrap around at the end of the cache, because a row with a
        state may be slightly longer than in its point."""
        num_blocks = self._sizes.kv_tokens // self._sizes.block_size
        counts = [-(-length // self._sizes.block_size) for length in lengths]
        ends = np.cumsum([0, *counts]).tolist()
        return [np.arange(begin, end, dtype=np.int32) % num_blocks for begin, end in pairwise(ends)]

    def _step_id(self) -> StepId:
        self._steps += 1
        return StepId(self._steps)


def _starts(point: LanguagePoint) -> list[int]:
    return [point.context - 1] * point.num_decodes + [start for _, start in point.chunks]


def _stacked(tables: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Stacks B tables to [B, W], padded with zeros."""
    stacked = np.zeros((len(tables), max((len(table) for table in tables), default=1)), dtype=np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked
