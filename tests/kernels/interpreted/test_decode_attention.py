"""Decode attention against the reference: group sizes, head dims, splits, poison, empty contexts, messages."""

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from hydra_kernels._occupancy import Limits, resident_programs
from hydra_kernels.decode_attention import choose_num_splits, decode_attention, new_counters
from tests.kernels.comparison import DTYPES, assert_attention_close
from tests.kernels.paged import Step, make_step

# (Hq, Hkv, D): one head per KV head and groups of 2, 7 and 17, head dims of one and of two tiles, with and without rest
HEADS = [(2, 2, 128), (1, 1, 72), (1, 1, 20), (1, 1, 256), (4, 2, 64), (7, 1, 80), (17, 1, 96), (2, 1, 72)]
CONTEXTS = [1, 135, 0]


def decode(step: Step, scale: float, num_splits: int) -> torch.Tensor:
    tables, context = step.block_tables, step.num_context
    return decode_attention(step.q, step.k_cache, step.v_cache, tables, context, scale, num_splits=num_splits)


@pytest.mark.quick("(7, 1, 80)-3", "(1, 1, 72)-3", "(2, 1, 72)-3", "(1, 1, 256)-3")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_matches_the_reference(heads: tuple[int, int, int], num_splits: int) -> None:
    step = make_step([(1, max(1, context)) for context in CONTEXTS], heads, 16, torch.float32)
    expected = step.expected(0.1)
    step.num_context[2] = 0
    expected[2] = 0
    assert_attention_close(decode(step, 0.1, num_splits), expected)


@pytest.mark.quick("(2, 2, 80)-torch.float16", "(4, 2, 128)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 80), (4, 2, 128)], ids=str)
def test_sixteen_bits(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = make_step([(1, 40), (1, 7)], heads, 16, dtype)
    assert_attention_close(decode(step, 0.1, 2), step.expected(0.1).to(dtype))


@pytest.mark.quick("[7]")
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    step = make_step([(1, 70), (1, 5)], (2, 1, 32), block_size, torch.float32)
    assert_attention_close(decode(step, 0.2, 2), step.expected(0.2))


@pytest.mark.quick("(2, 1, 32)")
@pytest.mark.parametrize("heads", [(1, 1, 32), (2, 1, 32)], ids=str)
def test_more_splits_than_tiles(heads: tuple[int, int, int]) -> None:
    """Splits may have nothing to read; what they would have written is never looked at."""
    step = make_step([(1, 65), (1, 3)], heads, 16, torch.float32)
    assert_attention_close(decode(step, 0.2, 6), step.expected(0.2))


@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 2, 64)], ids=str)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(heads: tuple[int, int, int]) -> None:
    step = make_step([(1, 90), (1, 33)], heads, 16, torch.float16)
    together = decode(step, 0.1, 2)
    single = Step(step.q[1:], step.cache, step.block_tables[1:], step.cu_q[:2], step.num_context[1:])
    assert torch.equal(decode(single, 0.1, 2), together[1:])


@pytest.mark.slow
def test_scores_far_from_zero() -> None:
    step = make_step([(1, 50)], (2, 1, 64), 16, torch.float32)
    result = decode(step, 40.0, 3)
    assert torch.isfinite(result).all()
    assert_attention_close(result, step.expected(40.0))


def test_no_requests() -> None:
    step = make_step([], (2, 1, 64), 16, torch.float32)
    assert decode(step, 0.1, 4).shape == (0, 2, 64)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 2, 80)], ids=str)
