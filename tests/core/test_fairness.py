import asyncio
import gc
import random
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core import fairness
from hydra_engine.core.fairness import FairQueue, Turns, WorkerPool
from hydra_engine.errors import EngineClosed, Unavailable
from tests.examples import examples
from tests.virtual_clock import VirtualClock


def order(queue: FairQueue[int], used_s: float = 0.0) -> list[tuple[str, int]]:
    begun = []
    while (next := queue.pop()) is not None:
        begun.append(next)
        queue.end(next[0], used_s)
    return begun


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[int] = FairQueue("jobs", 100)
    for job in range(4):
        queue.push("alice", job)
    queue.push("bob", 10)
    queue.push("bob", 11)
    assert order(queue) == [("alice", 0), ("bob", 10), ("alice", 1), ("bob", 11), ("alice", 2), ("alice", 3)]
    assert len(queue) == 0


def test_more_clients_than_are_remembered_may_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_CLIENTS", 3)
    queue: FairQueue[int] = FairQueue("jobs", 100)
    for job in range(6):
        queue.push(f"client {job}", job)
    queue.begin("running")
    queue.end("running", 1.0)
    assert [job for _, job in order(queue)] == list(range(6))


def test_of_those_that_may_begin_the_one_goes_first_that_has_used_least_time() -> None:
    clock = VirtualClock()
    queue: FairQueue[int] = FairQueue("jobs", 100, clock.now)
    for client, used_s in (("alice", 5.0), ("bob", 1.0), ("carol", 3.0)):
        queue.begin(client)
        queue.end(client, used_s)
    for client in ("alice", "bob", "carol"):
        queue.push(client, 0)
    assert [client for client, _ in order(queue)] == ["bob", "carol", "alice"]
    queue.begin("bob")
    queue.end("bob", 1.0)
    clock.advance(100 * fairness.HALF_LIFE_S)  # alice's five seconds count as nothing
    for client in ("bob", "alice"):
        queue.begin(client)
        queue.end(client, 1.0 if client == "bob" else 0.5)
    for client in ("bob", "alice"):
        queue.push(client, 0)
    assert [client for client, _ in order(queue)] == ["alice", "bob"]


def test_there_is_room_for_the_first_job_of_another_client() -> None:
    queue: FairQueue[int] = FairQueue("jobs", 8)
    for job in range(4):
        queue.push("alice", job)
    with pytest.raises(Unavailable, match="too many jobs are waiting"):
        queue.push("alice", 4)
    for client in ("bob", "bob", "carol"):
        queue.push(client, 0)
    with pytest.raises(Unavailable):
        queue.push("bob", 0)
    queue.push("dave", 0)
    assert len(queue) == 8


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["push", "pop", "remove"]), st.floats(0, 10))))
@settings(max_examples=examples(50))
def test_nobody_begins_twice_before_the_next_job_of_another_client(steps: list[tuple[str, str, float]]) -> None:
    queue: FairQueue[object] = FairQueue("jobs", 1 << 20)
    waiting: dict[str, list[object]] = {client: [] for client in "abcd"}
    begun_before: dict[str, Counter[str]] = {client: Counter() for client in "abcd"}
    for client, step, used_s in [*steps, *[("a", "pop", 0.0)] * len(steps)]:
        if step == "push":
            job = object()
            queue.push(client, job)
            waiting[client].append(job)
            if len(waiting[client]) == 1:
                begun_before[client].clear()
        elif step == "remove" and waiting[client]:
            job = waiting[client].pop()
            queue.remove(client, job)
            begun_before[client].clear()
        elif step == "pop" and (begun := queue.pop()) is not None:
            chosen, job = begun
            assert job is waiting[chosen].pop(0)
            begun_before[chosen].clear()
            queue.end(chosen, used_s)
            for other in set("abcd") - {chosen}:
                if waiting[other]:
                    begun_before[other][chosen] += 1
                    assert begun_before[other][chosen] <= 1
    assert len(queue) == 0 and queue.pop() is None


def test_clients_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_CLIENTS", 10)
    queue: FairQueue[int] = FairQueue("jobs", 1000)
    queue.push("waits", 0)
    queue.begin("runs")
    for number in range(100):
        queue.begin(str(number))
        queue.end(str(number), 0.0)
    assert len(queue._clients) <= 11
    queue.end("runs", 0.0)
    assert queue.pop() == ("waits", 0)


async def test_places_are_given_back_whatever_happens() -> None:
    places = Turns("jobs", num_slots=2, max_waiting=100)
    done = []

    async def job(client: str, number: int) -> None:
        async with places.slot(client):
            await asyncio.sleep(0)
            done.append((client, number))
            if number % 3 == 0:
                raise ValueError

    rng = random.Random(0)
    jobs = [asyncio.create_task(job(rng.choice("abc"), number)) for number in range(40)]
    for some in rng.sample(jobs, 10):
        await asyncio.sleep(0)
        some.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    assert places._num_free == 2 and len(places._queue) == 0 and done


async def test_one_whose_place_was_given_and_who_has_gone_gives_it_back() -> None:
    places = Turns("jobs", num_slots=1, max_waiting=10)
    await places.acquire("alice")
    bob, carol = (asyncio.create_task(places.acquire(client)) for client in ("bob", "carol"))
    await asyncio.sleep(0)
    places.release("alice", 0.0)
    bob.cancel()  # before he has noticed
    await carol
    assert bob.cancelled() and places._num_free == 0
    places.release("carol", 0.0)
    assert places._num_free == 1


async def test_places_are_kept_free_for_others_where_jobs_wait_for_somebody() -> None:
    places = Turns("jobs", num_slots=4, max_waiting=100, keeps_free=True)
    alice = [asyncio.create_task(places.acquire("alice")) for _ in range(5)]
    await asyncio.sleep(0)
    assert [task.done() for task in alice] == [True, True, False, False, False]
    await places.acquire("bob")  # at once, whoever waits
    await places.acquire("carol")
    assert places._num_free == 0
    dave = asyncio.create_task(places.acquire("dave"))
    await asyncio.sleep(0)
    places.release("bob", 0.0)
    await dave
    for client in ("carol", "dave", "alice", "alice"):
        places.release(client, 0.0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in alice] == [True, True, True, True, False]
    alice[4].cancel()
    await asyncio.gather(*alice, return_exceptions=True)


async def test_a_full_queue_refuses_only_those_that_would_wait() -> None:
    places = Turns("jobs", num_slots=1, max_waiting=0)
    async with places.slot("alice"):
        with pytest.raises(Unavailable):
            await places.acquire("alice")
    await places.acquire("alice")


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
    running = asyncio.create_task(pool.run("a", gate.wait, 60))
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
    assert time.monotonic() - begin < 30
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
    gc.freeze()  # what is collected below is new; who thaws it makes every later collection one of everything
    caplog.clear()
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(30)
        done.set()

    async def leave() -> None:
        task = asyncio.create_task(pool.run("a", work))
        await asyncio.sleep(0.01)
        assert not task.done()

    pool = WorkerPool("t", num_workers=1, max_waiting=2, noun="jobs")
    asyncio.run(leave())
    gate.set()
    assert done.wait(30)
    pool._executor.shutdown()
    gc.collect()
    assert not caplog.records
