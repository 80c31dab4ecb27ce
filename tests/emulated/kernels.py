"""Kernels of an emulated device: the Python around every kernel as it is, launches checked and left out, results those
of the reference ops.

Checks of arguments, memory for results and for what lies between are those of the package of kernels and of the
extension's wrappers, on tensors of the device; then the reference fills the results in.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hydra_engine import _C
from hydra_engine.backend.base import (
    Adjustments,
    DeltaInputs,
    HeadNorms,
    MixedRows,
    PagedCache,
    Routes,
    SamplingTensors,
    StateCache,
    StateRows,
)
from hydra_engine.backend.cpu.linear import DTYPE_CODES
from hydra_engine.backend.quantized import FLOAT8, float8_rows
from hydra_engine.backend.reference import delta_rule
from hydra_engine.backend.reference.ops import ReferenceOps, activation
from hydra_kernels.experts import Matrices
from hydra_kernels.float8_rows import PART
from hydra_kernels.prefill_attention import _MAX_SEARCHED
from hydra_kernels.quantized_linear import PackedWeight
from tests.emulated.clock import Work
from tests.emulated.graphs import GARBAGE
from tests.emulated.streams import Streams
from tests.emulated.tensors import Accesses, OnDevice, Present, flat, held_by, touch
from tests.emulated.works import work_of_kernel
from tests.kernels.quantized import dequantized

OPS = ReferenceOps()
_inside = threading.local()  # of a function that has a reference, and how it launched its last kernel


class Launches:
    """Stands in for a Triton kernel: `kernel[grid](..)` checks its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(size, int) and size > 0 for size in grid), f"{self._name}: a grid of {grid}"
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        if not getattr(_inside, "function", ""):
            raise NotImplementedError(f"tests/emulated/kernels.py has no reference of what launches {self._name}")
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, OnDevice):
                Present.streams.found(f"{self._name}: a kernel gets a tensor of the host")
                raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {self._name}")
        if (trace := Present.streams.current.trace) is not None:
            trace.launched.append(self._name)
        _inside.is_dependent = bool(kwargs.get("launch_pdl"))


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package of kernels, whose results the reference computes."""
    reference = REFERENCES[function.__name__]

    def call(*args: Any, **kwargs: Any) -> Any:
        _inside.function, _inside.is_dependent = function.__name__, False
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.function = ""
        streams = Present.streams
        given = flat((*args, *kwargs.values()))
        outs = [value for value in flat(result) if isinstance(value, OnDevice)]
        plain = tuple(map(held_by, args)), {name: held_by(value) for name, value in kwargs.items()}
        targets = [out.held for out in outs]

        def compute() -> None:
            found = reference(*plain[0], **plain[1])
            for target, value in zip(targets, found if isinstance(found, tuple) else (found,), strict=True):
                assert target.shape == value.shape and target.dtype == value.dtype, function.__name__
                target.copy_(value)

        with streams.lock:
            compute()
            changed = [args[place] for place in CHANGED.get(function.__name__, ())]
            touch(given, [*outs, *changed], streams.current.issue())
            if function.__name__ == "rope_linear":
                CacheDesc.write_through(args[6], args[5])
        if streams.current.trace is not None:
            streams.current.trace.call(compute)
        work = work_of_kernel(function.__name__, args, given, outs)
        streams.launch(work._replace(is_dependent=_inside.is_dependent))
        return result

    return call


# ---- references of the kernels' functions


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: Any = "none",
    out_dtype: torch.dtype | None = None,
    *,
    rounded: bool = False,
) -> Tensor:
    packed = OPS.pack_linear(weight, bias)
    if residual is not None and rounded:
        return OPS.linear(x, packed, act=act, out_dtype=out_dtype) + residual
    return OPS.linear(x, packed, act=act, residual=residual, out_dtype=out_dtype)


def _normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else OPS.rms_norm(x, norm, eps)


def _gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: Any, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    return OPS.act_and_mul(_linear(_normed(x, norm, eps), weight, bias), act)


def _rope_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    _, size, num_kv_heads, dim = k_cache.shape
    heads = _linear(_normed(x, norm, eps), weight, bias).unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    kept = slots >= 0
    block, offset = slots[kept] // size, slots[kept] % size
    k_cache[block, offset], v_cache[block, offset] = OPS.rotate(k, cos, sin)[kept], v[kept]
    return OPS.rotate(q, cos, sin)


def _quantized_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: Any = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies with the dequantised weight in float32."""
    packed = OPS.pack_linear(dequantized(weight), bias)
    added = None if residual is None else residual.float()
    wide = OPS.linear(x.float(), packed, act=act, residual=added)
    return wide.to(out_dtype or x.dtype)


