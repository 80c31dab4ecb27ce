"""`hydra-engine serve demo --front-workers 2` as real processes: the same tokens, deaths, drains, keys, limits."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hydra_engine.cluster.watch import Pace
from hydra_engine.config import MAX_FRONT_WORKERS, ServerConfig
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.server import front_workers
from hydra_engine.server.app import open_house
from hydra_engine.server.front_workers import FrontWorkers
from hydra_engine.server.listening import bind
from tests.server.conftest import until
from tests.server.stub import StubEngine
from tests.server.test_runner import ServerProcess, port, processes  # noqa: F401 - fixtures
from tests.server.test_served import QUESTIONS, Served, at_rest, content_of, run_serve

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--front-workers", "2")
    yield server
    server.end()
    assert server.process.returncode == 0


def children_of(pid: int) -> list[int]:
    """Its front workers."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"front_worker" in command:
            found.append(int(child))
    return found


def worker_of(connection: Any, workers: list[int]) -> int:
    """Which process has the other end of a client's connection."""
    host, local = connection.transport.get_extra_info("sockname")[:2]
    for worker in workers:
        inodes = set()
        for link in Path(f"/proc/{worker}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
        for line in Path(f"/proc/{worker}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[2].rpartition(":")[2], 16) == local and f"socket:[{fields[9]}]" in inodes:
                return worker
    raise AssertionError(f"nobody has the connection from {host}:{local}")


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection for each request."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


async def text_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any], **options: Any) -> tuple[int, str]:
    """Status, and the answer's text or the error."""
    async with http.post(url + CHAT, json=body, **options) as response:
        if not body.get("stream") or response.status != 200:
            answer = await response.json()
            return response.status, answer["choices"][0]["message"]["content"] if response.ok else str(answer)
        events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]\n", events[-1]
    return 200, "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])


async def both_are_up(http: aiohttp.ClientSession, url: str, key: str) -> bool:
    async with http.get(url + "/metrics", headers={"X-Api-Key": key}) as response:
        found = re.search(r"^hydra:front_workers_up\{.*\} (.*)$", await response.text(), re.MULTILINE)
    assert found is not None
    return found[1] == "2.0"


async def two_workers(served: Served) -> list[int]:
    await until(lambda: len(children_of(served.process.pid)) == 2, 15)
    return children_of(served.process.pid)


# ---- the same answers


async def test_right_answers_whole_and_streamed_over_all_workers(served: Served, http: aiohttp.ClientSession) -> None:
    bodies = [
        (question["answer"], {"messages": [{"role": "user", "content": content_of(question)}], "stream": stream})
        for question in QUESTIONS
        for stream in (False, True)
    ]
    answers = await asyncio.gather(*(text_of(http, served.url, body | {"temperature": 0}) for _, body in bodies * 2))
    assert answers == [(200, answer) for answer, _ in bodies * 2]
    at_rest(served)


async def test_connections_spread_over_the_workers(served: Served, http: aiohttp.ClientSession) -> None:
    workers = await two_workers(served)
    streams = [await http.post(served.url + CHAT, json=ask("Hello", stream=True, **LONG)) for _ in range(12)]
    for stream in streams:
        await stream.content.readuntil(b"\n\n")
    assert {worker_of(stream.connection, workers) for stream in streams} == set(workers)
    async with http.get(served.url + "/load") as response:
        assert (await response.json())["server_load"] == 12
    for stream in streams:
        stream.close()
    await asyncio.to_thread(at_rest, served)


# ---- deaths


async def test_a_worker_dies_in_the_middle_of_streams(served: Served, http: aiohttp.ClientSession) -> None:
    workers = await two_workers(served)
    expected = (await text_of(http, served.url, ask("What is two plus three?", **LONG)))[1]
    streams = [
        await http.post(served.url + CHAT, json=ask("What is two plus three?", stream=True, **LONG)) for _ in range(8)
    ]
    for stream in streams:
        await stream.content.readuntil(b'"content":" plus"')
    places = [worker_of(stream.connection, workers) for stream in streams]
    victim = places[0]
    os.kill(victim, signal.SIGKILL)
    for stream, place in zip(streams, places, strict=True):
        if place == victim:
            with pytest.raises(aiohttp.ClientError):
                await stream.content.read()
        else:
            rest = await stream.content.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            text = "Two plus" + "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                for line in rest.split(b"\n\n")
                if line.startswith(b"data: {")
            )
            assert text == expected
        stream.close()
    await asyncio.to_thread(at_rest, served)
    await until(lambda: victim not in children_of(served.process.pid), 10)
    now = await two_workers(served)
    assert len(set(now) & set(workers)) == 1
    async with http.get(served.url + "/load") as response:
        assert (await response.json())["server_load"] == 0
    async with http.get(served.url + "/metrics") as response:
        assert 'hydra:front_worker_restarts_total{engine="0",model_name="demo"} 1.0' in await response.text()
    assert any(f"front{number} was killed by SIGKILL" in line for line in served.log for number in (1, 2))


async def test_workers_die_at_random_moments(served: Served, http: aiohttp.ClientSession) -> None:
    """One in 60 s is started again without a wait, more than four are not; so no more than two here."""
    dice = random.Random(3)
    bodies = [
        {"messages": [{"role": "user", "content": content_of(question)}], "stream": number % 2 == 0, "max_tokens": 60}
        for number, question in enumerate(QUESTIONS * 2)
    ]
    for _ in range(2):
        workers = await two_workers(served)
        asking = [asyncio.create_task(text_of(http, served.url, body)) for body in bodies]
        await asyncio.sleep(dice.random() * 0.1)
        os.kill(dice.choice(workers), signal.SIGKILL)
        for found in await asyncio.gather(*asking, return_exceptions=True):
            cut = isinstance(found, aiohttp.ClientError | AssertionError | IndexError)
            assert cut or (isinstance(found, tuple) and found[0] == 200), found
        await asyncio.to_thread(at_rest, served)
    await two_workers(served)


