"""Paged caches on the kernels of csrc/cuda: every case of tests/ops and those of tests/gpu that need no stream, then
what they leave out: alignments, slots far into a pool, launches and their shapes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import HeadNorms, PagedCache
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.cuda import cache as cuda_cache
from tests.gpu import test_cache_ops as device_cases
from tests.gpu.on_device import OnDevice
from tests.native.host_cuda.conftest import Launch
from tests.ops import test_block_copies
from tests.ops import test_cache_ops as cases
from tests.ops import test_heads as heads

for _module in (cases, test_block_copies):
    for _name, _case in vars(_module).items():
        if _name.startswith("test_"):
            globals()[_name] = _case

test_norm_and_rotation = device_cases.test_norm_and_rotation_are_as_exact_as_the_formula
test_blocks_of_a_request = device_cases.test_blocks_of_a_request_go_out_and_come_back

Launches = Callable[[], list[Launch]]
NATIVE = NativeOps()
DIMS = [2, 18, 64, 72, 80, 96, 128, 258]
MAP_NORESERVE = 0x4000


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_indices_that_nobody_checked_do_the_same(cuda: torch.device, dtype: torch.dtype) -> None:
    device_cases.test_indices_on_the_device_do_the_same(cuda, dtype)


@pytest.mark.usefixtures("unchecked")
def test_a_kernel_skips_a_bad_index(cuda: torch.device, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cases, "_C", host)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device_cases.test_a_kernel_skips_a_bad_index_and_the_next_call_says_so(cuda)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", [48, -2, 2**31, 2**32, 2**40 + 3, -(2**63)])
def test_of_a_token_with_a_bad_slot_only_the_query_is_there(ops: OnDevice, host: Any, bad: int) -> None:
    cache, other = (cases.poisoned((3, 2, 2, 16, 2, 64), torch.bfloat16) for _ in range(2))
    q, k, v = cases.fused_rows(5, [2, 1, 1], 2, 64, torch.bfloat16)
    angles, slots = heads.angles(5, 64), torch.tensor([3, 40, 0, 17, 47])
    expected = NATIVE.rope_and_write(q, k, v, angles, other, 1, slots.where(slots != 0, -1))
    slots[2] = bad
    assert torch.equal(ops.rope_and_write(q, k, v, angles, cache, 1, slots), expected)
    assert torch.equal(cases.bits(cache.data), cases.bits(other.data))
    with pytest.raises(ValueError, match=r"slots: a kernel on device 0 skipped index 2\b"):
        host.cuda_check_faults(0)


# ---- against the processor's kernels


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_heads_of_every_size_are_the_processors(ops: OnDevice, dtype: torch.dtype, dim: int, tokens: int) -> None:
    cache, other = (cases.poisoned((3, 2, 2, 5, 2, dim), dtype) for _ in range(2))
    q, k, v = cases.fused_rows(tokens, [3, 1, 1], 2, dim, dtype)
    slots = cases.some_slots(cache, tokens)
    slots[1:-1:4] = -1
    result = ops.rope_and_write(q, k, v, heads.angles(tokens, dim), cache, 1, slots)
    assert torch.equal(result, NATIVE.rope_and_write(q, k, v, heads.angles(tokens, dim), other, 1, slots))
    assert torch.equal(cases.bits(cache.data), cases.bits(other.data))


# ---- alignment


def shifted(tensor: Tensor, elements: int = 1) -> Tensor:
    """A contiguous copy that begins so many elements behind a multiple of 64 bytes and ends where its memory ends."""
    memory = torch.empty(elements + tensor.numel(), dtype=tensor.dtype)
    assert memory.data_ptr() % 64 == 0
    return memory[elements:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("which", ["none", "q", "k", "v", "cos", "sin", "q_norm", "k_norm", "cache"])
def test_rope_of_unaligned_memory_takes_single_elements(
    ops: OnDevice, launches: Launches, dtype: torch.dtype, which: str
) -> None:
    q, k, v = (cases.random(7, count, 64, dtype=dtype, seed=count) for count in (4, 2, 2))
    cos, sin = (angle.contiguous() for angle in heads.angles(7, 64))
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}
    given |= {name: cases.random(64, dtype=dtype, seed=9) for name in ("q_norm", "k_norm")}
    slots = torch.arange(2, 9)
    results = []
    for moved in ("none", which):
        used = {name: shifted(x) if name == moved else x for name, x in given.items()}
        cache = cases.poisoned((2, 1, 2, 8, 2, 64), dtype)
        if moved == "cache":
            cache = PagedCache(shifted(cache.data))
        rows, rotary, norms = [*used.values()][:3], (used["cos"], used["sin"]), (used["q_norm"], used["k_norm"])
        result = ops.rope_and_write(*rows, rotary, cache, 0, slots, HeadNorms(*norms, heads.EPS))
        results.append((result, cache.data))
        assert (launches()[0].widest == 16) == (moved == "none")
    for aligned, unaligned in zip(*results, strict=True):
        # Sums of squares are taken in another order.
        torch.testing.assert_close(
            unaligned, aligned, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("which", ["none", "rows", "cache", "stride"])
def test_unaligned_rows_arrive_in_smaller_pieces(
    ops: OnDevice, launches: Launches, dtype: torch.dtype, which: str
) -> None:
    cache = cases.poisoned((3, 2, 1, 8, 1, 264), dtype)
    cache = PagedCache(shifted(cache.data)) if which == "cache" else cache
    features, slots = cases.random(11, 1, 264, dtype=dtype), cases.some_slots(cache, 11)
    sources = {"rows": shifted(features), "stride": torch.cat((features, features[..., :1]), dim=2)[..., :264]}
    ops.write_cache(cache, 0, [sources.get(which, features)], slots)
    expected = cases.poisoned((3, 2, 1, 8, 1, 264), dtype)
    expected.data[slots // 8, 0, 0, slots % 8] = features
    assert torch.equal(cases.bits(cache.data), cases.bits(expected.data))
    gathered = ops.gather_cache(cache, 0, 0, slots)
    assert torch.equal(gathered, features)
    written, read = launches()
    element = dtype.itemsize
    # Slots take 8 bytes.
    assert written.widest == (16 if which == "none" else 8) and read.widest == (8 if which == "cache" else 16)
    ops.write_cache(cache, 1, [features], slots)
    launches()
    hidden = shifted(torch.zeros(11, 264, dtype=dtype), 16 // element)
    unaligned = shifted(torch.zeros(11, 264, dtype=dtype))
    for target in (hidden, unaligned):
        for plane in (0, 1):
            ops.merge_image_tokens(target, torch.arange(11), cache, slots, plane)
        assert torch.equal(target, (2 * features.float()).to(dtype)[:, 0])
    assert [launch.widest for launch in launches()] == [8 if which == "cache" else 16] * 2 + [8] * 2


# ---- far into a pool


def test_slots_beyond_4_gib_are_their_own(ops: OnDevice) -> None:
    """A pool of which only the pages that are touched exist."""
    shape = (81_930, 2, 2, 16, 4, 128)
    memory = mmap.mmap(-1, 2 * torch.Size(shape).numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    cache = PagedCache(torch.frombuffer(memory, dtype=torch.bfloat16).view(shape))
    assert cache.data.nbytes > 5 << 30
    ops = cuda_cache.CudaCacheOps()
    far = [81_929 * 16 + 15, 65_536 * 16, 40_000 * 16 + 3, 5]
    slots = torch.tensor(far)
    q, k, v = cases.fused_rows(4, [2, 1, 1], 4, 128, torch.bfloat16)
    cos, sin = heads.angles(4, 128)
    small = cases.poisoned((1, 1, 2, 4, 4, 128), torch.bfloat16)
    NATIVE.rope_and_write(q, k, v, (cos, sin), small, 0, torch.arange(4))
    ops.rope_and_write(q, k, v, (cos, sin), cache, 1, slots)
    ops.write_cache(cache, 0, [v, k], slots)
    for token, slot in enumerate(far):
        row = cache.data[slot // 16, :, :, slot % 16]
        expected = torch.stack((v[token], k[token], small.data[0, 0, 0, token], small.data[0, 0, 1, token]))
        assert torch.equal(row.flatten(0, 1), expected)
    assert torch.equal(ops.gather_cache(cache, 0, 1, slots), k)
    pairs = torch.tensor([[81_929, 1], [65_536, 81_928]])
    ops.copy_blocks(cache, cache, pairs)
    for source, target in pairs.tolist():
        assert torch.equal(cache.data[target], cache.data[source])
    assert cache.data[1, 0, 1, 15].equal(k[0])


# ---- launches


def test_a_call_is_one_launch_that_just_covers_it(ops: OnDevice, launches: Launches) -> None:
    cache = cases.poisoned((4, 1, 2, 16, 2, 64), torch.bfloat16)
    for rows, blocks in ((1, 1), (4, 1), (5, 2), (63, 16)):
        k, v = cases.fused_rows(rows, [1, 1], 2, 64, torch.bfloat16)
        ops.write_cache(cache, 0, (k, v), torch.arange(rows))
        ops.gather_cache(cache, 0, 1, torch.arange(rows))
        # A warp for each row of each tensor, eight to a block.
        assert [launch.grid for launch in launches()] == [(blocks, 1, 1), ((rows + 7) // 8, 1, 1)]
    for tokens, blocks in ((1, 1), (5, 1), (6, 1), (11, 2), (13, 2), (64, 8)):
        q, k, v = cases.fused_rows(tokens, [1, 1, 1], 2, 64, torch.bfloat16)
        ops.rope_and_write(q, k, v, heads.angles(tokens, 64), cache, 0, torch.arange(tokens))
        # Four lanes for each head: of 32 pairs a lane rotates 8.
        (launch,) = launches()
        assert (launch.grid, launch.threads) == ((-(-tokens * 6 // 64), 1, 1), 256) and launch.grid[0] <= blocks


def test_nothing_to_do_is_not_launched(ops: OnDevice, launches: Launches) -> None:
    cases.test_empty_calls_do_nothing(ops)
    assert launches() == []


@pytest.mark.parametrize(
    ("count", "grids"),
    [(1, [1]), (500, [500]), (501, [501]), (4000, [4000]), (4001, [4000, 1]), (8001, [4000, 4000, 1])],
)
def test_pairs_go_out_in_few_launches(launches: Launches, count: int, grids: list[int]) -> None:
    source, target = (PagedCache(torch.zeros(9, 1, 1, 1, 1, 2)) for _ in range(2))
    source.data[:] = torch.arange(9).view(-1, 1, 1, 1, 1, 1)
    # The last pair alone goes to block 8.
    pairs = torch.tensor([[3, 0]] * (count - 1) + [[7, 8]])
    cuda_cache.CudaCacheOps().copy_blocks(source, target, pairs)
    assert [launch.grid for launch in launches()] == [(1, pairs, 1) for pairs in grids]
    assert target.data[8].eq(7).all() and not target.data[1:8].any()


@pytest.mark.parametrize(("count", "share"), [(1, 16), (3, 5), (16, 1), (40, 1)])
def test_large_blocks_are_spread_over_the_device(launches: Launches, count: int, share: int) -> None:
    """Two multiprocessors with eight rounds each; a block here is 20 rounds and a rest."""
    source = PagedCache(torch.randn(40, 1, 1, 1, 1, 4 * 1024 * 20 + 36))
    target = cases.poisoned(tuple(source.data.shape), torch.float32)
    there = torch.randperm(40)[:count]
    cuda_cache.CudaCacheOps().copy_blocks(source, target, torch.stack((torch.arange(count), there), dim=1))
    assert [launch.grid for launch in launches()] == [(share, count, 1)]
    assert torch.equal(target.data[there], source.data[:count])
    assert target.data.isfinite().flatten(1).all(dim=1).sum() == count


def test_a_chain_of_copies_in_one_call_is_noticed() -> None:
    """Pairs are copied in no order: what one reads, none may write. The executor sees it in one of its two orders."""
    cache = PagedCache(torch.empty(3, 1, 1, 2, 1, 4))
    ops = cuda_cache.CudaCacheOps()
    with pytest.raises(RuntimeError, match=r"copy_pairs.*read through __ldg was written during the same launch"):
        for _ in range(2):
            cache.data.copy_(cases.random(3, 1, 1, 2, 1, 4, dtype=torch.float32))
            ops.copy_blocks(cache, cache, torch.tensor([[0, 1], [1, 2]]))
