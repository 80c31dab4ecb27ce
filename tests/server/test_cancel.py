"""Clients that leave, do not read or do not send: the request ends, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from typing import Any

import pytest

from tests.server.conftest import Serve, Served, chat_body, until


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(served: Served, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """FIN, or RST."""
    if how == "rst":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort() if how == "rst" else writer.close()


async def assert_quiet(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    await until(lambda: served.lifecycle.num_running == 0)
    async with served.chat() as response:
        assert response.status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_pictures_are_fetched(
    served: Served, caplog: pytest.LogCaptureFixture, how: str, stream: bool
) -> None:
    served.engine.intake_s = 600
    _, writer = await connect(served, request_bytes(stream=stream))
    await until(lambda: served.lifecycle.num_running == 1)
    leave(writer, how)
    await until(lambda: served.engine.intakes_cancelled == 1)
    served.engine.intake_s = 0
    await assert_quiet(served, caplog)


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued(served: Served, caplog: pytest.LogCaptureFixture, how: str, stream: bool) -> None:
    served.engine.prefill_s = 600
    with caplog.at_level(logging.INFO, "hydra_engine.server"):
        _, writer = await connect(served, request_bytes(stream=stream))
        await until(lambda: len(served.engine.submissions) == 1)
        leave(writer, how)
        await until(lambda: len(served.engine.cancelled) == 1)
        served.engine.prefill_s = 0
        await assert_quiet(served, caplog)
    assert " 499 " in caplog.text


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_decode(served: Served, caplog: pytest.LogCaptureFixture, how: str, stream: bool) -> None:
    served.engine.answer, served.engine.token_s = "x " * 10_000, 0.01
    reader, writer = await connect(served, request_bytes(stream=stream))
    if stream:
        await reader.readuntil(b'"content":" x"')
    else:
        await until(lambda: len(served.engine.submissions) == 1)
    leave(writer, how)
    await until(lambda: len(served.engine.cancelled) == 1)
    served.engine.answer, served.engine.token_s = None, 0
    await assert_quiet(served, caplog)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_leaving_during_keep_alive(serve: Serve, caplog: pytest.LogCaptureFixture, how: str) -> None:
    served = await serve(keepalive_s=0.02)
    served.engine.prefill_s = 600
    reader, writer = await connect(served, request_bytes(stream=True))
    await reader.readuntil(b": keep-alive")
    leave(writer, how)
    await until(lambda: len(served.engine.cancelled) == 1)
    served.engine.prefill_s = 0
    await assert_quiet(served, caplog)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_leaving_in_the_middle_of_the_body(served: Served, caplog: pytest.LogCaptureFixture, how: str) -> None:
    _, writer = await connect(served, request_bytes()[:-10])
    await asyncio.sleep(0.05)
    leave(writer, how)
    await assert_quiet(served, caplog)
    assert len(served.engine.submissions) == 1


async def test_a_finished_request_is_not_cancelled(served: Served) -> None:
    for stream in (False, True):
        async with served.chat(stream=stream) as response:
            await response.read()
    assert served.engine.cancelled == []


@pytest.mark.slow
async def test_a_slow_body_is_given_up(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(body_timeout_s=0.2)
    reader, writer = await connect(served, request_bytes()[:-10])
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 15)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
    assert await asyncio.wait_for(reader.read(), 30) == b""  # and the connection closes
    writer.close()
    await assert_quiet(served, caplog)


async def test_a_slow_reader_is_cut_off(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydra_engine.server.http.answers.STALL_S", 0.3)
    served.engine.answer = ("x" * 20_000 + " ") * 2_000
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    with caplog.at_level(logging.INFO, "hydra_engine.server"):
        client.sendall(request_bytes(stream=True))
        await until(lambda: len(served.engine.cancelled) == 1, 10)
        served.engine.answer = None
        await assert_quiet(served, caplog)
    client.close()
    assert "slow_reader" in caplog.text


async def test_others_stream_on_while_one_does_not_read(served: Served) -> None:
    served.engine.answer = ("x" * 20_000 + " ") * 500
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    client.sendall(request_bytes(stream=True))
    await until(lambda: len(served.engine.submissions) == 1)
    served.engine.answer = None
    for _ in range(10):
        async with served.chat(stream=True) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
    client.close()
    await until(lambda: len(served.engine.cancelled) == 1)