# ---- ends


WORDS = "word " * 400


def test_sigterm_lets_streams_of_all_workers_finish(
    port: int,  # noqa: F811
    processes: list[ServerProcess],  # noqa: F811
) -> None:
    server = ServerProcess(port, engine={"token_s": 0.4}, config={"front_workers": 2})
    processes.append(server)
    server.wait_until("/health", 200, 30)

    async def run() -> list[bytes]:
        async with aiohttp.ClientSession() as http:
            body = ask("a b c d e f", stream=True)
            streams = [await http.post(server.url + CHAT, json=body) for _ in range(6)]
            for stream in streams:
                await stream.content.readuntil(b'"content":"a"')
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: server.status("/health") == 503)
            async with http.post(server.url + CHAT, json=ask("Hello")) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
            return [await stream.read() for stream in streams]

    assert all(text.endswith(b"data: [DONE]\n\n") for text in asyncio.run(run()))
    code, output = server.end()
    assert (code, output.split("\n")[1:3]) == (0, ["stopped", "cancelled 0"])


def test_keys_and_the_log_of_all_workers(
    tmp_path: Path,
    port: int,  # noqa: F811
    processes: list[ServerProcess],  # noqa: F811
) -> None:
    path = tmp_path / "keys"
    path.write_text("alice:a-1\n")
    path.chmod(0o600)
    config = {"front_workers": 2, "api_key_file": str(path), "access_log": "json", "shutdown_timeout_s": 60}
    server = ServerProcess(port, engine={"answer": WORDS}, config=config, stderr=subprocess.PIPE)
    processes.append(server)
    server.wait_until("/health", 200, 30)

    async def run() -> None:
        connector = aiohttp.TCPConnector(force_close=True)  # a connection for each request
        async with aiohttp.ClientSession(connector=connector) as http:

            async def status(key: str) -> int:
                return (await text_of(http, server.url, ask("Hello"), headers={"X-Api-Key": key}))[0]

            async with asyncio.timeout(20):
                while not await both_are_up(http, server.url, "a-1"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert [await status(key) for key in ("a-1", "b-1") * 3] == [200, 401] * 3
            path.write_text("alice:a-1\nbob:b-1\n")
            server.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(5):
                while await status("b-1") != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert [await status("b-1") for _ in range(8)] == [200] * 8  # of whichever worker

    asyncio.run(run())
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    lines = [json.loads(line) for line in server.errors.splitlines() if line.startswith("{")]
    assert {line["client"] for line in lines if line["status"] == 200} == {"alice", "bob", "127.0.0.1"}
    assert {line["instance"] for line in lines} == {"front1", "front2"} and "a-1" not in server.errors


def test_a_port_that_is_taken_ends_the_start(served: Served) -> None:
    done = run_serve("demo", "--front-workers", "2", "--port", served.url.rpartition(":")[2])
    assert done.returncode == 4 and "cannot listen" in done.stderr.splitlines()[-1]
    assert run_serve("demo", "--front-workers", "-1").returncode == 2


def test_how_many() -> None:
    for wrong in (-1, MAX_FRONT_WORKERS + 1):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(front_workers=wrong)
        assert caught.value.param == "front_workers"


# ---- supervision, with the scripted engine in this process


async def start(command: tuple[str, ...] | None = None, pace: Pace = Pace(), num: int = 2) -> FrontWorkers:  # noqa: B008
    if command is not None:
        front_workers.COMMAND = command  # type: ignore[misc]
    engine, config = StubEngine(), ServerConfig(front_workers=num, port=0)
    house, commons, keys = open_house(engine, config)
    workers = FrontWorkers(engine, config, house, commons, keys, await bind("127.0.0.1", 0), pace=pace)
    workers.start()
    return workers


async def test_workers_that_cannot_live_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_workers, "COMMAND", ("/bin/sh", "-c", "exit 3"))
    workers = await start(pace=Pace(backoff_s=(0.0,), max_deaths=3))
    with pytest.raises(ResourceError, match="no front worker stays alive"):
        await asyncio.wait_for(workers.wait_open(), 10)
    assert workers.lost and workers.report().restarts == 6
    await workers.close()
    assert caplog.text.count("ended with exit code 3") == 6 and caplog.text.count("is not started again") == 2


async def test_the_others_serve_on_when_one_is_given_up(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    workers = await start(pace=Pace(backoff_s=(0.0,), max_deaths=1))
    await asyncio.wait_for(workers.wait_open(), 20)
    os.kill(workers.pids[0], signal.SIGKILL)
    await until(lambda: "is not started again" in caplog.text, 10)
    assert not workers.lost and workers.report().num_up == 1
    for _ in range(4):
        assert (await text_of(http, workers.url, ask("one two")))[1] == "one two"
    os.kill(workers.pids[0], signal.SIGKILL)
    await until(lambda: workers.lost, 10)
    await workers.close()


@pytest.mark.slow
async def test_a_worker_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    workers = await start()
    await asyncio.wait_for(workers.wait_open(), 20)
    monkeypatch.setattr(front_workers, "FENCE_S", 2.5)
    stopped = workers.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    await until(lambda: "has not been heard" in caplog.text, 10)
    await until(lambda: stopped not in workers.pids and len(workers.pids) == 2, 10)
    assert (await text_of(http, workers.url, ask("one two")))[1] == "one two"
    began_s = time.monotonic()
    await workers.close()
    assert time.monotonic() - began_s < 10
    with pytest.raises((urllib.error.URLError, aiohttp.ClientError)):
        await text_of(http, workers.url, ask("one two"))
