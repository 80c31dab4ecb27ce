"""Reads a request body within the limits of its client, of type, size, time and speed, and of what all bodies may hold
together, as a typed struct: fields that change nothing here are ignored, fields that would change the answer and are
not built are refused by name unless they hold their default. Does not know what the others mean.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine.core.byte_budget import Lease
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, Unavailable, UnsupportedMediaType
from hydra_engine.server.http.access import ACCESS
from hydra_engine.server.http.strict_json import parse
from hydra_engine.server.protocol.fields import log_once
from hydra_engine.server.state import CONFIG, STATE, client_of

LEAST_RATE = 1024  # bytes a second of a body that is not there yet
_PACE = 1 / 6  # of the time that a body may take: over so much of it the rate is taken
_LARGE_BYTES = 1 << 18  # from here on parsing takes a good part of a millisecond, and the thread
# One: parsing holds the interpreter's lock, so that more of them would only take more turns from the loop.
_parser = ThreadPoolExecutor(1, "large-bodies")

R = TypeVar("R", bound=msgspec.Struct)

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier"} | {"prompt_cache_key", "prompt_cache_retention"}
)

# name -> the values that ask for nothing. Anything else would change the answer and is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "lora_path": (),
    # of vLLM alone
    "logits_processors": ([],),
    "truncation_side": (),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
    "media_io_kwargs": ({},),
    "repetition_detection": (),
    # of SGLang
    "input_ids": (),
    "stop_regex": ("", []),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    # of llama.cpp, Ollama and transformers
    "repeat_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "samplers": (),
    "dynatemp_range": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "grammar": ("",),
    "n_predict": (),
    "max_new_tokens": (),
    "enable_thinking": (),
    "images": ([],),
}
# name -> what asks for the same, the first one that the kind of request has
_INSTEAD = {
    "repeat_penalty": ("repetition_penalty",),
    "grammar": ("structured_outputs.grammar",),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "images": ("messages[].content", "input[].content"),
    "input_ids": ("prompt",),
}

_LEASE = web.RequestKey("body_lease", Lease)


@web.middleware
async def body_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What a body holds, as text and as what was made of it, is held until its answer has been made."""
    with request.app[STATE].bodies.lease(client_of(request)) as lease:
        request[_LEASE] = lease
        try:
            return await handler(request)
        finally:
            request[ACCESS].bytes_in = lease.held


async def read_request(request: web.Request, kind: type[R]) -> R:
    """The one way to a body; every request that has one counts for its client."""
    config = request.app[CONFIG]
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("compressed request bodies are not accepted; send plain JSON")
    if request.content_type != "application/json":
        raise UnsupportedMediaType("the request body must be JSON: send Content-Type: application/json")
    request.app[STATE].clients.count(client_of(request))
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await _read(request, config.max_body_bytes, config.body_timeout_s * _PACE)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {config.body_timeout_s:g} seconds") from None
    if len(body) < _LARGE_BYTES:
        return parse_request(body, kind)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse_request, body, kind)


async def _read(request: web.Request, most: int, pace_s: float) -> bytearray:
    """Bytes count as they come, so that a length that was only announced takes nothing from others; and they have to
    come, as nobody else has what these hold."""
    lease = request[_LEASE]
    announced = request.content_length or 0
    if announced > most:
        raise _too_large(most)
    if not lease.fits(announced):
        raise _overloaded()
    body, num_paced = bytearray(), 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(pace_s) as pace:
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > most:
                    raise _too_large(most)
                if not lease.take(len(chunk)):
                    raise _overloaded()
                body += chunk
                if len(body) - num_paced >= LEAST_RATE * pace_s:
                    num_paced = len(body)
                    pace.reschedule(loop.time() + pace_s)
    except TimeoutError:
        message = f"the request body came slower than {LEAST_RATE} bytes a second for {pace_s:g} s"
        raise RequestTimeout(message) from None
    return body


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {size(most)}")


def _overloaded() -> Unavailable:
    return Unavailable("request bodies in progress have reached their limit (max_inflight_body_bytes); try again later")


# ---- the bytes as a struct


def parse_request(body: bytes | bytearray, kind: type[R]) -> R:
    """The body as `kind`, after the fields that it does not have were ignored or refused. A kind with other fields to
    refuse than chat and completions has a class variable of its own named UNSUPPORTED."""
    request, names = parse(body, kind)
    others = names.difference(kind.__struct_fields__)
    refused = refused_fields(kind)
    if others & refused.keys():
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in sorted(others & refused.keys()):
            _refuse_unless_default(name, bytes(values[name]), refused[name], kind)
    for name in others.difference(IGNORED, refused):
        log_once(name)
    return request


def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The refused fields of a kind of request: name -> the values, beside null, that ask for nothing."""
    refused: dict[str, tuple[Any, ...]] = UNSUPPORTED | getattr(kind, "UNSUPPORTED", {})
    return {name: values for name, values in refused.items() if name not in kind.__struct_fields__}


def _refuse_unless_default(name: str, raw: bytes, defaults: tuple[Any, ...], kind: type[msgspec.Struct]) -> None:
    accepted = (None, *defaults)
    if not _is_one_of(raw, accepted):
        hint = f"leave it out or send {msgspec.json.encode(accepted[1]).decode()}" if accepted[1:] else "leave it out"
        fields = kind.__struct_fields__
        others = [other for other in _INSTEAD.get(name, ()) if re.split(r"\W", other, maxsplit=1)[0] in fields]
        hint = f"use {others[0]}" if others else hint
        raise InvalidRequest(
            f"{name} is not supported by this server; {hint}", param=name, code="unsupported_parameter"
        )


def _is_one_of(raw: bytes, accepted: tuple[Any, ...]) -> bool:
    if len(raw) > 64:
        return False
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number that does not fit
        return False
    return any(type(value) is type(other) and value == other for other in accepted)
