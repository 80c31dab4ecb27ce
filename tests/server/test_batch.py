"""Files of requests: every line gets its answer or its error, and never more are under way than there is room for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.core.call import GenerationCall
from hydra_engine.errors import RequestFailed, ResourceError, Unavailable
from hydra_engine.server.app import build_app
from hydra_engine.server.http.access_control import KeyRing
from hydra_engine.server.openai.batch import MAX_ID_CHARS, serving
from tests.server.stub import StubEngine

QUESTION = [{"role": "user", "content": "one two"}]
CHAT = {"messages": QUESTION, "temperature": 0}


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body or CHAT}).encode()


async def numbered(lines: list[bytes], read: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[int, bytes]]:
    for number, one in enumerate(lines, 1):
        read()
        yield number, one


async def answered(engine: StubEngine, lines: list[bytes], concurrency: int = 4, **config: Any) -> dict[str, Any]:
    """Answers by custom_id, or by their order without one."""
    found: list[Any] = []
    options = ServerConfig(**config)
    async with serving(build_app(engine, options, keys=KeyRing.empty()), options.max_body_bytes) as batch:
        await batch.run(numbered(lines), lambda text: found.append(json.loads(text)), concurrency)
        failed = sum(one["error"] is not None for one in found)
        assert (batch.num_done, batch.num_failed) == (len(lines), failed) == (len(found), failed)
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"] or f"nameless {index}": one for index, one in enumerate(found)}


async def test_every_endpoint_answers_as_at_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "sesame")  # of a server; a batch asks nobody
    engine = StubEngine()
    found = await answered(
        engine,
        [
            line("a"),
            line("b", "/v1/completions", prompt="one two"),
            line("c", "/v1/responses", input="one two"),
            line("d", "/v1/messages", max_tokens=9, messages=QUESTION),
        ],
    )
    for one in found.values():
        assert (one["error"], one["response"]["status_code"]) == (None, 200) and one["response"]["request_id"]
    bodies = {name: one["response"]["body"] for name, one in found.items()}
    assert bodies["a"]["choices"][0]["message"]["content"] == bodies["b"]["choices"][0]["text"] == "one two"
    assert bodies["c"]["output"][0]["content"][0]["text"] == bodies["d"]["content"][0]["text"] == "one two"
    assert len(engine.submissions) == 4


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (b"nonsense", None, "line 1: the request body is not valid JSON"),
        (b"[]", None, "line 1: the request body is wrong"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions"}', "a", "line 1: body is required"),
        (b'{"custom_id":"a","method":"GET","url":"/v1/completions","body":{}}', "a", "line 1: method"),
        (b'{"method":"POST","url":"/v1/completions","body":{}}', None, "line 1: custom_id is required"),
        (b'{"custom_id":5,"method":"POST","url":"/v1/completions","body":{}}', None, "line 1: custom_id"),
        (b'{"custom_id":"a","custom_id":"b"}', "b", "appears twice"),
        (line("x" * (MAX_ID_CHARS + 1)), None, "line 1: custom_id"),
        (line("a", "/v1/embeddings"), "a", "url must be one of /v1/chat/completions, /v1/completions"),
        (line("a", "/health"), "a", "url must be one of"),
        (line("a", **CHAT, stream=True), "a", "leave out stream"),
        (line("a", messages=[]), "a", "messages"),
        (line("a", "/v1/messages", messages=QUESTION), "a", "max_tokens is required"),
        (line("a", **CHAT, model="other"), "a", "does not exist"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":[5]}', "a", "the request body is wrong"),
        (line("a", **CHAT, user="x" * 100_000), None, "line 1 is longer than"),
    ],
)
async def test_what_is_wrong_with_a_line_is_its_answer(text: bytes, name: str | None, words: str) -> None:
    found = await answered(StubEngine(), [text, line("right")], max_body_bytes=1000)
    assert found.pop("right")["error"] is None
    [wrong] = found.values()
    if len(text) < 100_000:
        assert wrong["custom_id"] == name
    assert 400 <= wrong["response"]["status_code"] < 500
    assert words in wrong["error"]["message"] and set(wrong["error"]) == {"message", "type", "param", "code"}
    assert wrong["response"]["body"]["error"]["message"] == wrong["error"]["message"]


async def test_failures_of_the_engine_are_answers_too() -> None:
    engine = StubEngine(error=RequestFailed("broken", code="numerical_error"), fail_after=1, fails_for="b c")
    found = await answered(engine, [line("a"), line("b", "/v1/completions", prompt="b c")])
    assert found["a"]["error"] is None
    assert (found["b"]["response"]["status_code"], found["b"]["error"]["code"]) == (500, "numerical_error")


@pytest.mark.slow
async def test_where_there_is_no_room_it_is_tried_again() -> None:
    engine = StubEngine(refusal=Unavailable("full", retry_after_s=1))
    task = asyncio.create_task(answered(engine, [line("a")]))
    await asyncio.sleep(0.3)
    engine.refusal = None
    assert (await task)["a"]["error"] is None


async def test_no_more_are_under_way_or_read_than_there_is_room_for() -> None:
    class Counting(StubEngine):
        under_way = most = 0

        async def add_request(self, call: GenerationCall) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                return await super().add_request(call)
            finally:
                self.under_way -= 1

    engine, done, num_read, max_ahead = Counting(intake_s=0.01), [0], 0, 0

    def read() -> None:
        nonlocal num_read, max_ahead
        num_read += 1
        max_ahead = max(max_ahead, num_read - done[0])

    def write(_: bytes) -> None:
        done[0] += 1

    async with serving(build_app(engine, ServerConfig()), 10_000) as batch:
        await batch.run(numbered([line(str(i)) for i in range(40)], read), write, 3)
    assert engine.most == 3 and done == [40] and max_ahead <= 3


async def test_what_cannot_be_written_ends_all_and_leaves_no_socket() -> None:
    engine, folders = StubEngine(token_s=0.05), []

    def write(_: bytes) -> None:
        raise ResourceError("the disk is full")

    with pytest.raises(ResourceError, match="the disk is full"):
        async with serving(build_app(engine, ServerConfig()), 10_000) as batch:
            connector: Any = batch._session.connector
            folders.append(os.path.dirname(connector.path))
            assert os.stat(folders[0]).st_mode & 0o077 == 0
            await batch.run(numbered([line(str(i)) for i in range(9)]), write, 4)
    assert not Path(folders[0]).exists()  # noqa: ASYNC240
    assert len(engine.submissions) < 9
