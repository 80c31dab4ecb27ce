"""Specs of checkpoints that run with transformers' own modules (`--model-impl transformers`).

Numbers come from transformers' config class and from a run of its processor, because config.json leaves out values that
equal a class's defaults. `describe.py` reads them. Does not know how a picture is cut: the model's processor does,
for every picture.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, View, VisionSpec
from hydra_engine.models.specs.vision import check_picture

FAMILY = "transformers"
DEEPSTACK = (
    "its tower gives features to several layers of the decoder (DeepStack), and the adapter hands on those for the "
    "first one only"
)


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

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Answer:
        return cls(spec=replace(spec, vision=None), vision=cast(GenericVisionSpec | None, spec.vision))

    def model_spec(self) -> ModelSpec:
        assert self.spec is not None
        return replace(self.spec, vision=self.vision)


# What it raises on pictures, settings and files that it cannot take; their classes say no more than that.
PROCESSOR_ERRORS = (
    OSError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)
# Errors whose message comes from Python itself.
_OF_PYTHON = (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, NotImplementedError)
_UNPACKING = re.compile(r"values to unpack|invalid literal for|could not convert string")
_MAX_CHARS = 300


# ---- readable messages for exceptions from transformers' code


def describe_error(error: BaseException) -> str:
    """Returns one line: the error's message if it was written for readers, else the place in the code that failed."""
    text = " ".join(str(error).split())
    if isinstance(error, _OF_PYTHON) or not text or _UNPACKING.search(text):
        frames = traceback.extract_tb(error.__traceback__)
        at = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "an unknown place"
        missing = _missing(error)
        what = f", in which there is no {missing[:60]}" if missing else ""
        return f"code of transformers or of the model does not work with these files{what} ({at})"
    if len(text) <= _MAX_CHARS:
        return text
    head = text[:_MAX_CHARS]
    sentence = head.rfind(". ")
    return head[: sentence + 1] if sentence > 0 else head[: head.rfind(" ")] + " ..."


def _missing(error: BaseException) -> str:
    """Name of a missing field of a config, a tokenizer or a processor; empty for other errors."""
    name = error.name if isinstance(error, AttributeError) and hasattr(error.obj, "save_pretrained") else None
    if isinstance(error, KeyError) and error.args:
        name = error.args[0]
    return name if isinstance(name, str) else ""
