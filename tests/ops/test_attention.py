"""Attention on every implementation: float64 truth, poison and garbage ids, bitwise invariance, segments, messages."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import Ops, PackedPlan, PagedCache
from hydra_engine.backend.cpu.ops import NativeOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GARBAGE = 2**31 - 1
# (query heads, KV heads, head dim, block size)
HEADS = [(4, 2, 16, 4), (2, 2, 32, 16), (3, 1, 20, 5), (7, 1, 64, 16), (2, 2, 80, 8), (2, 1, 128, 7), (1, 1, 33, 1)]
HEADS += [(2, 1, 48, 64), (1, 1, 256, 16)]
# (queries, context) of each row; a row without queries reads nothing
BATCHES = [
    [(1, 1)],
    [(5, 5)],
    [(1, 130), (3, 67), (0, 9), (64, 64), (20, 200)],
    [(0, 0), (1, 64), (1, 65)],
    [(1, 32), (2, 96)],
]


@dataclass(frozen=True)
class Step:
    """A step over requests whose contexts are `tokens`; the cache is NaN wherever no token was written."""

    cache: PagedCache
    layer: int
    tables: Tensor
    q: list[Tensor]  # per request, of all its positions
    k: list[Tensor]
    v: list[Tensor]

    def run(self, ops: Ops, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Queries [begin, end) of request `row` for every (row, begin, end), in one call."""
        counts = [end - begin for _, begin, end in parts]
        cu_q = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        context = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        plan = ops.plan_attention(cu_q, context, self.tables[[row for row, _, _ in parts]])
        q = torch.cat([self.q[row][begin:end] for row, begin, end in parts])
        out = ops.attention_paged(q, self.cache, self.layer, plan, self.scale)
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        return list(out.split(counts))

    @property
    def scale(self) -> float:
        return self.cache.data.shape[-1] ** -0.5


