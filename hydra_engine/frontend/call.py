"""One `GenerationCall` per request, from the arguments of `Engine`'s methods. Opens no picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, cast

import numpy.typing as npt
from PIL import Image

from hydra_engine.core.call import GenerationCall
from hydra_engine.core.grammar import Grammar, response_grammar
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.errors import InvalidRequest
from hydra_engine.frontend.chat_messages import chat_messages, media_parts


class Tensor(Protocol):
    """One of torch or of another library, without importing any."""

    def numpy(self) -> Any: ...


Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]
# A path, a URL, a data URL, the bytes of a file, or pixels [H, W, 3].
Picture = str | PathLike[str] | bytes | Image.Image | npt.NDArray[Any] | Tensor
Images = Picture | Sequence[Picture] | None
# A path, a URL, a data URL, the bytes of a file, or frames.
Video = str | PathLike[str] | bytes | Sequence[Picture]
Videos = Video | Sequence[Video] | None


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, which says what they mean, as keywords."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    n: int
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Sequence[int]
    prompt_logprobs: int | None
    grammar: Grammar | None


class CallOptions(SamplingOptions, total=False):
    """Options of one request. `sampling` in place of single fields; `response_format` is the OpenAI API's or a pydantic
    model; `raw` leaves the chat template out; `slo` are the request's own limits, `priority` its place (the smaller one
    goes first); requests with different `cache_salt` reuse nothing of each other."""

    sampling: SamplingParams | None
    response_format: Mapping[str, Any] | type | None
    raw: bool
    slo: Slo | None
    cache_salt: str
    priority: int
    template: TemplateOptions | None
    pixels: PixelBudget | None


class BatchOptions(CallOptions, total=False):
    """Options of one request or many that run to their end. `on_error="return"` puts the error of a failed request into
    its Result, "raise" (default) raises the first one after all have ended; `progress` None shows a bar for several on
    a terminal."""

    on_error: Literal["raise", "return"]
    progress: bool | None


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_OTHERS = frozenset(CallOptions.__annotations__) - _SAMPLING


def call_of(options: Mapping[str, Any], defaults: SamplingParams, request_id: str | None = None) -> GenerationCall:
    """A call without its prompt. `options` are CallOptions; single fields of sampling that are not there are those of
    `defaults`. Raises InvalidRequest."""
    unknown = options.keys() - _SAMPLING - _OTHERS
    if unknown:
        raise InvalidRequest(f"unknown parameter {min(unknown)!r}", param=min(unknown))
    given = {name: options[name] for name in _OTHERS & options.keys() if options[name] is not None}
    sampling = _sampling(
        given.pop("sampling", None),
        {name: options[name] for name in _SAMPLING & options.keys()},
        response_grammar(given.pop("response_format", None)),
        defaults,
    )
    return GenerationCall(sampling, **given, request_id=request_id)


def with_prompt(
    call: GenerationCall, prompt: Prompt | Messages, images: Images = None, videos: Videos = None
) -> GenerationCall:
    """The same for this prompt, and what is beside it. Raises InvalidRequest."""
    media = media_parts(images, videos)
    if is_chat(prompt):
        return replace(call, messages=chat_messages(prompt, media))
    return replace(call, prompt=cast(Prompt, prompt), media=media)


def one_of(prompt: Prompt | None, messages: Messages | None) -> Prompt | Messages:
    if prompt is not None and messages is None:
        return prompt
    if messages is not None and prompt is None:
        return messages
    raise InvalidRequest("give either prompt or messages", param="prompt")


def _sampling(
    sampling: SamplingParams | None, single: dict[str, Any], grammar: Grammar | None, defaults: SamplingParams
) -> SamplingParams:
    if sampling is not None and single:
        raise InvalidRequest(f"give either sampling= or keywords, not both ({next(iter(single))})")
    chosen = sampling or defaults.asked(**single)
    if grammar is None:
        return chosen
    if chosen.grammar is not None:
        raise InvalidRequest("output can have one form only; leave out response_format or grammar", param=grammar.param)
    return replace(chosen, grammar=grammar)


def is_chat(what: Any) -> bool:
    """Messages, and not text or token ids."""
    return isinstance(what, Sequence) and not isinstance(what, str) and bool(what) and isinstance(what[0], Mapping)


def is_token_ids(what: Any) -> bool:
    return not isinstance(what, str) and bool(what) and isinstance(what[0], int)
