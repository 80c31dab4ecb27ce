"""The servers under test, each a process of its own that says `ready on URL` on standard error.

`front`: the real server, front and channel; only what is behind the channel is scripted. `naive`: aiohttp alone, a
queue and one write a token of bytes that were made before. `socket`: the same bytes, written to bare transports of the
loop from one timer, which no server can do with less. A line on standard input is answered with the process's CPU
seconds so far and the loop's lags since the last such line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
from aiohttp import web

from bench.frontend.instance import COMMAND, STEP_VARIABLE, spoken
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.core.outputs import Piece
from hydra_engine.engine import Engine
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from hydra_engine.server.generate import Identity
from hydra_engine.server.http.answers import DONE
from hydra_engine.server.http.loop_lag import LoopLag
from hydra_engine.server.openai.chat import ChatAnswer
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.runner import serve
from hydra_engine.server.tools.tool_calls import ToolUse

LAG_PERIOD_S = 0.01
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nCache-Control: no-cache\r\n\r\n"
)


def waited_for_a_core() -> float:
    """Seconds, of the main thread, since it began; 0 where the kernel does not count."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


class ScriptedEngine(Engine):
    async def astart(self, progress: bool | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        supervisor = Supervisor(self.config, processes=True, command=COMMAND)
        self._frontend = Frontend(self.config, processes=True, supervisor=supervisor)
        await self._frontend.start(lambda _: None)


class Meter:
    """Answers lines of standard input on a thread. Lags are without the time in which the loop's thread could run and
    had no core, where the kernel tells: on a shared machine that says more about the neighbours."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._waited_s = 0.0

    def start(self) -> None:
        LoopLag(self._note, period_s=LAG_PERIOD_S).start()
        threading.Thread(target=self._answer, name="meter", daemon=True).start()

    def _note(self, late_s: float) -> None:
        waited_s = waited_for_a_core()
        self._lags.append(max(late_s - (waited_s - self._waited_s), 0.0))
        self._waited_s = waited_s

    def _answer(self) -> None:
        for _ in sys.stdin:
            used = resource.getrusage(resource.RUSAGE_SELF)
            lags, self._lags = self._lags, []
            document = {
                "user_s": used.ru_utime,
                "system_s": used.ru_stime,
                "lags_s": [round(lag, 6) for lag in lags],
            }
            print(json.dumps(document), flush=True)
        os._exit(0)  # the parent process is gone


def announce(url: str) -> None:
    sys.stderr.write(f"ready on {url}\n")
    sys.stderr.flush()


async def front(step_s: float) -> int:
    os.environ[STEP_VARIABLE] = repr(step_s)
    config = EngineConfig()
    engine = ScriptedEngine.create_unstarted(replace(config, scheduler=replace(config.scheduler, max_queue=1 << 12)))
    meter = Meter()

    def ready(url: str) -> None:
        meter.start()
        announce(url)

    return await serve(engine, ServerConfig(port=0), start=engine.astart, stop=engine.aclose, ready=ready)


class Events:
    """The events that the real server would write, made at the first use."""

    def __init__(self, num_tokens: int) -> None:
        tokenizer = load_tokenizer(EngineConfig().model_path)
        body = {"messages": [{"role": "user", "content": "-"}], "stream": True}
        asked, identity = msgspec.convert(body, ChatCompletionRequest), Identity("chatcmpl-" + "0" * 32, 0, "demo")
        answer = ChatAnswer(asked, identity, ToolUse())
        ids = spoken(tokenizer, num_tokens)
        self.tokens = [answer.events(Piece(tokenizer.token_text(number), (number,))) for number in ids]
        self.tokens[-1] += b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'


async def steps(step_s: float) -> AsyncIterator[None]:
    """Yields once per step, without end; late steps are not made up for."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        due_s = max(due_s + step_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        yield


async def naive(step_s: float, num_tokens: int) -> int:
    events, queues = Events(num_tokens), set[asyncio.Queue[bytes]]()

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queues.add(queue)
        for _ in events.tokens:
            await response.write(await queue.get())
        queues.discard(queue)
        await response.write(DONE)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    Meter().start()
    announce(f"http://127.0.0.1:{runner.addresses[0][1]}")
    given: dict[asyncio.Queue[bytes], int] = {}
    async for _ in steps(step_s):
        for queue in list(queues):
            number = given[queue] = given.get(queue, -1) + 1
            queue.put_nowait(events.tokens[number])


class Bare(asyncio.Protocol):
    """Takes any bytes for a request."""

    streams: set[Bare]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.position = transport, 0

    def data_received(self, data: bytes) -> None:
        if self.position == 0:
            self.transport.write(HEAD)
            self.streams.add(self)


async def bare(step_s: float, num_tokens: int) -> int:
    tokens = Events(num_tokens).tokens
    tokens[-1] += DONE
    chunks = [b"%x\r\n%b\r\n" % (len(data), data) for data in tokens]
    chunks[-1] += b"0\r\n\r\n"
    Bare.streams = set()
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0, backlog=1024)
    Meter().start()
    announce(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async for _ in steps(step_s):
        for stream in list(Bare.streams):
            stream.transport.write(chunks[stream.position])
            stream.position += 1
            if stream.position == len(chunks):
                Bare.streams.discard(stream)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("front", "naive", "socket"))
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    match options.kind:
        case "front":
            return asyncio.run(front(options.step_s))
        case "naive":
            return asyncio.run(naive(options.step_s, options.tokens))
        case _:
            return asyncio.run(bare(options.step_s, options.tokens))


if __name__ == "__main__":
    sys.exit(main())
