"""The inputs of a forward pass, all passed as arguments; there is no module-level "current batch".

Shape legend in `backend/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, States
from hydra_engine.backend.device import Send

# A language head computes the logits of this many scored rows at a time; those of a long chunk would not fit.
SCORED_ROWS = 256


class Scored(NamedTuple):
    """Rows of a step that need logits besides those of `logit_rows`. `take` receives slices [<= SCORED_ROWS, V] float32
    in the order of `rows` and must not keep them."""

    rows: Tensor  # [M] int64, M > 0
    take: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class LanguageInput:
    token_ids: Tensor  # [T] int64; any value at image rows
    # [T] int64 (1-D rotary) or [3, T] (multimodal rotary: time, row, column; alike where a row takes no image feature)
    positions: Tensor
    slots: Tensor  # [T] int64, KV-cache slot of each token
    attention: AttentionPlan
    logit_rows: Tensor  # [B'] int64, rows whose logits are wanted
    position_end: int  # more than the largest of `positions`
    image_rows: Tensor | None = None  # [M] int64, rows that take image features
    image_slots: Tensor | None = None  # [M] int64, their slots in the image cache
    states: States | None = None  # for models whose layers keep some
    scored: Scored | None = None


def no_checkpoint() -> None:
    """A checkpoint that does not wait."""


@dataclass(frozen=True, slots=True)
class VisionInput:
    """A batch of image spans and the slots of their features; entry i of every tuple belongs to span i.

    `pixels[i]` is uint8 [pictures, height, width, 3]: a picture, a base picture with its tiles, or the frames of one
    temporal patch, as planned by the family's spec. Spans may differ in size. Models that run through transformers get
    `arrays[i]` instead: their processor's tensors by name.

    A tower calls `checkpoint`, which may wait, between its layers. With `piece_rows` it also calls it inside layers and
    computes at most that many rows of a layer at a time; see `layers/vision.py`."""

    pixels: tuple[Tensor, ...]
    sources: tuple[tuple[int, int], ...]  # (width, height) of the picture that the user gave
    grids: tuple[tuple[int, int, int], ...]  # (time, rows, columns) in patches
    slots: Tensor  # [sum of num_tokens] int64, image-cache slots in token order
    arrays: tuple[Mapping[str, Tensor], ...] = ()
    checkpoint: Callable[[], None] = no_checkpoint
    piece_rows: int = 0
    send: Send | None = None  # copies a tower's host arrays to the device; None: with blocking copies