def test_the_program_that_ends_last_joins_the_splits_in_their_order(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on which program ends last; it leaves the counters at zero for the next launch."""
    step = make_step([(1, 300), (1, 65), (1, 1)], heads, 16, torch.float32)
    counters = torch.zeros(9, dtype=torch.int32)
    tables, context = step.block_tables, step.num_context

    def run() -> torch.Tensor:
        return decode_attention(
            step.q, step.k_cache, step.v_cache, tables, context, 0.1, num_splits=5, counters=counters
        )

    forwards = run()
    assert_attention_close(forwards, step.expected(0.1))
    set_index = interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_index(x, y, 4 - z))
    assert torch.equal(run(), forwards) and not counters.any()


def test_number_of_splits() -> None:
    """Whole waves of 132 multiprocessors with 4 places for programs each, or 3."""
    assert choose_num_splits(1, 32, 1024, 528) == 16  # at least 64 keys each
    assert choose_num_splits(1, 32, 8192, 528) == 16  # 512 programs: 17 would be 16 too many
    assert choose_num_splits(8, 32, 8192, 528) == 2
    assert choose_num_splits(16, 4, 4096, 396) == 6  # 384 programs, where 4 programs an SM would be 528
    assert choose_num_splits(64, 4, 4096, 396) == 3  # two waves of 384
    assert choose_num_splits(24, 32, 8192, 528) == 2  # three waves of 512
    assert choose_num_splits(64, 32, 8192, 528) == 1
    assert choose_num_splits(16, 4, 4096, 3 * 48) == 9  # four waves of 144 on 48 multiprocessors
    assert choose_num_splits(0, 4, 0, 396) == 1
    assert choose_num_splits(1, 1, 10**6, 528) == 128
    assert choose_num_splits(5000, 4, 10**6, 10**6) == 1  # there are not as many counters


def test_places_of_programs_on_a_multiprocessor() -> None:
    hopper = Limits(233472, 2048)
    assert resident_programs(49536, 110, 4, hopper) == 4  # one head per KV head: shared memory
    assert resident_programs(72192, 96, 4, hopper) == 3  # several
    assert resident_programs(37376, 200, 4, hopper) == 2  # registers
    assert resident_programs(0, 32, 32, hopper) == 2  # threads
    assert resident_programs(0, 16, 1, hopper) == 32
    assert resident_programs(230000, 255, 8, hopper) == 1


def test_messages() -> None:
    step = make_step([(1, 5)], (2, 1, 64), 16, torch.float32)
    with pytest.raises(ValueError, match="num_splits: expected 1 to 128, got 0"):
        decode(step, 0.1, 0)
    with pytest.raises(ValueError, match=r"counters: expected int32 \[1\] or more"):
        few = new_counters(step.q.device)[:0]
        decode_attention(
            step.q, step.k_cache, step.v_cache, step.block_tables, step.num_context, 0.1, num_splits=2, counters=few
        )
    with pytest.raises(ValueError, match="scale: expected a positive number"):
        decode(step, -1.0, 1)
    with pytest.raises(ValueError, match=r"num_context: expected \[2\], one for each query, got \[1\]"):
        decode(Step(step.q.expand(2, -1, -1), step.cache, step.block_tables, step.cu_q, step.num_context), 0.1, 1)
    with pytest.raises(ValueError, match=r"block_tables: expected \[1, max_blocks\] torch.int32"):
        decode(Step(step.q, step.cache, step.block_tables.long(), step.cu_q, step.num_context), 0.1, 1)
    with pytest.raises(ValueError, match=r"k_cache: expected .* torch.float16"):
        decode(Step(step.q.half(), step.cache, step.block_tables, step.cu_q, step.num_context), 0.1, 1)
    with pytest.raises(ValueError, match="v_cache: expected what k_cache is"):
        k = step.k_cache
        decode_attention(step.q, k, k.half(), step.block_tables, step.num_context, 0.1, num_splits=1)
    with pytest.raises(ValueError, match="q: expected a multiple of 2 KV heads, got 3 heads"):
        wide = make_step([(1, 5)], (4, 2, 64), 16, torch.float32)
        decode(Step(wide.q[:, :3], wide.cache, wide.block_tables, wide.cu_q, wide.num_context), 0.1, 1)
    with pytest.raises(ValueError, match="q: expected a head dim of at most 256, got 300"):
        decode(make_step([(1, 5)], (1, 1, 300), 16, torch.float32), 0.1, 1)
