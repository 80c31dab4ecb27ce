"""A CUDA device: copies there and back, lanes and their streams, graphs, memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.cuda.copies import MAX_STAGED, NUM_BUFFERS
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.device import Lane
from hydra_engine.core.pools import PoolExport, PoolKind, PoolLayout
from hydra_engine.errors import ResourceError, TransferError

pytestmark = [pytest.mark.cuda, pytest.mark.alone]
MIB = 1 << 20


@pytest.fixture
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


@pytest.fixture
def lane(device: CudaDevice) -> Iterator[Lane]:
    lane = device.lane("language")
    yield lane
    lane.close()


def wait(lane: Lane, job: Callable[[], None]) -> None:
    """Raises what the job raises."""
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        done.set()

    lane.submit(run)
    assert done.wait(60)
    if errors:
        raise errors[0]


def add_one(total: Tensor) -> None:
    total.add_(1)


def busy(cuda: torch.device, milliseconds: int) -> None:
    """Keeps the current stream at work on a single block."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles


ARRAYS = [
    np.arange(7, dtype=np.int32),
    np.array([True, False, True]),
    np.zeros((0, 3), dtype=np.int64),
    np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
    np.array(-5, dtype=np.int64),
    np.arange(1001, dtype=np.uint8),
    np.arange(5, dtype=np.float16),
]


def test_what_is_sent_arrives_with_its_shape_and_type(device: CudaDevice, cuda: torch.device) -> None:
    for array in ARRAYS:
        array.flags.writeable = False
    for arrays in (ARRAYS, ARRAYS[:1], ARRAYS[2:3], [], ARRAYS * 30):
        sent = device.send(arrays)
        assert len(sent) == len(arrays)
        for array, tensor in zip(arrays, sent, strict=True):
            assert tensor.device == cuda and tuple(tensor.shape) == array.shape and tensor.is_contiguous()
            assert np.array_equal(tensor.cpu().numpy(), array) and tensor.cpu().numpy().dtype == array.dtype
    assert all(tensor.data_ptr() % 16 == 0 for tensor in device.send(ARRAYS) if tensor.numel())


def test_what_is_sent_behind_long_work_is_not_overtaken(device: CudaDevice, cuda: torch.device) -> None:
    """Sends go on in order when there are more of them than buffers, while nothing has been copied yet."""
    busy(cuda, 50)
    sent = [device.send([np.full(1000 + i, i)])[0] for i in range(NUM_BUFFERS - 1)]
    sent += [device.send([np.full(1000 + i, i)])[0] for i in range(NUM_BUFFERS - 1, 3 * NUM_BUFFERS)]
    assert [int(tensor.min()) for tensor in sent] == [int(tensor.max()) for tensor in sent] == list(range(len(sent)))


