"""The requests of the API as typed structs: every field with its type and its bounds.

Fields that change nothing here are ignored, fields that would change the answer and are not built are refused by
name unless they hold their default. Does not know how a request is run.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hydra_engine.config import MAX_LIMIT_S, MAX_PRIORITY
from hydra_engine.core.request import (
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
    Slo,
)
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.strict_json import parse

logger = logging.getLogger(__name__)

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPT_TOKENS = 1 << 20
MAX_SALT_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the legacy endpoint

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Milliseconds = Annotated[float, Meta(ge=0.001, le=MAX_LIMIT_S * 1e3)]
RequestName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions have in common; null means the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: RequestName | None = None
    return_metrics: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] | None = None

    @property
    def slo(self) -> Slo:
        return Slo(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct, frozen=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str


class VideoUrl(msgspec.Struct, frozen=True):
    url: str


class VideoPart(msgspec.Struct, frozen=True, tag_field="type", tag="video_url"):
    """As vLLM's server takes it; OpenAI's API has no videos."""

    video_url: VideoUrl | str


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart | ImagePart | VideoPart], Meta(max_length=MAX_PARTS)] | str | None = None
    tool_calls: Annotated[list[msgspec.Raw], Meta(max_length=0)] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _sampling(self, max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`prompt` may be a list with one text or one list of token ids in it, as OpenAI's batch form."""

    prompt: str | Annotated[list[TokenId | str | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> SamplingParams:
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        return _sampling(self, max_tokens=max_tokens, logprobs=self.logprobs)

    def one_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return ids
        if len(self.prompt) > 1:
            raise InvalidRequest("several prompts in one request are not supported; send one each", param="prompt")
        only = self.prompt[0]
        assert not isinstance(only, int)
        return only


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: TokenIds


def _sampling(fields: SamplingFields, **chosen: Any) -> SamplingParams:
    """What the request names; SamplingParams has OpenAI's defaults for the rest."""
    for name in SamplingParams.__dataclass_fields__:
        if name not in chosen and (value := getattr(fields, name)) is not None:
            chosen[name] = value
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the engine takes them: known keys only, developer as system, media as objects with a URL."""
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    if message.content is None or isinstance(message.content, str):
        return {"role": role, "content": message.content or ""}
    return {"role": role, "content": [_plain_part(part) for part in message.content]}


def _plain_part(part: TextPart | ImagePart | VideoPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, VideoPart):
        url = part.video_url.url if isinstance(part.video_url, VideoUrl) else part.video_url
        return {"type": "video_url", "video_url": {"url": url}}
    picture = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(part.image_url)
    if picture.detail in ("low", "high"):  # every picture gets the model's own resolution
        _log_once("image_url.detail")
    return {"type": "image_url", "image_url": {"url": picture.url, "detail": picture.detail or "auto"}}


# ---- fields by name

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)

# name -> the values that ask for nothing. Anything else would change the answer and is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "prompt_logprobs": (),
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
    "allowed_token_ids": (),
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
        _log_once(name)
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


def _log_once(name: str) -> None:
    if name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
        _logged_names.add(name)
        logger.info("ignoring the request field %r", name[:64])
