"""Selects the device: a GPU if driver, extension, torch and Triton can all use it, else the CPU.

The choice depends on the probe's data alone. Creates no CUDA context, and looks only at the GPU that was asked for.
Imports torch only when needed, so that the frontend process can ask for names too. Devices have the driver's numbers,
which follow CUDA_VISIBLE_DEVICES as torch's do.
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from hydra_engine.errors import BackendError, ConfigError

logger = logging.getLogger(__name__)

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,2}))?")
# Statuses of a machine or build without GPU support: falling back to the CPU is expected and no warning.
_NO_GPU = ("no_extension", "not_built", "no_driver", "no_device")

Status = Literal["ok", "no_extension", "not_built", "no_driver", "driver_too_old", "no_device", "no_code", "error"]


@dataclass(frozen=True, slots=True)
class CudaDeviceInfo:
    """A GPU as the driver reports it."""

    index: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    usable: bool  # the extension has code for its capability
    has_mps: bool = False  # NVIDIA's multi-process service (MPS) runs for it


@dataclass(frozen=True, slots=True)
class CudaProbe:
    """CUDA as the native extension finds it; torch's builds have code for other devices (`CudaSupport`)."""

    status: Status
    problem: str  # a sentence, empty if ok
    codes: tuple[str, ...]  # targets of the extension: "sm_80", "compute_90" (PTX)
    runtime_version: int  # 13000 is 13.0; 0 if built without CUDA
    driver_version: int  # the newest CUDA that the driver runs; 0 if unknown
    devices: tuple[CudaDeviceInfo, ...]


