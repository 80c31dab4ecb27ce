"""The ops in plain torch with float32 accumulation: the oracle of the tests, and the fallback without the extension.

Written to be read; `Ops` (backend/base.py) says what an op computes. Rows are computed in tiles of fixed shape, padded
at the end: torch's matrix product always sees the same shape, so a row's result does not depend on the other rows of
the call. Fused ops are sequences of plain ones (`ComposedOps`), also for implementations that gain nothing from fusing
them. Does not know threads, memory layouts of weights or any processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import (
    Activation,
    AttentionPlan,
    Decode,
    DeferredNorm,
    DeltaInputs,
    HeadNorms,
    MixedRows,
    OpChoice,
    Ops,
    PackedExperts,
    PackedLinear,
    PackedPlan,
    PagedCache,
    Rotary,
    Routes,
    RowNorm,
    Segments,
    StateCache,
    StateRows,
    apply_deferred_norm,
)
from hydra_engine.backend.quantized import QuantizedWeight, float8_product, reference_product
from hydra_engine.backend.reference import delta_rule
from hydra_engine.backend.reference import experts as composed
from hydra_engine.backend.reference.delta_rule import by_vectors
from hydra_engine.backend.reference.sampling import adjust_logits, best_tokens, sample, score_tokens


def concat_linear(
    linear: Callable[[Tensor, PackedLinear], Tensor], x: Tensor, weights: Sequence[PackedLinear]
) -> Tensor:
    """Returns linear(x, weight) of all weights, concatenated along outputs: [T, sum of num_out]."""
    if len(weights) == 1:
        return linear(x, weights[0])
    return torch.cat([linear(x, part) for part in weights], dim=1)


class ComposedOps:
    """A base class that computes the fused ops of `Ops` by its plain ones, and `pixel_rows` in torch."""

    width_step = 1

    def pixel_rows(self: Ops, pixels: Tensor, table: Tensor, width: int) -> Tensor:
        rows = table.gather(0, pixels.reshape(-1, 3).to(torch.int64)).view(pixels.shape)
        return rows if width == pixels.shape[1] else F.pad(rows, (0, width - pixels.shape[1]))

    def linear_add_rms_norm(
        self: Ops, x: Tensor, linear: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        return self.add_rms_norm(self.linear(x, linear), residual, weight, eps)

    def linear_add_norm(
        self: Ops, x: Tensor, linear: PackedLinear, residual: Tensor, norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        total = self.linear(x, linear, residual=residual)
        if norm.bias is None:
            return self.rms_norm(total, norm.weight, norm.eps), total
        return self.layer_norm(total, norm.weight, norm.bias, norm.eps), total

    def linear_act_and_mul(
        self: Ops, x: Tensor | DeferredNorm, weights: Sequence[PackedLinear], act: Activation
    ) -> Tensor:
        return self.act_and_mul(concat_linear(self.linear, apply_deferred_norm(self, x), weights), act)

    def linear_rope_and_write(
        self: Ops,
        x: Tensor | DeferredNorm,
        weights: Sequence[PackedLinear],
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        num_kv_heads, dim = cache.data.shape[4:]
        rows = concat_linear(self.linear, apply_deferred_norm(self, x), weights)
        num_heads = rows.shape[1] // dim
        # Instead of unflatten and split, whose Python takes longer than the views.
        heads = rows.view(rows.shape[0], num_heads, dim)
        q, k, v = heads.split_with_sizes((num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        return self.rope_and_write(q, k, v, rotary, cache, layer, slots, norms)


_QUERY_TILE = 32
_KEY_TILE = 128  # keys per step of the running softmax, aligned to position 0


def causal(q: Tensor, keys: Tensor, values: Tensor, first_position: int, scale: float) -> Tensor:
    """Causal attention of one request by a running softmax over key tiles: [Q, Hq, D] float32.

    q: [Q, Hq, D], query i at position first_position + i; keys, values: [Hkv, context, D] float32. A tile that is
    masked for a query leaves its result unchanged, bit for bit (weights 0, rescaling factor 1), so queries may share a
    call with others that attend to more keys.
    """
    num_queries, num_heads, dim = q.shape
    group = num_heads // keys.shape[0]
    out = torch.empty(num_queries, num_heads, dim)
    for begin, end in tiles(num_queries, _QUERY_TILE):
        tile = padded(q[begin:end].float(), _QUERY_TILE).transpose(0, 1).contiguous()
        position = torch.arange(begin, begin + _QUERY_TILE)[:, None] + first_position
        top = torch.full((num_heads, _QUERY_TILE, 1), float("-inf"))
        total = torch.zeros(num_heads, _QUERY_TILE, 1)
        sums = torch.zeros(num_heads, _QUERY_TILE, dim)
        for first, last in tiles(first_position + end, _KEY_TILE):
            key, value = (
                F.pad(x[:, first:last], (0, 0, 0, _KEY_TILE - (last - first))).repeat_interleave(group, dim=0)
                for x in (keys, values)
            )
            scores = torch.bmm(tile, key.transpose(1, 2)) * scale
            scores.masked_fill_(torch.arange(first, first + _KEY_TILE) > position, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = by_vectors(torch.exp, scores - new_top)
            shrink = by_vectors(torch.exp, top - new_top)
            total = total * shrink + weights.sum(-1, keepdim=True)
            sums = sums * shrink + torch.bmm(weights, value)
            top = new_top
        out[begin:end] = (sums / total).transpose(0, 1)[: end - begin]
    return out


def tiles(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of tiles of `size` in `count` rows; the last one may be shorter."""
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def padded(rows: Tensor, count: int) -> Tensor:
    """Copies `rows` as float32 to new memory of `count` rows, zero-padded, so that torch always gets one shape and one
    alignment."""
    padded = torch.zeros((count, *rows.shape[1:]), dtype=torch.float32)
    padded[: rows.shape[0]] = rows
    return padded


