"""Topologies that a machine can hold: the processor alone, and with GPUs that the driver shows."""

from dataclasses import replace

import pytest

from hydra_engine.backend import devices
from hydra_engine.backend.devices import CudaDeviceInfo, CudaProbe
from hydra_engine.errors import ConfigError
from hydra_engine.frontend.routing.placement import Placement

GPU = CudaDeviceInfo(0, "a GPU", (9, 0), 132, 1 << 37, usable=True)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = CudaProbe("ok", "", ("sm_90",), 13000, 13000, (GPU, replace(GPU, index=1)))
    monkeypatch.setattr(devices, "probe", lambda: found)


@pytest.mark.parametrize(
    "text", ["EPD", "E@cuda:0+PD@cuda:1", "E@cuda:1+PD", "2EPD@cuda:1", "E@cpu+PD@cpu", "E@cpu+PD@cuda:1"]
)
def test_what_the_machine_has_is_taken(two_gpus: None, text: str) -> None:
    Placement().check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E@cuda:0+PD@cuda:2", r"has no cuda:2, only cpu, cuda:0 and cuda:1; write for example E@cuda:0\+PD@cuda:1"),
    ],
)
def test_what_it_has_not_is_refused_with_what_would_do(two_gpus: None, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement().check(text)


def test_without_a_gpu_in_the_topology_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> CudaProbe:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(devices, "probe", never)
    Placement().check("E@cpu+PD")
