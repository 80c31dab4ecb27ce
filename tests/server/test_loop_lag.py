"""The event loop's lag is measured, exported and told once when it is long; large bodies are parsed beside the loop."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import subprocess
import sys
import threading
import time

import pytest

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http import body, loop_lag, strict_json
from hydra_engine.server.http.loop_lag import LoopLag
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from tests.server.conftest import Served, chat_body, until

# Structs whose fields nobody has looked at yet, over and over: what two large first requests at a time are.
FIRST_PARSES = """
import sys, threading, msgspec
from hydra_engine.server.http import strict_json
sys.setswitchinterval(1e-6)
for _ in range(150):
    Inner = msgspec.defstruct("Inner", [("a", str | None, None), ("b", list[int], [])])
    Outer = msgspec.defstruct("Outer", [("x", list[Inner])])
    start, parsed = threading.Barrier(6), []
    def parse():
        start.wait()
        parsed.append(strict_json.parse(b'{"x": [{"a": "b", "b": [1]}]}', Outer)[0])
    threads = [threading.Thread(target=parse) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(parsed) == 6 and all(outer.x[0].b == [1] for outer in parsed)
"""


async def test_a_blocked_loop_is_noticed_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, period_s=0.01)
    lag.start()
    with caplog.at_level(logging.WARNING, loop_lag.__name__):
        for _ in range(2):
            await asyncio.sleep(0.03)
            time.sleep(0.15)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.03)
    lag.stop()
    assert sum(late_s > 0.1 for late_s in lags) >= 2
    assert min(lags) >= 0
    assert len([record for record in caplog.records if "blocked" in record.getMessage()]) == 1
    count = len(lags)
    await asyncio.sleep(0.03)
    assert len(lags) == count, "it has been stopped"


@pytest.mark.slow
async def test_later_ones_are_told_together(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    lag = LoopLag(lambda _: None, period_s=0.01)
    lag.start()
    with caplog.at_level(logging.WARNING, loop_lag.__name__):
        for number in range(4):
            await asyncio.sleep(0.03)
            monkeypatch.setattr(loop_lag, "QUIET_S", 0.0 if number == 3 else 3600.0)
            time.sleep(0.15)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.03)
    lag.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("the event loop was blocked for ")
    words = r"the event loop was blocked (\d+) times since the last such line, at most for "
    told = re.match(words, lines[1])
    assert told is not None and int(told[1]) >= 3


@pytest.mark.slow
async def test_only_requests_that_wait_are_told_of(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.engine.prefill_s = 600
    for is_waiting in (False, True):
        asked = asyncio.create_task(served.chat().__aenter__()) if is_waiting else None
        await until(lambda: served.lifecycle.num_running == (1 if asked else 0))  # noqa: B023 - it is waited for
        caplog.clear()
        with caplog.at_level(logging.WARNING, loop_lag.__name__):
            time.sleep(3 * loop_lag.PERIOD_S)  # noqa: ASYNC251 - what is measured
            await asyncio.sleep(2 * loop_lag.PERIOD_S)
        assert ["blocked" in record.getMessage() for record in caplog.records] == [True] * is_waiting
        if asked is not None:
            asked.cancel()
            await asyncio.wait([asked])


async def test_a_loop_that_is_blocked_while_nobody_waits_is_measured_only(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, is_somebody_waiting=lambda: False, period_s=0.01)
    lag.start()
    with caplog.at_level(logging.WARNING, loop_lag.__name__):
        await asyncio.sleep(0.03)
        time.sleep(0.15)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.03)
    lag.stop()
    assert max(lags) > 0.1 and not caplog.records


async def test_the_page_has_the_lag(served: Served) -> None:
    await asyncio.sleep(2.5 * loop_lag.PERIOD_S)
    async with served.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    (counted,) = [line for line in lines if line.startswith("hydra:event_loop_lag_seconds_count")]
    assert float(counted.split()[-1]) >= 1


async def test_large_bodies_are_parsed_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    parse = body.parse_request

    def noted(data: bytes, kind: type) -> object:
        threads.append(threading.get_ident())
        return parse(data, kind)

    monkeypatch.setattr(body, "parse_request", noted)
    url = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "one two"}]
    for content, status in ((parts, 200), ("small", 200), ("x" * 300_000, 200)):
        async with served.post(
            "/v1/chat/completions", chat_body() | {"messages": [{"role": "user", "content": content}]}
        ) as response:
            assert response.status == status
    many = [{"type": "text", "text": "x"}] * 500
    for content in (many, many[:100], [{"type": "text", "text": "x" * 100_000}]):
        async with served.post(
            "/v1/chat/completions", chat_body() | {"messages": [{"role": "user", "content": content}]}
        ) as response:
            assert response.status == 200
    assert [thread == threading.get_ident() for thread in threads] == [False, True, False, False, True, True]
    async with served.post("/v1/chat/completions", chat_body("x" * 300_000, temperature="hot")) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "temperature"


@pytest.mark.parametrize("edge", [1, 2])
def test_what_bodies_may_not_hold_is_found_between_slices_too(edge: int) -> None:
    head = b'{"messages":[{"role":"user","content":"'
    for wrong, told in ((b"\0", "NUL"), (b"\xe2\x82", "UTF-8")):
        for before in range(8):
            text = b"x" * (edge * strict_json._SLICE - len(head) - before) + wrong + b"x" * 1000
            with pytest.raises(InvalidRequest, match=told):
                strict_json.parse(head + text + b'"}]}', ChatCompletionRequest)
    fine = "x" * (edge * strict_json._SLICE - len(head) - 1) + "é\N{PARROT}"
    for kind in (bytes, bytearray):
        asked, names = strict_json.parse(kind(head + fine.encode() + b'"}]}'), ChatCompletionRequest)
        assert asked.messages[0].content == fine and names == {"messages"}


@pytest.mark.slow
def test_first_requests_in_two_threads_do_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_PARSES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
