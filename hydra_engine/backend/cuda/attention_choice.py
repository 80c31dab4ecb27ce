"""Chooses the attention kernels of a GPU, for decodes, prompts, pictures and windows separately, with reasons.

Imports no GPU library except FlashInfer, if it was asked for, to see whether it is installed. Does not know which
kernel is faster: attention_timing.py measures that.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.errors import BackendError, ConfigError

FLASHINFER, TRITON, AUTO = "flashinfer", "triton", "auto"
# Further candidates: our kernels with TMA descriptors, FlashInfer's for Ampere and for Hopper, and torch's.
TRITON_TMA, FLASHINFER_FA2, FLASHINFER_FA3 = "triton-tma", "flashinfer-fa2", "flashinfer-fa3"
CUDNN, VARLEN = "cudnn", "torch-varlen"
FLASHINFER_PROMPTS = {FLASHINFER: "auto", FLASHINFER_FA2: "fa2", FLASHINFER_FA3: "fa3"}  # the library's names
# Use cases. The segments of a captured encode are known to the device only.
DECODES, PROMPTS, PICTURES, WINDOWS = "decodes", "prompts", "pictures", "windows"
CAPTURED_PICTURES, CAPTURED_WINDOWS = "captured pictures", "captured windows"
USES = {
    "attention_paged": (DECODES, PROMPTS),
    "attention_packed": (PICTURES, WINDOWS, CAPTURED_PICTURES, CAPTURED_WINDOWS),
}
MARGIN = 1.03  # speedup over Triton that another kernel needs to be chosen, so that noise does not decide

# FlashInfer builds for other head dims without complaint and then reads the wrong columns.
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)


class Heads(NamedTuple):
    """Shape of a language model's attention: query heads, KV heads, head dim, and slots per block of its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


class Tower(NamedTuple):
    """Shape of a vision tower's attention."""

    heads: int
    head_dim: int
    rows: int  # of a whole picture
    window: int  # rows of a window; 0: no windows


