"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

import msgspec
from aiohttp import web

from hydra_engine.server.generate import check_model, json_response
from hydra_engine.server.state import MODEL_NAME, loaded_engine


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "hydra-engine"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"


async def list_models(request: web.Request) -> web.Response:
    return json_response(ModelList([_model(request)]))


async def one_model(request: web.Request) -> web.Response:
    check_model(request, request.match_info["model"])
    return json_response(_model(request))


def _model(request: web.Request) -> Model:
    engine = loaded_engine(request)
    name = request.app[MODEL_NAME]
    return Model(name, engine.created, name, engine.max_model_len)
