"""Reads a body as a typed request. Fields that change nothing here are ignored, fields that would change the answer and
are not built are refused by name unless they hold their default.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.strict_json import parse

logger = logging.getLogger(__name__)

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)

# name -> the values that ask for nothing. Anything else would change the answer and is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "lora_path": (),
}

_MAX_LOGGED_NAMES = 256
_logged_names: set[str] = set()

R = TypeVar("R", bound=msgspec.Struct)


def parse_request(body: bytes, kind: type[R]) -> R:
    """The body as `kind`, after the fields that it does not have were ignored or refused."""
    request, names = parse(body, kind)
    others = names.difference(kind.__struct_fields__)
    if others & UNSUPPORTED.keys():
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in sorted(others & UNSUPPORTED.keys()):
            _refuse_unless_default(name, bytes(values[name]))
    for name in others.difference(IGNORED, UNSUPPORTED):
        log_once(name)
    return request


def _refuse_unless_default(name: str, raw: bytes) -> None:
    accepted = (None, *UNSUPPORTED[name])
    if not _is_one_of(raw, accepted):
        hint = f"leave it out or send {msgspec.json.encode(accepted[1]).decode()}" if accepted[1:] else "leave it out"
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
    return any(type(value) is type(one) and value == one for one in accepted)


def log_once(name: str) -> None:
    if name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
        _logged_names.add(name)
        logger.info("ignoring the request field %r", name[:64])
