"""The server under siege: `python -m bench.siege.server serve MODEL ...` is `hydra-engine serve MODEL ...`, watched.

Everything is added from outside: a ticker that measures what processor time the event loop's thread takes between two
of its turns, a record of what happens in every queue of `core.fairness`, and GET /siege, which shows both to the holder
of an API key. The package itself has nothing for tests.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from bench.siege import networks
from hydra_engine.__main__ import main
from hydra_engine.core.fairness.turns import FairQueue
from hydra_engine.preprocess.sandbox.child_host import ChildHost
from hydra_engine.server import runner
from hydra_engine.server.state import client_of

TICK_S = 0.004
MAX_EVENTS = 200_000
PUBLIC = "--documentation-is-public"  # the addresses of `networks.py` are like any other
CHILD_SECONDS = "--child-seconds="  # a job of a sandboxed child may take so long at most


class Ticker:
    """The longest processor time of the loop's thread between two ticks, and how many ticks there were."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.num_ticks = 0
        self._last_s = 0.0

    async def run(self) -> None:
        self._last_s = time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - self._last_s)
            self._last_s = now
            self.num_ticks += 1

    def reset(self) -> None:
        self.longest_s, self.num_ticks, self._last_s = 0.0, 0, time.thread_time()


class Turns:
    """Every event of every queue: its name, what happened ("push", "begin", "end", "remove"), whose job it was."""

    def __init__(self) -> None:
        self.events: deque[tuple[str, str, str]] = deque(maxlen=MAX_EVENTS)
        self._numbers = itertools.count()

    def watch(self) -> None:
        made, numbers, events = FairQueue.__init__, self._numbers, self.events

        def init(queue: Any, of: str, *rest: Any, **options: Any) -> None:
            queue.siege_name = f"{of}#{next(numbers)}"
            made(queue, of, *rest, **options)

        FairQueue.__init__ = init  # type: ignore[method-assign]
        for name in ("push", "begin", "end", "remove"):
            setattr(FairQueue, name, self._recorded(name, getattr(FairQueue, name), events))

    @staticmethod
    def _recorded(name: str, method: Callable[..., Any], events: deque[tuple[str, str, str]]) -> Callable[..., Any]:
        def call(queue: Any, client: str, *rest: Any, **options: Any) -> Any:
            result = method(queue, client, *rest, **options)
            events.append((queue.siege_name, name, client))
            return result

        return call


def cap_children(seconds: float) -> None:
    """Nobody waits longer than this for a child that was stopped: a case has half a minute."""
    run = ChildHost.run

    def shorter(host: Any, job: object, allowed_s: float, *rest: Any) -> Any:
        return run(host, job, min(allowed_s, seconds), *rest)

    ChildHost.run = shorter  # type: ignore[method-assign]


def watched(build: Callable[..., web.Application], ticker: Ticker, turns: Turns) -> Callable[..., web.Application]:
    async def show(request: web.Request) -> web.Response:
        """With `?reset=1` what is counted begins anew."""
        shown = {
            "client": client_of(request),
            "lag_ms": round(ticker.longest_s * 1e3, 2),
            "num_ticks": ticker.num_ticks,
            "num_threads": threading.active_count(),
            "events": list(turns.events),
        }
        if "reset" in request.query:
            ticker.reset()
            turns.events.clear()
        return web.json_response(shown)

    async def tick(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(ticker.run())
        yield
        task.cancel()

    def build_watched(*arguments: Any, **options: Any) -> web.Application:
        app = build(*arguments, **options)
        app.router.add_get("/siege", show)
        app.cleanup_ctx.append(tick)
        return app

    return build_watched


def launch(arguments: list[str]) -> int:
    if PUBLIC in arguments:
        arguments.remove(PUBLIC)
        networks.count_as_public()
    for argument in list(arguments):
        if argument.startswith(CHILD_SECONDS):
            arguments.remove(argument)
            cap_children(float(argument.removeprefix(CHILD_SECONDS)))
    turns = Turns()
    turns.watch()
    runner.build_app = watched(runner.build_app, Ticker(), turns)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
