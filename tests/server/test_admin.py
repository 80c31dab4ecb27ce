"""The topology over HTTP: who may see and change it, what a wrong one gets, and a change whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.errors import ConfigError
from hydra_engine.server.app import build_app
from tests.server.conftest import Serve, Served, until
from tests.server.stub import StubEngine

PATH = "/admin/topology"
ADMIN = {"Authorization": "Bearer open-admin"}
READY = {"condition": "ready", "restarts": 0, "reason": ""}


@pytest.fixture
async def governed(serve: Serve) -> Served:
    return await serve(admin_key="open-admin", api_key=("open-api",))


async def change(served: Served, body: Any, headers: dict[str, str] = ADMIN) -> tuple[int, dict[str, Any]]:
    async with served.post(PATH, body, headers=headers) as response:
        return response.status, await response.json()


async def test_shows_and_changes(governed: Served) -> None:
    async with governed.get(PATH, headers=ADMIN) as response:
        shown = await response.json()
    assert (response.status, shown) == (
        200,
        {"topology": "EPD", "instances": [{"name": "epd0", "role": "EPD", **READY}]},
    )
    status, answer = await change(governed, {"topology": "E+PD+PD"})
    assert (status, answer["topology"], governed.engine.switched) == (200, "E+2PD", ["E+PD+PD"])
    assert [(i["name"], i["role"]) for i in answer["instances"]] == [("e0", "E"), ("pd0", "PD"), ("pd1", "PD")]
    async with governed.get(PATH, headers=ADMIN) as response:
        assert await response.json() == answer


@pytest.mark.parametrize(
    "authorization", [None, "Bearer open-api", "Bearer", "Bearer open-admi", "Bearer open-admin2", "Basic open-admin"]
)
async def test_no_other_key_opens_it(governed: Served, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with governed.get(PATH, headers=headers) as response:
        assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"
    status, answer = await change(governed, {"topology": "EP+D"}, headers)
    assert (status, answer["error"]["code"], governed.engine.switched) == (401, "invalid_api_key", [])


async def test_the_admin_key_opens_nothing_else(governed: Served) -> None:
    async with governed.get("/v1/models", headers=ADMIN) as response:
        assert response.status == 401
    async with governed.get("/v1/models", headers={"Authorization": "Bearer open-api"}) as response:
        assert response.status == 200


async def test_an_admin_key_alone_closes_nothing_else(serve: Serve) -> None:
    served = await serve(admin_key="open-admin")
    async with served.get("/v1/models") as response:
        assert response.status == 200
    async with served.get(PATH) as response:
        assert response.status == 401


async def test_without_an_admin_key_it_does_not_exist(serve: Serve) -> None:
    for served, headers in (
        (await serve(), {}),
        (await serve(api_key=("open-api",)), {"Authorization": "Bearer open-api"}),
    ):
        async with served.get(PATH, headers=headers) as response:
            assert response.status == 404
        status, answer = await change(served, {"topology": "EP+D"}, headers)
        assert (status, answer["error"]["code"], served.engine.switched) == (404, "not_found", [])


async def test_the_key_comes_from_the_environment_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_ADMIN_KEY", "open-admin")
    assert (await change(await serve(), {"topology": "EP+D"}))[0] == 200


def test_an_api_key_is_no_admin_key() -> None:
    with pytest.raises(ConfigError, match="admin_key must not be one of the API keys"):
        build_app(StubEngine(), ServerConfig(api_key=("a", "b"), admin_key="b"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"topology": "E+X"}, "cannot read the part 'X'"),
        ({"topology": "EP"}, "no instance for stage D"),
        ({"topology": "65EPD"}, "at most 64 instances"),
        ({"topology": ""}, "topology"),
        ({"topology": "E" * 5000}, "topology"),
        ({"topology": 3}, "topology"),
        ({"topology": None}, "topology"),
        ({}, "topology is required"),
        ([], "request body"),
    ],
)
async def test_a_wrong_topology_is_one_sentence_and_changes_nothing(governed: Served, body: Any, words: str) -> None:
    status, answer = await change(governed, body)
    assert status == 400 and words in answer["error"]["message"] and len(answer["error"]["message"]) < 300
    assert answer["error"]["type"] == "invalid_request_error"
    assert governed.engine.switched == [] and len(governed.engine.states) == 1


async def test_not_while_it_loads_or_drains(governed: Served) -> None:
    governed.engine.state = "loading"
    assert (await change(governed, {"topology": "EP+D"}))[1]["error"]["code"] == "not_ready"
    governed.engine.state = "ok"
    governed.lifecycle.draining = True
    assert (await change(governed, {"topology": "EP+D"}))[1]["error"]["code"] == "draining"
    assert governed.engine.switched == []


async def test_one_change_at_a_time(governed: Served) -> None:
    governed.engine.switch_s = 1.0
    first = asyncio.create_task(change(governed, {"topology": "EP+D"}))
    await asyncio.sleep(0.1)
    status, answer = await change(governed, {"topology": "E+PD"})
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert (await first)[0] == 200 and governed.engine.switched == ["EP+D"]
    assert (await change(governed, {"topology": "E+PD"}))[0] == 200


async def test_a_change_goes_on_when_its_client_leaves(governed: Served) -> None:
    governed.engine.switch_s = 1.0
    asking = asyncio.create_task(change(governed, {"topology": "EP+D"}))
    await asyncio.sleep(0.1)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lambda: governed.engine.switched == ["EP+D"])


# ---- caches and the trace

ELSEWHERE = (("POST", "/reset_prefix_cache"), ("POST", "/reset_mm_cache"), ("GET", "/debug/trace"))


async def test_caches_are_emptied(governed: Served) -> None:
    for path in ("/reset_prefix_cache", "/reset_mm_cache"):
        async with governed.post(path, headers=ADMIN) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
    assert governed.engine.resets == [(True, False), (False, True)]


async def test_the_trace(governed: Served) -> None:
    governed.engine.trace = [{"ph": "X", "name": "prefill", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]
    for query in ("", "?seconds=0.5"):
        async with governed.get("/debug/trace" + query, headers=ADMIN) as response:
            assert response.status == 200
            assert await response.json() == {"traceEvents": governed.engine.trace, "displayTimeUnit": "ms"}
    assert governed.engine.traced_s == [30.0, 0.5]


@pytest.mark.parametrize("seconds", ["0", "-1", "3601", "nan", "inf", "x", ""])
async def test_wrong_seconds(governed: Served, seconds: str) -> None:
    async with governed.get("/debug/trace?seconds=" + seconds, headers=ADMIN) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "seconds")


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
async def test_these_too_are_the_administrator_s(serve: Serve, governed: Served, method: str, path: str) -> None:
    for key in (None, "open-api"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with governed.http.request(method, governed.url + path, headers=headers) as response:
            assert response.status == 401
    without = await serve()
    async with without.http.request(method, without.url + path) as response:
        assert response.status == 404
    assert governed.engine.resets == [] and governed.engine.traced_s == []
