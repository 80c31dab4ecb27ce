"""Large bodies are parsed one at a time, and clients take turns at it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hydra_engine.server.http import body
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.state import STATE
from tests.server.conftest import Serve, until


class Gate:
    """Lets nothing be parsed before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun: list[int] = []
        parse = body.parse_request

        def gated(data: bytes, kind: type) -> CompletionRequest:
            request = parse(data, kind)
            if request.seed is not None:
                self.begun.append(request.seed)
                self.open.wait(20)
            return request

        monkeypatch.setattr(body, "parse_request", gated)


def prompt(number: int) -> dict[str, object]:
    return {"prompt": [1] * 70_000, "seed": number}


async def test_nobody_waits_for_all_bodies_of_another_client(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served, gate = await serve(api_key=("alice", "bob")), Gate(monkeypatch)

    async def send(key: str, number: int) -> int:
        async with served.post(
            "/v1/completions", prompt(number), headers={"Authorization": f"Bearer {key}"}
        ) as response:
            return response.status

    turns = served.app[STATE].parsing._threads
    alice = [asyncio.create_task(send("alice", number)) for number in range(6)]
    await until(lambda: len(turns._queue) == 5 and len(gate.begun) == 1)
    bob = asyncio.create_task(send("bob", 100))
    await until(lambda: len(turns._queue) == 6)
    async with served.post("/v1/completions", {"prompt": "short"}, headers={"Authorization": "Bearer bob"}) as response:
        assert response.status == 200  # needs no turn
    alice[0].cancel()  # whoever leaves keeps the thread until it is free
    await asyncio.gather(alice[0], return_exceptions=True)
    await asyncio.sleep(0.05)
    assert len(gate.begun) == 1
    gate.open.set()
    statuses = await asyncio.gather(*alice[1:], bob)
    assert set(statuses) == {200}
    assert gate.begun.index(100) <= 2 and len(gate.begun) == 7
    assert (len(turns._queue), turns._num_free) == (0, 1)


async def test_the_thread_for_large_bodies_ends_with_the_server(serve: Serve) -> None:
    served, before = await serve(), set(threading.enumerate())
    async with served.post("/v1/completions", {"prompt": [1] * 70_000}) as response:
        assert response.status == 200
    (parser,) = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("large-bodies")]
    await served.close()
    await until(lambda: not parser.is_alive())
