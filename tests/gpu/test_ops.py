"""The CUDA ops on a device: every case of op_cases, the cache ops that only a device has, and captured steps."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.micro.layer import Layers, Shape, without_dependent_launch
from hydra_engine import _C
from hydra_engine.backend.base import (
    Backend,
    DeltaInputs,
    HeadNorms,
    PagedCache,
    SamplingTensors,
    StateCache,
    StateRows,
)
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.ops import CudaOps
from hydra_engine.backend.device import Graph
from tests.gpu.op_cases import TESTS
from tests.gpu.op_cases.attention import attend
from tests.gpu.op_cases.inputs import REFERENCE, random
from tests.gpu.side import Side
from tests.kernels.comparison import assert_attention_close
from tests.kernels.paged import make_step

pytestmark = pytest.mark.cuda

globals().update(TESTS)


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
    """Fails a test whose kernels met a slot that is out of range."""
    yield
    torch.cuda.synchronize(cuda)
    _C.cuda_check_faults(0)


def poisoned(cuda: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> PagedCache:
    return PagedCache(torch.full(shape, float("nan"), dtype=dtype, device=cuda))


def test_blocks_of_int8_are_copied_with_their_scales(side: Side, cuda: torch.device) -> None:
    shape = (6, 2, 2, 16, 2, 64)
    raw = torch.randint(0, 100, (6 * 2 * 2 * 16 * 2 * 68,), dtype=torch.uint8)
    source, target = (PagedCache.quantized(raw.to(cuda) * factor, shape, torch.bfloat16) for factor in (1, 0))
    side.ops.copy_blocks(source, target, torch.tensor([[0, 5], [3, 1]]))
    expected = torch.zeros_like(raw).view(6, -1)
    expected[5], expected[1] = raw.view(6, -1)[0], raw.view(6, -1)[3]
    for block in range(6):
        assert torch.equal(target.block_view(block).cpu(), expected[block])


@pytest.mark.parametrize("shape", [(33, 4096), (300, 1176), (17, 588)], ids=str)
def test_products_of_real_widths(side: Side, shape: tuple[int, int]) -> None:
    """Widths that are no multiple of 16 bytes are among them."""
    rows, width = shape
    x, weight = random(rows, width, dtype=torch.bfloat16), random(520, width, dtype=torch.bfloat16, seed=1)
    wide = x.double() @ weight.double().T
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(side.there(weight))
        found = ops.linear(side.there(x), packed, out_dtype=torch.float32).cpu().double()
        torch.testing.assert_close(found, wide, rtol=1e-4, atol=5e-3)
        torch.testing.assert_close(ops.linear(side.there(x), packed).cpu(), wide.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("where", ["host", "device"])
def test_caches(side: Side, cuda: torch.device, where: str) -> None:
    """Writes with norm and rotation, features, gathers, merges and block copies, against the reference."""
    reference, ops = REFERENCE, side.ops
    host = PagedCache(torch.full((6, 2, 2, 4, 2, 16), float("nan")))
    there = side.cache(host)
    fused = random(5, 8, 16)
    q, k, v = fused.split((4, 2, 2), dim=1)
    cos, sin, norm = random(5, 8, seed=1), random(5, 8, seed=2), random(16, seed=3)
    slots = torch.tensor([3, -1, 22, 7, 0])
    moved = slots if where == "host" else slots.to(cuda)
    expected = reference.rope_and_write(q, k, v, (cos, sin), host, 1, slots, HeadNorms(norm, norm, 1e-6))
    on_device = (part for part in side.there(fused).split((4, 2, 2), dim=1))
    weight = side.there(norm)
    found = ops.rope_and_write(
        *on_device, (side.there(cos), side.there(sin)), there, 1, moved, HeadNorms(weight, weight, 1e-6)
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
    features = random(4, 1, 24, dtype=torch.bfloat16).to(cuda)
    slots, rows = torch.tensor([2, 9, 3, 0], device=cuda), torch.tensor([5, 0, 1, 3], device=cuda)
    for plane in (0, 1):
        side.ops.write_cache(cache, plane, [features], slots)
    hidden = torch.ones(6, 24, dtype=torch.bfloat16, device=cuda)
    side.ops.merge_image_tokens(hidden, rows, cache, slots)
    assert torch.equal(hidden[rows], features[:, 0])
    side.ops.merge_image_tokens(hidden, rows, cache, slots, 1)
    assert torch.equal(hidden[rows], 2 * features[:, 0]) and (hidden[[2, 4]] == 1).all()


class OneLayer:
    """A decoder of one layer without MLP: norm, QKV, rotation and write, attention, head, sample."""

    def __init__(self, side: Side, batch: int) -> None:
        self._ops = side.ops
        self._qkv = self._ops.pack_linear(side.there(random(8 * 64, 128, dtype=torch.bfloat16, seed=1)))
        self._head = self._ops.pack_linear(side.there(random(500, 4 * 64, dtype=torch.bfloat16, seed=2)))
        self._scale = side.there(random(128, dtype=torch.bfloat16, seed=3))
        self._angles = side.there(random(batch, 32, seed=4))

    def __call__(
        self, x: Tensor, cache: PagedCache, context: Tensor, tables: Tensor, slots: Tensor, draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        ops, angles = self._ops, self._angles
        plan = ops.plan_decode(context, tables)
        normed = ops.rms_norm(x, self._scale, 1e-6)
        q = ops.linear_rope_and_write(normed, (self._qkv,), (angles, angles), cache, 0, slots)
        mixed = ops.attention_paged(q, cache, 0, plan, 0.125)
        return ops.sample(ops.linear(mixed.flatten(1), self._head, out_dtype=torch.float32), draws)


@pytest.mark.parametrize("batch", [1, 4, 24])
def test_a_captured_step_repeats_with_other_contents(
    side: Side, cuda: torch.device, device: CudaDevice, batch: int
) -> None:
    """Replays compute new contents with small kernels and with cuBLAS, whose workspace is the stream's."""
    caches = [PagedCache(random(2 * batch, 1, 2, 16, 2, 64, dtype=torch.bfloat16).to(cuda)) for _ in range(2)]
    layer, x = OneLayer(side, batch), random(batch, 128, dtype=torch.bfloat16, seed=5).to(cuda)
    context = torch.ones(batch, dtype=torch.int32, device=cuda)
    tables = torch.zeros(batch, 40, dtype=torch.int32, device=cuda)
    slots = torch.full((batch,), -1, device=cuda)
    floats = torch.zeros(batch, device=cuda)
    draws = SamplingTensors(floats, floats.int(), floats + 1, floats, floats)
    results: list[tuple[Tensor, Tensor]] = []
    before = caches[0].data.clone()

    def launch() -> None:
        results[:] = [layer(x, caches[0], context, tables, slots, draws)]

    graph = device.capture(launch)
    assert graph.num_bytes >= 0 and torch.equal(caches[0].data, before), "padded rows left something behind"
    for seed in (6, 7):
        x.copy_(random(batch, 128, dtype=torch.bfloat16, seed=seed))
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


