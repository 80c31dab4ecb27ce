"""Chooses device and ops, once, at start: the only module that asks what this machine has.

"auto" chooses a GPU if all that it needs is there (`devices.py`), else the native extension, and logs one sentence on
what is missing. A device or backend asked for by name is used or refused, never replaced. Does not know models; imports
GPU libraries only if a GPU is used.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hydra_engine.backend import devices
from hydra_engine.backend.base import Backend, OpChoice, Ops
from hydra_engine.backend.cpu.device import CpuDevice, set_torch_threads, usable_cores
from hydra_engine.backend.cuda.attention_choice import AUTO, TRITON, Shapes, choose_by_name
from hydra_engine.backend.cuda.lanes import priorities
from hydra_engine.backend.devices import CPU, ChosenDevice, load_extension
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.core.options import NICENESS
from hydra_engine.errors import BackendError, ConfigError

SM_GRANULE = 8  # SMs; smallest unit of a partition at compute capability 9.0, 2 or 4 at others

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "reference")  # of a CPU; a GPU has "auto" alone
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BF16_LEVELS = ("avx512bf16", "amx")  # levels with a bf16 dot product


def create_backend(
    device: str,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    deterministic: bool | None = None,
    threads: int | None = None,
    lane_priority: str = "balanced",
    sm_split: Sequence[int] = (),
    attention: str = TRITON,
    shapes: Shapes | None = None,
    profiles: Path | None = None,
    for_this_thread: bool = True,
) -> Backend:
    """Creates the backend of an instance.

    device: "auto", "cpu", "cuda" or "cuda:N". dtype: of activations. backend: one of BACKENDS. deterministic: True for
    batch-invariant ops on a GPU, None as False; ops on a CPU always are. threads: per lane, None for all usable
    cores. lane_priority: a key of NICENESS. sm_split: SMs of the language lane in each partition (`Partitions`), () not
    to divide the GPU. attention: of a GPU, a result of `resolve_attention`; "auto" measures its kernels with the
    model's `shapes`, which are needed for nothing else. profiles: folder where measurements are kept, None to keep
    none. for_this_thread: also sets thread counts and GPU of the calling thread, so that loading weights uses them.

    Raises ConfigError for a wrong device, backend, lane_priority, sm_split or HYDRA_MAX_CPU_ISA, and BackendError if a
    device or backend asked for by name cannot be used or the GPU not be divided.

        backend = create_backend("cpu", torch.float32, threads=2)
    """
    chosen = resolve_device(device, backend)
    if lane_priority not in NICENESS:
        raise ConfigError(f"lane_priority must be one of {', '.join(NICENESS)}", param="lane_priority")
    count = usable_cores() if threads is None else threads
    if chosen.index is None:
        if sm_split:
            raise ConfigError(
                "sm_split divides a GPU and the engine runs on a processor; set sm_split to off or device to cuda:0",
                param="sm_split",
            )
        result = Backend(CpuDevice(count, _set_threads, lane_priority), _cpu_ops(backend), dtype, count)
    else:
        exact, _ = resolve_deterministic(deterministic, chosen.name)
        result = _on_cuda(chosen, dtype, exact, count, lane_priority, sm_split, attention, shapes, profiles)
    if for_this_thread:
        _set_threads(count)
        if chosen.index is not None:
            torch.cuda.set_device(chosen.index)
    return result


@contextmanager
def all_cores(backend: Backend) -> Iterator[None]:
    """Lets ops of the calling thread use all cores of this process inside the context, however few threads a lane has;
    then sets its threads to the number of a lane.

    Meant for loading, when no lane has work; packed weights do not depend on the number of threads. To keep cores free
    at start too, limit the process (taskset, a container).
    """
    _set_threads(max(usable_cores(), backend.threads))
    try:
        yield
    finally:
        _set_threads(backend.threads)


def op_choices(device: str, *, backend: str = "auto") -> tuple[OpChoice, ...]:
    """Creates a float32 backend and returns its `Ops.choices`. Sets no threads and launches nothing on a GPU.

    Parameters and errors as of `create_backend`.
    """
    return create_backend(device, torch.float32, backend=backend, threads=1, for_this_thread=False).ops.choices()


def resolve_device(device: str, backend: str = "auto") -> ChosenDevice:
    """Chooses the device on this machine, as `devices.resolve`; with backend "native" or "reference", "auto" is the
    CPU.

    Raises ConfigError if `backend` is unknown or does not run on `device`, else as `devices.resolve`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}", param="backend")
    if backend == "auto":
        return devices.resolve(device)
    if device.startswith("cuda"):
        raise ConfigError(
            f"backend {backend} runs on a processor; set backend to auto or device to cpu", param="backend"
        )
    return devices.resolve(CPU if device == "auto" else device)


