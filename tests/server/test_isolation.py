"""The real engine behind two keys: what one has asked is in nobody else's cache, and no answer to the other one has
anything of it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hydra_engine import demo
from hydra_engine.config import CacheConfig, EngineConfig, ServerConfig
from hydra_engine.engine import Engine
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import Listening, listen
from tests.campaigns.hostile.case import BODIES, GENERATING
from tests.server.conftest import until

PICTURE = base64.b64encode(next(Path(demo.__path__[0]).rglob("*.png")).read_bytes()).decode()
KEYS = ("first-key", "second-key")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine.create_unstarted(EngineConfig(model="demo", threads=1, cache=CacheConfig(block_size=4)))
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


# ---- every route, asked by another key

OF_HERS = ("alice", "merger-of-acme", "hush", "salt-of-hers", "user-of-hers")  # her name, and parts of what she sends


async def ask_on(http: aiohttp.ClientSession, url: str, enough: asyncio.Event) -> None:
    """Requests of alice's, one after another; she ends some of them herself."""
    body = {"prompt": "hush hush", "max_tokens": 200, "ignore_eos": True, "return_metrics": True, "tpot_ms": 1}
    body |= {"cache_salt": "salt-of-hers", "user": "user-of-hers"}
    headers = {"Authorization": "Bearer first-key", "X-Request-Id": "merger-of-acme"}
    while not enough.is_set():
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            await answer.read()


async def answers_of(http: aiohttp.ClientSession, url: str, routes: list[tuple[str, str]], key: str) -> dict[str, str]:
    """Status, headers and text of what the server answers to this key, by route."""
    answers = {}
    for method, path in routes:
        body = BODIES.get(path)
        if path in GENERATING:
            body = {**BODIES[path], "return_metrics": True}
        at = url + path.replace("{id}", "merger-of-acme").replace("{model}", "demo")
        async with http.request(method, at, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            text = await (answer.content.readline() if path == "/ui/events" else answer.read())
            answers[f"{method} {path}"] = f"{answer.status} {[*answer.headers.items()]} {text.decode()}"
    return answers


async def test_no_answer_to_another_key_has_anything_of_a_key(engine: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:first-key\nbob:second-key\n")
    config = ServerConfig(api_key_file=str(keys), admin_key="admin-key", server_timing=True)
    listening = await listen(build_app(engine, config), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{listening.url}/openapi.json", headers={"X-Api-Key": "first-key"}) as answer:
            described = (await answer.json())["paths"]
        routes = [(method, path) for path, methods in described.items() for method in methods]
        ask = partial(answers_of, http, listening.url, [*routes, ("get", "/ui/events")])
        enough = asyncio.Event()
        hers = [asyncio.create_task(ask_on(http, listening.url, enough)) for _ in range(3)]
        await until(lambda: len(engine.activity().finished) >= 2)
        [tenant] = {ended.client for ended in engine.activity().finished}
        to_bob, to_her, to_admin = [await ask(key) for key in ("second-key", "first-key", "admin-key")]
        enough.set()
        await asyncio.gather(*hers)
        later = await ask("second-key")
    await listening.close()
    for route, said in [*to_bob.items(), *later.items()]:
        assert not [word for word in (*OF_HERS, tenant) if word in said], f"{route}: {said}"
    assert to_bob["delete /v1/requests/{id}"].startswith("404")
    assert to_her["delete /v1/requests/{id}"].startswith("200"), "she was there all the time"
    assert "alice" in to_her["get /metrics"] and "alice" in to_admin["get /metrics"]
    assert "merger-of-acme" in to_her["get /ui/events"] and "merger-of-acme" in to_admin["get /ui/events"]
