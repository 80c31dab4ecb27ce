"""Handles: pieces given away at once, readers on the frontend's loop and elsewhere, none lost, none overtaken."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading

import pytest

from hydra_engine.core.outputs import FinishReason, Piece, RequestMetrics, Result, Usage
from hydra_engine.errors import RequestFailed
from hydra_engine.frontend.handle import Handle


def last() -> Piece:
    result = Result("r", "", (), FinishReason.STOP, Usage(1, 1), RequestMetrics())
    return Piece("", result=result)


async def read(handle: Handle, into: list[str], pause_s: float | None = None) -> None:
    async for piece in handle:
        into.append(piece.text)
        if pause_s is not None:
            await asyncio.sleep(pause_s)


async def test_pieces_are_given_away_without_a_turn_of_the_reader() -> None:
    handle, taken, read_text = Handle("r", lambda: None), list[str](), list[str]()

    def take(piece: Piece) -> bool:
        taken.append(piece.text)
        return True

    reader = asyncio.create_task(read(handle, read_text))
    await asyncio.sleep(0)
    handle.offer_pieces_to(take)
    handle.feed(Piece("a"))
    handle.feed(Piece("b"))
    assert taken == ["a", "b"]
    handle.feed(last())
    await reader
    assert taken == ["a", "b"] and read_text == [""], "the end belongs to the reader"
    assert (await handle).finish_reason is FinishReason.STOP


async def test_none_overtakes_another_whoever_takes_them() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        handle, seen = Handle("r", lambda: None), list[str]()

        def take(piece: Piece, rng: random.Random = rng, seen: list[str] = seen) -> bool:
            if rng.random() < 0.3:
                return False
            seen.append(piece.text)
            return True

        handle.offer_pieces_to(take)
        reader = asyncio.create_task(read(handle, seen))
        for number in range(60):
            handle.feed(Piece(f"{number} "))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        handle.feed(last())
        await reader
        assert "".join(seen).split() == [str(number) for number in range(60)]


async def test_nothing_is_given_away_on_another_thread() -> None:
    handle, taken, seen = Handle("r", lambda: None), list[int](), list[str]()

    def take(_: Piece) -> bool:
        taken.append(threading.get_ident())
        return True

    def feed() -> None:
        for number in range(50):
            handle.feed(Piece(f"{number} "))
        handle.feed(last())

    handle.offer_pieces_to(take)
    frontend = threading.Thread(target=feed)
    frontend.start()
    await asyncio.wait_for(read(handle, seen), 30)
    frontend.join()
    assert taken == [] and "".join(seen).split() == [str(number) for number in range(50)]


def test_readers_of_every_kind_at_the_same_time() -> None:
    """A frontend on a thread; one reader blocks, others wait for the result on loops of their own."""
    handles = [Handle(f"r{number}", lambda: None) for number in range(30)]
    told: list[str] = []

    def frontend() -> None:
        for handle in handles:
            for number in range(20):
                handle.feed(Piece(f"{number} "))
            handle.feed(last())

    async def results() -> None:
        found = await asyncio.gather(*handles)
        told.extend(result.request_id for result in found)

    threads = [threading.Thread(target=asyncio.run, args=(results(),)) for _ in range(2)]
    threads.append(threading.Thread(target=frontend))
    for thread in threads:
        thread.start()
    for handle in handles:
        text = "".join(itertools.chain.from_iterable(piece.text for piece in handle))
        assert text.split() == [str(number) for number in range(20)]
        assert handle.result(30).finish_reason is FinishReason.STOP
    for thread in threads:
        thread.join(30)
    assert len(told) == 2 * len(handles)


async def test_an_error_reaches_those_who_wait_and_those_who_come_later() -> None:
    handle = Handle("r", lambda: None)
    waiting = asyncio.create_task(handle._wait())
    await asyncio.sleep(0)
    handle.fail(RequestFailed("gone"))
    for reading in (waiting, handle._wait()):
        with pytest.raises(RequestFailed):
            await reading
    with pytest.raises(TimeoutError):
        Handle("s", lambda: None).result(0.01)


def test_what_had_ended_before_a_fork_is_read_though_a_lost_thread_holds_the_lock() -> None:
    handle = Handle("a", lambda: None)
    handle.fail(RequestFailed("it failed"))
    with handle._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                handle.result()
            except RequestFailed:
                os._exit(7)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
