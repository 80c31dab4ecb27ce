"""One call of the engine: what a client of the server or a user of `Engine` asks for, as the preprocessor gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_engine.core.chat import ChatMessage, MediaPart
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget, TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """`messages`, or where there are none a `prompt` (text or token ids) with the `media` that belong to it.

    A text goes through the chat template as a user's message, unless it is `raw`; a raw text and token ids hold a
    placeholder for each picture and video. `slo` are the request's own limits, `priority` its place (the smaller one
    goes first); calls with different `cache_salt` reuse nothing of each other. Without a `request_id` it gets one.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | Sequence[int] | None = None
    messages: tuple[ChatMessage, ...] = ()
    media: tuple[MediaPart, ...] = ()
    raw: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)
    pixels: PixelBudget = AS_CONFIGURED
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    cache_salt: str = ""
    request_id: str | None = None
