"""Selects the device: a GPU if the driver, the extension, torch and Triton all can use it, else the CPU.

The choice depends only on the probe's data. Looks at no GPU that was not asked for and makes no context. Loads torch
only when it is needed, so that the front process can ask for names too. Devices have the driver's numbers, which count
what CUDA_VISIBLE_DEVICES leaves, as torch does.
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hydra_engine.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from hydra_engine.backend.cuda.probe import CudaProbe

logger = logging.getLogger(__name__)

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,2}))?")
# Without one of these there is no GPU to miss.
_NO_GPU = ("not_built", "no_driver", "no_device")


@dataclass(frozen=True, slots=True)
class Found:
    """`probe` None: the extension cannot be loaded, and `problem` says so. `torch_problem`, `triton_problem`: a clause
    each, empty where all is well; they are asked for only where the probe is ok."""

    probe: CudaProbe | None
    problem: str = ""
    torch_problem: str = ""
    triton_problem: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    name: str  # "cpu", "cuda:0"
    index: int | None  # of the GPU
    num_sms: int
    reason: str


def find() -> Found:
    """What this machine and this installation have. Initialises the driver where there is one."""
    extension, problem = load_extension()
    if extension is None:
        return Found(None, problem or "")
    probe = importlib.import_module("hydra_engine.backend.cuda.probe").probe()
    if probe.status != "ok":
        return Found(probe)
    return Found(probe, "", _torch_problem(), _triton_problem())


def refusal(found: Found, index: int) -> str:
    """Why GPU `index` cannot be taken, in a clause; empty where it can."""
    probe = found.probe
    if probe is None:
        return found.problem
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
    return found.torch_problem or found.triton_problem


def choose(device: str, found: Found) -> Chosen:
    """device: "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError for other words and BackendError, with the reason,
    for a GPU that cannot be taken."""
    if device == CPU:
        return Chosen(CPU, None, 0, "as asked")
    if device == "auto":
        problem = refusal(found, 0)
        return Chosen(CPU, None, 0, problem) if problem else _chosen(found, 0, "the first GPU")
    match = _CUDA.fullmatch(device)
    if match is None:
        raise ConfigError("device must be auto, cpu or cuda:N", param="device")
    index = int(match[1] or 0)
    if problem := refusal(found, index):
        raise BackendError(f"device cuda:{index} cannot be used: {problem}", param="device")
    return _chosen(found, index, "as asked")


def resolve(device: str) -> Chosen:
    """`choose` from what is there; logs one line where "auto" does not take a GPU."""
    if device == CPU:
        return Chosen(CPU, None, 0, "as asked")
    found = find()
    chosen = choose(device, found)
    if device == "auto" and chosen.index is None:
        is_missed = found.probe is not None and found.probe.status not in _NO_GPU
        logger.log(logging.WARNING if is_missed else logging.INFO, "device cpu is taken: %s", chosen.reason)
    return chosen


def names() -> tuple[str, ...]:
    """Those that an instance can be placed on; a GPU that cannot be used is among them and refused with its reason when
    the instance starts."""
    extension, _ = load_extension()
    if extension is None:
        return (CPU,)
    probe = importlib.import_module("hydra_engine.backend.cuda.probe").probe()
    return (CPU, *(f"cuda:{device.index}" for device in probe.devices))


def gpu_name(device: str) -> str:
    """As its driver calls it; empty for a processor."""
    match = _CUDA.fullmatch(device)
    if match is None:
        return ""
    infos = importlib.import_module("hydra_engine.backend.cuda.probe").probe().devices
    return next((info.name for info in infos if info.index == int(match[1] or 0)), "")


def load_extension() -> tuple[ModuleType | None, str | None]:
    """The native extension, or a sentence that says why it cannot be used."""
    try:
        return importlib.import_module("hydra_engine._C"), None
    except ModuleNotFoundError:
        return None, "the native extension hydra_engine._C is not built"
    except ImportError as error:
        return None, f"the native extension hydra_engine._C does not load ({error})"[:200]


def _chosen(found: Found, index: int, reason: str) -> Chosen:
    assert found.probe is not None
    return Chosen(f"cuda:{index}", index, found.probe.devices[index].num_sms, reason)


def _torch_problem() -> str:
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build with it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it can use"
    return ""


def _triton_problem() -> str:
    for name in ("triton", "hydra_kernels"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error}); install hydra-engine[kernels]"[:200]
    return ""
