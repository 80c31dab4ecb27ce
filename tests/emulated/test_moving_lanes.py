"""Lanes that move between parts of an emulated device, on its clock: whatever steps choose and however long jobs run,
no multiprocessor has kernels of both on parts at once, and no lane waits for the other one."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hydra_engine.backend.select import create_backend
from tests.emulated.clock import Clock, Machine
from tests.emulated.streams import Stream, Streams
from tests.emulated.tensors import DEVICE

KERNELS = 4


class Job(NamedTuple):
    pause_s: float  # before it is submitted
    alone_s: float
    chosen: int = 0  # partition, by a step


class Device:
    """Two lanes of a divided device, whose jobs launch kernels and wait for nothing."""

    def __init__(self, streams: Streams, clock: Clock, counts: tuple[int, ...]) -> None:
        self.clock = clock
        self.backend: Any = create_backend("cuda", torch.float32, threads=1, sm_split=counts).device
        self.parts: dict[str, list[Stream]] = self.backend._split._streams
        self.lanes = {name: self.backend.lane(name) for name in ("language", "vision")}
        self.data = {name: torch.zeros(1000, device=DEVICE) for name in self.lanes}
        self.places: dict[str, list[int]] = {name: [] for name in self.lanes}
        self.streams = streams
        streams.serving = True

    def submit(self, lane: str, job: Job) -> None:
        data = self.data[lane]

        def run() -> None:
            if lane == "language":
                self.backend.partitions.set_partition(job.chosen)
            self.places[lane].append(self.backend.partitions.current())
            self.launch(data, job.alone_s)

        self.lanes[lane].submit(run)

    def launch(self, data: Tensor, alone_s: float) -> None:
        stream = self.streams.current
        stream.scale = alone_s / KERNELS * self.clock.machine.bytes_per_s / (2 * data.numel() * data.element_size())
        for _ in range(KERNELS):
            data.add_(1)

    def run(self, *, steps: list[Job], encodes: list[Job]) -> None:
        def serve(lane: str, jobs: list[Job]) -> None:
            for job in jobs:
                self.clock.time.spend(job.pause_s)
                self.submit(lane, job)

        thread = self.clock.time.threading.Thread(target=serve, args=("vision", encodes), name="encodes")
        thread.start()
        serve("language", steps)
        thread.join()
        for lane in self.lanes.values():
            lane.close()

    def check(self) -> None:
        for own, other in product(self.parts["language"], self.parts["vision"]):
            if own.part & other.part:
                pairs = product(own.line.spans, other.line.spans)
                assert all(end <= first or last <= begin for (begin, end), (first, last) in pairs)
            assert other not in own.behind and own not in other.behind, "nobody waits for the other one"
        assert not self.streams.findings


@st.composite
def jobs(draw: st.DrawFn, *, longest_s: float, partitions: int = 0) -> list[Job]:
    seconds = st.floats(1e-4, longest_s)
    return draw(st.lists(st.builds(Job, seconds, seconds, st.integers(0, partitions)), min_size=1, max_size=8))


def moved(counts: tuple[int, ...], steps: list[Job], encodes: list[Job]) -> dict[str, list[int]]:
    from tests.emulated.cuda import emulated_cuda  # torch learns of the device

    clock = Clock(Machine())
    with clock.time, emulated_cuda(clock=clock) as streams:
        device = Device(streams, clock, counts)
        device.run(steps=steps, encodes=encodes)
        device.check()
    return device.places


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    counts=st.permutations([32, 64, 96]).map(tuple),
    steps=jobs(longest_s=3e-3, partitions=3),
    encodes=jobs(longest_s=6e-3),
)
def test_lanes_that_move_never_overlap(counts: tuple[int, ...], steps: list[Job], encodes: list[Job]) -> None:
    moved(counts, steps, encodes)


@pytest.mark.parametrize(("counts", "small", "large"), [((32, 64), 1, 2), ((64, 32), 2, 1)], ids=["rising", "falling"])
def test_each_lane_stays_off_what_the_other_one_still_has(counts: tuple[int, ...], small: int, large: int) -> None:
    """A step that chose more gets what the encode leaves, and an encode that follows a smaller step the rest of the
    larger one that still runs."""
    beside = [Job(1e-4, 1e-3, small), *[Job(1.5e-3, 1e-3, large)] * 3]
    places = moved(counts, beside, [Job(2e-4, 4e-3), Job(1e-4, 1e-3)])
    assert places["vision"][0] == small and places["language"][1:3] == [small, small]
    steps = [Job(1e-4, 1e-4, large), Job(1e-3, 8e-3, large), Job(1e-4, 1e-3, small)]
    places = moved(counts, steps, [Job(3e-4, 1e-3), Job(2e-3, 1e-3)])
    assert places == {"language": [0, large, small], "vision": [large, large]}
