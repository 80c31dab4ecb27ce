"""Names that no request has, at every level: none that changes the answer is dropped without a word."""

from __future__ import annotations

import json
import logging
import re
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hydra_engine.core.call import ImagePart
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.body import check_unknown_names, parse_request, strict, unknown_names
from hydra_engine.server.protocol import fields as protocol_fields
from hydra_engine.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.other_fields import IGNORED, other_names_of
from hydra_engine.server.protocol.responses import ResponsesRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.calls import plain
from tests.server.conftest import Served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
KINDS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountTokensRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
QUESTION = [{"role": "user", "content": "one two three"}]
PICTURE = "data:image/png;base64,AAAA"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "one two three"},
    RESPONSES: {"input": "one two three"},
    MESSAGES: {"messages": QUESTION, "max_tokens": 9},
    COUNT: {"messages": QUESTION},
    TOKENIZE: {"prompt": "one"},
    DETOKENIZE: {"tokens": [1]},
}


def body_of(path: str, **fields: Any) -> bytes:
    return json.dumps({**LEAST[path], **fields}).encode()


def refusal_of(path: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body_of(path, **fields), KINDS[path])
    return caught.value


def one_part(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


# ---- refused, each with what to use instead


@pytest.mark.parametrize(
    ("path", "fields", "param", "hint"),
    [
        (CHAT, {"output_format": {"type": "json_schema"}}, "output_format", "use response_format"),
        (CHAT, {"text": {"format": {"type": "json_object"}}}, "text", "use response_format"),
        (CHAT, {"format": "json"}, "format", "use response_format"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens", "use max_tokens"),
        (CHAT, {"stop_sequences": ["a"]}, "stop_sequences", "use stop"),
        (CHAT, {"instructions": "Be brief."}, "instructions", "use messages[] with the role system"),
        (CHAT, {"options": {"num_ctx": 5}}, "options", "send its fields at the top level"),
        (CHAT, {"extra_body": {"top_k": 5}}, "extra_body", "send its fields at the top level"),
        (CHAT, {"t_max_predict_ms": 500}, "t_max_predict_ms", "leave it out or send 0"),
        (CHAT, {"n_probs": 5}, "n_probs", "use top_logprobs"),
        (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "a prompt is never cut"),
        (CHAT, {"do_sample": False}, "do_sample", "use temperature 0"),
        (CHAT, {"sampling_params": {"temperature": 0}}, "sampling_params", "send its fields at the top level"),
        (CHAT, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", ""),
        (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens", "use max_tokens"),
        (COMPLETIONS, {"messages": QUESTION}, "messages", "use prompt"),
        (COMPLETIONS, {"top_logprobs": 5}, "top_logprobs", "use logprobs"),
        (RESPONSES, {"logprobs": True}, "logprobs", "use top_logprobs"),
        (RESPONSES, {"stop_sequences": ["a"]}, "stop_sequences", "use stop"),
        (RESPONSES, {"output_format": {"a": 1}}, "output_format", "use text.format"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation", "leave it out"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_object", "schema": SCHEMA}}},
            "text.format.schema",
            "json_schema",
        ),
        (MESSAGES, {"stop": ["a"]}, "stop", "use stop_sequences"),
        (MESSAGES, {"parallel_tool_calls": False}, "parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        (MESSAGES, {"text": {"format": {"type": "json_object"}}}, "text", "use output_config.format"),
        (COUNT, {"mcp_servers": [{"url": "a"}]}, "mcp_servers", "leave it out"),
        (TOKENIZE, {"content": "abc"}, "content", "use prompt"),
        (TOKENIZE, {"add_special": True}, "add_special", "use add_special_tokens"),
        (DETOKENIZE, {"skip_special_tokens": True}, "skip_special_tokens", "leave it out or send false"),
        (CHAT, {"messages": [{**QUESTION[0], "images": ["a"]}]}, "messages[0].images", "send it as parts of content"),
        (
            *(CHAT, {"messages": one_part({"type": "image_url", "image_url": {"url": PICTURE}, "max_pixels": 784})}),
            *("messages[0].content[0].max_pixels", "mm_processor_kwargs.min_pixels and max_pixels"),
        ),
        (
            *(CHAT, {"messages": one_part({"type": "image_url", "image_url": {"url": PICTURE, "resized_width": 28}})}),
            *("messages[0].content[0].image_url.resized_width", "mm_processor_kwargs"),
        ),
        (
            *(CHAT, {"messages": one_part({"type": "video_url", "video_url": {"url": "a"}, "fps": 2})}),
            *("messages[0].content[0].fps", "the model's processor chooses frames"),
        ),
        (CHAT, {"tools": [function(), {**function(), "defer_loading": True}]}, "tools[1].defer_loading", ""),
        (CHAT, {"tools": [function(input_examples=[{}])]}, "tools[0].function.input_examples", "description"),
        (
            *(CHAT, {"tool_choice": {**function(), "disable_parallel_tool_use": True}}),
            *("tool_choice.disable_parallel_tool_use", "use parallel_tool_calls"),
        ),
        (CHAT, {"response_format": {"type": "json_object", "pattern": "a"}}, "response_format.pattern", "regex"),
        (
            *(RESPONSES, {"input": one_part({"type": "input_image", "image_url": PICTURE, "file_id": "file_1"})}),
            *("input[0].content[0].file_id", "use image_url"),
        ),
        (RESPONSES, {"tools": [{"name": "f", "output_schema": SCHEMA}]}, "tools[0].output_schema", "description"),
        (
            *(MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, "input_examples": [{"n": 1}]}]}),
            *("tools[0].input_examples", "description"),
        ),
        (
            *(
                COUNT,
                {"tools": [{"name": "f", "input_schema": SCHEMA, "allowed_callers": ["code_execution_20250825"]}]},
            ),
            *("tools[0].allowed_callers", 'leave it out or send ["direct"]'),
        ),
        (
            *(MESSAGES, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "a"}]}]}),
            *("messages[0].tool_calls", "send blocks of the type tool_use"),
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_would_change_the_answer_is_refused(path: str, fields: dict[str, Any], param: str, hint: str) -> None:
    error = refusal_of(path, **fields)
    assert (error.param, error.code) == (param, "unsupported_parameter")
    assert error.message.startswith(f"{param} is not supported by this server; ") and hint in error.message


