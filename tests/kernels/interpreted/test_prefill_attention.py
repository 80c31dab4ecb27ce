"""Prefill attention against the reference: groups, chunks beside decode rows, head dims, poison, padding, messages."""

import pytest
import torch
from torch import Tensor

from hydra_kernels.prefill_attention import prefill_attention
from tests.kernels.comparison import DTYPES, assert_attention_close
from tests.kernels.paged import Step, make_step

# (queries, context): a whole prompt, a chunk, a decode row, a request without queries, more than one tile of rows
ROWS = [(9, 9), (20, 83), (1, 67), (0, 5), (131, 131)]
HEADS = [(2, 2, 32), (7, 1, 32), (1, 1, 72), (2, 1, 80)]


def prefill(step: Step, scale: float, max_q: int | None = None) -> Tensor:
    longest = int(step.cu_q.diff().max()) if max_q is None and len(step.cu_q) > 1 else max_q or 0
    tables, cu_q, context = step.block_tables, step.cu_q, step.num_context
    return prefill_attention(step.q, step.k_cache, step.v_cache, tables, cu_q, context, scale, max_q=longest)


@pytest.mark.quick("(7, 1, 32)", "(1, 1, 72)")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_matches_the_reference(heads: tuple[int, int, int]) -> None:
    step = make_step(ROWS, heads, 16, torch.float32)
    assert_attention_close(prefill(step, 0.15), step.expected(0.15))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sixteen_bits(dim: int, dtype: torch.dtype) -> None:
    step = make_step([(5, 70), (1, 3)], (2, 1, dim), 16, dtype)
    assert_attention_close(prefill(step, 0.1), step.expected(0.1).to(dtype))


@pytest.mark.quick("[7]")
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    step = make_step([(3, 75), (4, 4)], (2, 1, 16), block_size, torch.float32)
    assert_attention_close(prefill(step, 0.2), step.expected(0.2))


@pytest.mark.parametrize("heads", [(1, 1, 32), (3, 1, 32)], ids=str)
def test_a_token_gets_the_same_bits_in_every_chunking(heads: tuple[int, int, int]) -> None:
    whole = make_step([(70, 70)], heads, 16, torch.float16)
    full = prefill(whole, 0.1)
    for begin, end in ((0, 30), (30, 70), (69, 70)):
        bounds, context = (torch.tensor(x, dtype=torch.int32) for x in ([0, end - begin], [end]))
        part = Step(whole.q[begin:end], whole.cache, whole.block_tables, bounds, context)
        assert torch.equal(prefill(part, 0.1), full[begin:end])


@pytest.mark.slow
def test_a_captured_grid_may_be_larger_than_the_step() -> None:
    """Rows behind cu_q[B] belong to nobody, and `max_q` may be more than any request has."""
    step = make_step([(3, 40), (2, 2)], (2, 2, 32), 16, torch.float32)
    padded = Step(torch.cat([step.q, step.q]), step.cache, step.block_tables, step.cu_q, step.num_context)
    assert_attention_close(prefill(padded, 0.1, max_q=10)[:5].clone(), step.expected(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_a_captured_grid_finds_its_tiles(heads: tuple[int, int, int]) -> None:
    """The device alone knows the rows: decodes in front are another kernel's, the last requests have no tokens, and
    tokens after them belong to nobody."""
    step = make_step([(1, 67), (1, 3), *ROWS[:2], (131, 140), (0, 1), (0, 0)], heads, 16, torch.float32)
    rest, num_tokens = step.cu_q.clamp(min=2), step.q.shape[0]
    q = torch.cat([step.q, step.q[:9]])
    out = torch.full(q.shape, 7.0)
    tables, caches = step.block_tables, (step.k_cache, step.v_cache)
    prefill_attention(q, *caches, tables, rest, step.num_context, 0.15, max_q=len(q), out=out, max_requests=3)
    assert_attention_close(out[2:num_tokens].clone(), step.expected(0.15)[2:].contiguous())
    assert (out[:2] == 7).all() and (out[num_tokens:] == 7).all()


def test_scores_far_from_zero() -> None:
    """Scores are some hundreds, where one unit in the last place of float32 is 3e-5."""
    step = make_step([(40, 70)], (2, 1, 32), 16, torch.float32)
    torch.testing.assert_close(prefill(step, 40.0), step.expected(40.0), rtol=0, atol=3e-4)


def test_nothing_in_nothing_out() -> None:
    assert prefill(make_step([], (2, 1, 64), 16, torch.float32), 0.1).shape == (0, 2, 64)
    assert prefill(make_step([(0, 4)], (2, 1, 64), 16, torch.float32), 0.1).shape == (0, 2, 64)


def test_messages() -> None:
    step = make_step([(2, 5)], (2, 1, 64), 16, torch.float32)
    with pytest.raises(ValueError, match="max_q: expected 0 to 2, the tokens of the step, got 3"):
        prefill(step, 0.1, max_q=3)
    with pytest.raises(ValueError, match=r"cu_q: expected contiguous \[2\] torch.int32"):
        prefill(Step(step.q, step.cache, step.block_tables, step.cu_q.long(), step.num_context), 0.1)
    with pytest.raises(ValueError, match=r"max_requests: expected 0 .* for 1025 requests"):
        zeros = torch.zeros(1026, dtype=torch.int32)
        tables, caches = step.block_tables.expand(1025, -1), (step.k_cache, step.v_cache)
        prefill_attention(step.q, *caches, tables, zeros, zeros[:-1], 0.1, max_q=1, max_requests=1)
    with pytest.raises(ValueError, match="scale: expected a positive number, got 0"):
        prefill(step, 0.0)
