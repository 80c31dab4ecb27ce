import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.fairness import turns
from hydra_engine.core.fairness.turns import FairQueue, Turns
from hydra_engine.errors import Unavailable
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
    clock.advance(100 * turns.HALF_LIFE_S)  # alice's five seconds count as nothing
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
    monkeypatch.setattr(turns, "MAX_CLIENTS", 10)
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
