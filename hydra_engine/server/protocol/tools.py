"""Tools as chat requests and /tokenize take them, what the tools of all endpoints become for the engine, and what goes
with them to the chat template.

Does not know how a model writes calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.chat import MAX_CALL_ID_CHARS, MAX_NAME_CHARS
from hydra_engine.core.prompting import (
    MAX_ARGUMENT_CHARS,
    MAX_PIXELS,
    MAX_TOOL_CHARS,
    MAX_TOOLS,
    MAX_VARIABLES,
    TOOL_NAME,
    PixelBudget,
    TemplateOptions,
)
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.strict_json import NO_NUL

CalledName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=NO_NUL)]  # of a call that was made
ToolName = Annotated[str, Meta(pattern=rf"^{TOOL_NAME}\Z")]
Schema = Annotated[dict[str, Any], Meta(max_length=1024)]
Variables = Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)]
CallId = Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID_CHARS, pattern=NO_NUL)]
ArgumentsText = Annotated[str, Meta(max_length=MAX_ARGUMENT_CHARS)]
Description = Annotated[str, Meta(max_length=MAX_TOOL_CHARS)]
PixelCount = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


class FunctionDefinition(msgspec.Struct, frozen=True):
    """`strict` is not told to models; where the output is constrained, it is so in any case."""

    name: ToolName
    description: Description | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionName(msgspec.Struct, frozen=True):
    name: ToolName


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class PastFunction(msgspec.Struct, frozen=True):
    name: CalledName
    arguments: Schema | ArgumentsText | None = None


class PastCall(msgspec.Struct, frozen=True):
    """A call in an earlier message of the assistant."""

    function: PastFunction
    id: CallId | None = None
    type: Literal["function"] = "function"


# ---- the answer


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True):
    id: str
    function: Function
    type: str = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """The first one of a call has its id, type and name; the others go on with its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


# ---- to the engine


def plain_tool(tool: Tool) -> dict[str, Any]:
    """In the one form and order that chat templates were trained with, whatever order a client sends."""
    function = tool.function
    return plain_function(function.name, function.description, function.parameters)


def plain_function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    described = {"description": description, "parameters": parameters}
    known = {key: value for key, value in described.items() if value is not None}
    return {"type": "function", "function": {"name": name, **known}}


def unsupported_tool(param: str, kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: tools of type {kind!r} are not supported by this server; offer functions only",
        param=f"{param}.type",
        code="unsupported_parameter",
    )


def template_options(
    tools: Sequence[Mapping[str, Any]],
    variables: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None = None,
) -> TemplateOptions:
    """Unless it is said, an answer that goes on with the last message gets no generation prompt."""
    goes_on = bool(continue_final_message)
    begins = not goes_on if add_generation_prompt is None else add_generation_prompt
    return TemplateOptions(tuple(tools), variables or {}, begins, goes_on, add_special_tokens)


class _PixelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


def pixel_budget(settings: dict[str, Any] | None) -> PixelBudget:
    """Of `mm_processor_kwargs`, which may change nothing else."""
    param = "mm_processor_kwargs"
    known = _PixelSettings.__struct_fields__
    if other := next((name for name in settings or {} if name not in known), None):
        raise InvalidRequest(
            f"{param} may have {' and '.join(known)} only; leave out {other[:64]!r}",
            param=f"{param}.{other[:64]}",
            code="unsupported_parameter",
        )
    try:
        chosen = msgspec.convert(settings or {}, _PixelSettings)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{' and '.join(known)} of {param} must be integers from 1 to {MAX_PIXELS}", param=param
        ) from None
    if chosen.min_pixels is not None and chosen.max_pixels is not None and chosen.min_pixels > chosen.max_pixels:
        raise InvalidRequest(f"{param}: min_pixels must not exceed max_pixels", param=f"{param}.min_pixels")
    return PixelBudget(chosen.min_pixels, chosen.max_pixels)
