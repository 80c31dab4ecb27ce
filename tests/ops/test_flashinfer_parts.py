"""What FlashInfer is asked for, and when it is refused. The package itself is not needed: a library of the same calls
computes in plain torch what it is told, so that wrong pages give wrong numbers."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import flashinfer_attention
from hydra_engine.backend.attention_choice import resolve_attention
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda_attention import CudaAttention, CudaPlan
from hydra_engine.backend.flashinfer_attention import FlashInferAttention, Wrappers, pages_of
from hydra_engine.backend.reference import ReferenceOps
from hydra_engine.errors import BackendError, ConfigError

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


# ---- the library


class Event:
    waits = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        Event.waits += 1


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """q [Q, Hq, D], k, v [K, Hkv, D]; the queries are the last ones."""
    sees = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        sees = sees.tril(k.shape[0] - q.shape[0])
    query, key, value = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1).to(q.dtype)


class Library:
    """The calls of the package that are used, and how often each was made."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.workspaces: set[int] = set()
        library = self

        class Wrapper:
            def __init__(self, workspace: Tensor, *, kv_layout: str, **_: Any) -> None:
                assert kv_layout == "NHD" and workspace.dtype is torch.uint8
                library.workspaces.add(workspace.data_ptr())

        class Prefill(Wrapper):
            def plan(
                self, cu_q: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any
            ) -> None:
                library.plans.append(type(self).__name__)
                assert how.keys() == {"causal", "sm_scale", "q_data_type", "kv_data_type"} and how["causal"]
                self.given = cu_q.tolist(), indptr.tolist(), indices, last.tolist(), shape, how["sm_scale"]

            def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
                cu_q, indptr, indices, last, (heads, kv_heads, dim, page), scale = self.given
                assert kv[0].stride() == kv[1].stride() and kv[0].shape[1:] == (page, kv_heads, dim)
                assert q.shape == out.shape == (cu_q[-1], heads, dim)
                for row, (begin, end) in enumerate(pairwise(indptr)):
                    blocks = indices[begin:end].long()
                    length = (end - begin - 1) * page + last[row]
                    k, v = (x[blocks].flatten(0, 1)[:length] for x in kv)
                    rows = slice(cu_q[row], cu_q[row + 1])
                    out[rows] = attend(q[rows], k, v, scale, causal=True)

        class Decode(Prefill):
            def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any) -> None:  # type: ignore[override]
                super().plan(torch.arange(len(last) + 1), indptr, indices, last, *shape, causal=True, **how)

        class Packed(Wrapper):
            def plan(self, cu_q: Tensor, cu_k: Tensor, *shape: int, **how: Any) -> None:
                library.plans.append("Packed")
                assert cu_q.tolist() == cu_k.tolist() and not how["causal"] and len(shape) == 3
                self.bounds, self.scale = cu_q.tolist(), how["sm_scale"]

            def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> None:
                for begin, end in pairwise(self.bounds):
                    rows = slice(begin, end)
                    out[rows] = attend(q[rows], k[rows], v[rows], self.scale, causal=False)

        self.BatchPrefillWithPagedKVCacheWrapper = Prefill
        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.BatchPrefillWithRaggedKVCacheWrapper = Packed


def send(arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array.copy()) for array in arrays)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    return Library()


@pytest.fixture
def attention(library: Library) -> FlashInferAttention:
    cpu = torch.device("cpu")
    return FlashInferAttention(cpu, send, CudaAttention(cpu, 132, send, deterministic=False), library)


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
        assert torch.allclose(attention.packed(q, k, v, bounds, SCALE).float(), expected.float(), atol=2e-2)
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


def test_captured_decodes_stay_with_triton(attention: FlashInferAttention) -> None:
    plan = attention.plan_decode(torch.tensor([4], dtype=torch.int32), torch.zeros((1, 2), dtype=torch.int32))
    assert isinstance(plan.native, CudaPlan)


def test_a_wrapper_is_planned_anew_only_once_its_plan_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waits", 0)
    made: list[list[str]] = []

    def make() -> list[str]:
        made.append([])
        return made[-1]

    def noted(key: str, wrapper: list[str]) -> None:
        wrapper.append(key)

    wrappers = Wrappers(make, 2)
    for key, waits in (("a", 0), ("b", 0), ("a", 0), ("c", 1), ("a", 1), ("b", 2)):
        wrapper = wrappers.planned(key, partial(noted, key))
        assert wrapper[-1] == key and Event.waits == waits
    assert made == [["a"], ["b", "c", "b"]]


# ---- the choice


def choose(wanted: str, **changes: Any) -> str:
    given: dict[str, Any] = {"on_gpu": True, "dtype": torch.bfloat16, "head_dim": 128, "block_size": 16}
    return resolve_attention(wanted, **({"deterministic": False} | given | changes))


def test_auto_is_triton_everywhere() -> None:
    assert choose("auto") == choose("triton") == choose("auto", on_gpu=False, dtype=torch.float32) == "triton"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"on_gpu": False}, "flashinfer runs on a GPU; set attention_backend to auto or device to cuda:0"),
        ({"dtype": torch.float32}, "computes in bfloat16 and float16, not in float32; set attention_backend to triton"),
        ({"head_dim": 72}, "takes head dims of 64, 128 or 256, the model's is 72"),
        ({"head_dim": 80}, "the model's is 80"),
        ({"block_size": 12}, "takes a block_size of 8, 16, 32, 64 or 128, not 12"),
        ({"deterministic": True}, "so it is not deterministic"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        choose("flashinfer", **changes)
    assert refused.value.param == "attention_backend"


def test_flashinfer_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendError, match="flashinfer: the package is not installed; `pip install flashinfer-python`"):
        choose("flashinfer")
