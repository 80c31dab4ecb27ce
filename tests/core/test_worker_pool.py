import asyncio
import gc
import threading
import time

import pytest

from hydra_engine.core.fairness.worker_pool import WorkerPool
from hydra_engine.errors import EngineClosed, Unavailable


async def until_idle(pool: WorkerPool, num_workers: int) -> None:
    for _ in range(200):
        if pool._threads._num_free == num_workers and not len(pool._threads._queue):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the pool never became idle")


async def test_work_runs_off_the_loop_and_errors_come_back() -> None:
    pool = WorkerPool("t", num_workers=2, max_waiting=4, noun="jobs")
    assert await pool.run("a", lambda x: (x + 1, threading.current_thread().name.startswith("t")), 1) == (2, True)
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", lambda: 1 / 0)
    await until_idle(pool, 2)
    pool.close()


async def test_a_full_queue_refuses_and_recovers() -> None:
    pool, gate = WorkerPool("t", num_workers=1, max_waiting=4, noun="jobs"), threading.Event()
    jobs = [asyncio.create_task(pool.run("a", gate.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="too many jobs are waiting"):
        await pool.run("a", gate.wait, 10)
    jobs.append(asyncio.create_task(pool.run("b", gate.wait, 10)))  # there is room for another one
    await asyncio.sleep(0.01)
    assert not jobs[-1].done()
    gate.set()
    await asyncio.gather(*jobs)
    assert await pool.run("a", lambda: 5) == 5
    await until_idle(pool, 1)
    pool.close()


async def test_clients_take_the_threads_in_turn() -> None:
    pool, gate, begun = WorkerPool("t", num_workers=2, max_waiting=100, noun="jobs"), threading.Event(), []
    running = [asyncio.create_task(pool.run("alice", gate.wait, 10)) for _ in range(2)]
    await asyncio.sleep(0.01)
    crowd = [asyncio.create_task(pool.run("alice", begun.append, "alice")) for _ in range(20)]
    await asyncio.sleep(0)
    bob = [asyncio.create_task(pool.run("bob", begun.append, "bob")) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*running, *crowd, *bob)
    assert begun.index("bob") <= 2 and begun[begun.index("bob") + 1 :].index("bob") <= 2
    pool.close()


async def test_cancelled_waiting_work_never_runs_and_frees_its_place() -> None:
    pool, gate, ran = WorkerPool("t", num_workers=1, max_waiting=2, noun="jobs"), threading.Event(), []
    running = asyncio.create_task(pool.run("a", gate.wait, 10))
    waiting = asyncio.create_task(pool.run("a", ran.append, 1))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(pool._threads._queue) == 0
    begin = time.monotonic()
    running.cancel()  # what runs goes on, but nobody waits for it
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - begin < 1
    gate.set()
    await until_idle(pool, 1)
    pool.close()
    assert ran == []


async def test_a_thread_whose_work_nobody_waits_for_is_not_given_to_others() -> None:
    pool, gate, ran = WorkerPool("t", num_workers=1, max_waiting=10, noun="jobs"), threading.Event(), []
    deserted = asyncio.create_task(pool.run("alice", gate.wait, 10))
    await asyncio.sleep(0.01)
    deserted.cancel()
    await asyncio.gather(deserted, return_exceptions=True)
    crowd = [asyncio.create_task(pool.run("alice", ran.append, "alice")) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert pool._threads._num_free == 0 and len(pool._threads._queue) == 4
    bob = asyncio.create_task(pool.run("bob", ran.append, "bob"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(bob, *crowd)
    assert ran.index("bob") <= 1
    pool.close()


async def test_closing_drops_what_waits() -> None:
    pool, gate = WorkerPool("t", num_workers=1, max_waiting=10, noun="jobs"), threading.Event()
    running, waiting = (asyncio.create_task(pool.run("a", gate.wait, 10)) for _ in range(2))
    await asyncio.sleep(0.01)
    pool.close()
    pool.close()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(EngineClosed):
        await pool.run("a", gate.wait, 10)
    gate.set()
    assert await running


def test_work_that_outlives_its_loop_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    caplog.clear()
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(10)
        done.set()

    async def leave() -> None:
        task = asyncio.create_task(pool.run("a", work))
        await asyncio.sleep(0.01)
        assert not task.done()

    pool = WorkerPool("t", num_workers=1, max_waiting=2, noun="jobs")
    asyncio.run(leave())
    gate.set()
    assert done.wait(10)
    pool._executor.shutdown()
    gc.collect()
    assert not caplog.records
