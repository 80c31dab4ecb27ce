"""Clients that close their side of the connection behind their request, and read on: they are answered, and those that
have gone for good are still noticed at once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hydra_engine.server.http import listening
from hydra_engine.server.state import PLACES
from tests.server.conftest import Serve, Served, chat_body, until

QUESTION = {"messages": [{"role": "user", "content": "one two three"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": QUESTION,
    "/v1/completions": {"prompt": "one two three"},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {**QUESTION, "max_tokens": 9},
    "/v1/messages/count_tokens": QUESTION,
    "/tokenize": {"prompt": "one two three"},
    "/detokenize": {"tokens": [1]},
}
ROUTES = [("POST", path) for path in BODIES] + [
    ("GET", path) for path in ("/health", "/v1/models", "/metrics", "/load")
]


def wire(method: str, path: str, body: Any = None, version: str = "1.1") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def half_closed(served: Served, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(30):
        found = await reader.read()
    writer.close()
    return found


@pytest.mark.quick("chat/completions", "messages", "models")
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_answers(served: Served, method: str, path: str, slow: bool) -> None:
    served.engine.prefill_s = 0.1 if slow else 0.0
    body = BODIES.get(path)
    for stream in (False, True) if body is not None and "token" not in path else (False,):
        found = await half_closed(served, wire(method, path, {**body, "stream": stream} if body is not None else None))
        head, _, rest = found.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        if stream:
            assert rest.endswith(b"0\r\n\r\n") and b"three" in rest
        elif b"json" in head:
            json.loads(rest)


async def test_two_requests_on_one_connection_are_both_answered(served: Served) -> None:
    sent = wire("POST", "/v1/completions", {"prompt": "one"}) + wire("POST", "/v1/completions", {"prompt": "two"})
    served.engine.prefill_s = 0.1
    found = await half_closed(served, sent)
    assert found.count(b"HTTP/1.1 200 OK") == 2 and found.index(b'"text":"one"') < found.index(b'"text":"two"')


@pytest.mark.quick("intake_s-True-1.1", "token_s-False-1.1", "token_s-True-1.0")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["intake_s", "prefill_s", "token_s"])
async def test_who_has_gone_is_noticed_at_once(served: Served, phase: str, stream: bool, version: str) -> None:
    setattr(served.engine, phase, 60)
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(wire("POST", "/v1/chat/completions", chat_body(stream=stream), version))
    await until(lambda: served.lifecycle.num_running == 1 and (phase == "intake_s" or bool(served.engine.submissions)))
    await asyncio.sleep(0.05)
    writer.close()
    await until(lambda: served.lifecycle.num_running == 0)


async def test_half_a_body_is_no_request(served: Served) -> None:
    found = await half_closed(served, wire("POST", "/v1/chat/completions", QUESTION)[:-3])
    assert found == b"" and served.engine.submissions == []


async def test_a_slow_answer_waits_for_a_reader_of_http_1_1_alone(served: Served) -> None:
    """Another client cannot be asked whether it is there."""
    served.engine.prefill_s = 0.3
    assert await half_closed(served, wire("POST", "/v1/chat/completions", chat_body(), "1.0")) == b""
    await until(lambda: served.lifecycle.num_running == 0)


async def test_an_idle_connection_that_is_half_closed_ends(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(wire("GET", "/livez"))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.05)
    writer.write_eof()
    async with asyncio.timeout(30):
        await reader.read()
    writer.close()


async def test_the_rest_of_a_refused_body_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_LINGER_S", 3600.0)
    served = await serve(max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(wire("POST", "/v1/completions", {"prompt": "a" * 1001})[:-1])
    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 413 ")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 30) == b""
    await until(lambda: not served.app[PLACES]._open)
    writer.close()
