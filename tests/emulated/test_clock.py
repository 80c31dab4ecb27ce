"""The clock of an emulated device: what its figures say, in the order of virtual times, whatever real time passes."""

from __future__ import annotations

import json
import time as real
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bench
from hydra_engine.backend.select import create_backend
from tests.emulated.clock import Clock, Line, Machine, Mark, Work
from tests.emulated.virtual_time import Stopped, VirtualTime

MACHINE = Machine()
READ = Work(num_bytes=4.3e8)  # 100 us
PRODUCT = Work(flop=7.9e10, num_bytes=1e6)  # 100 us


def waited(clock: Clock, line: Line) -> float:
    """Seconds at which the device has done all that was launched there."""
    mark = clock.record(line)
    clock.wait(mark)
    assert mark.done_s is not None and clock.now() >= mark.done_s
    return mark.done_s


def test_a_thread_that_waits_goes_on_when_the_device_has_come_there() -> None:
    clock = Clock()
    line = clock.line()
    with clock.time:
        clock.launch(line, READ)
        clock.launch(line, PRODUCT)
        assert clock.now() == pytest.approx(2 * MACHINE.launch_s)
        assert not clock.is_done(clock.record(line))
        end_s = waited(clock, line)
        assert end_s == pytest.approx(MACHINE.launch_s + 200e-6 + 2 * MACHINE.gap_s)
        assert clock.now() == pytest.approx(end_s + MACHINE.wake_s)
        clock.replay(line, [READ] * 10)
        assert waited(clock, line) == pytest.approx(
            end_s + MACHINE.wake_s + MACHINE.replay_s + MACHINE.graph_s + 10 * (1e-4 + 1.3e-6)
        )
        assert len(line.spans) == 12


def beside(multiprocessors: tuple[int, int], *works: list[Work]) -> list[float]:
    """Seconds at which each of two streams has done its works, launched at once."""
    clock = Clock()
    with clock.time:
        lines = [clock.line(count) for count in multiprocessors]
        marks = list[Mark]()
        for line, launched in zip(lines, works, strict=True):
            clock.replay(line, launched)
            marks.append(clock.record(line))
        for mark in marks:
            clock.wait(mark)
    return [mark.done_s or 0.0 for mark in marks]


def test_streams_of_the_whole_device_slow_each_other() -> None:
    """Products take twice as long; small reads wait for blocks of products, and are not slowed beyond that by much."""
    assert beside((0, 0), [PRODUCT] * 10, [PRODUCT] * 10)[1] == pytest.approx(2e-3, rel=0.15)
    assert beside((0, 0), [PRODUCT], [])[0] == pytest.approx(126.3e-6)
    small = [Work(num_bytes=4.3e7)] * 100  # 10 us each
    alone, slowed = beside((0, 0), [], small)[1], beside((0, 0), [PRODUCT] * 100, small)[1]
    assert alone == pytest.approx(100 * 11.3e-6, rel=0.05) and 2.5 * alone < slowed < 3.5 * alone


def test_streams_with_multiprocessors_of_their_own_share_bandwidth_alone() -> None:
    small = [Work(num_bytes=4.3e7)] * 100
    products, reads = beside((100, 32), [PRODUCT] * 50, small)
    assert products == pytest.approx(50 * (1e-4 * 1.32 + 1.3e-6), rel=0.05)
    assert reads == pytest.approx(100 * (10e-6 / (32 / 132 / 0.6) + 1.3e-6), rel=0.05)
    together = beside((66, 66), [READ] * 10, [READ] * 10)
    assert together == pytest.approx([2e-3, 2e-3], rel=0.05), "the bandwidth is one"


RESULTS = Path(bench.__file__).parent / "results"
SMALL_STEP = [(1e-6, 7 * 32)]  # of 8 rows: seven kernels a layer, about alike


def measured(run: str, what: str) -> dict[str, Any]:
    rows = json.loads((RESULTS / run / "colocate-llava-1.5-7b.json").read_text())["rows"]
    (row,) = (row for row in rows if row["what"] == f"llava-1.5-7b {what}, beside, two streams")
    return row


