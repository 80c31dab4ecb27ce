"""Reads a body as a typed request. Fields that change nothing here are ignored, fields that would change the answer and
are not built are refused by name unless they hold their default.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.strict_json import parse

logger = logging.getLogger(__name__)

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
}

_MAX_LOGGED_NAMES = 256
_logged_names: set[str] = set()

R = TypeVar("R", bound=msgspec.Struct)


def parse_request(body: bytes | bytearray, kind: type[R]) -> R:
    """The body as `kind`, after the fields that it does not have were ignored or refused. A kind with other fields to
    refuse than chat and completions has a class variable of its own named UNSUPPORTED."""
    request, names = parse(body, kind)
    others = names.difference(kind.__struct_fields__)
    refused = refused_fields(kind)
    if others & refused.keys():
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in sorted(others & refused.keys()):
            _refuse_unless_default(name, bytes(values[name]), refused[name])
    for name in others.difference(IGNORED, refused):
        log_once(name)
    return request


def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Of requests of this kind: name -> the values, beside null, that ask for nothing."""
    refused: dict[str, tuple[Any, ...]] = UNSUPPORTED | getattr(kind, "UNSUPPORTED", {})
    return {name: values for name, values in refused.items() if name not in kind.__struct_fields__}


def _refuse_unless_default(name: str, raw: bytes, defaults: tuple[Any, ...]) -> None:
    accepted = (None, *defaults)
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
