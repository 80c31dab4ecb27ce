"""POST /tokenize and /detokenize, as vLLM's server has them."""

from __future__ import annotations

import msgspec

from hydra_engine.server.protocol.chat import Messages
from hydra_engine.server.protocol.fields import Name, Text, TokenIds
from hydra_engine.server.protocol.tools import Tools, Variables


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    tokens: TokenIds