def profiled(what: str) -> list[tuple[float, int]]:
    """Seconds and number of each kernel."""
    rows = json.loads((RESULTS / "h200" / "profile-llava-1.5-7b.json").read_text())["rows"]
    (row,) = (row for row in rows if row["what"] == f"llava-1.5-7b {what}")
    return [(kernel["us"] * 1e-6 / kernel["count"], int(kernel["count"])) for kernel in row["kernels"]]


def kernels(about: list[tuple[float, int]], layers: int, alone_s: float, work: Callable[[float], Work]) -> list[Work]:
    """Layer by layer, as long together as they were measured to be."""
    seconds = [
        each_s
        for layer in range(layers)
        for each_s, count in about
        for _ in range(count * (layer + 1) // layers - count * layer // layers)
    ]
    scale = (alone_s - len(seconds) * MACHINE.gap_s) / sum(seconds)
    return [work(each_s * scale) for each_s in seconds]


def slowed(firsts: list[Work], steps: list[Work], priority: int, machine: Machine = MACHINE) -> tuple[float, float]:
    """Slowdown of each of two streams while both run their works without end, against each alone."""
    clock, ended = Clock(machine), list[float]()

    def endless(line: Line, works: list[Work], most: float) -> Iterator[int]:
        marks = deque[Mark]()
        while len(marks) < most and not ended:
            clock.replay(line, works)
            marks.append(clock.record(line))
            if len(marks) > 1:
                clock.wait(marks[-2])
            yield len(marks) - 1
        clock.wait(marks[-1])

    def encode() -> None:
        list(endless(first, firsts, 6))
        ended.append(clock.now())

    with clock.time:
        first, second = clock.line(), clock.line(priority=priority)
        thread = clock.time.threading.Thread(target=encode, name="encode")
        thread.start()
        num_steps = list(endless(second, steps, inf))[-1]
        thread.join()
    alone = [sum(clock.machine.alone_s(work) + MACHINE.gap_s for work in works) for works in (firsts, steps)]
    return ended[0] / 6 / alone[0], ended[0] / num_steps / alone[1]


@pytest.mark.quick("8 rows")
@pytest.mark.parametrize(
    ("run", "what", "block_s"),
    [
        pytest.param("h200", "encode b=2 || decode B=8", MACHINE.block_s, id="8 rows"),
        pytest.param("h200-first", "encode b=2 || decode B=64", MACHINE.block_s, id="64 rows"),
        pytest.param("h200-first", "encode b=8 || decode B=64", MACHINE.block_s, id="64 rows, many pictures"),
        # Blocks of a prompt multiply four times as deep a matrix.
        pytest.param("h200-first", "prefill S=1024 || decode B=64", 2 * MACHINE.block_s, id="64 rows, a prompt"),
    ],
)
def test_a_stream_that_goes_first_slows_the_other_as_it_was_measured(run: str, what: str, block_s: float) -> None:
    """Compares with an H200, whose benchmark gave tokens the higher priority. Steps of 8 rows are kernels that begin
    early, those of 64 mostly products that do not."""
    found, few = measured(run, what), "B=8" in what
    step_s = found["peers"]["alone"]["median"]
    first_s = found["inputs"]["whole_s"] / found["inputs"]["firsts"] / found["first_slowdown"]
    name, layers = ("prefill S=1024", 32) if "prefill" in what else ("encode b=1", 23)
    firsts = kernels(profiled(name), layers, first_s, lambda s: Work(flop=s * MACHINE.flop_per_s))
    about = SMALL_STEP if few else profiled("decode B=64 KV=1024")
    steps = kernels(about, 32, step_s, lambda s: Work(num_bytes=s * MACHINE.bytes_per_s, is_dependent=few))
    first, second = slowed(firsts, steps, -1, replace(MACHINE, block_s=block_s))
    assert first == pytest.approx(found["first_slowdown"], rel=0.15)
    assert second == pytest.approx(found["decode_slowdown"], rel=0.1)
    equal, step = slowed(firsts, steps, 0, replace(MACHINE, block_s=block_s))
    assert 1.0 < equal < 2.0 and 1.0 < step < 1.9, "of which a part is expected, and nothing was measured"


def test_a_stream_waits_for_another_one() -> None:
    clock = Clock()
    with clock.time:
        first, second = clock.line(), clock.line()
        clock.replay(first, [READ])
        clock.order(second, clock.record(first))
        clock.replay(second, [READ])
        assert waited(clock, second) == pytest.approx(20e-6 + 2 * (1e-4 + 1.3e-6 + 5e-6))
        assert first.spans[0][1] == second.spans[0][0]


def pings(clock: Clock, pause: Callable[[int], None]) -> list[tuple[str, float]]:
    """Two threads that launch, wait and hand items on, and a third one that reads these."""
    time, log = clock.time, list[tuple[str, float]]()
    queue, lock = time.queue.SimpleQueue(), time.threading.Lock()

    def launches(name: str, line: Line, works: list[Work]) -> None:
        for count, work in enumerate(works):
            pause(count)
            clock.replay(line, [work])
            with lock:
                clock.wait(clock.record(line))
                log.append((name, time.now()))
            queue.put(name)

    def reads() -> None:
        for _ in range(20):
            log.append((f"got {queue.get()}", time.now()))

    with time:
        made = [
            time.threading.Thread(target=launches, args=("a", clock.line(), [READ] * 10), name="a"),
            time.threading.Thread(target=launches, args=("b", clock.line(), [PRODUCT] * 10), name="b"),
            time.threading.Thread(target=reads, name="reader"),
        ]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
    return log


def test_real_time_does_not_matter() -> None:
    calm = pings(Clock(), lambda count: None)
    assert len(calm) == 40 and [at_s for _, at_s in calm] == sorted(at_s for _, at_s in calm)
    assert pings(Clock(), lambda count: real.sleep(0.002 * (count % 3))) == calm


def test_conditions_and_events_wake_at_the_time_of_who_wakes() -> None:
    time = VirtualTime()
    with time:
        event, times = time.threading.Event(), list[float]()

        def waits() -> None:
            assert not event.wait(1.0)
            times.append(time.now())
            assert event.wait()
            times.append(time.now())

        thread = time.threading.Thread(target=waits)
        thread.start()
        time.spend(3.0)
        event.set()
        thread.join()
        assert times == [1.0, 3.0] and time.now() == 3.0


def test_threads_that_wait_for_each_other_say_so() -> None:
    time = VirtualTime()
    with pytest.raises(Stopped, match="all threads wait: main, other"), time:
        never = time.threading.Event()
        other = time.threading.Thread(target=never.wait, name="other")
        other.start()
        other.join()


def test_what_a_thread_raises_reaches_who_joins_it() -> None:
    time = VirtualTime()
    with time:
        thread = time.threading.Thread(target=lambda: [][0])  # type: ignore[arg-type, return-value]
        thread.start()
        with pytest.raises(IndexError):
            thread.join()


@pytest.mark.parametrize("captured", [False, True])
def test_lanes_and_events_of_the_engine_are_in_its_time(captured: bool) -> None:
    """Twenty times a product that reads and writes for 60 us, and a copy of its result for 40 us."""
    from tests.emulated.cuda import emulated_cuda  # torch learns of the device

    clock = Clock()
    found = list[float]()
    with clock.time, emulated_cuda(clock=clock) as streams:
        device = create_backend("cuda", torch.float32, threads=1).device
        lane = device.lane("vision")

        def job() -> None:
            streams.current.scale = 20e-6 * clock.machine.bytes_per_s / 16**2 / 4
            (weight,) = device.send((np.eye(16, dtype=np.float32),))
            result = weight.clone()

            def launch() -> None:
                for _ in range(20):
                    result.copy_(torch.mm(result, weight))

            run = device.capture(launch).replay if captured else launch
            device.finish()
            began_s = clock.now()
            run()
            found.append(clock.now() - began_s)
            assert device.fetch((result,)).result()[0].sum() == 16
            found.append(clock.now() - began_s)

        lane.submit(job)
        lane.close()
    launching_s, done_s = found
    machine = clock.machine
    assert launching_s == pytest.approx(machine.replay_s if captured else 40 * machine.launch_s)
    assert done_s > 20 * 100e-6
