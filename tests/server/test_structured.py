"""Structured output over HTTP: every spelling becomes one grammar, and the official client gets what it asked for."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from hydra_engine import Engine
from hydra_engine.config import ServerConfig
from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.app import build_app
from hydra_engine.server.http.body import parse_request
from hydra_engine.server.http.listening import listen
from hydra_engine.server.protocol.anthropic import MessagesRequest
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.responses import ResponsesRequest

TEMPLATE = Path(__file__).parents[1] / "campaigns" / "clients" / "tools_template.jinja"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
QUESTION = [{"role": "user", "content": "What is two plus three?"}]


def grammar_of(kind: type = ChatCompletionRequest, **fields: Any) -> Grammar | None:
    body = {"messages": QUESTION} if kind is ChatCompletionRequest else {"prompt": "abc"}
    grammar: Grammar | None = parse_request(msgspec.json.encode(body | fields), kind).sampling(SamplingParams()).grammar
    return grammar


NAMED = {"name": "it", "schema": SCHEMA}


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": None, "disable_fallback": True, "disable_any_whitespace": False}}, None),
        ({"guided_json": None, "regex": None}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            ("json_schema", TEXT, "response_format.value"),
        ),
        *(
            ({"response_format": {"type": kind, **form}}, ("json_schema", TEXT, f"response_format.{param}"))
            for kind in ("json_object", "json_schema")
            for form, param in (({"schema": SCHEMA}, "schema"), ({"json_schema": NAMED}, "json_schema.schema"))
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, ("json_object", "", "response_format")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "", "structured_outputs.json_object")),
        ({"guided_json": SCHEMA}, ("json_schema", TEXT, "guided_json")),
        ({"guided_json": TEXT}, ("json_schema", TEXT, "guided_json")),
        ({"json_schema": TEXT}, ("json_schema", TEXT, "json_schema")),
        ({"json_schema": SCHEMA}, ("json_schema", TEXT, "json_schema")),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", TEXT, "structured_outputs.json")),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
        ({"regex": "a+"}, ("regex", "a+", "regex")),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
        ({"guided_choice": ["é", 'b"']}, ("choice", '["é", "b\\""]', "guided_choice")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]', "structured_outputs.choice")),
        ({"guided_grammar": 'start: "a"'}, ("lark", 'start: "a"', "guided_grammar")),
        ({"guided_grammar": 'root ::= "a"'}, ("ebnf", 'root ::= "a"', "guided_grammar")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("lark", 'start: "a"', "structured_outputs.grammar")),
        ({"ebnf": 'root ::= "a"'}, ("ebnf", 'root ::= "a"', "ebnf")),
    ],
    ids=str,
)
def test_every_spelling(kind: type, fields: dict[str, Any], expected: tuple[str, str, str] | None) -> None:
    found = grammar_of(kind, **fields)
    if expected is None or found is None:
        assert found is expected
    elif expected[0] == "json_schema":
        assert (found.kind, json.loads(found.source), found.param) == (expected[0], SCHEMA, expected[2])
    else:
        assert (found.kind, found.source, found.param) == expected


def test_the_schema_of_a_response_format() -> None:
    for more in ({}, {"strict": True}, {"strict": False, "description": "it"}):
        found = grammar_of(
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, **more}}
        )
        assert found is not None and json.loads(found.source) == SCHEMA
        assert (found.kind, found.param) == ("json_schema", "response_format.json_schema.schema")


DIGITS = '{"enum": [1790000000000000001, 123456789.123456789, 1e400]}'
QUOTED = json.dumps(DIGITS)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ChatCompletionRequest, f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {DIGITS}}}}}'),
        (ChatCompletionRequest, f'"response_format": {{"type": "json_object", "schema": {DIGITS}}}'),
        (ChatCompletionRequest, f'"response_format": {{"type": "json_object", "value": {DIGITS}}}'),
        (ChatCompletionRequest, f'"structured_outputs": {{"json": {DIGITS}}}'),
        (ChatCompletionRequest, f'"structured_outputs": {{"json": {QUOTED}}}'),
        (ChatCompletionRequest, f'"guided_json": {DIGITS}'),
        (CompletionRequest, f'"json_schema": {QUOTED}'),
        (ResponsesRequest, f'"text": {{"format": {{"type": "json_schema", "name": "a", "schema": {DIGITS}}}}}'),
        (MessagesRequest, f'"output_config": {{"format": {{"type": "json_schema", "schema": {DIGITS}}}}}'),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_numbers_arrive_with_their_digits(kind: Any, field: str) -> None:
    prompt = '"prompt": "x"' if kind is CompletionRequest else '"messages": [{"role": "user", "content": "x"}]'
    prompt = '"input": "x"' if kind is ResponsesRequest else prompt
    limit = ', "max_tokens": 9' if kind is MessagesRequest else ""
    grammar = parse_request(f"{{{prompt}{limit}, {field}}}".encode(), kind).sampling(SamplingParams()).grammar
    assert grammar is not None and grammar.source == DIGITS


@pytest.mark.parametrize("schema", [SCHEMA, TEXT, {}, " {\n}"], ids=str)
def test_white_space_is_asked_for_as_in_vllm(schema: Any) -> None:
    plain = json.loads(schema) if isinstance(schema, str) else schema
    for asked, options in [
        ({"whitespace_pattern": "[ \n]*"}, {"whitespace_pattern": "[ \n]*"}),
        ({"disable_any_whitespace": True}, {"whitespace_flexible": False, "whitespace_pattern": None}),
    ]:
        found = grammar_of(structured_outputs={"json": schema, **asked})
        assert found is not None and (found.kind, found.param) == ("json_schema", "structured_outputs.json")
        assert json.loads(found.source) == plain | {"x-guidance": options}
        found = grammar_of(structured_outputs={"json_object": True, **asked})
        assert found is not None and json.loads(found.source) == {"type": "object", "x-guidance": options}
    assert grammar_of(structured_outputs={"json": "true", "whitespace_pattern": " "}) == Grammar(
        "json_schema", "true", "structured_outputs.json"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": {"x": "y" * MAX_GRAMMAR_CHARS}}, "guided_json"),
        ({"guided_choice": ["a" * 40_000, "b" * 40_000]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "schema": [SCHEMA]}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "json_schema", "schema": None}}, "response_format.json_schema"),
        ({"structured_outputs": {"whitespace_pattern": ""}}, "structured_outputs.whitespace_pattern"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_ones_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields)
    assert caught.value.param == param


def test_biases_and_allowed_tokens_arrive() -> None:
    body = {"messages": QUESTION, "logit_bias": {"5": -1.5, "17": 100}, "allowed_token_ids": [3, 5]}
    sampling = parse_request(msgspec.json.encode(body), ChatCompletionRequest).sampling(SamplingParams())
    assert sampling.logit_bias == ((5, -1.5), (17, 100.0)) and sampling.allowed_token_ids == (3, 5)


# ---- the demo model behind the real application


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", threads=1, chat_template=TEMPLATE) as engine:
        yield engine


@pytest.fixture
async def url(engine: Engine) -> AsyncIterator[str]:
    listening = await listen(build_app(engine, ServerConfig()), "127.0.0.1", 0)
    yield listening.url
    await listening.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


async def test_a_schema_through_the_official_client(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": QUESTION, "response_format": FORMAT, "max_tokens": 200}
    seeded = {"temperature": 1.0, "seed": 4, "logprobs": True}
    whole = await client.chat.completions.create(**asked, **seeded)
    choice = whole.choices[0]
    assert choice.finish_reason == "stop" and choice.message.content is not None
    value = json.loads(choice.message.content)
    assert value["color"] in ("red", "blue") and 0 <= value["count"] <= 9 and len(value) == 2
    stream = await client.chat.completions.create(**asked, **seeded, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop" and len(chunks) > 5


async def test_other_forms_through_the_official_client(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    for fields, expression in (
        ({"guided_choice": ["perhaps", "never"]}, "perhaps|never"),
        ({"structured_outputs": {"regex": "[a-d]{4}"}}, "[a-d]{4}"),
        ({"ebnf": 'root ::= [0-9]{3} "!"'}, "[0-9]{3}!"),
    ):
        answer = await client.chat.completions.create(**asked, extra_body=fields)
        assert re.fullmatch(expression, answer.choices[0].message.content or ""), fields
        completion = await client.completions.create(model="demo", prompt="abc", max_tokens=40, extra_body=fields)
        assert re.fullmatch(expression, completion.choices[0].text), fields
    answer = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").startswith("{")


async def test_what_cannot_be_used_is_a_400(client: openai.AsyncOpenAI) -> None:
    for fields, param, words in (
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_json": {"type": "objet"}}, "guided_json", "Invalid type"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids go from 0 to"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="demo",
                    messages=QUESTION,  # type: ignore[arg-type]
                    stream=stream,
                    extra_body=fields,
                )
            assert caught.value.param == param and words in caught.value.message


# ---- beside tools

ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {}}
FORCED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {
            "messages": [{"role": "user", "content": "What time is it?"}],
            "tools": [{"type": "function", "function": {"name": "clock", "parameters": CLOCK}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}},
        },
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "/v1/responses": (
        {
            "input": "What time is it?",
            "tools": [{"type": "function", "name": "clock", "parameters": CLOCK}],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}},
        },
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "/v1/messages": (
        {
            "messages": [{"role": "user", "content": "What time is it?"}],
            "tools": [{"name": "clock", "input_schema": CLOCK}],
            "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
        },
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ),
}


def shown(path: str, answer: Any) -> tuple[str, list[str]]:
    """The text of an answer and the names of its calls."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if path == "/v1/responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
        return "".join(texts), [item["name"] for item in answer["output"] if item["type"] == "function_call"]
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts), [block["name"] for block in answer["content"] if block["type"] == "tool_use"]


