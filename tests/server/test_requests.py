"""DELETE /v1/requests/{id}: what it ends, what it does not reach, and what the waiting client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine.config import ServerConfig
from hydra_engine.errors import RequestAborted
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.state import STATE, TENANT, Scope
from tests.server.conftest import Served, chat_body, until
from tests.server.stub import StubEngine

CHAT = "/v1/chat/completions"


async def end(served: Served, name: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with served.http.delete(f"{served.url}/v1/requests/{name}", **options) as response:
        return response.status, await response.json()


def start(served: Served, name: str, path: str = CHAT, **fields: Any) -> asyncio.Task[tuple[int, str]]:
    headers = {"X-Request-Id": name, **fields.pop("headers", {})}

    async def run() -> tuple[int, str]:
        asked = chat_body() if not fields.keys() & {"prompt", "input"} else {}
        async with served.post(path, {**asked, **fields}, headers=headers) as response:
            return response.status, (await response.read()).decode()

    return asyncio.create_task(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["intake_s", "prefill_s", "token_s"])
@pytest.mark.parametrize("name", ["mine", "chatcmpl-mine"])
async def test_it_ends_at_whatever_it_waits_for(served: Served, name: str, phase: str, stream: bool) -> None:
    setattr(served.engine, phase, 30)
    waiting = start(served, "mine", stream=stream)
    await until(lambda: served.lifecycle.num_running == 1 and (phase == "intake_s" or bool(served.engine.submissions)))
    await asyncio.sleep(0.05)
    assert await end(served, name) == (200, {"id": name, "object": "request.ended", "ended": 1})
    status, text = await waiting
    assert status == (200 if stream and phase == "token_s" else 499)
    error = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the request was ended by its id", "request_aborted")
    assert error["type"] == "invalid_request_error" and "[DONE]" not in text
    if phase == "intake_s":
        assert served.engine.intakes_cancelled == 1 and served.engine.submissions == []
    else:
        await until(lambda: served.engine.cancelled == ["chatcmpl-mine"])
    await until(lambda: served.lifecycle.num_running == 0)
    assert (await end(served, name))[0] == 404


async def test_its_client_is_told_not_to_try_again(served: Served) -> None:
    served.engine.prefill_s = 600

    async def ask() -> str:
        async with served.post(CHAT, chat_body(), headers={"X-Request-Id": "mine"}) as response:
            return response.headers["X-Should-Retry"]

    waiting = asyncio.create_task(ask())
    await until(lambda: len(served.engine.submissions) == 1)
    await end(served, "mine")
    assert await waiting == "false"


async def test_all_with_exactly_this_id(served: Served) -> None:
    served.engine.prefill_s = 600
    same = [start(served, "same") for _ in range(3)]
    other = start(served, "same2")
    await until(lambda: len(served.engine.submissions) == 4)
    for absent in ("sam", "same3", "SAME", "chatcmpl-", "cmpl-same", "%73am", "same%20", "a" * 1000):
        status, answer = await end(served, absent)
        assert (status, answer["error"]["code"]) == (404, "not_found"), absent
    assert (await end(served, "same"))[1]["ended"] == 3
    assert [status for status, _ in await asyncio.gather(*same)] == [499] * 3
    assert not other.done() and (await end(served, "same2"))[1]["ended"] == 1
    await other


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "a"}, "cmpl-mine"),
        ("/v1/responses", {"input": "a"}, "resp_mine"),
        ("/v1/messages", {"max_tokens": 3}, "msg_mine"),
        (CHAT, {"request_id": "another"}, "another"),
    ],
)
async def test_the_ids_of_all_endpoints(served: Served, path: str, body: dict[str, Any], name: str) -> None:
    served.engine.prefill_s = 600
    waiting = start(served, "mine", path, **body)
    await until(lambda: len(served.engine.submissions) == 1)
    assert (await end(served, name))[1]["ended"] == 1
    assert (await waiting)[0] == 499


async def test_a_finished_request_is_not_known(served: Served) -> None:
    assert (await start(served, "mine"))[0] == 200
    assert (await end(served, "mine"))[0] == 404


@pytest.fixture
async def tenants() -> AsyncIterator[Served]:
    """A server where the header X-Tenant says whose request it is, as a key does."""

    @web.middleware
    async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[TENANT] = request.headers["X-Tenant"]
        return await handler(request)

    engine = StubEngine()
    app = build_app(engine, ServerConfig())
    app.middlewares.append(tell)
    listening = await listen(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        state = app[STATE]
        yield Served(engine, listening.url, http, state.lifecycle, state.bodies, app, listening.close)
    await listening.close()


async def test_requests_of_others_are_out_of_reach(tenants: Served) -> None:
    tenants.engine.prefill_s = 600
    mine = start(tenants, "same", headers={"X-Tenant": "one"})
    theirs = start(tenants, "same", headers={"X-Tenant": "two"})
    await until(lambda: len(tenants.engine.submissions) == 2)
    assert (await end(tenants, "same", headers={"X-Tenant": "three"}))[0] == 404
    assert (await end(tenants, "same", headers={"X-Tenant": "one"}))[1]["ended"] == 1
    assert (await mine)[0] == 499 and not theirs.done()
    assert (await end(tenants, "same", headers={"X-Tenant": "one"}))[0] == 404
    assert (await end(tenants, "same", headers={"X-Tenant": "two"}))[1]["ended"] == 1
    await theirs


async def test_a_scope_tells_only_what_ended_it() -> None:
    with pytest.raises(RequestAborted, match="first"):
        async with Scope() as scope:
            assert scope.end(RequestAborted("first")) and not scope.end(RequestAborted("second"))
            await asyncio.sleep(5)
    with pytest.raises(TimeoutError):
        async with Scope():
            raise TimeoutError
    with pytest.raises(ZeroDivisionError):
        async with Scope():
            raise ZeroDivisionError
