"""Chooses the attention kernels of a GPU, and says why others cannot be used.

Loads no GPU library but the one that was asked for, to see whether it is there. Does not know which is faster:
attention_timing.py finds that out.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from hydra_engine.errors import BackendError, ConfigError

FLASHINFER, TRITON, AUTO = "flashinfer", "triton", "auto"
# FlashInfer builds for other head dims without complaint and then reads the wrong columns.
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)


class Heads(NamedTuple):
    """Of a language model's attention, and the cache that it reads."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


class ChosenAttention(NamedTuple):
    """`name` FLASHINFER or TRITON; `note` is for the start-up summary, None where there was nothing to choose.
    `only_paged`: towers of pictures take TRITON all the same, since they are not measured."""

    name: str
    reason: str = "asked for by name"
    note: str | None = None
    only_paged: bool = False


def resolve_attention(name: str, *, on_gpu: bool, dtype: torch.dtype, heads: Heads, deterministic: bool) -> str:
    """TRITON, FLASHINFER, or AUTO where both can compute and a measurement is to decide. What was asked for by name is
    taken or refused with the reason: ConfigError, or BackendError where the package is missing."""
    if name != AUTO and not on_gpu:
        raise ConfigError(
            f"attention_backend {name} runs on a GPU; set attention_backend to auto or device to cuda:0",
            param="attention_backend",
        )
    if name == TRITON or not on_gpu:
        return TRITON
    reason = _unfit(dtype, heads.head_dim, heads.block_size, deterministic)
    if name == AUTO:
        return TRITON if reason or _missing() else AUTO
    if reason:
        raise ConfigError(
            f"attention_backend flashinfer {reason}; set attention_backend to triton", param="attention_backend"
        )
    if missing := _missing():
        raise BackendError(
            f"attention_backend flashinfer: {missing}; `pip install -U flashinfer-python` or set attention_backend to "
            "triton",
            param="attention_backend",
        )
    return FLASHINFER


def _unfit(dtype: torch.dtype, head_dim: int, block_size: int, deterministic: bool) -> str:
    if deterministic:
        return "divides contexts by what else is in the batch, so it is not deterministic"
    if dtype not in DTYPES:
        return f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims of {_listed(HEAD_DIMS)}, the model's is {head_dim}"
    if block_size not in BLOCK_SIZES:
        return f"takes a block_size of {_listed(BLOCK_SIZES)}, not {block_size}"
    return ""


def _missing() -> str:
    """Of what is needed; a library that is there and does not load (no driver, a broken build) is missing too."""
    try:
        library: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        named = error.name or "flashinfer"
        return "the package is not installed" if named == "flashinfer" else f"its package {named} is not installed"
    except (OSError, RuntimeError) as error:
        return f"the package does not load ({error})"[:200]
    return "" if hasattr(library, "fast_decode_plan") else "the package is older than 0.4"


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
