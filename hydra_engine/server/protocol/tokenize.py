"""POST /tokenize and /detokenize, as vLLM's server has them."""

from __future__ import annotations

import msgspec

from hydra_engine.server.protocol.chat import Messages
from hydra_engine.server.protocol.fields import TokenIds


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: TokenIds
