"""Fields about reasoning in the requests of each API. Does not know what models and their templates can do."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hydra_engine.core.sampling import MAX_TOKENS_LIMIT
from hydra_engine.server.protocol.fields import log_once
from hydra_engine.server.tools.reasoning import Wish

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]


class ThinkingConfig(msgspec.Struct, frozen=True):
    """Anthropic's `thinking`, and the chat field of DeepSeek, GLM and Kimi. The budget is not enforced; it is only a
    target in those APIs too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_enabled(self) -> bool:
        if self.budget_tokens is not None:
            log_once("thinking.budget_tokens")
        return self.type != "disabled"


class ReasoningConfig(msgspec.Struct, frozen=True):
    """`reasoning` of Responses; reasoning is returned in full, never as a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def wish(self) -> Wish:
        for name in ("summary", "generate_summary"):
            if getattr(self, name) is not None:
                log_once(f"reasoning.{name}")
        return Wish(effort=self.effort, param="reasoning.effort")
