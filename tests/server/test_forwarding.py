"""Streams whose pieces are written as they come, without a turn of the handler: same text, same ends, and a client that
does not read is still cut off."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import FinishReason, Piece, RequestMetrics, Result, Usage
from hydra_engine.errors import RequestFailed
from hydra_engine.frontend.handle import Handle
from hydra_engine.server import generate
from hydra_engine.server.http.answers import EventStream
from hydra_engine.server.loggers import ACCESS, Access
from tests.server.conftest import Serve, Served, until
from tests.server.stub import StubEngine
from tests.server.test_cancel import connect, request_bytes


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """Real ones, which the test feeds."""
    made: list[Handle] = []

    async def add_request(engine: StubEngine, call: GenerationCall) -> Handle:
        handle = Handle(str(call.request_id), lambda: engine.cancelled.append(handle.id))
        handle.prompt_usage = Usage(3, 0)
        made.append(handle)
        return handle

    monkeypatch.setattr(StubEngine, "add_request", add_request)
    return made


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that went the short way."""
    texts: list[str] = []
    write = generate._write_text

    def noted(answer: Any, events: Any, piece: Piece) -> bool:
        written = write(answer, events, piece)
        if written:
            texts.append(piece.text)
        return written

    monkeypatch.setattr(generate, "_write_text", noted)
    return texts


def end(handle: Handle, text: str) -> None:
    result = Result(handle.id, text, (1,), FinishReason.STOP, Usage(3, 1), RequestMetrics())
    handle.feed(Piece("", result=result))


def text_of(stream: bytes) -> str:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(data) for data in events[:-1]]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


async def test_the_stream_is_whole_and_in_order(served: Served, handles: list[Handle], forwarded: list[str]) -> None:
    words = [f"{number} ü\n" for number in range(200)]
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(served))
        await until(lambda: bool(handles))
        for index, word in enumerate(words):
            handles[0].feed(Piece(word, (index,)))
            if index % 7 == 0:
                await asyncio.sleep(0)
            if index % 50 == 0:
                await asyncio.sleep(0.01)
        end(handles[0], "".join(words))
    assert text_of(reading.result()) == "".join(words)
    assert len(forwarded) > 100, "most go the short way"
    assert words[0] not in forwarded, "the first one brings the headers"


async def read(served: Served) -> bytes:
    async with served.chat(stream=True) as response:
        assert response.status == 200
        data: bytes = await response.read()
        return data


async def test_a_client_of_http_1_0_gets_no_chunks(served: Served, handles: list[Handle], forwarded: list[str]) -> None:
    reader, writer = await connect(served, request_bytes(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
    await until(lambda: bool(handles))
    for number in range(20):
        handles[0].feed(Piece(f"{number} ", (number,)))
        await asyncio.sleep(0)
    end(handles[0], "")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head and forwarded == []
    assert text_of(body) == "".join(f"{number} " for number in range(20))


async def test_an_error_behind_forwarded_pieces_ends_the_stream(served: Served, handles: list[Handle]) -> None:
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(served))
        await until(lambda: bool(handles))
        for number in range(5):
            handles[0].feed(Piece(f"{number} ", (number,)))
            await asyncio.sleep(0.01)
        handles[0].fail(RequestFailed("the instance is gone"))
    events = reading.result().strip().split(b"\n\n")
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["message"] == "the instance is gone"


@pytest.mark.slow
async def test_a_slow_reader_of_a_forwarded_stream_is_cut_off(
    served: Served, handles: list[Handle], forwarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydra_engine.server.http.answers.STALL_S", 0.3)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    client.sendall(request_bytes(stream=True))
    await until(lambda: bool(handles))
    async with asyncio.timeout(20):
        while not served.engine.cancelled:
            handles[0].feed(Piece("x" * 20_000, (1,)))
            await asyncio.sleep(0.002)
    client.close()
    assert len(forwarded) > 1
    await until(lambda: served.lifecycle.num_running == 0)


async def test_nothing_is_written_past_a_send_that_waits_for_its_turn() -> None:
    stream = EventStream({ACCESS: Access(0.0)}, keepalive_s=0)  # type: ignore[arg-type]
    stream._transport = transport = NotRead()  # type: ignore[assignment]
    assert stream.is_free
    await stream._lock.acquire()
    transport.waiting = 1
    sending = asyncio.create_task(stream.send(b"first"))
    await asyncio.sleep(0)
    transport.waiting = 0
    stream._lock.release()
    assert not stream._lock.locked() and not stream.is_free, "the other one has not had its turn yet"
    sending.cancel()
    await asyncio.wait([sending])
    assert stream.is_free
    await stream.__aexit__(None, None, None)
    assert not stream.is_free, "only the end is written now"


class NotRead:
    """A transport as far as the question needs one."""

    waiting = 0

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return False


async def test_leaving_ends_a_forwarded_stream(serve: Serve, handles: list[Handle]) -> None:
    served = await serve(keepalive_s=0.02)
    reader, writer = await connect(served, request_bytes(stream=True))
    await until(lambda: bool(handles))
    handles[0].feed(Piece("begun", (1,)))
    await reader.readuntil(b"begun")
    await reader.readuntil(b": keep-alive")
    handles[0].feed(Piece("more", (2,)))
    await reader.readuntil(b"more")
    writer.close()
    await until(lambda: len(served.engine.cancelled) == 1)
    handles[0].feed(Piece("nobody reads this", (3,)))
    await until(lambda: served.lifecycle.num_running == 0)
