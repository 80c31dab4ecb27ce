"""Options for the way from messages to a prompt: template options, and pixel limits of pictures.

Holds only the options and bounds that are checked before any template is rendered. Does not know templates or models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_engine.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOL_CHARS = 32 << 10  # sum over all names and strings of one tool
MAX_ARGUMENT_CHARS = 1 << 20  # of one earlier call
MAX_VARIABLES = 64
MAX_VARIABLE_CHARS = 32 << 10  # sum over all variables
MAX_JSON_VALUES = 10_000
MAX_TOOL_VALUES = 32_768  # sum over all tools of one request
MAX_JSON_DEPTH = 32
TOOL_NAME = r"[A-Za-z0-9_.:/\-]{1,128}"
MAX_PIXELS = 1 << 31
LOW_DETAIL_PIXELS = 512 * 512
DETAILS = ("auto", "low", "high")

MAX_PIXEL_BYTES = 1000 << 20  # of one request, as a tower takes them: 16 of the largest size of published models


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Pictures and videos that one request may have, and the bytes of one encoded file. No pictures, or no videos:
    the model, or this server, takes none."""

    max_images: int = 0
    max_image_bytes: int = 0
    max_videos: int = 0
    max_video_bytes: int = 0


# Names that templates, or the renderer, already use.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "functions", "documents", "conversation", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self", "template"}
    | {"raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace"}
)
_VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_TOOL_NAME = re.compile(TOOL_NAME)
_LARGEST_INTEGER = 1 << 64


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of the chat template. Raises `InvalidRequest`, naming the field, for an invalid or too large value.

    `tools`: in OpenAI's form ({"type": "function", "function": {...}}). `variables`: further names that the template
    can read, plain JSON (vLLM's chat_template_kwargs). `add_generation_prompt`: the prompt ends with the beginning of
    an assistant's message. `continue_final_message`: the prompt ends inside the last message, and the answer continues
    it; `add_generation_prompt` must then be off. `add_special_tokens`: the tokenizer adds its special tokens (usually
    BOS); None: to raw text and, like the model's processor in transformers, to a conversation that does not begin with
    BOS.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false",
                param="continue_final_message",
            )
        if not isinstance(self.tools, Sequence) or isinstance(self.tools, str) or len(self.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", param="tools")
        object.__setattr__(self, "tools", tuple(self.tools))
        checked = CheckedTools()
        for index, tool in enumerate(self.tools):
            if not isinstance(tool, _CheckedTool):
                checked.add(tool, f"tools[{index}]")
        self._check_variables()

    def _check_variables(self) -> None:
        """Raises InvalidRequest for invalid, reserved or too many names in `variables`, and for values that are too
        large or not plain JSON."""
        param = "chat_template_kwargs"
        if not isinstance(self.variables, Mapping) or len(self.variables) > MAX_VARIABLES:
            raise InvalidRequest(f"{param} must be an object with at most {MAX_VARIABLES} names", param=param)
        for name in self.variables:
            if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
                raise InvalidRequest(
                    f"{param} may have names of up to 64 letters, digits and underscores, beginning with a letter",
                    param=param,
                )
            if name in RESERVED_VARIABLES or name.endswith(("_token", "_tokens")):
                raise InvalidRequest(f"{param} must not replace {name}; leave it out", param=f"{param}.{name}")
        check_json(self.variables, param, MAX_VARIABLE_CHARS)


class _CheckedTool(dict[str, Any]):
    """A tool that has passed the checks of CheckedTools, so that TemplateOptions does not repeat them."""


class CheckedTools(list[Mapping[str, Any]]):
    """A list of tools that `add` has checked: plain JSON, bounded in size each and together."""

    def __init__(self) -> None:
        super().__init__()
        self._num_values = 0

    def add(self, tool: object, path: str) -> None:
        """Checks a tool and appends a copy. Raises InvalidRequest naming `path` or the field in it, or `tools` if all
        tools so far have more than MAX_TOOL_VALUES values."""
        self._num_values += _check_tool(tool, path)
        if self._num_values > MAX_TOOL_VALUES:
            raise InvalidRequest(
                f"tools may hold at most {MAX_TOOL_VALUES} values together; offer fewer or smaller ones", param="tools"
            )
        self.append(_CheckedTool(tool))  # type: ignore[call-overload]  # a mapping, as has been checked


def _check_tool(tool: object, path: str) -> int:
    """Returns the number of JSON values of a tool. Raises InvalidRequest naming `path`, or the field in it, if the tool
    does not have OpenAI's form, is no plain JSON or is too large."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidRequest(f'{path} must be {{"type": "function", "function": {{...}}}}', param=path)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.function.name must have 1 to 128 letters, digits and characters of _ . : / -",
            param=f"{path}.function.name",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"{path}.function.parameters must be a JSON schema, an object", param=f"{path}.function.parameters"
        )
    return check_json(tool, path, MAX_TOOL_CHARS)


def check_json(value: object, param: str, max_chars: int) -> int:
    """Returns the number of values, names in objects included. Raises InvalidRequest naming `param` unless `value` is
    plain JSON with at most MAX_JSON_DEPTH levels, MAX_JSON_VALUES values, and `max_chars` characters in all strings and
    names."""
    num_values, problem = count_plain_values(value, max_chars)
    if problem is not None:
        raise InvalidRequest(f"{param} {problem}", param=param)
    return num_values


def count_plain_values(value: object, max_chars: int) -> tuple[int, str | None]:
    """(number of values counted up to the first problem, that problem as a phrase to follow the field's name; None if
    `value` is plain JSON within the bounds of `check_json`). Names in objects count as values."""
    num_chars = num_values = 0
    for num_values, (one, depth) in enumerate(_values_of(value), 1):
        if depth > MAX_JSON_DEPTH:
            return num_values, f"is nested deeper than {MAX_JSON_DEPTH} levels"
        if isinstance(one, str):
            num_chars += len(one)
        elif not _is_plain(one):
            return num_values, "must be plain JSON: objects, lists, text, finite numbers, true, false and null"
        if num_values > MAX_JSON_VALUES or num_chars > max_chars:
            return num_values, f"may hold at most {MAX_JSON_VALUES} values and {max_chars} characters"
    return num_values, None


def texts_of(value: object) -> Iterator[str]:
    """Yields the strings in plain JSON, including the names in objects, in no particular order."""
    return (one for one, _ in _values_of(value) if isinstance(one, str))


def _values_of(value: object) -> Iterator[tuple[object, int]]:
    """Yields (value or name, depth) of `value` at depth 0 and of everything in it. Does not end for a value that
    contains itself: the caller stops at a depth."""
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        one, depth = stack.pop()
        yield one, depth
        if isinstance(one, Mapping):
            stack.extend((inner, depth + 1) for pair in one.items() for inner in pair)
        elif isinstance(one, list | tuple):
            stack.extend((inner, depth + 1) for inner in one)


def _is_plain(value: object) -> bool:
    """True if a value other than a string is plain JSON, apart from the values in it: names are strings, floats finite,
    integers below 2**64 in size."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) for name in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):  # bools too
        return abs(value) < _LARGEST_INTEGER
    return value is None or isinstance(value, list | tuple)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Minimum and maximum pixels to which each picture of a request is resized, within the engine's limits. None: as
    configured. Raises `InvalidRequest` unless they are integers from 1 to MAX_PIXELS in order.

    A picture that is split into tiles gets a number of tiles within these limits, or the closest possible one. Families
    with one fixed size ignore them, and videos stay as configured.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_PIXELS):
                raise InvalidRequest(f"{name} must be an integer from 1 to {MAX_PIXELS}", param=name)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InvalidRequest("min_pixels must not exceed max_pixels", param="min_pixels")

    def for_detail(self, detail: str) -> PixelBudget:
        """The limits of one picture by OpenAI's image_url.detail: "low" has at most 512 x 512 pixels, for which its
        minimum is lowered too; other values have this budget."""
        if detail != "low":
            return self
        max_pixels = LOW_DETAIL_PIXELS if self.max_pixels is None else min(self.max_pixels, LOW_DETAIL_PIXELS)
        return PixelBudget(None if self.min_pixels is None else min(self.min_pixels, max_pixels), max_pixels)


AS_CONFIGURED = PixelBudget()
