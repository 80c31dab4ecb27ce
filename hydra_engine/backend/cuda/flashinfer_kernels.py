"""Which of FlashInfer's kernels there are here: those that were compiled ahead, and all others where it can compile.

FlashInfer compiles a kernel at its first use, by nvcc and ninja, from sources in its package. A package that was cut
(`make gpu-wheels`) has no sources, and a machine that only serves no compiler: then there is what was compiled before.
Loads no kernel, and no GPU library but the package where it is asked what is installed.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

DECODE, FA2, FA3 = "decode", "fa2", "fa3"
_PLAIN_GROUPS = (1, 2)  # query heads for each KV head up to which decodes take no tensor cores
_PLAIN_HEAD_DIM = 128  # up to which they do so
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# As 0.7.2 names modules without windows and caps, for keys and values of equal strides.
_NAMED = re.compile(
    r"batch_(?P<kind>decode|prefill)_with_kv_cache_dtype_q_(?P<dtype>bf16|f16)_dtype_kv_(?P=dtype)_dtype_o_(?P=dtype)"
    r"_dtype_idx_i32_head_dim_qk_(?P<dim>\d+)_head_dim_vo_(?P=dim)_posenc_0_use_swa_False_use_logits_cap_False"
    r"(?P<form>|_f16qk_False_kv_stride_equal|_f16qk_False_sm90)"
)
_FORMS = {"decode": DECODE, "prefill_f16qk_False_kv_stride_equal": FA2, "prefill_f16qk_False_sm90": FA3}


class FlashKernel(NamedTuple):
    """Decodes with tensor cores are FA2's."""

    name: str
    dtype: torch.dtype
    head_dim: int


class FlashKernels(NamedTuple):
    """`problem`: why no others than those that are `built` can be had, as a predicate; empty: they are compiled at
    first use."""

    built: frozenset[FlashKernel] = frozenset()
    problem: str = ""

    def lacks(self, name: str, dtype: torch.dtype, head_dim: int) -> str:
        """Why there is no such kernel; empty: there is."""
        if not self.problem or FlashKernel(name, dtype, head_dim) in self.built:
            return ""
        return f"{name}-{head_dim} for {str(dtype).removeprefix('torch.')} is not compiled, and {self.problem}"

    def prompts(self, wanted: str, dtype: torch.dtype, head_dim: int, *, hopper: bool) -> str | None:
        """The library's name of what computes prompts and segments where "auto", FA2 or FA3 is asked for."""
        if wanted == "auto" and self.problem:
            wanted = FA3 if hopper and not self.lacks(FA3, dtype, head_dim) else FA2
        return None if wanted != "auto" and self.lacks(wanted, dtype, head_dim) else wanted

    def listed(self) -> str:
        names = sorted({(kernel.name, kernel.head_dim) for kernel in self.built})
        return ", ".join(f"{name}-{head_dim}" for name, head_dim in names) or "none"


def takes_tensor_cores(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether decodes do; else they are DECODE's."""
    return heads // kv_heads not in _PLAIN_GROUPS or head_dim > _PLAIN_HEAD_DIM


def decode_kernel(heads: int, kv_heads: int, head_dim: int) -> str:
    return FA2 if takes_tensor_cores(heads, kv_heads, head_dim) else DECODE


def installed() -> FlashKernels:
    """The kernels of the package `flashinfer`, which has to be there and is imported."""
    library: Any = importlib.import_module("flashinfer")
    env = library.jit.env
    others = (name for provider in getattr(env, "FLASHINFER_AOT_PROVIDERS", ()) for name in provider.modules)
    return _in_folders(env.FLASHINFER_AOT_DIR, env.FLASHINFER_INCLUDE_DIR, others)


def carried() -> str:
    """What the package has, without importing it, which takes seconds; "" where there is none."""
    try:
        folder = Path(str(metadata.distribution("flashinfer-python").locate_file("flashinfer"))) / "data"
    except metadata.PackageNotFoundError:
        return ""
    kernels = _in_folders(folder / "aot", folder / "include")
    return f"{kernels.listed()}; {kernels.problem}"


def _in_folders(ahead: Path, headers: Path, others: Iterable[str] = ()) -> FlashKernels:
    names = {path.parent.name for path in ahead.glob("*/*.so")}.union(others)
    return FlashKernels(frozenset(_kernels(names)), _problem(headers))


def _kernels(names: Iterable[str]) -> Iterable[FlashKernel]:
    for match in filter(None, map(_NAMED.fullmatch, names)):
        if name := _FORMS.get(match["kind"] + match["form"]):
            yield FlashKernel(name, _TYPES[match["dtype"]], int(match["dim"]))


def _problem(headers: Path) -> str:
    """Why FlashInfer cannot compile here, empty if it can: a compiler is looked for where it looks for one."""
    if not headers.exists():
        return "its package has no sources to compile more"
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT keeps it from compiling more"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = "nvcc" if home is None and shutil.which("nvcc") else f"{home or '/usr/local/cuda'}/bin/nvcc"
    if shutil.which(os.environ.get("FLASHINFER_NVCC", beside)) is None:
        return "there is no nvcc to compile more"
    return "" if shutil.which("ninja") else "there is no ninja on the path to compile more"
