"""A few hundred malformed requests against the served demo model, as `python -m bench.fuzz` sends thousands of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http import strict_json
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from tests.campaigns import fuzz
from tests.campaigns.hostile import CLOSED, Case, cases
from tests.campaigns.restless import Footprint, footprint
from tests.server.conftest import Served, chat_body

NUM_CLASSES = len({case.name for case in cases(0, 200)})
T = TypeVar("T")
EVERYTHING = frozenset({CLOSED, *range(600)})


@pytest.mark.slow
def test_malformed_requests_harm_nobody() -> None:
    """Malformed requests get no 500 and no internals, leave nothing held or grown, and change no other stream's
    tokens."""
    tally = fuzz.campaign(3 * NUM_CLASSES, seed=3, concurrency=4)
    assert len(tally.by_class) == NUM_CLASSES > 25
    assert tally.statuses["400"] > 40 and tally.statuses["415"] and tally.statuses["413"]
    assert tally.bystanders > 4
    assert tally.clean, (tally.unexpected, tally.lost, tally.changed, tally.leaks, tally.log)


@pytest.mark.usefixtures("started_in_full")
@pytest.mark.parametrize("when", [pytest.param("loading", marks=pytest.mark.slow), "serving"])
@pytest.mark.slow
def test_a_campaign_that_is_ended_takes_its_server_along(when: str) -> None:
    command = [sys.executable, "-m", "tests.campaigns.fuzz", "--requests", "1000000", "--no-save"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=fuzz.ROOT) as campaign:
        try:
            [server] = wait_for(lambda: children(campaign.pid))
            if when == "serving":  # the instance is there once the server reads its model
                wait_for(lambda: children(server))
            processes = {server, *children(server)}
            campaign.send_signal(signal.SIGTERM)
            assert campaign.wait(30) == 128 + signal.SIGTERM
        finally:
            campaign.kill()
    wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in processes))


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def wait_for(found: Callable[[], T], seconds: float = 30) -> T:
    deadline = time.monotonic() + seconds
    while not (one := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return one


def test_the_same_seed_sends_the_same() -> None:
    first, again, other = (list(cases(seed, 40)) for seed in (5, 5, 6))
    assert first == again != other


@pytest.fixture
async def watched() -> AsyncIterator[Iterator[Any]]:
    """A campaign against a server that is not one: it says the same to everybody."""
    said = bytearray()
    connections: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(said))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    fake: Any = type("Fake", (), {"port": server.sockets[0].getsockname()[1], "log": [], "process": None})
    yield fuzz.Campaign(fake, 1), said  # type: ignore[misc]
    server.close()


def error(status: int, message: str, code: str | None = None) -> bytes:
    body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    return f"HTTP/1.1 {status} X\r\n\r\n{json.dumps(body)}".encode()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (error(400, "no"), ""),
        (error(500, "no"), "status [500]"),
        (error(200, "no"), "status [200]"),
        (error(400, "at 0x7f00aabbcc"), "names b'0x7f00aa'"),
        (error(400, "see /home/x"), "names b'/home'"),
        (error(400, "no", "made_up"), "unknown code made_up"),
        (b"", "status [0]"),
    ],
)
async def test_the_campaign_notices(watched: Any, answer: bytes, found: str) -> None:
    campaign, said = watched
    said += answer
    await campaign._one(Case("a", b"GET / HTTP/1.1\r\n\r\n", frozenset({400})))
    assert len(campaign.tally.unexpected) == bool(found)
    assert found in "".join(campaign.tally.unexpected)


async def test_the_campaign_notices_changed_streams_and_growth(served: Served) -> None:
    told = await fuzz.golden(served.port, chat_body("one two three", stream=True))
    assert told != await fuzz.golden(served.port, chat_body("one two four", stream=True))
    served.engine.error, served.engine.fail_after = ValueError("x"), 2
    assert told != await fuzz.golden(served.port, chat_body("one two three", stream=True))
    served.engine.error = None
    assert told == await fuzz.golden(served.port, chat_body("one two three", stream=True))
    now = footprint(os.getpid())
    assert replace(now, descriptors=now.descriptors + 1).grown(now) and not now.grown(now)


@pytest.mark.parametrize(
    ("names", "has_grown"),
    [(["pixels"] * 2, False), (["pixels"] * 3, True), (["hydra-engine"], True), (["pixels", "words"], True)],
)
def test_memory_of_decoders_grows_up_to_one_each(names: list[str], has_grown: bool) -> None:
    assert holding(names).grown(holding([])) == has_grown
    assert holding(names).grown(holding(["pixels"])) == has_grown


def holding(names: list[str]) -> Footprint:
    """Footprint of a process that holds memfds of these names."""
    descriptors = [os.memfd_create(name) for name in names]
    try:
        with subprocess.Popen(["sleep", "600"], pass_fds=descriptors) as process:
            try:
                return footprint(process.pid)
            finally:
                process.kill()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# ---- bodies that would hold the loop


async def test_a_body_with_many_values_does_not_hold_the_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is checked outside the loop, which answers others meanwhile."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    check = strict_json._check_structure

    def slow(body: bytes) -> set[str]:
        if len(body) > 300_000:
            asyncio.run_coroutine_threadsafe(livez(served, seen), loop).result(30)
        return check(body)

    monkeypatch.setattr(strict_json, "_check_structure", slow)
    async with served.chat(metadata={"x": ["a"] * 80_000}) as response:
        assert response.status == 200
    assert seen == [200]


async def livez(served: Served, seen: list[int]) -> None:
    async with served.get("/livez") as response:
        seen.append(response.status)


# ---- NUL


def test_texts_may_hold_nul_and_names_may_not() -> None:
    body = rb'{"messages":[{"role":"user","content":"a\u0000b"}],"stop":["\u0000"],"user":"\u0000"}'
    asked, _ = strict_json.parse(body, ChatCompletionRequest)
    assert asked.messages[0].content == "a\0b" and asked.stop == ["\0"]
    for wrong, param in (
        (b'"model":"a\\u0000"', "model"),
        (b'"cache_salt":"a\\u0000"', "cache_salt"),
        (b'"request_id":"a\\u0000"', "request_id"),
        (b'"messages":[{"role":"user","content":"a","name":"\\u0000"}]', "messages[0].name"),
        (b'"messages":[{"role":"tool","content":"a","tool_call_id":"\\u0000"}]', "messages[0].tool_call_id"),
        (b'"metadata":{"a\\u0000":1}', None),
        (b'"metadata":{"a":"\0"}', None),
    ):
        rest = b"" if b"messages" in wrong else b',"messages":[{"role":"user","content":"a"}]'
        with pytest.raises(InvalidRequest) as caught:
            strict_json.parse(b"{" + wrong + rest + b"}", ChatCompletionRequest)
        assert caught.value.param == param
        assert "NUL" in caught.value.message or param == "request_id"


# ---- what is no JSON, and where


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON: it is empty"),
        (b'{"user":"a"', "it ends too early, at line 1, column 12"),
        (b'{\n "user":"a",}', "trailing comma in object, at line 2, column 13"),
        (b'{"stop":["a",]}', "trailing comma in array, at line 1, column 14"),
        (b'{"temperature":NaN}', "NaN is no number of JSON, at line 1, column 16"),
        (b'{"temperature":-Infinity}', "Infinity is no number of JSON, at line 1, column 17"),
        (b'{"stream":True}', "True must be written true, at line 1, column 11"),
        (b'{"stream":None}', "None must be written null, at line 1, column 11"),
        (b"{'stream':1}", "keys and strings must be in double quotes, at line 1, column 2"),
        (b'{"user":"a\nb"}', "control characters in texts are escaped, here as \\u000a, at line 1, column 11"),
        (b'{"messages":[{"role":"user"}]} {}', "there is more after its end, at line 1, column 33"),
        (b'{"user":1 "n":1}', "expected ',' or '}', at line 1, column 11"),
        (rb'{"user":"a\ud83d"}', r"\ud83d is half of a surrogate pair"),
        (rb'{"user":"a\ud83d and more of it"}', r"\ud83d is half of a surrogate pair"),
        (rb'{"user":"\ud83d\ude00\ude00b"}', r"\ude00 is half of a surrogate pair and no character; send the"),
        (rb'{"a\ud83d":1,"user":"\ud83d\ude00"}', r"both halves, at line 1, column 4"),
        ('{"user":"é",}'.encode(), "trailing comma in object, at line 1, column 13"),
        (b'\xef\xbb\xbf{"user":"a"}', "begins with a byte order mark; send UTF-8 without one"),
        ('{"user":"a"}'.encode("utf-16"), "is UTF-16; send UTF-8"),
        ('{"user":"aé"}'.encode("latin-1"), "is not valid UTF-8, at line 1, column 11"),
        (b'{"user":1,\n"user":2}', "the key 'user' appears twice in one object, again at line 2, column 1"),
        (b'{"user":' + b"[" * 70, "nested deeper than 64 levels, at line 1, column 72"),
        (b'{"user":"\0"}', "a NUL character; in texts write it as \\u0000, at line 1, column 10"),
    ],
)
def test_what_is_no_json_says_what_and_where(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        strict_json.parse(body, ChatCompletionRequest)
    assert words in caught.value.message and caught.value.status == 400


def test_the_place_of_a_wrong_byte_behind_many_slices() -> None:
    start = b'{"user":"' + b"x" * (2 * strict_json._SLICE)
    with pytest.raises(InvalidRequest, match=f"not valid UTF-8, at line 1, column {len(start) + 1}$"):
        strict_json.parse(start + b"\xe9", ChatCompletionRequest)
    with pytest.raises(InvalidRequest, match=f"column {strict_json._SLICE}$"):  # a character that two slices share
        head = b'{"user":"' + b"x" * (strict_json._SLICE - 10)
        strict_json.parse(head + b"\xc3" + b"x", ChatCompletionRequest)
