"""Limits per client, of all bodies together, and of slow senders."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import openai
import pytest

from hydra_engine.config import MediaConfig, SchedulerConfig, ServerConfig
from hydra_engine.core.fairness import ByteBudget
from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS
from hydra_engine.core.prompting import MAX_JSON_VALUES, MAX_TOOL_CHARS, MAX_TOOL_VALUES, MAX_TOOLS
from hydra_engine.core.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
)
from hydra_engine.core.schemas.subschemas import MAX_ID_CHARS
from hydra_engine.errors import ConfigError, RateLimited, Unavailable
from hydra_engine.server import state
from hydra_engine.server.app import build_app
from hydra_engine.server.http import answers, listening
from hydra_engine.server.http.listening import listen
from hydra_engine.server.http.strict_json import MAX_DEPTH, MAX_VALUES
from hydra_engine.server.protocol.chat import MAX_MESSAGES, MAX_PARTS
from hydra_engine.server.protocol.fields import MAX_NAME_CHARS, MAX_PROMPT_TOKENS, MAX_SALT_CHARS, MAX_TEXT_CHARS
from hydra_engine.server.protocol.tokenize import MAX_DETOKENIZED
from hydra_engine.server.state import STATE, ClientLimits, client_of
from tests.server.conftest import Serve, Served, chat_body, until
from tests.server.stub import StubEngine
from tests.server.test_cancel import assert_quiet, connect, request_bytes

LIMITS = frozenset(
    {"max_body_bytes", "max_inflight_body_bytes", "body_timeout_s", "max_requests_per_client", "requests_per_minute"}
    | {"max_images", "max_image_bytes", "max_image_pixels", "max_aspect_ratio", "max_videos", "max_video_bytes"}
    | {"max_video_frames", "max_video_pixels", "fetch_timeout_s", "max_fetched_bytes", "max_queue"}
    | {"max_logprob_entries"}
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- the rules


def test_requests_a_minute_are_a_bucket_that_fills_evenly() -> None:
    clock = FakeClock()
    limits = ClientLimits(0, 6, clock)
    for _ in range(6):
        limits.count("a")
    with pytest.raises(RateLimited) as caught:
        limits.count("a")
    assert caught.value.retry_after_s == 10 and "6 requests a minute" in caught.value.message
    limits.count("b")  # another one has its own
    clock.now = 9.9
    with pytest.raises(RateLimited) as caught:
        limits.count("a")
    assert caught.value.retry_after_s == 1
    clock.now = 10.0
    limits.count("a")
    clock.now = 10_000.0
    for _ in range(6):  # never more than a minute's worth
        limits.count("a")
    with pytest.raises(RateLimited):
        limits.count("a")


def test_answers_count_one_by_one() -> None:
    limits = ClientLimits(4, 0)
    with limits.running("a", 3):
        with pytest.raises(RateLimited, match="waits for 3 answers and asks for 2 more; at most 4"):
            limits.running("a", 2).__enter__()
        with limits.running("a", 1), limits.running("b", 4):
            pass
    with pytest.raises(RateLimited), limits.running("a", 5):
        raise AssertionError
    with pytest.raises(ZeroDivisionError), limits.running("a", 4):
        raise ZeroDivisionError
    with limits.running("a", 4):
        pass


def test_clients_are_forgotten_but_not_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_CLIENTS", 100)
    clock = FakeClock()
    limits = ClientLimits(1, 1, clock)
    limits.count("old")
    with limits.running("busy", 1):
        for index in range(10_000):
            limits.count(f"client{index}")
        assert len(limits._clients) == 100
        with pytest.raises(RateLimited), limits.running("busy", 1):
            raise AssertionError
        with pytest.raises(RateLimited):
            limits.count("client9999")


def test_no_limits_no_memory() -> None:
    limits = ClientLimits(0, 0)
    for index in range(100):
        limits.count(f"client{index}")
        with limits.running(f"client{index}", 64):
            pass
    assert not limits._clients


@pytest.mark.parametrize(
    ("remote", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unknown"),
        ("", "unknown"),
    ],
)
def test_an_address_is_a_client(remote: str | None, client: str) -> None:
    class Request(dict[Any, Any]):
        def __init__(self) -> None:
            self.remote = remote

    request: Any = Request()
    assert client_of(request) == client


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_requests_per_client": -1},
        {"requests_per_minute": -1},
        {"max_inflight_body_bytes": (128 << 20) - 1},
        {"max_body_bytes": 0},
        {"body_timeout_s": 0},
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**wrong)
    assert caught.value.param == next(iter(wrong))


# ---- over HTTP


def keyed(name: str) -> dict[str, str]:
    return {"X-Api-Key": name}


async def test_one_client_waits_for_so_many_answers(serve: Serve) -> None:
    served = await serve(api_key=("one", "two"), max_requests_per_client=2)
    served.engine.prefill_s = 600
    body = chat_body(stream=True)
    tasks = [
        asyncio.create_task(served.http.post(served.url + "/v1/chat/completions", json=body, headers=keyed("one")))
        for _ in range(2)
    ]
    await until(lambda: len(served.engine.submissions) == 2)
    async with served.post("/v1/completions", {"prompt": "a"}, headers=keyed("one")) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        error = (await response.json())["error"]
        assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "requests", None)
    served.engine.prefill_s = 0
    for num_answers, status in ((3, 429), (2, 200)):
        async with served.post("/v1/completions", {"prompt": "a", "n": num_answers}, headers=keyed("two")) as response:
            assert response.status == status
    for task in tasks:
        task.cancel()
    await until(lambda: len(served.engine.cancelled) == 2)
    async with served.post("/v1/completions", {"prompt": "a"}, headers=keyed("one")) as response:
        assert response.status == 200
    assert len(served.engine.submissions) == 4


async def test_requests_a_minute_count_before_a_body_is_read(serve: Serve) -> None:
    served = await serve(requests_per_minute=2)
    for _ in range(2):
        async with served.chat() as response:
            assert response.status == 200
    for headers in ({}, {"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"}):
        async with served.post("/v1/chat/completions", chat_body(), headers=headers) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) in (29, 30)
    async with served.get("/v1/models") as response:
        assert response.status == 200
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="stub", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"


async def test_a_full_queue_says_when(served: Served) -> None:
    served.engine.refusal = Unavailable("full", retry_after_s=7)
    async with served.chat() as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")


# ---- bodies


@pytest.fixture
async def narrow() -> Any:
    """Room for two bodies of 1000 bytes."""
    config = ServerConfig(max_body_bytes=1000, max_inflight_body_bytes=2000, api_key=("one", "two"))
    app = build_app(StubEngine(), config)
    listening = await listen(app, "127.0.0.1", 0)
    yield app, int(listening.url.rsplit(":", 1)[1])
    await listening.close()


async def send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def head(length: int | None, key: str = "one") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ["POST /v1/completions HTTP/1.1", "Host: a", f"X-Api-Key: {key}", "Content-Type: application/json", size]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.slow
async def test_all_bodies_together_are_bounded(narrow: Any) -> None:
    app, port = narrow
    announced = [await send(port, head(1000)) for _ in range(10)]  # and not sent: holds nothing
    assert app[STATE].bodies.held == 0
    held = [await send(port, head(590, key) + b'"' + b"x" * 500) for key in ("one", "two")]
    await until(lambda: app[STATE].bodies.held == 1002)
    for key in ("one", "two"):  # either has what it may beside the other
        for data in (head(300, key), head(None, key) + b"12c\r\n" + b"x" * 300):  # known at once, and when it has come
            reader, writer = await send(port, data)
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in answer and b'"overloaded"' in answer
            writer.close()
    reader, writer = await send(port, head(14, "two") + b'{"prompt":"a"}')
    assert (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    for _, writer in (*announced, *held):
        writer.close()
    await until(lambda: app[STATE].bodies.held == 0)


async def test_one_client_leaves_room_for_others(serve: Serve) -> None:
    """Sixteen bodies that lack a byte, of one key: as many bytes as there is room for."""
    size = 1 << 16
    served = await serve(api_key=("one", "two"), max_body_bytes=size, max_inflight_body_bytes=16 * size)
    greedy = [await send(served.port, head(size) + b"x" * (size - 1)) for _ in range(16)]
    answered = [asyncio.create_task(reader.readline()) for reader, _ in greedy]
    probe = {"prompt": "a" * 100}
    for _ in range(5):
        async with served.post("/v1/completions", probe, headers=keyed("two")) as response:
            assert response.status == 200
    await until(lambda: served.bodies.held == (size - 1) * sum(not task.done() for task in answered))
    assert 8 <= sum(task.done() for task in answered) < 16
    assert all(task.result().startswith(b"HTTP/1.1 503 ") for task in answered if task.done())
    async with served.post("/v1/completions", probe, headers=keyed("two")) as response:
        assert response.status == 200
    for _, writer in greedy:
        writer.close()
    await until(lambda: served.bodies.held == 0)


def test_shares_follow_how_many_ask() -> None:
    budget = ByteBudget(1200)
    for held in (600, 300, 150):  # each has half of what the ones before it left
        lease = budget.lease(f"client of {held}")
        assert not lease.reserve(held + 1) and lease.reserve(held) and not lease.reserve(1)
    assert budget.lease().reserve(150) and not budget.lease("last").reserve(1)


async def test_a_body_counts_until_it_is_answered(served: Served) -> None:
    served.engine.prefill_s = 600
    _, writer = await connect(served, request_bytes())
    await until(lambda: len(served.engine.submissions) == 1)
    budget = served.bodies
    assert budget.held == len(request_bytes().partition(b"\r\n\r\n")[2])
    writer.close()
    await until(lambda: budget.held == 0)


@pytest.mark.quick("None")
@pytest.mark.parametrize("length", [1001, None])
async def test_a_large_body_is_refused_while_it_comes(narrow: Any, length: int | None) -> None:
    app, port = narrow
    body = b"" if length else b"3e9\r\n" + b" " * 1001 + b"\r\n"
    reader, writer = await send(port, head(length) + body)
    assert (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await until(lambda: app[STATE].bodies.held == 0)


# ---- slow ones


@pytest.mark.slow
async def test_a_body_has_a_least_rate(serve: Serve) -> None:
    served = await serve(body_timeout_s=6)
    stalled, unfinished = await send(served.port, head(1000) + b"x" * 999)
    body = b'{"prompt": "a"' + b" " * 6000 + b"}"
    reader, writer = await send(served.port, head(len(body)))
    for start in range(0, len(body), 1000):  # more than a second in all
        await asyncio.sleep(0.2)
        writer.write(body[start : start + 1000])
    assert (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).startswith(b"HTTP/1.1 200 ")
    told = await asyncio.wait_for(stalled.readuntil(b"}}"), 30)
    assert told.startswith(b"HTTP/1.1 408 ") and b"slower than 1024 bytes a second for 1 s" in told
    await until(lambda: served.bodies.held == 0)
    for one in (unfinished, writer):
        one.close()


@pytest.mark.quick("[0]")
@pytest.mark.parametrize("data", [b"", b"\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: "], ids=range(3))
async def test_headers_that_do_not_come(served: Served, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(listening, "_HEADERS_S", 0.2)
    reader, writer = await connect(served, data)
    assert await asyncio.wait_for(reader.read(), 15) == b""
    writer.close()
    assert served.engine.submissions == []


async def test_headers_one_byte_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_HEADERS_S", 0.3)
    reader, writer = await connect(served, b"GET /livez HTTP/1.1\r\nHost: a\r\n")
    closed = asyncio.create_task(reader.read())
    for _ in range(100):
        if closed.done():
            break
        writer.write(b"X")
        await asyncio.sleep(0.02)
    assert closed.done()
    writer.close()


@pytest.mark.slow
async def test_a_connection_that_is_used_stays(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_HEADERS_S", 0.2)
    served.engine.prefill_s = 0.4
    reader, writer = await connect(served, b"")
    for _ in range(2):
        data = request_bytes()
        writer.write(data[:40])
        await asyncio.sleep(0.05)
        writer.write(data[40:])
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 30)).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b"}")
        await asyncio.sleep(0.3)  # idle between requests, which is another limit
    writer.close()


async def test_whoever_does_not_read_a_whole_answer_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.3)
    monkeypatch.setattr(listening, "_SLOWEST_READER", 1 << 30)
    served.engine.answer = "x" * 20_000_000
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.sendall(request_bytes())
        await until(lambda: "slow_reader" in caplog.text, 10)
        assert served.lifecycle.num_running == 0 and served.engine.cancelled == []
        served.engine.answer = None
        await assert_quiet(served, caplog)
        client.settimeout(5)
        received = b""
        with pytest.raises(ConnectionError):
            while chunk := client.recv(1 << 20):
                received += chunk
            raise ConnectionResetError
        assert len(received) < 20_000_000


@pytest.mark.slow
async def test_slow_answers_to_patient_readers_arrive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.2)
    served.engine.prefill_s = 0.6
    for stream in (False, True):
        async with served.chat(stream=stream) as response:
            assert response.status == 200 and "two" in await response.text()


PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_table_of_limits_is_the_configuration(name: str) -> None:
    (f,) = [f for cls in (ServerConfig, MediaConfig, SchedulerConfig) for f in fields(cls) if f.name == name]
    flag = "--" + f.metadata.get("flag", f.name).replace("_", "-")
    (row,) = [line for line in PAGE if line.startswith(f"| `{flag}` |")]
    number, *unit = row.split("|")[2].strip().replace(",", "").split(" ")
    default = float(f.metadata["unset"]) if f.default is None else f.default
    assert float(number) * {"MiB": 1 << 20, "GiB": 1 << 30}.get("".join(unit), 1) == default, row


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ("`n`", (MAX_CHOICES,)),
        ("`max_tokens`", (MAX_TOKENS_LIMIT, MAX_PROMPT_TOKENS)),
        ("`stop`", (MAX_STOPS, MAX_STOP_CHARS)),
        ("`stop_token_ids`", (MAX_STOP_TOKEN_IDS,)),
        ("`logprobs`", (MAX_LOGPROBS,)),
        ("`logit_bias`", (MAX_BIASED_TOKENS,)),
        ("`allowed_token_ids`", (MAX_ALLOWED_TOKENS,)),
        ("both together x answers", (MAX_LISTED_TOKENS,)),
        ("tools |", (MAX_TOOLS, MAX_TOOL_CHARS, MAX_JSON_VALUES, MAX_TOOL_VALUES)),
        ("`$id`", (MAX_ID_CHARS,)),
        ("grammars and", (MAX_GRAMMAR_CHARS,)),
        ("messages", (MAX_MESSAGES, MAX_PARTS)),
        ("`tokens` of", (MAX_DETOKENIZED,)),
        ("one text", (MAX_TEXT_CHARS,)),
        ("`cache_salt`", (MAX_SALT_CHARS, MAX_NAME_CHARS)),
        ("JSON", (MAX_DEPTH, MAX_VALUES)),
        ("headers |", (listening._MAX_HEADER_BYTES >> 10,)),
        ("waiting for headers", (int(listening._HEADERS_S),)),
        ("sizes, extensions", (listening._MAX_FRAMING_BYTES >> 10,)),
        ("what connections have sent", (listening._LINES_A_TURN, listening.PIECE_BYTES >> 10)),
        ("connections, idle", (state.MAX_CONNECTIONS, int(listening._IDLE_S))),
        ("connections beyond", (state.SPARE_PLACES,)),
        ("open files", (state.KEPT_DESCRIPTORS,)),
        ("a stream", (int(answers.STALL_S),)),
        ("a whole", (int(answers.STALL_S), listening._SLOWEST_READER >> 10)),
    ],
)
def test_the_table_of_fixed_limits_is_the_code(row: str, numbers: tuple[int, ...]) -> None:
    (line,) = [line for line in PAGE if line.startswith(f"| {row}")]
    assert set(numbers) <= {int(found) for found in re.findall(r"[0-9]+", line.replace(",", ""))}, line
