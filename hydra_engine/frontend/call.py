"""Builds one `GenerationCall` per request from the arguments of `Engine`'s methods.

Messages, pictures and videos as Python users give them become the typed ones of `core/call.py`: OpenAI's format and its
looser relatives, with paths, bytes and pictures in memory beside URLs. Opens nothing: a picture stays the object that
the user gave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, cast

import numpy.typing as npt
from PIL import Image

from hydra_engine.core.call import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PARTS,
    ChatMessage,
    Detail,
    GenerationCall,
    ImagePart,
    MediaPart,
    Role,
    TextPart,
    ToolCall,
    VideoPart,
)
from hydra_engine.core.grammar import Grammar, response_grammar
from hydra_engine.core.prompting import DETAILS, MAX_TOOLS, PixelBudget, TemplateOptions
from hydra_engine.core.request import Slo
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest


class Tensor(Protocol):
    """A tensor of torch or another library, without importing one."""

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
    """The fields of `SamplingParams` as keywords; they are documented there."""

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
    """Options of one request, all optional: the fields of `SamplingParams` and these.

    - sampling: a `SamplingParams`, instead of its fields.
    - response_format: as in the OpenAI API, or a pydantic model; instead of `grammar`.
    - raw: True skips the chat template for a prompt that is text.
    - slo: latency limits (`Slo`, in seconds) instead of the engine's.
    - cache_salt: requests with different salts share no cache entries. Default "".
    - priority: requests with a smaller number go first. Default 0.
    - template: switches and variables of the chat template. pixels: limits of pictures' sizes.
    """

    sampling: SamplingParams | None
    response_format: Mapping[str, Any] | type | None
    raw: bool
    slo: Slo | None
    cache_salt: str
    priority: int
    template: TemplateOptions | None
    pixels: PixelBudget | None


class BatchOptions(CallOptions, total=False):
    """Options of one request or a batch that runs to its end: `CallOptions` and these.

    - on_error: "raise" (default) raises the first error after all requests have ended; "return" stores the error of a
        failed request in its Result.
    - progress: shows a bar; None (default): if there are several prompts and standard error is a terminal.
    """

    on_error: Literal["raise", "return"]
    progress: bool | None


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_OTHERS = frozenset(CallOptions.__annotations__) - _SAMPLING


def make_call(options: Mapping[str, Any], defaults: SamplingParams, request_id: str | None = None) -> GenerationCall:
    """Returns a call without its prompt. `options` are CallOptions; sampling fields that they do not give come from
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
    """Returns a copy of `call` with this prompt and its media. Raises InvalidRequest."""
    check_prompt(prompt)
    media = media_parts(images, videos)
    if is_chat(prompt):
        return replace(call, messages=chat_messages(prompt, media))
    return replace(call, prompt=cast(Prompt, prompt), media=media)


def prompt_or_messages(prompt: Prompt | None, messages: Messages | None) -> Prompt | Messages:
    """The one that is not None. Raises InvalidRequest for both or neither."""
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
    chosen = sampling or defaults.with_fields(**single)
    if grammar is None:
        return chosen
    if chosen.grammar is not None:
        raise InvalidRequest("output can have one form only; leave out response_format or grammar", param=grammar.param)
    return replace(chosen, grammar=grammar)


def check_prompt(what: object) -> None:
    """Raises InvalidRequest unless `what`, one prompt or several, is text or another sequence (bytes are not)."""
    if not isinstance(what, Sequence) or isinstance(what, bytes | bytearray):
        kind = type(what).__name__
        raise InvalidRequest(f"a prompt must be text, a list of token ids or messages, not {kind}", param="prompt")


def is_chat(what: Any) -> bool:
    """True for chat messages; False for text and token ids."""
    return isinstance(what, Sequence) and not isinstance(what, str) and bool(what) and isinstance(what[0], Mapping)


def is_token_ids(what: Any) -> bool:
    return not isinstance(what, str) and bool(what) and isinstance(what[0], int)


MAX_FPS = 1000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "function_call"})
_PARTS = ("text", "image_url", "image", "image_pil", "video_url", "video")


