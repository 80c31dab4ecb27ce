"""The real engine behind two keys: what one has asked is in nobody else's cache."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hydra_engine import demo
from hydra_engine.config import CacheConfig, EngineConfig, ServerConfig
from hydra_engine.engine import Engine
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import Listening, listen

PICTURE = base64.b64encode(next(Path(demo.__path__[0]).rglob("*.png")).read_bytes()).decode()
KEYS = ("first-key", "second-key")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine.unstarted(EngineConfig(model="demo", threads=1, cache=CacheConfig(block_size=4)))
    await engine.astart(progress=False)
    yield engine
    await engine.aclose()


class Client:
    def __init__(self, http: aiohttp.ClientSession, listening: Listening) -> None:
        self._http = http
        self._url = listening.url + "/v1/chat/completions"

    async def ask(self, key: str, **fields: Any) -> tuple[int, int, str]:
        """Cached tokens, cached pictures, the answer."""
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
        content = [picture, {"type": "text", "text": "How many shapes are there?"}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "return_metrics": True, **fields}
        async with self._http.post(self._url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            answer = await response.json()
        assert response.status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, answer["metrics"]["cached_images"], answer["choices"][0]["message"]["content"]


async def test_a_prompt_and_a_picture_under_two_keys(engine: Engine) -> None:
    isolated = await listen(build_app(engine, ServerConfig(api_key=KEYS)), "127.0.0.1", 0)
    shared = await listen(build_app(engine, ServerConfig(api_key=KEYS, share_caches=True)), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        client, sharing = Client(http, isolated), Client(http, shared)
        first, second = KEYS
        tokens, pictures, text = await client.ask(first)
        assert (tokens, pictures) == (0, 0)
        tokens, pictures, again = await client.ask(first)
        assert tokens > 4 and pictures == 1 and again == text
        payloads = engine.frontend._preprocessor._loader._pixels._entries  # type: ignore[union-attr]
        num_payloads = len(payloads)
        assert await client.ask(second) == (0, 0, text)
        assert len(payloads) == num_payloads + 1
        assert (await client.ask(second))[:2] == (tokens, 1)
        # A key's own salts part its requests further, and the same salt of another key is another one.
        assert (await client.ask(first, cache_salt="x"))[:2] == (0, 0)
        assert (await client.ask(second, cache_salt="x"))[:2] == (0, 0)
        assert (await client.ask(first, cache_salt="x"))[:2] == (tokens, 1)
        assert (await sharing.ask(first))[:2] == (0, 0)
        assert (await sharing.ask(second))[:2] == (tokens, 1)
    await isolated.close()
    await shared.close()
