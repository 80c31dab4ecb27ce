"""Multimodal rotary positions (M-RoPE) of a prompt with spans, in integers (Qwen2-VL, section 2.1).

Text advances all three axes alike. A span begins at the next position, from which its rows, columns and temporal
patches count. The next text, or generated token, follows the largest position on any axis.

In transformers 5.3 to 5.23 text after a video follows its rows and columns only, so results differ if a video lasts
longer than it is wide. The models were trained with the paper's rule, which is implemented here.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.request import RopeSpan
from hydra_engine.models.specs.base import ItemPlan


def place_spans(spans: Sequence[tuple[int, ItemPlan]]) -> tuple[tuple[RopeSpan, ...], int]:
    """Returns the positions of `spans`, (first token in the prompt, plan) in order, and the offset from a token's index
    to its position after the last span."""
    placed: list[RopeSpan] = []
    end = origin = following = 0  # index after the last span; its origin; position of the next token
    for start, item in spans:
        if not item.continues:
            origin = following + start - end
            following = origin
        following = max(following, origin + max(item.rows, item.columns, item.time + 1))
        end = start + item.num_tokens
        placed.append(RopeSpan(origin + item.time, origin, origin, item.columns, following - end))
    return tuple(placed), following - end
