"""Builds one `GenerationCall` per request from the arguments of `Engine`'s methods.

Messages, pictures and videos as Python users give them become the typed ones of `core/call.py`: OpenAI's format and its
looser relatives, with paths, bytes and pictures in memory beside URLs. A picture stays the object that the user gave,
but for open files: they are read at once, since they may be closed before the engine gets to them.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, cast

import numpy.typing as npt
from PIL import Image

from hydra_engine.config.other_engines import unknown_parameter
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
from hydra_engine.core.sampling import PARAMETERS, SamplingParams
from hydra_engine.errors import InvalidRequest


class Tensor(Protocol):
    """A tensor of torch or another library, without importing one."""

    def numpy(self) -> Any: ...


class BinaryFile(Protocol):
    """A file that is open for reading bytes."""

    def read(self) -> bytes: ...


class PromptDict(TypedDict, total=False):
    """A prompt in vLLM's form: text or token ids, and pictures and videos as {"image": ..., "video": ...}."""

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any] | None


Prompt = str | Sequence[int] | PromptDict
Messages = Sequence[dict[str, Any]]
# A path, a URL, a data URL, an open file, the bytes of one, or pixels [H, W, 3].
Picture = str | PathLike[str] | BinaryFile | bytes | Image.Image | npt.NDArray[Any] | Tensor
Images = Picture | Sequence[Picture] | SamplingParams | None  # SamplingParams: vLLM's second argument, as `sampling`
# A path, a URL, a data URL, an open file, the bytes of one, or frames.
Video = str | PathLike[str] | BinaryFile | bytes | Sequence[Picture]
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
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    n: int
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None
    allowed_token_ids: Sequence[int] | None
    prompt_logprobs: int | None
    grammar: Grammar | None


class CallOptions(SamplingOptions, total=False):
    """Options of one request, all optional: the fields of `SamplingParams` and these.

    - sampling: a `SamplingParams`, instead of its fields. sampling_params: the same under vLLM's name.
    - response_format: as in the OpenAI API, or a pydantic model; instead of `grammar`.
    - raw: True skips the chat template for a prompt that is text.
    - slo: latency limits (`Slo`, in seconds) instead of the engine's.
    - cache_salt: requests with different salts share no cache entries. Default "".
    - priority: requests with a smaller number go first. Default 0.
    - template: switches and variables of the chat template. pixels: limits of pictures' sizes.
    """

    sampling: SamplingParams | None
    sampling_params: SamplingParams | None
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


_SAMPLING = frozenset(PARAMETERS)
_OTHERS = frozenset(CallOptions.__annotations__) - _SAMPLING
_KINDS: dict[str, tuple[type, str]] = {
    "sampling": (SamplingParams, "SamplingParams(...), one for all prompts"),
    "raw": (bool, "True or False"),
    "slo": (Slo, "Slo(ttft_s=..., tpot_s=...)"),
    "cache_salt": (str, "text"),
    "template": (TemplateOptions, "TemplateOptions(...)"),
    "pixels": (PixelBudget, "PixelBudget(...)"),
    "request_id": (str, "text"),
}


def make_call(options: Mapping[str, Any], defaults: SamplingParams, request_id: str | None = None) -> GenerationCall:
    """Returns a call without its prompt. `options` are CallOptions; sampling fields that they do not give come from
    `defaults`. Raises InvalidRequest."""
    unknown = options.keys() - _SAMPLING - _OTHERS
    if unknown:
        known = (*_SAMPLING, *BatchOptions.__annotations__, "images", "videos")
        raise InvalidRequest(unknown_parameter(min(unknown), known), param=min(unknown))
    given = {name: options[name] for name in _OTHERS & options.keys() if options[name] is not None}
    if (same := given.pop("sampling_params", None)) is not None and given.setdefault("sampling", same) is not same:
        raise InvalidRequest("sampling and sampling_params mean the same; give one of them", param="sampling")
    for name, value in {**given, "request_id": request_id or ""}.items():
        kind, words = _KINDS.get(name, (object, ""))
        if not isinstance(value, kind):
            raise InvalidRequest(f"{name} must be {words}, not {type(value).__name__}", param=name)
    sampling = _sampling(
        given.pop("sampling", None),
        {name: options[name] for name in _SAMPLING & options.keys()},
        response_grammar(given.pop("response_format", None)),
        defaults,
    )
    return GenerationCall(sampling, **given, request_id=request_id)


