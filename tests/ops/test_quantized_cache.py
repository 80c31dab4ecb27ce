"""KV caches of int8: what is written, equal to the reference's; attention over it; whole blocks with their scales."""

import pytest
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import HeadNorms, Ops, PagedCache
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.reference.ops import ReferenceOps, quantized
from tests.ops.test_attention import DTYPES, assert_as_good_as, causal

POISON = 0xFF  # as a scale a NaN
# (blocks, layers, tensors, block size, heads, head dim)
SHAPES = [(5, 3, 2, 4, 2, 8), (7, 1, 2, 16, 1, 34), (3, 2, 2, 2, 5, 66), (4, 2, 2, 3, 2, 80), (3, 1, 2, 4, 1, 7)]
# (query heads, KV heads, head dim, block size)
HEADS = [(4, 2, 16, 4), (2, 2, 32, 16), (3, 1, 20, 5), (7, 1, 64, 16), (2, 2, 80, 8), (2, 1, 128, 7), (1, 1, 33, 4)]
HEADS += [(1, 1, 256, 16)]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[PagedCache, Tensor]:
    """A cache and its memory."""
    blocks, layers, tensors, size, heads, dim = shape
    raw = torch.full((blocks * layers * tensors * size * heads * (dim + 4),), POISON, dtype=torch.uint8)
    return PagedCache.quantized(raw, shape, dtype), raw


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def fused_rows(tokens: int, counts: list[int], heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Views [T, count * heads, D] into one fused projection, as the models make them."""
    whole = random(tokens, sum(counts) * heads * dim, dtype=dtype)
    return [part.unflatten(-1, (-1, dim)) for part in whole.split([count * heads * dim for count in counts], dim=-1)]


def some_slots(shape: tuple[int, ...], most: int) -> Tensor:
    slots = torch.randperm(shape[0] * shape[3], generator=torch.Generator().manual_seed(1))[:most]
    slots[2] = -1
    return slots


def test_a_block_is_one_piece_of_memory_with_its_scales() -> None:
    shape = (3, 2, 2, 4, 2, 6)
    cache, raw = poisoned(shape, torch.bfloat16)
    checks.check_new_cache(cache)
    assert cache.scales is not None and cache.row_dtype is torch.bfloat16
    assert cache.block_bytes * 3 == cache.nbytes == raw.numel()
    cache.data[1], cache.scales[1] = 3, 0.5
    assert not (cache.block_view(1) == POISON).any(), "data and scales together are the whole block"
    assert (raw.view(3, -1)[[0, 2]] == POISON).all()
    with pytest.raises(ValueError, match="multiple of 4"):
        PagedCache.quantized(raw, (1, 1, 2, 1, 1, 33), torch.float32)


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_written_rows_have_the_bits_of_the_reference_and_nothing_else_changes(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    (cache, raw), (expected, expected_raw) = (poisoned(shape, dtype) for _ in range(2))
    _, layers, _, size, heads, dim = shape
    slots = some_slots(shape, 9)
    rows = fused_rows(len(slots), [1, 1], heads, dim, dtype)
    k, v = (row.clone() for row in rows)
    k[0, 0], k[1, -1], v[0, -1, 3], v[1, 0, 0] = 0, 1e-30, torch.inf, torch.nan  # odd values of whole heads and of one
    for source in ((rows[0], rows[1]), (k, v)):
        ops.write_cache(cache, layers - 1, source, slots)
        ReferenceOps().write_cache(expected, layers - 1, source, slots)
        assert torch.equal(raw.view(torch.int8), expected_raw.view(torch.int8))
    kept = slots[slots >= 0]
    assert expected.scales is not None
    integers, scales = quantized(v[slots >= 0])
    assert torch.equal(expected.data[kept // size, layers - 1, 1, kept % size], integers)
    assert scales[0, -1].isnan() and scales[1, 0].isnan() and scales.isnan().sum() == 2
    gathered = ops.gather_cache(cache, layers - 1, 1, kept)
    assert gathered.dtype == dtype
    assert torch.equal(gathered.nan_to_num(), (integers * scales[..., None]).to(dtype).nan_to_num())
    passed_over = ops.gather_cache(cache, layers - 1, 1, slots)[slots >= 0]
    assert torch.equal(passed_over.nan_to_num(), gathered.nan_to_num())


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_keys_are_rotated_before_they_are_rounded(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, ...], normed: bool
) -> None:
    """An integer may differ by one where the last bits of a rotation differ."""
    (cache, raw), (expected, expected_raw) = (poisoned(shape, dtype) for _ in range(2))
    _, layers, _, size, heads, dim = shape
    slots = some_slots(shape, 9)
    q, k, v = fused_rows(len(slots), [2, 1, 1], heads, dim, dtype)
    angles = torch.rand(len(slots), dim // 2, generator=torch.Generator().manual_seed(3)) * 100
    rotary = angles.cos(), angles.sin()
    weight = random(dim, dtype=dtype, seed=4)
    norms = HeadNorms(weight, weight, 1e-6) if normed else None
    turned = ops.rope_and_write(q, k, v, rotary, cache, layers - 1, slots, norms)
    plain = ReferenceOps().rope_and_write(q, k, v, rotary, expected, layers - 1, slots, norms)
    torch.testing.assert_close(turned, plain)
    kept = slots[slots >= 0]
    places = kept // size, layers - 1, 0, kept % size
    assert cache.scales is not None and expected.scales is not None
    by_slot = cache.scales.transpose(3, 4)[places], expected.scales.transpose(3, 4)[places]
    torch.testing.assert_close(*by_slot, rtol=2e-2 if dtype is torch.bfloat16 and normed else 1e-3, atol=0)
    assert (cache.data[places].int() - expected.data[places].int()).abs().max() <= (3 if normed else 1)
    for x in (cache, expected):  # what is left is equal: values, and what was not written
        x.data[places], x.scales.transpose(3, 4)[places] = 0, 0  # type: ignore[union-attr]
    assert torch.equal(raw, expected_raw)


def attend(
    ops: Ops, cache: PagedCache, layer: int, tables: Tensor, q: list[Tensor], parts: list[tuple[int, int, int]]
) -> list[Tensor]:
    """Queries [begin, end) of request `row` for every (row, begin, end), in one call."""
    counts = [end - begin for _, begin, end in parts]
    cu_q = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    plan = ops.plan_attention(
        cu_q, torch.tensor([end for *_, end in parts], dtype=torch.int32), tables[[row for row, *_ in parts]]
    )
    queries = torch.cat([q[row][begin:end] for row, begin, end in parts])
    return list(ops.attention_paged(queries, cache, layer, plan, cache.data.shape[-1] ** -0.5).split(counts))


def requests(
    ops: Ops, contexts: list[int], heads: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[PagedCache, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """A cache in layer 1 of which the contexts lie, tables, queries; keys and values as the cache has them."""
    num_heads, num_kv_heads, dim, size = heads
    needed = [-(-context // size) for context in contexts]
    cache, _ = poisoned((sum(needed) + 2, 2, 2, size, num_kv_heads, dim), dtype)
    ids = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(2)).int().tolist()
    tables = torch.full((len(contexts), max(needed)), 2**31 - 1, dtype=torch.int32)
    q, keys, values = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, context in enumerate(contexts):
        tables[row, : needed[row]] = torch.tensor([ids.pop() for _ in range(needed[row])], dtype=torch.int32)
        q.append(random(context, num_heads, dim, dtype=dtype, seed=row))
        k, v = (random(context, num_kv_heads, dim, dtype=dtype, seed=10 * x + row) for x in (1, 2))
        slots = tables[row].long()[torch.arange(context) // size] * size + torch.arange(context) % size
        ops.write_cache(cache, 1, (k, v), slots)
        for kind, source in ((keys, k), (values, v)):
            integers, scales = quantized(source)
            kind.append(integers * scales[..., None])
    return cache, tables, q, keys, values


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_matches_float64_over_what_is_stored(
    ops: Ops, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    contexts = [1, 130, 67, 64, 200]
    cache, tables, q, keys, values = requests(ops, contexts, heads, dtype)
    parts = [(0, 0, 1), (1, 129, 130), (2, 64, 67), (3, 0, 64), (4, 180, 200), (2, 5, 5)]
    results, plains, truths = attend(ops, cache, 1, tables, q, parts), [], []
    for row, begin, end in parts:
        truths.append(causal(q[row].double(), keys[row], values[row], begin, end, torch.float64))
        plains.append(causal(q[row], keys[row].to(dtype), values[row].to(dtype), begin, end, dtype))
    # All rows at once: of a single one a plain sum may be exact by chance.
    assert_as_good_as(torch.cat(results), torch.cat(plains), torch.cat(truths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 32, 16), (6, 1, 20, 5)], ids=str)
def test_a_query_gets_the_same_bits_in_every_call(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    """A query gets the same bits alone, in chunks, among others, and however many threads share a context."""
    ops = NativeOps()
    contexts = [1100, 70]
    cache, tables, q, _, _ = requests(ops, contexts, heads, dtype)
    (whole,) = attend(ops, cache, 1, tables, q, [(0, 0, 1100)])
    for threads in (1, 2, 5):
        _C.set_num_threads(threads)
        for begin, end in ((0, 1), (700, 900), (1095, 1100), (1099, 1100)):
            part = attend(ops, cache, 1, tables, q, [(1, 69, 70), (0, begin, end)])[1]
            assert torch.equal(part, whole[begin:end])
    _C.set_num_threads(1)


def test_a_nan_reaches_the_result_of_its_own_request_only(ops: Ops) -> None:
    cache, tables, q, _, _ = requests(ops, [40, 40], (2, 1, 32, 16), torch.float32)
    bad = torch.zeros(1, 1, 32)
    bad[..., 0] = torch.nan
    ops.write_cache(cache, 1, (bad, bad), torch.tensor([int(tables[0, 0]) * 16]))
    first, second = attend(ops, cache, 1, tables, q, [(0, 39, 40), (1, 39, 40)])
    assert first.isnan().all() and second.isfinite().all()


def test_blocks_are_copied_with_their_scales(ops: Ops) -> None:
    shape = (6, 2, 2, 16, 2, 64)
    (source, source_raw), (target, target_raw) = (poisoned(shape, torch.bfloat16) for _ in range(2))
    source_raw[:] = torch.randint(0, 100, source_raw.shape, generator=torch.Generator().manual_seed(0))
    ops.copy_blocks(source, target, torch.tensor([[0, 5], [3, 1]]))
    assert torch.equal(target.block_view(5), source.block_view(0))
    assert torch.equal(target.block_view(1), source.block_view(3))
    assert (target_raw.view(6, -1)[[0, 2, 3, 4]] == POISON).all()
    other = PagedCache(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="expected blocks"):
        ops.copy_blocks(source, other, torch.tensor([[0, 0]]))


def test_empty_calls(ops: Ops) -> None:
    cache, raw = poisoned((2, 1, 2, 4, 1, 8), torch.float32)
    empty, none = torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64)
    ops.write_cache(cache, 0, (empty, empty), none)
    ops.rope_and_write(empty, empty, empty, (torch.empty(0, 4), torch.empty(0, 4)), cache, 0, none)
    assert ops.gather_cache(cache, 0, 0, none).shape == (0, 1, 8)
    assert (raw == POISON).all()
