"""csrc/cuda/device.cpp: the probe, errors, the device of a call, faults. The runtime fails where a test says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.native.host_cuda.conftest import Launch

OUT_OF_MEMORY, INSUFFICIENT_DRIVER, NO_DEVICE, UNKNOWN = 2, 35, 100, 999
FLOAT32 = 0


def small_cache(host: Any, device: int = 0) -> tuple[torch.Tensor, Any]:
    """Two blocks of four slots with rows of eight floats."""
    data = torch.full((2, 1, 1, 4, 1, 8), float("nan"))
    return data, host.CudaCacheDesc(data.data_ptr(), 2, 1, 1, 4, 1, 8, FLOAT32, device)


def write(desc: Any, rows: torch.Tensor, slots: torch.Tensor, stream: int = 0) -> None:
    desc.write(stream, 0, rows.data_ptr(), 8, 0, 0, slots.data_ptr(), len(slots))


# The first of this file: later the word is there.
def test_a_device_without_memory_for_its_faults_is_tried_again(host: Any) -> None:
    host.make_fail("cudaHostAlloc", OUT_OF_MEMORY)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"CUDA error 2 \(cudaErrorMemoryAllocation.*cudaHostAlloc.*device\.cpp:\d"
        ):
            host.cuda_check_faults(0)
    host.make_fail("cudaHostAlloc", 0)
    host.cuda_check_faults(0)


@pytest.mark.parametrize(
    ("call", "error", "status", "problem"),
    [
        ("none", 0, "ok", "^$"),
        ("dlopen", UNKNOWN, "no_driver", r"libcuda\.so\.1 cannot be loaded"),
        ("cudaGetDeviceCount", INSUFFICIENT_DRIVER, "driver_too_old", "runs CUDA up to 13.0, .* with 13.0"),
        ("cudaGetDeviceCount", NO_DEVICE, "no_device", "shows no device"),
        ("cudaGetDeviceCount", UNKNOWN, "error", "does not start"),
        ("cudaGetDeviceProperties", UNKNOWN, "no_code", "built for sm_80 sm_90: build it again"),
    ],
)
def test_the_probe_says_what_is_wrong_and_leaves_no_error(
    host: Any, call: str, error: int, status: str, problem: str
) -> None:
    host.make_fail(call, error)
    found = host.cuda_probe()
    host.make_fail(call, 0)
    assert found["status"] == status and re.search(problem, found["problem"])
    _data, desc = small_cache(host)
    write(desc, torch.zeros(1, 8), torch.tensor([0]))


def test_calls_name_a_device_that_is_there(host: Any) -> None:
    for device in (-2, 2, 64):
        with pytest.raises(ValueError, match="device: expected 0 to"):
            small_cache(host, device)
    with pytest.raises(ValueError, match="cache: expected the address of device memory"):
        host.CudaCacheDesc(0, 2, 1, 1, 4, 1, 8, FLOAT32, 0)


def test_a_call_runs_on_its_device_and_comes_back(host: Any, launches: Callable[[], list[Launch]]) -> None:
    data, desc = small_cache(host, 1)
    stream, wrong = host.new_stream(1, False), host.new_stream(0, False)
    slots = torch.tensor([6])
    write(desc, torch.ones(1, 8), slots, stream)
    assert [(launch.device, launch.stream) for launch in launches()] == [(1, stream)]
    with pytest.raises(RuntimeError, match=r"CUDA error 400 .* in move_rows \[.*rows\.cu:\d+\]"):
        write(desc, torch.ones(1, 8), slots, wrong)
    assert host.current_device() == 0 and int(data.isfinite().sum()) == 8
    write(desc, torch.ones(1, 8), slots, stream)  # the error was taken along
    host.make_fail("cudaSetDevice", UNKNOWN)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice\(device\)"):
        write(desc, torch.ones(1, 8), slots, stream)
    host.make_fail("cudaSetDevice", 0)
    for each in (stream, wrong):
        host.end_stream(each)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_blocks_are_copied_by_the_device_that_they_go_to(
    host: Any, launches: Callable[[], list[Launch]], source: int, target: int
) -> None:
    (theirs, from_desc), (ours, to_desc) = small_cache(host, source), small_cache(host, target)
    theirs[1] = 7
    pairs, stream = torch.tensor([[1, 0]]), host.new_stream(target, False)
    from_desc.copy_to(stream, to_desc, pairs.data_ptr(), 1)
    host.end_stream(stream)
    assert [(launch.device, launch.stream) for launch in launches()] == [(target, stream)]
    assert ours[0].eq(7).all() and ours[1].isnan().all() and host.current_device() == 0


@pytest.mark.parametrize("to_host", [True, False])
def test_blocks_cross_the_bus_in_runs(host: Any, launches: Callable[[], list[Launch]], to_host: bool) -> None:
    """Blocks that follow each other on both sides are one copy, on the device's stream."""
    device, elsewhere = torch.arange(6 * 32.0).view(6, 32), torch.full((8, 32), float("nan"))
    descs = [
        host.CudaCacheDesc(data.data_ptr(), len(data), 1, 1, 4, 1, 8, FLOAT32, at)
        for data, at in ((device, 1 if to_host else -1), (elsewhere, -1 if to_host else 1))
    ]
    pairs, stream = torch.tensor([[0, 4], [1, 5], [2, 6], [4, 7], [5, 0], [3, 1]]), host.new_stream(1, False)
    for count in (0, 6):
        descs[0].copy_to(stream, descs[1], pairs.data_ptr(), count)
    host.end_stream(stream)
    # (4, 7) follows neither what is before it nor what is behind it.
    assert [(seen.device, seen.stream, seen.widest) for seen in launches()] == [
        (1, stream, count * 128) for count in (3, 1, 1, 1)
    ]
    for source, target in pairs.tolist():
        assert torch.equal(elsewhere[target], device[source])
    assert elsewhere[2:4].isnan().all() and host.current_device() == 0
    pairs[5] = torch.tensor([3, 8])
    with pytest.raises(ValueError, match=r"pairs\[:, 1\]: expected 0 to 7, got 8"):
        descs[0].copy_to(0, descs[1], pairs[5:].data_ptr(), 1)


