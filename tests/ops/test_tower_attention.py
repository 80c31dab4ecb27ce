"""Attention of towers by torch's kernels, ours with descriptors and FlashInfer's: who is asked for what, with which
arguments, and what becomes of the results. What cannot run without a GPU computes with the reference here, behind the
signatures and shapes of the real operators."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from hydra_engine.backend.base import PackedPlan, Segments
from hydra_engine.backend.cuda import attention_timing, tower_attention
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import ChosenAttention, Measured, Tower
from hydra_engine.backend.cuda.attention_timing import Site, compare, packed_candidates, tower_cases
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.tower_attention import TowerAttention, kernels
from hydra_engine.backend.reference.ops import ReferenceOps
from tests.ops.flashinfer_library import NUM_SMS, install, send

CPU = torch.device("cpu")
EQUAL, UNEQUAL, WINDOWS = [0, 100, 200], [0, 100, 180], [0, 64, 128, 192]


def rows(bounds: list[int], dim: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of one projection."""
    q, k, v = torch.randn(bounds[-1], 3, 2, dim, generator=torch.Generator().manual_seed(2)).bfloat16().unbind(1)
    return q, k, v


class Triton(CudaAttention):
    """The engine's Triton attention, computed by the reference ops; records the kernels that it was asked for."""

    def __init__(self) -> None:
        super().__init__(CPU, NUM_SMS, send, deterministic=False)
        self.calls: list[str] = []

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float, *, tma: bool = False
    ) -> Tensor:
        self.calls.append("triton-tma" if tma else "triton")
        bounds = cu_seqlens.cu_seqlens.tolist() if isinstance(cu_seqlens, PackedPlan) else cu_seqlens
        return ReferenceOps().attention_packed(q, k, v, bounds, scale)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of torch's kernels that were called."""
    called: list[str] = []
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    signature = inspect.signature(varlen.varlen_attn)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> tuple[Tensor, ...]:
        """[B, H, L, D]; the real one says whether it takes these arguments, and how its result is laid out."""
        called.append("cudnn")
        shape = operator(*(x.to("meta") for x in (q, k, v)), *others, **named)[0]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=named["scale"])
        return (torch.empty_strided(shape.shape, shape.stride(), dtype=q.dtype).copy_(mixed),)

    def packed(*given: Any, **named: Any) -> Tensor:
        called.append("torch-varlen")
        bound = signature.bind(*given, **named).arguments
        assert torch.equal(bound["cu_seq_q"], bound["cu_seq_k"]) and bound["max_q"] == bound["max_k"]
        lengths = bound["cu_seq_q"].diff()
        assert lengths.max() <= bound["max_q"]
        return ReferenceOps().attention_packed(
            bound["query"], bound["key"], bound["value"], bound["cu_seq_q"].tolist(), bound["scale"]
        )

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(varlen, "varlen_attn", packed)
    return called


def close(got: Tensor, bounds: list[int], q: Tensor, k: Tensor, v: Tensor) -> bool:
    assert got.is_contiguous() and got.shape == q.shape
    expected = torch.empty(q.shape)
    for begin, end in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k[begin:end].float()) * 0.1
        expected[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[begin:end].float())
    return torch.allclose(got.float(), expected, atol=2e-2)


CHOSEN = ChosenAttention(
    {
        "pictures": "cudnn",
        "windows": "torch-varlen",
        "captured pictures": "torch-varlen",
        "captured windows": "triton-tma",
    }
)


@pytest.mark.parametrize(
    ("bounds", "captured", "asked"),
    [
        (EQUAL, False, "cudnn"),
        (UNEQUAL, False, "triton"),
        (WINDOWS, False, "torch-varlen"),
        (EQUAL, True, "torch-varlen"),
        (UNEQUAL, True, "torch-varlen"),
        (WINDOWS, True, "triton-tma"),
    ],
)
def test_each_use_goes_to_its_kernel(calls: list[str], bounds: list[int], captured: bool, asked: str) -> None:
    """Segments go to the kernel chosen for their use, or to Triton's where that one cannot compute them."""
    by_triton = Triton()
    towers = TowerAttention(CHOSEN, by_triton, kernels(by_triton, None))
    q, k, v = rows(bounds)
    longest = max(end - begin for begin, end in pairwise(bounds))
    padded = torch.tensor(bounds + bounds[-1:] * 3, dtype=torch.int32)
    segments = by_triton.plan_packed(padded, longest) if captured else bounds
    assert close(towers.attend_packed(q, k, v, segments, 0.1), bounds, q, k, v)
    assert calls + by_triton.calls == [asked]


