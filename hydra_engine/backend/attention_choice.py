"""Which attention kernels a GPU takes, and why others cannot be had.

Loads no GPU library but the one that was asked for by name, to see whether it is there."""

from __future__ import annotations

import importlib

import torch

from hydra_engine.errors import BackendError, ConfigError

FLASHINFER, TRITON = "flashinfer", "triton"
# FlashInfer builds for other head dims without complaint and then reads the wrong columns.
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def resolve_attention(
    wanted: str, *, on_gpu: bool, dtype: torch.dtype, head_dim: int, block_size: int, deterministic: bool
) -> str:
    """ "triton" or "flashinfer". `head_dim` of the language model. What was asked for by name is taken or refused with
    the reason: ConfigError, or BackendError where the package is missing."""
    if wanted != "auto" and not on_gpu:
        raise ConfigError(
            f"attention_backend {wanted} runs on a GPU; set attention_backend to auto or device to cuda:0",
            param="attention_backend",
        )
    if wanted != FLASHINFER:
        return TRITON
    if reason := _unfit(dtype, head_dim, block_size, deterministic):
        raise ConfigError(
            f"attention_backend flashinfer {reason}; set attention_backend to triton", param="attention_backend"
        )
    if missing := _missing():
        raise BackendError(
            f"attention_backend flashinfer: {missing}; `pip install flashinfer-python` or set attention_backend to "
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
    try:
        importlib.import_module("flashinfer")
    except ImportError as error:
        named = error.name or "flashinfer"
        return "the package is not installed" if named == "flashinfer" else f"its package {named} is not installed"
    return ""


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