def test_a_cache_in_host_memory_is_for_copies_alone(host: Any) -> None:
    data = torch.zeros(2, 32)
    desc, pairs = host.CudaCacheDesc(data.data_ptr(), 2, 1, 1, 4, 1, 8, FLOAT32, -1), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="device: expected 0 to"):
        write(desc, torch.ones(1, 8), torch.tensor([0]))
    with pytest.raises(ValueError, match="expected one of the caches on a device"):
        desc.copy_to(0, desc, pairs.data_ptr(), 1)
    assert not data.any()


def test_memory_is_pinned_once_and_a_refusal_leaves_no_error(host: Any) -> None:
    memory = torch.zeros(64)
    host.cuda_pin(memory.data_ptr(), memory.nbytes, 1)
    with pytest.raises(RuntimeError, match=r"CUDA error 1 .*cudaHostRegister.*host\.cpp:\d"):
        host.cuda_pin(memory.data_ptr(), memory.nbytes, 0)
    host.cuda_unpin(memory.data_ptr(), 1)
    with pytest.raises(RuntimeError, match="cudaHostUnregister"):
        host.cuda_unpin(memory.data_ptr(), 1)
    _data, desc = small_cache(host)
    write(desc, torch.zeros(1, 8), torch.tensor([0]))
    assert host.current_device() == 0


def test_the_probe_knows_which_devices_processes_share(host: Any) -> None:
    assert [device["has_mps"] for device in host.cuda_probe()["devices"]] == [False, True]
    host.make_fail("cudaDeviceGetAttribute", UNKNOWN)  # a driver that does not know the question
    assert not any(device["has_mps"] for device in host.cuda_probe()["devices"])
    host.make_fail("cudaDeviceGetAttribute", 0)
    _data, desc = small_cache(host)
    write(desc, torch.zeros(1, 8), torch.tensor([0]))


def test_faults_belong_to_the_device_that_met_them(host: Any) -> None:
    host.set_cuda_synchronous(False)
    (_first, first), (_second, second) = small_cache(host, 0), small_cache(host, 1)
    write(second, torch.ones(3, 8), torch.tensor([0, 1, 8]))
    write(first, torch.ones(1, 8), torch.tensor([0]))
    host.cuda_check_faults(0)
    with pytest.raises(ValueError, match="slots: a kernel on device 1 skipped index 2,"):
        host.cuda_check_faults(1)
    host.cuda_check_faults(1)


def test_a_synchronous_call_raises_what_its_own_kernel_met_unless_it_is_captured(host: Any) -> None:
    _data, desc = small_cache(host)
    with pytest.raises(ValueError, match=r"slots: .*index 1,"):
        write(desc, torch.ones(2, 8), torch.tensor([0, 8]))
    captured = host.new_stream(0, True)
    write(desc, torch.ones(2, 8), torch.tensor([0, 8]), captured)
    with pytest.raises(ValueError, match=r"slots: .*index 1,"):
        host.cuda_check_faults(0)
    host.end_stream(captured)