def _experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrices,
    down: Matrices,
    act: Any,
    *,
    many: bool | None = None,
) -> Tensor:
    """Multiplies with the dequantised weights in float32."""
    packed = OPS.pack_experts(*([*map(_float_matrix, _matrices_of(part))] for part in (gate_up, down)))
    return OPS.experts(x, Routes(chosen, weights), packed, act)


def _matrices_of(matrices: Matrices) -> Iterable[Tensor | PackedWeight]:
    if isinstance(matrices, Tensor):
        return matrices.unbind()
    offsets = [None] * len(matrices.words) if matrices.offsets is None else matrices.offsets
    parts = zip(matrices.words, matrices.scales, offsets, strict=True)
    return [PackedWeight(*part, *matrices[3:]) for part in parts]


def _float_matrix(matrix: Tensor | PackedWeight) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else dequantized(matrix)


def _round_rows(x: Tensor, width: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Rounded rows as words in the kernels' order, with rows of zeros up to a multiple of 4 where steps are those of
    groups."""
    by_rows = group_size == x.shape[1]
    numbers, steps = float8_rows(x, group_size)
    missing = 0 if by_rows else -x.shape[0] % 4
    octets = pad(numbers.view(torch.uint8), (0, 2 * width - x.shape[1], 0, missing))
    words = octets.unflatten(1, (-1, 2, PART)).mT.flatten(1).contiguous()
    return words.view(FLOAT8), pad(steps, (0, 0, 0, missing)).t().contiguous().t()


def _finish(
    product: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: Any = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    sums = product.float() if bias is None else product.float() + bias
    result = activation(sums, act)
    return (result if residual is None else result + residual).to(out_dtype or product.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed, total = OPS.add_rms_norm(x, residual, weight, eps)
    residual.copy_(total)
    return normed


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return OPS.layer_norm(residual, weight, bias, eps)


def _sample(logits: Tensor, *draws: Tensor) -> tuple[Tensor, Tensor]:
    return OPS.sample(logits, SamplingTensors(*draws))


def _adjust_logits(logits: Tensor, *adjustments: Tensor) -> Tensor:
    return OPS.adjust_logits(logits, Adjustments(*adjustments))


def _paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    cu_q: Tensor,
    num_context: Tensor,
    scale: float,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    cache = PagedCache(torch.stack((k_cache, v_cache), dim=1).unsqueeze(1))
    if scales is not None:
        cache = PagedCache(cache.data, None, torch.stack(scales, dim=1).unsqueeze(1), q.dtype)
    used = (-(-num_context // cache.block_size)).tolist()
    rows = [row[:count].clamp(0, cache.num_blocks - 1) for row, count in zip(tables, used, strict=True)]
    assert all(torch.equal(row, all_of[: len(row)]) for row, all_of in zip(rows, tables, strict=True)), "no such block"
    safe = torch.zeros_like(tables)
    for row, blocks in enumerate(rows):
        safe[row, : len(blocks)] = blocks
    rows = MixedRows(cu_q, cu_q, num_context, num_context, safe)
    return OPS.attention_paged(q, cache, 0, OPS.plan_mixed(rows, q.shape[0], len(num_context)), scale)


def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scale: float,
    *,
    num_splits: int,
    counters: Tensor | None = None,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    cu_q, none = torch.arange(q.shape[0] + 1, dtype=torch.int32), num_context == 0
    tables = torch.where(none[:, None], 0, block_tables)
    result = _paged(q, k_cache, v_cache, tables, cu_q, num_context.clamp(min=1), scale, scales)
    result[none] = 0
    return result


def _prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_q: Tensor,
    num_context: Tensor,
    scale: float,
    *,
    max_q: int,
    out: Tensor | None = None,
    tma: bool = False,
    max_requests: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Tokens before the first request's and behind the last one's keep what `out` holds."""
    counts = [end - begin for begin, end in pairwise(cu_q.tolist())]
    assert max_q >= max(counts), "max_q is too small"
    assert not max_requests or sum(count > 0 for count in counts) <= max_requests, "max_requests is too small"
    assert not max_requests or len(counts) <= _MAX_SEARCHED, "more requests than a program can search"
    found = _paged(q, k_cache, v_cache, block_tables, cu_q, num_context, scale, scales)
    if out is None:
        return found
    inside = slice(int(cu_q[0]), int(cu_q[-1]))
    result = out.clone()
    result[inside] = found[inside]
    return result


def _write_quantized(data: Tensor, scales: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[()]:
    OPS.write_cache(PagedCache(data, None, scales, k.dtype), layer, (k, v), slots)
    return ()


def _rope_and_write_quantized(
    data: Tensor,
    scales: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
) -> Tensor:
    cache = PagedCache(data, None, scales, q.dtype)
    return OPS.rope_and_write(q, k, v, rotary, cache, layer, slots, HeadNorms(*norms))


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    max_length: int,
    one_tile: bool = False,
    search: bool = False,
    tma: bool = False,
) -> Tensor:
    assert max_length >= max(end - begin for begin, end in pairwise(cu_seqlens.tolist())), "max_length is too small"
    return OPS.attention_packed(q, k, v, cu_seqlens.tolist(), scale)


def _causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    tiles: Tensor | None,
    cu_q: Tensor,
    starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    *,
    tokens: int,
) -> Tensor:
    assert tiles is not None or tokens > 1, "a tile of one token is listed"
    return delta_rule.causal_conv(x, weight, *_state_rows(states, cu_q, starts, reads, writes))


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rates: Tensor,
    shift: Tensor,
    states: Tensor,
    cu_q: Tensor,
    starts: Tensor,
    reads: Tensor,
    writes: Tensor,
) -> Tensor:
    inputs = DeltaInputs(q, k, v, a, b, rates, shift)
    return delta_rule.delta_rule(inputs, *_state_rows(states, cu_q, starts, reads, writes))


