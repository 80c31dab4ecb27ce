"""Dummy steps without requests: for measurements, and for warm-ups, which pay first-call costs (thread pools, kernel
set-up, lazy pages of weights) before requests arrive.

Pictures and tokens are zeros. All slots are -1 and all blocks the first, so no cache is written and caches of one block
suffice; recurrent states that a dummy step leaves are never read, because a request begins without one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from hydra_engine.backend.base import Backend, Ops, PagedCache, SamplingTensors, StateCache, StateRows, States
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.layers.decoder import LanguageInput, Scored
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.base import ItemPlan, LanguageSpec, VisionSpec
from hydra_engine.worker.language.sampler import WORDS, SpecialTensors, sample_special


def blank_pictures(item: ItemPlan, source: tuple[int, int], count: int, device: torch.device) -> VisionInput:
    """Input of `count` spans as planned by `item`, pixels 0, each of a picture of `source` size (width, height); their
    features are not written."""
    shape = (item.num_pictures, item.height, item.width, 3)
    pixels = tuple(torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(count))
    slots = torch.full((count * item.num_tokens,), -1, dtype=torch.int64, device=device)
    return VisionInput(pixels, (source,) * count, (item.grid,) * count, slots)


def blank_rows(
    ops: Ops,
    language: LanguageSpec,
    cache: PagedCache,
    states: StateCache | None,
    counts: Sequence[int],
    contexts: Sequence[int],
    device: torch.device,
    *,
    merged: int = 0,
    scored: bool = False,
) -> LanguageInput:
    """Input of a dummy step whose row r has the last `counts[r]` tokens of a context of `contexts[r]`; it writes no
    cache but state slot r of `states`. The first `merged` tokens take image features, which needs an image cache.
    `scored`: logits of all tokens are computed, and dropped."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu_q = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    longest, num_tokens = max(contexts), int(ends[-1])
    tables = torch.zeros((len(counts), -(-longest // cache.block_size)), dtype=torch.int32)
    spans = [torch.arange(end - count, end, device=device) for count, end in zip(counts, contexts, strict=True)]
    positions = torch.cat(spans)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    every = torch.arange(num_tokens, dtype=torch.int64, device=device)
    return LanguageInput(
        token_ids=zeros,
        positions=positions if language.rope_sections is None else positions.expand(3, -1),
        slots=zeros - 1,
        attention=ops.plan_attention(cu_q, torch.tensor(contexts, dtype=torch.int32), tables),
        logit_rows=ends.to(device=device, dtype=torch.int64) - 1,
        position_end=longest,
        image_rows=every[:merged] if merged else None,
        image_slots=zeros[:merged] if merged else None,
        states=None if states is None else States(states, ops.plan_states(_state_rows(cu_q))),
        scored=Scored(every, _drop) if scored else None,
    )


def blank_sampling(count: int, device: torch.device) -> SamplingTensors:
    """Sampling parameters with all filters on: the most expensive case."""
    top_k = torch.full((count,), 50, dtype=torch.int32, device=device)
    temperatures, top_p, min_p, numbers = (torch.full((count,), x, device=device) for x in (1.0, 0.9, 0.01, 0.5))
    return SamplingTensors(temperatures, top_k, top_p, min_p, numbers)


def draw_blank(ops: Ops, logits: torch.Tensor) -> None:
    """Samples rows of logits [B, V] twice: as on the fast path, and as if all rows were special."""
    (count, vocabulary), device = logits.shape, logits.device
    sampling = blank_sampling(count, device)
    ops.sample(logits, sampling)
    packed = torch.zeros(WORDS * count, dtype=torch.int64, device=device)
    ids, values = (torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int32, torch.float64))
    counts, masks = (
        torch.zeros((1, columns), dtype=torch.int32, device=device) for columns in (vocabulary, -(-vocabulary // 32))
    )
    chosen = logits.index_select(0, torch.arange(count, device=device))  # as the rows of a step op by op
    sample_special(ops, chosen, sampling, SpecialTensors.from_packed(packed, count, ids, values, masks), counts)


def _drop(logits: torch.Tensor) -> None:
    """Drops prompt logits: scoring happens in host memory and is not measured."""


def _state_rows(cu_q: torch.Tensor) -> StateRows:
    """State rows that read and write one slot per row and begin without a state."""
    state_slots = torch.arange(cu_q.shape[0] - 1, dtype=torch.int64)
    return StateRows(cu_q.to(torch.int64), torch.zeros_like(state_slots), state_slots, state_slots)


_SIDE = 224  # pixels, before the family's resize rule
_CHECKPOINT = 2  # of an encode: the one after the first layer
_MAX_TOKENS = 16  # of the prefill, and before the decode


def warm_vision(
    model: ServedModel, vision: VisionSpec, cache: PagedCache, device: torch.device, *, whole: bool
) -> None:
    """Encodes the first span of a dummy picture. Unless `whole`, computes only the tower's first layer, for devices
    where the first call of an op costs about as much as any other: a tower takes seconds there, and later layers call
    the same ops. Does nothing for a tower whose pictures the family's own processor plans."""
    if vision.processor is not None:
        return  # its pictures are made elsewhere, and loading has run the tower on one
    item = vision.plan_image(_SIDE, _SIDE).items[0]
    batch = blank_pictures(item, (_SIDE, _SIDE), 1, device)
    checkpoints = itertools.count(1)

    def stop() -> None:
        if next(checkpoints) == _CHECKPOINT:
            raise _EnoughError

    with torch.inference_mode(), contextlib.suppress(_EnoughError):
        model.encode(batch if whole else replace(batch, checkpoint=stop), cache)


class _EnoughError(Exception):
    """The exception that ends an encode between two layers."""


def warm_language(
    model: ServedModel,
    backend: Backend,
    language: LanguageSpec,
    kv_cache: PagedCache,
    image_cache: PagedCache | None,
    states: StateCache | None,
    max_model_len: int,
    samples: bool,
    *,
    decode: bool,
) -> None:
    """Runs one dummy prefill, with an image feature if there is an image cache, or if `decode` a step of two decodes.
    Picks the best tokens on the host; `samples`: also samples on the logits' device."""
    ops, device = backend.ops, backend.device.torch_device
    length = max(min(_MAX_TOKENS, max_model_len - 1), 1)
    counts, start = ((1, 1), length) if decode else ((length,), 0)
    contexts = [start + count for count in counts]
    merged = 1 if image_cache is not None and not decode else 0
    with torch.inference_mode():
        inputs = blank_rows(ops, language, kv_cache, states, counts, contexts, device, merged=merged)
        logits = model.forward(inputs, kv_cache, image_cache)
        if samples:
            draw_blank(ops, logits)
        ops.best_tokens(logits.cpu())
