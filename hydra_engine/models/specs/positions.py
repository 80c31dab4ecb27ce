"""Multimodal rotary positions (M-RoPE) of a prompt with spans in it, in integers (Qwen2-VL, section 2.1).

Text counts on all three axes alike. A span begins at the next position; its rows and columns count from there, its
temporal patches too; what follows begins behind the largest position on any axis, and so do generated tokens.

transformers 5.3 to 5.23 lets text behind a video begin past its rows and columns alone, so that the two differ once a
video lasts longer than it is wide; the models were trained with the paper's rule, which is the one here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.media import RopeSpan
from hydra_engine.models.specs.base import ItemPlan


def place_spans(spans: Sequence[tuple[int, ItemPlan]]) -> tuple[tuple[RopeSpan, ...], int]:
    """`spans`: (first token in the prompt, plan) in order. Returns their positions and what is to be added to the place
    of a token behind the prompt."""
    placed: list[RopeSpan] = []
    end = origin = following = 0  # place behind the last span; its origin; position of what follows it
    for start, item in spans:
        if not item.continues:
            origin = following + start - end
            following = origin
        following = max(following, origin + max(item.rows, item.columns, item.time + 1))
        end = start + item.num_tokens
        placed.append(RopeSpan(origin + item.time, origin, origin, item.columns, following - end))
    return tuple(placed), following - end
