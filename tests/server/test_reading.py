"""Input of connections is parsed in turn and within bounds, whatever it contains; small chunks are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

from hydra_engine.server.http import listening
from hydra_engine.server.http.listening import PIECE_BYTES, ReadingTurns
from tests.server.conftest import Served, chat_body

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
)


def chunks(data: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = [data[place : place + size] for place in range(0, len(data), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)


async def ask(served: Served, raw: bytes) -> tuple[int, Any]:
    """The status and the body of the one answer; the client sends all it has and reads on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0].split(b":")[1]))
    writer.close()
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)


class Pieces:
    """A connection with so many pieces, each of which counts as `lines`."""

    def __init__(self, turns: ReadingTurns, name: str, num_pieces: int, lines: int, parsed: list[str]) -> None:
        self._turns, self._name, self._left, self._lines, self._parsed = turns, name, num_pieces, lines, parsed

    def parse_piece(self) -> bool:
        self._turns.count(b"\n" * self._lines)
        self._parsed.append(self._name)
        self._left -= 1
        return self._left > 0


async def test_connections_are_parsed_in_turn_and_so_much_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_LINES_A_TURN", 90)
    turns, parsed = ReadingTurns(), []  # type: ReadingTurns, list[str]
    assert turns.may_parse()
    turns.enqueue(Pieces(turns, "a", 40, 20, parsed))
    assert not turns.may_parse(), "somebody waits"
    await asyncio.sleep(0)
    assert parsed == ["a"] * 5, "what is left of the bound is less than nothing"
    turns.enqueue(Pieces(turns, "b", 3, 20, parsed))
    await asyncio.sleep(0)
    assert parsed[5:] == ["a", "b", "a", "b", "a"]
    gone = Pieces(turns, "c", 9, 20, parsed)
    turns.enqueue(gone)
    turns.discard(gone)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sorted(parsed) == ["a"] * 40 + ["b"] * 3 and turns.may_parse()


async def test_a_storm_of_chunks_takes_its_turns(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them makes one turn of the loop longer than a piece more than the bound."""
    monkeypatch.setattr(listening, "_MAX_FRAMING_BYTES", 1 << 30)
    counted: list[int] = []
    turn = 0

    def count(self: ReadingTurns, piece: bytes) -> None:
        counted.append(turn)
        assert len(piece) <= PIECE_BYTES
        real(self, piece)

    async def ticks() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    real = ReadingTurns.count
    monkeypatch.setattr(ReadingTurns, "count", count)
    ticker = asyncio.create_task(ticks())
    body = json.dumps(chat_body("x" * 20_000)).encode()
    raw = HEAD + b"\r\n" + chunks(body, 1) + b"0\r\n\r\n"
    answers = await asyncio.gather(*(ask(served, raw) for _ in range(8)))
    ticker.cancel()
    assert [status for status, _ in answers] == [200] * 8
    most = max(counted.count(one) for one in set(counted))
    assert most <= 2 + listening._LINES_A_TURN * 3 // PIECE_BYTES + 1, most
    assert len(counted) >= 8 * len(raw) // PIECE_BYTES


@pytest.mark.parametrize(
    ("size", "extension"), [(1, b""), (2, b""), (100, b";" + b"a" * 300), (1 << 20, b";a=" + b"b" * 50_000)]
)
async def test_bodies_of_hardly_anything_but_chunk_sizes_are_refused(
    served: Served, size: int, extension: bytes
) -> None:
    body = json.dumps(chat_body("x" * 100_000)).encode()
    status, answer = await ask(served, HEAD + b"\r\n" + chunks(body, size, extension))
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert "chunks" in answer["error"]["message"]
    async with served.chat() as response:
        assert response.status == 200


async def test_the_rest_of_a_body_that_was_not_wanted_ends_quietly(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(HEAD.replace(b"/v1/chat/completions", b"/nowhere") + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).split()[1] == b"404"
    with contextlib.suppress(ConnectionError):
        writer.write(b"1;" + b"a" * 40_000)  # while more of the body is waited for
        await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("chars", "size", "extension"),
    [(3, 1, b""), (2_000, 3, b""), (200_000, 16, b""), (100, 50, b";name=value"), (300_000, 1 << 16, b"")],
)
async def test_small_chunks_are_taken(served: Served, chars: int, size: int, extension: bytes) -> None:
    """A few tiny ones, and many that hold more than they cost."""
    body = json.dumps(chat_body("x" * chars)).encode()
    raw = HEAD + b"\r\n" + chunks(body, size, extension) + b"0\r\nTrailer: x\r\n\r\n"
    status, answer = await ask(served, raw)
    assert status == 200, answer
    assert served.engine.submissions[-1].messages[0].content == "x" * chars


async def test_pipelined_requests_are_all_answered_in_order(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    body = json.dumps(chat_body("word " * 3000)).encode()
    post = HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body)) + b"\r\n" + body
    writer.write((b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" + post) * 20 + b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
    statuses = []
    for _ in range(41):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        statuses.append(int(head.split()[1]))
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    assert statuses == [200] * 40 + [404]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/nowhere", b"/livez"])
async def test_what_is_expected_but_not_known_is_417_in_our_words(served: Served, path: bytes) -> None:
    raw = HEAD.replace(b"/v1/chat/completions", path) + b"Expect: foo\r\n\r\n"
    status, answer = await ask(served, raw + b"0\r\n\r\n")
    assert status == 417 and answer["error"]["type"] == "invalid_request_error"
    assert "100-continue" in answer["error"]["message"]


async def test_100_continue_is_met(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(HEAD + b"Expect: 100-continue\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(chunks(json.dumps(chat_body()).encode(), 1000) + b"0\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("path", [b"/livez", b"/nowhere"])
@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_another_http_is_refused_in_our_words(served: Served, path: bytes, version: bytes) -> None:
    status, answer = await ask(served, b"GET " + path + b" HTTP/" + version + b"\r\nHost: a\r\n\r\n")
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
