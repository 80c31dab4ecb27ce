"""POST /tokenize and /detokenize, in vLLM's form: load generators count tokens with them."""

from __future__ import annotations

from aiohttp import web

from hydra_engine.core.call import GenerationCall
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.generate import check_model, json_response
from hydra_engine.server.http.access_control import cache_salt
from hydra_engine.server.http.body import parse_in_turn, read_request
from hydra_engine.server.protocol.chat import chat_messages, continues_last, plain_tools, template_options
from hydra_engine.server.protocol.fields import pixel_budget
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, Text, TokenizeRequest, Tokens
from hydra_engine.server.state import client_of, loaded_engine


async def tokenize(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    body = await read_request(request, TokenizeRequest)
    check_model(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    call = GenerationCall(
        prompt=body.prompt,
        messages=await parse_in_turn(request, chat_messages, body.messages or ()),
        raw=True,
        cache_salt=cache_salt(request, None),
        client=client_of(request),
        pixels=pixel_budget(body.mm_processor_kwargs),
        template=template_options(
            plain_tools(body.tools or ()),
            body.chat_template_kwargs,
            body.add_generation_prompt,
            continues_last(body.messages or (), body.continue_final_message),
            body.add_special_tokens,
        ),
    )
    tokens = await engine.tokenize_call(call)
    spelled = await engine.atoken_strs(tokens) if body.return_token_strs else None
    return json_response(Tokens(len(tokens), engine.max_model_len, tokens, spelled))


async def detokenize(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    body = await read_request(request, DetokenizeRequest)
    check_model(request, body.model)
    return json_response(Text(await engine.adetokenize(body.tokens, client_of(request))))