def resolve_deterministic(deterministic: bool | None, device: str) -> tuple[bool, str | None]:
    """Returns (True if ops are to be batch-invariant, a note for the user or None).

    deterministic: None for the device's default, True on a CPU, where it costs nothing, False with a note on a GPU.
    device: "cpu" or "cuda:N".
    """
    if deterministic is not None:
        return deterministic, None
    if device == CPU:
        return True, None
    return False, "not deterministic: on a GPU batch-invariant ops are slower; --deterministic takes them"


def resolve_sm_split(sm_split: str, num_sms: int) -> str:
    """Returns the setting `sm_split`, with "auto" replaced for a device of `num_sms` SMs (0 for a CPU).

    "auto" becomes a quarter, a half and three quarters of the SMs ("32,64,96"), rounded down to SM_GRANULE, or "off" if
    a quarter is less than that. Not finer, since every partition needs captured language steps of its own, and the gate
    between the lanes controls the rest.
    """
    if sm_split.strip().lower() != "auto":
        return sm_split
    counts = [num_sms * part // 4 // SM_GRANULE * SM_GRANULE for part in (1, 2, 3)]
    return ",".join(map(str, counts)) if counts[0] else "off"


def resolve_dtype(
    dtype: str, checkpoint_dtype: str, backend: str = "auto", device: str = CPU
) -> tuple[torch.dtype, str]:
    """Returns (dtype of activations, the reason, which also says if matrices keep another).

    dtype: "auto" or a key of DTYPES. checkpoint_dtype: of the stored weights, as "bfloat16". backend: one of BACKENDS.
    device: "cpu" or "cuda:N". "auto" for a 16-bit checkpoint is its dtype on a GPU and bfloat16 on a CPU with native
    ops and a bfloat16 dot product, in all other cases float32. Raises ConfigError for another `dtype`, and on a CPU as
    `load_extension`.
    """
    chosen, reason = _resolve_dtype(dtype, checkpoint_dtype, backend, device)
    kept = weights_dtype(chosen, checkpoint_dtype, backend, device)
    return chosen, reason if kept is chosen else f"{reason}; matrices stay {checkpoint_dtype}"


def weights_dtype(dtype: torch.dtype, checkpoint_dtype: str, backend: str = "auto", device: str = CPU) -> torch.dtype:
    """Dtype in which weight matrices are kept: `dtype`, that of the activations. But on a CPU with native ops and
    float32 activations it is the checkpoint's own if that is in DTYPES, since their products read it directly.

    Other parameters as in `resolve_dtype`. Raises ConfigError as `load_extension`, on a CPU only.
    """
    native = device == CPU and backend in ("auto", "native") and load_extension()[0] is not None
    return DTYPES.get(checkpoint_dtype, dtype) if native and dtype is torch.float32 else dtype


def _resolve_dtype(dtype: str, checkpoint_dtype: str, backend: str, device: str) -> tuple[torch.dtype, str]:
    """`resolve_dtype`, with a reason that does not mention matrices."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}", param="dtype")
        return DTYPES[dtype], f"dtype {dtype}: as asked"
    if checkpoint_dtype not in ("bfloat16", "float16"):
        return torch.float32, f"dtype float32: the checkpoint is {checkpoint_dtype}"
    if device != CPU:
        return DTYPES[checkpoint_dtype], f"dtype {checkpoint_dtype}: the checkpoint's"
    extension, problem = load_extension()
    if extension is None or backend not in ("auto", "native"):
        why = problem if extension is None else f"backend {backend} computes in float32"
        return torch.float32, f"dtype float32: {why}"
    level = extension.isa()
    if level not in _BF16_LEVELS:
        return torch.float32, f"dtype float32: this processor ({level}) has no bfloat16 dot product"
    return torch.bfloat16, f"dtype bfloat16: the checkpoint is {checkpoint_dtype} and the processor has {level}"


def describe_cpu() -> dict[str, Any]:
    """Facts for `doctor`: the native extension or why it cannot be used, instruction level and features (None and empty
    without it), C++ compiler, usable cores, torch's version. Raises as `load_extension`."""
    extension, problem = load_extension()
    return {
        "extension": None if extension is None else extension.__file__,
        "extension_problem": problem,
        "isa": None if extension is None else extension.isa(),
        "features": [] if extension is None else list(extension.cpu_features()),
        "compiler": next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None),
        "cores": usable_cores(),
        "torch": torch.__version__,
    }