@pytest.mark.parametrize("path", list(KINDS))
def test_values_that_ask_for_nothing_are_taken(path: str) -> None:
    """Sends every refused name with null, empty values, and each of its defaults."""
    place = other_names_of(KINDS[path])
    for name, harmless in place.refused.items():
        for value in (None, "", [], {}, *(harmless if isinstance(harmless, tuple) else ())):
            parse_request(body_of(path, **{name: value}), KINDS[path])
    for name in place.ignored:
        parse_request(body_of(path, **{name: {"anything": [1]}}), KINDS[path])


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_edits_of_thinking_ask_for_nothing(edits: list[Any]) -> None:
    parse_request(body_of(MESSAGES, context_management={"edits": edits}), MessagesRequest)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                            {"type": "image_url", "image_url": {"url": PICTURE, "detail": "original"}, "uuid": "a"},
                        ],
                    },
                    {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None},
                ],
                "tools": [{**function(strict=True), "cache_control": {}, "defer_loading": False}],
                "stream_options": None,
                "prediction": {"type": "content", "content": "abc"},
                "verbosity": "low",
                "web_search_options": {},
                "cache_prompt": False,
                "id_slot": 3,
            },
        ),
        (RESPONSES, {"input": [{**QUESTION[0], "id": "a", "status": "completed"}], "max_tool_calls": 3}),
        (
            MESSAGES,
            {
                "tools": [{"name": "f", "input_schema": SCHEMA, "allowed_callers": ["direct"], "input_examples": []}],
                "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}],
                "metadata": {"user_id": "a"},
            },
        ),
        (COUNT, {"temperature": 0, "stream": True, "output_config": {"format": {"type": "json_schema"}}}),
        (TOKENIZE, {"temperature": 0, "max_tokens": 5, "tool_choice": "auto", "response_format": {"type": "text"}}),
    ],
)
async def test_what_cannot_change_the_answer_is_ignored(served: Served, path: str, fields: dict[str, Any]) -> None:
    async with served.post(path, {**LEAST[path], **fields}) as response:
        assert response.status == 200, await response.text()


async def test_names_that_nobody_knows_are_logged_once_wherever_they_are(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_fields, "_logged_names", set())  # others of this process may have filled it
    name = f"x{uuid.uuid4().hex[:8]}"
    parts = [{"type": "text", "text": "a", name: 1}] * 3
    with caplog.at_level(logging.INFO, "hydra_engine.server.protocol.fields"):
        for _ in range(2):
            async with served.chat(messages=[{"role": "user", "content": parts, name: 1}]) as response:
                assert response.status == 200
    lines = sorted(record.getMessage() for record in caplog.records if name in record.getMessage())
    assert lines == [f"ignoring the request field 'messages[].{where}{name}'" for where in ("content[].", "")]


@pytest.mark.parametrize("kind", ["input_audio", "file", "audio_url", "video", "input_image"])
def test_parts_of_a_type_that_is_not_built_are_refused(kind: str) -> None:
    error = refusal_of(CHAT, messages=one_part({"type": kind, kind: {"url": "a"}}))
    assert (error.param, error.code) == ("messages[0].content[0].type", "unsupported_parameter")
    assert "supported values are 'text', 'refusal', 'image_url', 'video_url'" in error.message


