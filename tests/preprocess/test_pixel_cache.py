import asyncio
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import PixelPayload
from hydra_engine.errors import InvalidImage
from hydra_engine.preprocess.media.media import PixelCache, await_payloads
from hydra_engine.preprocess.media.opening import Payloads


def payloads(size: int, name: int = 0) -> Payloads:
    return (PixelPayload(ImageDigest(name.to_bytes(32, "little")), 1, size // 3, bytes(size)),)


def refuse() -> Payloads:
    raise AssertionError("made although it was known")


def test_the_second_time_nothing_is_made() -> None:
    cache = PixelCache(1000)
    first = cache.get_or_make(b"a", lambda: payloads(300))
    assert cache.get_or_make(b"a", refuse) is first
    assert cache.num_bytes == 300


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = PixelCache(900)
    for key in (b"a", b"b", b"c"):
        cache.get_or_make(key, lambda: payloads(300))
    cache.get_or_make(b"a", refuse)
    cache.get_or_make(b"d", lambda: payloads(300))
    for key in (b"a", b"c", b"d"):
        cache.get_or_make(key, refuse)
    with pytest.raises(AssertionError):
        cache.get_or_make(b"b", refuse)


def test_bytes_are_bounded_whatever_comes() -> None:
    cache, rng, made = PixelCache(1000), random.Random(1), []
    for step in range(2000):
        size = rng.choice([0, 3, 30, 300, 999, 1002, 5000])
        cache.get_or_make(b"%d" % rng.randrange(50), lambda size=size: made.append(size) or payloads(size))
        held = sum(len(p.data) for entry in cache._entries.values() for p in entry)
        assert cache.num_bytes == held <= 1000, step
    assert len(made) < 2000


def test_too_large_for_the_cache_is_handed_through_and_throws_nothing_out() -> None:
    cache = PixelCache(500)
    cache.get_or_make(b"a", lambda: payloads(300))
    assert len(cache.get_or_make(b"b", lambda: payloads(900))[0].data) == 900
    cache.get_or_make(b"a", refuse)
    assert cache.num_bytes == 300


def test_zero_bytes_turn_it_off() -> None:
    cache = PixelCache(0)
    assert cache.get_or_make(b"a", lambda: payloads(3)) is not cache.get_or_make(b"a", lambda: payloads(3))
    assert cache.num_bytes == 0


async def test_one_thread_makes_what_many_want_and_no_other_waits() -> None:
    cache, entered, gate = PixelCache(1000), threading.Event(), threading.Event()

    def make() -> Payloads:
        entered.set()
        gate.wait(30)
        return payloads(30)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(cache.get_or_make, b"a", make)
        assert entered.wait(30) and cache.get(b"a") is None
        promises = [cache.get_or_make(b"a", refuse) for _ in range(8)]
        assert all(isinstance(promise, Future) for promise in promises)
        waiting = [asyncio.create_task(await_payloads(promise)) for promise in promises]
        await asyncio.sleep(0)
        waiting[0].cancel()  # takes it from nobody
        await asyncio.gather(waiting[0], return_exceptions=True)
        gate.set()
        results = await asyncio.gather(*waiting[1:])
    assert all(result is made.result() for result in [*results, cache.get(b"a")])


async def test_a_failure_reaches_everybody_who_waits_and_is_not_kept() -> None:
    cache, entered, gate = PixelCache(1000), threading.Event(), threading.Event()

    def fail() -> Payloads:
        entered.set()
        gate.wait(30)
        raise InvalidImage("the image is broken")

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(cache.get_or_make, b"a", fail)
        assert entered.wait(30)
        waiting = [asyncio.create_task(await_payloads(cache.get_or_make(b"a", refuse))) for _ in range(3)]
        gate.set()
        errors = [*await asyncio.gather(*waiting, return_exceptions=True), made.exception()]
    assert all(isinstance(error, InvalidImage) and error.message == "the image is broken" for error in errors)
    # Each request writes its own parameter into the error.
    assert len({id(error) for error in errors}) == 4
    assert len(cache.get_or_make(b"a", lambda: payloads(3))) == 1


def test_a_failure_that_is_no_users_business_is_raised_as_it_is() -> None:
    cache = PixelCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make(b"a", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert cache._making == {}


def test_two_keys_are_made_at_the_same_time() -> None:
    cache, together = PixelCache(1000), threading.Barrier(2)

    def make() -> Payloads:
        together.wait(30)
        return payloads(3)

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(cache.get_or_make, key, make) for key in (b"a", b"b")]
        assert [len(answer.result()) for answer in answers] == [1, 1]
