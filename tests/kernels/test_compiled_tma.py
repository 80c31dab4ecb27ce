"""The kernels with descriptors compiled for sm_90, which alone has what they are for: all keys and values come through
the Tensor Memory Accelerator into products of warp groups, and two programs fit on a multiprocessor."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import pytest
import torch

from hydra_kernels.packed_attention import packed_attention
from hydra_kernels.prefill_attention import prefill_attention
from tests.kernels.compiling import SHARED_LIMIT, Compiled, compile_for, record, specialised

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels; unset TRITON_INTERPRET"
)
BF16 = torch.bfloat16
REGISTERS = 65536  # of a multiprocessor


def packed(dim: int, *, segments: int = 4) -> object:
    """Compiles packed attention with TMA; programs search for their segment if there are more than four."""
    q, k, v = torch.zeros(600, 3, 16, dim, dtype=BF16).unbind(1)
    cu_seqlens = torch.zeros(segments + 1, dtype=torch.int32)
    return packed_attention(q, k, v, cu_seqlens, 0.1, max_length=577, search=segments > 4, tma=True)


def prefill(heads: int, kv_heads: int, dim: int, block: int) -> object:
    cache = torch.zeros(4, 2, 2, block, kv_heads, dim, dtype=BF16)
    q = torch.zeros(300, heads + 2 * kv_heads, dim, dtype=BF16)[:, :heads]
    tables, numbers = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    return prefill_attention(q, cache[:, 1, 0], cache[:, 1, 1], tables, numbers, numbers[:4], 0.1, max_q=300, tma=True)


CASES: dict[str, Callable[[], object]] = {
    "packed-64": lambda: packed(64),
    "packed-72": lambda: packed(72),
    "packed-80": lambda: packed(80, segments=66),
    "packed-128": lambda: packed(128),
    "prefill-mha-80": lambda: prefill(16, 16, 80, 64),
    "prefill-gqa-128": lambda: prefill(28, 4, 128, 128),
}


@cache
def compiled(name: str) -> Compiled:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (launch,) = record(monkeypatch, CASES[name])
    assert launch.name.endswith("_tma_kernel")
    return compile_for(launch, 90)


QUICK = pytest.mark.quick("packed-80")


@QUICK
@pytest.mark.parametrize("name", CASES)
def test_descriptors_feed_products_of_warp_groups(name: str) -> None:
    result = compiled(name)
    tiles = 2 * (2 if name.endswith(("72", "80")) else 1)  # of keys and values, in one or two parts
    # Those that fill the stages, those in the loop and those behind it.
    assert result.count(r"cp\.async\.bulk\.tensor\.\dd\.shared") >= 3 * tiles
    assert result.count(r"cp\.async\.c[ag][^;]*0x10") == 0, "keys or values come another way"
    assert result.count(r"wgmma\.mma_async") > 0 and result.count(r"\bmma\.sync") == 0


@QUICK
@pytest.mark.parametrize("name", CASES)
def test_products_are_waited_for_together(name: str) -> None:
    """ptxas waits after each if it has too few registers."""
    code = compiled(name).machine_code()
    assert code.count("WARPGROUP.DEPBAR") <= code.count("HGMMA") // 3


@QUICK
@pytest.mark.parametrize("name", CASES)
def test_as_many_programs_fit_as_were_meant_to(name: str) -> None:
    """Triton adds no partition of specialised warps to the warps asked for."""
    result = compiled(name)
    assert result.stack == 0 and result.warps == 8 and result.count("setmaxnreg") == 0
    programs = 1 if name.endswith("128") else 2
    assert programs * result.registers * 32 * result.warps <= REGISTERS
    assert programs * (result.shared + 1024) <= SHARED_LIMIT[90] + 1024  # the driver keeps 1 KiB for each


def test_any_number_of_pictures_takes_what_one_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.zeros(600, 3, 16, 80, dtype=BF16).unbind(1)
    kinds = set()
    for segments, first in ((1, 0), (2, 1), (3, 3), (16, 4), (32, 5)):
        bounds = torch.zeros(64, dtype=torch.int32)[first : first + segments + 1]
        (launch,) = record(
            monkeypatch, lambda bounds=bounds: packed_attention(q, k, v, bounds, 0.1, max_length=577, tma=True)
        )
        kinds.add(repr((specialised(launch), launch.options)))
    assert len(kinds) == 1
