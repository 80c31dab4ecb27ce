"""The emulated device itself: that it refuses, reports and spoils what it should."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.sm_split import SplitDevice
from hydra_engine.errors import BackendError
from tests.emulated.streams import Streams
from tests.emulated.tensors import DEVICE, OnDevice, Present


@pytest.fixture
def device(streams: Streams) -> CudaDevice:
    return CudaDevice(0, 1)


def in_lane(device: CudaDevice, job: Callable[[], object]) -> None:
    lane = device.lane("language")
    lane.submit(done(job))
    lane.close()


def done(job: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        job()

    return run


def test_a_divided_lane_knows_how_many_multiprocessors_it_gets(streams: Streams) -> None:
    device = CudaDevice(0, 1, split=SplitDevice(DEVICE, (2, 6), {}))
    found = []

    def look() -> None:
        for partition in range(3):
            with device.partitions.use(partition):
                found.append(device.partitions.num_sms(8))  # type: ignore[attr-defined]

    in_lane(device, look)
    assert found == [8, 2, 6] and device.partitions.num_sms(8) == 8  # type: ignore[attr-defined]


def test_lanes_that_share_multiprocessors_of_their_parts_are_found(streams: Streams) -> None:
    """Streams that come after the other, and streams of the whole device, are not findings."""
    parts = [streams.make(part=frozenset(part)) for part in ((0, 1), (1, 2), (2, 3), ())]
    first, beside, apart, whole = parts
    values = [torch.zeros(1, device=DEVICE) for _ in parts]
    streams.default.synchronize()
    streams.serving = True
    for stream, value in zip((first, apart, whole), values, strict=False):
        with streams.using(stream):
            value.add_(1)
    assert not streams.findings
    with streams.using(beside):
        values[3].add_(1)
    assert whats(streams) == ["shares multiprocessors with another lane's part"]
    streams.findings.clear()
    beside.wait_stream(first)
    apart.synchronize()
    with streams.using(beside):
        values[3].add_(1)
    assert not streams.findings


AFTERWARDS = """
import torch
from tests.emulated.cuda import emulated_cuda
with emulated_cuda(), torch.device("cpu", 0):
    torch.tensor(1.0)
with torch.device("meta"):
    print(torch.tensor(1.0).device)
"""


@pytest.mark.slow
def test_what_comes_behind_it_in_a_process_finds_torch_as_it_was() -> None:
    """Runs in a process of its own: torch lists its constructors once, and transformers loads models with that list."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "meta\n", done.stderr


def whats(streams: Streams) -> list[str]:
    return [finding.what for finding in streams.findings]


def test_ops_compute_on_the_device_and_numbers_come_back(streams: Streams) -> None:
    x = torch.arange(6, dtype=torch.float32, device=DEVICE).view(2, 3)
    assert isinstance(x, OnDevice) and x.device == DEVICE and x.is_cuda and not x.is_cpu
    x[:, 1:] += 1
    assert x.cpu().tolist() == [[0, 2, 3], [3, 5, 6]] and isinstance(x @ x.T, OnDevice)
    assert torch.equal(torch.tensor([1, 2], device=DEVICE).cpu(), torch.tensor([1, 2]))
    assert x.sum().item() == 19 and (x * torch.tensor(2.0)).sum().item() == 38
    with torch.inference_mode():
        assert torch.repeat_interleave(x, 2, dim=0).reshape(-1).cpu().shape == (12,)
    assert not streams.findings


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat((x, torch.ones(3))),
        lambda x: torch.where(x > 0, torch.ones(3), x),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: torch.ones(3).add_(x),
    ],
)
def test_tensors_of_the_host_are_refused(streams: Streams, mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, device=DEVICE))
    assert len(streams.findings) == 1


WAITS: list[Callable[[Tensor], object]] = [
    lambda x: x.cpu(),
    lambda x: x.tolist(),
    lambda x: bool(x.all()),
    lambda x: int(x[0]),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.__setitem__(x > 0, 1.0),
    lambda x: x[torch.tensor([0, 1])],
    lambda x: torch.ones(3).to(DEVICE),
    lambda x: torch.tensor([1], device=DEVICE),
    lambda x: x.repeat_interleave(x.to(torch.int64)),
    lambda x: torch.empty(3).copy_(x, non_blocking=True),
]


