"""Chooses the implementation of the ops, once, at start: the only place that asks what this machine has.

"auto" takes the native extension and says in one logged sentence what is missing when it cannot; an implementation
asked for by name is taken or refused, never replaced. Does not know models; imports no GPU library.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from types import ModuleType
from typing import Any

import torch

from hydra_engine.backend.base import Backend, Ops
from hydra_engine.backend.cpu import NICENESS, CpuDevice, usable_cores
from hydra_engine.backend.lanes import set_torch_threads
from hydra_engine.backend.reference import ReferenceOps
from hydra_engine.backend.torch_ops import TorchOps
from hydra_engine.errors import BackendError, ConfigError

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "torch", "reference")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BF16_LEVELS = ("avx512bf16", "amx")  # levels with a bf16 dot product


def create_backend(
    device: str,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    deterministic: bool = True,
    threads: int | None = None,
    lane_priority: str = "balanced",
) -> Backend:
    """device: "auto", "cpu" or "cuda:N"; backend: one of BACKENDS; threads per lane, None for all usable cores.

    Sets the thread counts of the calling thread too, so that loading weights uses them.
    """
    _check_device(device)
    if lane_priority not in NICENESS:
        raise ConfigError(f"lane_priority must be one of {', '.join(NICENESS)}", param="lane_priority")
    count = usable_cores() if threads is None else threads
    extension, problem = _load_extension()
    ops = _choose(backend, extension, problem)
    if deterministic and not ops.deterministic:
        raise ConfigError(
            f"backend {ops.name} is not batch-invariant; set deterministic to false or take another backend",
            param="backend",
        )

    def set_threads(n: int) -> None:
        set_torch_threads(n)
        if extension is not None:
            extension.set_num_threads(n)

    set_threads(count)
    return Backend(CpuDevice(count, set_threads, lane_priority), ops, dtype, count)


def resolve_dtype(dtype: str, checkpoint_dtype: str, backend: str = "auto") -> tuple[torch.dtype, str]:
    """The compute dtype and why. `dtype`: "auto" or a name of DTYPES; `checkpoint_dtype`: of the stored weights."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}", param="dtype")
        return DTYPES[dtype], f"dtype {dtype}: as asked"
    if checkpoint_dtype not in ("bfloat16", "float16"):
        return torch.float32, f"dtype float32: the checkpoint is {checkpoint_dtype}"
    extension, problem = _load_extension()
    if extension is None or backend not in ("auto", "native"):
        why = problem if extension is None else f"backend {backend} computes in float32"
        return torch.float32, f"dtype float32: {why}"
    level = extension.isa()
    if level not in _BF16_LEVELS:
        return torch.float32, f"dtype float32: this processor ({level}) has no bfloat16 dot product"
    return torch.bfloat16, f"dtype bfloat16: the checkpoint is {checkpoint_dtype} and the processor has {level}"


def describe_cpu() -> dict[str, Any]:
    """What `doctor` prints about the processor and the extension."""
    extension, problem = _load_extension()
    return {
        "extension": None if extension is None else extension.__file__,
        "extension_problem": problem,
        "isa": None if extension is None else extension.isa(),
        "features": [] if extension is None else list(extension.cpu_features()),
        "compiler": next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None),
        "cores": usable_cores(),
        "torch": torch.__version__,
    }


def _check_device(device: str) -> None:
    if device in ("auto", "cpu"):
        return
    if device == "cuda" or device.startswith("cuda:"):
        raise BackendError("the CUDA backend is not part of this build; set device to cpu or auto", param="device")
    raise ConfigError("device must be auto, cpu or cuda:N", param="device")


def _choose(backend: str, extension: ModuleType | None, problem: str | None) -> Ops:
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}", param="backend")
    if backend == "torch":
        return TorchOps()
    if backend == "reference":
        return ReferenceOps("asked for by name")
    if extension is not None:
        return _native_ops()
    if backend == "native":
        raise BackendError(f"backend native: {problem}; `make build` builds it", param="backend")
    logger.warning("%s; run `make build`. Until then every op takes the slow reference path in plain torch", problem)
    return ReferenceOps(f"{problem}; `make build` builds it")


def _native_ops() -> Ops:
    # The module of the native ops imports the extension, which only now is known to be there.
    native: Any = importlib.import_module("hydra_engine.backend.native")
    ops: Ops = native.NativeOps()
    return ops


def _load_extension() -> tuple[ModuleType | None, str | None]:
    """The native extension, or a sentence that says why it cannot be used."""
    try:
        return importlib.import_module("hydra_engine._C"), None
    except ModuleNotFoundError:
        return None, "the native extension hydra_engine._C is not built"
    except ImportError as error:
        return None, f"the native extension hydra_engine._C does not load ({error})"[:200]
