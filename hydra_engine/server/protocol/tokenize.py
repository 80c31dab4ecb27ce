"""POST /tokenize and /detokenize: their requests and answers, in vLLM's form."""

from __future__ import annotations

import msgspec

from hydra_engine.server.protocol.chat import Messages, Tools, Variables
from hydra_engine.server.protocol.fields import Name, TokenIds
from hydra_engine.server.protocol.fields import Text as PromptText
from hydra_engine.server.protocol.pixels import ProcessorSettings


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    prompt: PromptText | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ProcessorSettings | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    tokens: TokenIds


class Tokens(msgspec.Struct, frozen=True):
    """`token_strs`: as the vocabulary spells them, where that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str
