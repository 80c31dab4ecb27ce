"""Candidates for attention in place of the plain Triton kernels, beside the reference, and the measurement that chooses
among them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import attention_timing
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import CUDNN, TRITON_TMA, VARLEN, Heads, Measured, Shapes, Tower
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.tower_attention import kernels
from hydra_engine.backend.reference.ops import ReferenceOps
from tests.kernels.comparison import assert_attention_close
from tests.kernels.paged import make_step

pytestmark = pytest.mark.cuda

SHAPES = Shapes(Heads(28, 4, 128, 64), Tower(16, 80, 1024, 64))


@pytest.fixture(scope="module")
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


def ours(cuda: torch.device, device: CudaDevice, *, tma: bool = False) -> CudaAttention:
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    return CudaAttention(cuda, num_sms, device.send, deterministic=False, tma_prompts=tma)


@pytest.mark.parametrize("bounds", [[0, 577, 1154], [0, 100, 100, 357, 500], [0, 64, 128, 192], [0, 1]], ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
@pytest.mark.parametrize("name", [TRITON_TMA, CUDNN, VARLEN])
def test_packed_attention(cuda: torch.device, device: CudaDevice, name: str, dim: int, bounds: list[int]) -> None:
    """Rows behind a segment are the next one's; of the last one they are NaN. Also with segments that only the device
    knows, and empty ones behind them."""
    by_triton = ours(cuda, device)
    kernel = kernels(by_triton, None)[name]
    fused = torch.full((bounds[-1] + 64, 3, 4, dim), float("nan"), dtype=torch.bfloat16)
    fused[: bounds[-1]].normal_()
    q, k, v = fused[: bounds[-1]].unbind(1)
    expected = ReferenceOps().attention_packed(q, k, v, bounds, dim**-0.5)
    there = fused.to(cuda)[: bounds[-1]].unbind(1)
    padded = torch.tensor(bounds + bounds[-1:] * 5, dtype=torch.int32, device=cuda)
    longest = max(end - begin for begin, end in pairwise(bounds))
    tried = 0
    for segments in (bounds, by_triton.plan_packed(padded, longest)):
        if kernel.supports(*there, segments):
            tried += 1
            assert_attention_close(kernel.attend(*there, segments, dim**-0.5).cpu(), expected)
    if not tried:
        pytest.skip("this kernel does not take such segments here")


@pytest.mark.parametrize("heads", [(8, 8, 128), (28, 4, 128), (4, 2, 80)])
@pytest.mark.parametrize("block_size", [64, 128])
def test_prompts_by_descriptors(
    cuda: torch.device, device: CudaDevice, heads: tuple[int, int, int], block_size: int
) -> None:
    attention, scale = ours(cuda, device, tma=True), heads[2] ** -0.5
    step = make_step([(1, 40), (60, 90), (0, 5), (200, 700), (33, 33)], heads, block_size, torch.bfloat16)
    plan = attention.plan(step.cu_q, step.num_context, step.block_tables)
    got = attention.paged(step.q.to(cuda), PagedCache(step.cache.data.to(cuda)), 1, plan, scale)
    assert_attention_close(got.cpu(), step.expected(scale).to(torch.bfloat16))


def test_a_choice_is_measured_once(
    cuda: torch.device, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernels run and agree with ours; so do those with descriptors where there is a Hopper GPU."""
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    measured: list[Measured] = []
    measure = attention_timing.measure

    def noted(*given: object) -> Measured:
        measured.append(measure(*given))  # type: ignore[arg-type]
        return measured[-1]

    monkeypatch.setattr(attention_timing, "measure", noted)
    with torch.inference_mode():
        first, again = (
            attention_timing.choose_attention(device, num_sms, torch.bfloat16, SHAPES, tmp_path, 13000)
            for _ in range(2)
        )
    assert first == again and len(measured) == 1
    (result,) = measured
    wanted = {CUDNN, VARLEN} | ({TRITON_TMA} if torch.cuda.get_device_capability(cuda)[0] == 9 else set())
    assert wanted <= result.seconds["pictures"].keys(), result.left_out
    assert all(0 < seconds < 0.1 for times in result.seconds.values() for seconds in times.values())
