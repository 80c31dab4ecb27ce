"""What the requests of all generating endpoints have in common: field types with their bounds, and sampling.

Does not know the other fields of any endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hydra_engine.config import MAX_LIMIT_S, MAX_PRIORITY
from hydra_engine.core.request import (
    MAX_ALLOWED_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
    Slo,
)
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.strict_json import NO_NUL
from hydra_engine.server.protocol.structured import StructuredFields, grammar_of

MAX_PROMPT_TOKENS = 1 << 20
MAX_SALT_CHARS = 256
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1 << 24  # of one text; what a context has room for is less, and a whole body has a limit of its own
MAX_URL_CHARS = 1 << 28  # data URLs; a picture's and a video's bytes are counted before they are decoded

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=NO_NUL)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
MediaUrl = Annotated[str, Meta(max_length=MAX_URL_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Milliseconds = Annotated[float, Meta(ge=0.001, le=MAX_LIMIT_S * 1e3)]
# `$` would let a newline through at the end.
TokenName = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]  # an id as a key of a JSON object
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
RequestName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}\Z")]


P = TypeVar("P")
C = TypeVar("C")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StructuredFields, frozen=True, kw_only=True):
    """What the requests of all generating endpoints have in common; null means the default everywhere."""

    model: Name | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: RequestName | None = None
    return_metrics: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS, pattern=NO_NUL)] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_prompt_copies(self) -> int:
        """How often an answer repeats what it says of a prompt."""
        return 1

    @property
    def logprob_fields(self) -> tuple[str, ...]:
        """What says how many log probabilities are asked for; the last one above all."""
        return "n", "max_tokens", "prompt_logprobs", "top_logprobs"

    @property
    def slo(self) -> Slo:
        return Slo(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
        )


class SamplingFields(GenerationFields, frozen=True, kw_only=True):
    """What chat and completions have in common besides."""

    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: StopStrings | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def content_of(content: list[P] | str, param: str, part_of: Callable[[P, str], C]) -> str | tuple[C, ...]:
    """A message's content for the engine. `part_of` makes a part of the core from one of the dialect and its place."""
    if isinstance(content, str):
        return content
    return tuple(part_of(part, f"{param}[{index}]") for index, part in enumerate(content))


def sampling_of(fields: GenerationFields, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
    """What the request names, and `defaults` for the rest."""
    if (grammar := grammar_of(fields)) is not None:
        if chosen.get("grammar") is not None:
            raise InvalidRequest("output can have one form only; leave out one of them", param=grammar.param)
        chosen["grammar"] = grammar
    if fields.logit_bias:
        chosen["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    for name in SamplingParams.__dataclass_fields__.keys() & fields.__struct_fields__:
        if name not in chosen and name != "logit_bias" and (value := getattr(fields, name)) is not None:
            chosen[name] = value
    return defaults.asked(**{name: value for name, value in chosen.items() if value is not None})
