"""Everything a forward pass may look at. Passed as arguments; no module-level "current batch" exists.

Shape legend in `backend/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hydra_engine.backend.base import AttentionPlan


@dataclass(frozen=True, slots=True)
class LanguageInput:
    token_ids: Tensor  # [T] int64; any value at image rows
    positions: Tensor  # [T] int64 (1-D rotary) or [3, T] (multimodal rotary)
    slots: Tensor  # [T] int64, KV-cache slot of each token
    attention: AttentionPlan
    logit_rows: Tensor  # [B'] int64, rows whose logits are wanted
    image_rows: Tensor | None = None  # [M] int64, rows that take image features
    image_slots: Tensor | None = None  # [M] int64, their slots in the image cache


@dataclass(frozen=True, slots=True)
class VisionInput:
    """A batch of processed pictures and where their features go.

    For towers with one fixed size `pixels` is uint8 [I, height, width, 3]; towers with dynamic resolution take a
    list of such [h, w, 3] tensors.
    """

    pixels: Tensor | list[Tensor]
    grids: tuple[tuple[int, int, int], ...]  # per image (time, rows, columns) in patches
    slots: Tensor  # [sum of num_tokens] int64, image-cache slots in token order