def make_step(
    ops: Ops, contexts: list[int], heads: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> Step:
    num_heads, num_kv_heads, dim, size = heads
    generator = torch.Generator().manual_seed(seed)

    def rows(tokens: int, count: int) -> Tensor:
        return (torch.randn(tokens, count, dim, generator=generator) * 1.5).to(dtype)

    needed = [-(-context // size) for context in contexts]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks, generator=generator).int().tolist()
    width = max([*needed, 1]) + 1
    tables = torch.full((len(contexts), width), GARBAGE, dtype=torch.int32)
    cache = PagedCache(torch.full((num_blocks, 2, 2, size, num_kv_heads, dim), float("nan"), dtype=dtype))
    step = Step(cache, 1, tables, [], [], [])
    for row, context in enumerate(contexts):
        tables[row, : needed[row]] = torch.tensor([ids.pop() for _ in range(needed[row])], dtype=torch.int32)
        step.q.append(rows(context, num_heads))
        step.k.append(rows(context, num_kv_heads))
        step.v.append(rows(context, num_kv_heads))
        position = torch.arange(context)
        slots = tables[row].long()[position // size] * size + position % size
        ops.write_cache(cache, step.layer, (step.k[row], step.v[row]), slots)
    return step


def causal(q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Queries [begin, end) of one request through torch in `dtype`."""
    group = q.shape[1] // k.shape[1]
    query = q[begin:end].to(dtype).transpose(0, 1)[None]
    key, value = (x[:end].to(dtype).transpose(0, 1).repeat_interleave(group, dim=0)[None] for x in (k, v))
    mask = torch.arange(end) <= torch.arange(begin, end)[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)


def assert_as_good_as(result: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Allows twice the error of a plain torch implementation in the same dtype, and a float32 rounding."""
    allowed = 2 * (plain.double() - truth).abs().max() + 2e-6
    error = (result.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_attention_matches_float64(ops: Ops, dtype: torch.dtype, heads: tuple[int, int, int, int]) -> None:
    for batch in BATCHES:
        step = make_step(ops, [context for _, context in batch], heads, dtype)
        parts = [(row, context - count, context) for row, (count, context) in enumerate(batch)]
        for (row, begin, end), result in zip(parts, step.run(ops, parts), strict=True):
            if begin < end:
                of_row = (step.q[row], step.k[row], step.v[row], begin, end)
                assert_as_good_as(result, causal(*of_row, dtype), causal(*of_row, torch.float64))


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [HEADS[1], HEADS[3], HEADS[4]], ids=str)
def test_a_query_gets_the_same_bits_in_every_call(
    ops: Ops, threads: int, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    """Whole prompt, chunks, decode steps, alone or in a batch, with one or two threads."""
    contexts = [150, 70]
    step = make_step(ops, contexts, heads, dtype)
    _C.set_num_threads(1)
    whole = [step.run(ops, [(row, 0, context)])[0] for row, context in enumerate(contexts)]
    _C.set_num_threads(threads)
    for result, expected in zip(step.run(ops, [(0, 0, 150), (1, 0, 70)]), whole, strict=True):
        assert torch.equal(result, expected)
    for begin, end in pairwise((0, 1, 4, 63, 66, 150)):
        chunk, decode = step.run(ops, [(0, begin, end), (1, 69, 70)])
        assert torch.equal(chunk, whole[0][begin:end])
        assert torch.equal(decode, whole[1][69:])
    for position in (0, 1, 15, 16, 62, 63, 64, 65, 127, 128, 149):
        alone = step.run(ops, [(0, position, position + 1)])[0]
        assert torch.equal(alone, whole[0][position : position + 1])


def test_long_contexts_have_the_same_bits_too(ops: Ops, threads: int) -> None:
    step = make_step(ops, [2000], (2, 1, 32, 16), torch.bfloat16)
    chunk = step.run(ops, [(0, 1950, 2000)])[0]
    for position in (1950, 1983, 1984, 1999):
        alone = step.run(ops, [(0, position, position + 1)])[0]
        assert torch.equal(alone[0], chunk[position - 1950])


@pytest.mark.quick("scalar-(2, 1, 32, 16)-torch.float32", "avx2-(6, 2, 20, 5)-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 1, 32, 16), (6, 2, 20, 5)], ids=str)
def test_long_contexts_have_the_same_bits_however_they_are_shared_out(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    """The native implementation cuts a long context by spans of 512 keys where there are more threads than heads."""
    ops = NativeOps()
    step = make_step(ops, [1601, 1030, 40], heads, dtype)
    _C.set_num_threads(1)
    whole = [step.run(ops, [(row, 0, len(step.q[row]))])[0] for row in range(3)]
    of_row = (step.q[0], step.k[0], step.v[0], 0, 1601)
    assert_as_good_as(whole[0], causal(*of_row, dtype), causal(*of_row, torch.float64))
    decodes = [(0, 1600, 1601), (1, 1029, 1030), (2, 39, 40)]
    chunks = [(0, 510, 512), (0, 509, 514), (0, 1022, 1027), (0, 505, 530), (1, 1000, 1030), (0, 480, 1601)]
    alone = [(0, position, position + 1) for position in (510, 511, 512, 513, 1023, 1024, 1025, 1535, 1536, 1599)]
    try:
        for threads in (1, 2, 5, 16):
            _C.set_num_threads(threads)
            for parts in (decodes, decodes[:1], decodes[1:], *([part] for part in chunks + alone), chunks):
                for (row, begin, end), result in zip(parts, step.run(ops, parts), strict=True):
                    assert torch.equal(result, whole[row][begin:end]), (threads, row, begin, end)
    finally:
        _C.set_num_threads(1)


def test_one_long_row_among_many_short_ones(isa: str) -> None:
    ops = NativeOps()
    step = make_step(ops, [2100, *[30] * 40], (4, 2, 32, 16), torch.bfloat16)
    rows = [(row, len(q) - 1, len(q)) for row, q in enumerate(step.q)]
    expected = [step.run(ops, [part])[0] for part in rows]
    try:
        for threads in (2, 4):
            _C.set_num_threads(threads)
            for result, alone in zip(step.run(ops, rows), expected, strict=True):
                assert torch.equal(result, alone)
    finally:
        _C.set_num_threads(1)


def test_sharp_and_flat_scores_stay_exact(ops: Ops) -> None:
    """Scores that differ by hundreds: weights underflow to zero and the winner takes all."""
    cache = PagedCache(torch.zeros(8, 1, 2, 16, 1, 32))
    k, v = torch.zeros(128, 1, 32), torch.arange(128.0)[:, None, None].expand(128, 1, 32).contiguous()
    k[77] = 100
    ops.write_cache(cache, 0, (k, v), torch.arange(128))
    plan = ops.plan_attention(
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([128], dtype=torch.int32),
        torch.arange(8, dtype=torch.int32)[None],
    )
    q = torch.stack((torch.ones(1, 32), torch.zeros(1, 32)))
    out = ops.attention_paged(q, cache, 0, plan, 1.0)
    assert (out[0] == 77).all()
    assert torch.allclose(out[1], torch.tensor(63.5))


def test_a_nan_reaches_the_result_of_its_own_request_only(ops: Ops, threads: int) -> None:
    step = make_step(ops, [40, 70, 600], (2, 1, 32, 16), torch.bfloat16)
    parts = [(0, 39, 40), (1, 60, 70), (2, 599, 600)]
    clean = step.run(ops, parts)
    step.q[0][39] = float("nan")
    broken, *others = step.run(ops, parts)
    assert broken.isnan().all()
    assert torch.equal(others[0], clean[1]) and torch.equal(others[1], clean[2])
    for poisoned in (10, 598):  # a key of the first span, and one of the last
        slot = step.tables[2].long()[poisoned // 16], poisoned % 16
        before = step.cache.data[slot[0], step.layer, 0, slot[1]].clone()
        step.cache.data[slot[0], step.layer, 0, slot[1]] = float("nan")
        assert step.run(ops, parts)[2].isnan().all()
        step.cache.data[slot[0], step.layer, 0, slot[1]] = before


def test_queries_may_be_a_view_of_a_fused_projection(ops: Ops) -> None:
    step = make_step(ops, [50], (4, 2, 32, 16), torch.bfloat16)
    wide = torch.cat((step.q[0].flatten(1), torch.full((50, 77), float("nan"), dtype=torch.bfloat16)), dim=1)
    expected = step.run(ops, [(0, 0, 50)])[0]
    step.q[0] = wide[:, : 4 * 32].unflatten(1, (4, 32))
    plan = ops.plan_attention(
        torch.tensor([0, 50], dtype=torch.int32), torch.tensor([50], dtype=torch.int32), step.tables
    )
    assert torch.equal(ops.attention_paged(step.q[0], step.cache, 1, plan, step.scale), expected)


def test_empty_steps(ops: Ops) -> None:
    cache = PagedCache(torch.full((2, 1, 2, 4, 1, 8), float("nan")))
    for rows in (0, 2):
        plan = ops.plan_attention(
            torch.zeros(rows + 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            torch.full((rows, 1), GARBAGE, dtype=torch.int32),
        )
        assert (plan.max_q, plan.max_context) == (0, 0)
        assert ops.attention_paged(torch.empty(0, 2, 8), cache, 0, plan, 1.0).shape == (0, 2, 8)
    assert ops.attention_packed(*[torch.empty(0, 2, 8)] * 3, [0], 1.0).shape == (0, 2, 8)


# ---- packed segments


def packed_rows(segments: list[int], heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    fused = (torch.randn(sum(segments), 3 * heads * dim, generator=generator) * 1.5).to(dtype)
    q, k, v = fused.unflatten(1, (3 * heads, dim)).split(heads, dim=1)
    return q, k, v


def bounds(segments: list[int]) -> list[int]:
    return [0, *torch.tensor(segments).cumsum(0).tolist()]


def bidirectional(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 64), (3, 20), (1, 72), (2, 80), (2, 16), (3, 22), (2, 32), (1, 128)], ids=str)
def test_packed_attention_matches_float64(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    segments = [1, 65, 0, 130, 16]
    q, k, v = packed_rows(segments, *shape, dtype)
    result = ops.attention_packed(q, k, v, bounds(segments), shape[1] ** -0.5)
    assert result.shape == q.shape and result.dtype == dtype and result.is_contiguous()
    for begin, end in pairwise(bounds(segments)):
        if begin < end:
            rows = (q[begin:end], k[begin:end], v[begin:end])
            assert_as_good_as(result[begin:end], bidirectional(*rows, dtype), bidirectional(*rows, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_segment_gets_the_same_bits_alone_and_among_others(ops: Ops, threads: int, dtype: torch.dtype) -> None:
    segments = [145, 7, 145, 300]
    q, k, v = packed_rows(segments, 2, 64, dtype)
    together = ops.attention_packed(q, k, v, bounds(segments), 0.125)
    for begin, end in pairwise(bounds(segments)):
        alone = ops.attention_packed(q[begin:end], k[begin:end], v[begin:end], [0, end - begin], 0.125)
        assert torch.equal(alone, together[begin:end])


def test_many_uneven_windows(ops: Ops, threads: int) -> None:
    """Hundreds of short segments, as the window attention of a vision tower has them."""
    generator = torch.Generator().manual_seed(5)
    segments = torch.randint(0, 49, (200,), generator=generator).tolist()
    segments[:6], segments[-2:] = [0, 1, 64, 0, 1, 16], [1, 0]
    q, k, v = packed_rows(segments, 2, 80, torch.bfloat16)
    result = ops.attention_packed(q, k, v, bounds(segments), 0.1)
    plain, truth = torch.empty_like(q), torch.empty(q.shape, dtype=torch.float64)
    for begin, end in pairwise(bounds(segments)):
        if begin < end:
            rows = (q[begin:end], k[begin:end], v[begin:end])
            plain[begin:end] = bidirectional(*rows, torch.bfloat16, scale=0.1)
            truth[begin:end] = bidirectional(*rows, torch.float64, scale=0.1)
    assert_as_good_as(result, plain, truth)
    for index in (1, 2, 5, 150, 198):
        begin, end = bounds(segments)[index : index + 2]
        alone = ops.attention_packed(q[begin:end], k[begin:end], v[begin:end], [0, end - begin], 0.1)
        assert torch.equal(alone, result[begin:end])


def test_planned_segments_are_read_at_each_use(ops: Ops) -> None:
    """Ops read planned segments at each use; native ops, which divide their work by segments, refuse to plan them."""
    q, k, v = packed_rows([5, 20, 9], 2, 64, torch.float32)
    cu = torch.zeros(6, dtype=torch.int32)
    try:
        plan = ops.plan_packed(cu, 34)
    except ValueError as error:
        assert "plan_packed: expected ops that plan on the device" in str(error) and ops.name == "native"
        with pytest.raises(ValueError, match="a plan of other ops"):
            ops.attention_packed(q, k, v, PackedPlan(cu, 34), 0.1)
        return
    for held in ([0, 5, 25, 34, 34, 34], [0, 34, 34, 34, 34, 34], [0, 1, 1, 3, 30, 34]):
        cu.copy_(torch.tensor(held))
        assert torch.equal(ops.attention_packed(q, k, v, plan, 0.1), ops.attention_packed(q, k, v, held, 0.1))


# ---- messages


def test_wrong_arguments_are_named_with_what_was_expected(ops: Ops) -> None:
    cache = PagedCache(torch.zeros(4, 1, 2, 4, 2, 8))
    ints = torch.tensor([0, 2], dtype=torch.int32)
    context, table = torch.tensor([6], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    plan = ops.plan_attention(ints, context, table)
    q = torch.zeros(2, 4, 8)
    cases = {
        r"cu_q: expected torch.int32": lambda: ops.plan_attention(ints.long(), context, table),
        r"expected \[B \+ 1\], \[B\] and \[B, max_blocks\]": lambda: ops.plan_attention(ints, context, table[0]),
        r"num_context: row 0 has 2 queries": lambda: ops.plan_attention(ints, context - 5, table),
        r"q: expected .* multiple of 2 KV heads": lambda: ops.attention_paged(q[:, :3], cache, 0, plan, 1.0),
        r"q: expected .*float32.*bfloat16": lambda: ops.attention_paged(q.bfloat16(), cache, 0, plan, 1.0),
        r"q: expected 2 tokens": lambda: ops.attention_paged(torch.zeros(3, 4, 8), cache, 0, plan, 1.0),
        r"layer: expected 0 to 0": lambda: ops.attention_paged(q, cache, 1, plan, 1.0),
        r"cu_seqlens: expected to rise from 0 to 2": lambda: ops.attention_packed(q, q, q, [0, 1], 1.0),
        r"k: expected \[2, 4, 8\]": lambda: ops.attention_packed(q, q[:1], q, [0, 2], 1.0),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    for ids, message in (([[0, 4]], "block_tables: expected 0 to 3"), ([[0]], "block_tables: expected at least 2")):
        bad = ops.plan_attention(ints, context, torch.tensor(ids, dtype=torch.int32))
        with pytest.raises(ValueError, match=message):
            ops.attention_paged(q, cache, 0, bad, 1.0)
