"""The server under siege: `python -m tests.campaigns.siege.server serve MODEL ...` is `hydra-engine serve MODEL ...`,
watched.

Everything is added from outside: a ticker that measures what processor time the event loop's thread takes between two
of its turns, a record of what happens in every queue of `core.fairness`, here and in the instances, and GET /siege,
which shows both to the holder of an API key. The package itself has nothing for tests.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from hydra_engine.__main__ import main
from hydra_engine.cluster import spawn
from hydra_engine.core.processes import launch
from hydra_engine.preprocess.sandbox.child_host import ChildHost
from hydra_engine.server import runner
from hydra_engine.server.state import client_of
from tests.campaigns.siege import networks, turn_log
from tests.faults.server import with_ledger

Build = Callable[..., web.Application]

TICK_S = 0.004
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


def reference_s() -> float:
    """The processor time that a fixed piece of work takes in this thread, now; the least of three."""
    return min(_work_s() for _ in range(3))


def _work_s() -> float:
    began_s, value = time.thread_time(), 0
    for number in range(50_000):
        value = (value * 31 + number) & 0xFFFF
    made = {str(number): value for number in range(5_000)}
    made.clear()
    return time.thread_time() - began_s


def cap_children(seconds: float) -> None:
    """Bounds the wait for a child that was stopped: a case has half a minute."""
    run = ChildHost.run

    def shorter(host: Any, job: object, allowed_s: float, *rest: Any) -> Any:
        return run(host, job, min(allowed_s, seconds), *rest)

    ChildHost.run = shorter  # type: ignore[method-assign]


def watched(
    build: Callable[..., web.Application], ticker: Ticker, turns: turn_log.Log
) -> Callable[..., web.Application]:
    async def show(request: web.Request) -> web.Response:
        """Shows what has been counted; with `?reset=1` counting begins anew."""
        shown = {
            "client": client_of(request),
            "lag_ms": round(ticker.longest_s * 1e3, 2),
            "reference_ms": round(reference_s() * 1e3, 2),
            "num_ticks": ticker.num_ticks,
            "num_threads": threading.active_count(),
            "events": turns.events(reset="reset" in request.query),
        }
        response = web.json_response(shown)
        if "reset" in request.query:
            ticker.reset()
        return response

    async def tick(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(ticker.run())
        yield
        task.cancel()

    def build_watched(*arguments: Any, **options: Any) -> web.Application:
        app = with_ledger(build)(*arguments, **options)
        app.router.add_get("/siege", show)
        app.cleanup_ctx.append(tick)
        return app

    return build_watched


def serve(arguments: list[str]) -> int:
    if PUBLIC in arguments:
        arguments.remove(PUBLIC)
        networks.count_as_public()
    for argument in list(arguments):
        if argument.startswith(CHILD_SECONDS):
            arguments.remove(argument)
            cap_children(float(argument.removeprefix(CHILD_SECONDS)))
    spawn.COMMAND = launch.command("tests.campaigns.siege.instance")
    turns = turn_log.Log()
    turns.watch()
    runner.build_app = watched(runner.build_app, Ticker(), turns)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
