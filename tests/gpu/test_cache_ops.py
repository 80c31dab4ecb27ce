"""Paged caches on a device: every case of tests/ops/test_cache_ops.py, and what only a device has."""

import pytest
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import HeadNorms, PagedCache
from hydra_engine.backend.cuda import cache as cuda_cache
from tests.gpu.on_device import OnDevice
from tests.ops import test_cache_ops as cases
from tests.ops import test_heads as heads

pytestmark = pytest.mark.cuda

for _name, _case in vars(cases).items():
    if _name.startswith("test_"):
        globals()[_name] = _case

# Keys and values of a large model: 16-byte accesses; the last a head dim that single elements take.
SHAPES = [(12, 2, 2, 16, 8, 128), (12, 2, 2, 16, 4, 96), (12, 2, 2, 16, 2, 18)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PagedCache:
    return PagedCache(torch.full(shape, float("nan"), dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("which", ["neither", "both", "q", "k"])
def test_norm_and_rotation_are_as_exact_as_the_formula(
    ops: OnDevice, dtype: torch.dtype, shape: tuple[int, ...], which: str
) -> None:
    _, _, _, _, num_heads, dim = shape
    cache = cases.poisoned(shape, dtype)
    slots = cases.some_slots(cache, 40)
    slots[::7] = -1
    kept = slots >= 0
    q, k, v = cases.fused_rows(40, [3, 1, 1], num_heads, dim, dtype)
    cos, sin = heads.angles(40, dim)
    weights = {name: cases.random(dim, dtype=dtype, seed=8) for name in "qk" if which in (name, "both")}
    out = ops.rope_and_write(
        q, k, v, (cos, sin), cache, 1, slots, HeadNorms(weights.get("q"), weights.get("k"), heads.EPS)
    )
    check(out, q, cos, sin, weights.get("q"))
    check(cases.slot_rows(cache, 1, 0)[slots[kept]], k[kept], cos[kept], sin[kept], weights.get("k"))
    assert torch.equal(cases.slot_rows(cache, 1, 1)[slots[kept]], v[kept])
    assert cache.data[:, 0].isnan().all()


def check(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> None:
    plain, wide = (
        (x, x.double())
        if weight is None
        else (
            heads.normed(x, weight),
            heads.normed(x.double(), weight.double()),
        )
    )
    plain = heads.rotated(plain.float(), cos, sin).to(x.dtype)
    heads.assert_as_good_as(result, plain, heads.rotated(wide, cos, sin))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_indices_on_the_device_do_the_same(cuda: torch.device, dtype: torch.dtype) -> None:
    shape = (9, 2, 1, 16, 1, 640)
    features = cases.random(100, 1, 640, dtype=dtype).to(cuda)
    slots = cases.some_slots(PagedCache(torch.empty(shape)), 100)
    rows = torch.randperm(150)[:100]
    slots[::7] = -1
    results = []
    for where in (torch.device("cpu"), cuda):
        cache, hidden = filled(shape, dtype, cuda), torch.zeros(150, 640, dtype=dtype, device=cuda)
        ops = cuda_cache.CudaCacheOps()
        for plane in (0, 1):
            ops.write_cache(cache, plane, [features], slots.to(where))
            ops.merge_image_tokens(hidden, rows.to(where), cache, slots.to(where), plane)
        gathered = ops.gather_cache(cache, 0, 0, slots.to(where))[(slots >= 0).to(cuda)]
        results.append((cache.data, hidden, gathered))
    assert torch.equal(results[1][2].cpu(), features[slots >= 0].cpu())
    assert results[1][1].any(dim=1).sum() == (slots >= 0).sum()
    for host, device in zip(*results, strict=True):
        assert torch.equal(cases.bits(host), cases.bits(device))


def test_a_kernel_skips_a_bad_index_and_the_next_call_says_so(cuda: torch.device) -> None:
    cache = filled((2, 2, 1, 4, 1, 8), torch.float32, cuda)
    ops = cuda_cache.CudaCacheOps()
    rows = torch.ones(3, 1, 8, device=cuda)
    for bad in (8, -2, 2**40):
        ops.write_cache(cache, 0, [rows], torch.tensor([0, bad, 5], device=cuda))
        torch.cuda.synchronize(cuda)
        assert cache.data.isfinite().sum() == 16
        with pytest.raises(ValueError, match=r"slots: .*index 1"):
            ops.write_cache(cache, 0, [rows], torch.tensor([0, 1, 2], device=cuda))
        cache.data.fill_(float("nan"))
    hidden = torch.zeros(3, 8, device=cuda)
    none = torch.tensor([0], device=cuda)
    ops.merge_image_tokens(hidden, torch.tensor([3], device=cuda), cache, none, 1)
    torch.cuda.synchronize(cuda)
    with pytest.raises(ValueError, match=r"rows: .*index 0"):
        _C.cuda_check_faults(0)
    _C.cuda_check_faults(0)
    assert not hidden.any()


@pytest.mark.parametrize("count", [3, 500, 501, 4001])
def test_blocks_of_a_request_go_out_and_come_back(cuda: torch.device, count: int) -> None:
    whole = torch.randn((4100, 2, 2, 4, 1, 12), generator=torch.Generator().manual_seed(1))
    cache, other = PagedCache(whole.to(cuda)), filled((4050, 2, 2, 4, 1, 12), torch.float32, cuda)
    there, back = torch.randperm(4100)[:count], torch.randperm(4050)[:count]
    packed, rows = filled((count, *whole.shape[1:]), torch.float32, cuda), torch.arange(count)
    ops = cuda_cache.CudaCacheOps()
    ops.copy_blocks(cache, packed, torch.stack((there, rows), dim=1))
    assert torch.equal(packed.data.cpu(), whole[there])
    ops.copy_blocks(packed, other, torch.stack((rows, back), dim=1))
    result = other.data.cpu()
    assert torch.equal(result[back], whole[there])
    assert result.isfinite().flatten(1).all(dim=1).sum() == count


def test_captured_calls_repeat(cuda: torch.device) -> None:
    cache = filled((4, 1, 2, 16, 2, 64), torch.bfloat16, cuda)
    ops = cuda_cache.CudaCacheOps()
    fused = cases.random(8, 8 * 64, dtype=torch.bfloat16).to(cuda)
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in fused.split((256, 128, 128), dim=1))
    cos, sin = (cases.random(8, 32, dtype=torch.float32, seed=s).to(cuda) for s in (1, 2))
    slots = torch.full((8,), -1, device=cuda)
    other = filled((4, 1, 2, 16, 2, 64), torch.bfloat16, cuda)
    expected = ops.rope_and_write(q, k, v, (cos, sin), other, 0, torch.arange(8, 16))
    ops.desc(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():  # as every graph of a process
        with torch.cuda.graph(graph):
            out = ops.rope_and_write(q, k, v, (cos, sin), cache, 0, slots)
        slots.copy_(torch.arange(8, 16))
        graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(cases.bits(cache.data), cases.bits(other.data))


def test_tensors_of_another_device_are_refused(cuda: torch.device) -> None:
    cache = filled((2, 1, 1, 4, 1, 8), torch.float32, cuda)
    ops = cuda_cache.CudaCacheOps()
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match=r"rows\[0\]: expected cuda:0"):
        ops.write_cache(cache, 0, [torch.zeros(1, 1, 8)], slots)
    with pytest.raises(ValueError, match="hidden: expected cuda:0"):
        ops.merge_image_tokens(torch.zeros(1, 8), slots, cache, slots)
    with pytest.raises(ValueError, match="pairs: expected cpu"):
        ops.copy_blocks(cache, cache, torch.zeros(1, 2, dtype=torch.int64, device=cuda))
    on_host = cases.poisoned((2, 1, 1, 4, 1, 8), torch.float32)
    with pytest.raises(ValueError, match="cache: expected one on a GPU, got one on cpu; allocate it there"):
        ops.write_cache(on_host, 0, [torch.zeros(1, 1, 8)], slots)
