"""FlashInfer's attention beside the reference, where the package is installed, with kernels or what compiles them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import HEAD_DIMS
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.reference.ops import ReferenceOps
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


def needs(heads: tuple[int, int, int], *kernels: str) -> None:
    """Skips where one is not compiled and cannot be."""
    for name in kernels:
        if lacking := flashinfer_kernels.installed().reason_missing(name, torch.bfloat16, heads[2]):
            pytest.skip(f"FlashInfer's {lacking}")


def prompts_of(attention: FlashInferAttention) -> str:
    assert attention.wanted_prompts is not None
    return attention.wanted_prompts


@pytest.fixture(scope="module")
def device(cuda: torch.device) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1)


@pytest.fixture(scope="module", params=["fa2", "fa3"])
def attention(cuda: torch.device, device: CudaDevice, request: pytest.FixtureRequest) -> FlashInferAttention:
    """FlashInfer's attention with its prompt kernels for Ampere and for Hopper."""
    library = pytest.importorskip("flashinfer", exc_type=ImportError)
    if request.param == "fa3" and torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("there is no Hopper GPU")
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    by_triton = CudaAttention(cuda, num_sms, device.send, deterministic=False)
    return FlashInferAttention(cuda, num_sms, device.send, by_triton, library, prompts=request.param)


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("heads", HEADS)
def test_paged_attention_over_a_layer_of_a_block_major_cache(
    attention: FlashInferAttention, cuda: torch.device, rows: list[tuple[int, int]], heads: tuple[int, int, int]
) -> None:
    needs(heads, flashinfer_kernels.decode_kernel(*heads), prompts_of(attention))
    scale = heads[2] ** -0.5
    step = make_step(rows, heads, 16, torch.bfloat16)
    plan = attention.plan(step.cu_q, step.num_context, step.block_tables)
    cache = PagedCache(step.cache.data.to(cuda))
    got = attention.paged(step.q.to(cuda), cache, 1, plan, scale)
    assert_attention_close(got.cpu(), step.expected(scale).to(torch.bfloat16))


def test_steps_that_were_planned_ahead_do_not_disturb_each_other(
    attention: FlashInferAttention, cuda: torch.device
) -> None:
    """Plans stay valid when more are made than a lane holds, while the device has computed none of them."""
    needs((8, 8, 128), "decode", prompts_of(attention))
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


# ---- graphs

CONTEXTS = [[1, 1, 1, 1], [700, 1, 16, 33], [16, 17, 900, 901], [3000, 2, 2, 2], [5]]


class Decode:
    """Rows of one token, captured with contexts of 1, as DecodeGraphs has them."""

    def __init__(
        self, device: CudaDevice, attention: FlashInferAttention, heads: tuple[int, int, int], size: int
    ) -> None:
        self.heads, self.size, self.scale = heads, size, heads[2] ** -0.5
        self.attention, self.device = attention, device
        on = device.torch_device
        num_blocks = 4 * 190
        generator = torch.Generator().manual_seed(7)
        self.host = torch.randn((num_blocks, 2, 2, 16, *heads[1:]), generator=generator).to(torch.bfloat16)
        self.cache = PagedCache(self.host.to(on))
        self.q = torch.zeros((size, heads[0], heads[2]), dtype=torch.bfloat16, device=on)
        context = torch.ones(size, dtype=torch.int32, device=on)
        self.plan = attention.plan_decode(context, torch.zeros((size, 190), dtype=torch.int32, device=on))
        self.refresh(np.ones(size, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))
        self.outs: list[Tensor] = []
        self.graph = device.capture(self.launch)

    def refresh(self, context: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]) -> None:
        assert self.plan.refresh is not None
        self.plan.refresh(context, tables)

    def launch(self) -> None:
        self.outs = [self.attention.paged(self.q, self.cache, layer, self.plan, self.scale) for layer in (0, 1)]

    def begin(self, contexts: Sequence[int], seed: int) -> tuple[Tensor, Callable[[], Tensor]]:
        """Results of the rows that are there, copied behind the replay, and what the reference makes of them. Waits
        for nothing."""
        rng, count = np.random.default_rng(seed), len(contexts)
        tables = rng.permutation(len(self.host))[: count * 190].reshape(count, 190).astype(np.int32)
        q = torch.randn(self.q.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        (sent,) = self.device.send((q.view(torch.int16).numpy(),))
        self.q.copy_(sent.view(torch.bfloat16))
        padded = np.ones(self.size, dtype=np.int32)
        padded[:count] = contexts
        self.refresh(padded, tables)
        self.graph.replay()
        got = torch.stack(self.outs)[:, :count].clone()

        def expected() -> Tensor:
            reference, cache = ReferenceOps(), PagedCache(self.host)
            rows = torch.arange(count + 1, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32)
            plan = reference.plan_attention(*rows, torch.from_numpy(tables))
            results = [reference.attention_paged(q[:count], cache, layer, plan, self.scale) for layer in (0, 1)]
            return torch.stack(results)

        return got, expected


@pytest.mark.parametrize("heads", [(8, 8, 128), (28, 4, 128), (4, 2, 256)])
def test_decodes_in_a_graph_are_of_what_was_planned_last(
    device: CudaDevice, attention: FlashInferAttention, heads: tuple[int, int, int]
) -> None:
    """Shapes with and without tensor cores; lengths that are split into many parts, and padding."""
    needs(heads, flashinfer_kernels.decode_kernel(*heads))
    decode = Decode(device, attention, heads, 4)
    for seed, contexts in enumerate(CONTEXTS):
        got, expected = decode.begin(contexts, seed)
        assert_attention_close(got.cpu(), expected())


def test_graphs_take_turns_while_the_device_is_behind(device: CudaDevice, attention: FlashInferAttention) -> None:
    """The host plans as far ahead as it may: nothing that a graph still needs is written over."""
    needs((28, 4, 128), "fa2")
    decodes = [Decode(device, attention, (28, 4, 128), size) for size in (4, 2)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    begun = [decodes[turn % 2].begin([100 * turn + 1, 40], seed=turn) for turn in range(8)]
    for got, expected in begun:
        assert_attention_close(got.cpu(), expected())


@pytest.mark.parametrize("bounds", [[0, 64], [0, 100, 100, 257, 300], [0, 1]])
@pytest.mark.parametrize("dim", [64, 128, 72, 80])
def test_packed_attention(attention: FlashInferAttention, cuda: torch.device, bounds: Sequence[int], dim: int) -> None:
    """Head dims that FlashInfer reads wrongly are not given to it."""
    fused = torch.randn(bounds[-1], 3, 4, dim).to(torch.bfloat16)
    q, k, v = fused.unbind(1)
    expected = ReferenceOps().attention_packed(q, k, v, bounds, dim**-0.5)
    there = fused.to(cuda).unbind(1)
    if not attention.supports_packed(there[0], bounds) and dim in HEAD_DIMS:
        needs((4, 4, dim), "fa2")
    got = attention.attend_packed(*there, bounds, dim**-0.5)
    assert_attention_close(got.cpu(), expected)
