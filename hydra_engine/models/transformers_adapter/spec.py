"""Specs of checkpoints that run with transformers' own modules (`--model-impl transformers`).

Numbers come from transformers' config class and from a run of its processor, because config.json leaves out values that
equal a class's defaults. `describe_spec.py` reads them. Does not know how a picture is cut: the model's processor does,
for every picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, View, VisionSpec
from hydra_engine.models.specs.vision import check_picture

FAMILY = "transformers"
# An array of every payload besides those for the model: the token ids of the span, [num_tokens] int64.
SPAN_TOKEN_IDS = "span_token_ids"
ONE_PICTURE = "the model's processor makes something else of several pictures in a prompt than of each alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericVisionSpec(VisionSpec):
    """The tower of a model through transformers. A span is the processor's output for a picture, from its first image
    token to its last; text tokens in between belong to it, and the vision lane writes their embeddings. Maxima are
    measured on a few pictures of ordinary and extreme shapes."""

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
        """Plans the unchanged picture as the processor's input. The processor's output does not follow from the size
        alone, and budgets have no effect."""
        check_picture(width, height)
        return MediaPlan((View.whole(width, height),), ())

    def num_parameters(self) -> int:
        return self.tower_parameters

    def flops(self, num_patches: int) -> int:
        """FLOPs of the matrices alone."""
        return 2 * self.tower_parameters * num_patches


class Answer(msgspec.Struct):
    """The answer of the describing process: a spec without its vision part, and that part under its own type; or an
    error."""

    spec: ModelSpec | None = None
    vision: GenericVisionSpec | None = None
    error: ErrorInfo | None = None
