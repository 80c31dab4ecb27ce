"""Engines close wherever they are: under a running loop, from tasks, at the interpreter's exit; and twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hydra_engine import Engine, Grammar, SamplingParams
from hydra_engine.errors import CheckpointError, EngineClosed
from hydra_engine.guidance.guide import Guide
from tests.engine.conftest import EngineFactory

ASKED = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}


async def by_with(engine: Engine) -> None:
    with engine:
        await engine.agenerate("Hello", **ASKED)


async def by_async_with(engine: Engine) -> None:
    async with engine:
        await engine.agenerate("Hello", **ASKED)


async def by_close(engine: Engine) -> None:
    engine.generate("Hello", **ASKED)  # as in a notebook's cell
    engine.close()


async def by_aclose(engine: Engine) -> None:
    await engine.aclose()
    await engine.aclose()


async def by_an_error(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        async with engine:
            1 / 0


async def by_several_at_once(engine: Engine) -> None:
    await asyncio.gather(engine.aclose(), asyncio.to_thread(engine.close), engine.aclose())


async def by_a_task_that_is_cancelled(engine: Engine) -> None:
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    engine.close()  # waits for what the task began


@pytest.mark.quick("by_aclose", "by_an_error")
@pytest.mark.parametrize(
    "way",
    [by_with, by_async_with, by_close, by_aclose, by_an_error, by_several_at_once, by_a_task_that_is_cancelled],
    ids=lambda way: way.__name__,
)
async def test_under_a_running_loop(make_engine: EngineFactory, way: Callable[[Engine], Awaitable[None]]) -> None:
    engine = make_engine()
    assert engine._thread is not None and engine._loop is not None
    await way(engine)
    assert engine._loop.is_closed() and not engine._thread._thread.is_alive()
    engine.close()
    assert engine.health() == (False, "closed")
    with pytest.raises(EngineClosed):
        await engine.agenerate("Hello")


async def test_whoever_waits_is_told(make_engine: EngineFactory) -> None:
    engine = make_engine()
    handle = engine.submit("Hello", **LONG)
    several = asyncio.create_task(engine.agenerate(["Hello", "there"], **LONG))
    async for _ in handle:
        break
    await engine.aclose()
    for waiting in (several, handle):
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asyncio.ensure_future(waiting), 30)


def test_its_own_thread_may_not_wait_for_itself(make_engine: EngineFactory) -> None:
    engine = make_engine()
    told: list[str] = []

    def close(result: object) -> None:
        for blocking in (engine.close, engine.ledger):
            with pytest.raises(RuntimeError) as caught:
                blocking()
            told.append(str(caught.value))

    engine.add_observer(close)
    engine.generate("Hello", **ASKED)
    assert len(told) == 2 and all("own loop" in words for words in told)


def test_an_engine_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError):
        Engine(tmp_path, threads=1)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "hydra-engine"]


FORGOTTEN = """
import asyncio, sys
from hydra_engine import Engine, Grammar, SamplingParams

async def main():
    global engine
    engine = Engine(sys.argv[1], threads=1, block_size=4, num_kv_blocks=512, token_budget=64)
    async for piece in engine.submit("Hello", max_tokens=400, ignore_eos=True):
        return print("answered")

asyncio.run(main())
"""


@pytest.mark.slow
def test_at_the_interpreters_exit(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORGOTTEN, str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "answered\n", "")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_so_and_the_engine_goes_on(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that would wait for threads that a fork leaves behind raise; what has ended can be read."""
    engine, compiling_may_end = make_engine(), threading.Event()
    compile_grammar = Guide.compile
    monkeypatch.setattr(Guide, "compile", lambda *given: compiling_may_end.wait(60) and compile_grammar(*given))
    before = engine.generate("Hello", **ASKED)
    bound = SamplingParams(temperature=0, max_tokens=4, grammar=Grammar("regex", "[a-c]{4}"))
    running = engine.submit("Hello", sampling=bound)  # does not end before its grammar is compiled
    ended = engine.submit("Hello", **ASKED)
    ended.result()
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate("Hello", **ASKED),
        "stream": lambda: next(engine.stream("Hello", **ASKED)),
        "result": running.result,
        "iteration": lambda: list(running),
        "await": lambda: asyncio.run(engine.agenerate("Hello", **ASKED)),
        "ledger": engine.ledger,
        "caches": engine.reset_caches,
        "stats": engine.stats,
        "tokens": lambda: engine.count_tokens("Hello"),
        "text": lambda: engine.detokenize([5]),
    }
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        for name, call in calls.items():
            try:
                call()
            except EngineClosed as error:
                if f"runs in process {os.getppid()}" in error.message and "make an Engine here" in error.message:
                    os.write(writing, f"{name} ".encode())
        engine.close()
        running.cancel()  # is not this process's to cancel
        closed = engine.health() == (False, "closed") and not engine.instances() and repr(engine).endswith("closed>")
        with engine:
            os.write(writing, f"{closed} {ended.result().text == before.text}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.read().split() == [*calls, "True", "True"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    compiling_may_end.set()
    assert len(running.result(60).text) == 4
    assert engine.generate("Hello", **ASKED).text == before.text
