"""Requests side by side: on one connection, under one id, beside a drain; and pictures in a tool's result."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.conftest import Served, chat_body, until

PICTURE = "data:image/png;base64,AAAA"
CALL = {"name": "look", "arguments": "{}"}
CHAT = {
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
    ]
}
RESPONSES = {
    "input": [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", **CALL},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": PICTURE}],
        },
    ]
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
MESSAGES = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": SOURCE}]},
            ],
        },
    ],
}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
)
async def test_a_picture_in_a_tool_s_result(served: Served, path: str, body: dict[str, Any]) -> None:
    async with served.post(path, body) as response:
        assert response.status == 200, await response.text()
    result = served.engine.submissions[0].messages[-1]
    assert (result.role, result.tool_call_id) == ("tool", "c1")
    assert [part.source for part in result.media] == [PICTURE]


async def test_a_kept_connection_is_refused_while_a_stream_ends(served: Served) -> None:
    served.engine.token_s = 0.2
    async with served.get("/livez") as response:  # whose connection is kept
        assert response.status == 200
    stream = asyncio.create_task(read(served, chat_body(stream=True)))
    await until(lambda: served.lifecycle.num_running == 1)
    served.lifecycle.draining = True
    async with served.chat() as response:
        assert response.status == 503 and int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "draining"
    assert (await stream).endswith("data: [DONE]\n\n")


async def read(served: Served, body: dict[str, Any], **headers: str) -> str:
    async with served.post("/v1/chat/completions", body, headers=headers) as response:
        assert response.status == 200
        return (await response.read()).decode()


async def test_two_requests_sent_at_once_on_one_connection(served: Served) -> None:
    served.engine.prefill_s = 0.05
    wire = b""
    for word in ("one", "two"):
        data = json.dumps({"prompt": word}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        wire += f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(wire)
    async with asyncio.timeout(30):
        for word in ("one", "two"):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            [length] = [int(line.split()[1]) for line in head.splitlines() if line.startswith("Content-Length")]
            assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == word
    writer.close()


async def test_sixteen_requests_of_one_id(served: Served) -> None:
    served.engine.token_s = 0.01
    texts = [f"a{number} b c" for number in range(16)]
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(*(read(served, chat_body(text), **headers) for text in texts))
    told = [json.loads(answer) for answer in answers]
    assert [one["choices"][0]["message"]["content"] for one in told] == texts
    assert {one["id"] for one in told} == {"chatcmpl-same"} and served.lifecycle.num_running == 0
