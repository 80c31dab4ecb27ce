"""Argument checks of the ops, shared by all implementations so that their errors read alike.

What a check requires and does not find raises ValueError, which names the argument with expected and actual. A check
takes about a microsecond: it looks at shapes, dtypes and strides, at contents only if it says so. Contents (a slot or
block id out of range) are checked by the implementation, which reads them anyway. Strides are in elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import (
    Adjustments,
    DeltaInputs,
    HeadNorms,
    MixedRows,
    PackedExperts,
    PagedCache,
    Rotary,
    Routes,
    SamplingTensors,
    StateCache,
    StateRows,
)
from hydra_engine.backend.quantized import QuantizedWeight

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_TYPES = "float32, bfloat16 or float16"


def described(tensor: Tensor) -> str:
    """Shape, dtype, strides and device of the tensor, for error messages."""
    return f"{list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())} on {tensor.device}"


def check_cache(cache: PagedCache, layer: int, *, num_tensors: int | None = None) -> None:
    """Requires that `layer` exists, and `num_tensors` tensors per layer if given. Raises ValueError."""
    shape = cache.data.shape
    if num_tensors is not None and shape[2] != num_tensors:
        raise ValueError(f"cache: expected {num_tensors} tensors per layer, got {shape[2]}")
    if not 0 <= layer < shape[1]:
        raise ValueError(f"layer: expected 0 to {shape[1] - 1}, got {layer}")


def check_new_cache(cache: PagedCache) -> None:
    """Requires contiguous data [N, L, X, S, H, D] of a compute dtype; for a cache with scales only int8 and, between
    blocks, the stride of `PagedCache.quantized`. Meant to be called once per cache."""
    data = cache.data
    if cache.scales is not None:
        blocks = data.shape[0] if data.dim() == 6 else 0
        if data.dtype is not torch.int8 or (blocks > 1 and data.stride(0) != cache.block_bytes):
            raise ValueError(
                f"cache: expected a quantized one as `PagedCache.quantized` makes it, got {described(data)}"
            )
        return
    if data.dim() != 6 or data.dtype not in COMPUTE_DTYPES or not data.is_contiguous():
        raise ValueError(f"cache: expected contiguous [N, L, X, S, H, D] of {FLOAT_TYPES}, got {described(data)}")


def check_plane(cache: PagedCache, layer: int, index: int) -> None:
    """Requires that `layer` and its tensor `index` exist."""
    check_cache(cache, layer)
    if not 0 <= index < cache.data.shape[2]:
        raise ValueError(f"index: expected 0 to {cache.data.shape[2] - 1}, got {index}")


def check_device(device: torch.device, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Requires all tensors on `device`: kernels get addresses, which do not show it. The names are for the error."""
    for name, tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"{name}: expected {device}, got {described(tensor)}")


def check_indices(name: str, indices: Tensor, count: int | None = None) -> int:
    """Requires a contiguous int64 vector, of `count` entries if given. Returns its length."""
    shape = indices.shape
    if (
        len(shape) != 1
        or indices.dtype is not torch.int64
        or (count is not None and shape[0] != count)
        or not indices.is_contiguous()
    ):
        wanted = "M" if count is None else count
        raise ValueError(f"{name}: expected contiguous [{wanted}] torch.int64, got {described(indices)}")
    return shape[0]


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Requires this shape and dtype, at any strides."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ValueError(f"{name}: expected {list(shape)} {dtype}, got {described(tensor)}")


