"""Rows before and behind products: pixels, norms, heads, keys and values of int8, recurrent states, sampling."""

from __future__ import annotations

import pytest
import torch

from hydra_engine.backend.base import (
    Adjustments,
    DeltaInputs,
    PagedCache,
    RowNorm,
    SamplingTensors,
    StateCache,
    StateRows,
)
from hydra_engine.backend.cuda.linear import SMALL_ROWS
from hydra_engine.backend.reference.ops import ALL_OPS
from tests.gpu.op_cases.inputs import REFERENCE, random
from tests.gpu.side import Side
from tests.kernels.comparison import DTYPES, assert_close, strided

# ---- keys and values of int8


@pytest.mark.quick("(4, 2, 16)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 3, 80)], ids=str)
def test_keys_and_values_of_int8(side: Side, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Written rotated and as they are, then read by decodes and by prompts; slots lie on the host or on the device."""
    num_heads, num_kv_heads, dim = heads
    shape = (6, 2, 2, 4, num_kv_heads, dim)
    raw = torch.full((6 * 2 * 2 * 4 * num_kv_heads * (dim + 4),), 0xFF, dtype=torch.uint8)
    expected, cache = (PagedCache.quantized(memory, shape, dtype) for memory in (raw.clone(), raw.to(side.device)))
    slots, tokens = torch.tensor([20, 21, 22, 23, 8, 9, -1]), 7
    fused = random(tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    parts = fused.split([count * dim for count in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    angles = random(tokens, dim // 2, seed=3)
    rotary = angles.cos(), angles.sin()
    turned = REFERENCE.rope_and_write(q, k, v, rotary, expected, 1, slots)
    there = [side.there(part) for part in (q, k, v)]
    found = side.ops.rope_and_write(*there, (side.there(rotary[0]), side.there(rotary[1])), cache, 1, slots)
    assert_close(found.cpu(), turned, ulps=2, atol=4e-2 if dtype is torch.bfloat16 else 1e-3)
    places = torch.tensor([5, 5, 5, 5, 2, 2]), 1, 0, torch.tensor([0, 1, 2, 3, 0, 1])
    assert (cache.data.cpu()[places].int() - expected.data[places].int()).abs().max() <= 1
    REFERENCE.write_cache(expected, 1, (k, v), slots)
    side.ops.write_cache(cache, 1, there[1:], slots.to(side.device))
    assert torch.equal(cache.data.cpu(), expected.data)
    cu_q, context = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    tables = torch.tensor([[5, 2], [5, 1 << 30]], dtype=torch.int32)
    wide = PagedCache(expected.data, None, expected.scales, torch.float32)
    plan = REFERENCE.plan_attention(cu_q, context, tables)
    wanted = REFERENCE.attention_paged(q[:4].float(), wide, 1, plan, 0.3)
    for ops in (side.ops, side.exact):
        result = ops.attention_paged(there[0][:4], cache, 1, ops.plan_attention(cu_q, context, tables), 0.3)
        atol = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(result.cpu().float(), wanted, rtol=0, atol=atol)


# ---- element-wise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pixels_become_rows(side: Side, dtype: torch.dtype) -> None:
    """Checks all bytes of all colours, bit for bit; widths: no power of 2, with zeros after the pixels, and their
    own."""
    pixels = torch.arange(5 * 1029).to(torch.uint8).view(5, 1029)[:, :588]
    table = random(256, 3, dtype=dtype)
    for width in (588, 592, 1100):
        found = side.ops.pixel_rows(side.there(pixels), side.there(table), width)
        assert found.is_contiguous() and torch.equal(found.cpu(), REFERENCE.pixel_rows(pixels, table, width))
    assert side.ops.pixel_rows(side.there(pixels)[:0], side.there(table), 592).shape == (0, 592)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(side: Side, dtype: torch.dtype) -> None:
    x, residual = strided(random(5, 80, dtype=dtype)), strided(random(5, 80, dtype=dtype, seed=1))
    weight, bias, wide = random(80, dtype=dtype, seed=2), random(80, dtype=dtype, seed=3), random(80, seed=4)
    ops, there = side.ops, side.there
    for scale in (weight, wide):
        assert_close(ops.rms_norm(there(x), there(scale), 1e-5).cpu(), REFERENCE.rms_norm(x, scale, 1e-5), ulps=3)
    normed, total = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    found, summed = ops.add_rms_norm(there(x), there(residual), there(weight), 1e-5)
    assert_close(summed.cpu(), total, ulps=1)
    assert_close(found.cpu(), normed, ulps=4)
    expected = REFERENCE.layer_norm(x, weight, bias, 1e-5)
    assert_close(ops.layer_norm(there(x), there(weight), there(bias), 1e-5).cpu(), expected, ulps=2, atol=1e-4)
    assert ops.rms_norm(there(x)[:0], there(weight), 1e-5).shape == (0, 80)


@pytest.mark.quick("True-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_norms_of_products_and_residuals(side: Side, dtype: torch.dtype, *, with_bias: bool) -> None:
    """Sums have the bits of those that the ops give one after another; residuals stay as they are."""
    weight, bias = random(48, 40, dtype=dtype, seed=1), random(48, dtype=dtype, seed=2)
    scale, shift = side.there(random(48, dtype=dtype, seed=3)), side.there(random(48, dtype=dtype, seed=4))
    for rows in (0, 1, SMALL_ROWS, SMALL_ROWS + 1, 70):
        x, residual = strided(random(rows, 40, dtype=dtype)), strided(random(rows, 48, dtype=dtype, seed=5))
        for ops in (side.ops, side.exact):
            packed = ops.pack_linear(side.there(weight), side.there(bias) if with_bias else None)
            given, before = side.there(residual), side.there(residual)
            total = ops.linear(side.there(x), packed, residual=before)
            for norm in (RowNorm(scale, shift, 1e-5), RowNorm(scale, None, 1e-5)):
                found, summed = ops.linear_add_norm(side.there(x), packed, given, norm)
                expected = ops.rms_norm(total, scale, 1e-5)
                if norm.bias is not None:
                    expected = ops.layer_norm(total, scale, norm.bias, 1e-5)
                assert torch.equal(summed, total) and torch.equal(given, before)
                assert_close(found.cpu(), expected.cpu(), ulps=2, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads(side: Side, dtype: torch.dtype) -> None:
    fused, weight = random(6, 9, 40, dtype=dtype), random(40, dtype=dtype, seed=1)
    x, gate = fused[:, 1:5], fused[:, 5:]
    moved = side.there(fused)
    here = moved[:, 1:5], moved[:, 5:]
    expected = REFERENCE.gated_rms_norm(x, weight, gate, 1e-6)
    assert_close(side.ops.gated_rms_norm(here[0], side.there(weight), here[1], 1e-6).cpu(), expected, ulps=4, atol=1e-3)
    assert_close(side.ops.sigmoid_mul(*here).cpu(), REFERENCE.sigmoid_mul(x, gate), ulps=2, atol=1e-4)
    cos, sin = random(6, 20, seed=2), random(6, 20, seed=3)
    rotated = side.ops.rotate(here[0], side.there(cos), side.there(sin))
    assert_close(rotated.cpu(), REFERENCE.rotate(x, cos, sin), ulps=3, atol=1e-2 if dtype is torch.bfloat16 else 2e-3)
    gate_up = strided(fused.flatten(1))
    found = side.ops.act_and_mul(side.there(gate_up), "quick_gelu")
    assert_close(found.cpu(), REFERENCE.act_and_mul(gate_up, "quick_gelu"), ulps=4, atol=1e-4)


# ---- recurrent states


def states(places: int, taps: int, channels: int, heads: int, dim: int) -> StateCache:
    return StateCache(random(places, 2, taps - 1, channels, seed=8), random(places, 2, heads, dim, dim, seed=9))


def rule_inputs(tokens: int, key_heads: int, heads: int, dim: int) -> DeltaInputs:
    q, k, v = (random(tokens, count, dim, seed=s) for s, count in ((2, key_heads), (3, key_heads), (4, heads)))
    return DeltaInputs(q, k, v, random(tokens, heads, seed=5), random(tokens, heads, seed=6), *random(2, heads, seed=7))


def test_recurrent_states_move_on_as_those_of_the_reference(side: Side) -> None:
    """A request that begins, one that goes on, one without tokens, one in its place; a step of decodes behind it."""
    steps = [([0, 3, 3, 22, 23], [0, 5, 4, 1], [0, 2, 4, 6], [1, 3, 5, 6]), ([0, 1, 2], [3, 23], [1, 5], [0, 4])]
    host = states(7, 4, 24, 4, 8)
    there = StateCache(side.there(host.conv), side.there(host.recurrent))
    for vectors in steps:
        rows = StateRows(*(torch.tensor(v) for v in vectors))
        tokens = vectors[0][-1]
        planned = side.ops.plan_states(rows)
        assert [x.tolist() for x in (planned.cu_q, planned.starts, planned.read_slots, planned.write_slots)] == list(
            vectors
        )
        x, weight = strided(random(tokens, 24)), random(24, 4, seed=1)
        expected = REFERENCE.causal_conv(x, weight, host, 1, rows)
        found = side.ops.causal_conv(side.there(x), side.there(weight), there, 1, planned)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(there.conv.cpu(), host.conv)
        tensors = rule_inputs(tokens, 2, 4, 8)
        expected = REFERENCE.delta_rule(tensors, host, 1, rows)
        found = side.ops.delta_rule(DeltaInputs(*map(side.there, tensors)), there, 1, planned)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.recurrent.cpu(), host.recurrent, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_captured_step_reads_its_rows_when_it_runs(side: Side) -> None:
    """Decodes beside prompts, rows and tokens that fill up the step: two mixes in the same tensors."""
    host, device = states(9, 4, 24, 4, 8), side.device
    there = StateCache(side.there(host.conv), side.there(host.recurrent))
    vectors = [torch.zeros(count, dtype=torch.int64, device=device) for count in (6, 5, 5, 5)]
    planned = side.ops.plan_mixed_states(StateRows(*vectors), 40)
    x, weight, tensors = strided(random(40, 24)), random(24, 4, seed=1), rule_inputs(40, 2, 4, 8)
    moved = side.there(x), side.there(weight), DeltaInputs(*map(side.there, tensors))
    for mix in (
        ([0, 1, 2, 36], [9, 5, 0], [0, 3, 0], [1, 2, 4]),
        ([0, 1, 6, 7, 39], [10, 6, 34, 0], [1, 2, 4, 0], [0, 3, 5, 6]),
    ):
        num_tokens = mix[0][-1]
        for vector, values, filling in zip(vectors, mix, (num_tokens, 0, 0, -1), strict=True):
            vector[: len(values)] = torch.tensor(values)
            vector[len(values) :] = filling
        rows = StateRows(*(torch.tensor(v) for v in mix))
        expected = REFERENCE.causal_conv(x[:num_tokens], weight, host, 1, rows)
        found = side.ops.causal_conv(*moved[:2], there, 1, planned)
        torch.testing.assert_close(found[:num_tokens].cpu(), expected, rtol=1e-5, atol=1e-5)
        given = DeltaInputs(*(t[:num_tokens] for t in tensors[:5]), *tensors[5:])
        expected = REFERENCE.delta_rule(given, host, 1, rows)
        found = side.ops.delta_rule(moved[2], there, 1, planned)
        torch.testing.assert_close(found[:num_tokens].cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.conv.cpu(), host.conv)
        torch.testing.assert_close(there.recurrent.cpu(), host.recurrent, rtol=1e-4, atol=1e-4)


def test_rows_of_states_are_not_read_again(side: Side) -> None:
    given = [torch.tensor(v) for v in ([0, 2], [4], [1], [0])]
    planned = side.ops.plan_states(StateRows(*given))
    for tensor in given:
        tensor.fill_(-1)
    assert [x.tolist() for x in (planned.cu_q, planned.starts, planned.read_slots, planned.write_slots)] == [
        [0, 2],
        [4],
        [1],
        [0],
    ]


def test_decodes_read_their_places_when_they_are_used(side: Side) -> None:
    """Imitates a captured step: tensors at fixed addresses, and a row that fills up the batch, whose state is not
    kept."""
    host, device = states(5, 4, 24, 4, 8), side.device
    there = StateCache(side.there(host.conv), side.there(host.recurrent))
    starts, reads, writes = (torch.full((3,), value, device=device) for value in (0, 0, -1))
    planned = side.ops.plan_decode_states(starts, reads, writes)
    x, weight, tensors = random(3, 24), random(24, 4, seed=1), rule_inputs(3, 2, 4, 8)
    moved = side.there(x), side.there(weight), DeltaInputs(*map(side.there, tensors))
    for places in (([9, 5], [0, 3], [1, 2]), ([10, 6], [1, 2], [0, 3])):
        for column, values in zip((starts, reads, writes), places, strict=True):
            column[:2] = torch.tensor(values)
        rows = StateRows(torch.arange(3), *(torch.tensor(v) for v in places))
        expected = REFERENCE.causal_conv(x[:2], weight, host, 1, rows)
        found = side.ops.causal_conv(*moved[:2], there, 1, planned)
        torch.testing.assert_close(found[:2].cpu(), expected, rtol=1e-5, atol=1e-5)
        expected = REFERENCE.delta_rule(DeltaInputs(*(t[:2] for t in tensors[:5]), *tensors[5:]), host, 1, rows)
        found = side.ops.delta_rule(moved[2], there, 1, planned)
        torch.testing.assert_close(found[:2].cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.conv.cpu(), host.conv)
        torch.testing.assert_close(there.recurrent.cpu(), host.recurrent, rtol=1e-4, atol=1e-4)


def test_messages_of_states(side: Side) -> None:
    ops, cache = side.ops, states(2, 4, 24, 4, 8)
    there = StateCache(side.there(cache.conv), side.there(cache.recurrent))
    x, weight = side.there(random(3, 24)), side.there(random(24, 4, seed=1))

    def rows(*vectors: list[int]) -> StateRows:
        return ops.plan_states(StateRows(*(torch.tensor(v) for v in vectors)))

    good = rows([0, 3], [0], [0], [1])
    with pytest.raises(ValueError, match="rows: expected cu_q to rise from 0 to 2, got 3 tokens"):
        ops.causal_conv(x[:2], weight, there, 1, good)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        ops.causal_conv(x, weight, there, 2, good)
    with pytest.raises(ValueError, match="rows: expected places 0 to 1, got 2"):
        ops.delta_rule(DeltaInputs(*map(side.there, rule_inputs(3, 2, 4, 8))), there, 1, rows([0, 3], [0], [0], [2]))
    for bad in ([0, 3, 2], [1, 2, 3]):
        with pytest.raises(ValueError, match="rows: expected cu_q to rise from 0, got"):
            rows(bad, [0, 0], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="rows: expected places of 0 and more, got -1"):
        rows([0, 3], [0], [0], [-1])
    with pytest.raises(ValueError, match=r"write_slots: expected contiguous \[1\] torch.int64"):
        ops.plan_decode_states(good.starts, good.read_slots, good.cu_q)


# ---- sampling, and what the ops say of themselves


def test_sampling(side: Side) -> None:
    """Rows: greedy with a tie, a draw from everything, the same with a filter of one token, one that is not finite."""
    logits = random(4, 300)
    logits[0, [40, 90]] = 9.0
    logits[3, 7] = float("nan")
    weights = torch.softmax(logits[1].double(), 0).cumsum(0)
    token = 120
    middle = float(weights[token - 1] + weights[token]) / 2
    draws = SamplingTensors(
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        torch.tensor([0, 0, 1, 0], dtype=torch.int32),
        torch.ones(4),
        torch.zeros(4),
        torch.tensor([0.5, middle, middle, 0.5]),
    )
    tokens, finite = side.ops.sample(side.there(logits), SamplingTensors(*(side.there(column) for column in draws)))
    assert tokens.dtype is torch.int64 and finite.tolist() == [True, True, True, False]
    assert tokens.tolist()[:3] == [40, token, int(logits[2].argmax())] and 0 <= int(tokens[3]) < 300


def test_special_rows(side: Side) -> None:
    """Rows: a bias, penalties, a mask with all of them, nothing, one that is not finite; those that ask are scored."""
    logits = (random(5, 9001) * 8).round() / 2
    logits[4, 7] = float("nan")
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 4, (2, 9001), generator=generator, dtype=torch.int32)
    masks = torch.randint(-(1 << 31), (1 << 31) - 1, (1, 282), generator=generator).int()
    columns = [[0, 0, 0, 2, 0], [2, 0, 2, 2, 0], [-1, 1, 0, -1, 0], [-1, -1, 0, -1, 0]]
    begins, ends, counted, masked = (torch.tensor(column, dtype=torch.int32) for column in columns)
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.4, -0.2], [0.7, -1.1, 2.0], [1, 0, 0], [1, 0, 0]]).double()
    ids, values = torch.tensor([8191, 4], dtype=torch.int32), torch.tensor([3.25, -1.75], dtype=torch.float64)
    adjustments = Adjustments(begins, ends, ids, values, penalties, counted, counts, masked, masks)
    found = side.ops.adjust_logits(side.there(logits), Adjustments(*(side.there(part) for part in adjustments)))
    expected = REFERENCE.adjust_logits(logits, adjustments)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-7, atol=0, equal_nan=True)
    tokens, num_top = torch.tensor([3, 9000, 17, 0, 5]), torch.tensor([20, 0, 3, -1, 2], dtype=torch.int32)
    numbers, places = (x.cpu() for x in side.ops.score_tokens(*map(side.there, (logits, tokens, num_top)), 20))
    wanted_numbers, wanted_places = REFERENCE.score_tokens(logits, tokens, num_top, 20)
    for row, count in ((0, 20), (1, 0), (2, 3)):
        assert torch.equal(places[row, : 1 + count], wanted_places[row, : 1 + count])
        torch.testing.assert_close(numbers[row, : 3 + count], wanted_numbers[row, : 3 + count], rtol=2e-6, atol=0)


def test_every_op_says_what_computes_it_and_why(side: Side) -> None:
    for ops in (side.ops, side.exact):
        choices = ops.choices()
        assert {choice.op for choice in choices} >= {*ALL_OPS, "sample"} and all(choice.reason for choice in choices)
    changed = {a.op for a, b in zip(side.ops.choices(), side.exact.choices(), strict=True) if a != b}
    assert changed == {"linear", "attention_paged"}
    assert (side.ops.deterministic, side.exact.deterministic) == (False, True)
