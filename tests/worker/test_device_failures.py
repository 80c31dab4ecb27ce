"""A device that fails, and one without memory: the first ends the worker at once, whatever was running, the second
costs at most the request that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.errors import BackendError, HydraError, InvalidRequest, RequestFailed
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.worker.boundary import run_guarded
from hydra_engine.worker.language.slot_table import SlotTable
from tests.faults.points import FaultPoints
from tests.worker.fakes import FakeModel, Rig, make_request
from tests.worker.late import LateDevice
from tests.worker.test_lanes import picture_request


class Breaking(FakeModel):
    """Meets an illegal address: its launch raises, and so does all that the device is asked from then on."""

    device: LateDevice

    def forward(self, inputs: LanguageInput, *caches: Any) -> torch.Tensor:
        self.row_counts.append(len(inputs.attention.num_context))
        return self._fail()

    def encode(self, inputs: VisionInput, *caches: Any) -> None:
        self.batch_sizes.append(len(inputs.pixels))
        self._fail()

    def _fail(self) -> Any:
        self.device.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def breaking_rig(*, asynchronous: bool = True) -> tuple[Rig, Breaking]:
    device, model = LateDevice(), Breaking()
    model.device = device
    backend = Backend(device, model.ops, torch.float32, 1)
    return Rig(model, backend=backend, faults=FaultPoints(), asynchronous=asynchronous), model


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_whose_launch_broke_the_device_is_not_run_again_row_by_row(asynchronous: bool) -> None:
    rig, model = breaking_rig(asynchronous=asynchronous)
    requests = [make_request(n, [5, 6]) for n in (1, 2, 3)]
    for request in requests:
        rig.add(request)
    rig.submit(*(rig.row(request, 0, [5, 6], 0) for request in requests))
    assert rig.woken.wait(30)
    with pytest.raises(BackendError, match="has failed"):
        rig.worker.poll()
    assert model.row_counts == [3]
    rig.worker.close()


def test_an_encode_that_broke_the_device_ends_the_worker() -> None:
    rig, model = breaking_rig()
    request, pixels = picture_request(1, 10, 20)
    rig.add(request, pixels)
    with pytest.raises(BackendError, match="has failed"):
        rig.vision(rig.item(request, 0), rig.item(request, 1))
    assert model.batch_sizes == [2]
    rig.worker.close()


def test_a_bug_in_a_lane_ends_the_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a lane raises from `poll`, so that no caller waits for a step that never comes back."""

    def begin_step(*_: Any) -> None:
        raise AssertionError("a slot that is somebody else's")

    monkeypatch.setattr(SlotTable, "begin_step", begin_step)
    for asynchronous in (False, True):
        rig, _ = breaking_rig(asynchronous=asynchronous)
        request = make_request(1, [5, 6])
        rig.add(request)
        rig.submit(rig.row(request, 0, [5, 6], 0))
        assert rig.woken.wait(30)
        with pytest.raises(AssertionError, match="somebody else's"):
            rig.worker.poll()
        rig.worker.close()


def test_a_warm_up_that_breaks_the_device_says_so_and_ends() -> None:
    """Callers that wait for the lane get the error, also one that the device raises itself."""

    class Failing(FakeModel):
        def encode(self, *_: Any) -> None:
            raise BackendError("the device cuda:0 failed: CUDA error: unspecified launch failure")

    for rig in (breaking_rig()[0], Rig(Failing())):
        with pytest.raises(BackendError, match="cannot run its warm-up steps"):
            rig.worker.warm_up(lambda done, total: None)
        rig.worker.close()


def test_what_raises_while_the_device_works_is_one_requests() -> None:
    """The device is asked, and is well."""
    device, asked = LateDevice(), []
    device.finish = lambda: asked.append(1)  # type: ignore[assignment, method-assign]
    rig = Rig(backend=Backend(device, FakeModel().ops, torch.float32, 1), faults=FaultPoints())
    for number in (1, 2):
        rig.add(make_request(number, [5, 6]))
    rig.worker.faults.arm("eng.before_step", "raise", "times=1")
    rows = [rig.row(make_request(number, [5, 6]), 0, [5, 6], 0) for number in (1, 2)]
    assert all(outcome.error is None for outcome in rig.language(*rows)) and asked == [1]
    rig.worker.close()


def test_only_a_failed_device_passes_the_boundary() -> None:
    def fail() -> None:
        raise BackendError("the device has failed")

    with pytest.raises(BackendError):
        run_guarded("a step", fail)


# ---- memory


def vision_rig() -> tuple[Rig, LateDevice]:
    device = LateDevice()
    backend = Backend(device, FakeModel().ops, torch.float32, 1)
    return Rig(backend=backend, faults=FaultPoints()), device


def test_pictures_for_which_there_is_no_memory_together_are_encoded_alone() -> None:
    rig, device = vision_rig()
    request, pixels = picture_request(1, 10, 20)
    rig.add(request, pixels)
    rig.worker.faults.arm("vis.before_step", "oom", "times=1")
    errors = rig.vision(rig.item(request, 0), rig.item(request, 1))
    assert errors == (None, None) and device.trims == 1
    rig.worker.close()


def test_a_picture_alone_is_tried_once_more_with_the_memory_that_was_given_back() -> None:
    rig, device = vision_rig()
    request, pixels = picture_request(1, 10)
    rig.add(request, pixels)
    rig.worker.faults.arm("vis.before_step", "oom", "times=1")
    (error,) = rig.vision(rig.item(request, 0))
    assert error is None and device.trims == 1
    rig.worker.faults.arm("vis.before_step", "oom", "times=2")
    (error,) = rig.vision(rig.item(request, 0))
    assert error is not None and error.kind == "Unavailable" and device.trims == 3
    assert rig.vision(rig.item(request, 0))[0] is None
    rig.worker.close()


@pytest.mark.parametrize("error, num_lines", [(InvalidRequest("no token is allowed"), 0), (RequestFailed("x"), 1)])
def test_a_client_cannot_fill_the_log_of_an_instance(
    error: HydraError, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    assert run_guarded("sampling", fail) == error.info()
    assert len(caplog.records) == num_lines
