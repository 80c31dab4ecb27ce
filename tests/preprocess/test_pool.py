import asyncio
import threading
import time

import pytest

from hydra_engine.errors import EngineClosed, Unavailable
from hydra_engine.preprocess.pool import WorkerPool


async def until_idle(pool: WorkerPool) -> None:
    for _ in range(200):
        if pool._num_jobs == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the pool never became idle")


async def test_work_runs_off_the_loop_and_errors_come_back() -> None:
    pool = WorkerPool("t", num_workers=2, max_waiting=2, of="jobs")
    assert await pool.run(lambda x: (x + 1, threading.current_thread().name.startswith("t")), 1) == (2, True)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 / 0)
    await until_idle(pool)
    pool.close()


async def test_a_full_queue_refuses_and_recovers() -> None:
    pool, gate = WorkerPool("t", num_workers=1, max_waiting=2, of="jobs"), threading.Event()
    jobs = [asyncio.create_task(pool.run(gate.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await pool.run(gate.wait)
    assert pool._num_jobs == 3
    gate.set()
    await asyncio.gather(*jobs)
    assert await pool.run(lambda: 5) == 5
    await until_idle(pool)
    pool.close()


async def test_cancelled_waiting_work_never_runs_and_frees_its_place() -> None:
    pool, gate, ran = WorkerPool("t", num_workers=1, max_waiting=1, of="jobs"), threading.Event(), []
    running = asyncio.create_task(pool.run(gate.wait))
    waiting = asyncio.create_task(pool.run(ran.append, 1))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool._num_jobs == 1
    begin = time.monotonic()
    running.cancel()  # what runs goes on, but nobody waits for it
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - begin < 1
    gate.set()
    await until_idle(pool)
    pool.close()
    assert ran == []


async def test_closing_drops_what_waits() -> None:
    pool, gate = WorkerPool("t", num_workers=1, max_waiting=5, of="jobs"), threading.Event()
    running, waiting = (asyncio.create_task(pool.run(gate.wait)) for _ in range(2))
    await asyncio.sleep(0.01)
    pool.close()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(EngineClosed):
        await pool.run(gate.wait)
    gate.set()
    assert await running