@dataclass(frozen=True, slots=True)
class CudaSupport:
    """The probe, and the reasons why torch and Triton cannot be used, a clause each; empty if they can, and if the
    probe's status is not "ok": then they are not tried."""

    probe: CudaProbe
    torch_problem: str = ""
    triton_problem: str = ""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device of an instance, and why it was chosen, a clause."""

    name: str  # "cpu", "cuda:0"
    index: int | None  # of the GPU, None on a CPU
    num_sms: int  # 0 on a CPU
    reason: str
    capability: tuple[int, int] | None = None  # of the GPU


def probe() -> CudaProbe:
    """Asks the driver for its devices, which takes milliseconds and creates no context; problems are in the result.

    Initialises the driver, if there is one: call it only in a process that forks no workers. Raises ConfigError only if
    HYDRA_MAX_CPU_ISA is no instruction level.
    """
    extension, problem = load_extension()
    if extension is None:
        return CudaProbe("no_extension", problem or "", (), 0, 0, ())
    answer = extension.cuda_probe()
    devices = tuple(CudaDeviceInfo(**device) for device in answer["devices"])
    return CudaProbe(**answer | {"codes": tuple(answer["codes"]), "devices": devices})


def cuda_support() -> CudaSupport:
    """CUDA support of this machine and installation. Initialises the driver and raises as `probe`."""
    cuda = probe()
    return CudaSupport(cuda, _torch_problem(), _triton_problem()) if cuda.status == "ok" else CudaSupport(cuda)


def refusal(support: CudaSupport, index: int) -> str:
    """The reason why GPU `index` (0 or more) cannot be used, a clause; empty if it can."""
    probe = support.probe
    if probe.devices and index >= len(probe.devices):
        shown = "is 1 GPU" if len(probe.devices) == 1 else f"are {len(probe.devices)} GPUs"
        return f"there {shown}, numbered from 0 (CUDA_VISIBLE_DEVICES may hide others)"
    if probe.status != "ok":
        return probe.problem
    device = probe.devices[index]
    if not device.usable:
        return (
            f"{device.name} has compute capability {device.capability[0]}.{device.capability[1]} and the extension was "
            f"built for {' '.join(probe.codes)}: build it again with HYDRA_CUDA_ARCHS"
        )
    return support.torch_problem or support.triton_problem


def choose_device(device: str, support: CudaSupport) -> ChosenDevice:
    """Chooses the device from `support`. device: "auto" (GPU 0 if it can be used, else the CPU), "cpu", "cuda" (GPU 0)
    or "cuda:N".

    Raises ConfigError for any other, and BackendError with the reason if a GPU that was asked for cannot be used.
    """
    if device == CPU:
        return ChosenDevice(CPU, None, 0, "as asked")
    if device == "auto":
        problem = refusal(support, 0)
        return ChosenDevice(CPU, None, 0, problem) if problem else _chosen(support, 0, "the first GPU")
    match = _CUDA.fullmatch(device)
    if match is None:
        raise ConfigError("device must be auto, cpu or cuda:N", param="device")
    index = int(match[1] or 0)
    if problem := refusal(support, index):
        raise BackendError(f"device cuda:{index} cannot be used: {problem}", param="device")
    return _chosen(support, index, "as asked")


def resolve(device: str) -> ChosenDevice:
    """Returns `choose_device` with the support of this machine, which is probed unless `device` is "cpu".

    Logs one line if "auto" chooses the CPU: a warning, unless there is no GPU, no driver or no extension with
    GPU code. Raises as `choose_device` and `probe`.
    """
    if device == CPU:
        return ChosenDevice(CPU, None, 0, "as asked")
    support = cuda_support()
    chosen = choose_device(device, support)
    if device == "auto" and chosen.index is None:
        is_missed = support.probe.status not in _NO_GPU
        logger.log(logging.WARNING if is_missed else logging.INFO, "device cpu is taken: %s", chosen.reason)
    return chosen


def names() -> tuple[str, ...]:
    """Names of the devices of this machine: "cpu", "cuda:0", ... GPUs that cannot be used are listed too; an instance
    on one is refused, with the reason, when it starts. Initialises the driver and raises as `probe`."""
    return (CPU, *(f"cuda:{device.index}" for device in probe().devices))


def gpu_name(device: str) -> str:
    """Name of the GPU as its driver reports it; empty for a CPU or a GPU that is not there. Initialises the driver and
    raises as `probe`, unless it is a CPU."""
    match = _CUDA.fullmatch(device)
    if match is None:
        return ""
    return next((info.name for info in probe().devices if info.index == int(match[1] or 0)), "")


def is_time_sliced(device: str) -> bool:
    """True if processes on this device never compute at the same moment: a GPU without NVIDIA's multi-process service
    (MPS). False for a CPU, and for a GPU that is not there. Initialises the driver and raises as `probe`."""
    match = _CUDA.fullmatch(device)
    index = int(match[1] or 0) if match is not None else -1
    return any(not info.has_mps for info in probe().devices if info.index == index)


def load_extension() -> tuple[ModuleType | None, str | None]:
    """Returns (native extension, None), or (None, why it cannot be used, a clause).

    Raises ConfigError if HYDRA_MAX_CPU_ISA is no instruction level.
    """
    try:
        extension = importlib.import_module("hydra_engine._C")
        extension.isa()
        return extension, None
    except ValueError as error:
        raise ConfigError(str(error).partition(" [")[0], param="HYDRA_MAX_CPU_ISA") from None
    except ModuleNotFoundError:
        return None, "the native extension hydra_engine._C is not built"
    except ImportError as error:
        return None, f"the native extension hydra_engine._C does not load ({error})"[:200]


def _chosen(support: CudaSupport, index: int, reason: str) -> ChosenDevice:
    info = support.probe.devices[index]
    return ChosenDevice(f"cuda:{index}", index, info.num_sms, reason, info.capability)


def _torch_problem() -> str:
    """The reason why torch cannot use a GPU, a clause; empty if it can."""
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build with it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it can use"
    return ""


def _triton_problem() -> str:
    """The reason why Triton or this project's kernels for it cannot be imported, a clause; empty if they can."""
    for name, remedy in (("triton", "pip install triton"), ("hydra_kernels", "install hydra-engine anew")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error}); {remedy}"[:200]
    return ""
