"""Health: one word for load balancers, one line per instance for people, and the difference of degraded and down."""

from __future__ import annotations

from typing import Any

import pytest

from hydra_engine import errors
from hydra_engine.core.instances import Condition
from tests.server.conftest import Serve, Served
from tests.server.stub import instances_of

PATHS = ("/health", "/ready")


def line(name: str, role: str, condition: str = "ready", restarts: int = 0, reason: str = "") -> dict[str, Any]:
    return {"name": name, "role": role, "condition": condition, "restarts": restarts, "reason": reason}


@pytest.mark.parametrize("path", PATHS)
async def test_one_healthy_instance(served: Served, path: str) -> None:
    async with served.get(path) as response:
        assert response.status == 200
        assert await response.json() == {"status": "ok", "degraded": False, "instances": [line("epd0", "EPD")]}


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("loading", "not_ready"),
        ("draining", "draining"),
        ("hung", "not_ready"),
        ("instance_lost", "instance_lost"),
        ("closed", "not_ready"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_what_does_not_serve_says_why_and_who(served: Served, path: str, state: str, code: str) -> None:
    served.engine.state = state
    served.engine.states = instances_of("EP+D")
    async with served.get(path) as response:
        assert not (await response.json())["degraded"]
    served.engine.states = instances_of("EP+D", d0={"condition": Condition.STARTING, "restarts": 2})
    async with served.get(path) as response:
        body = await response.json()
        assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
    assert set(body) == {"error", "degraded", "instances"} and body["degraded"]
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["code"] == code in errors.CODES
    assert body["instances"] == [line("ep0", "EP"), line("d0", "D", "starting", 2)]


@pytest.mark.parametrize(
    ("condition", "degraded"),
    [
        (Condition.READY, False),
        (Condition.STARTING, True),
        (Condition.SILENT, True),
        (Condition.FAILED, True),
        (Condition.DRAINING, False),
        (Condition.STOPPED, False),
    ],
)
async def test_a_missing_instance_is_degraded_while_the_others_serve(
    served: Served, condition: Condition, degraded: bool
) -> None:
    states = {"condition": condition, "restarts": 3, "reason": "it\nended", "node": "host-b"}
    served.engine.states = instances_of("2EPD", epd1=states)
    async with served.get("/health") as response:
        body = await response.json()
        assert (response.status, body["status"], body["degraded"]) == (200, "ok", degraded)
    assert body["instances"] == [
        line("epd0", "EPD"),
        line("epd1", "EPD", condition.value, 3, "it ended") | {"node": "host-b"},
    ]


async def test_a_draining_server_is_not_ready_however_well_its_instances_are(served: Served) -> None:
    served.lifecycle.draining = True
    async with served.get("/ready") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")


async def test_before_the_first_instance_there_are_none(serve: Serve) -> None:
    served = await serve()
    served.engine.state, served.engine.states = "loading", ()
    async with served.get("/health") as response:
        body = await response.json()
        assert (response.status, body["instances"], body["error"]["code"]) == (503, [], "not_ready")
