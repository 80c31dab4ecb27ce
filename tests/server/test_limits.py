"""Latency limits and priority: into the engine, and back as verdicts, blame and the Server-Timing header."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hydra_engine.core.request import Slo
from tests.server.conftest import Serve, Served
from tests.server.stub import LATE
from tests.server.test_chat import client_of

PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}]},
    "/v1/completions": {"prompt": "a b"},
}
# The header's grammar: names, each with `dur` and `desc` where it has them.
SERVER_TIMING = re.compile(r"""[\w-]+(;(dur=[0-9.]+|desc="[^"\\]*"))*(, ?[\w-]+(;(dur=[0-9.]+|desc="[^"\\]*"))*)*""")


async def last_metrics(served: Served, **fields: Any) -> dict[str, Any]:
    async with served.chat(stream=True, return_metrics=True, **fields) as response:
        events = [json.loads(event[6:]) for event in (await response.text()).split("\n\n")[:-2]]
    (metrics,) = [event["metrics"] for event in events if "metrics" in event]
    return metrics


@pytest.mark.parametrize("path", PROMPTS)
async def test_limits_and_priority_reach_the_engine(served: Served, path: str) -> None:
    for fields in ({}, {"ttft_ms": 1500, "tpot_ms": 40.5, "priority": -3}, {"tpot_ms": 20, "ttft_ms": None}):
        async with served.post(path, PROMPTS[path] | fields) as response:
            assert response.status == 200, await response.text()
    asked = [(submission.slo, submission.priority) for submission in served.engine.submissions]
    assert asked == [(Slo(), 0), (Slo(1.5, 0.0405), -3), (Slo(None, 0.02), 0)]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("ttft_ms", "tpot_ms") for value in (0, -1, 3_600_001, "40", "40ms", True, [40])),
        *(("priority", value) for value in (1 << 31, -(1 << 31) - 1, 0.5, "0", True)),
    ],
)
async def test_wrong_limits_are_refused_by_name(served: Served, path: str, name: str, value: Any) -> None:
    async with served.post(path, PROMPTS[path] | {name: value}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, name)
    assert served.engine.submissions == []


@pytest.mark.parametrize("priority", [-(1 << 31), (1 << 31) - 1])
async def test_the_range_of_priorities_is_that_of_32_bits(served: Served, priority: int) -> None:
    async with served.chat(priority=priority) as response:
        assert response.status == 200
    assert served.engine.submissions[0].priority == priority


async def test_verdicts_come_back_when_asked(served: Served) -> None:
    async with served.chat(return_metrics=True) as response:
        assert (await response.json())["metrics"]["slo"] is None
    async with served.chat(ttft_ms=250, return_metrics=True) as response:
        slo = (await response.json())["metrics"]["slo"]
    assert (slo["ttft_met"], slo["tpot_met"], slo["met"], slo["reason"]) == (True, None, True, None)
    async with served.chat(ttft_ms=250, tpot_ms=40, return_metrics=True) as response:
        assert (await response.json())["metrics"]["slo"] == {
            "ttft_limit_s": 0.25,
            "tpot_limit_s": 0.04,
            "ttft_met": True,
            "tpot_met": False,
            "met": False,
            "late_gaps": 1,
            "num_gaps": 4,
            "reason": "encode of another request",
        }
    assert (await last_metrics(served, tpot_ms=40))["slo"]["met"] is False
    async with served.chat(tpot_ms=40) as response:
        assert "metrics" not in await response.json()


async def test_a_late_token_names_what_delayed_it(served: Served) -> None:
    served.engine.late_spans = (LATE,)
    async with served.chat(return_metrics=True) as response:
        spans = (await response.json())["metrics"]["timeline"]
    assert ["blame" in span for span in spans] == [False, False, True]
    assert spans[2] == {
        "stage": "decode_wait",
        "start_s": 0.3,
        "end_s": 0.4,
        "instance": "epd0",
        "lane": "language",
        "batch": 0,
        "tokens": 0,
        "cause": None,
        "blame": [
            {"kind": "encode", "seconds": 0.07, "request": 41, "amount": 576},
            {"kind": "cpu", "seconds": 0.03, "request": None, "amount": 0},
        ],
    }
    assert (await last_metrics(served))["timeline"] == spans


@pytest.mark.parametrize("path", PROMPTS)
async def test_server_timing_is_a_header_of_what_asks_for_metrics(served: Served, path: str) -> None:
    async with served.post(path, PROMPTS[path]) as response:
        assert "Server-Timing" not in response.headers
    async with served.post(path, PROMPTS[path] | {"return_metrics": True}) as response:
        header = response.headers["Server-Timing"]
        assert "server_timing" not in (await response.json())["metrics"]
    assert SERVER_TIMING.fullmatch(header) and "dur=" in header
    async with served.post(path, PROMPTS[path] | {"return_metrics": True, "stream": True}) as response:
        assert "Server-Timing" not in response.headers
        events = (await response.text()).split("\n\n")
    metrics = [json.loads(event[6:]).get("metrics") for event in events[:-2]]
    assert [m["server_timing"] for m in metrics if m is not None] == [header]


async def test_server_timing_can_be_on_for_every_whole_answer(serve: Serve) -> None:
    served = await serve(server_timing=True, allow_origins=("https://a.example",))
    async with served.chat() as response:
        assert SERVER_TIMING.fullmatch(response.headers["Server-Timing"])
        assert "metrics" not in await response.json()
    async with served.chat(stream=True) as response:
        assert "Server-Timing" not in response.headers and "server_timing" not in await response.text()
    async with served.get("/v1/models", headers={"Origin": "https://a.example"}) as response:
        assert "Server-Timing" in response.headers["Access-Control-Expose-Headers"]
    async with served.chat(temperature=9) as response:
        assert response.status == 400 and "Server-Timing" not in response.headers


async def test_the_official_client_passes_them_on(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "a"}],
            extra_body={"ttft_ms": 100, "priority": 2, "return_metrics": True},
        )
    assert answer.model_extra is not None and answer.model_extra["metrics"]["slo"]["met"] is False
    assert (served.engine.submissions[0].slo, served.engine.submissions[0].priority) == (Slo(0.1), 2)
