"""Clients that leave the real engine, at each stage that a request goes through: nothing of theirs stays.

`test_cancel.py` has the stages that only the server knows, with a scripted engine. Here the demo model runs in one
instance or in two (EP+D), stages are made long by fault points, and after each one the ledger is at rest within two
seconds and the next request gets its right answer. FIN and RST.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hydra_engine import demo
from hydra_engine.config import CacheConfig, EngineConfig, MediaConfig, ServerConfig
from hydra_engine.core.outputs import Result
from hydra_engine.engine import Engine
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.state import STATE, Lifecycle
from hydra_engine.telemetry.metrics import FinishedRequests
from tests import faults
from tests.faults import set_fault
from tests.faults.points import MIGRATION_POINTS
from tests.server.conftest import until
from tests.server.test_cancel import leave

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one engine of each kind for all tests

FOLDER = Path(next(iter(demo.__path__)))
QUESTIONS = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
PICTURE = (FOLDER / QUESTIONS[0]["picture"]).read_bytes()
REST_S = 2.0


@dataclass
class Rig:
    engine: Engine
    port: int
    lifecycle: Lifecycle
    salts: int = 0

    async def ask(self, *, picture: str | None = None, whole: bool = True, **fields: Any) -> Client:
        """Sends a request that no cache knows; `whole` off: but for its last bytes."""
        self.salts += 1
        parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTIONS[0]["question"]}]
        if picture is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": picture}})
        body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "stream": True, "temperature": 0}
        body |= {"max_tokens": 600, "ignore_eos": True, "cache_salt": f"salt {self.salts}", **fields}
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        wire = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(wire if whole else wire[:-5])
        await writer.drain()
        return Client(reader, writer)

    def arm(self, name: str, point: str, argument: str) -> None:
        set_fault(self.engine.frontend, point, "delay", argument, instance=name)

    async def stands_still(self) -> None:
        """An instance is at a point in its own loop, where it answers nobody."""
        async with asyncio.timeout(30):
            while True:
                try:
                    await asyncio.wait_for(self.engine.aledger(), 0.1)
                except TimeoutError:
                    return

    async def at_rest(self) -> bool:
        idle = self.lifecycle.num_running == 0 and self.engine.frontend.num_active == 0
        return idle and (await self.engine.aledger()).at_rest

    async def quiet(self) -> None:
        """Checks that nothing is held and that the next client is served."""
        async with asyncio.timeout(REST_S):
            while not await self.at_rest():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        client = await self.ask(picture=data_url(), max_tokens=100, ignore_eos=False)
        text = await asyncio.wait_for(client.text(), 20)
        assert text == QUESTIONS[0]["answer"]
        client.writer.close()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def tokens(self, count: int) -> None:
        for _ in range(count):
            await asyncio.wait_for(self.reader.readuntil(b'"content":"'), 30)

    async def text(self) -> str:
        found = ""
        async for line in self.reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                found += "".join(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])
        return found


def data_url() -> str:
    return f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


async def rig_of(topology: str, **cache: Any) -> AsyncIterator[Rig]:
    config = EngineConfig(
        model="demo",
        threads=1,
        topology=topology,
        cache=CacheConfig(block_size=8, **cache),
        media=MediaConfig(allow_private_media=True),
    )
    with pytest.MonkeyPatch.context() as patch:
        faults.enable(patch)
        engine = Engine.create_unstarted(config)
        await engine.astart(progress=False)
    app = build_app(engine, ServerConfig(body_timeout_s=5.0))
    listening = await listen(app, "127.0.0.1", 0)
    yield Rig(engine, int(listening.url.rpartition(":")[2]), app[STATE].lifecycle)
    await listening.close()
    await engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Rig]:
    async for rig in rig_of("EPD"):
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two() -> AsyncIterator[Rig]:
    async for rig in rig_of("EP+D"):
        yield rig


async def both(rig: Rig, reach: Callable[[], Any]) -> None:
    """`reach` brings a client to a stage; it leaves there, in one way and in the other."""
    for how in ("fin", "rst"):
        client = await reach()
        leave(client.writer, how)
        await rig.quiet()


@pytest_asyncio.fixture(loop_scope="module")
async def slow_host() -> AsyncIterator[tuple[str, list[int]]]:
    """A host that sends half a picture, and how many ask it right now."""
    asking = [0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(PICTURE))
        writer.write(PICTURE[:100])
        asking[0] += 1
        while await reader.read(1):
            pass
        asking[0] -= 1
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png", asking
    server.close()


async def test_before_the_engine_has_it(one: Rig, slow_host: tuple[str, list[int]]) -> None:
    """The client leaves in the middle of the body, and while a picture is fetched: the fetch ends too."""

    async def in_the_body() -> Client:
        client = await one.ask(whole=False)
        await asyncio.sleep(0.02)
        return client

    url, asking = slow_host

    async def in_the_fetch() -> Client:
        client = await one.ask(picture=url)
        await until(lambda: asking[0] == 1, 10)
        return client

    await both(one, in_the_body)
    await both(one, in_the_fetch)
    await until(lambda: asking[0] == 0)


async def test_their_prompts_are_counted_whole(one: Rig) -> None:
    """Cached and computed tokens together are the prompts that came to a first token."""
    ended: list[Result] = []
    metrics = FinishedRequests()
    one.engine.add_observer(ended.append)
    one.engine.add_observer(metrics.add)
    computed = num_computed(one)
    first = await one.ask(picture=data_url(), cache_salt="shared", max_tokens=1)
    await first.text()
    first.writer.close()
    for number in (1, 2):
        client = await one.ask(picture=data_url(), cache_salt="shared")
        await client.tokens(3)
        leave(client.writer, "fin")
        await until(lambda: metrics.outcomes.cancelled == number, 10)  # noqa: B023 - it is waited for
    [num_prompt] = {result.usage.prompt_tokens for result in ended}
    assert metrics.cached_tokens > 0
    await until(lambda: num_computed(one) - computed + metrics.cached_tokens == 3 * num_prompt, 10)


def num_computed(rig: Rig) -> int:
    status = rig.engine.stats()
    return 0 if status is None else status.prompt_tokens


@pytest.mark.slow
async def test_in_one_instance(one: Rig) -> None:
    """Waiting for the encoder, being encoded, in the prefill, after the first token, in the decode."""

    async def encoding() -> Client:
        one.arm("epd0", "vis.before_step", "seconds=0.3 times=1")
        client = await one.ask(picture=data_url())
        await until(lambda: one.engine.frontend.num_active == 1, 10)
        await asyncio.sleep(0.1)
        return client

    async def queued_behind_an_encode() -> Client:
        first = await encoding()
        client = await one.ask(picture=data_url())
        await until(lambda: one.engine.frontend.num_active == 2, 10)
        first.writer.close()
        return client

    def stepping(point: str) -> Callable[[], Any]:
        async def reach() -> Client:
            one.arm("epd0", point, "seconds=0.3 times=1")
            client = await one.ask()
            await until(lambda: one.engine.frontend.num_active == 1, 10)
            await asyncio.sleep(0.1)
            return client

        return reach

    def decoding(tokens: int) -> Callable[[], Any]:
        async def reach() -> Client:
            client = await one.ask()
            await client.tokens(tokens)
            return client

        return reach

    for reach in (encoding, queued_behind_an_encode, *map(stepping, ("eng.before_step", "eng.mid_step"))):
        await both(one, reach)
    for tokens in (2, 20):
        await both(one, decoding(tokens))


async def test_after_the_last_token(one: Rig) -> None:
    """The client leaves between the end of the answer and the end of the connection."""

    async def reach() -> Client:
        client = await one.ask(max_tokens=3)
        await asyncio.wait_for(client.reader.readuntil(b'"finish_reason":"length"'), 30)
        return client

    await both(one, reach)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("ep0", "vis.before_step"),
        pytest.param("ep0", "eng.mid_step", marks=pytest.mark.slow),
        ("ep0", "src.after_offer"),
        pytest.param("ep0", "src.before_free", marks=pytest.mark.slow),
        pytest.param("d0", "dst.after_reserve", marks=pytest.mark.slow),
        ("d0", "dst.mid_copy"),
        ("d0", "dst.before_ack"),
        ("d0", "eng.mid_step"),
    ],
)
@pytest.mark.slow
async def test_between_two_instances(two: Rig, name: str, point: str) -> None:
    """The client leaves while KV is offered, copied, acknowledged or freed."""

    async def reach() -> Client:
        two.arm(name, point, "seconds=0.5 times=1")
        client = await two.ask(picture=data_url())
        await until(lambda: two.engine.frontend.num_active == 1, 10)
        if point in MIGRATION_POINTS:
            await two.stands_still()
        else:
            await asyncio.sleep(0.1)
        return client

    await both(two, reach)
