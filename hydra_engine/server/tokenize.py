"""POST /tokenize and /detokenize, in vLLM's form: load generators count tokens with them."""

from __future__ import annotations

import msgspec
from aiohttp import web

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.body import read_request
from hydra_engine.server.context import loaded_engine
from hydra_engine.server.generate import check_model, json_response
from hydra_engine.server.protocol.chat import plain_messages
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from hydra_engine.server.protocol.tools import plain_tool, template_options


class Tokens(msgspec.Struct, frozen=True):
    """`token_strs`: as the vocabulary spells them, where that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    asked = await read_request(request, TokenizeRequest)
    check_model(request, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    # A rendered conversation holds its special tokens already.
    add_special = asked.add_special_tokens if asked.add_special_tokens is not None else asked.messages is None
    tokens = await engine.atokenize(
        asked.prompt,
        messages=plain_messages(asked.messages) if asked.messages is not None else None,
        add_special_tokens=add_special,
        template=template_options(
            [plain_tool(tool) for tool in asked.tools or ()],
            asked.chat_template_kwargs,
            asked.add_generation_prompt,
            asked.continue_final_message,
        ),
    )
    spelled = await engine.atoken_strs(tokens) if asked.return_token_strs else None
    return json_response(Tokens(len(tokens), engine.max_model_len, tokens, spelled))


async def detokenize(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    asked = await read_request(request, DetokenizeRequest)
    check_model(request, asked.model)
    return json_response(Text(await engine.adetokenize(asked.tokens)))
