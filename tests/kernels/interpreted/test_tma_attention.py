"""The kernels with descriptors against the reference and beside those without: poison behind segments and contexts,
head dims in two parts, segments that programs look up, and which tensors they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydra_kernels import tma_attention
from hydra_kernels.packed_attention import packed_attention
from hydra_kernels.prefill_attention import prefill_attention
from tests.kernels.comparison import DTYPES, assert_attention_close
from tests.kernels.interpreted.test_packed_attention import SEGMENTS, projection, reference
from tests.kernels.paged import make_step

ROWS = [(9, 9), (20, 83), (0, 5), (70, 70), (4, 200)]


def packed(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], **how: bool) -> Tensor:
    cu = torch.tensor(bounds, dtype=torch.int32)
    return packed_attention(q, k, v, cu, 0.1, max_length=int(cu.diff().max()), tma=True, **how)


@pytest.mark.quick("72")
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 128])
def test_packed_rows(dim: int) -> None:
    q, k, v = projection(SEGMENTS[-1], 2, dim, torch.float32)
    assert_attention_close(packed(q, k, v, SEGMENTS), reference(q, k, v, SEGMENTS, 0.1))


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_packed_rows_of_sixteen_bits(dtype: torch.dtype) -> None:
    q, k, v = projection(200, 2, 80, dtype)
    assert_attention_close(packed(q, k, v, [0, 66, 200]), reference(q, k, v, [0, 66, 200], 0.1))


def test_a_segment_sees_no_other() -> None:
    q, k, v = projection(210, 1, 80, torch.float32)
    alone = packed(q[20:180], k[20:180], v[20:180], [0, 160])
    for x in (q, k, v):
        x[:20], x[180:] = float("nan"), float("nan")
    assert torch.equal(packed(q, k, v, [0, 20, 180, 210])[20:180], alone)


def test_segments_that_only_the_device_knows() -> None:
    q, k, v = projection(209, 1, 64, torch.float32)
    expected = packed(q, k, v, SEGMENTS)
    bounds = SEGMENTS + [209] * 40
    cu = torch.tensor(bounds, dtype=torch.int32)
    searched = packed_attention(q, k, v, cu, 0.1, max_length=209, search=True, tma=True)
    assert torch.equal(searched, expected)


@pytest.mark.quick("(7, 1, 32)-64")
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2, 32), (7, 1, 32), (2, 1, 80)], ids=str)
def test_prompts_over_a_paged_cache(heads: tuple[int, int, int], block_size: int) -> None:
    """Slots behind a context are NaN, entries behind a table's last block name none."""
    step = make_step(ROWS, heads, block_size, torch.float32)
    got, plain = (
        prefill_attention(
            *(step.q, step.k_cache, step.v_cache, step.block_tables, step.cu_q, step.num_context, 0.15),
            max_q=70,
            tma=tma,
        )
        for tma in (True, False)
    )
    assert_attention_close(got, step.expected(0.15))
    assert_attention_close(got, plain)


def test_what_descriptors_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.zeros(8, 3, 2, 80, dtype=torch.bfloat16)
    assert tma_attention.can_read(*fused.unbind(1))
    assert not tma_attention.can_read(fused.float())
    assert not tma_attention.can_read(fused[:, 0], fused.view(-1)[1 : 1 + 8 * 160].view(8, 2, 80)), "address"
    assert not tma_attention.can_read(torch.zeros(8, 2, 76, dtype=torch.bfloat16)), "152 bytes from head to head"
    assert not tma_attention.can_read(torch.zeros(8, 2, 144, dtype=torch.bfloat16)), "wider than a tile"
    cache = torch.zeros(4, 1, 2, 64, 2, 64, dtype=torch.float16)
    assert tma_attention.can_read_cache(cache[:, 0, 0], cache[:, 0, 1])
    small = cache.view(16, 1, 2, 16, 2, 64)
    assert not tma_attention.can_read_cache(small[:, 0, 0], small[:, 0, 1]), "a tile of keys is of four blocks"
    monkeypatch.setattr(tma_attention, "capability_of", lambda device: 80)
    assert not tma_attention.can_read(fused)
