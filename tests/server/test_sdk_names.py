"""Names that the SDKs of OpenAI and Anthropic can send, in objects of every level: each is taken, refused or ignored as
the table says.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
import typing_extensions
from anthropic.types import beta, message_count_tokens_params, message_create_params
from msgspec import inspect
from openai.types import completion_create_params, responses
from openai.types.chat import completion_create_params as chat_create_params

from hydra_engine.server.http.strict_json import plain_types
from hydra_engine.server.protocol.anthropic import CountTokensRequest, InputTool, MessagesRequest
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.other_fields import other_names_of
from hydra_engine.server.protocol.responses import FunctionTool, InputItem, ResponsesRequest


def members(kind: Any) -> Iterator[Any]:
    """The types that a value of an SDK's type may have; of a list its items'."""
    origin = get_origin(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        yield from members(get_args(kind)[0])
    elif isinstance(kind, typing_extensions.TypeAliasType):
        yield from members(kind.__value__)
    elif origin is not None and origin is not typing.Literal and origin is not dict:
        for one in get_args(kind):
            yield from members(one)
    else:
        yield kind


def tags(kind: Any) -> set[str]:
    """Values of `type` of an object of an SDK."""
    hint = get_type_hints(kind).get("type")
    return {value for one in members(hint) if get_origin(one) is typing.Literal for value in get_args(one)}


def ours(types: list[inspect.Type]) -> list[inspect.StructType]:
    """The structs among ours; of a list its items'."""
    found: list[inspect.StructType] = []
    for one in types:
        if isinstance(one, inspect.ListType):
            found += ours(plain_types(one.item_type))
        elif isinstance(one, inspect.StructType):
            found.append(one)
    return found


def fallen_through(sdk: Any, structs: list[inspect.StructType], path: str, seen: set[Any]) -> list[str]:
    """Names of the SDK's type that are neither taken nor in the table. Objects with a tag that none of ours has are
    refused by their type."""
    lost: list[str] = []
    for kind in members(sdk):
        if not typing_extensions.is_typeddict(kind):
            continue
        fitting = [one for one in structs if one.tag_field is None or not tags(kind) or one.tag in tags(kind)]
        for struct in fitting:
            if (kind, struct.cls) in seen or not refuses_other_types(struct, tags(kind)):
                continue
            seen.add((kind, struct.cls))
            fields = {field.encode_name: field.type for field in struct.fields}
            place = other_names_of(struct.cls)
            for name, value in get_type_hints(kind).items():
                where = f"{path}.{name}"
                if name in fields:
                    lost += fallen_through(value, ours(plain_types(fields[name])), where, seen)
                elif name != struct.tag_field and name not in place.refused and name not in place.ignored:
                    lost.append(where)
    return lost


def refuses_other_types(struct: inspect.StructType, types: set[str]) -> bool:
    """False for an SDK's object whose `type` an object of ours has as a plain field and does not take."""
    [kind] = [field.type for field in struct.fields if field.encode_name == "type"] or [None]
    if kind is None or not types:
        return True
    known = {str(value) for one in plain_types(kind) if isinstance(one, inspect.LiteralType) for value in one.values}
    return bool(types & (known or TYPES[struct.cls]))


# Of objects whose type is a plain field here, and another one refused by name.
TYPES: dict[type, set[str]] = {
    InputItem: {"message", "function_call", "function_call_output", "reasoning"},
    FunctionTool: {"function"},
    InputTool: {"custom"},
}

SDKS = [
    (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest, 90),
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest, 18),
    (responses.response_create_params.ResponseCreateParamsBase, ResponsesRequest, 70),
    (message_create_params.MessageCreateParamsBase, MessagesRequest, 50),
    (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest, 35),
    (beta.message_create_params.MessageCreateParamsBase, MessagesRequest, 60),
    (beta.message_count_tokens_params.MessageCountTokensParams, CountTokensRequest, 40),
]


@pytest.mark.parametrize(("sdk", "kind", "least"), SDKS, ids=lambda value: f"{getattr(value, '__module__', value)}")
def test_no_name_of_the_sdks_falls_through(sdk: Any, kind: type[msgspec.Struct], least: int) -> None:
    seen: set[Any] = set()
    assert fallen_through(sdk, ours(plain_types(kind)), "", seen) == []
    assert sum(len(get_type_hints(one)) for one, _ in seen) >= least


class Inner(typing.TypedDict):
    url: str
    never_heard_of: str


class Part(typing.TypedDict):
    type: typing.Literal["image_url"]
    image_url: Inner


class Message(typing.TypedDict):
    role: str
    content: list[Part] | str


class Asked(typing.TypedDict):
    messages: list[Message]


def test_the_test_finds_a_name_that_falls_through() -> None:
    found = fallen_through(Asked, ours(plain_types(ChatCompletionRequest)), "", set())
    assert found == [".messages.content.image_url.never_heard_of"]