def _on_cuda(
    chosen: ChosenDevice,
    dtype: torch.dtype,
    deterministic: bool,
    threads: int,
    lane_priority: str,
    sm_split: Sequence[int],
    attention: str,
    shapes: Shapes | None,
    profiles: Path | None,
) -> Backend:
    """Creates the backend of a GPU; parameters as in `create_backend`, with their defaults resolved."""
    assert chosen.index is not None
    # These modules import GPU libraries, which are known to be installed and wanted only here.
    host: Any = importlib.import_module("hydra_engine.backend.cuda.device")
    cuda: Any = importlib.import_module("hydra_engine.backend.cuda.ops")
    of_lanes, split = priorities(lane_priority, chosen.capability), None
    if sm_split:
        sms: Any = importlib.import_module("hydra_engine.backend.cuda.sm_split")
        split = sms.SplitDevice(torch.device("cuda", chosen.index), sm_split, of_lanes)
    device = host.CudaDevice(chosen.index, threads, _set_threads, of_lanes, split)
    if attention == AUTO:
        assert shapes is not None, "attention is measured for a model"
        timing: Any = importlib.import_module("hydra_engine.backend.cuda.attention_timing")
        driver = devices.probe().driver_version
        choice = timing.choose_attention(device, chosen.num_sms, dtype, shapes, profiles, driver)
    else:
        choice = choose_by_name(attention)
    ops = cuda.CudaOps(
        device.torch_device,
        chosen.num_sms,
        device.send,
        deterministic=deterministic,
        attention=choice,
        num_sms_here=None if split is None else split.num_sms,
    )
    notes = filter(None, (None if split is None else split.note, choice.note))
    return Backend(device, ops, dtype, threads, tuple(notes))


def _set_threads(count: int) -> None:
    """Sets the thread counts of torch and of the extension for the calling thread."""
    set_torch_threads(count)
    extension, _ = load_extension()
    if extension is not None:
        extension.set_num_threads(count)


def _cpu_ops(backend: str) -> Ops:
    """Returns the ops of a CPU. Warns in the log if "auto" gives the reference for want of the extension.

    Raises BackendError if "native" was asked for and the extension cannot be used.
    """
    if backend == "reference":
        return ReferenceOps("asked for by name")
    extension, problem = load_extension()
    if extension is not None:
        # This module imports the extension, which is known to load only here.
        native: Any = importlib.import_module("hydra_engine.backend.cpu.ops")
        ops: Ops = native.NativeOps()
        return ops
    if backend == "native":
        raise BackendError(f"backend native: {problem}; `make build` builds it", param="backend")
    logger.warning("%s; run `make build`. Until then every op takes the slow reference path in plain torch", problem)
    return ReferenceOps(f"{problem}; `make build` builds it")
