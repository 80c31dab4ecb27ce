"""POST /tokenize and /detokenize: their requests and answers, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hydra_engine.server.protocol.chat import Messages, Tools, Variables
from hydra_engine.server.protocol.fields import Name, ProcessorSettings, TokenId
from hydra_engine.server.protocol.fields import Text as PromptText

MAX_DETOKENIZED = 1 << 18  # ids; about 40 ms, in which no other thread runs


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
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]


class Tokens(msgspec.Struct, frozen=True):
    """Token ids; `token_strs` is the vocabulary's spelling of each, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str