def test_what_is_too_large_to_stage_is_sent_all_the_same(device: CudaDevice) -> None:
    array = np.arange(MAX_STAGED // 8 + 1)
    (sent,) = device.send([array])
    assert int(sent[-1]) == len(array) - 1 and sent.shape == array.shape


def test_fetched_tensors_may_be_overwritten_at_once(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    fetches = []

    def job() -> None:
        value, flags = torch.arange(100_000, device=cuda), torch.ones(3, dtype=torch.bool, device=cuda)
        busy(cuda, 20)
        fetches.append(device.fetch((value, flags, value[::2], value[:0])))
        value.zero_()
        flags.zero_()

    wait(lane, job)
    for _ in range(2):  # may be asked again, from any thread
        value, flags, half, none = fetches[0].result()
        assert np.array_equal(value, np.arange(100_000)) and flags.tolist() == [True] * 3
        assert np.array_equal(half, value[::2]) and none.shape == (0,)
    assert device.fetch(()).result() == ()
    with pytest.raises(ValueError, match=r"tensors\[0\]: expected a type that numpy has, got .*bfloat16"):
        device.fetch([torch.ones(1, dtype=torch.bfloat16, device=cuda)])


# ---- lanes


def test_a_lane_has_its_stream_and_its_device(device: CudaDevice, cuda: torch.device) -> None:
    lanes = {name: device.lane(name) for name in ("language", "vision", "transfer")}
    streams: dict[str, torch.cuda.Stream] = {}
    for name, lane in lanes.items():
        wait(lane, lambda name=name: streams.update({name: torch.cuda.current_stream(cuda)}))  # type: ignore[misc]
        lane.close()
    assert len({stream.cuda_stream for stream in streams.values()}) == 3
    assert torch.cuda.default_stream(cuda) not in streams.values()
    assert streams["language"].priority < streams["vision"].priority == streams["transfer"].priority
    assert torch.cuda.current_stream(cuda) == torch.cuda.default_stream(cuda)


def test_a_job_begins_behind_what_its_submitter_launched(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    for _ in range(3):
        value = torch.zeros(1000, device=cuda)
        busy(cuda, 20)
        value.add_(1)
        seen: list[Tensor] = []
        wait(lane, lambda value=value, seen=seen: seen.append(value.clone()))  # type: ignore[misc]
        wait(lane, device.finish)
        assert bool((seen[0] == 1).all())


def test_two_lanes_run_side_by_side_on_the_device(device: CudaDevice, cuda: torch.device) -> None:
    """Reads the device's clock: both jobs begin before the other has ended."""
    marks: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
    lanes = {name: device.lane(name) for name in ("language", "vision")}
    together = threading.Barrier(2, timeout=30)

    def job(name: str) -> None:
        marks[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        together.wait()
        marks[name][0].record()
        busy(cuda, 100)
        marks[name][1].record()

    for name, lane in lanes.items():
        lane.submit(lambda name=name: job(name))  # type: ignore[misc]
    for lane in lanes.values():
        lane.close()
    first, second = marks["language"], marks["vision"]
    assert first[0].elapsed_time(second[1]) > 0 and second[0].elapsed_time(first[1]) > 0
    overlap = min(first[0].elapsed_time(first[1]), first[0].elapsed_time(second[1]), second[0].elapsed_time(first[1]))
    assert overlap > 20  # milliseconds, of about 100


def test_closing_a_lane_waits_for_its_stream(device: CudaDevice, cuda: torch.device) -> None:
    lane = device.lane("vision")
    ended: list[torch.cuda.Event] = []

    def job() -> None:
        busy(cuda, 50)
        ended.append(torch.cuda.Event())
        ended[0].record()

    lane.submit(job)
    lane.close()
    assert ended[0].query()


# ---- graphs


def test_a_captured_launch_is_repeated_on_its_memory(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    value, total = torch.zeros(64, device=cuda), torch.zeros(64, device=cuda)
    calls: list[int] = []

    def launch() -> None:
        calls.append(1)
        total.add_(value * 2)

    graphs = []
    wait(lane, lambda: graphs.append(device.capture(launch)))
    assert len(calls) == 2 and graphs[0].num_bytes >= 0

    def replay() -> None:
        for number in (1.0, 10.0):
            value.fill_(number)
            graphs[0].replay()
        device.finish()

    wait(lane, replay)
    assert len(calls) == 2 and total.tolist() == [22.0] * 64  # the runs of the capture added nothing times two


def test_graphs_of_a_lane_share_memory(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    source = torch.ones(32 * MIB, device=cuda)  # 128 MiB

    def launch() -> None:
        (source + 1).sum()

    graphs = []
    for _ in range(3):
        wait(lane, lambda: graphs.append(device.capture(launch)))
    assert graphs[0].num_bytes >= 128 * MIB
    assert sum(graph.num_bytes for graph in graphs[1:]) < 64 * MIB


def test_another_lane_works_on_while_one_captures(device: CudaDevice, cuda: torch.device, lane: Lane) -> None:
    """The other lane allocates, copies and waits, none of which the capture may notice."""
    other, stop, rounds = device.lane("vision"), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            sent = device.send([np.arange(10_000)])[0]
            fetched = device.fetch([torch.cat([sent] * (1 + len(rounds) % 50))])
            rounds.append(int(fetched.result()[0][-1]))

    other.submit(work)
    total = torch.zeros(1000, device=cuda)
    graphs = []
    try:
        for _ in range(5):
            wait(lane, lambda: graphs.append(device.capture(partial(add_one, total))))
    finally:
        stop.set()
        other.close()
    assert rounds and set(rounds) == {9_999}
    for graph in graphs:
        wait(lane, graph.replay)
    wait(lane, device.finish)
    assert total[0] == 15, "each capture computes twice"


def test_outside_a_lane_a_capture_takes_a_stream_of_its_own(device: CudaDevice, cuda: torch.device) -> None:
    total = torch.zeros(10, device=cuda)
    graph = device.capture(partial(add_one, total))
    graph.replay()
    device.finish()
    assert total.tolist() == [3.0] * 10


def test_graphs_of_lanes_and_of_other_threads_live_beside_each_other(
    device: CudaDevice, cuda: torch.device, lane: Lane
) -> None:
    """A lane is in inference mode and this thread is not; torch keeps one set of tensors for all graphs."""
    totals, graphs = [torch.zeros(10, device=cuda) for _ in range(2)], []
    wait(lane, lambda: graphs.append(device.capture(partial(add_one, totals[0]))))
    graphs.append(device.capture(partial(add_one, totals[1])))
    for graph in graphs:
        graph.replay()
    device.finish()
    assert [total[0].item() for total in totals] == [3.0, 3.0]


# ---- what is had from no process afterwards, so each is one of its own


def said_by(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("said:")]


_UNCAPTURABLE = """
import torch
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.errors import BackendError
device, total = CudaDevice(0, 1), torch.zeros(10, device="cuda:0")
torch.cuda.synchronize()
torch.cuda.set_stream(torch.cuda.Stream())
graphs = [device.capture(lambda: total.add_(1))]
try:
    device.capture(lambda: total.sum().item())
except BackendError as error:
    print("said:", error)
graphs.append(device.capture(lambda: total.add_(1)))
for graph in graphs:
    graph.replay()
print("said:", total[0].item())
"""


def test_a_launch_that_cannot_be_captured_spoils_no_other_one(cuda: torch.device) -> None:
    refused, counted = said_by(_UNCAPTURABLE)
    assert "the device cuda:0 failed" in refused and counted == "said: 6.0"


_LARGE = """
import torch
from hydra_engine.backend.cuda.device import CudaDevice
device, total, calls = CudaDevice(0, 1), torch.zeros(10, device="cuda:0"), []
torch.cuda.synchronize()
torch.cuda.set_stream(torch.cuda.Stream())
graphs = [device.capture(lambda: total.add_(1))]
def launch():
    calls.append(total.add_(1))
    if len(calls) >= {fails_at}:
        torch.empty(2 * device.memory()[1], dtype=torch.uint8, device="cuda:0")
try:
    device.capture(launch)
except torch.OutOfMemoryError as error:
    print("said:", type(error).__name__)
graphs.append(device.capture(lambda: total.add_(1)))
for graph in graphs:
    graph.replay()
print("said:", total[0].item())
"""


@pytest.mark.parametrize("fails_at", [1, 2], ids=["before it records", "while it records"])
def test_a_capture_that_runs_out_of_memory_says_so_and_spoils_no_other_one(cuda: torch.device, fails_at: int) -> None:
    refused, counted = said_by(_LARGE.format(fails_at=fails_at))
    assert refused == "said: OutOfMemoryError" and counted == "said: 7.0"


_FAILING = """
import torch
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.errors import BackendError
device = CudaDevice(0, 1)
device.finish()
torch.zeros(1, device="cuda:0")[torch.tensor([1 << 20], device="cuda:0")]
for _ in range(2):
    try:
        device.finish()
    except BackendError as error:
        print("said:", error, flush=True)
import os
os._exit(0)
"""


def test_a_device_that_failed_says_so_whenever_it_is_asked(cuda: torch.device) -> None:
    said = said_by(_FAILING)
    assert len(said) == 2 and all("the device cuda:0 failed: CUDA error" in line for line in said)


# ---- memory, pools, places


def test_memory_comes_back(device: CudaDevice, cuda: torch.device) -> None:
    device.trim()
    free, total = device.memory()
    assert 0 < free <= total
    taken = torch.empty(256 * MIB, dtype=torch.uint8, device=cuda)
    assert device.memory()[0] <= free - 256 * MIB
    del taken
    gc.collect()
    assert device.memory()[0] >= free - 32 * MIB  # torch has it and gives it to nobody
    device.trim()
    assert torch.cuda.mem_get_info(cuda)[0] >= free - 32 * MIB


def test_peak_bytes_are_those_of_the_job(device: CudaDevice, cuda: torch.device) -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=cuda)

    def job() -> None:
        for _ in range(3):
            torch.empty(100 * MIB, dtype=torch.uint8, device=cuda)

    peak = device.peak_bytes(job)
    assert peak is not None and 100 * MIB <= peak < 250 * MIB
    assert (device.peak_bytes(lambda: None) or 0) < MIB
    assert kept.shape[0] == 64 * MIB


def test_pools_are_full_of_zeros_and_refused_where_they_are_not_what_was_said(device: CudaDevice) -> None:
    pool = device.share(1000)
    assert not pool.tensor().any() and pool.transport == "cuda-ipc"
    layout = PoolLayout(PoolKind.KV, 1, (1, 2, 1, 1, 4), "float32", 32)
    with pytest.raises(TransferError, match="of this process"):
        device.open_peer(PoolExport(layout, "cuda-ipc", pool.num_bytes, -1, pool.handle), -1)
    with pytest.raises(TransferError, match="'other' cannot be mapped by a GPU"):
        device.open_peer(PoolExport(layout, "other", 32), 3)
    with pytest.raises(ResourceError, match="lower --kv-cache-gib"):
        device.share(1 << 50)


def test_the_device_is_one_partition(device: CudaDevice) -> None:
    assert (device.partitions.count, device.partitions.current(), device.asynchronous) == (1, 0, True)
    with device.partitions.use(0):
        assert device.partitions.current() == 0
    with pytest.raises(ValueError, match="partition: expected 0"):
        device.partitions.use(1)
