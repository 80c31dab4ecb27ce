"""A stub engine behind the real application on a real socket, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.core.fairness import ByteBudget
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.page import events as page
from hydra_engine.server.state import STATE, Lifecycle
from tests.server.stub import StubEngine


@dataclass
class Served:
    engine: StubEngine
    url: str
    http: aiohttp.ClientSession
    lifecycle: Lifecycle
    bodies: ByteBudget
    app: web.Application
    close: Callable[[], Awaitable[None]]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        if body is not None:
            options["json"] = body
        return self.http.post(self.url + path, **options)

    def chat(self, text: str = "one two three", **fields: Any) -> Any:
        return self.post("/v1/chat/completions", chat_body(text, **fields))


def chat_body(text: str = "one two three", **fields: Any) -> dict[str, Any]:
    return {"model": "stub", "messages": [{"role": "user", "content": text}], **fields}


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session", autouse=True)
def page_files() -> Iterator[None]:
    """Reads the files of the page once; each application would, which is more than half of its start."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(page, "_read_files", cache(page._read_files))
        yield


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(api_key=("k",))`: the server with these options; `model_name` too."""
    closers: list[Callable[[], Awaitable[None]]] = []

    async def start(*, model_name: str | None = None, **options: Any) -> Served:
        engine = StubEngine()
        app = build_app(engine, ServerConfig(**options), model_name=model_name)
        engine.add_observer(app[STATE].metrics.requests.add)
        listening = await listen(app, "127.0.0.1", 0)
        http = aiohttp.ClientSession(auto_decompress=False)
        closers.extend((http.close, listening.close))
        state = app[STATE]
        return Served(engine, listening.url, http, state.lifecycle, state.bodies, app, listening.close)

    yield start
    for close in closers:
        await close()


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()