@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_that_begin_early_give_the_bits_of_those_that_wait(
    side: Side, cuda: torch.device, device: CudaDevice, rows: int
) -> None:
    """A read before the write, or a write during the read, shows now and then only: hence many replays."""
    layers = Layers(Shape(8, 2, 64, 1024), rows, 300, Backend(device, side.ops, torch.bfloat16, 1))
    start = layers.residual.clone()
    found: list[Tensor] = []

    def launch() -> None:
        found[:] = [layers.whole(layer) for layer in range(layers.count)]

    def results(graph: Graph) -> list[Tensor]:
        layers.residual.copy_(start)
        graph.replay()
        return [result.clone() for result in kept[graph]]

    kept: dict[Graph, list[Tensor]] = {}
    early = device.capture(launch)
    kept[early] = [*found]
    with without_dependent_launch():
        waiting = device.capture(launch)
    kept[waiting] = [*found]
    expected = results(waiting)
    assert all(torch.isfinite(result).all() for result in expected)
    for _ in range(50):
        assert all(map(torch.equal, results(early), expected))


def test_large_batches_of_every_kind(side: Side) -> None:
    """Batches may have more rows, heads and keys than one program of a kernel covers."""
    rows = [(1, n) for n in (1, 17, 999, 2100)] + [(300, 700), (129, 129)]
    step = make_step(rows, (28, 4, 128), 16, torch.bfloat16)
    for exact in (False, True):
        result = attend(side, step, exact=exact)
        assert_attention_close(result.cpu(), step.expected(0.3).bfloat16())


HYBRID = (16, 16, 128, 4)  # key heads, value heads, head dim, taps: those of MiniCPM-V 4.6


def planned(side: Side, *vectors: list[int]) -> StateRows:
    """cu_q, starts, reads and writes, on the device."""
    return side.ops.plan_states(StateRows(*(torch.tensor(vector) for vector in vectors)))