class Shapes(NamedTuple):
    """Attention shapes of an instance; None for a model that it does not have."""

    language: Heads | None = None
    tower: Tower | None = None


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of attention kernels by use case, then candidate: seconds per call, or the reason why there is no time.
    TRITON is timed in every use case."""

    seconds: dict[str, dict[str, float]]
    left_out: dict[str, dict[str, str]]
    date: str  # UTC

    def best(self, use: str) -> str:
        """The fastest candidate if TRITON takes at least MARGIN times as long, else TRITON."""
        seconds = self.seconds[use]
        fastest = min(seconds, key=seconds.__getitem__)
        return fastest if seconds[TRITON] >= MARGIN * seconds[fastest] else TRITON

    def describe(self, use: str) -> str:
        """A line for the user: the use case and its best candidate; then, for each candidate but TRITON, its speed as a
        multiple of TRITON's or the reason why it was left out. For PROMPTS it adds that captured steps take
        TRITON, where that is not the best."""
        seconds = self.seconds[use]
        parts = [f"{name} {seconds[TRITON] / taken:.2f}" for name, taken in seconds.items() if name != TRITON]
        parts += [f"{name}: {why}" for name, why in self.left_out.get(use, {}).items()]
        best = self.best(use)
        captured = "; captured steps with prompts triton" if use == PROMPTS and best != TRITON else ""
        return f"{use} {best}" + (f" ({', '.join(parts)})" if parts else "") + captured


class ChosenAttention(NamedTuple):
    """The candidate selected for each use case (absent: TRITON), reasons by op, and a note for the start-up summary."""

    names: Mapping[str, str] = MappingProxyType({})
    reasons: Mapping[str, str] = MappingProxyType({})
    note: str | None = None

    def kernel_for(self, use: str) -> str:
        """The candidate selected for a use case (DECODES, ..); TRITON if none was."""
        return self.names.get(use, TRITON)

    def choices(self) -> dict[str, tuple[str, str]]:
        """(implementation, reason) by op, for `Ops.choices`; only ops with a reason. An implementation names the
        candidates of all use cases of its op."""
        return {op: (", ".join(dict.fromkeys(map(self.kernel_for, USES[op]))), why) for op, why in self.reasons.items()}


def choose_by_name(name: str) -> ChosenAttention:
    """Selects `name`: TRITON, or FLASHINFER, which must be installed, for all use cases but captured encodes and
    captured steps with prompts. Calls that FlashInfer does not support take Triton."""
    if name == TRITON:
        return ChosenAttention()
    kernels = flashinfer_kernels.installed()
    others = f"asked for by name; head dims other than {_listed(HEAD_DIMS, 'and')}"
    if kernels.problem:
        others = f"asked for by name; of its kernels there are {kernels.describe()}, and {kernels.problem}; others"
    return ChosenAttention(
        dict.fromkeys((DECODES, PROMPTS, PICTURES, WINDOWS), FLASHINFER),
        {
            "attention_paged": f"{others}, and captured steps with prompts, take Triton",
            "attention_packed": f"{others}, and encodes that are captured, take Triton",
        },
        "attention: flashinfer; captured steps with prompts, and captured encodes, take triton",
    )


def choose_by_time(measured: Measured) -> ChosenAttention:
    """Selects the best candidate of each measured use case; the measured speeds are the reasons and the note."""
    since = f"speeds are relative to triton's, measured on {measured.date}"
    reasons = {
        op: f"{'; '.join(measured.describe(use) for use in uses if use in measured.seconds)}; {since}"
        for op, uses in USES.items()
        if any(use in measured.seconds for use in uses)
    }
    found = "; ".join(map(measured.describe, measured.seconds))
    names = {use: measured.best(use) for use in measured.seconds}
    return ChosenAttention(names, reasons, f"attention: {found}; {since}" if found else None)


def resolve_attention(name: str, *, on_gpu: bool, dtype: torch.dtype, heads: Heads, deterministic: bool) -> str:
    """Resolves the setting to TRITON, FLASHINFER, or AUTO (to be measured).

    `auto` becomes TRITON without a GPU, if deterministic, and for dtypes that FlashInfer does not compute in. A kernel
    asked for by name is used or refused with the reason: raises ConfigError without a GPU or if the kernel cannot
    compute this, BackendError if FlashInfer, or its kernel for decodes or prompts, is missing.
    """
    if name != AUTO and not on_gpu:
        raise ConfigError(
            f"attention_backend {name} runs on a GPU; set attention_backend to auto or device to cuda:0",
            param="attention_backend",
        )
    if name == TRITON or not on_gpu:
        return TRITON
    if name == AUTO:
        return TRITON if deterministic or dtype not in DTYPES else AUTO
    reason = flashinfer_problem(dtype, heads.head_dim, heads.block_size, deterministic)
    if reason:
        raise ConfigError(
            f"attention_backend flashinfer {reason}; set attention_backend to triton", param="attention_backend"
        )
    if missing := flashinfer_missing():
        raise BackendError(
            f"attention_backend flashinfer: {missing}; `pip install -U flashinfer-python` or set attention_backend to "
            "triton",
            param="attention_backend",
        )
    if missing := _missing_kernel(dtype, heads):
        raise BackendError(
            f"attention_backend flashinfer: its kernel {missing}; install the whole package with nvcc and ninja, or "
            "have `make gpu-wheels` compile it (--kernels), or set attention_backend to triton",
            param="attention_backend",
        )
    return FLASHINFER


def _missing_kernel(dtype: torch.dtype, heads: Heads) -> str:
    """The reason why FlashInfer, which must be installed, has no kernel for decodes, or neither FA2 nor FA3 for
    prompts; empty if it has both."""
    kernels = flashinfer_kernels.installed()
    decode = flashinfer_kernels.decode_kernel(heads.heads, heads.kv_heads, heads.head_dim)
    decodes, fa2, fa3 = (kernels.reason_missing(name, dtype, heads.head_dim) for name in (decode, "fa2", "fa3"))
    return decodes or (fa3 and fa2)


def flashinfer_problem(dtype: torch.dtype, head_dim: int, block_size: int, deterministic: bool = False) -> str:
    """The reason why FlashInfer cannot compute this, worded to follow its name ("takes head dims of .."); empty if it
    can."""
    if deterministic:
        return "divides contexts by what else is in the batch, so it is not deterministic"
    if dtype not in DTYPES:
        return f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims of {_listed(HEAD_DIMS)}, the model's is {head_dim}"
    if block_size not in BLOCK_SIZES:
        return f"takes a block_size of {_listed(BLOCK_SIZES)}, not {block_size}"
    return ""


def flashinfer_missing() -> str:
    """The reason why FlashInfer cannot be used: not installed, older than 0.4, or it does not load (no driver, a broken
    build); empty if it can. Imports it."""
    try:
        library: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        named = error.name or "flashinfer"
        return "the package is not installed" if named == "flashinfer" else f"its package {named} is not installed"
    except (OSError, RuntimeError) as error:
        return f"the package does not load ({error})"[:200]
    return "" if hasattr(library, "fast_decode_plan") else "the package is older than 0.4"


def _listed(numbers: tuple[int, ...], word: str = "or") -> str:
    """Joins numbers by commas, and the last one by `word`."""
    return f"{', '.join(map(str, numbers[:-1]))} {word} {numbers[-1]}"