@pytest.mark.quick("/v1/chat/completions")
@pytest.mark.parametrize("path", FORCED)
async def test_a_model_calls_a_tool_or_answers_in_the_form(url: str, path: str) -> None:
    body, forced = FORCED[path]
    body = body | {("max_output_tokens" if path == "/v1/responses" else "max_tokens"): 60, "seed": 1, "temperature": 0}
    async with aiohttp.ClientSession() as http:

        async def ask(**more: Any) -> tuple[str, list[str]]:
            async with http.post(url + path, json=body | more) as response:
                answer = await response.json()
                assert response.status == 200, answer
            return shown(path, answer)

        async with http.post(f"{url}/tokenize", json={"prompt": "<", "add_special_tokens": False}) as response:
            (begins_call,) = (await response.json())["tokens"]
        async with http.post(f"{url}/tokenize", json={"prompt": "}", "add_special_tokens": False}) as response:
            (ends_object,) = (await response.json())["tokens"]
        text, calls = await ask(logit_bias={str(begins_call): -100})
        assert json.loads(text)["answer"] in ("yes", "no") and calls == []
        text, calls = await ask(logit_bias={str(begins_call): 50, str(ends_object): 100})
        assert (text, calls) == ("", ["clock"])
        assert await ask(**forced) == ("", ["clock"])
