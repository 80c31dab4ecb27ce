"""Which attention kernels are faster on this device for this model: both are run, timed and compared once, at start.

A decode over a cache that no L2 holds, and a chunk of a prompt, captured as graphs, so that what launching costs the
host does not count. Kernels that cannot run, or give other results than ours, are not taken. Does not know the model's
weights, nor how steps are mixed: both cases count alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, PagedCache
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import FLASHINFER, TRITON, ChosenAttention, Heads
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.graphs import GraphPools
from hydra_engine.backend.device import Device
from hydra_engine.errors import BackendError

CACHE_BYTES = 256 << 20
NUM_ROWS = 32
MAX_CONTEXT = 4096
CHUNK, CHUNK_CONTEXT = 1024, 2048
LAUNCHES = 8  # in a graph, as if they were layers
REPLAYS = 5
MARGIN = 1.03  # so many times as fast has FlashInfer to be: a choice that noise makes is no choice
TOLERANCE = 0.05  # of the largest result; kernels of these types differ by about a hundredth

Launch = Callable[[], None]
Seconds = Callable[[Launch], float]  # that the device takes for what is launched
Attention = CudaAttention | FlashInferAttention


class Case(NamedTuple):
    """Rows of `num_q` queries each at the end of `num_context` tokens of their own."""

    name: str
    rows: int
    num_q: int
    num_context: int


def choose(device: Device, num_sms: int, dtype: torch.dtype, heads: Heads) -> ChosenAttention:
    """In inference mode, in a thread that works on no stream of its own; what it took is free again afterwards."""
    on = device.torch_device
    with torch.cuda.device(on):
        by_triton = CudaAttention(on, num_sms, device.send, deterministic=False)
        choice = compare(
            by_triton,
            lambda: FlashInferAttention(on, num_sms, device.send, by_triton),
            random_cache(heads, dtype, on),
            heads,
            partial(captured_seconds, GraphPools(on)),
        )
        device.finish()
    device.trim()
    return choice


def compare(
    by_triton: Attention, make_other: Callable[[], Attention], cache: PagedCache, heads: Heads, seconds: Seconds
) -> ChosenAttention:
    """The other one is made here, for that too may fail."""
    ratios: dict[str, float] = {}
    try:
        other = make_other()
        for case in cases(cache):
            ours, theirs = (_prepared(attention, case, cache, heads) for attention in (by_triton, other))
            if not _agree(theirs(), expected=ours()):
                return _triton(f"flashinfer gives other results for {case.name}")
            ratios[case.name] = seconds(_repeated(ours)) / seconds(_repeated(theirs))
    except (BackendError, RuntimeError, OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        # It compiles its kernels at first use, which needs a compiler and a cache folder.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _triton(f"flashinfer could not be tried ({lines[0][:160]})")
    speed = prod(ratios.values()) ** (1 / len(ratios))
    by_case = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    measured = f"measured at start, {speed:.2f} times as fast as triton ({by_case})"
    if speed < MARGIN:
        return _triton(f"flashinfer was {measured}")
    return ChosenAttention(FLASHINFER, measured, f"attention: flashinfer, {measured}", only_paged=True)


def cases(cache: PagedCache) -> tuple[Case, ...]:
    """As far as the cache has tokens."""
    context = min(MAX_CONTEXT, cache.num_blocks // NUM_ROWS * cache.block_size)
    chunk_context = min(CHUNK_CONTEXT, cache.num_blocks * cache.block_size)
    return (
        Case("decodes", NUM_ROWS, 1, context),
        Case("prefills", 1, min(CHUNK, chunk_context), chunk_context),
    )


def random_cache(heads: Heads, dtype: torch.dtype, device: torch.device, num_bytes: int = CACHE_BYTES) -> PagedCache:
    """Of one layer."""
    block = (1, 2, heads.block_size, heads.kv_heads, heads.head_dim)
    most = -(-MAX_CONTEXT // heads.block_size) * NUM_ROWS
    num_blocks = max(NUM_ROWS, min(most, num_bytes // (prod(block) * dtype.itemsize)))
    return PagedCache(torch.randn((num_blocks, *block), dtype=dtype, device=device))


def captured_seconds(pools: GraphPools, launch: Launch) -> float:
    """Of one replay, the fastest of some."""
    graph = pools.capture(launch)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def _prepared(attention: Attention, case: Case, cache: PagedCache, heads: Heads) -> Callable[[], Tensor]:
    """Computes the case."""
    data = cache.data
    shape = (case.rows * case.num_q, heads.heads, heads.head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device=data.device, dtype=data.dtype)
    plan = _planned(attention, case, cache)
    return lambda: attention.paged(q, cache, 0, plan, float(heads.head_dim**-0.5))


def _planned(attention: Attention, case: Case, cache: PagedCache) -> AttentionPlan:
    """A decode as graphs have it."""
    width = -(-case.num_context // cache.block_size)
    context = np.full(case.rows, case.num_context, dtype=np.int32)
    order = np.random.default_rng(1).permutation(cache.num_blocks).astype(np.int32)
    tables = order[: case.rows * width].reshape(case.rows, width)
    if case.num_q > 1:
        bounds = np.arange(case.rows + 1, dtype=np.int32) * np.int32(case.num_q)
        return attention.plan(*(torch.from_numpy(array) for array in (bounds, context, tables)))
    plan = attention.plan_decode(*(torch.from_numpy(array).to(cache.data.device) for array in (context, tables)))
    if plan.refresh is not None:
        plan.refresh(context, tables)
    return plan


def _repeated(attend: Callable[[], Tensor]) -> Launch:
    def launch() -> None:
        for _ in range(LAUNCHES):
            attend()

    return launch


def _agree(given: Tensor, expected: Tensor) -> bool:
    furthest = (given.float() - expected.float()).abs().max()
    return bool(furthest <= TOLERANCE * expected.float().abs().max())


def _triton(why: str) -> ChosenAttention:
    return ChosenAttention(TRITON, why, f"attention: triton; {why}")
