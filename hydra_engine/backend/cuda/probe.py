"""What the extension finds of CUDA on this machine, as data, for `select.py` and `doctor`. Does not choose, and does
not ask torch, whose builds have code for other devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hydra_engine import _C

Status = Literal["ok", "not_built", "no_driver", "driver_too_old", "no_device", "no_code", "error"]


@dataclass(frozen=True, slots=True)
class CudaDeviceInfo:
    index: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    usable: bool  # the extension has code for its capability


@dataclass(frozen=True, slots=True)
class CudaProbe:
    status: Status
    problem: str  # a sentence, empty when ok
    codes: tuple[str, ...]  # what the extension was compiled for: "sm_80", "compute_90" (PTX)
    runtime_version: int  # 13000 is 13.0; 0 where built without CUDA
    driver_version: int  # the newest CUDA that the driver runs; 0 where unknown
    devices: tuple[CudaDeviceInfo, ...]


def probe() -> CudaProbe:
    """Never raises, makes no context, takes milliseconds. It initialises the driver where there is one, so call it only
    in a process that forks no workers."""
    found = _C.cuda_probe()
    devices = tuple(CudaDeviceInfo(**device) for device in found["devices"])
    return CudaProbe(
        found["status"],
        found["problem"],
        tuple(found["codes"]),
        found["runtime_version"],
        found["driver_version"],
        devices,
    )
