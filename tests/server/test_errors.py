"""Refusals: their status, code and field, and what their body must never hold."""

from __future__ import annotations

import io
import json
import logging
import traceback
import uuid
from typing import Any

import openai
import pytest

from hydra_engine import errors
from hydra_engine.server.protocol import fields as protocol_fields
from tests.server.conftest import Serve, Served, chat_body
from tests.server.test_chat import client_of


async def refusal(response: Any) -> dict[str, Any]:
    body = json.loads(await response.read())
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or error["code"] in errors.CODES
    assert "\n" not in error["message"] and len(error["message"]) <= 500
    assert "Traceback" not in error["message"] and "/work" not in error["message"] and "0x" not in error["message"]
    return error


MESSAGE = b'{"messages":[{"role":"user","content":"a"}]'
BROKEN = {
    "empty": b"",
    "not json": b"hello",
    "unclosed": b'{"a":',
    "trailing comma": MESSAGE + b",}",
    "two documents": MESSAGE + b"}{}",
    "array": b"[]",
    "null": b"null",
    "nan": MESSAGE + b',"temperature":NaN}',
    "infinity": MESSAGE + b',"temperature":Infinity}',
    "1e400": MESSAGE + b',"temperature":1e400}',
    "1e400 in a refused field": MESSAGE + b',"n":1e400}',
    "long integer": MESSAGE + b',"seed":' + b"9" * 5000 + b"}",
    "long float": MESSAGE + b',"temperature":' + b"9" * 5000 + b"}",
    "deep arrays": MESSAGE + b',"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": MESSAGE + b',"x":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "only brackets": b"[" * 100_000,
    "same key twice": MESSAGE + b',"seed":1,"seed":2}',
    "same key escaped": MESSAGE + b',"seed":1,"\\u0073eed":2}',
    "same key inside": MESSAGE + b',"metadata":{"a":1,"a":2}}',
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "lone surrogate key": MESSAGE + b',"\\ud800":1}',
    "lone surrogate in n": MESSAGE + b',"n":"\\ud800"}',
    "nul in a key": b'{"messages":[{"role":"user","content":"a","\\u0000":1}]}',
    "raw nul": b'{"messages":[{"role":"user","content":"a\0b"}]}',
    "control character": b'{"messages":[{"role":"user","content":"a\nb"}]}',
    "latin-1": b'{"messages":[{"role":"user","content":"\xe9"}]}',
    "encoded surrogate": b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    "byte order mark": b"\xef\xbb\xbf" + MESSAGE + b"}",
    "many values": MESSAGE + b',"x":[' + b"[]," * 600_000 + b"[]]}",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_bodies_that_are_not_plain_json(served: Served, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with served.post("/v1/chat/completions", data=io.BytesIO(BROKEN[name]), headers=headers) as response:
        error = await refusal(response)
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert served.engine.submissions == []


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", [{"content": "a"}], "messages[0].role"),
        ("messages", [{"role": "wizard", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": []}], "messages[0].content"),
        (
            "messages",
            [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
            "messages[0].tool_calls",
        ),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None),
        ("messages", [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], None),
        ("messages", [{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ("temperature", 2.1, "temperature"),
        ("temperature", -0.1, "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1.5, "top_k"),
        ("min_p", 2, "min_p"),
        ("seed", 1 << 63, "seed"),
        ("seed", 0.5, "seed"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1 << 31, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("min_tokens", -1, "min_tokens"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", ["x" * 300], "stop[0]"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("stop_token_ids", list(range(65)), "stop_token_ids"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("request_id", "a b", "request_id"),
        ("request_id", "x" * 129, "request_id"),
        ("return_metrics", "yes", "return_metrics"),
        ("n", 65, "n"),
        ("n", 0, "n"),
        ("n", 1 << 31, "n"),
        ("n", True, "n"),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 129, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", "any", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("parallel_tool_calls", 1, "parallel_tool_calls"),
        ("add_generation_prompt", "yes", "add_generation_prompt"),
        ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"bos_token": "x"}, "chat_template_kwargs.bos_token"),
        ("chat_template_kwargs", {"a b": 1}, "chat_template_kwargs"),
        ("chat_template_kwargs", {"a": "x" * 40_000}, "chat_template_kwargs"),
        ("documents", [{"text": "a"}], "documents"),
        ("mm_processor_kwargs", {"num_crops": 4}, "mm_processor_kwargs.num_crops"),
        ("mm_processor_kwargs", {"max_pixels": 0}, "mm_processor_kwargs"),
        ("mm_processor_kwargs", {"min_pixels": 9, "max_pixels": 8}, "mm_processor_kwargs.min_pixels"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
        ),
        ("logit_bias", {"five": 1}, None),
        ("reasoning_effort", "huge", "reasoning_effort"),
        ("chat_template", "{{ x }}", "chat_template"),
        ("structured_outputs", {"structural_tag": {}}, "structured_outputs.structural_tag"),
        ("structured_outputs", {"whatever": 1}, "structured_outputs"),
        ("modalities", ["audio"], "modalities"),
    ],
)
async def test_wrong_fields_are_named(served: Served, name: str, value: Any, param: str | None) -> None:
    async with served.chat(**{name: value}) as response:
        error = await refusal(response)
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    if param is not None:
        assert error["param"] == param
    assert served.engine.submissions == []


@pytest.mark.parametrize(
    ("path", "hints"),
    [
        (
            "/v1/chat/completions",
            {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"},
        ),
        ("/v1/completions", {"enable_thinking": None, "max_new_tokens": "max_tokens", "input_ids": "prompt"}),
        ("/v1/responses", {"max_new_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}),
        ("/v1/responses", {"images": "input[].content", "grammar": "structured_outputs.grammar"}),
        ("/v1/messages", {"images": "messages[].content", "repeat_penalty": "repetition_penalty"}),
        ("/v1/messages", {"stop_regex": None}),
    ],
)
async def test_refused_fields_lead_to_one_that_the_route_has(
    served: Served, path: str, hints: dict[str, str | None]
) -> None:
    message = {"role": "user", "content": "a"}
    asked = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path)
    asked = asked or {"messages": [message], "max_tokens": 1}
    for name, instead in hints.items():
        async with served.post(path, {**asked, name: 9}) as response:
            said = (await response.json())["error"]["message"]
        hint = "leave it out" if instead is None else f"use {instead}"
        assert said.startswith(f"{name} is not supported by this server; {hint}"), said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias: each key must be 1 to 10 characters of 0-9"),
        ({"logit_bias": {"5": 101}}, "logit_bias: each value: Expected number <= 100"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name must be 1 to 128 characters of A-Za-z"),
        ({"messages": [{"role": "foo", "content": "a"}]}, "supported values are 'assistant', 'developer', 'function'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "are 'text', 'refusal', 'image_url', 'video_url'",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "a list of at least one content part"),
        ({"response_format": {"type": "xml"}}, "'json_object', 'json_schema', 'text'"),
    ],
)
async def test_what_is_wrong_says_what_would_be_right(served: Served, fields: dict[str, Any], words: str) -> None:
    async with served.chat(**fields) as response:
        assert words in (await refusal(response))["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("n", None),
        ("tools", []),
        ("tools", None),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("structured_outputs", {}),
        ("guided_json", None),
        ("logit_bias", {}),
        ("temperature", None),
        ("stop", None),
        ("stop", []),
        ("stop", ""),
        ("stop", [""]),
        ("stream_options", None),
        ("max_tokens", None),
        ("user", "x" * 100_000),
        ("metadata", {"a": [1, {"b": None}]}),
        ("service_tier", 5),
        ("parallel_tool_calls", True),
        ("tool_choice", "auto"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("mm_processor_kwargs", {"min_pixels": 784, "max_pixels": 1_000_000}),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("store", False),
        ("something_new", {"deep": [[[]]]}),
    ],
)
async def test_defaults_and_ignored_fields_are_accepted(served: Served, name: str, value: Any) -> None:
    async with served.chat(**{name: value}) as response:
        assert response.status == 200, await response.text()


async def test_unknown_fields_are_logged_once_a_name(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_fields, "_logged_names", set())  # others of this process may have filled it
    unknown = f"never_heard_of_{uuid.uuid4().hex[:8]}"  # nor has any test before in this process
    with caplog.at_level(logging.INFO, "hydra_engine.server.protocol.fields"):
        for _ in range(3):
            async with served.chat(**{unknown: 1}, user="me") as response:
                assert response.status == 200
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("protocol.fields")]
    assert sorted(lines) == [f"ignoring the request field {name!r}" for name in (unknown, "user")]


@pytest.mark.quick("False-")
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (
            errors.ContextLengthExceeded("This model's maximum context length is 8 tokens"),
            400,
            "context_length_exceeded",
        ),
        (errors.RequestTooLarge("too large"), 400, "request_too_large_for_deployment"),
        (errors.InvalidImage("bad picture", param="messages[0].content[1]"), 400, "image_decode_failed"),
        (errors.MediaForbidden("no"), 400, "media_url_forbidden"),
        (errors.MediaFetchFailed("the host answered 404"), 400, "media_fetch_failed"),
        (errors.Unavailable("full", retry_after_s=7), 503, "overloaded"),
        (errors.Unavailable("gone", code="instance_lost"), 503, "instance_lost"),
        (errors.RequestFailed("nan", code="numerical_error"), 500, "numerical_error"),
        (errors.EngineClosed("closed"), 503, "engine_closed"),
        (errors.RequestAborted("aborted"), 499, "request_aborted"),
        (ValueError("secret /etc/shadow at 0x7f00"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_before_the_first_token(
    served: Served, error: Exception, status: int, code: str, stream: bool
) -> None:
    for where in ("intake", "queue"):
        served.engine.refusal = error if where == "intake" else None
        served.engine.error, served.engine.fail_after = error, 0
        async with served.chat(stream=stream) as response:
            body = await refusal(response)
        assert (response.status, body["code"]) == (status, code)
        assert response.headers["Content-Type"] == "application/json"
        assert ("Retry-After" in response.headers) == (status == 503)
        assert "secret" not in body["message"]
    if isinstance(error, errors.InvalidImage):
        assert body["param"] == "messages[0].content[1]"


async def test_retry_after_is_the_engine_s(served: Served) -> None:
    served.engine.refusal = errors.Unavailable("full", retry_after_s=7)
    async with served.chat() as response:
        assert response.headers["Retry-After"] == "7"


async def test_unexpected_errors_are_logged_with_their_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.refusal = ZeroDivisionError("oops")
    async with served.chat() as response:
        request_id = response.headers["X-Request-Id"]
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert request_id in record.getMessage() and record.exc_info is not None
    assert "ZeroDivisionError" in "".join(traceback.format_exception(*record.exc_info))


@pytest.mark.parametrize("error", [errors.Unavailable("gone", code="instance_lost"), ValueError("oops")])
async def test_an_error_after_the_first_token_is_an_event_and_the_end(served: Served, error: Exception) -> None:
    served.engine.error, served.engine.fail_after = error, 2
    async with served.chat(stream=True) as response:
        assert response.status == 200
        body = await response.text()
    events = body.split("\n\n")
    assert events[-1] == "" and json.loads(events[-2][6:])["error"]["code"] in ("instance_lost", "internal_error")
    assert "[DONE]" not in body and 'finish_reason":"' not in body
    async with client_of(served) as client:
        stream = await client.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "a b c"}], stream=True
        )
        with pytest.raises(openai.APIError) as raised:
            [chunk async for chunk in stream]
    assert isinstance(raised.value.body, dict) and set(raised.value.body) == {"message", "type", "param", "code"}


async def test_nothing_is_served_while_the_model_loads(served: Served) -> None:
    served.engine.state = "loading"
    for request in (
        served.chat(),
        served.post("/v1/completions", {"prompt": "a"}),
        served.post("/tokenize", {"prompt": "a"}),
        served.get("/v1/models"),
    ):
        async with request as response:
            error = await refusal(response)
        assert (response.status, error["code"]) == (503, "not_ready")
        assert "Retry-After" in response.headers
    async with served.get("/livez") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    async with served.get("/metrics") as response:
        assert response.status == 200


# ---- types, sizes, methods, routes


async def test_body_types(serve: Serve) -> None:
    served = await serve()
    body = json.dumps(chat_body()).encode()
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/octet-stream"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json", "Content-Encoding": "br, gzip"},
    ):
        async with served.post("/v1/chat/completions", data=body, headers=headers) as response:
            assert (response.status, (await refusal(response))["code"]) == (415, "unsupported_media_type")
    for headers in (
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Type": "Application/JSON", "Content-Encoding": "identity"},
    ):
        async with served.post("/v1/chat/completions", data=body, headers=headers) as response:
            assert response.status == 200


async def test_body_size(serve: Serve) -> None:
    served = await serve(max_body_bytes=1000)

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    for body in (b" " * 1001, chunks()):  # by its header, and by its count
        async with served.post(
            "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert (response.status, (await refusal(response))["code"]) == (413, "payload_too_large")


async def test_methods_and_routes(served: Served) -> None:
    async with served.get("/v1/chat/completions") as response:
        error = await refusal(response)
        assert (response.status, error["code"]) == (405, "method_not_allowed") and error["message"].endswith("use POST")
        assert response.headers["Allow"] == "POST"
    async with served.http.options(served.url + "/v1/models") as response:
        assert response.status == 405 and set(response.headers["Allow"].split(",")) == {"GET", "HEAD"}
    for path, told in (
        ("/v2", "GET /docs lists all routes"),
        ("//v1/models", "did you mean GET /v1/models?"),
        ("/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
        ("/chat/completions", "did you mean POST /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean POST /v1/messages?"),
        ("/api/chat", "Ollama's API is not served; OpenAI's is at /v1/chat/completions"),
        ("/v1/embeddings", "no embeddings"),
        ("/debug/ledger", "GET /docs"),
        ("/ui/nothing.js", "GET /docs"),
    ):
        async with served.get(path) as response:
            error = await refusal(response)
            assert (response.status, error["code"]) == (404, "not_found") and told in error["message"], path


async def test_a_slash_at_the_end_changes_nothing(serve: Serve) -> None:
    served = await serve(api_key=("sesame",), admin_key="open-admin")
    keyed, admin = ({"Authorization": f"Bearer {key}"} for key in ("sesame", "open-admin"))
    for path, headers, status in (
        ("/health/", {}, 200),
        ("/v1/models/", {}, 401),
        ("/v1/models/", keyed, 200),
        ("/v1/models/stub/", keyed, 200),
        ("/metrics/", admin, 200),
        ("/admin/topology/", keyed, 401),
        ("/admin/topology/", admin, 200),
    ):
        async with served.get(path, headers=headers) as response:
            assert response.status == status, (path, headers)
    async with served.post("/v1/chat/completions/", chat_body(), headers=keyed) as response:
        assert response.status == 200
    async with served.get("/metrics", headers=admin) as response:
        assert 'route="/v1/chat/completions",status="200"' in await response.text()
