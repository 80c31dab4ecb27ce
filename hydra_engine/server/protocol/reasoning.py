"""What requests of each API say of reasoning. Does not know what models and their templates can do."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hydra_engine.core.request import MAX_TOKENS_LIMIT
from hydra_engine.server.protocol.fields import log_once
from hydra_engine.server.tools.reasoning import Wish

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]


class ThinkingConfig(msgspec.Struct, frozen=True):
    """Anthropic's `thinking`, and that of chats at DeepSeek, GLM and Kimi. Nothing holds the reasoning to its budget,
    which is a target there too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def on(self) -> bool:
        if self.budget_tokens is not None:
            log_once("thinking.budget_tokens")
        return self.type != "disabled"


class ReasoningConfig(msgspec.Struct, frozen=True):
    """`reasoning` of Responses; it is given as it is, not as a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def wish(self) -> Wish:
        for name in ("summary", "generate_summary"):
            if getattr(self, name) is not None:
                log_once(f"reasoning.{name}")
        return Wish(effort=self.effort, param="reasoning.effort")
