"""Positions on three axes (M-RoPE), by the model's own get_rope_index.

The engine knows a picture by the rows and columns of its tokens: they lie on a grid from the next position on, and text
goes on behind its longer side (`models/specs/rope.py`). What a model counts otherwise is refused here, by comparison.
Opens no weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import ItemPlan
from hydra_engine.models.specs.rope import place_spans
from hydra_transformers.classes import classes_of

AXES = (0, 0, 0)  # of `LanguageSpec.rope_sections`: which pairs turn by which axis is the model's own business
Grid = tuple[int, int]  # (rows, columns)
Span = tuple[int, int]  # [begin, end)
RopeIndex = Callable[..., Any]


def find_rope_index(config: Any, model: Any) -> RopeIndex | None:
    """Returns the function by which a model class counts positions, bound to an instance without modules; None if it
    has none."""
    for kind in classes_of(config, model):
        if hasattr(kind, "get_rope_index"):
            bare = kind.__new__(kind)
            nn.Module.__init__(bare)
            bare.config = config
            index: RopeIndex = bare.get_rope_index
            return index
    return None


def true_positions(rope_index: RopeIndex, outputs: Mapping[str, Any], image_token_id: int) -> Tensor:
    """Returns the positions of a prompt, [3, T], by the model itself. `outputs` are the processor's. Raises
    CheckpointError if it counts another number of axes."""
    ids = outputs["input_ids"]
    known = {"mm_token_type_ids": (ids == image_token_id).int(), **outputs}
    names = inspect.signature(rope_index).parameters
    positions = rope_index(**{name: value for name, value in known.items() if name in names})[0]
    if positions.dim() != 3 or positions.shape[0] != len(AXES):
        raise CheckpointError(
            f"the model's positions have {positions.shape[0]} axes, and the engine counts time, rows and columns"
        )
    return torch.as_tensor(positions[:, 0])


def positions_on(spans: Sequence[Span], grids: Sequence[Grid], num_tokens: int) -> tuple[Tensor, int]:
    """Returns the engine's positions of a prompt with pictures, [3, T], and the offset from a token's index to its
    position behind the last one."""
    plans = [
        (begin, ItemPlan(1, 1, 1, 1, end - begin, (1, 1, 1), rows, columns))
        for (begin, end), (rows, columns) in zip(spans, grids, strict=True)
    ]
    ropes, delta = place_spans(plans)
    positions = torch.arange(num_tokens).repeat(len(AXES), 1)
    for (begin, end), rope in zip(spans, ropes, strict=True):
        own = torch.arange(end - begin)
        places = (torch.full_like(own, rope.time), rope.row + own // rope.columns, rope.column + own % rope.columns)
        positions[:, begin:end] = torch.stack(places)
        positions[:, end:] = torch.arange(end, num_tokens) + rope.text_delta
    return positions, delta


def grid_of(positions: Tensor, span: Span) -> Grid:
    """Returns the grid of the only picture in a prompt with `positions`, [3, T]. Raises CheckpointError if they are not
    of that form."""
    begin, end = span
    columns = int(positions[2, begin:end].max()) - begin + 1
    if columns > 0 and (end - begin) % columns == 0:
        grid = (end - begin) // columns, columns
        if torch.equal(positions_on([span], [grid], positions.shape[1])[0], positions):
            return grid
    raise CheckpointError(
        "the model's positions of a picture are no grid of rows and columns from the next position on, and the engine "
        "counts no others"
    )
