"""A call of the engine, typed: what a client of the server or a user of `Engine` asks for, with its chat messages.

Every dialect of the server and every method of `Engine` builds these structs, which check themselves; the preprocessor
receives them, and the chat template renders the messages. Every struct has its place in the request (`param`), which
errors name. Does not know dialects, templates or files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Literal

from hydra_engine.core.prompting import (
    AS_CONFIGURED,
    MAX_ARGUMENT_CHARS,
    PixelBudget,
    TemplateOptions,
    check_json,
    count_plain_values,
    texts_of,
)
from hydra_engine.core.request import Slo
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # content parts of one message
MAX_CALL_ID_CHARS = 256
MAX_CALL_VALUES = 100_000  # JSON values in the arguments of all calls of a conversation
MAX_NAME_CHARS = 128  # name of a called function
MAX_FIELD_CHARS = 1 << 20  # one further field of a message
REASONING = ("reasoning_content", "thinking", "reasoning")  # field names for reasoning in clients and templates

Role = Literal["system", "user", "assistant", "tool"]
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture in a message. `source`: as the user gave it, not opened yet: a URL, a data URL, a path, the bytes of a
    file or a picture in memory. `param`: its place in the request. `detail`: as in the OpenAI API."""

    kind: ClassVar = "image"
    source: Any
    param: str
    detail: Detail = "auto"


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A video in a message. `source`: as in ImagePart, or frames: a list of pictures or an array [F, H, W, channels].
    `param`: its place in the request. `fps`: frames per second of such frames; None: the preprocessor's default."""

    kind: ClassVar = "video"
    source: Any
    param: str
    fps: float | None = None


MediaPart = ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made earlier in the conversation.

    `arguments`: JSON text or the object that it stands for. Text is parsed, since most templates want the object; text
    that is not an object within the bounds of `check_json` stays text; None and blank text become {}. `param`: the
    place of the arguments in the request. Raises InvalidRequest for text that is too long and for an object beyond the
    bounds.
    """

    name: str
    arguments: Mapping[str, Any] | str | None
    id: str | None
    param: InitVar[str]
    num_values: int = field(init=False, compare=False)  # JSON values in the arguments

    def __post_init__(self, param: str) -> None:
        arguments, num_values = _arguments(self.arguments, param)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "num_values", num_values)

    def texts(self) -> Iterator[str]:
        """Yields the id ("" without one), the name, and every string and name in the arguments."""
        yield from (self.id or "", self.name)
        yield from texts_of(self.arguments)


def _arguments(value: Mapping[str, Any] | str | None, param: str) -> tuple[Mapping[str, Any] | str, int]:
    """(arguments as `ToolCall` keeps them, number of JSON values in them). Text that is no JSON object counts as one
    value, blank text as none; of an object in text the values up to its first problem count. Raises as `ToolCall`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}, 0
    if isinstance(value, Mapping):
        return value, check_json(value, param, MAX_ARGUMENT_CHARS)
    if len(value) > MAX_ARGUMENT_CHARS:
        raise InvalidRequest(f"{param} may have at most {MAX_ARGUMENT_CHARS} characters", param=param)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value, 1
    if not isinstance(parsed, Mapping):
        return value, 1
    num_values, problem = count_plain_values(parsed, MAX_ARGUMENT_CHARS)
    return (parsed if problem is None else value), num_values


class PastCalls:
    """Makes the tool calls of one conversation and counts their JSON values, to bound the work for one request."""

    def __init__(self) -> None:
        self._num_values = 0

    def add(self, name: str, arguments: Mapping[str, Any] | str | None, id: str | None, param: str) -> ToolCall:
        """Returns a ToolCall and counts its values. Raises InvalidRequest if it is invalid, or if all calls so far have
        more than MAX_CALL_VALUES values."""
        call = ToolCall(name, arguments, id, param)
        self._num_values += call.num_values
        if self._num_values > MAX_CALL_VALUES:
            raise InvalidRequest(
                f"the calls of this conversation hold more than {MAX_CALL_VALUES} JSON values by {param}; leave older "
                "ones out",
                param=param,
            )
        return call


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation.

    `param`: its place, for example `messages[0]`; `prompt` for a text without messages. `others`: further fields as the
    client gave them, for templates that read them. Raises InvalidRequest for an empty list as content, and for tool
    calls in a message that is not the assistant's.
    """

    role: Role
    content: str | tuple[TextPart | MediaPart, ...]
    param: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # in a tool's message: the call that it answers
    name: str | None = None  # name of the tool
    others: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.content and not isinstance(self.content, str):
            param = self.place_of("content")
            raise InvalidRequest(f"{param} must be a string or a list of at least one content part", param=param)
        if self.tool_calls and self.role != "assistant":
            param = self.place_of("tool_calls")
            raise InvalidRequest(f"{param} belongs to messages of the assistant only", param=param)

    def place_of(self, field: str) -> str:
        """The place of a field for errors, for example `messages[0].content`. A message that is no entry of a list,
        such as `prompt`, has no fields: its own place."""
        return f"{self.param}.{field}" if self.param.endswith("]") else self.param

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields (place, text) of each text in its content and of the strings in its calls; `others` are left out."""
        if isinstance(self.content, str):
            yield self.place_of("content"), self.content
        else:
            for index, part in enumerate(self.content):
                if isinstance(part, TextPart):
                    yield self.place_of(f"content[{index}].text"), part.text
        for call in self.tool_calls:
            yield from ((self.place_of("tool_calls"), text) for text in call.texts())

    @property
    def media(self) -> Iterator[MediaPart]:
        """The pictures and videos in its content, in order."""
        if not isinstance(self.content, str):
            yield from (part for part in self.content if not isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call of the engine for one answer or several: `messages`, or a `prompt` (text or token ids) with its `media`.

    A text prompt goes through the chat template as a user's message, unless it is `raw`. Raw text and token ids contain
    one placeholder for each picture and video. `slo`: the request's own limits. `priority`: smaller is more urgent.
    Calls with different `cache_salt` share no cached blocks or features. `client`: the key of fair turns
    (`core/fairness.py`). Without a `request_id` the engine assigns one.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | Sequence[int] | None = None
    messages: tuple[ChatMessage, ...] = ()
    media: tuple[MediaPart, ...] = ()
    raw: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)
    pixels: PixelBudget = AS_CONFIGURED
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    request_id: str | None = None
