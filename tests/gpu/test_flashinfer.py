"""FlashInfer's attention beside the reference, where the package is installed and can build its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda_attention import CudaAttention
from hydra_engine.backend.cuda_host import CudaDevice
from hydra_engine.backend.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.reference import ReferenceOps
from tests.kernels.comparison import assert_attention_close
from tests.kernels.paged import make_step

pytestmark = pytest.mark.cuda

STEPS = [
    [(1, 700), (1, 1), (1, 16), (1, 33)],
    [(100, 100), (7, 300)],
    [(1, 40), (1, 17), (60, 90), (1, 5), (33, 33)],
    [(1, 9), (0, 8), (5, 16)],
]
HEADS = [(8, 8, 128), (28, 4, 128), (16, 8, 64), (4, 2, 256)]


@pytest.fixture(scope="module")
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


@pytest.fixture(scope="module")
def attention(cuda: torch.device, device: CudaDevice) -> FlashInferAttention:
    library = pytest.importorskip("flashinfer", exc_type=ImportError)
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    by_triton = CudaAttention(cuda, num_sms, device.send, deterministic=False)
    return FlashInferAttention(cuda, device.send, by_triton, library)


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("heads", HEADS)
def test_paged_attention_over_a_layer_of_a_block_major_cache(
    attention: FlashInferAttention, cuda: torch.device, rows: list[tuple[int, int]], heads: tuple[int, int, int]
) -> None:
    scale = heads[2] ** -0.5
    step = make_step(rows, heads, 16, torch.bfloat16)
    plan = attention.plan(step.cu_q, step.num_context, step.block_tables)
    cache = PagedCache(step.cache.data.to(cuda))
    got = attention.paged(step.q.to(cuda), cache, 1, plan, scale)
    assert_attention_close(got.cpu(), step.expected(scale).to(torch.bfloat16))


def test_steps_that_were_planned_ahead_do_not_disturb_each_other(
    attention: FlashInferAttention, cuda: torch.device
) -> None:
    """More plans than a lane holds, made while the device has computed none of them."""
    steps = [make_step([(1, 30 + 90 * i), (9, 40 + i)], (8, 8, 128), 16, torch.bfloat16, seed=i) for i in range(6)]
    inputs = [(step.q.to(cuda), PagedCache(step.cache.data.to(cuda))) for step in steps]
    scale = 128**-0.5
    torch.cuda._sleep(100_000_000)
    got = []
    for step, (q, cache) in zip(steps, inputs, strict=True):
        plan = attention.plan(step.cu_q, step.num_context, step.block_tables)
        got.append(attention.paged(q, cache, 1, plan, scale))
    for step, result in zip(steps, got, strict=True):
        assert_attention_close(result.cpu(), step.expected(scale).to(torch.bfloat16))


@pytest.mark.parametrize("bounds", [[0, 64], [0, 100, 100, 257, 300], [0, 1]])
@pytest.mark.parametrize("dim", [64, 128, 72, 80])
def test_packed_attention(attention: FlashInferAttention, cuda: torch.device, bounds: Sequence[int], dim: int) -> None:
    """Head dims that FlashInfer reads wrongly are not given to it."""
    fused = torch.randn(bounds[-1], 3, 4, dim).to(torch.bfloat16)
    q, k, v = fused.unbind(1)
    expected = ReferenceOps().attention_packed(q, k, v, bounds, dim**-0.5)
    got = attention.packed(*fused.to(cuda).unbind(1), bounds, dim**-0.5)
    assert_attention_close(got.cpu(), expected)
