"""Binding, loading, draining, signals: the server as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.errors import ResourceError
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from tests.server.conftest import Served, chat_body, until
from tests.server.stub import StubEngine
from tests.server.test_cancel import request_bytes

SCRIPT = """
import asyncio, json, logging, sys
from hydra_engine.config import ServerConfig
from hydra_engine.server import loggers
from hydra_engine.server.runner import serve
from tests.server.stub import StubEngine, example_status

logging.basicConfig(level=logging.INFO)
options = json.loads(sys.argv[1])
loggers.EVERY_S = options.get("load_every_s", loggers.EVERY_S)
engine = StubEngine(**options["engine"], status=example_status())

async def start():
    engine.state = "loading"
    await asyncio.sleep(options.get("load_s", 0))
    engine.state = "ok"
    for name, values in options.get("later", {}).items():
        for after_s, value in values:
            asyncio.get_running_loop().call_later(after_s, setattr, engine, name, value)

async def stop():
    print("stopped", flush=True)

code = asyncio.run(serve(engine, ServerConfig(**options["config"]), start=start, stop=stop,
                         ready=lambda url: print("ready", url, flush=True)))
print("cancelled", len(engine.cancelled), flush=True)
sys.exit(code)
"""


class ServerProcess:
    errors = ""  # what it said on standard error, where that is a pipe

    def __init__(
        self, port: int, config: dict[str, object] | None = None, stderr: int = subprocess.DEVNULL, **options: object
    ) -> None:
        root = Path(__file__).parents[2]
        self.url = f"http://127.0.0.1:{port}"
        server = {"port": port, "shutdown_timeout_s": 5, **(config or {})}
        arguments = {"engine": {}, **options, "config": server}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def wait_until(self, path: str, status: int, limit_s: float = 40) -> None:
        end = time.monotonic() + limit_s
        while self.status(path) != status:
            assert time.monotonic() < end, f"{path} never said {status}"
            time.sleep(0.02)

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0

    def end(self, limit_s: float = 40) -> tuple[int, str]:
        output, errors = self.process.communicate(timeout=limit_s)
        self.errors = errors or ""
        return self.process.returncode, output


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def processes() -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


async def test_a_taken_port_is_a_resource_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match=r"cannot listen on .*address already in use") as raised:
            await listen(build_app(StubEngine(), ServerConfig()), "127.0.0.1", taken.getsockname()[1])
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
async def test_addresses_that_do_not_work(host: str) -> None:
    with pytest.raises(ResourceError, match="cannot listen on"):
        await listen(build_app(StubEngine(), ServerConfig()), host, 0)


def test_health_answers_while_the_model_loads_and_signals_drain(port: int, processes: list[ServerProcess]) -> None:
    """SIGHUP at any of these times changes nothing."""
    server = ServerProcess(port, engine={"token_s": 0.1}, load_s=0.5, stderr=subprocess.PIPE)
    processes.append(server)
    server.wait_until("/livez", 200)
    server.process.send_signal(signal.SIGHUP)
    assert server.status("/health") == 503
    server.wait_until("/health", 200)
    server.process.send_signal(signal.SIGHUP)

    async def run() -> str:
        async with aiohttp.ClientSession() as http:
            response = await http.post(server.url + "/v1/chat/completions", json=chat_body("a b c d e", stream=True))
            await response.content.readuntil(b'"content":"a"')
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: server.status("/health") == 503)
            async with http.post(server.url + "/v1/chat/completions", json=chat_body()) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
                assert "Retry-After" in refused.headers
            server.process.send_signal(signal.SIGHUP)
            return (await response.read()).decode()

    assert asyncio.run(run()).endswith("data: [DONE]\n\n")
    code, output = server.end()
    assert (code, output.split("\n")[1:3]) == (0, ["stopped", "cancelled 0"])
    assert server.errors.count("SIGHUP changes nothing: it reads --api-key-file again, and there is none") == 3


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_the_load_is_told_unless_it_is_switched_off(told: bool, port: int, processes: list[ServerProcess]) -> None:
    config = {} if told else {"disable_log_stats": True}
    server = ServerProcess(port, config=config, stderr=subprocess.PIPE, load_every_s=0.02)
    processes.append(server)
    server.wait_until("/health", 200)
    time.sleep(0.2)
    server.process.terminate()
    assert server.end()[0] == 0
    assert ("INFO:hydra_engine.load:Avg prompt throughput: " in server.errors) == told


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_told(port: int, processes: list[ServerProcess]) -> None:
    config = {"shutdown_timeout_s": 0.3, "keepalive_s": 0.05}
    server = ServerProcess(port, engine={"prefill_s": 60}, config=config, stderr=subprocess.PIPE)
    processes.append(server)
    server.wait_until("/health", 200)

    async def run() -> list[tuple[int, str]]:
        async with aiohttp.ClientSession() as http:

            async def ask(stream: bool) -> tuple[int, str]:
                async with http.post(server.url + "/v1/chat/completions", json=chat_body(stream=stream)) as response:
                    return response.status, await response.text()

            asks = [asyncio.create_task(ask(stream)) for stream in (False, True)]
            await asyncio.sleep(0.4)
            server.process.send_signal(signal.SIGINT)
            return await asyncio.gather(*asks)

    (status, whole), (stream_status, streamed) = asyncio.run(run())
    assert status == 503 and '"code":"draining"' in whole
    assert stream_status == 200 and '"code":"draining"' in streamed and "[DONE]" not in streamed
    code, output = server.end()
    assert code == 0 and "cancelled 2" in output
    assert server.errors.count("shutting down: 0.3 s for 2 requests to end; Ctrl-C again ends at once") == 1
    warnings = [line for line in server.errors.splitlines() if line.startswith("WARNING")]
    assert warnings == ["WARNING:hydra_engine.server.runner:2 requests did not finish in time"]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(port: int, processes: list[ServerProcess]) -> None:
    server = ServerProcess(port, engine={"prefill_s": 60}, config={"shutdown_timeout_s": 60}, stderr=subprocess.PIPE)
    processes.append(server)
    server.wait_until("/health", 200)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request_bytes())
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until("/health", 503)
        server.process.send_signal(signal.SIGTERM)
        code, output = server.end()  # within 40 s; after the first signal it would wait for 60
    assert code == 128 + signal.SIGTERM and "stopped" in output
    warnings = [line for line in server.errors.splitlines() if line.startswith("WARNING")]
    assert warnings == ["WARNING:hydra_engine.server.runner:second signal: ending at once, without 1 request"]


def test_a_signal_while_loading_ends_at_once(port: int, processes: list[ServerProcess]) -> None:
    server = ServerProcess(port, load_s=60)
    processes.append(server)
    server.wait_until("/livez", 200)
    server.process.send_signal(signal.SIGTERM)
    code, output = server.end()
    assert (code, output.split()) == (0, ["stopped", "cancelled", "0"])


@pytest.mark.slow
def test_the_server_ends_when_its_engine_is_lost(port: int, processes: list[ServerProcess]) -> None:
    server = ServerProcess(port, later={"state": [(0.3, "instance_lost")], "lost": [(0.3, True)]})
    processes.append(server)
    server.wait_until("/health", 200)
    server.wait_until("/health", 503)
    code, output = server.end()
    assert code == 1 and "stopped" in output


@pytest.mark.slow
def test_the_server_waits_for_an_instance_that_is_started_again(port: int, processes: list[ServerProcess]) -> None:
    server = ServerProcess(port, later={"state": [(0.5, "instance_lost"), (2.0, "ok")]})
    processes.append(server)
    server.wait_until("/health", 200)
    server.wait_until("/health", 503)
    server.wait_until("/health", 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


async def test_expiry_reaches_requests_at_every_stage(served: Served) -> None:
    served.engine.intake_s = 600
    in_intake = asyncio.create_task(served.http.post(served.url + "/v1/chat/completions", json=chat_body()))
    await until(lambda: served.lifecycle.num_running == 1)
    served.engine.intake_s, served.engine.token_s = 0, 600
    in_decode = await served.http.post(served.url + "/v1/chat/completions", json=chat_body(stream=True))
    await in_decode.content.readuntil(b'"content":"one"')
    served.lifecycle.draining = True
    served.lifecycle.expire()
    await asyncio.wait_for(served.lifecycle.wait_idle(), 30)
    refused = await in_intake
    assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
    assert b'"code":"draining"' in await in_decode.read()
    assert served.engine.intakes_cancelled == 1 and len(served.engine.cancelled) == 1


async def test_a_body_that_arrives_after_the_drain_began_is_refused(served: Served) -> None:
    data = request_bytes()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(data[:-10])
    await asyncio.sleep(0.05)
    served.lifecycle.draining = True
    writer.write(data[-10:])
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"draining"' in answer
    assert served.engine.submissions == []