def split_sampling(images: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the images and the options of a call in which a SamplingParams may stand in the place of images, vLLM's
    second argument: then it is an option. Raises InvalidRequest if the options have another one."""
    if not isinstance(images, SamplingParams):
        return images, dict(options)
    if options.get("sampling_params") is not None:
        raise InvalidRequest("sampling_params is given twice; give it once", param="sampling_params")
    return None, {**options, "sampling_params": images}


def with_prompt(
    call: GenerationCall, prompt: Prompt | Messages, images: Images = None, videos: Videos = None
) -> GenerationCall:
    """Returns a copy of `call` with this prompt and its media; reads open files. A prompt in vLLM's form is raw, as it
    is there. Raises InvalidRequest."""
    check_prompt(prompt)
    if isinstance(prompt, Mapping):
        prompt, images, videos = _parts_of_prompt(prompt, images, videos)
        call = replace(call, raw=True)
    media = media_parts(images, videos)
    if is_chat(prompt):
        return replace(call, messages=chat_messages(prompt, media))
    return replace(call, prompt=cast(str | Sequence[int], prompt), media=media)


def _parts_of_prompt(prompt: Mapping[str, Any], images: Any, videos: Any) -> tuple[Any, Any, Any]:
    """(text or token ids, images, videos) of a prompt in vLLM's form. Raises InvalidRequest."""
    media = prompt.get("multi_modal_data") or {}
    if not isinstance(media, Mapping):
        raise InvalidRequest('multi_modal_data must be a dict: {"image": picture}', param="prompt")
    unknown = [*(prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"}), *(media.keys() - set(_MEDIA))]
    if unknown:
        raise InvalidRequest(
            "a prompt that is a dict has prompt or prompt_token_ids, and multi_modal_data with image and video; take "
            f"out {unknown[0]!r}",
            param="prompt",
        )
    if media and not (images is None and videos is None):
        raise InvalidRequest("give pictures and videos in multi_modal_data or as arguments, not both", param="prompt")
    token_ids = prompt.get("prompt_token_ids")
    text = prompt.get("prompt") if token_ids is None else token_ids
    return (text, media.get("image"), media.get("video")) if media else (text, images, videos)


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
    """Raises InvalidRequest unless `what`, one prompt or several, is text, another sequence (bytes are not) or a prompt
    in vLLM's form."""
    if is_prompt_dict(what) or (isinstance(what, Sequence) and not isinstance(what, bytes | bytearray)):
        return
    kind, hint = type(what).__name__, ""
    if isinstance(what, Mapping):
        hint = "; put the message into a list" if "role" in what else " without prompt or prompt_token_ids"
    raise InvalidRequest(f"a prompt must be text, a list of token ids or messages, not {kind}{hint}", param="prompt")


def is_prompt_dict(what: Any) -> bool:
    """True for a prompt in vLLM's form: a dict with `prompt` or `prompt_token_ids`."""
    return isinstance(what, Mapping) and "role" not in what and ("prompt" in what or "prompt_token_ids" in what)


def is_chat(what: Any) -> bool:
    """True for chat messages; False for text, token ids and prompts in vLLM's form."""
    if not isinstance(what, Sequence) or isinstance(what, str) or not what:
        return False
    return isinstance(what[0], Mapping) and not is_prompt_dict(what[0])


def is_token_ids(what: Any) -> bool:
    return isinstance(what, Sequence) and not isinstance(what, str) and bool(what) and isinstance(what[0], int)


MAX_FPS = 1000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "function_call"})
_PARTS = ("text", "image_url", "image", "image_pil", "video_url", "video")
_MEDIA = ("image", "video")  # keys of vLLM's multi_modal_data


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
    in memory is one video; a video whose frames are files must be a list within the list. Raises InvalidRequest for an
    open file that cannot be read, and for a list of SamplingParams."""
    check_no_sampling(images)
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
    source = _without_files(source, param)
    if kind == "video":
        return VideoPart(source, param, _fps(options.get("fps"), f"{path}.fps"))
    return ImagePart(source, param, _detail(options.get("detail"), f"{path}.detail"))


def check_no_sampling(images: Any) -> None:
    """Raises InvalidRequest for a list with SamplingParams in the place of images, in vLLM one for each prompt."""
    if isinstance(images, list | tuple) and any(isinstance(one, SamplingParams) for one in images):
        raise InvalidRequest("give one SamplingParams for all prompts, or a call for each", param="sampling")


def _without_files(source: Any, param: str) -> Any:
    """Returns the source with the bytes of each open file in it: itself, or a frame of a list. Raises InvalidRequest
    for a file that is closed, empty or not open for reading bytes."""
    if isinstance(source, list | tuple):
        return [_bytes_of(frame, param) for frame in source]
    return _bytes_of(source, param)


def _bytes_of(source: Any, param: str) -> Any:
    """Returns the bytes of an open file, from its start on as Pillow reads it; any other source as it is."""
    if not callable(getattr(source, "read", None)):
        return source
    if isinstance(source, io.TextIOBase):
        raise InvalidRequest(f"{param} is a file that is open as text; open it with mode 'rb'", param=param)
    try:
        if callable(getattr(source, "seekable", None)) and source.seekable():
            source.seek(0)
        data = source.read()
    except io.UnsupportedOperation as error:
        raise InvalidRequest(
            f"{param} is a file that is open for writing; open it with mode 'rb'", param=param
        ) from error
    except (OSError, ValueError) as error:  # ValueError: the file is closed
        reason = str(error).removesuffix(".")
        raise InvalidRequest(f"{param} is a file that cannot be read: {reason}", param=param) from error
    if not isinstance(data, bytes | bytearray):
        kind = type(data).__name__
        raise InvalidRequest(f"{param} is a file whose read() gives {kind}; give its bytes", param=param)
    if not data:
        raise InvalidRequest(f"{param} is an empty file", param=param)
    return bytes(data)


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
    places = [(value, f"{name}[{index}]") for index, value in enumerate(values)] if several else [(values, name)]
    return [(_without_files(value, param), param) for value, param in places]


def _is_frame(value: Any) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", 0) in (2, 3)
