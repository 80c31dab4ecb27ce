"""Lists FlashInfer's usable kernels: those compiled ahead of time, and all others if it can compile here.

FlashInfer compiles a kernel at first use, with nvcc and ninja, from sources in its package. A reduced package (`make
gpu-wheels`) has no sources, and a serving machine no compiler: then only the compiled ones are usable. Loads no kernel,
and imports no GPU library except the package itself, in `installed`.
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
_PLAIN_GROUPS = (1, 2)  # query heads per KV head for which decodes use no tensor cores
_PLAIN_HEAD_DIM = 128  # the largest head dim for which decodes use no tensor cores
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Module names of 0.7.2, without windows and logit caps, for keys and values of equal strides.
_NAMED = re.compile(
    r"batch_(?P<kind>decode|prefill)_with_kv_cache_dtype_q_(?P<dtype>bf16|f16)_dtype_kv_(?P=dtype)_dtype_o_(?P=dtype)"
    r"_dtype_idx_i32_head_dim_qk_(?P<dim>\d+)_head_dim_vo_(?P=dim)_posenc_0_use_swa_False_use_logits_cap_False"
    r"(?P<form>|_f16qk_False_kv_stride_equal|_f16qk_False_sm90)"
)
_FORMS = {"decode": DECODE, "prefill_f16qk_False_kv_stride_equal": FA2, "prefill_f16qk_False_sm90": FA3}


class FlashKernel(NamedTuple):
    """A compiled kernel. name: DECODE, FA2 or FA3; decodes with tensor cores are FA2's."""

    name: str
    dtype: torch.dtype
    head_dim: int


class FlashKernels(NamedTuple):
    """The usable kernels. problem: the reason why only the `built` ones are, a clause in which "it" is FlashInfer;
    empty if others are compiled at first use."""

    built: frozenset[FlashKernel] = frozenset()
    problem: str = ""

    def reason_missing(self, name: str, dtype: torch.dtype, head_dim: int) -> str:
        """The reason why this kernel cannot be used; empty if it is built or can be compiled at first use."""
        if not self.problem or FlashKernel(name, dtype, head_dim) in self.built:
            return ""
        return f"{name}-{head_dim} for {str(dtype).removeprefix('torch.')} is not compiled, and {self.problem}"

    def prompts(self, wanted: str, dtype: torch.dtype, head_dim: int, *, hopper: bool) -> str | None:
        """FlashInfer's name of the kernel for prompts and segments; None if the kernel cannot be used.

        wanted: "auto", FA2 or FA3. "auto" is returned unchanged if kernels can be compiled here, since FlashInfer then
        chooses; otherwise it means FA3 if that is built and the GPU is a Hopper (`hopper`), else FA2.
        """
        if wanted == "auto" and self.problem:
            wanted = FA3 if hopper and not self.reason_missing(FA3, dtype, head_dim) else FA2
        return None if wanted != "auto" and self.reason_missing(wanted, dtype, head_dim) else wanted

    def describe(self) -> str:
        """Names and head dims of the built kernels, such as "decode-128, fa2-128"; "none" without any."""
        names = sorted({(kernel.name, kernel.head_dim) for kernel in self.built})
        return ", ".join(f"{name}-{head_dim}" for name, head_dim in names) or "none"


def uses_tensor_cores(heads: int, kv_heads: int, head_dim: int) -> bool:
    """True if decodes use tensor cores (FA2); otherwise they use DECODE."""
    return heads // kv_heads not in _PLAIN_GROUPS or head_dim > _PLAIN_HEAD_DIM


def decode_kernel(heads: int, kv_heads: int, head_dim: int) -> str:
    """FA2 or DECODE, the kernel that decodes with these heads use."""
    return FA2 if uses_tensor_cores(heads, kv_heads, head_dim) else DECODE


def installed() -> FlashKernels:
    """The usable kernels of the installed FlashInfer. Imports it; raises ImportError if it is not installed."""
    library: Any = importlib.import_module("flashinfer")
    env = library.jit.env
    others = (name for provider in getattr(env, "FLASHINFER_AOT_PROVIDERS", ()) for name in provider.modules)
    return _find_kernels(env.FLASHINFER_AOT_DIR, env.FLASHINFER_INCLUDE_DIR, others)


def describe_installed() -> str:
    """The built kernels in FlashInfer's package and why it can compile no others (empty if it can), with "; " between
    them; "" if it is not installed. Does not import it, which takes seconds, nor list kernels of other packages."""
    try:
        folder = Path(str(metadata.distribution("flashinfer-python").locate_file("flashinfer"))) / "data"
    except metadata.PackageNotFoundError:
        return ""
    kernels = _find_kernels(folder / "aot", folder / "include")
    return f"{kernels.describe()}; {kernels.problem}"


def _find_kernels(ahead: Path, headers: Path, others: Iterable[str] = ()) -> FlashKernels:
    """Lists kernels. ahead: folder of those compiled ahead of time. headers: folder of the sources, which a reduced
    package lacks. others: module names of further compiled ones."""
    names = {path.parent.name for path in ahead.glob("*/*.so")}.union(others)
    return FlashKernels(frozenset(_kernels(names)), _problem(headers))


def _kernels(names: Iterable[str]) -> Iterable[FlashKernel]:
    """Yields the kernels with these module names of FlashInfer; names of other kinds are skipped."""
    for match in filter(None, map(_NAMED.fullmatch, names)):
        if name := _FORMS.get(match["kind"] + match["form"]):
            yield FlashKernel(name, _TYPES[match["dtype"]], int(match["dim"]))


def _problem(headers: Path) -> str:
    """The reason why FlashInfer cannot compile here; empty if it can. Looks for a compiler where FlashInfer does.
    headers: as in `_find_kernels`."""
    if not headers.exists():
        return "its package has no sources to compile more"
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT keeps it from compiling more"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = "nvcc" if home is None and shutil.which("nvcc") else f"{home or '/usr/local/cuda'}/bin/nvcc"
    if shutil.which(os.environ.get("FLASHINFER_NVCC", beside)) is None:
        return "there is no nvcc to compile more"
    return "" if shutil.which("ninja") else "there is no ninja on the path to compile more"
