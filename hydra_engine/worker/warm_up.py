"""Tiny steps that pay first-call costs (thread pools, kernel set-up, lazy pages of weights) before requests come.

Every slot is -1, so nothing is written to a cache; what is left in recurrent states is never read, for a request begins
without one. Does not know lanes or requests.
"""

from __future__ import annotations

import torch

from hydra_engine.backend.base import Draws, Ops, PagedCache, StateCache, StateRows
from hydra_engine.models.inputs import LanguageInput, States, VisionInput
from hydra_engine.specs.base import LanguageSpec, VisionSpec
from hydra_engine.specs.generic import GenericVisionSpec
from hydra_engine.worker.ports import ServedModel
from hydra_engine.worker.sampler import best_tokens

_SIDE = 224  # pixels; the family's rule makes of it what its tower takes
_MAX_TOKENS = 16  # of the prefill, and before the decode


def warm_vision(model: ServedModel, vision: VisionSpec, cache: PagedCache, device: torch.device) -> None:
    if isinstance(vision, GenericVisionSpec):
        return  # its pictures are made elsewhere, and loading has run the tower on one
    item = vision.plan_image(_SIDE, _SIDE).items[0]
    pixels = torch.zeros((item.num_pictures, item.height, item.width, 3), dtype=torch.uint8, device=device)
    slots = torch.full((item.num_tokens,), -1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        model.encode(VisionInput((pixels,), ((_SIDE, _SIDE),), (item.grid,), slots), cache)


def warm_language(
    model: ServedModel,
    ops: Ops,
    language: LanguageSpec,
    kv_cache: PagedCache,
    image_cache: PagedCache | None,
    states: StateCache | None,
    device: torch.device,
    *,
    max_model_len: int,
    decode: bool,
    draws: bool = False,
) -> None:
    """One prefill, with an image row where there is an image cache, or two decodes. `draws`: tokens are sampled where
    the logits are."""
    length = max(min(_MAX_TOKENS, max_model_len - 1), 1)
    counts, start = ((1, 1), length) if decode else ((length,), 0)
    lengths = torch.tensor(counts, dtype=torch.int32)
    ends = lengths.cumsum(0, dtype=torch.int32)
    num_tokens = int(ends[-1])
    num_context = lengths + start
    # Block 0 again and again: what it holds does not matter, it only must exist.
    width = -(-int(num_context.max()) // kv_cache.block_size)
    tables = torch.zeros((len(counts), width), dtype=torch.int32)
    plan = ops.plan_attention(torch.cat([torch.zeros(1, dtype=torch.int32), ends]), num_context, tables)
    merge = image_cache is not None and not decode
    first = torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(start, start + count, device=device) for count in counts])
    inputs = LanguageInput(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions if language.rope_sections is None else positions.expand(3, -1),
        slots=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        attention=plan,
        logit_rows=ends.to(device=device, dtype=torch.int64) - 1,
        position_end=int(num_context.max()),
        image_rows=first if merge else None,
        image_slots=first if merge else None,
        states=None if states is None else States(states, _state_rows(counts)),
    )
    with torch.inference_mode():
        logits = model.forward(inputs, kv_cache, image_cache)
        if draws:
            ops.sample(logits, _draws(logits.shape[0], device))
    best_tokens(logits.cpu().numpy())


def _draws(count: int, device: torch.device) -> Draws:
    """With every filter."""
    top_k = torch.full((count,), 2, dtype=torch.int32, device=device)
    temperatures, top_p, min_p, numbers = (torch.full((count,), x, device=device) for x in (1.0, 0.9, 0.01, 0.5))
    return Draws(temperatures, top_k, top_p, min_p, numbers)


def _state_rows(counts: tuple[int, ...]) -> StateRows:
    """As many rows, each in a place of its own (every slot has two) and none with a state before it."""
    ends = torch.tensor((0, *counts), dtype=torch.int64).cumsum(0)
    places = torch.arange(len(counts), dtype=torch.int64)
    return StateRows(ends, torch.zeros_like(places), places, places)
