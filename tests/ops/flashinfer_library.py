"""FlashInfer's calls as far as they are used, computed by the reference from their arguments, refusing what
the real ones cannot do: arguments that the package's signatures do not have, a plan while a graph is captured, another
batch size, a schedule that another plan has written over, a pinned copy that is still under way.

The signatures are those of the wheel, which tools/library_signatures.py has read into flashinfer_signatures.json."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.cuda import flashinfer_attention, flashinfer_kernels
from hydra_engine.backend.cuda.flashinfer_kernels import FlashKernels
from hydra_engine.backend.reference.ops import causal

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "flashinfer_signatures.json").read_text())


def _parsed(signature: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def call{signature}: ...", namespace)
    return inspect.signature(namespace["call"])


SIGNATURES = {name: _parsed(text) for name, text in FACTS["calls"].items()}
NUM_SMS = 4
OWN_SCHEDULE = 8 << 20  # bytes that a wrapper makes for itself


class Event:
    """Knows which wrappers' pinned copies it stands behind."""

    library: Library
    waits = 0

    def __init__(self) -> None:
        self._behind: set[Any] | None = None

    def record(self) -> None:
        self._behind = set(self.library.under_way)

    def synchronize(self) -> None:
        if self._behind is not None:
            Event.waits += 1
            self.library.under_way -= self._behind


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    """q [Q, Hq, D], k, v [K, Hkv, D]; the queries are the last ones."""
    if is_causal:
        keys, values = (x.float().transpose(0, 1) for x in (k, v))
        return causal(q, keys, values, k.shape[0] - q.shape[0], scale).to(q.dtype)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)


class _Wrapper:
    library: Library

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "NHD" and workspace.dtype is torch.uint8
        self.library.workspaces.add(workspace.data_ptr())
        self.library.made.append(self)
        self.workspace = workspace
        self.options = options

    def begin_plan(self, name: str, how: dict[str, Any], *settings: str) -> None:
        library = self.library
        assert not library.capturing, "planned while a graph is captured or replayed"
        assert self not in library.under_way, "the pinned copy of the last plan is still under way"
        assert how.keys() == {"sm_scale", "q_data_type", "kv_data_type", *settings}
        library.under_way.add(self)
        library.plans.append(name)


