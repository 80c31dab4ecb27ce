"""Typed keys of what handlers share, and the request's id.

Does not know routes or formats.
"""

from __future__ import annotations

import re
import uuid

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.errors import Unavailable
from hydra_engine.server.port import EnginePort

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

ENGINE = web.AppKey[EnginePort]("engine")
CONFIG = web.AppKey("config", ServerConfig)
MODEL_NAME = web.AppKey("model_name", str)

REQUEST_ID = web.RequestKey("request_id", str)
ANSWER_ID = web.RequestKey("answer_id", str)  # of a generation: the `id` in its answer
TENANT = web.RequestKey("tenant", str)  # whose caches and share these are; not there where no keys are asked for
CLIENT = web.RequestKey("client", str)  # the name of its key for logs and metrics, if that has one


def make_request_id(client_id: str | None) -> str:
    """The client's own id where it is short and plain, a new one otherwise."""
    if client_id is not None and _REQUEST_ID.fullmatch(client_id):
        return client_id
    return uuid.uuid4().hex


def loaded_engine(request: web.Request) -> EnginePort:
    """The engine, for everything that needs the model."""
    engine = request.app[ENGINE]
    if engine.health()[1] == "loading":
        raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
    return engine