def _state_rows(
    states: Tensor, cu_q: Tensor, starts: Tensor, reads: Tensor, writes: Tensor
) -> tuple[StateCache, int, StateRows]:
    """Arguments of the reference for the states of a layer, which it changes in their place: a cache is too large to
    be copied for each launch."""
    assert int(reads.min()) >= 0 and max(int(reads.max()), int(writes.max())) < len(states), "a slot beyond the states"
    layer = states.unsqueeze(1)
    return StateCache(layer, layer), 0, StateRows(cu_q, starts, reads, writes)


REFERENCES: dict[str, Callable[..., Any]] = {
    "small_linear": _linear,
    "invariant_linear": _linear,
    "gated_linear": _gated_linear,
    "rope_linear": _rope_linear,
    "small_quantized_linear": _quantized_linear,
    "invariant_quantized_linear": _quantized_linear,
    "route_tokens": OPS.route,
    "grouped_experts": _experts,
    "round_rows": _round_rows,
    "finish": _finish,
    "pixel_rows": OPS.pixel_rows,
    "rms_norm": OPS.rms_norm,
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _add_layer_norm,
    "gated_rms_norm": OPS.gated_rms_norm,
    "layer_norm": OPS.layer_norm,
    "act_and_mul": OPS.act_and_mul,
    "sigmoid_mul": OPS.sigmoid_mul,
    "rotate": OPS.rotate,
    "sample": _sample,
    "adjust_logits": _adjust_logits,
    "score_tokens": OPS.score_tokens,
    "causal_conv": _causal_conv,
    "delta_rule": _delta_rule,
    "decode_attention": _decode_attention,
    "prefill_attention": _prefill_attention,
    "packed_attention": _packed_attention,
    "write_quantized": _write_quantized,
    "rope_and_write_quantized": _rope_and_write_quantized,
}
# Arguments that functions write, by place.
CHANGED = {
    "add_rms_norm": (1,),
    "add_layer_norm": (1,),
    "causal_conv": (2,),
    "delta_rule": (7,),
    "write_quantized": (0, 1),
    "rope_and_write_quantized": (0, 1),
}


# ---- the extension


ON_HOST = -1  # in place of a device
FLOAT32 = DTYPE_CODES[torch.float32]


