"""Calls of FlashInfer. The package itself is not needed: `flashinfer_library` has its
calls and computes from their arguments, so that wrong pages give wrong numbers."""

import threading
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, PackedPlan, PagedCache
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.flashinfer_attention import (
    FlashInferAttention,
    Kind,
    Wrappers,
    pages_of,
    workspace_bytes,
)
from hydra_engine.backend.reference.ops import ReferenceOps
from tests.ops.flashinfer_library import NUM_SMS, Event, Library, install, send

BLOCK, SCALE = 8, 0.125


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def test_pages_by_hand() -> None:
    tables = np.array([[7, 2, 9], [4, 99, 99], [5, 6, 99], [1, 3, 0]], dtype=np.int32)
    pages = pages_of(ints(1, 3, 0, 2), ints(9, 8, 16, 17), tables, BLOCK)
    assert pages.cu_q.tolist() == [0, 1, 4, 6]
    assert pages.indptr.tolist() == [0, 2, 3, 6]
    assert pages.indices.tolist() == [7, 2, 4, 1, 3, 0]
    assert pages.last_page_len.tolist() == [1, 8, 1]
    assert {array.dtype for array in pages} == {np.dtype(np.int32)}


def test_pages_of_nothing() -> None:
    pages = pages_of(ints(), ints(), np.zeros((0, 4), dtype=np.int32), BLOCK)
    assert [array.tolist() for array in pages] == [[0], [0], [], []]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return install(monkeypatch)


@pytest.fixture
def attention(library: Library) -> FlashInferAttention:
    cpu = torch.device("cpu")
    by_triton = CudaAttention(cpu, NUM_SMS, send, deterministic=False)
    return FlashInferAttention(cpu, NUM_SMS, send, by_triton, library)


def random_cache(num_layers: int = 3, kv_heads: int = 2, dim: int = 64) -> PagedCache:
    generator = torch.Generator().manual_seed(3)
    shape = (16, num_layers, 2, BLOCK, kv_heads, dim)
    return PagedCache(torch.randn(shape, generator=generator).to(torch.bfloat16))


