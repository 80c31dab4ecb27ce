"""Chooses device and implementation of the ops, once, at start: the only place that asks what this machine has.

"auto" takes a GPU if all that it needs is there (`devices.py`), else the native extension, and says in one logged
sentence what is missing when it cannot; what was asked for by name is taken or refused, never replaced. Does not know
models; imports no GPU library unless a GPU is taken.
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
from hydra_engine.backend.cpu.device import CpuDevice, usable_cores
from hydra_engine.backend.cpu.lanes import set_torch_threads
from hydra_engine.backend.cuda.attention_choice import AUTO, TRITON, Shapes, by_name
from hydra_engine.backend.cuda.lanes import priorities, priority_note
from hydra_engine.backend.devices import CPU, ChosenDevice, load_extension
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.core.options import NICENESS
from hydra_engine.errors import BackendError, ConfigError

SM_GRANULE = 8  # what devices of compute capability 9.0 divide by; others divide by 2 or 4

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "reference")  # on a processor; a GPU has one, which is "auto"
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
    """device: "auto", "cpu" or "cuda:N"; backend: one of BACKENDS; deterministic: as `resolve_deterministic` takes it;
    threads per lane, None for all usable cores; sm_split: as `EngineConfig.sm_counts`; attention: as
    `resolve_attention` says, of a GPU. "auto" is measured there, for which `shapes` are needed; `profiles`: the folder
    where measurements are kept, None: they are not.

    `for_this_thread`: sets the thread counts and the GPU of the calling thread too, so that loading weights uses them.
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
        result = _on_cuda(
            chosen, chosen.index, dtype, exact, count, lane_priority, sm_split, attention, shapes, profiles
        )
    if for_this_thread:
        _set_threads(count)
        if chosen.index is not None:
            torch.cuda.set_device(chosen.index)
    return result


@contextmanager
def all_cores(backend: Backend) -> Iterator[None]:
    """Ops of the calling thread take every core that this process may use, however few threads a lane has: while an
    instance loads nothing runs beside it, what is packed does not depend on how many packed it, and whoever wants cores
    left alone at start as well gives the process fewer of them (taskset, a container)."""
    _set_threads(max(usable_cores(), backend.threads))
    try:
        yield
    finally:
        _set_threads(backend.threads)


def op_choices(device: str, *, backend: str = "auto") -> tuple[OpChoice, ...]:
    """What the ops of such a backend say of themselves; nothing is set, no GPU is touched."""
    return create_backend(device, torch.float32, backend=backend, threads=1, for_this_thread=False).ops.choices()


def resolve_device(device: str, backend: str = "auto") -> ChosenDevice:
    """Which device that is on this machine. A backend asked for by name is one of a processor."""
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
    """Whether the ops are to be batch-invariant on `device`, "cpu" or "cuda:N", and what to say about it. None: where
    that costs nothing."""
    if deterministic is not None:
        return deterministic, None
    if device == CPU:
        return True, None
    return False, "not deterministic: on a GPU batch-invariant ops are slower; --deterministic takes them"


def resolve_sm_split(sm_split: str, num_sms: int) -> str:
    """`EngineConfig.sm_split` without "auto", for a device with so many multiprocessors; 0: a processor. Quarters: each
    part more has a set of captured language steps, and what lies between two is left to the gate between the lanes."""
    if sm_split.strip().lower() != "auto":
        return sm_split
    counts = [num_sms * part // 4 // SM_GRANULE * SM_GRANULE for part in (1, 2, 3)]
    return ",".join(map(str, counts)) if counts[0] else "off"


def lane_note(lane_priority: str, chosen: ChosenDevice) -> str | None:
    """What to say where the streams of a GPU do not have the priorities that `lane_priority` names."""
    return priority_note(lane_priority, chosen.capability)


def resolve_dtype(
    dtype: str, checkpoint_dtype: str, backend: str = "auto", device: str = CPU
) -> tuple[torch.dtype, str]:
    """The compute dtype and why. `dtype`: "auto" or a name of DTYPES; `checkpoint_dtype`: of the stored weights;
    `device`: "cpu" or "cuda:N"."""
    chosen, reason = _resolve_dtype(dtype, checkpoint_dtype, backend, device)
    kept = weights_dtype(chosen, checkpoint_dtype, backend, device)
    return chosen, reason if kept is chosen else f"{reason}; matrices stay {checkpoint_dtype}"


def weights_dtype(dtype: torch.dtype, checkpoint_dtype: str, backend: str = "auto", device: str = CPU) -> torch.dtype:
    """The dtype of matrices where that of activations is `dtype`: beside float32 the native products read 16 bits as
    they are stored. Arguments as those of `resolve_dtype`."""
    native = device == CPU and backend in ("auto", "native") and load_extension()[0] is not None
    return DTYPES.get(checkpoint_dtype, dtype) if native and dtype is torch.float32 else dtype


def _resolve_dtype(dtype: str, checkpoint_dtype: str, backend: str, device: str) -> tuple[torch.dtype, str]:
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
    """What `doctor` prints about the processor and the extension."""
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
    index: int,
    dtype: torch.dtype,
    deterministic: bool,
    threads: int,
    lane_priority: str,
    sm_split: Sequence[int],
    attention: str,
    shapes: Shapes | None,
    profiles: Path | None,
) -> Backend:
    # All of these import GPU libraries, which only now are known to be there and wanted.
    host: Any = importlib.import_module("hydra_engine.backend.cuda.device")
    cuda: Any = importlib.import_module("hydra_engine.backend.cuda.ops")
    of_lanes, split = priorities(lane_priority, chosen.capability), None
    if sm_split:
        sms: Any = importlib.import_module("hydra_engine.backend.cuda.sm_split")
        split = sms.SplitDevice(torch.device("cuda", index), sm_split, of_lanes)
    device = host.CudaDevice(index, threads, _set_threads, of_lanes, split)
    if attention == AUTO:
        assert shapes is not None, "attention is measured for a model"
        timing: Any = importlib.import_module("hydra_engine.backend.cuda.attention_timing")
        driver = devices.probe().driver_version
        choice = timing.choose(device, chosen.num_sms, dtype, shapes, profiles, driver)
    else:
        choice = by_name(attention)
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
    """Of the calling thread: torch's and the extension's."""
    set_torch_threads(count)
    extension, _ = load_extension()
    if extension is not None:
        extension.set_num_threads(count)


def _cpu_ops(backend: str) -> Ops:
    if backend == "reference":
        return ReferenceOps("asked for by name")
    extension, problem = load_extension()
    if extension is not None:
        # The module of the native ops imports the extension, which only now is known to be there.
        native: Any = importlib.import_module("hydra_engine.backend.cpu.ops")
        ops: Ops = native.NativeOps()
        return ops
    if backend == "native":
        raise BackendError(f"backend native: {problem}; `make build` builds it", param="backend")
    logger.warning("%s; run `make build`. Until then every op takes the slow reference path in plain torch", problem)
    return ReferenceOps(f"{problem}; `make build` builds it")