def chat_messages(messages: object, media: Sequence[MediaPart] = ()) -> tuple[ChatMessage, ...]:
    """Returns typed messages in which every item of `media`, given beside them, has a place. Raises InvalidRequest with
    the path of the field."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", param="messages")
    if media:
        messages = _with_media(messages, media)
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def media_parts(images: Any, videos: Any) -> tuple[MediaPart, ...]:
    """Returns the parts of `images` and `videos`: each is one item, a list of items, or None. A flat list of pictures
    in memory is one video; a video whose frames are files must be a list within the list."""
    several = isinstance(videos, list | tuple) and not any(map(_is_frame, videos))
    pictures = (ImagePart(*reference) for reference in _places(images, "images", isinstance(images, list | tuple)))
    return (*pictures, *(VideoPart(*reference) for reference in _places(videos, "videos", several)))


# ---- one message


def _message(message: object, path: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} must be an object with role and content", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    is_answer = role == "tool"
    return ChatMessage(
        cast(Role, _ROLES[role]),
        _content(message.get("content"), role, f"{path}.content"),
        path,
        tool_calls=_tool_calls(message, path),
        tool_call_id=_optional_text(message, "tool_call_id", path, MAX_CALL_ID_CHARS) if is_answer else None,
        name=_optional_text(message, "name", path, MAX_NAME_CHARS) if is_answer else None,
        others={
            name: value
            for name, value in message.items()
            if isinstance(name, str)
            and value is not None
            and name not in _FIELDS
            and not (is_answer and name == "name")
        },
    )


def _content(content: object, role: str, path: str) -> str | tuple[TextPart | MediaPart, ...]:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{path} must be a string or a list of content parts", param=path)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{path} may have at most {MAX_PARTS} parts", param=path)
    return tuple(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> TextPart | MediaPart:
    if isinstance(part, MediaPart):
        return part  # was given beside the messages
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_embeds":
        raise InvalidRequest(f"{path}: embeddings of pictures are not taken; give the picture itself", param=path)
    if not isinstance(part, Mapping) or kind not in _PARTS:
        raise InvalidRequest(f"{path} must be an object of type {', '.join(_PARTS)}", param=path)
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
        return TextPart(text)
    return _url(part, path, kind) if kind.endswith("_url") else _embedded(part, path, kind.removesuffix("_pil"))


def _url(part: Mapping[str, Any], path: str, name: str) -> MediaPart:
    """Parses {"type": T, T: {"url": ...}}, where T is "image_url" or "video_url"."""
    place, kind = f"{path}.{name}", name.removesuffix("_url")
    given = part.get(name)
    options, param = (given, f"{place}.url") if isinstance(given, Mapping) else ({"url": given}, place)
    if not isinstance(options.get("url"), str):
        raise InvalidRequest(f"{param} must be a string: a URL or a data URL", param=param)
    return _media(kind, options["url"], param, options, place)


def _embedded(part: Mapping[str, Any], path: str, kind: str) -> MediaPart:
    """Parses {"type": "image" or "video", ...} with a URL, a path or an object in memory; vLLM's image_pil is one."""
    for name in (kind, "url", "path", "image_pil"):
        value = part.get(name)
        if value is not None:
            return _media(kind, value, f"{path}.{name}", part, path)
    raise InvalidRequest(f"{path}.{kind} is missing", param=f"{path}.{kind}")


def _media(kind: str, source: Any, param: str, options: Mapping[str, Any], path: str) -> MediaPart:
    if kind == "video":
        return VideoPart(source, param, _fps(options.get("fps"), f"{path}.fps"))
    return ImagePart(source, param, _detail(options.get("detail"), f"{path}.detail"))


def _detail(detail: object, path: str) -> Detail:
    if detail is not None and (not isinstance(detail, str) or detail not in DETAILS):
        raise InvalidRequest(f"{path} must be one of {', '.join(DETAILS)}", param=path)
    return cast(Detail, detail or "auto")


def _fps(fps: object, path: str) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise InvalidRequest(f"{path} must be a number above 0 and up to {MAX_FPS}", param=path)
    return float(fps)


# ---- calls that an assistant made earlier


def _tool_calls(message: Mapping[str, Any], path: str) -> tuple[ToolCall, ...]:
    if message.get("function_call"):
        raise InvalidRequest(
            f"{path}.function_call is not supported; send tool_calls instead", param=f"{path}.function_call"
        )
    calls, path = message.get("tool_calls") or (), f"{path}.tool_calls"
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or len(calls) > MAX_TOOLS:
        raise InvalidRequest(f"{path} must be a list of at most {MAX_TOOLS} calls", param=path)
    return tuple(_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls))


def _tool_call(call: object, path: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
        raise InvalidRequest(f"{path} must be an object with a function", param=path)
    arguments, param = function.get("arguments"), f"{path}.function.arguments"
    if arguments is not None and not isinstance(arguments, str | Mapping):
        raise InvalidRequest(f"{param} must be a JSON object, as text or as it is", param=param)
    name = _text(function.get("name"), f"{path}.function.name", MAX_NAME_CHARS)
    return ToolCall(name, arguments, _optional_text(call, "id", path, MAX_CALL_ID_CHARS), param)


def _optional_text(values: Mapping[str, Any], name: str, path: str, limit: int) -> str | None:
    value = values.get(name)
    return None if value is None else _text(value, f"{path}.{name}", limit)


def _text(value: object, path: str, limit: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise InvalidRequest(f"{path} must be text of 1 to {limit} characters", param=path)
    return value


# ---- pictures and videos beside the messages


def _with_media(messages: Sequence[Any], media: Sequence[MediaPart]) -> list[Any]:
    """Returns the messages with `media` placed in them: in open places, {"type": "image"} and nothing else as
    transformers has them, or before the text of the last user message."""
    turns = [dict(turn) if isinstance(turn, Mapping) else turn for turn in messages]
    left = list(media)
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get("content"), list | tuple):
            turn["content"] = [_filled(part, left) for part in turn["content"]]
    given, unplaced = (Counter(part.kind for part in some) for some in (media, left))
    for part in left:
        if unplaced[part.kind] < given[part.kind]:
            raise InvalidRequest(f"there are more {part.kind}s than places for them in the messages", param=part.param)
    if left:
        asking = next((turn for turn in reversed(turns) if isinstance(turn, dict) and turn.get("role") == "user"), None)
        if asking is None:
            raise InvalidRequest("the messages have no user message for the images and videos", param=left[0].param)
        content = asking.get("content")
        parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
        asking["content"] = [*left, *parts]
    return turns


def _filled(part: Any, left: list[MediaPart]) -> Any:
    """Returns the first item of `left` that fits if the part is an open place, else the part. Removes that item from
    `left`."""
    if isinstance(part, Mapping) and len(part) == 1:
        for index, reference in enumerate(left):
            if part.get("type") == reference.kind:
                return left.pop(index)
    return part


def _places(values: Any, name: str, several: bool) -> list[tuple[Any, str]]:
    """(value, param) of each item."""
    if values is None:
        return []
    return [(value, f"{name}[{index}]") for index, value in enumerate(values)] if several else [(values, name)]


def _is_frame(value: Any) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", 0) in (2, 3)
