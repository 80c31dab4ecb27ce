"""GET /server_info and /load: what is served here, on what, within which limits, and how many requests run.

It holds no secrets and no paths. Does not know how the values came about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine import __version__
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import InstanceSummary
from hydra_engine.core.roles import InstanceSpec, Role, Topology
from hydra_engine.server.generate import json_response
from hydra_engine.server.state import CONFIG, MODEL_NAME, STATE, loaded_engine


class Load(msgspec.Struct, frozen=True):
    """As vLLM has it: generations that run or wait."""

    server_load: int


class Cache(msgspec.Struct, frozen=True):
    """`block_size` in tokens, or in rows of features."""

    bytes: int
    num_blocks: int
    block_size: int


class Budget(msgspec.Struct, frozen=True):
    """What the TPOT limit leaves beside `num_decodes`, as predicted. `vision_s` null: no bound; absent: no vision."""

    num_decodes: int
    step_s: float
    token_budget: int
    vision_s: float | UnsetType | None = UNSET


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`token_budget` and `image_budget` are upper bounds of a step, in tokens and patches; `budgets` are what latency
    limits make of them."""

    name: str
    role: str
    condition: str
    family: str
    device: str
    dtype: str
    backend: str
    deterministic: bool
    threads: int
    weights_bytes: int
    state_bytes: int
    max_model_len: int
    kv_cache: Cache
    image_cache: Cache
    token_budget: int
    image_budget: int
    budgets: list[Budget]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes; null: no such limit."""

    max_model_len: int
    max_body_bytes: int
    tpot_s: float | None
    ttft_s: float | None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`default_sampling_params` are those of `SamplingParams` that the model or the operator has changed."""

    model: str
    version: str
    created: int
    topology: str
    limits: Limits
    default_sampling_params: dict[str, float]
    instances: list[InstanceInfo]


async def load(request: web.Request) -> web.Response:
    return json_response(Load(request.app[STATE].lifecycle.num_running))


async def server_info(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    states, summaries = engine.instances(), engine.summaries
    by_name = {state.name: state for state in states}
    limits = [summary.limits for summary in summaries]
    return json_response(
        ServerInfo(
            model=request.app[MODEL_NAME],
            version=__version__,
            created=engine.created,
            topology=topology_of(states),
            limits=Limits(
                max_model_len=engine.max_model_len,
                max_body_bytes=request.app[CONFIG].max_body_bytes,
                tpot_s=max((one.tpot_limit_s for one in limits), default=0.0) or None,
                ttft_s=max((one.ttft_limit_s for one in limits), default=0.0) or None,
            ),
            default_sampling_params=engine.default_sampling_params.chosen,
            instances=[_instance(summary, by_name.get(summary.name)) for summary in summaries],
        )
    )


def topology_of(states: Iterable[InstanceState]) -> str:
    """As it is now."""
    specs = [InstanceSpec(Role.parse(s.role), "auto") for s in states if s.condition is not Condition.STOPPED]
    return str(Topology(tuple(specs))) if specs else ""


def _instance(summary: InstanceSummary, state: InstanceState | None) -> InstanceInfo:
    same = set(InstanceInfo.__struct_fields__) & {*summary.__struct_fields__} - {"role"}
    return InstanceInfo(
        **{name: getattr(summary, name) for name in same},
        role=summary.role if state is None else state.role,
        condition=(Condition.STOPPED if state is None else state.condition).value,
        kv_cache=Cache(summary.kv_cache_bytes, summary.num_kv_blocks, summary.kv_block_size),
        image_cache=Cache(summary.image_cache_bytes, summary.num_image_blocks, summary.image_block_size),
        budgets=[
            Budget(
                budget.num_decodes,
                budget.step_s,
                budget.token_budget,
                UNSET if budget.vision_s is None else budget.vision_s if math.isfinite(budget.vision_s) else None,
            )
            for budget in summary.limits.budgets
        ],
    )
