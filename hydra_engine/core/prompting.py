"""What a caller may ask of the way from messages to a prompt: template options, and how many pixels pictures get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """For the model's chat template. `tools` in OpenAI's form ({"type": "function", "function": {...}}); `variables`
    are more names that the template can read (vLLM's chat_template_kwargs). With `continue_final_message` the prompt
    ends inside the last message, which the answer goes on with; then `add_generation_prompt` must be off."""

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Pixels that each picture of a request is resized to lie between, within what the engine allows; None: as
    configured. Families with one fixed size have nothing to change."""

    min_pixels: int | None = None
    max_pixels: int | None = None