def check_whole(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Requires a contiguous tensor of this shape and dtype."""
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected contiguous {list(shape)} {dtype}, got {described(tensor)}")


def check_heads(name: str, rows: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Requires `shape` [T, H, D] and `dtype`, dense over H and D. Returns the stride between tokens, any number."""
    if rows.shape == shape and rows.dtype is dtype:
        _, heads, dim = shape
        stride, stride_h, stride_d = rows.stride()
        if (stride_d == 1 or dim <= 1) and (stride_h == dim or heads <= 1):
            return stride
    raise ValueError(f"{name}: expected {list(shape)} {dtype} with dense [H, D] rows, got {described(rows)}")


def check_strided_heads(name: str, x: Tensor, dim: int | None, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Requires [T, H, D] with a dense last dimension. Returns the strides between tokens and between heads.

    dim: required D, if given. dtype: required dtype; None: any compute dtype.
    """
    if (
        x.dim() == 3
        and (dim is None or x.shape[2] == dim)
        and (x.dtype in COMPUTE_DTYPES if dtype is None else x.dtype is dtype)
        and (x.stride(2) == 1 or x.shape[2] <= 1)
    ):
        return x.stride(0), x.stride(1)
    wanted = f"[T, H, {'D' if dim is None else dim}] {dtype or f'of {FLOAT_TYPES}'}"
    raise ValueError(f"{name}: expected {wanted} with a dense last dimension, got {described(x)}")


_ROW_NAMES = ("rows[0]", "rows[1]")


def check_write(cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> tuple[int, list[int]]:
    """Checks the arguments of `Ops.write_cache`. Returns T and the stride between tokens of each of `rows`."""
    data = cache.data
    _, num_layers, num_tensors, _, heads, dim = data.shape
    if num_tensors != len(rows) or not 0 <= layer < num_layers:
        check_cache(cache, layer, num_tensors=len(rows))
    tokens, dtype = check_indices("slots", slots), cache.row_dtype
    shape = (tokens, heads, dim)
    return tokens, [check_heads(name, source, shape, dtype) for name, source in zip(_ROW_NAMES, rows, strict=False)]


def check_rope(
    q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: PagedCache, layer: int, slots: Tensor
) -> tuple[int, int, int, int, int]:
    """Checks the arguments of `Ops.rope_and_write` but its norms. Returns the strides between tokens of q, k, v,
    cosines and sines."""
    data = cache.data
    _, num_layers, num_tensors, _, num_kv_heads, dim = data.shape
    if num_tensors != 2 or not 0 <= layer < num_layers:
        check_cache(cache, layer, num_tensors=2)
    if dim % 2:
        raise ValueError(f"cache: expected an even head dim for rotation, got {dim}")
    tokens, dtype = check_indices("slots", slots), cache.row_dtype
    kv_shape = (tokens, num_kv_heads, dim)
    return (
        check_heads("q", q, (tokens, q.shape[1] if q.dim() == 3 else 0, dim), dtype),
        check_heads("k", k, kv_shape, dtype),
        check_heads("v", v, kv_shape, dtype),
        _check_angles("cos", rotary[0], (tokens, dim // 2)),
        _check_angles("sin", rotary[1], (tokens, dim // 2)),
    )


def check_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int, int]:
    """Checks the arguments of `Ops.rotate`. Returns x's strides between tokens and between heads, and those between
    tokens of cosines and sines."""
    stride, head_stride = check_strided_heads("x", x, None)
    tokens, _, dim = x.shape
    if dim % 2 or dim == 0:
        raise ValueError(f"x: expected an even head dim for rotation, got {dim}")
    angles = (tokens, dim // 2)
    return stride, head_stride, _check_angles("cos", cos, angles), _check_angles("sin", sin, angles)


def check_head_norms(norms: HeadNorms, dim: int, dtype: torch.dtype) -> None:
    """Requires that weights which are not None are contiguous [dim] of `dtype`."""
    for name, weight in (("q_norm", norms.q), ("k_norm", norms.k)):
        if weight is not None:
            check_whole(name, weight, (dim,), dtype)


def _check_angles(name: str, angles: Tensor, shape: tuple[int, int]) -> int:
    """Requires float32 of this shape [T, D/2], with dense rows. Returns the stride between tokens."""
    if angles.shape == shape and angles.dtype is torch.float32:
        stride, stride_last = angles.stride()
        if stride_last == 1 or shape[1] <= 1:
            return stride
    raise ValueError(f"{name}: expected {list(shape)} torch.float32, got {described(angles)}")


def check_merge(hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int) -> int:
    """Checks the arguments of `Ops.merge_image_tokens`. Returns M, the number of rows, skipped ones included."""
    shape = cache.data.shape
    check_cache(cache, plane, num_tensors=1)
    width = shape[4] * shape[5]
    check_whole("hidden", hidden, (hidden.shape[0] if hidden.dim() else 0, width), cache.data.dtype)
    return check_indices("slots", slots, check_indices("rows", rows))


def check_copy(source: PagedCache, target: PagedCache, pairs: Tensor) -> int:
    """Checks the arguments of `Ops.copy_blocks`: blocks of one shape and dtype, but not whether `pairs` name existing
    ones. Returns the number of pairs."""
    if source.data.shape[1:] != target.data.shape[1:] or source.data.dtype is not target.data.dtype:
        raise ValueError(
            f"target: expected blocks of {list(source.data.shape[1:])} {source.data.dtype}, "
            f"got {list(target.data.shape[1:])} {target.data.dtype}"
        )
    check_whole("pairs", pairs, (*pairs.shape[:1], 2), torch.int64)
    return pairs.shape[0]


def check_plan_shapes(cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> None:
    """Checks shapes and dtypes of the arguments of `Ops.plan_attention`, which must be on the CPU; no contents."""
    for name, tensor in (("cu_q", cu_q), ("num_context", num_context), ("block_tables", block_tables)):
        if tensor.dtype is not torch.int32 or not tensor.is_cpu:
            raise ValueError(f"{name}: expected torch.int32 on the CPU, got {described(tensor)}")
    batch = num_context.shape[0] if num_context.dim() == 1 else -1
    if batch < 0 or cu_q.shape != (batch + 1,) or block_tables.dim() != 2 or block_tables.shape[0] != batch:
        raise ValueError(
            "cu_q, num_context, block_tables: expected [B + 1], [B] and [B, max_blocks], "
            f"got {list(cu_q.shape)}, {list(num_context.shape)} and {list(block_tables.shape)}"
        )


def check_plan(cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> tuple[int, int]:
    """Checks the arguments of `Ops.plan_attention`, with the contents of `cu_q` and `num_context`.

    Returns (max_q, max_context): the most queries and the longest context of a row, zeros without rows.
    """
    check_plan_shapes(cu_q, num_context, block_tables)
    bounds, context = cu_q.numpy(), num_context.numpy()
    if bounds[0] != 0:
        raise ValueError(f"cu_q: expected to start with 0, got {bounds[0]}")
    if not len(context):
        return 0, 0
    num_q = bounds[1:] - bounds[:-1]
    if np.count_nonzero(context < num_q) or num_q.min() < 0:
        row = int(((num_q < 0) | (context < num_q)).argmax())
        raise ValueError(
            f"num_context: row {row} has {num_q[row]} queries, expected 0 to num_context of them, got {context[row]}"
        )
    return int(num_q.max()), int(context.max())


def check_decode_plan(num_context: Tensor, block_tables: Tensor) -> tuple[int, int]:
    """Checks shapes and dtypes of the arguments of `Ops.plan_decode`, not contents, which are read at launch time.
    Returns B and W, the rows and columns of `block_tables`."""
    batch = num_context.shape[0] if num_context.dim() == 1 else -1
    if batch < 0 or block_tables.dim() != 2 or block_tables.shape[0] != batch:
        raise ValueError(
            "num_context, block_tables: expected [B] and [B, max_blocks], "
            f"got {list(num_context.shape)} and {list(block_tables.shape)}"
        )
    for name, tensor in (("num_context", num_context), ("block_tables", block_tables)):
        if tensor.dtype is not torch.int32:
            raise ValueError(f"{name}: expected torch.int32, got {described(tensor)}")
    return batch, block_tables.shape[1]


def check_mixed_plan(rows: MixedRows, num_tokens: int) -> int:
    """Checks the arguments of `Ops.plan_mixed`: shapes and dtypes, and that `num_tokens` is at least B. Returns B."""
    batch, _ = check_decode_plan(rows.num_context, rows.block_tables)
    for name, size in (("cu_q", batch + 1), ("rest_cu_q", batch + 1), ("decode_context", batch)):
        _check_tensor(name, getattr(rows, name), (size,), torch.int32)
    if batch > num_tokens:
        raise ValueError(f"num_tokens: expected at least {batch}, one for each row, got {num_tokens}")
    return batch


def check_logits(logits: Tensor, *, wide: bool = False) -> tuple[int, int]:
    """Requires float32 [B, V] with dense rows and V above 0. Returns B and V. wide: allows float64 too."""
    known = logits.dtype is torch.float32 or (wide and logits.dtype is torch.float64)
    if logits.dim() != 2 or not known or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(f"logits: expected [B, V] torch.float32 with dense rows, got {described(logits)}")
    return logits.shape[0], logits.shape[1]


def check_sample(logits: Tensor, sampling: SamplingTensors) -> tuple[int, int]:
    """Checks the arguments of `Ops.sample`. Returns B and V.

    Temperatures, top_p, min_p and numbers are all float32 or all float64; logits may be float64 in the second case.
    """
    wide = sampling.temperatures.dtype is torch.float64
    sizes = check_logits(logits, wide=wide)
    shape, floats = sizes[:1], torch.float64 if wide else torch.float32
    for name, column in zip(sampling._fields, sampling, strict=True):
        _check_tensor(name, column, shape, torch.int32 if name == "top_k" else floats)
    return sizes


def check_adjustments(logits: Tensor, adjustments: Adjustments) -> tuple[int, int]:
    """Checks the arguments of `Ops.adjust_logits`: shapes and dtypes, no contents. Returns B and V."""
    batch, vocabulary = sizes = check_logits(logits, wide=True)
    lists = adjustments.bias_ids, adjustments.counts, adjustments.masks
    num_biases, num_counted, num_masks = (tensor.shape[0] for tensor in lists)  # in a third of the time of len
    rows = (batch,), torch.int32
    expected = (
        *(rows, rows, ((num_biases,), torch.int32), ((num_biases,), torch.float64)),
        *(((batch, 3), torch.float64), rows, ((num_counted, vocabulary), torch.int32)),
        *(rows, ((num_masks, -(-vocabulary // 32)), torch.int32)),
    )
    for name, tensor, (shape, dtype) in zip(adjustments._fields, adjustments, expected, strict=True):
        _check_tensor(name, tensor, shape, dtype)
    return sizes


def check_scores(logits: Tensor, tokens: Tensor, num_top: Tensor) -> tuple[int, int]:
    """Checks the tensors of `Ops.score_tokens`: shapes and dtypes, no contents. Returns B and V."""
    sizes = check_logits(logits, wide=True)
    _check_tensor("tokens", tokens, sizes[:1], torch.int64)
    _check_tensor("num_top", num_top, sizes[:1], torch.int32)
    return sizes


def check_paged(q: Tensor, cache: PagedCache, layer: int, max_blocks: int, max_context: int) -> tuple[int, int, int]:
    """Checks q, cache and layer of `Ops.attention_paged`, and that block tables with `max_blocks` columns hold
    `max_context` tokens. Returns T, Hq and q's stride between tokens."""
    data = cache.data
    _, num_layers, num_tensors, block_size, num_kv_heads, dim = data.shape
    if num_tensors != 2 or not 0 <= layer < num_layers:
        check_cache(cache, layer, num_tensors=2)
    tokens, num_heads = q.shape[:2] if q.dim() == 3 else (0, 0)
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q: expected [T, Hq, D] with Hq a multiple of {num_kv_heads} KV heads, got {described(q)}")
    stride = check_heads("q", q, (tokens, num_heads, dim), cache.row_dtype)
    if max_blocks * block_size < max_context:
        raise ValueError(
            f"block_tables: expected at least {-(-max_context // block_size)} blocks of {block_size} slots "
            f"for {max_context} context tokens, got {max_blocks}"
        )
    return tokens, num_heads, stride


def check_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> None:
    """Checks the arguments of `Ops.attention_packed`; `cu_seqlens` must rise from 0 to P."""
    check_packed_rows(q, k, v)
    bounds = list(cu_seqlens)
    if not bounds or bounds[0] != 0 or bounds[-1] != q.shape[0] or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected to rise from 0 to {q.shape[0]}, got {bounds[:8]}")


def check_packed_plan(cu_seqlens: Tensor, max_length: int) -> None:
    """Checks the arguments of `Ops.plan_packed`, but not the contents of `cu_seqlens`."""
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype is not torch.int32:
        raise ValueError(f"cu_seqlens: expected [segments + 1] torch.int32, got {described(cu_seqlens)}")
    if max_length < 0:
        raise ValueError(f"max_length: expected 0 or more, got {max_length}")


def check_packed_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Requires q, k, v of one shape [P, H, D] and one compute dtype, dense over H and D."""
    if q.dim() != 3 or q.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"q: expected [P, H, D] of {FLOAT_TYPES}, got {described(q)}")
    shape = (q.shape[0], q.shape[1], q.shape[2])
    check_heads("q", q, shape, q.dtype)
    check_heads("k", k, shape, q.dtype)
    check_heads("v", v, shape, q.dtype)


def check_norm_weight(weight: Tensor, x: Tensor, *, wide: bool = True, name: str = "weight") -> bool:
    """Requires contiguous [C], C above 0, for x [.., C], of x's dtype or, if `wide`, float32. Returns True if it is
    float32 and x is not."""
    columns = x.shape[-1]
    is_wide = weight.dtype is not x.dtype
    fits = not is_wide or (wide and weight.dtype is torch.float32)
    if weight.shape != (columns,) or not weight.is_contiguous() or columns == 0 or not fits:
        other = " or torch.float32" if wide and x.dtype is not torch.float32 else ""
        raise ValueError(f"{name}: expected contiguous [{max(columns, 1)}] {x.dtype}{other}, got {described(weight)}")
    return is_wide


def check_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Requires weight [num_out, K] and, if given, bias [num_out], each of a compute dtype."""
    if weight.dim() != 2 or weight.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"weight: expected [num_out, K] of a float type, got {described(weight)}")
    check_bias(bias, weight.shape[0])


def check_bias(bias: Tensor | None, num_out: int) -> None:
    """Requires [num_out] of a compute dtype, or None."""
    if bias is not None and (bias.shape != (num_out,) or bias.dtype not in COMPUTE_DTYPES):
        raise ValueError(f"bias: expected [{num_out}] of a float type, got {described(bias)}")


def check_expert_weights(
    gate_up: Sequence[Tensor | QuantizedWeight], down: Sequence[Tensor | QuantizedWeight]
) -> tuple[int, int]:
    """Checks the arguments of `Ops.pack_experts`. Returns C and F."""
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(f"gate_up, down: expected one weight per expert in each, got {len(gate_up)} and {len(down)}")
    num_in, num_inner = down[0].shape
    for name, weights, shape in (("gate_up", gate_up, (2 * num_inner, num_in)), ("down", down, (num_in, num_inner))):
        for expert, weight in enumerate(weights):
            if weight.shape != shape or _format(weight) != _format(weights[0]):
                raise ValueError(
                    f"{name}[{expert}]: expected {list(shape)} in {_format(weights[0])}, as the first expert's, got "
                    f"{list(weight.shape)} in {_format(weight)}"
                )
    return num_in, num_inner


def _format(weight: Tensor | QuantizedWeight) -> object:
    """Dtype of a tensor, or the key of a quantised format."""
    return weight.dtype if isinstance(weight, Tensor) else weight.stack_key


def check_route(logits: Tensor, k: int, shared: Tensor | None) -> tuple[int, int]:
    """Checks the arguments of `Ops.route`. Returns T and E."""
    rows, columns = logits.shape if logits.dim() == 2 else (0, 0)
    check_rows("logits", logits, columns, logits.dtype, on_host=False)
    if not 1 <= k <= columns:
        raise ValueError(f"k: expected 1 to {columns} experts, got {k}")
    if shared is not None:
        check_rows("shared", shared, 1, logits.dtype, rows, on_host=False)
    return rows, columns


def check_experts(x: Tensor, routes: Routes, experts: PackedExperts, dtype: torch.dtype) -> tuple[int, int, int]:
    """Checks the arguments of `Ops.experts`, not the contents of routes. Returns T, K and x's row stride."""
    rows, stride = check_rows("x", x, experts.num_in, dtype, on_host=False)
    chosen = routes.experts.shape[1] if routes.experts.dim() == 2 else 0
    check_whole("experts", routes.experts, (rows, chosen), torch.int32)
    check_whole("weights", routes.weights, (rows, chosen), torch.float32)
    return rows, chosen, stride


def check_rows(
    name: str, x: Tensor, columns: int, dtype: torch.dtype, count: int | None = None, *, on_host: bool = True
) -> tuple[int, int]:
    """Requires [T, columns] of `dtype`, a compute dtype, with dense rows at any stride. Returns T and the row stride.

    count: required T, if given. on_host: also requires CPU memory.
    """
    shape, strides = x.shape, x.stride()
    if (
        len(shape) != 2
        or shape[1] != columns
        or (count is not None and shape[0] != count)
        or x.dtype is not dtype
        or dtype not in COMPUTE_DTYPES
        or (strides[1] != 1 and columns > 1)
        or (on_host and not x.is_cpu)
    ):
        wanted = f"[{'T' if count is None else count}, {columns}]"
        kind = f"{dtype if dtype in COMPUTE_DTYPES else FLOAT_TYPES}{' on the CPU' if on_host else ''}"
        raise ValueError(f"{name}: expected {wanted} {kind} with a dense last dimension, got {described(x)}")
    return shape[0], strides[0]


def check_gate(x: Tensor, gate: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Requires x and gate [T, H, D] of one shape and compute dtype. Returns (token stride, head stride) of x and of
    gate."""
    strides = check_strided_heads("x", x, None)
    if gate.shape != x.shape:
        raise ValueError(f"gate: expected {list(x.shape)} {x.dtype}, got {described(gate)}")
    return strides, check_strided_heads("gate", gate, x.shape[2], x.dtype)


def check_conv(x: Tensor, weight: Tensor, cache: StateCache, rows: StateRows) -> None:
    """Checks the arguments of `Ops.causal_conv`: shapes, dtypes and strides, no contents, and not the layer."""
    _, _, before, channels = cache.conv.shape
    check_rows("x", x, channels, cache.conv.dtype, on_host=False)
    check_whole("weight", weight, (channels, before + 1), x.dtype)
    if not cache.conv.is_contiguous():
        raise ValueError(f"cache: expected contiguous [N, L, K - 1, C], got {described(cache.conv)}")
    check_state_rows(rows)


def check_delta(inputs: DeltaInputs, cache: StateCache, rows: StateRows) -> None:
    """Checks the arguments of `Ops.delta_rule`: shapes, dtypes and strides, no contents, and not the layer."""
    q, k, v, a, b, rates, shift = inputs
    _, _, heads, key_dim, value_dim = cache.recurrent.shape
    if cache.recurrent.dtype is not torch.float32 or not cache.recurrent.is_contiguous():
        raise ValueError(f"cache: expected contiguous [N, L, Hv, Dk, Dv] float32, got {described(cache.recurrent)}")
    tokens = q.shape[0]
    if q.dim() != 3 or not q.shape[1] or heads % q.shape[1]:
        raise ValueError(f"q: expected [T, Hk, {key_dim}] with Hk a divisor of {heads}, got {described(q)}")
    check_heads("q", q, (tokens, q.shape[1], key_dim), v.dtype)
    check_heads("k", k, (tokens, q.shape[1], key_dim), v.dtype)
    check_heads("v", v, (tokens, heads, value_dim), v.dtype)
    for name, gate in (("a", a), ("b", b)):
        check_rows(name, gate, heads, v.dtype, tokens, on_host=False)
    for name, vector in (("rates", rates), ("shift", shift)):
        check_whole(name, vector, (heads,), torch.float32)
    check_state_rows(rows)


def check_state_rows(rows: StateRows) -> None:
    """Requires contiguous int64 vectors of B entries, B + 1 in `cu_q`."""
    count = rows.starts.shape[0]
    for vector, length in (
        (rows.cu_q, count + 1),
        (rows.starts, count),
        (rows.read_slots, count),
        (rows.write_slots, count),
    ):
        check_indices("rows", vector, length)