def step(counts: Sequence[int], contexts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    order = np.random.default_rng(5).permutation(16).astype(np.int32)
    tables = np.full((len(counts), 4), 15, dtype=np.int32)
    taken = 0
    for row, context in enumerate(contexts):
        used = -(-context // BLOCK)
        tables[row, :used] = order[taken : taken + used]
        taken += used
    cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return torch.from_numpy(cu_q), torch.tensor(contexts, dtype=torch.int32), torch.from_numpy(tables)


STEPS = [
    ([1, 1, 1], [9, 8, 25]),
    ([5, 2], [5, 19]),
    ([1, 1, 4, 1], [3, 16, 12, 17]),
    ([1, 0, 3], [7, 8, 11]),
    ([0], [0]),
]


@pytest.mark.parametrize(("counts", "contexts"), STEPS)
@pytest.mark.parametrize("heads", [2, 14])
def test_every_row_reads_its_own_pages(
    attention: FlashInferAttention, library: Library, counts: list[int], contexts: list[int], heads: int
) -> None:
    cache, given = random_cache(), step(counts, contexts)
    plan = attention.plan(*given)
    q = torch.randn(sum(counts), heads * 2, 64).to(torch.bfloat16)[:, :heads]
    reference = ReferenceOps()
    for layer in (0, 2):
        expected = reference.attention_paged(q, cache, layer, reference.plan_attention(*given), SCALE)
        got = attention.paged(q, cache, layer, plan, SCALE)
        assert torch.allclose(got.float(), expected.float(), atol=2e-2), layer
    assert len(library.plans) == len(set(library.plans)), "planned once for a step, not for a layer"


def test_what_a_step_was_planned_from_may_change_afterwards(attention: FlashInferAttention) -> None:
    cache, given = random_cache(), step([1, 3], [9, 11])
    q = torch.randn(4, 2, 64).to(torch.bfloat16)
    expected = attention.paged(q, cache, 0, attention.plan(*given), SCALE)
    plan = attention.plan(*given)
    for tensor in given:
        tensor.zero_()
    assert torch.equal(attention.paged(q, cache, 0, plan, SCALE), expected)


def test_a_plan_that_was_pushed_out_is_made_again(attention: FlashInferAttention, library: Library) -> None:
    cache, q = random_cache(), torch.randn(2, 2, 64).to(torch.bfloat16)
    plans = [attention.plan(*step([1, 1], [context, 9])) for context in (4, 9, 20)]
    expected = [attention.paged(q, cache, 0, plan, SCALE) for plan in plans]
    assert torch.equal(attention.paged(q, cache, 0, plans[0], SCALE), expected[0])
    assert not torch.equal(expected[0], expected[1]) and len(library.plans) == 4


def test_segments_are_planned_once_for_all_layers(attention: FlashInferAttention, library: Library) -> None:
    q, k, v = torch.randn(3, 12, 4, 64).to(torch.bfloat16)
    for bounds in ([0, 5, 5, 12], [0, 4, 8, 12]) * 3:
        expected = ReferenceOps().attention_packed(q, k, v, bounds, SCALE)
        assert torch.allclose(attention.attend_packed(q, k, v, bounds, SCALE).float(), expected.float(), atol=2e-2)
    assert library.plans == ["Packed"] * 2


def test_lanes_do_not_share_a_workspace(attention: FlashInferAttention, library: Library) -> None:
    cache = random_cache()

    def run() -> None:
        q = torch.randn(1, 2, 64).to(torch.bfloat16)
        attention.paged(q, cache, 0, attention.plan(*step([1], [9])), SCALE)

    run()
    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert len(library.workspaces) == 2


def test_kinds_of_layers_that_need_more_room_take_new_wrappers(
    attention: FlashInferAttention, library: Library
) -> None:
    for heads in (2, 28, 2):
        cache, given = random_cache(), step([1, 5], [9, 11])
        q = torch.randn(6, heads, 64).to(torch.bfloat16)
        attention.paged(q, cache, 0, attention.plan(*given), SCALE)
    assert len(library.workspaces) == 2


def test_room_for_partial_results() -> None:
    """Bytes counted by hand, like FlashInfer 0.6.18: heads x parts x rows of a tile x (head dim + 1) float32."""
    qwen = Kind(28, 4, 128, 16, torch.bfloat16, SCALE)
    mib = 1 << 20
    assert workspace_bytes(qwen, 132) == 28 * (264 // 4) * 128 * 129 * 4 + mib
    assert workspace_bytes(qwen, 132, 64) == 28 * max(66, 28 + 63) * 16 * 129 * 4 + mib
    assert workspace_bytes(Kind(32, 32, 128, 16, torch.bfloat16, SCALE), 132, 1) == 32 * 8 * 16 * 129 * 4 + mib
    assert workspace_bytes(Kind(40, 2, 128, 16, torch.bfloat16, SCALE), 132, 8) == 40 * 132 * 64 * 129 * 4 + mib


# ---- graphs


class Captured:
    """A decode step of some layers, captured as `Device.capture` does it, over tables that only the host knows."""

    def __init__(self, attention: FlashInferAttention, library: Library, q: Tensor, cache: PagedCache) -> None:
        self.library = library
        self.q, self.cache = q, cache
        # What lies there is not what the steps are: FlashInfer must not look.
        context = torch.full((q.shape[0],), 30, dtype=torch.int32)
        self.plan: AttentionPlan = attention.plan_decode(context, torch.full((q.shape[0], 4), 15, dtype=torch.int32))
        self.attention = attention
        self.refresh(np.ones(q.shape[0], dtype=np.int32), np.zeros((0, 1), dtype=np.int32))
        self.launch()
        self.replay()

    def refresh(self, context: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]) -> None:
        assert self.plan.refresh is not None
        self.plan.refresh(context, tables)

    def launch(self) -> None:
        self.results = [self.attention.paged(self.q, self.cache, layer, self.plan, SCALE) for layer in (0, 2)]

    def replay(self) -> list[Tensor]:
        with self.library.capture():
            self.launch()
        return self.results

    def check(self, contexts: Sequence[int]) -> None:
        """Replays with these contexts and rows of padding, and compares with the reference."""
        padding = self.q.shape[0] - len(contexts)
        _, context, tables = step([1] * len(contexts), contexts)
        self.refresh(np.concatenate([context.numpy(), np.ones(padding, dtype=np.int32)]), tables.numpy())
        context = torch.cat([context, torch.ones(padding, dtype=torch.int32)])
        tables = torch.cat([tables, torch.zeros((padding, 4), dtype=torch.int32)])
        reference = ReferenceOps()
        plan = reference.plan_attention(torch.arange(self.q.shape[0] + 1, dtype=torch.int32), context, tables)
        for layer, got in zip((0, 2), self.replay(), strict=True):
            expected = reference.attention_paged(self.q, self.cache, layer, plan, SCALE)
            assert torch.equal(got, expected), contexts


@pytest.mark.parametrize("heads", [4, 14])
def test_captured_decodes_are_planned_before_each_replay(
    attention: FlashInferAttention, library: Library, heads: int
) -> None:
    """Heads with and without tensor cores; contexts grow by blocks, rows come and go, and sizes take turns."""
    cache = random_cache()
    large, small = (
        Captured(attention, library, torch.randn(size, heads, 64).to(torch.bfloat16), cache) for size in (4, 2)
    )
    for contexts in ([9, 8, 25], [10, 9, 26], [31], [1, 1, 1, 32]):
        large.check(contexts)
        small.check(contexts[:2])
    assert library.plans == ["DecodeGraph"] * 10 and len(library.graph_wrappers()) == 2
    (workspace,) = library.workspaces
    assert {wrapper.schedule.data_ptr() for wrapper in library.graph_wrappers()} == {
        buffers.schedule.data_ptr() for buffers in attention._lane._of_graphs.values()
    }
    assert {wrapper.workspace.data_ptr() for wrapper in library.graph_wrappers()} == {workspace}
    assert {wrapper.options["use_tensor_cores"] for wrapper in library.graph_wrappers()} == {heads == 14}


def test_kinds_of_layers_of_one_captured_step_have_schedules_of_their_own(
    attention: FlashInferAttention, library: Library
) -> None:
    """Schedules of all kinds are planned before the step is replayed."""
    cache, scales = random_cache(), (SCALE, 0.5)
    q = torch.randn(2, 4, 64).to(torch.bfloat16)
    context = torch.ones(2, dtype=torch.int32)
    plan = attention.plan_decode(context, torch.zeros((2, 4), dtype=torch.int32))
    assert plan.refresh is not None
    plan.refresh(ints(1, 1), np.zeros((0, 1), dtype=np.int32))
    for scale in scales:
        attention.paged(q, cache, 0, plan, scale)
    reference = ReferenceOps()
    for contexts in ([9, 30], [10, 31]):
        cu_q, context, tables = step([1, 1], contexts)
        plan.refresh(context.numpy(), tables.numpy())
        with library.capture():
            results = [attention.paged(q, cache, 0, plan, scale) for scale in scales]
        eager = reference.plan_attention(cu_q, context, tables)
        for scale, got in zip(scales, results, strict=True):
            assert torch.equal(got, reference.attention_paged(q, cache, 0, eager, scale))


def test_eager_steps_between_replays_change_nothing(attention: FlashInferAttention, library: Library) -> None:
    cache = random_cache()
    captured = Captured(attention, library, torch.randn(2, 4, 64).to(torch.bfloat16), cache)
    for contexts in ([9, 8], [30, 2]):
        captured.check(contexts)
        q = torch.randn(6, 4, 64).to(torch.bfloat16)
        attention.paged(q, cache, 0, attention.plan(*step([1, 5], [12, 7])), SCALE)


def test_rows_of_a_plan_are_those_of_its_refresh(attention: FlashInferAttention, library: Library) -> None:
    context, tables = torch.ones(2, dtype=torch.int32), torch.zeros((2, 4), dtype=torch.int32)
    plan = attention.plan_decode(context, tables)
    q = torch.randn(2, 4, 64).to(torch.bfloat16)
    with pytest.raises(ValueError, match="one that was refreshed"):
        attention.paged(q, random_cache(), 0, plan, SCALE)
    assert plan.refresh is not None
    for wrong in ((ints(1), tables.numpy()), (ints(1, 1), np.zeros((3, 1), dtype=np.int32))):
        with pytest.raises(ValueError, match=r"expected \[2\] and at most \[2, 4\]"):
            plan.refresh(*wrong)
    plan.refresh(ints(1, 9), tables[:, :1].numpy())
    with pytest.raises(ValueError, match="expected 1 to 8"):
        attention.paged(q, random_cache(), 0, plan, SCALE)


def test_another_launch_than_the_captured_one_is_refused_before_the_replay(
    attention: FlashInferAttention, library: Library
) -> None:
    captured = Captured(attention, library, torch.randn(2, 4, 64).to(torch.bfloat16), random_cache())
    library.drift = 1
    with pytest.raises(ValueError, match="set attention_backend to triton or enforce_eager"):
        captured.check([9, 8])


def test_what_flashinfer_cannot_read_is_captured_with_our_kernels(attention: FlashInferAttention) -> None:
    """Triton's plan needs no refresh before a replay: it reads its rows on the device."""
    seen: list[Any] = []
    attention._by_triton = SimpleNamespace(  # type: ignore[assignment]
        plan_decode=attention._by_triton.plan_decode, paged=lambda q, cache, layer, plan, scale: seen.append(plan)
    )
    context, tables = torch.ones(2, dtype=torch.int32), torch.zeros((2, 4), dtype=torch.int32)
    plan = attention.plan_decode(context, tables)
    attention.paged(torch.randn(2, 4, 72), random_cache(dim=72), 0, plan, SCALE)
    assert seen[0].native is plan.native.triton and seen[0].num_context is context


def test_captured_encodes_stay_with_triton(attention: FlashInferAttention, library: Library) -> None:
    plan = attention.plan_packed(torch.tensor([0, 5, 12, 12], dtype=torch.int32), 12)
    assert isinstance(plan, PackedPlan) and plan.max_length == 12 and not library.plans


def test_a_wrapper_is_planned_anew_only_once_its_plan_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    made: list[list[str]] = []

    def make() -> list[str]:
        made.append([])
        return made[-1]

    def noted(key: str, wrapper: list[str]) -> None:
        wrapper.append(key)

    wrappers = Wrappers(make, 2)
    for key, waits in (("a", 0), ("b", 0), ("a", 0), ("c", 1), ("a", 1), ("b", 2)):
        wrapper = wrappers.get_planned(key, partial(noted, key))
        assert wrapper[-1] == key and Event.waits == waits
    assert made == [["a"], ["b", "c", "b"]]
