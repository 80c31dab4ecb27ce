"""Checkpoints that run with transformers' own modules (`--model-impl transformers`): what the engine must know of them.

Numbers come from transformers' config class and from its processor at work, because config.json leaves out what equals
a class's defaults. `describe_spec.py` reads them. Does not know how a picture is cut: the model's processor does, for
every picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, View, VisionSpec
from hydra_engine.models.specs.geometry import check_picture

FAMILY = "transformers"
# An array of every payload besides those for the model: the token ids of the span, [num_tokens] int64.
SPAN_TOKEN_IDS = "span_token_ids"
ONE_PICTURE = "the model's processor makes something else of several pictures in a prompt than of each alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericVisionSpec(VisionSpec):
    """A span is what the processor puts in a picture's place, from its first image token to its last one; text tokens
    in between belong to it, and the vision lane writes their embeddings. The largest numbers are those of a few
    pictures of ordinary and extreme shapes."""

    max_tokens: int  # of a span
    max_patches: int
    tower_parameters: int  # about

    @property
    def max_tokens_per_image(self) -> int:
        return self.max_tokens

    @property
    def max_patches_per_image(self) -> int:
        return self.max_patches

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        """What the processor is given, the picture as it is: what it makes of it is not known from the size alone, nor
        does it take a budget."""
        check_picture(width, height)
        return MediaPlan((View.whole(width, height),), ())

    def num_parameters(self) -> int:
        return self.tower_parameters

    def flops(self, num_patches: int) -> int:
        """Of the matrices alone."""
        return 2 * self.tower_parameters * num_patches


class Answer(msgspec.Struct):
    """Of the describing process: a spec without its vision part, which comes beside it under its own type; or an
    error."""

    spec: ModelSpec | None = None
    vision: GenericVisionSpec | None = None
    error: ErrorInfo | None = None
