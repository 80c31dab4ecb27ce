"""Schemas of functions on all three APIs: their numbers keep their digits, their references mean the same within the
schema of all calls, and what does not describe an object is refused by its field."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.core.schemas import subschemas
from hydra_engine.core.schemas.subschemas import resolve_pointer
from hydra_engine.errors import InvalidRequest
from hydra_engine.guidance.guide import GrammarError
from hydra_engine.guidance.sources import source_of
from hydra_engine.server.http.body import parse_request
from hydra_engine.server.protocol import fields
from hydra_engine.server.protocol.anthropic import MessagesRequest, tool_use_of
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.responses import ResponsesRequest
from hydra_engine.server.tools.tool_calls import ToolUse
from hydra_engine.server.tools.tool_grammars import check_parameters
from tests.guidance.grammar_texts import DEMO, Texts
from tests.server.conftest import Serve

APIS = ("chat", "responses", "messages")
FIELDS = {
    "chat": "tools[0].function.parameters",
    "responses": "tools[0].parameters",
    "messages": "tools[0].input_schema",
}
X = {"enum": ["a", "b"]}


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(DEMO, {})


def use_of(api: str, parameters: Any, mode: str, num_tools: int = 1) -> ToolUse:
    """Use of a body with a function, or several alike; `parameters` may be JSON text."""
    schema = msgspec.Raw((parameters if isinstance(parameters, str) else json.dumps(parameters)).encode())
    body: dict[str, Any]
    if api == "chat":
        choice: Any = {"type": "function", "function": {"name": "f"}} if mode == "named" else mode
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool] * num_tools, "tool_choice": choice}
        return parse_request(msgspec.json.encode(body), ChatCompletionRequest).tool_use()
    if api == "responses":
        choice = {"type": "function", "name": "f"} if mode == "named" else mode
        tool = {"type": "function", "name": "f", "parameters": schema}
        body = {"input": "x", "tools": [tool] * num_tools, "tool_choice": choice}
        return parse_request(msgspec.json.encode(body), ResponsesRequest).tool_use()
    kind = {"named": {"type": "tool", "name": "f"}, "required": {"type": "any"}}.get(mode, {"type": mode})
    tool = {"name": "f", "input_schema": schema}
    tools = [tool] * num_tools
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": tools, "tool_choice": kind}
    return tool_use_of(parse_request(msgspec.json.encode(body), MessagesRequest))


def accepts(texts: Texts, use: ToolUse, arguments: str) -> bool:
    grammar = use.grammar()
    assert grammar is not None
    whole = arguments if use.mode == "named" else f'[{{"name":"f","parameters":{arguments}}}]'
    return texts.accepts(grammar, whole)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", ["named", "required"])
def test_numbers_keep_their_digits(texts: Texts, api: str, mode: str) -> None:
    exact = '{"type": "object", "properties": {"id": {"enum": [9007199254740992, 1e3, 0.5]}}, "required": ["id"]}'
    use = use_of(api, exact, mode)
    assert all(accepts(texts, use, f'{{"id":{n}}}') for n in ("9007199254740992", "1000", "0.5"))
    assert not accepts(texts, use, '{"id":9007199254740993}')
    with pytest.raises(InvalidRequest, match="plain JSON"):
        use_of(api, exact.replace("0.5", "18446744073709551617"), mode)
    for number in ("1790000000000000001", "123456789.123456789"):
        use = use_of(api, f'{{"type": "object", "properties": {{"id": {{"const": {number}}}}}}}', mode)
        grammar = use.grammar()
        assert grammar is not None and grammar.param == "tools"
        with pytest.raises(GrammarError, match=f"const {number} would not be kept exactly"):
            texts.guide.compile(grammar)


@pytest.mark.parametrize("name", ["value", "default", "enum", "const", "examples", "properties", "$ref", "$defs"])
@pytest.mark.parametrize("mode", ["named", "required"])
def test_references_lead_where_they_did(texts: Texts, name: str, mode: str) -> None:
    for definition, reference in (({"X": X}, "#/$defs/X"), ({"X": X | {"$anchor": "x"}}, "#x")):
        parameters = {
            "$id": "https://a.example/s",
            "type": "object",
            "properties": {name: {"$ref": reference}, "more": {"$ref": "https://a.example/s#/properties/list/items"},
                           "list": {"type": "array", "items": X}},
            "required": [name],
            "$defs": definition,
        }  # fmt: skip
        use = use_of("chat", parameters, mode)
        for text, fits in (('"b"', True), ('"c"', False)):
            arguments = json.dumps({name: json.loads(text)}, separators=(",", ":"))
            assert accepts(texts, use, arguments) is fits
            assert accepts(texts, use, f'{{"{name}":"a","more":{text}}}') is fits
    use = use_of("chat", {"type": "object", "properties": {"a": {"$ref": "https://b.example/x"}}}, mode)
    with pytest.raises(
        InvalidRequest, match=r"parameters of the function f: the reference 'https://b\.example/x'"
    ) as caught:
        use.grammar()
    assert caught.value.param == "tools"


NO_OBJECTS = [
    {"type": "string", "enum": ["x"]},
    {"type": "array", "items": {"type": "object"}},
    {"type": ["string", "null"]},
    {"enum": ["x", {}]},
    {"const": 1},
    {"$ref": "#/$defs/X", "$defs": {"X": {"type": "string"}}},
    {"anyOf": [{"type": "object"}, {"type": "string"}]},
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", ["auto", "none", "required", "named"])
def test_parameters_are_objects(api: str, mode: str) -> None:
    for parameters in NO_OBJECTS:
        with pytest.raises(InvalidRequest, match="parameters of the function f must be an object") as caught:
            use_of(api, parameters, mode)
        assert caught.value.param == FIELDS[api]


OBJECTS = [
    {},
    {"properties": {"a": {}}},
    {"type": ["object", "null"]},
    {"enum": [{"a": 1}]},
    {"$ref": "#/$defs/X", "$defs": {"X": {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}}}},
    {"anyOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]},
    {"allOf": [{"type": "object"}, {"properties": {"a": True}}]},
]


@pytest.mark.parametrize("parameters", OBJECTS, ids=json.dumps)
@pytest.mark.parametrize("mode", ["required", "named"])
def test_arguments_are_objects(texts: Texts, parameters: Any, mode: str) -> None:
    use = use_of("chat", parameters, mode)
    assert accepts(texts, use, '{"a":1}' if parameters != OBJECTS[4] else '{"a":{"a":{}}}')
    assert not accepts(texts, use, "null") and not accepts(texts, use, '"x"')


async def test_an_echo_of_tools_has_their_digits(serve: Serve) -> None:
    served = await serve()
    body = (
        b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": '
        b'{"a": {"const": 123456789.123456789}}}}]'
    )
    for more in (b"}", b', "stream": true}'):
        headers = {"Content-Type": "application/json"}
        async with served.http.post(f"{served.url}/v1/responses", data=body + more, headers=headers) as response:
            assert response.status == 200 and b'"const":123456789.123456789' in await response.read()


WORDS = (
    "type",
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
    "properties",
    "items",
    "$defs",
    "$id",
    "$anchor",
    "a",
)
WORDS += (
    "minimum",
    "exclusiveMaximum",
    "multipleOf",
    "maxItems",
    "pattern",
    "patternProperties",
    "x-guidance",
    "default",
)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, "", "object", "#", "#/", "#/$defs/a", "#a", "http://[", "urn:x", "//[", "#/%zz", [],
    {}, ["object", 3], [[]], {"a": 1},
)  # fmt: skip


def odd_schema(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(ODD)
    if draw.random() < 0.2:
        return [odd_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return {draw.choice(WORDS): odd_schema(draw, depth - 1) for _ in range(draw.randint(0, 4))}


def test_odd_schemas_are_refused_or_taken() -> None:
    num_taken = 0
    for seed in range(800):
        schema = odd_schema(random.Random(seed), 4)
        if not isinstance(schema, dict):
            continue
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        form = Grammar("regex", "a")
        try:
            check_parameters(schema, "f", "tools")
            for use in (ToolUse((tool,), "required"), ToolUse((tool,), "auto", dialect="hermes")):
                grammar = use.sampling(SamplingParams(grammar=form)).grammar
                assert grammar is not None
                source_of(grammar, {})
        except (InvalidRequest, ValueError):
            continue
        num_taken += 1
    assert num_taken > 100


def chained(depth: int) -> dict[str, Any]:
    """A chain of schemas, each referenced twice by the one before it."""
    steps = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**steps, f"a{depth}": {"type": "object"}}}


def test_a_schema_is_looked_at_once_however_many_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looked_up = 0

    def counted(root: Any, pointer: str) -> Any:
        nonlocal num_looked_up
        num_looked_up += 1
        return resolve_pointer(root, pointer)

    monkeypatch.setattr(subschemas, "resolve_pointer", counted)
    check_parameters(chained(12), "f", "tools")
    assert num_looked_up <= 2 * 12 + 1
    schema = chained(12)
    schema["$defs"]["a12"] = {"type": "string"}
    with pytest.raises(InvalidRequest, match="must be an object"):
        check_parameters(schema, "f", "tools")


@pytest.mark.parametrize("api", APIS)
def test_tools_are_bounded_together_before_anything_is_made_of_them(monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    parameters = {"type": "object", "enum": [{}] * 9000}
    looked_at: list[object] = []
    monkeypatch.setattr(fields, "check_parameters", lambda one, *_: looked_at.append(one))
    with pytest.raises(InvalidRequest, match="tools may hold at most 32768 values together"):
        use_of(api, parameters, "required", num_tools=20)
    assert len(looked_at) == 3
    assert len(use_of(api, {"type": "object", "enum": [{}] * 200}, "required", num_tools=100).tools) == 100


def test_identifiers_and_pointers_stay_short() -> None:
    long = {"$id": "http://a.example/" + "b/" * 8000, "type": "object", "anyOf": [{"$ref": "x"}] * 700}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    with pytest.raises(InvalidRequest, match="more than 1024 characters"):
        ToolUse((tool,), "required").grammar()
