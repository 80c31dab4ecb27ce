"""The CUDA ops on a device: every case of op_cases.py, the cache ops that only a device has, and captured steps."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import Draws, PagedCache
from hydra_engine.backend.cuda import CudaOps
from hydra_engine.backend.cuda_host import CudaDevice
from tests.gpu import op_cases as cases
from tests.gpu.side import Side
from tests.kernels.comparison import assert_attention_close
from tests.kernels.paged import make_step

pytestmark = pytest.mark.cuda

for _name, _case in vars(cases).items():
    if _name.startswith("test_"):
        globals()[_name] = _case


@pytest.fixture(scope="module")
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


@pytest.fixture(scope="module")
def side(cuda: torch.device, device: CudaDevice) -> Side:
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    ops, exact = (CudaOps(cuda, num_sms, device.send, deterministic=exact) for exact in (False, True))
    return Side(cuda, ops, exact)


@pytest.fixture(autouse=True)
def faultless(cuda: torch.device) -> Iterator[None]:
    """No kernel of a case met a slot that is out of range."""
    yield
    torch.cuda.synchronize(cuda)
    _C.cuda_check_faults(0)


def poisoned(cuda: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> PagedCache:
    return PagedCache(torch.full(shape, float("nan"), dtype=dtype, device=cuda))


@pytest.mark.parametrize("shape", [(33, 4096), (300, 1176), (17, 588)], ids=str)
def test_products_of_real_widths(side: Side, shape: tuple[int, int]) -> None:
    """Also of widths that are no multiple of 16 bytes."""
    rows, width = shape
    x, weight = cases.random(rows, width, dtype=torch.bfloat16), cases.random(520, width, dtype=torch.bfloat16, seed=1)
    wide = x.double() @ weight.double().T
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(side.there(weight))
        found = ops.linear(side.there(x), packed, out_dtype=torch.float32).cpu().double()
        torch.testing.assert_close(found, wide, rtol=1e-4, atol=5e-3)
        torch.testing.assert_close(ops.linear(side.there(x), packed).cpu(), wide.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("where", ["host", "device"])
def test_caches(side: Side, cuda: torch.device, where: str) -> None:
    """Writes with norm and rotation, features, gathers, merges and block copies, against the reference."""
    reference, ops = cases.REFERENCE, side.ops
    host = PagedCache(torch.full((6, 2, 2, 4, 2, 16), float("nan")))
    there = side.cache(host)
    fused = cases.random(5, 8, 16)
    q, k, v = fused.split((4, 2, 2), dim=1)
    cos, sin, norm = cases.random(5, 8, seed=1), cases.random(5, 8, seed=2), cases.random(16, seed=3)
    slots = torch.tensor([3, -1, 22, 7, 0])
    moved = slots if where == "host" else slots.to(cuda)
    expected = reference.rope_and_write(q, k, v, cos, sin, host, 1, slots, q_norm=norm, k_norm=norm, eps=1e-6)
    on_device = (part for part in side.there(fused).split((4, 2, 2), dim=1))
    weight = side.there(norm)
    found = ops.rope_and_write(
        *on_device, side.there(cos), side.there(sin), there, 1, moved, q_norm=weight, k_norm=weight, eps=1e-6
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(there.data.cpu(), host.data, rtol=1e-5, atol=1e-5, equal_nan=True)
    kept = torch.tensor([3, 22, 7, 0])
    gathered = ops.gather_cache(there, 1, 0, kept if where == "host" else kept.to(cuda))
    torch.testing.assert_close(gathered.cpu(), reference.gather_cache(host, 1, 0, kept), rtol=1e-5, atol=1e-5)
    pairs = torch.tensor([[0, 4], [5, 2]])
    reference.copy_blocks(host, host, pairs)
    ops.copy_blocks(there, there, pairs)
    torch.testing.assert_close(there.data.cpu(), host.data, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_features_reach_the_hidden_rows(side: Side, cuda: torch.device) -> None:
    cache = poisoned(cuda, 3, 2, 1, 4, 1, 24)
    features = cases.random(4, 1, 24, dtype=torch.bfloat16).to(cuda)
    slots, rows = torch.tensor([2, 9, 3, 0], device=cuda), torch.tensor([5, 0, 1, 3], device=cuda)
    for plane in (0, 1):
        side.ops.write_cache(cache, plane, [features], slots)
    hidden = torch.ones(6, 24, dtype=torch.bfloat16, device=cuda)
    side.ops.merge_image_tokens(hidden, rows, cache, slots)
    assert torch.equal(hidden[rows], features[:, 0])
    side.ops.merge_image_tokens(hidden, rows, cache, slots, 1, accumulate=True)
    assert torch.equal(hidden[rows], 2 * features[:, 0]) and (hidden[[2, 4]] == 1).all()


class OneLayer:
    """A decoder of one layer without MLP: norm, QKV, rotation and write, attention, head, sample."""

    def __init__(self, side: Side, batch: int) -> None:
        self._ops, self._batch = side.ops, batch
        self._qkv = self._ops.pack_linear(side.there(cases.random(8 * 64, 128, dtype=torch.bfloat16, seed=1)))
        self._head = self._ops.pack_linear(side.there(cases.random(500, 4 * 64, dtype=torch.bfloat16, seed=2)))
        self._scale = side.there(cases.random(128, dtype=torch.bfloat16, seed=3))
        self._angles = side.there(cases.random(batch, 32, seed=4))

    def __call__(
        self, x: Tensor, cache: PagedCache, context: Tensor, tables: Tensor, slots: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        ops, angles = self._ops, self._angles
        plan = ops.plan_decode(context, tables)
        normed = ops.rms_norm(x, self._scale, 1e-6)
        q, k, v = ops.linear(normed, self._qkv).view(self._batch, 8, 64).split((4, 2, 2), dim=1)
        q = ops.rope_and_write(q, k, v, angles, angles, cache, 0, slots)
        mixed = ops.attention_paged(q, cache, 0, plan, 0.125)
        return ops.sample(ops.linear(mixed.flatten(1), self._head, out_dtype=torch.float32), draws)


@pytest.mark.parametrize("batch", [1, 4, 24])
def test_a_captured_step_repeats_with_other_contents(
    side: Side, cuda: torch.device, device: CudaDevice, batch: int
) -> None:
    """Both small kernels and cuBLAS, whose workspace is the stream's."""
    caches = [PagedCache(cases.random(2 * batch, 1, 2, 16, 2, 64, dtype=torch.bfloat16).to(cuda)) for _ in range(2)]
    layer, x = OneLayer(side, batch), cases.random(batch, 128, dtype=torch.bfloat16, seed=5).to(cuda)
    context = torch.ones(batch, dtype=torch.int32, device=cuda)
    tables = torch.zeros(batch, 40, dtype=torch.int32, device=cuda)
    slots = torch.full((batch,), -1, device=cuda)
    floats = torch.zeros(batch, device=cuda)
    draws = Draws(floats, floats.int(), floats + 1, floats, floats)
    results: list[tuple[Tensor, Tensor]] = []
    before = caches[0].data.clone()

    def launch() -> None:
        results[:] = [layer(x, caches[0], context, tables, slots, draws)]

    graph = device.capture(launch)
    assert graph.num_bytes >= 0 and torch.equal(caches[0].data, before), "padded rows left something behind"
    for seed in (6, 7):
        x.copy_(cases.random(batch, 128, dtype=torch.bfloat16, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        context.copy_(torch.randint(1, 32, (batch,), generator=generator))
        tables[:, :2] = torch.randperm(2 * batch, generator=generator).view(batch, 2)
        places = (context - 1).long()
        slots.copy_(tables.long().gather(1, (places // 16)[:, None])[:, 0] * 16 + places % 16)
        expected = layer(x, caches[1], context, tables, slots, draws)
        graph.replay()
        torch.cuda.synchronize(cuda)
        assert torch.equal(results[0][0], expected[0]) and bool(results[0][1].all())
        assert torch.equal(caches[0].data, caches[1].data)


def test_large_batches_of_every_kind(side: Side) -> None:
    """More rows, heads and keys than one program has."""
    rows = [(1, n) for n in (1, 17, 999, 2100)] + [(300, 700), (129, 129)]
    step = make_step(rows, (28, 4, 128), 16, torch.bfloat16)
    for exact in (False, True):
        result = cases.attend(side, step, exact=exact)
        assert_attention_close(result.cpu(), step.expected(0.3).bfloat16())
