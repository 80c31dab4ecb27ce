"""Packed attention against the reference: whole pictures, windows, head dims, strided projections, poison, messages."""

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.packed_attention import packed_attention
from tests.kernels.comparison import DTYPES, assert_attention_close

SEGMENTS = [0, 5, 5, 69, 209]  # short, empty, one tile of keys exactly, more than a tile of rows
WINDOWS = [0, 16, 32, 41, 105]


def projection(rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one fused [P, 3, H, D]."""
    fused = torch.randn(rows, 3, heads, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    q, k, v = fused.unbind(1)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    cu = torch.tensor(bounds, dtype=torch.int32)
    return packed_attention(q, k, v, cu, scale, max_length=int(cu.diff().max()) if len(cu) > 1 else 0)


def reference(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    wide = [x.float().contiguous() for x in (q, k, v)]
    return ReferenceOps().attention_packed(wide[0], wide[1], wide[2], bounds, scale).to(q.dtype)


@pytest.mark.quick("16-pictures", "72-windows", "80-pictures")
@pytest.mark.parametrize("bounds", [SEGMENTS, WINDOWS], ids=["pictures", "windows"])
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 128])
def test_matches_the_reference(dim: int, bounds: list[int]) -> None:
    q, k, v = projection(bounds[-1], 1, dim, torch.float32)
    assert_attention_close(attention(q, k, v, bounds, 0.1), reference(q, k, v, bounds, 0.1))


@pytest.mark.quick("72-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80])
def test_sixteen_bits(dim: int, dtype: torch.dtype) -> None:
    q, k, v = projection(70, 2, dim, dtype)
    assert_attention_close(attention(q, k, v, [0, 66, 70], 0.1), reference(q, k, v, [0, 66, 70], 0.1))


@pytest.mark.quick("40-one")
@pytest.mark.parametrize("bounds", [SEGMENTS, [0, 0, 105], [*range(0, 106, 15)]], ids=["pictures", "one", "equal"])
@pytest.mark.parametrize("empty", [0, 40])
def test_segments_that_only_the_device_knows(bounds: list[int], empty: int) -> None:
    """Bit for bit, however many empty ones stand behind; a program of every tile finds its segment."""
    q, k, v = projection(bounds[-1], 1, 64, torch.float32)
    cu = torch.tensor(bounds + [bounds[-1]] * empty, dtype=torch.int32)
    for one_tile in (False, True):
        longest = {"max_length": bounds[-1], "one_tile": one_tile}
        expected = packed_attention(q, k, v, cu, 0.1, **longest)
        assert torch.equal(packed_attention(q, k, v, cu, 0.1, search=True, **longest), expected)
    assert_attention_close(expected, reference(q, k, v, bounds, 0.1))


def test_a_segment_sees_no_other() -> None:
    q, k, v = projection(60, 2, 72, torch.float32)
    alone = attention(q[20:45], k[20:45], v[20:45], [0, 25], 0.1)
    for x in (q, k, v):
        x[:20] = float("nan")
        x[45:] = float("nan")
    result = attention(q, k, v, [0, 20, 45, 60], 0.1)
    assert torch.equal(result[20:45], alone)
    assert result[:20].isnan().all() and result[45:].isnan().all()


def test_head_dims_next_to_other_data() -> None:
    """Columns behind a head dim of 72 belong to the next head or to somebody else."""
    wide = torch.randn(3, 40, 2, 80, generator=torch.Generator().manual_seed(1))
    wide[..., 72:] = float("nan")
    q, k, v = wide[..., :72].unbind(0)
    assert_attention_close(attention(q, k, v, [0, 40], 0.1), reference(q, k, v, [0, 40], 0.1))


def test_nothing_in_nothing_out() -> None:
    q, k, v = projection(0, 2, 64, torch.float32)
    assert attention(q, k, v, [0], 0.1).shape == (0, 2, 64)
    assert attention(q, k, v, [0, 0], 0.1).shape == (0, 2, 64)


def test_messages() -> None:
    q, k, v = projection(6, 2, 64, torch.float32)
    with pytest.raises(ValueError, match=r"k: expected \[6, 2, 64\] like q, got \[5, 2, 64\]"):
        attention(q, k[:5], v, [0, 6], 0.1)
    with pytest.raises(ValueError, match=r"v: expected \[T, H, 64\] torch.float32 on cpu"):
        attention(q, k, v.half(), [0, 6], 0.1)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected contiguous .* torch.int32"):
        packed_attention(q, k, v, torch.tensor([0, 6]), 0.1, max_length=6)
    with pytest.raises(ValueError, match="max_length: expected 0 to 6, the packed rows, got 7"):
        packed_attention(q, k, v, torch.tensor([0, 6], dtype=torch.int32), 0.1, max_length=7)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        packed_attention(q, k, v, torch.tensor([], dtype=torch.int32), 0.1, max_length=0)