@pytest.mark.parametrize("wait", WAITS)
def test_what_waits_is_found_once_the_engine_serves(
    streams: Streams, device: CudaDevice, wait: Callable[[Tensor], object]
) -> None:
    x = torch.ones(3, device=DEVICE)
    in_lane(device, lambda: wait(x))
    assert not streams.findings
    streams.serving = True
    in_lane(device, lambda: wait(x))
    assert len(streams.findings) == 1 and whats(streams)[0].endswith("waits for the device")


def test_numpy_never_works(streams: Streams) -> None:
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(3, device=DEVICE).numpy()


def test_memory_holds_garbage_before_and_after(streams: Streams) -> None:
    assert torch.empty(3, device=DEVICE).isnan().all().item()
    assert torch.empty(3, device=DEVICE, dtype=torch.int32).min().item() > 1 << 30
    x = torch.ones(8, device=DEVICE)
    below = x.held
    del x
    assert (below.view(torch.uint8) == 0x7F).all()


def test_a_fetch_is_late_and_what_was_sent_is_its_own(streams: Streams, device: CudaDevice) -> None:
    array = np.arange(5)
    (sent,) = device.send((array,))
    array[:] = 0
    fetch = device.fetch((sent,))
    assert fetch._copies[0].tolist() != [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    sent.zero_()
    assert fetch.result()[0].tolist() == [0, 1, 2, 3, 4] and not streams.findings


def test_pinned_memory_that_is_used_again_too_early_is_found(streams: Streams, device: CudaDevice) -> None:
    from hydra_engine.backend.cuda.copies import Sender

    sender = Sender(DEVICE)
    for _ in range(9):
        sender.send((np.arange(3),))
    torch.ones(1, device=DEVICE).cpu()
    assert not streams.findings, "the ring waits"
    for number in range(9):
        for buffer in sender._ring:
            buffer.done = None
        sender.send((np.arange(3) + number,))
    torch.ones(1, device=DEVICE).cpu()
    assert set(whats(streams)) == {"pinned memory was changed before it was copied"}


def test_streams_need_an_order_between_them(streams: Streams) -> None:
    mine, yours = streams.make("mine"), streams.make("yours")
    with streams.using(mine):
        x = torch.ones(3, device=DEVICE)
    with streams.using(yours):
        y = x + 1
    assert whats(streams) == ["yours reads what mine may be using still"]
    streams.findings.clear()
    yours.wait_stream(mine)
    with streams.using(yours):
        x.add_(1)
    assert not streams.findings
    del x, y
    assert whats(streams) == ["memory of mine is freed while yours may be using it"]


def test_a_graph_repeats_ops_and_not_the_engine(streams: Streams, device: CudaDevice) -> None:
    calls = []
    x, table = torch.zeros(2, device=DEVICE), [torch.ones(2, device=DEVICE)]
    results: list[Tensor] = []

    def launch() -> None:
        calls.append(1)
        results[:] = [(x + table[0]) * len(calls)]

    graph = device.capture(launch)
    assert len(calls) == 2, "once to warm it up"
    for number in range(3):
        x.fill_(number)
        graph.replay()
        assert results[0].tolist() == [2.0 * (number + 1)] * 2
    assert len(calls) == 2
    table[0] = torch.zeros(2, device=DEVICE)  # what the graph reads is given away
    graph.replay()
    assert results[0].tolist() != [6.0] * 2


@pytest.mark.parametrize("wait", WAITS)
def test_nothing_waits_in_a_capture(streams: Streams, device: CudaDevice, wait: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(Exception, match="capturing"):
        device.capture(done(lambda: wait(x)))


def refused(device: CudaDevice) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(BackendError, match="is capturing"):
        device.capture(done(lambda: x.cpu()))


def test_a_capture_that_fails_leaves_nothing_behind(streams: Streams, device: CudaDevice) -> None:
    """Memory goes back, random numbers are drawn, graphs of before are replayed and others captured."""
    x = torch.zeros(2, device=DEVICE)
    earlier = device.capture(done(lambda: x.add_(1)))
    refused(device)
    assert streams.current is streams.default
    free, _ = device.memory()
    large = torch.zeros(1 << 20, device=DEVICE)
    del large
    device.trim()
    assert Present.reserved_bytes == Present.used_bytes and device.memory()[0] == free
    torch.rand(2, device=DEVICE)
    later = device.capture(done(lambda: x.add_(2)))
    x.zero_()
    earlier.replay()
    later.replay()
    assert x.tolist() == [3, 3]
