"""Lanes: order, threads of their own, inference mode, loud death, and a close that waits."""

import logging
import threading
import time

import pytest
import torch

from hydra_engine import _C
from hydra_engine.backend.cpu.device import CpuDevice, ThreadLane
from hydra_engine.backend.select import create_backend


def test_jobs_run_in_order_in_one_thread_and_close_waits_for_them() -> None:
    lane = ThreadLane("language", 1)
    seen: list[tuple[int, str]] = []
    for index in range(50):
        lane.submit(lambda index=index: seen.append((index, threading.current_thread().name)))  # type: ignore[misc]
    lane.submit(lambda: time.sleep(0.05))
    lane.submit(lambda: seen.append((50, threading.current_thread().name)))
    lane.close()
    assert seen == [(index, "lane-language") for index in range(51)]
    lane.close()


def test_a_closed_lane_refuses_jobs() -> None:
    lane = ThreadLane("vision", 1)
    lane.close()
    with pytest.raises(RuntimeError, match="lane vision is closed"):
        lane.submit(lambda: None)


def test_every_lane_sets_the_thread_counts_of_its_own_thread() -> None:
    main = (torch.get_num_threads(), _C.num_threads())
    device = create_backend("cpu", torch.float32, threads=1).device
    assert isinstance(device, CpuDevice)
    wide = CpuDevice(2, set_threads=device._set_threads)
    found: dict[str, tuple[int, int]] = {}
    for name, lane in (("one", device.lane("one")), ("two", wide.lane("two"))):
        lane.submit(lambda name=name: found.update({name: (torch.get_num_threads(), _C.num_threads())}))
        lane.close()
    assert found == {"one": (1, 1), "two": (2, 2)}
    assert (torch.get_num_threads(), _C.num_threads()) == (1, 1)
    torch.set_num_threads(main[0])
    _C.set_num_threads(main[1])


def test_jobs_run_in_inference_mode() -> None:
    lane = ThreadLane("language", 1)
    found: list[bool] = []
    lane.submit(lambda: found.append(torch.is_inference_mode_enabled()))
    lane.close()
    assert found == [True]


def test_two_lanes_run_at_the_same_time() -> None:
    lanes = [ThreadLane(name, 1) for name in ("vision", "language")]
    meeting = threading.Barrier(2, timeout=60)
    for lane in lanes:
        lane.submit(lambda: meeting.wait() and None)
    for lane in lanes:
        lane.close()
        assert lane.error is None


def test_a_job_that_raises_kills_the_lane_loudly(caplog: pytest.LogCaptureFixture) -> None:
    lane = ThreadLane("language", 1)
    after: list[int] = []

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    with caplog.at_level(logging.CRITICAL, logger="hydra_engine.backend.cpu.device"):
        lane.submit(broken)
        lane._thread.join(10)
    assert isinstance(lane.error, ZeroDivisionError)
    assert "lane language died" in caplog.text and "a bug" in caplog.text and "Traceback" in caplog.text
    with pytest.raises(RuntimeError, match=r"lane language died.*a bug") as caught:
        lane.submit(lambda: after.append(1))
    assert caught.value.__cause__ is lane.error
    lane.close()
    assert after == []


def test_jobs_behind_a_fatal_one_do_not_run() -> None:
    lane = ThreadLane("language", 1)
    gate = threading.Event()
    after: list[int] = []

    def broken() -> None:
        gate.wait(10)
        raise ZeroDivisionError

    lane.submit(broken)
    lane.submit(lambda: after.append(1))
    gate.set()
    lane.close()
    assert after == [] and isinstance(lane.error, ZeroDivisionError)


def test_threads_of_lanes_are_daemons() -> None:
    lane = ThreadLane("language", 1)
    assert lane._thread.daemon
    lane.close()