class CacheDesc:
    """Stands in for `_C.CudaCacheDesc`: the processor's descriptor on the same addresses. Lanes use different blocks
    of a cache at once, so accesses are ordered by block; those of attention are not checked."""

    def __init__(self, *args: int) -> None:
        *shape, self._device = args
        self._desc = _C.CacheDesc(*shape)
        self._block_size = shape[4]
        self._block_bytes = 4 * prod(shape[4:7])  # of one layer
        self._blocks = Present.blocks.setdefault(shape[0], {})
        self._address, self._num_blocks = shape[:2]
        self._bytes = prod(shape[2:7]) * (4 if shape[7] == FLOAT32 else 2)

    def write(self, stream: int, layer: int, *args: Any) -> None:
        *_, slots, count = args
        self._do(stream, lambda: self._desc.write(layer, *args), written=self._of(slots, count))

    def rope_and_write(self, stream: int, *args: Any) -> None:
        slots, count = args[12:14]
        self._do(stream, lambda: self._desc.rope_and_write(*args), written=self._of(slots, count))

    def merge(self, stream: int, plane: int, slots: int, rows: int, count: int, *args: Any) -> None:
        merge = partial(self._desc.merge, plane, slots, rows, count, *args)
        self._do(stream, merge, read=self._of(slots, count))

    def gather(self, stream: int, layer: int, index: int, slots: int, count: int, out: int) -> None:
        gather = partial(self._desc.gather, layer, index, slots, count, out)
        self._do(stream, gather, read=self._of(slots, count))

    def copy_to(self, stream: int, target: CacheDesc, pairs: int, count: int) -> None:
        """Copies blocks. Reads of the source are not checked: it is another process's. Copies to the host arrive
        late."""
        numbers = numbers_at(pairs, 2 * count)
        kept = (ctypes.c_int64 * len(numbers))(*numbers)
        copy = partial(self._copy, target, kept, count)
        if target._device != ON_HOST:
            self._do(stream, copy)
            target._touch(set(), set(numbers[1::2]))
            return
        for block in numbers[1::2]:
            assert 0 <= block < target._num_blocks
            ctypes.memset(target._address + block * target._bytes, GARBAGE, target._bytes)
        self._do(stream, lambda: None, read=numbers[::2])
        Present.streams.current.issue(copy)

    def _copy(self, target: CacheDesc, pairs: ctypes.Array[ctypes.c_int64], count: int) -> None:
        self._desc.copy_to(target._desc, ctypes.addressof(pairs), count)

    @staticmethod
    def write_through(plane: Tensor, slots: Tensor) -> None:
        """Records that a kernel writes to these slots of a plane [N, S, H, D] of a cache."""
        streams = Present.streams
        blocks = Present.blocks.setdefault(plane.memory.storage.data_ptr(), {})  # type: ignore[attr-defined]
        for block in {slot // plane.shape[1] for slot in slots.held.tolist() if slot >= 0}:  # type: ignore[attr-defined]
            blocks.setdefault(block, Accesses(streams)).touch(streams.current, streams.current.issue(), write=True)

    def _of(self, slots: int, count: int) -> set[int]:
        return {int(slot) // self._block_size for slot in numbers_at(slots, count) if slot >= 0}

    def _touch(self, read: set[int], written: set[int]) -> None:
        streams = Present.streams
        number = streams.current.issue()
        for block in read | written:
            clock = self._blocks.setdefault(block, Accesses(streams))
            clock.touch(streams.current, number, write=block in written)

    def _do(
        self,
        handle: int,
        launch: Callable[[], None],
        read: Iterable[int] = (),
        written: Iterable[int] = (),
    ) -> None:
        streams = Present.streams
        stream = streams.current
        assert handle == stream.cuda_stream, "a launch on another stream than the current one"
        with streams.lock:
            self._touch(set(read), set(written))
            launch()
        if stream.trace is not None:
            stream.trace.call(launch)
            stream.trace.launched.append("cache")
        streams.launch(Work(num_bytes=self._block_bytes * len({*read, *written})))


def numbers_at(address: int, count: int) -> list[int]:
    """int64"""
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


class Extension:
    """Stands in for `_C` in files of the backend that use its CUDA half."""

    CudaCacheDesc = CacheDesc

    def __init__(self, streams: Streams, multiprocessors: int) -> None:
        self._streams = streams
        self._multiprocessors = multiprocessors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuda_"):
            raise NotImplementedError(f"tests/emulated/kernels.py does not emulate _C.{name}")
        return getattr(_C, name)

    def cuda_check_faults(self, device: int) -> None: ...

    def cuda_pin(self, address: int, num_bytes: int, device: int) -> None: ...

    def cuda_unpin(self, address: int, device: int) -> None: ...

    def cuda_split_streams(self, device: int, counts: Any, language: int, vision: int, spread: bool) -> list[Any]:
        """Splits in groups of one multiprocessor."""
        every = range(self._multiprocessors)
        order = [*every[::2], *every[1::2]] if spread else [*every]
        splits = []
        for count in counts:
            made = [
                self._streams.make(part=frozenset(part), priority=priority)
                for part, priority in ((order[:count], language), (order[count:], vision))
            ]
            splits.append((*(stream.cuda_stream for stream in made), *(len(stream.part) for stream in made)))
        return splits


def functions_of(module: ModuleType) -> Iterator[tuple[ModuleType | type, str, Callable[..., Any]]]:
    """(where it is named, its name, it): those of the package of kernels that a module of the backend calls, by its own
    name, as a method of its classes or by a module's, and that have a reference."""
    named = [part for part in vars(module).values() if isinstance(part, ModuleType)]
    classes = [part for part in vars(module).values() if isinstance(part, type) and part.__module__ == module.__name__]
    for place in (module, *classes, *(part for part in named if part.__name__.startswith("hydra_kernels."))):
        for name in [*vars(place)]:
            value = getattr(place, name)
            if name in REFERENCES and getattr(value, "__module__", "").startswith("hydra_kernels."):
                yield place, name, value
