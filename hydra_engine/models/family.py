"""What a vision-language family adds to the shared decoder: its vision model and the names of its weights.

Every family's decoder sits at `language_model.model.` and `language_model.lm_head.` once names are canonical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydra_engine.models.parameters import Scope
from hydra_engine.models.vlm import Vision
from hydra_engine.specs.base import VisionSpec

Renames = tuple[tuple[str, str], ...]  # (how a name begins in a file, how the canonical name does); first match counts


@dataclass(frozen=True, slots=True)
class Family:
    """`build_vision` declares all slots of tower and projector under the root scope; `vision_names` are the beginnings
    of their canonical names, for roles that do not read them."""

    build_vision: Callable[[Scope, VisionSpec], Vision]
    vision_names: tuple[str, ...]
    renames: Renames