@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_head_dims(calls: list[str], dim: int) -> None:
    by_triton = Triton()
    found = kernels(by_triton, None)
    q, k, v = rows(EQUAL, dim)
    for name in ("cudnn", "torch-varlen", "triton-tma"):
        assert found[name].supports(q, k, v, EQUAL)
        assert close(found[name].attend(q, k, v, EQUAL, 0.1), EQUAL, q, k, v)


def test_what_torch_does_not_take(calls: list[str]) -> None:
    by_triton = Triton()
    found = kernels(by_triton, None)
    for q, k, v in (rows(EQUAL, 76), rows(EQUAL, 136), [x.float() for x in rows(EQUAL)]):
        assert not any(found[name].supports(q, k, v, EQUAL) for name in ("cudnn", "torch-varlen"))
    towers = TowerAttention(CHOSEN, by_triton, found)
    q, k, v = rows([0, 0])
    assert towers.attend_packed(q, k, v, [0, 0], 0.1).shape == (0, 2, 80) and not calls


def test_a_segment_without_rows_is_not_equal_to_the_others(calls: list[str]) -> None:
    bounds = [0, 0, 0]
    assert not kernels(Triton(), None)["cudnn"].supports(*rows(bounds), bounds)
    assert not kernels(Triton(), None)["cudnn"].supports(*rows(EQUAL), [0, 100, 100, 200])


def test_varlen_has_the_arguments_that_it_is_given_and_gives_rows() -> None:
    """Calls the real function on tensors without data."""
    fused = torch.empty(200, 3, 2, 80, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    attended = varlen.varlen_attn(*fused.unbind(1), bounds, bounds, 100, 100, scale=0.1)
    assert attended.shape == (200, 2, 80)


def test_flashinfer_takes_what_the_host_knows(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    library = install(monkeypatch)
    by_triton = Triton()
    found = kernels(by_triton, FlashInferAttention(CPU, NUM_SMS, send, by_triton, library))["flashinfer"]
    q, k, v = rows(UNEQUAL, 64)
    assert found.supports(q, k, v, UNEQUAL) and not found.supports(*rows(UNEQUAL, 80), UNEQUAL)
    assert not found.supports(q, k, v, by_triton.plan_packed(torch.tensor(UNEQUAL, dtype=torch.int32), 100))
    assert close(found.attend(q, k, v, UNEQUAL, 0.1), UNEQUAL, q, k, v)


def test_all_candidates_of_a_tower_are_measured(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """A tower with windows, on its own shapes; candidates that cannot run are reported."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    tower, by_triton, result = Tower(2, 80, 300, 64), Triton(), Measured({}, {}, "")
    monkeypatch.setattr(tower_attention, "can_read", lambda *tensors: False)
    monkeypatch.setattr(attention_timing, "TOWER_ROWS", 650)
    monkeypatch.setattr(attention_timing, "LAUNCHES", 1)
    seen: dict[str, list[int]] = {}
    for use, count, segments in tower_cases(by_triton, tower, CPU):
        bounds = segments.cu_seqlens.tolist() if isinstance(segments, PackedPlan) else list(segments)
        seen[use] = [count, bounds[1], len(set(bounds)) - 1]
        q, k, v = rows([0, count])
        ours = partial(by_triton.attend_packed, q, k, v, segments, 80**-0.5)
        candidates = packed_candidates(Site(CPU, NUM_SMS, send), by_triton, tower, q, k, v, segments)
        compare(use, ours, candidates, lambda launch: launch() or 1.0, result)
    assert seen == {
        "pictures": [600, 300, 2],
        "captured pictures": [600, 300, 2],
        "windows": [640, 64, 10],
        "captured windows": [640, 64, 10],
    }
    for use, names in (("pictures", {"cudnn", "torch-varlen"}), ("captured pictures", {"torch-varlen"})):
        assert result.seconds[use].keys() == names | {"triton"}
        assert result.left_out[use]["triton-tma"] == "does not take these shapes"