class Prefill(_Wrapper):
    def plan(self, cu_q: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any) -> None:
        self.begin_plan(type(self).__name__, how, "causal")
        assert how["causal"]
        self.check_workspace(shape, 2 * NUM_SMS // shape[1], 128)
        self.given = cu_q.tolist(), indptr.tolist(), indices, last.tolist(), shape, how["sm_scale"]

    def check_workspace(self, shape: Sequence[int], parts: int, tile: int) -> None:
        heads, _, dim, _ = shape
        assert self.workspace.shape[0] >= heads * parts * tile * dim * 4 + 16 + heads * parts * tile * 4

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        attend_paged(q, kv, out, self.given)


def attend_paged(q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor, given: Any) -> None:
    cu_q, indptr, indices, last, (heads, kv_heads, dim, page), scale = given
    assert kv[0].stride() == kv[1].stride() and kv[0].shape[1:] == (page, kv_heads, dim)
    assert q.shape == out.shape == (cu_q[-1], heads, dim)
    for row, (begin, end) in enumerate(pairwise(indptr)):
        length = (end - begin - 1) * page + last[row]
        k, v = (x[indices[begin:end].long()].flatten(0, 1)[:length] for x in kv)
        rows = slice(cu_q[row], cu_q[row + 1])
        out[rows] = attend(q[rows], k, v, scale, is_causal=True)


class Decode(Prefill):
    """The wrapper for decodes. In graph mode `run` reads only the buffers, the schedule's workspace and what was
    captured."""

    def __init__(self, workspace: Tensor, *, use_cuda_graph: bool = False, **options: Any) -> None:
        buffers = [options.pop(f"paged_kv_{name}_buffer", None) for name in ("indptr", "indices", "last_page_len")]
        super().__init__(workspace, **options)
        self.buffers: list[Tensor] = buffers
        self.in_graph = use_cuda_graph
        self.schedule = torch.empty(OWN_SCHEDULE, dtype=torch.uint8)
        self.captured: tuple[int, ...] | None = None
        self._plan_info: list[int] = []
        if use_cuda_graph:
            assert all(buffer.dtype is torch.int32 for buffer in buffers)
            self.batch = len(buffers[2])
            assert len(buffers[0]) == self.batch + 1

    def reset_workspace_buffer(self, workspace: Tensor, schedule: Tensor) -> None:
        self.workspace, self.schedule = workspace, schedule

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any) -> None:  # type: ignore[override]
        if not self.in_graph:
            return super().plan(torch.arange(len(last) + 1), indptr, indices, last, *shape, causal=True, **how)
        for buffer, part in zip(self.buffers, (indptr, indices, last), strict=True):
            buffer[: len(part)].copy_(part)
        self.plan_graph(indptr, indices, last, shape, how)
        return None

    def plan_graph(
        self, indptr: Tensor, indices: Tensor, last: Tensor, shape: Sequence[int], how: dict[str, Any]
    ) -> None:
        self.begin_plan("DecodeGraph", how)
        assert len(last) == self.batch and len(indices) <= len(self.buffers[1])
        heads, kv_heads, _, page = shape
        group, tile = heads // kv_heads, 16
        assert group <= tile
        if self.options["use_tensor_cores"]:
            parts = max(2 * NUM_SMS // kv_heads, -(-self.batch * group // tile) + self.batch - 1)
            self.check_workspace(shape, parts, tile)
        else:
            assert group in (1, 2, 3, 4, 6, 8)
            parts = max(16 * NUM_SMS // kv_heads, self.batch)
            self.check_workspace(shape, parts, 1)
        assert self.schedule.shape[0] >= parts * 13 + self.batch * 8 + 64
        lengths = (np.diff(indptr.numpy()) - 1) * page + last.numpy()
        assert lengths.min() >= 1
        words = self.schedule.view(torch.int32)
        words[0] = id(self) % (1 << 31)
        words[1 : 1 + self.batch] = torch.from_numpy(lengths.astype(np.int32))
        self._plan_info = [parts, tile, self.library.drift]
        self.shape, self.how = tuple(shape), how

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        if not self.in_graph:
            return super().run(q, kv, out=out)
        assert self._plan_info, "run before it was planned"
        if self.library.capturing and self.captured is None:
            self.captured = tuple(self._plan_info)
        assert self.captured in (None, tuple(self._plan_info)), "the launch that was captured does not fit"
        words = self.schedule.view(torch.int32)
        assert int(words[0]) == id(self) % (1 << 31), "another wrapper's schedule"
        indptr, indices, last = self.buffers
        scheduled = words[1 : 1 + self.batch]
        page = self.shape[3]
        assert torch.equal((indptr[1:] - indptr[:-1] - 1) * page + last, scheduled), "pages of another step"
        cu_q = list(range(self.batch + 1))
        attend_paged(q, kv, out, (cu_q, indptr.tolist(), indices, last.tolist(), self.shape, self.how["sm_scale"]))
        return None


class Packed(_Wrapper):
    def plan(self, cu_q: Tensor, cu_k: Tensor, *shape: int, **how: Any) -> None:
        self.begin_plan("Packed", how, "causal")
        assert cu_q.tolist() == cu_k.tolist() and not how["causal"] and len(shape) == 3
        self.bounds, self.scale = cu_q.tolist(), how["sm_scale"]

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> None:
        for begin, end in pairwise(self.bounds):
            rows = slice(begin, end)
            out[rows] = attend(q[rows], k[rows], v[rows], self.scale, is_causal=False)


class Library:
    """A stand-in for the package; one at a time, as `Event` has to know it. `called`: signatures that calls were
    checked against."""

    def __init__(self, signatures: Mapping[str, inspect.Signature] = SIGNATURES) -> None:
        self._signatures = signatures
        self.called: set[str] = set()
        self.plans: list[str] = []
        self.workspaces: set[int] = set()
        self.made: list[Any] = []
        self.under_way: set[Any] = set()  # wrappers whose pinned memory the device has not copied for sure
        self.capturing = False
        self.drift = 0  # another number: plans ask for another launch
        self.BatchPrefillWithPagedKVCacheWrapper = self._bound("BatchPrefillWithPagedKVCacheWrapper", Prefill)
        self.BatchDecodeWithPagedKVCacheWrapper = self._bound("BatchDecodeWithPagedKVCacheWrapper", Decode)
        self.BatchPrefillWithRaggedKVCacheWrapper = self._bound("BatchPrefillWithRaggedKVCacheWrapper", Packed)
        self.fast_decode_plan = self._held("fast_decode_plan", self._fast_decode_plan)
        Event.library = self
        Event.waits = 0

    def _bound(self, name: str, kind: type[_Wrapper]) -> type[_Wrapper]:
        methods = [one.removeprefix(f"{name}.") for one in self._signatures if one.startswith(f"{name}.")]
        held = {method: self._held(f"{name}.{method}", getattr(kind, method)) for method in methods}
        return type(kind.__name__, (kind,), {"library": self, **held})

    def _held(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Raises TypeError where the package would."""

        @wraps(call)
        def held(*args: Any, **kwargs: Any) -> Any:
            self._signatures[name].bind(*args, **kwargs)
            self.called.add(name)
            return call(*args, **kwargs)

        return held

    def _fast_decode_plan(
        self, wrapper: Any, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **how: Any
    ) -> None:
        """Leaves the pages' buffers alone, and needs the kernels that a plan before it found."""
        assert wrapper.in_graph and wrapper._plan_info
        wrapper.plan_graph(indptr, indices, last, shape, how)

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def graph_wrappers(self) -> list[Any]:
        return [wrapper for wrapper in self.made if getattr(wrapper, "in_graph", False)]


def send(arrays: Sequence[npt.NDArray[np.generic]]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array.copy()) for array in arrays)


def install(
    patch: pytest.MonkeyPatch,
    *,
    dtypes: tuple[torch.dtype, ...] = (),
    dims: tuple[int, ...] = (),
    kernels: FlashKernels | None = None,
) -> Library:
    """`dtypes`, `dims`: which the library is to take besides its own; `kernels`: those that it has, all by default."""
    patch.setattr(flashinfer_kernels, "installed", lambda: kernels or FlashKernels())
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(flashinfer_attention, "DTYPES", (*flashinfer_attention.DTYPES, *dtypes))
    patch.setattr(flashinfer_attention, "HEAD_DIMS", (*flashinfer_attention.HEAD_DIMS, *dims))
    return Library()