ALL_OPS = (
    "linear",
    "route",
    "experts",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "act_and_mul",
    "rotate",
    "gated_rms_norm",
    "sigmoid_mul",
    "causal_conv",
    "delta_rule",
    "write_cache",
    "rope_and_write",
    "merge_image_tokens",
    "gather_cache",
    "copy_blocks",
    "attention_paged",
    "attention_packed",
)

_PADDED = "padded"  # `native` of plans and state rows of steps with padding tokens after the last row
_LINEAR_ROWS = 32  # rows per matrix product


class QuantizedLinear:
    """A `PackedLinear` with a quantised weight, unchanged, and the bias in float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        checks.check_bias(bias, weight.num_out)
        self.num_out, self.num_in = weight.shape
        self.weight = weight
        self.bias = None if bias is None else bias.detach().float()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PlainLinear:
    """A `PackedLinear` with weight [num_out, K] and bias, contiguous in `dtype`; tensors that already are so are not
    copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        checks.check_linear(weight, bias)
        self.num_out, self.num_in = weight.shape
        self.weight = weight.detach().to(dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(dtype).contiguous()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ReferenceOps(ComposedOps):
    """`Ops` of backend/base.py in plain torch. reason: why these ops were chosen, for `choices`."""

    name = "reference"
    deterministic = True

    best_tokens = staticmethod(best_tokens)
    sample = staticmethod(sample)
    adjust_logits = staticmethod(adjust_logits)
    score_tokens = staticmethod(score_tokens)

    def __init__(self, reason: str = "plain torch in float32, for reading and for checking") -> None:
        self._reason = reason

    def choices(self) -> tuple[OpChoice, ...]:
        return tuple(OpChoice(op, "reference", self._reason) for op in ALL_OPS)

    def record_decode(self, decode: Decode) -> Decode:
        return decode

    # ---- linear algebra

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
    ) -> PackedLinear:
        """Widens floats to float32 whatever `rows`, twice the size of 16-bit ones; keeps quantised weights as given."""
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias)
        return PlainLinear(weight, bias, torch.float32)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(weight, PlainLinear | QuantizedLinear)
        checks.check_rows("x", x, weight.num_in, x.dtype)
        out = torch.empty((x.shape[0], weight.num_out), dtype=out_dtype or x.dtype)
        if residual is not None:
            checks.check_rows("residual", residual, weight.num_out, out.dtype, x.shape[0])
        for begin, end in tiles(x.shape[0], _LINEAR_ROWS):
            tile = padded(x[begin:end], _LINEAR_ROWS)
            if isinstance(weight, QuantizedLinear):
                multiply = float8_product if weight.weight.is_float else reference_product
                product = multiply(tile, weight.weight)
            else:
                product = tile @ weight.weight.T
            if weight.bias is not None:
                product += weight.bias
            result = activation(product, act)[: end - begin]
            out[begin:end] = result if residual is None else result + residual[begin:end]
        return out

    # ---- mixtures of experts

    def pack_experts(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        rows: torch.dtype | None = None,
    ) -> PackedExperts:
        checks.check_expert_weights(gate_up, down)
        packed = ([self.pack_linear(weight, rows=rows) for weight in weights] for weights in (gate_up, down))
        return composed.LinearExperts(*packed)

    def route(self, logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None = None) -> Routes:
        return composed.route(logits, k, renormalise=renormalise, shared=shared)

    def experts(self, x: Tensor, routes: Routes, experts: PackedExperts, act: Activation) -> Tensor:
        assert isinstance(experts, composed.LinearExperts)
        return composed.experts(self, x, routes, experts, act)

    # ---- element-wise and norms

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() == 3:
            checks.check_strided_heads("x", x, weight.shape[0])
            return self.rms_norm(x.flatten(0, 1), weight, eps).view(x.shape)
        checks.check_rows("x", x, weight.shape[0], x.dtype)
        wide_weight = checks.check_norm_weight(weight, x)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if wide_weight:
            return (normed * weight).to(x.dtype)
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        checks.check_rows("residual", residual, weight.shape[0], x.dtype, x.shape[0])
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        checks.check_rows("x", x, weight.shape[0], weight.dtype)
        return F.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps).to(x.dtype)

    def act_and_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        checks.check_rows("gate_up", gate_up, gate_up.shape[-1], gate_up.dtype)
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate_up: expected [T, 2 * F], got {checks.described(gate_up)}")
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate.float(), act).to(gate_up.dtype) * up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        checks.check_rotate(x, cos, sin)
        return _rotated(x, cos, sin)

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        checks.check_gate(x, gate)
        checks.check_norm_weight(weight, x, wide=False)
        return (self.rms_norm(x, weight, eps).float() * activation(gate.float(), "silu")).to(x.dtype)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        checks.check_gate(x, gate)
        return (x.float() * by_vectors(torch.sigmoid, gate.float())).to(x.dtype)

    # ---- recurrent states

    def plan_states(self, rows: StateRows) -> StateRows:
        return rows

    def plan_decode_states(self, starts: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateRows:
        """Keeps the tensors; each op that uses the result reads their contents."""
        return StateRows(torch.arange(starts.shape[0] + 1), starts, read_slots, write_slots)

    def plan_mixed_states(self, rows: StateRows, num_tokens: int) -> StateRows:
        """Keeps the tensors; each op that uses the result reads their contents."""
        checks.check_state_rows(rows)
        return replace(rows, native=_PADDED)

    def causal_conv(self, x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        checks.check_conv(x, weight, cache, rows)
        _check_places(rows, x.shape[0], cache.conv, layer)
        return delta_rule.causal_conv(x, weight, cache, layer, rows)

    def delta_rule(self, inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        checks.check_delta(inputs, cache, rows)
        _check_places(rows, inputs.v.shape[0], cache.recurrent, layer)
        return delta_rule.delta_rule(inputs, cache, layer, rows)

    # ---- caches

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        checks.check_write(cache, layer, rows, slots)
        _write(cache, layer, rows, slots)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        checks.check_rope(q, k, v, rotary, cache, layer, slots)
        if norms is not None:
            checks.check_head_norms(norms, q.shape[2], q.dtype)
            q = q if norms.q is None else self.rms_norm(q, norms.q, norms.eps)
            k = k if norms.k is None else self.rms_norm(k, norms.k, norms.eps)
        # Keys of a quantized cache stay float32 until they are rounded to integers.
        _write(cache, layer, (_rotated(k.float() if cache.scales is not None else k, *rotary), v), slots)
        return _rotated(q, *rotary)

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        checks.check_merge(hidden, rows, cache, slots, plane)
        _check_slots(slots, cache)
        _check_range("rows", rows, hidden.shape[0])
        kept = slots >= 0
        rows = rows[kept]
        block, offset = _split(slots[kept], cache)
        features = cache.data[block, plane, 0, offset].reshape(len(rows), hidden.shape[1])
        hidden[rows] = hidden[rows] + features if plane else features

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        checks.check_plane(cache, layer, index)
        checks.check_indices("slots", slots)
        _check_slots(slots, cache)
        kept = slots >= 0
        block, offset = _split(slots[kept], cache)
        rows = cache.data[block, layer, index, offset]
        if cache.scales is not None:
            rows = (rows.float() * cache.scales[block, layer, index, :, offset][..., None]).to(cache.row_dtype)
        gathered = rows.new_empty((len(slots), *rows.shape[1:]))
        gathered[kept] = rows
        return gathered

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        checks.check_copy(source, target, pairs)
        _check_range("pairs[:, 0]", pairs[:, 0], source.num_blocks)
        _check_range("pairs[:, 1]", pairs[:, 1], target.num_blocks)
        target.data[pairs[:, 1]] = source.data[pairs[:, 0]]
        if source.scales is not None and target.scales is not None:
            target.scales[pairs[:, 1]] = source.scales[pairs[:, 0]]

    # ---- attention

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        max_q, max_context = checks.check_plan(cu_q, num_context, block_tables)
        return AttentionPlan(cu_q, num_context, block_tables, max_q, max_context)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Keeps the tensors; each op that uses the plan reads their contents. `max_context` is 0: not known yet."""
        batch, _ = checks.check_decode_plan(num_context, block_tables)
        cu_q = torch.arange(batch + 1, dtype=torch.int32)
        return AttentionPlan(cu_q, num_context, block_tables, max_q=1, max_context=0)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        """Keeps the tensors; each op that uses the plan reads their contents."""
        checks.check_mixed_plan(rows, num_tokens)
        return AttentionPlan(rows.cu_q, rows.num_context, rows.block_tables, num_tokens, 0, native=_PADDED)

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        checks.check_paged(q, cache, layer, plan.block_tables.shape[1], plan.max_context)
        bounds = plan.cu_q.tolist()
        if bounds[-1] != q.shape[0] and plan.native != _PADDED:
            raise ValueError(f"q: expected {bounds[-1]} tokens as cu_q says, got {q.shape[0]}")
        out = torch.empty(q.shape, dtype=q.dtype)
        for row, num_context in enumerate(plan.num_context.tolist()):
            begin, end = bounds[row], bounds[row + 1]
            if begin == end:
                continue
            blocks = plan.block_tables[row, : -(-num_context // cache.block_size)].long()
            _check_range("block_tables", blocks, cache.num_blocks)
            keys, values = (_wide(cache, blocks, layer, x)[:num_context].transpose(0, 1) for x in (0, 1))
            out[begin:end] = causal(q[begin:end], keys, values, num_context - (end - begin), scale)
        return out

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Keeps the tensor; each op that uses the plan reads its contents."""
        checks.check_packed_plan(cu_seqlens, max_length)
        return PackedPlan(cu_seqlens, max_length)

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        bounds = cu_seqlens.cu_seqlens.tolist() if isinstance(cu_seqlens, PackedPlan) else cu_seqlens
        checks.check_packed(q, k, v, bounds)
        out = torch.empty(q.shape, dtype=q.dtype)
        for begin, end in pairwise(bounds):
            wide_q, wide_k, wide_v = (x[begin:end].float().transpose(0, 1).contiguous() for x in (q, k, v))
            for head in range(q.shape[1]):
                weights = torch.softmax(wide_q[head] @ wide_k[head].T * scale, dim=-1)
                out[begin:end, head] = weights @ wide_v[head]
        return out


def activation(x: Tensor, act: Activation) -> Tensor:
    """Applies `act` element-wise to x, which callers give in float32: the result has its dtype, and is x for "none".

    silu: x * sigmoid(x); gelu: x * Phi(x); gelu_tanh: its tanh approximation; quick_gelu: x * sigmoid(1.702 x). Raises
    ValueError for another `act`.
    """
    match act:
        case "none":
            return x
        case "silu":
            return by_vectors(F.silu, x)
        case "gelu":
            return by_vectors(F.gelu, x)
        case "gelu_tanh":
            return by_vectors(partial(F.gelu, approximate="tanh"), x)
        case "quick_gelu":
            return x * by_vectors(torch.sigmoid, 1.702 * x)
        case _:
            raise ValueError(f"act: expected none, silu, gelu, gelu_tanh or quick_gelu, got {act!r}")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Ops.rotate`, without checks."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows [T, H, D] for a quantized cache. Returns (int8 [T, H, D], scales [T, H] float32).

    scale = max(max |x| / 127, 2^-126) of a token's head, int8 = round(x / scale), ties to even. A head with an infinity
    or a NaN gets zeros and a NaN as its scale.
    """
    wide = rows.float()
    finite = wide.isfinite().all(-1)
    scales = (wide.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    integers = torch.round(wide / scales[..., None])
    zeroed = torch.where(finite[..., None], integers, torch.zeros(()))
    return zeroed.to(torch.int8), torch.where(finite, scales, torch.full((), torch.nan))


def _write(cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
    """`Ops.write_cache` for checked shapes. A wrong slot raises ValueError before anything is written. Rows of a
    quantized cache may be wider than its `row_dtype`."""
    _check_slots(slots, cache)
    kept = slots >= 0
    block, offset = _split(slots[kept], cache)
    for x, source in enumerate(rows):
        if cache.scales is None:
            cache.data[block, layer, x, offset] = source[kept]
        else:
            integers, scales = quantized(source[kept])
            cache.data[block, layer, x, offset] = integers
            cache.scales[block, layer, x, :, offset] = scales


def _wide(cache: PagedCache, blocks: Tensor, layer: int, tensor: int) -> Tensor:
    """Returns one tensor (K 0, V 1) of the blocks of a KV cache in float32, dequantised if need be: [len(blocks) * S,
    Hkv, D]. blocks: [n] int64."""
    rows = cache.data[blocks, layer, tensor].float()
    if cache.scales is not None:
        rows = rows * cache.scales[blocks, layer, tensor].transpose(1, 2)[..., None]
    return rows.flatten(0, 1)


def _split(slots: Tensor, cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Returns (block, offset in the block) of each slot."""
    size = cache.block_size
    return torch.div(slots, size, rounding_mode="floor"), slots % size


def _check_slots(slots: Tensor, cache: PagedCache) -> None:
    """Requires slots of the cache or -1. Raises ValueError."""
    _check_range("slots", slots, cache.num_blocks * cache.block_size, least=-1)


def _check_range(name: str, indices: Tensor, size: int, least: int = 0) -> None:
    """Requires indices from `least` to `size` - 1. Raises ValueError that names `name`."""
    if indices.numel() and (int(indices.min()) < least or int(indices.max()) >= size):
        raise ValueError(
            f"{name}: expected {least} to {size - 1}, got values from {int(indices.min())} to {int(indices.max())}"
        )


def _check_places(rows: StateRows, tokens: int, states: Tensor, layer: int) -> None:
    """Requires that `layer` and the rows' slots exist in states [N, L, ..] (a write slot may be -1), and that `cu_q`
    rises from 0 to `tokens`. Raises ValueError."""
    places, layers = states.shape[:2]
    if not 0 <= layer < layers:
        raise ValueError(f"layer: expected 0 to {layers - 1}, got {layer}")
    bounds = rows.cu_q.tolist()
    if rows.native == _PADDED and bounds[-1] <= tokens:
        tokens = bounds[-1]
    if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"rows: expected cu_q to rise from 0 to {tokens}, got {bounds[:8]}")
    _check_range("rows", rows.read_slots, places)
    _check_range("rows", rows.write_slots, places, least=-1)
