"""GET /server_info, /load and /ping: what they tell, and what they never do."""

from __future__ import annotations

import asyncio
import math

from hydra_engine.core.reports import InstanceSummary, LimitBudget, LimitSummary
from tests.server.conftest import Serve, Served, until
from tests.server.stub import instances_of

SECRET = "/home/somebody/models/secret"


def summary(name: str, role: str) -> InstanceSummary:
    return InstanceSummary(
        name=name,
        role=role,
        model=SECRET,
        family="llava",
        device="cpu",
        dtype="bfloat16",
        backend="native",
        deterministic=True,
        threads=4,
        weights_bytes=1000,
        kv_cache_bytes=2000,
        image_cache_bytes=300,
        num_kv_blocks=20,
        num_image_blocks=3,
        kv_block_size=16,
        image_block_size=64,
        max_model_len=4096,
        token_budget=512,
        image_budget=2048,
        load_s=1.0,
        notes=(SECRET,),
        limits=LimitSummary(
            0.04,
            0.0,
            SECRET,
            (LimitBudget(1, 0.01, 300), LimitBudget(8, 0.02, 100, 0.005), LimitBudget(9, 0.03, 0, math.inf)),
            (SECRET,),
        ),
    )


async def test_what_is_served(serve: Serve) -> None:
    served = await serve(api_key=("sesame",), max_body_bytes=1 << 20)
    served.engine.states = instances_of("EP+D")
    served.engine.summaries = (summary("ep0", "EPD"), summary("d0", "D"))
    async with served.get("/server_info") as response:
        assert response.status == 401
    async with served.get("/server_info", headers={"Authorization": "Bearer sesame"}) as response:
        text = await response.text()
        info = await response.json()
    assert SECRET not in text and "sesame" not in text
    assert (info["model"], info["topology"]) == ("stub", "EP+D")
    assert info["limits"] == {"max_model_len": 4096, "max_body_bytes": 1 << 20, "tpot_s": 0.04, "ttft_s": None}
    first = info["instances"][0]
    assert (first["name"], first["role"], first["condition"], first["device"]) == ("ep0", "EP", "ready", "cpu")
    assert first["kv_cache"] == {"bytes": 2000, "num_blocks": 20, "block_size": 16}
    assert first["image_cache"] == {"bytes": 300, "num_blocks": 3, "block_size": 64}
    assert first["budgets"] == [
        {"num_decodes": 1, "step_s": 0.01, "token_budget": 300},
        {"num_decodes": 8, "step_s": 0.02, "token_budget": 100, "vision_s": 0.005},
        {"num_decodes": 9, "step_s": 0.03, "token_budget": 0, "vision_s": None},
    ]


async def test_not_while_it_loads(served: Served) -> None:
    served.engine.state = "loading"
    async with served.get("/server_info") as response:
        assert response.status == 503


async def test_load_counts_generations(served: Served) -> None:
    async def load() -> int:
        async with served.get("/load") as response:
            return int((await response.json())["server_load"])

    assert await load() == 0
    served.engine.prefill_s = 600
    asking = [asyncio.create_task(served.chat().__aenter__()) for _ in range(2)]
    await until(lambda: len(served.engine.submissions) == 2)
    assert await load() == 2
    for one in asking:
        one.cancel()
    await until(lambda: served.lifecycle.num_running == 0)


async def test_ping_is_health(served: Served) -> None:
    async with served.get("/ping") as response:
        assert response.status == 200
    served.engine.state = "hung"
    async with served.get("/ping") as response:
        assert response.status == 503 and response.headers["Retry-After"] == "2"


async def test_the_list_of_models_with_a_slash_behind_it(served: Served) -> None:
    async with served.get("/v1/models") as plain, served.get("/v1/models/") as response:
        assert response.status == 200 and await response.json() == await plain.json()
