"""The gate on a CUDA device: marks that tell its time, captures in pieces, and how much runs beside a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.device import Cut, Graph, Lane
from hydra_engine.clock import MonotonicClock
from hydra_engine.worker.vision.gate import DeviceGate
from tests.gpu.test_device import busy, wait

pytestmark = [pytest.mark.cuda, pytest.mark.alone]


@pytest.fixture
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


@pytest.fixture
def lane(device: CudaDevice) -> Iterator[Lane]:
    lane = device.lane("vision")
    yield lane
    lane.close()


def test_marks_tell_the_time_of_the_device(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    found: list[float] = []

    def job() -> None:
        marks = [device.mark()]
        for milliseconds in (5, 20):
            busy(cuda, milliseconds)
            marks.append(device.mark())
        assert not marks[-1].is_done()
        marks[-1].wait()
        assert all(mark.is_done() for mark in marks)
        found.extend(later.seconds_since(earlier) for earlier, later in pairwise(marks))

    wait(lane, job)
    short_s, long_s = found
    assert 1e-3 < short_s < 20e-3 and 3 < long_s / short_s < 5


def test_a_capture_in_pieces_computes_what_one_capture_does(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    """The next piece reads what one has made, and memory that was let go is used again."""
    source, results = torch.zeros((256, 256), device=cuda), [torch.zeros((256, 256), device=cuda) for _ in range(2)]
    weight = torch.randn((256, 256), device=cuda) / 16

    def launch(cut: Cut, result: Tensor) -> None:
        x = source
        for layer in range(6):
            if layer:
                cut()
            x = torch.tanh(x @ weight) + x
        result.copy_(x)

    def job() -> None:
        pieces: tuple[Graph, ...] = device.capture_pieces(lambda cut: launch(cut, results[0]))
        whole = device.capture(lambda: launch(lambda: None, results[1]))
        assert len(pieces) == 6
        for seed in range(3):
            source.copy_(torch.randn((256, 256), generator=torch.Generator().manual_seed(seed)))
            for graph in (*pieces, whole):
                graph.replay()
            device.finish()
            assert torch.equal(*results) and bool(results[0].any())

    wait(lane, job)


@pytest.mark.parametrize("allowance_s", [0.0, 10e-3])
def test_what_runs_beside_a_step_is_bounded(
    device: CudaDevice, cuda: torch.device, lane: Lane, allowance_s: float
) -> None:
    """Sixty pieces of about 2 ms, each on a single block, beside steps of 30 ms that launch nothing."""
    gate, piece_s = DeviceGate(MonotonicClock(), device.mark, paced=True), list[float]()

    def encode() -> None:
        gate.enter(4096)
        for index in range(60):
            if index:
                gate.checkpoint()
            busy(cuda, 2)
        gate.leave()

    def timed() -> None:
        busy(cuda, 2)
        begun = device.mark()
        busy(cuda, 2)
        ended = device.mark()
        ended.wait()
        piece_s.append(ended.seconds_since(begun))

    wait(lane, timed)
    done = threading.Event()
    lane.submit(encode)
    lane.submit(done.set)
    told = list[float]()
    while not done.wait(1e-3) and len(told) < 200:
        gate.begin(allowance_s)
        threading.Event().wait(30e-3)
        told.append(gate.end())
    gate.close()
    max_s = max(2 * piece_s[0], allowance_s + piece_s[0])
    beside = told[1:-1]  # of the first pieces nothing is known
    assert len(beside) > 3 and max(beside) <= 1.2 * max_s + 1e-3 and min(beside) > 0
