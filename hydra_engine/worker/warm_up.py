"""Tiny steps that pay first-call costs (thread pools, kernel set-up, lazy pages of weights) before requests come.

Does not know lanes or requests.
"""

from __future__ import annotations

import torch

from hydra_engine.backend.base import Ops, PagedCache, StateCache
from hydra_engine.models.specs.base import LanguageSpec, VisionSpec
from hydra_engine.worker.blank_steps import blank_pictures, blank_rows, blank_sampling
from hydra_engine.worker.language.sampler import best_tokens
from hydra_engine.worker.ports import ServedModel

_SIDE = 224  # pixels; the family's rule makes of it what its tower takes
_MAX_TOKENS = 16  # of the prefill, and before the decode


def warm_vision(model: ServedModel, vision: VisionSpec, cache: PagedCache, device: torch.device) -> None:
    if vision.processor is not None:
        return  # its pictures are made elsewhere, and loading has run the tower on one
    item = vision.plan_image(_SIDE, _SIDE).items[0]
    with torch.inference_mode():
        model.encode(blank_pictures(item, (_SIDE, _SIDE), 1, device), cache)


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
    samples: bool = False,
) -> None:
    """One prefill, with an image row where there is an image cache, or two decodes. `samples`: tokens are sampled where
    the logits are."""
    length = max(min(_MAX_TOKENS, max_model_len - 1), 1)
    counts, start = ((1, 1), length) if decode else ((length,), 0)
    contexts = [start + count for count in counts]
    merged = 1 if image_cache is not None and not decode else 0
    with torch.inference_mode():
        inputs = blank_rows(ops, language, kv_cache, states, counts, contexts, device, merged=merged)
        logits = model.forward(inputs, kv_cache, image_cache)
        if samples:
            ops.sample(logits, blank_sampling(logits.shape[0], device))
    best_tokens(logits.cpu().numpy())