async def test_a_refusal_names_the_path_on_the_wire(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE, "min_pixels": 784}}
    async with served.chat(messages=one_part(part)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == "messages[0].content[0].image_url.min_pixels"
    assert served.engine.submissions == []


# ---- done: other APIs' names for what is built


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        (CHAT, {"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
        (COMPLETIONS, {"json_schema": SCHEMA}, "json_schema"),
        (RESPONSES, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
        (MESSAGES, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ],
)
async def test_schemas_of_other_apis_hold(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    async with served.post(path, {**LEAST[path], **fields}) as response:
        assert response.status == 200, await response.text()
    [asked] = served.engine.submissions
    assert asked.sampling.grammar is not None
    assert (json.loads(asked.sampling.grammar.source), asked.sampling.grammar.param) == (SCHEMA, param)


async def test_two_names_of_one_form_are_refused(served: Served) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    async with served.post(
        MESSAGES, {**LEAST[MESSAGES], "output_format": form, "output_config": {"format": form}}
    ) as one:
        assert one.status == 400 and "two names of one field" in (await one.json())["error"]["message"]


async def test_older_calls_and_refusals_in_a_history(served: Served) -> None:
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": '{"zone": 1}'}},
        {"role": "function", "name": "clock", "content": "noon"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        *QUESTION,
    ]
    async with served.chat(messages=history) as response:
        assert response.status == 200, await response.text()
    called, told, refused, again = plain(served.engine.submissions[0].messages)[1:5]
    assert called["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"zone": 1}}
    assert told == {"role": "tool", "content": "noon", "name": "clock"}
    assert (refused["content"], again["content"]) == ("No.", [{"type": "text", "text": "Never."}])


@pytest.mark.parametrize("mark", ["prefix", "partial"])
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_an_answer_goes_on_with_a_marked_message(served: Served, path: str, mark: str) -> None:
    begun = {"role": "assistant", "content": "It is", mark: True}
    async with served.post(path, {"messages": [*QUESTION, begun]}) as response:
        assert response.status == 200, await response.text()
    [asked] = served.engine.submissions or served.engine.tokenized
    assert asked.template.continue_final_message and not asked.template.add_generation_prompt
    async with served.post(path, {"messages": [begun, *QUESTION]}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == f"messages[0].{mark}"
    async with served.post(path, {"messages": [{**QUESTION[0], mark: True}]}) as response:
        assert response.status == 400


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, COUNT])
async def test_budgets_of_pixels_and_variables_hold_on_all_apis(served: Served, path: str) -> None:
    more = {"mm_processor_kwargs": {"max_pixels": 784}, "chat_template_kwargs": {"a": 1}}
    async with served.post(path, {**LEAST[path], **more}) as response:
        assert response.status == 200, await response.text()
    [asked] = served.engine.submissions or served.engine.counted
    assert asked.pixels.max_pixels == 784 and asked.template.variables == {"a": 1}


@pytest.mark.parametrize(("detail", "expected"), [("low", "low"), ("original", "high"), (None, "auto")])
async def test_details_of_pictures_hold_on_chat_and_responses(
    served: Served, detail: str | None, expected: str
) -> None:
    await served.chat(messages=one_part({"type": "image_url", "image_url": {"url": PICTURE, "detail": detail}}))
    part = {"type": "input_image", "image_url": PICTURE, "detail": detail}
    await served.post(RESPONSES, {"input": one_part(part)})
    pictures = [picture for asked in served.engine.submissions for picture in asked.messages[0].media]
    assert [picture.detail for picture in pictures if isinstance(picture, ImagePart)] == [expected] * 2


@pytest.mark.parametrize("stop", ["", [], [""], ["", "x"]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_empty_stop_strings_ask_for_nothing(served: Served, path: str, stop: Any) -> None:
    name = "stop_sequences" if path == MESSAGES else "stop"
    if path == MESSAGES and isinstance(stop, str):
        stop = [stop]
    async with served.post(path, {**LEAST[path], name: stop}) as response:
        assert response.status == 200, await response.text()
    assert served.engine.submissions[0].sampling.stop == (("x",) if "x" in stop else ())


# ---- how unknown names are found


def found_in(kind: type[msgspec.Struct], body: dict[str, Any]) -> list[str]:
    return [unknown.path for unknown in unknown_names(json.dumps(body, indent=1).encode(), kind)]


def test_the_walk_goes_into_objects_of_ours_only() -> None:
    body = {
        "messages": [
            {"role": "user", "content": "text", "a": {"b": 1}},
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"b": {}, "type": "image_url", "image_url": "u"}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {"y": 1}}, "c": 1}}],
        "metadata": {"messages": [{"d": 1}]},
        "logit_bias": {"5": 1},
        "stop": ["a"],
    }
    expected = ["messages[0].a", "messages[1].content[1].b", "tools[0].function.c", "metadata"]
    assert found_in(ChatCompletionRequest, body) == expected


def test_without_unknown_names_nothing_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("hydra_engine.server.http.body.unknown_names", never)
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    known = {"messages": one_part(image), "tools": [function()], "tool_choice": "none", "stop": ["a"], "n": 2}
    check_unknown_names(json.dumps(known).encode(), ChatCompletionRequest)
    with pytest.raises(AssertionError):
        check_unknown_names(json.dumps({**known, "user": "me"}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize("kind", KINDS.values())
def test_all_types_have_a_strict_form(kind: type[msgspec.Struct]) -> None:
    assert strict(kind).__struct_config__.forbid_unknown_fields


def test_the_documentation_lists_what_is_ignored() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    listed = page.partition("of a body that has no such field:")[2].partition("- **unknown**")[0]
    assert re.findall(r"`(.+?)`", listed) == sorted(IGNORED)
