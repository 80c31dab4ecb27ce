"""Information about the server: whether it is up and serves, its version, model, load, limits and devices.

GET /livez answers while the frontend process lives. GET /health and /ready report whether requests are served and make
progress, with the condition of each instance; if the remaining instances serve every stage, the server is degraded, not
down. Answers hold no secrets and no paths. Does not know how the values are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine import __version__
from hydra_engine.core.instances import Condition, InstanceSpec, InstanceState, Role, Topology
from hydra_engine.core.reports import InstanceSummary
from hydra_engine.errors import Unavailable
from hydra_engine.server.generate import check_model, json_response
from hydra_engine.server.http.answers import ErrorBody, error_body, error_response
from hydra_engine.server.state import CLIENT, CONFIG, ENGINE, MODEL_NAME, STATE, TENANT, loaded_engine

_REASONS = {
    "loading": ("not_ready", "the model is still loading"),
    "draining": ("draining", "the server is shutting down"),
    "hung": ("not_ready", "the engine makes no progress"),
    "instance_lost": ("instance_lost", "a stage has no instance that is up"),
}
_DEGRADED = (Condition.STARTING, Condition.SILENT, Condition.FAILED)  # not ready, but not stopped
_MAX_REASON = 200


# ---- health


class Alive(msgspec.Struct, frozen=True):
    status: str = "ok"


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    role: str
    condition: str
    restarts: int
    reason: str
    node: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    degraded: bool
    instances: list[Instance]


class NotServing(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody
    degraded: bool
    instances: list[Instance]


class Version(msgspec.Struct, frozen=True):
    version: str


async def livez(_request: web.Request) -> web.Response:
    return json_response(Alive())


def describe(states: Iterable[InstanceState]) -> list[Instance]:
    return [
        Instance(s.name, s.role, s.condition.value, s.restarts, " ".join(s.reason.split())[:_MAX_REASON], s.node)
        for s in states
    ]


async def health(request: web.Request) -> web.Response:
    serving, reason = request.app[ENGINE].health()
    states = request.app[ENGINE].instances()
    if request.app[STATE].lifecycle.draining:
        serving, reason = False, "draining"
    degraded = any(s.condition in _DEGRADED for s in states)
    if serving:
        return json_response(Health(degraded=degraded, instances=describe(states)))
    code, message = _REASONS.get(reason, ("not_ready", "the engine is not serving"))
    error = Unavailable(message, code=code, retry_after_s=2)
    response = error_response(error)
    response.body = msgspec.json.encode(
        NotServing(error=error_body(error), degraded=degraded, instances=describe(states))
    )
    return response


async def version(_request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def metrics(request: web.Request) -> web.Response:
    engine, accept = request.app[ENGINE], request.headers.get("Accept", "")
    client = request.get(CLIENT, "") if TENANT in request else None
    text, kind = request.app[STATE].metrics.page(accept, engine.stats(), engine.instances(), engine.statuses(), client)
    return web.Response(body=text, headers={"Content-Type": kind})


# ---- what is served


class Model(msgspec.Struct, frozen=True):
    """A served model in the form of OpenAI and vLLM; `type`, `display_name` and `created_at` are Anthropic's."""

    id: str
    created: int
    root: str
    max_model_len: int
    display_name: str
    created_at: str
    object: str = "model"
    type: str = "model"
    owned_by: str = "hydra-engine"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    """A list of models in OpenAI's form; the fields after `object` are Anthropic's."""

    data: list[Model]
    first_id: str
    last_id: str
    object: str = "list"
    has_more: bool = False


async def list_models(request: web.Request) -> web.Response:
    model = _model(request)
    return json_response(ModelList([model], model.id, model.id))


async def one_model(request: web.Request) -> web.Response:
    check_model(request, request.match_info["model"])
    return json_response(_model(request))


def _model(request: web.Request) -> Model:
    engine = loaded_engine(request)
    name = request.app[MODEL_NAME]
    created_at = datetime.fromtimestamp(engine.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Model(name, engine.created, name, engine.max_model_len, name, created_at)


class Load(msgspec.Struct, frozen=True):
    """The number of generations that run or wait, in vLLM's form."""

    server_load: int


class Cache(msgspec.Struct, frozen=True):
    """A cache's size; `block_size` in tokens, or in rows of features."""

    bytes: int
    num_blocks: int
    block_size: int


class Budget(msgspec.Struct, frozen=True):
    """Predicted budgets of a step beside `num_decodes` decodes under the TPOT limit. `vision_s` null: no bound; absent:
    no vision."""

    num_decodes: int
    step_s: float
    token_budget: int
    vision_s: float | UnsetType | None = UNSET


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's settings and limits. `token_budget` and `image_budget` are upper bounds of a step, in tokens and
    patches; `budgets` are derived from them and the latency limits."""

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
    """Limits of the server in seconds and bytes; null: no such limit."""

    max_model_len: int
    max_body_bytes: int
    tpot_s: float | None
    ttft_s: float | None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The server's settings. `default_sampling_params` are the fields of `SamplingParams` that the model or the
    operator has changed."""

    model: str
    version: str
    created: int
    topology: str
    limits: Limits
    default_sampling_params: dict[str, Any]
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
                tpot_s=max((limit.tpot_limit_s for limit in limits), default=0.0) or None,
                ttft_s=max((limit.ttft_limit_s for limit in limits), default=0.0) or None,
            ),
            default_sampling_params=engine.default_sampling_params.non_default_fields,
            instances=[_instance(summary, by_name.get(summary.name)) for summary in summaries],
        )
    )


def topology_of(states: Iterable[InstanceState]) -> str:
    """The topology of the instances that are not stopped, as text."""
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