class OneDeltaNet:
    """The recurrent part of one layer, in bfloat16, and the states of the reference on the host."""

    def __init__(self, side: Side, tokens: int, places: int) -> None:
        key_heads, heads, dim, taps = HYBRID
        self._ops, self._channels = side.ops, (2 * key_heads + heads) * dim
        self._x = random(tokens, self._channels + 2 * heads, dtype=torch.bfloat16)
        self._weight = random(self._channels, taps, dtype=torch.bfloat16, seed=1)
        self._scales = random(2, heads, seed=2)
        conv = random(places, 2, taps - 1, self._channels, dtype=torch.bfloat16, seed=3)
        self.host = StateCache(conv.float(), random(places, 2, heads, dim, dim, seed=4))
        self.there = StateCache(side.there(conv), side.there(self.host.recurrent))
        self._moved = side.there(self._x), side.there(self._weight), side.there(self._scales)

    def launch(self, rows: StateRows, begin: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Results for tokens [begin, end)."""
        x, weight, scales = self._moved
        inputs, gates = x[begin:end, : self._channels], x[begin:end, self._channels :]
        mixed = self._ops.causal_conv(inputs, weight, self.there, 1, rows)
        return mixed, self._ops.delta_rule(_of_rule(mixed, gates, scales), self.there, 1, rows)

    def expect(self, rows: StateRows, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The rule of what the device's convolution gave, so that one rounding is compared at a time."""
        x, gates = self._x[:, : self._channels].float(), self._x[:, self._channels :]
        convolved = REFERENCE.causal_conv(x, self._weight.float(), self.host, 1, rows)
        return convolved, REFERENCE.delta_rule(_of_rule(mixed, gates, self._scales), self.host, 1, rows)


def _of_rule(mixed: Tensor, gates: Tensor, scales: Tensor) -> DeltaInputs:
    key_heads, heads, dim, _ = HYBRID
    q, k, v = mixed.view(-1, 2 * key_heads + heads, dim).split((key_heads, key_heads, heads), dim=1)
    return DeltaInputs(q, k, v, *gates.chunk(2, dim=1), *scales)


def test_recurrent_layers_of_real_widths(side: Side) -> None:
    """Decodes, a prompt that begins and a chunk that goes on; a prompt and its parts have the same bits."""
    layer = OneDeltaNet(side, 340, 8)
    vectors = [0, 1, 2, 302, 340], [7, 9, 0, 40], [0, 2, 4, 6], [1, 2, 5, 7]
    mixed, ruled = layer.launch(planned(side, *vectors))
    convolved, expected = layer.expect(StateRows(*(torch.tensor(vector) for vector in vectors)), mixed.cpu())
    torch.testing.assert_close(mixed.cpu(), convolved.bfloat16(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ruled.cpu(), expected, rtol=1.6e-2, atol=2e-3)
    # A strength that lies between two of bfloat16 may be rounded to either.
    torch.testing.assert_close(layer.there.recurrent.cpu(), layer.host.recurrent, rtol=2e-2, atol=2e-2)
    whole = layer.launch(planned(side, [0, 340], [0], [0], [1]))
    for place, cut in ((3, 1), (5, 170), (7, 339)):
        head = layer.launch(planned(side, [0, cut], [0], [0], [place]), 0, cut)
        tail = layer.launch(planned(side, [0, 340 - cut], [cut], [place], [place]), cut)
        for parts in zip(head, tail, whole, strict=True):
            assert torch.equal(torch.cat(parts[:2]), parts[2])
        for states in layer.there.conv, layer.there.recurrent:
            assert torch.equal(states[place, 1], states[1, 1])


def test_a_captured_step_moves_states_to_other_places(side: Side, cuda: torch.device, device: CudaDevice) -> None:
    """The last of four rows is padding."""
    layer, eager = OneDeltaNet(side, 4, 7), OneDeltaNet(side, 4, 7)
    starts, reads, writes = columns = tuple(torch.full((4,), value, device=cuda) for value in (0, 0, -1))
    rows = side.ops.plan_decode_states(starts, reads, writes)
    results: list[tuple[Tensor, Tensor]] = []
    before = layer.there.recurrent.clone()

    def launch() -> None:
        results[:] = [layer.launch(rows)]

    graph = device.capture(launch)
    assert torch.equal(layer.there.recurrent, before), "padded rows left something behind"
    for places in (([5, 9, 3], [0, 2, 4], [1, 3, 5]), ([6, 10, 4], [1, 3, 5], [0, 2, 4])):
        for column, values in zip(columns, places, strict=True):
            column[:3] = torch.tensor(values)
        graph.replay()
        expected = eager.launch(planned(side, [0, 1, 2, 3], *places), 0, 3)
        torch.cuda.synchronize(cuda)
        assert all(torch.equal(found[:3], wanted) for found, wanted in zip(results[0], expected, strict=True))
        assert torch.equal(layer.there.conv, eager.there.conv)
        assert torch.equal(layer.there.recurrent, eager.there.recurrent)
