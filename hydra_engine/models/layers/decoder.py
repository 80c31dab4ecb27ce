"""The Llama decoder (also mistral, qwen2, qwen3, qwen3_moe) and qwen3_5's hybrid one: tokens and image features in,
float32 logits of the wanted rows out.

A layer mixes tokens by causal attention over the paged cache. In qwen3_5_text most layers are gated delta nets, which
keep one state per request instead of keys and values; the others are attention with a gate per output and rotary
positions for part of a head. The backend's `rope_and_write` rotates pairs (i, i + D/2) of whole heads. Heads of queries
and keys are therefore permuted at load so that rotated pairs are D/2 apart; all other pairs rotate by angle 0. Scalar
products do not depend on the order.

Cosines and sines of positions are read from a table (`RotaryTable`), so that a row's bits do not depend on its batch.
Features in further planes of the image cache are added after the first layers (DeepStack, as in Qwen3-VL). Does not
know requests, sampling, blocks, which rows are decodes or which request has which state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.base import (
    AttentionPlan,
    DeferredNorm,
    DeltaInputs,
    HeadNorms,
    PagedCache,
    Rotary,
    States,
    StepInputs,
    apply_deferred_norm,
)
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.models.layers.basic import Embedding, GatedMlp, Head, Linear, RmsNorm, Weight
from hydra_engine.models.layers.experts import MixtureMlp
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import DeltaShape, LanguageSpec, LayerKind

# A language head computes the logits of this many scored rows at a time; the logits of a long chunk would not fit.
SCORED_ROWS = 256


class Scored(NamedTuple):
    """Rows of a step that need logits besides `logit_rows`. `take` is called during the forward with slices of
    their logits, [<= SCORED_ROWS, V] float32, in the order of `rows`, and must not keep them: all together may not fit
    in memory."""

    rows: Tensor  # [M] int64, M > 0
    take: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class LanguageInput:
    """The inputs of a decoder for a step of T tokens. Tensors are on the decoder's device."""

    token_ids: Tensor  # [T] int64; any value at image rows
    # [T] int64 (1-D rotary) or [3, T] (multimodal rotary: time, row, column; alike where a row takes no image feature)
    positions: Tensor
    slots: Tensor  # [T] int64, KV-cache slot of each token
    attention: AttentionPlan
    logit_rows: Tensor  # [B'] int64, rows whose logits are wanted
    position_end: int  # more than the largest of `positions`
    image_rows: Tensor | None = None  # [M] int64, rows that take image features
    image_slots: Tensor | None = None  # [M] int64, their slots in the image cache
    states: States | None = None  # for models whose layers keep some
    scored: Scored | None = None


class PagedAttention:
    """Causal attention over a paged KV cache, without its output projection `out`, which the caller applies. `layer` is
    its index among the layers with keys and values."""

    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops = scope.ops
        self._layer = layer
        self._width = spec.num_heads * spec.head_dim
        self._scale = spec.head_dim**-0.5
        query, key_value = self._width, spec.num_kv_heads * spec.head_dim
        parts, arrange = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}, None
        if spec.grouped_qkv:
            parts, arrange = {"wqkv": query + 2 * key_value}, partial(_ungrouped, spec.num_kv_heads, spec.head_dim)
        self._qkv = Linear(scope, parts, spec.hidden_size, bias=spec.attention_bias, arrange=arrange)
        self.out = Linear(scope, {"o_proj": spec.hidden_size}, self._width, bias=spec.output_bias)
        self._eps = spec.rms_eps
        self._q_norm = Weight(scope, "q_norm.weight", (spec.head_dim,)) if spec.qk_norm else None
        self._k_norm = Weight(scope, "k_norm.weight", (spec.head_dim,)) if spec.qk_norm else None

    def __call__(
        self, x: Tensor | DeferredNorm, rotary: Rotary, cache: PagedCache, step: StepInputs, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the input of `out`, [T, Hq * D], or only the given rows of it. Writes the rotated keys and the values
        of all rows to the cache. x: [T, C]."""
        norms = None
        if self._q_norm is not None and self._k_norm is not None:
            norms = HeadNorms(self._q_norm.tensor, self._k_norm.tensor, self._eps)
        slots = step.slots
        q = self._ops.linear_rope_and_write(x, self._qkv.packed, rotary, cache, self._layer, slots, norms)  # [T, Hq, D]
        if rows is not None and not rows.shape[0]:
            return q[:0].view(0, self._width)
        mixed = self._ops.attention_paged(q, cache, self._layer, step.attention, self._scale).view(-1, self._width)
        return mixed if rows is None else mixed.index_select(0, rows)


def _ungrouped(num_kv_heads: int, head_dim: int, parts: list[Tensor]) -> Tensor:
    """Reorders the outputs of the one part, of each key-value head its query heads, its key and its value, to all
    queries, all keys and all values."""
    heads = parts[0].unflatten(0, (num_kv_heads, -1, head_dim))  # [Hkv, Hq / Hkv + 2, D, ..]
    return torch.cat([heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])


class DeltaNet:
    """A gated delta net (linear attention with one recurrent state per request), without its output projection `out`,
    which the caller applies. `layer` is its index among the delta-net layers."""

    def __init__(self, scope: Scope, shape: DeltaShape, hidden_size: int, eps: float, layer: int) -> None:
        self._ops, self._shape, self._eps, self._layer = scope.ops, shape, eps, layer
        heads = shape.num_value_heads
        parts = {
            "in_proj_qkv": shape.num_channels,
            "in_proj_z": shape.value_width,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        self._cuts = list(parts.values())
        self._in = Linear(scope, parts, hidden_size, bias=False)
        self._taps = Weight(scope, "conv1d.weight", (shape.num_channels, 1, shape.num_taps))
        self._rates = Weight(scope, "A_log", (heads,), dtype=torch.float32)
        self._shift = Weight(scope, "dt_bias", (heads,), dtype=torch.float32)
        self._norm = Weight(scope, "norm.weight", (shape.value_dim,))
        self.out = Linear(scope, {"out_proj": hidden_size}, shape.value_width, bias=False)

    def __call__(
        self, x: Tensor | DeferredNorm, rotary: Rotary, cache: PagedCache, step: StepInputs, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the input of `out`, [T, Hv * Dv], or only the given rows of it; advances the states of the step's
        requests by all T tokens. x: [T, C]. Ignores `rotary` and `cache`, which attention layers need. Raises
        ValueError if the step has no states."""
        if step.states is None:
            raise ValueError("states: expected the states of the step's rows, which this model's layers keep")
        shape, ops, states = self._shape, self._ops, step.states
        qkv, z, b, a = self._in(apply_deferred_norm(ops, x)).split(self._cuts, dim=1)
        mixed = ops.causal_conv(qkv, self._taps.tensor.squeeze(1), states.cache, self._layer, states.rows)
        q, k, v = mixed.split((shape.key_width, shape.key_width, shape.value_width), dim=1)
        inputs = DeltaInputs(
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            a,
            b,
            self._rates.tensor,
            self._shift.tensor,
        )
        out = ops.delta_rule(inputs, states.cache, self._layer, states.rows)  # [T, Hv, Dv]
        gate = z.unflatten(1, (-1, shape.value_dim))
        mixed = ops.gated_rms_norm(out, self._norm.tensor, gate, self._eps).flatten(1)
        return mixed if rows is None else mixed.index_select(0, rows)


class GatedAttention:
    """Causal attention with normed queries and keys and a sigmoid gate per output, without its output projection `out`,
    which the caller applies. `layer` is its index among the layers with keys and values."""

    def __init__(self, scope: Scope, spec: LanguageSpec, layer: int) -> None:
        self._ops, self._layer, self._head_dim, self._eps = scope.ops, layer, spec.head_dim, spec.rms_eps
        self._scale = spec.head_dim**-0.5
        width, key_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
        self._order = paired_order(spec.head_dim, spec.rotary_dim or spec.head_dim).to(scope.device)
        outputs = {"q_proj": 2 * width, "k_proj": key_width, "v_proj": key_width}
        self._qkv = Linear(scope, outputs, spec.hidden_size, bias=spec.attention_bias, arrange=self._arranged)
        self._q_norm, self._k_norm = (
            Weight(scope, f"{name}.weight", (spec.head_dim,), dtype=torch.float32, transform=self._from_difference)
            for name in ("q_norm", "k_norm")
        )
        self.out = Linear(scope, {"o_proj": spec.hidden_size}, width, bias=spec.output_bias)

    def __call__(
        self, x: Tensor | DeferredNorm, rotary: Rotary, cache: PagedCache, step: StepInputs, rows: Tensor | None = None
    ) -> Tensor:
        """Returns the input of `out`, [T, Hq * D], or only the given rows of it. Writes the rotated keys and the values
        of all rows to the cache. x: [T, C]."""
        ops = self._ops
        projected = self._qkv(apply_deferred_norm(ops, x)).unflatten(1, (-1, self._head_dim))
        q, k, v, gate = projected.split(self._heads, dim=1)
        q, k = ops.rms_norm(q, self._q_norm.tensor, self._eps), ops.rms_norm(k, self._k_norm.tensor, self._eps)
        q = ops.rope_and_write(q, k, v, rotary, cache, self._layer, step.slots)
        if rows is not None and not rows.shape[0]:
            return q[:0].flatten(1)
        mixed = ops.attention_paged(q, cache, self._layer, step.attention, self._scale)
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return ops.sigmoid_mul(mixed, gate).flatten(1)

    def _arranged(self, parts: list[Tensor]) -> Tensor:
        """Joins the outputs of q_proj, k_proj and v_proj as queries, keys, values and gates: the checkpoint stores each
        head's gate after its query. Heads of queries and keys are permuted to `_order`."""
        q, k, v = (part.unflatten(0, (-1, self._head_dim)) for part in parts)
        pairs = q.unflatten(0, (-1, 2))
        q, gate = pairs[:, 0], pairs[:, 1]
        return torch.cat([part.flatten(0, 1) for part in (q[:, self._order], k[:, self._order], v, gate)])

    def _from_difference(self, weight: Tensor) -> Tensor:
        """Adds 1 (the checkpoint stores weight - 1) and permutes to `_order`."""
        return (1.0 + weight)[self._order]


def paired_order(head_dim: int, rotary_dim: int) -> Tensor:
    """Permutation of a head's columns, [D] int64, that moves the rotated pairs (i, i + rotary_dim / 2) to the first
    rotary_dim / 2 columns of both halves: D/2 apart."""
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    turning, still = torch.arange(head_dim).split((rotary_dim, head_dim - rotary_dim))
    return torch.cat((turning[:half], still[:rest], turning[half:], still[rest:]))


class Decoder:
    """A decoder with its embedding and head. `scope` is the module that contains `model.*` and `lm_head.*`."""

    def __init__(self, scope: Scope, spec: LanguageSpec) -> None:
        self._ops = scope.ops
        self._max_token_id = spec.vocab_size - 1
        model = scope.child("model")
        self._head = Head(scope)
        shape, tied, head = (spec.vocab_size, spec.hidden_size), spec.tie_embeddings, "lm_head.weight"
        self._embed = Embedding(
            model.child("embed_tokens"),
            *shape,
            tied_head=self._head if tied else None,
            substitute=scope.full_name(head) if tied else None,
        )
        # If the config says "tied" but the files contain a head, the head counts, as in transformers 5.
        fill = self._fill_tied_head if tied else self._head.fill
        scope.declare(head, shape, fill, optional=tied, fill_quantized=fill, matrix=True)
        self._layers = tuple(_layers(model, spec))
        # The norm after each layer's sum: the next layer's, or the final one.
        final_norm = RmsNorm(model.child("norm"), spec.hidden_size, spec.rms_eps, centred=spec.centred_norms)
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), final_norm)
        self._rotary = RotaryTable(spec, scope.device)
        self._decodes = scope.ops.record_decode(self._decode)
        model.skip("rotary_emb.", *(f"layers.{i}.self_attn.rotary_emb." for i in range(spec.num_layers)))

    def _fill_tied_head(self, weight: Tensor | QuantizedWeight) -> None:
        """Fills the head. If the embedding is not filled yet, the checkpoint stores the shared tensor only under the
        head's name: then fills both."""
        if self._embed.is_filled:
            self._head.fill(weight)
        else:
            self._embed.fill(weight)

    def __call__(self, batch: LanguageInput, cache: PagedCache, images: PagedCache | None) -> Tensor:
        """Returns the logits of `batch.logit_rows`, [B', V] float32, valid until the next call. Writes keys, values and
        states of all tokens, and calls `batch.scored.take` before it returns. A step of decodes that wants as many rows
        as it has must list them in order. Raises ValueError if image rows lack their slots or an image cache, or delta
        nets their states."""
        wanted, step = batch.logit_rows, StepInputs(batch.slots, batch.attention, batch.states)
        plain = batch.scored is None and batch.image_rows is None
        if plain and batch.attention.max_q == 1 and wanted.shape == batch.slots.shape:
            positions = batch.positions if batch.positions.dim() == 1 else batch.positions[0]
            angles = self._rotary.with_rows(batch.position_end)
            return self._decodes(batch.token_ids, positions, angles, cache, step)
        rotary = self._rotary(batch.positions, batch.position_end)
        hidden, num_deep = self._embed_rows(batch, images), _num_deep(batch, images)
        if batch.scored is not None:
            wanted = torch.cat((batch.scored.rows, wanted))

        def merge(layer: int, residual: Tensor) -> None:
            if layer < num_deep:
                self._merge(residual, batch, images, plane=layer + 1)

        hidden = self._run(hidden, rotary, cache, step, wanted, merge)
        if batch.scored is not None:
            num_scored = batch.scored.rows.shape[0]
            for part in hidden[:num_scored].split(SCORED_ROWS):
                batch.scored.take(self._head(part))
            hidden = hidden[num_scored:]
        return self._head(hidden)

    def _decode(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, step: StepInputs
    ) -> Tensor:
        """Computes the logits [T, V] of a step of decodes. Passed to `Ops.record_decode`, so it has the signature of
        `Decode` and calls only what that can record. angles: the whole rotary table, which `positions` index."""
        return self._head(self._run(self._embed(token_ids), angles_at(angles, positions), cache, step))

    def _run(
        self,
        residual: Tensor,  # [T, C], overwritten
        rotary: Rotary,
        cache: PagedCache,
        step: StepInputs,
        wanted: Tensor | None = None,
        merge: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Runs the layers and the final norm. Returns [T, C], or only the `wanted` rows of it; the last layer computes
        no others after its keys and values. merge(index, residual) is called in each layer and may add to `residual`
        in place, which adds to the layer's output."""
        hidden: Tensor | DeferredNorm = self._layers[0].input_norm(residual)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = wanted if index == last else None
            mixed = layer.mix(hidden, rotary, cache, step, rows)
            if rows is not None:
                residual = residual.index_select(0, rows)
            hidden, residual = layer.post_norm.after_linear(layer.mix.out, mixed, residual)
            inner = layer.mlp.inner(hidden)
            if merge is not None:  # `hidden` is already consumed, so its sum may change
                merge(index, residual)
            hidden, residual = layer.mlp.finish(self._next_norms[index], inner, residual)
        return apply_deferred_norm(self._ops, hidden)

    def reserve_positions(self, end: int) -> None:
        """Grows the rotary table to positions below `end` and keeps its memory for graphs captured with it."""
        self._rotary.reserve(end)

    def _embed_rows(self, batch: LanguageInput, images: PagedCache | None) -> Tensor:
        """Returns the embeddings of all tokens, new [T, C], with image features at image rows."""
        if batch.image_rows is None:
            return self._embed(batch.token_ids)
        # Ids of image rows may lie outside the vocabulary; their embeddings are overwritten.
        hidden = self._embed(batch.token_ids.clamp(0, self._max_token_id))
        self._merge(hidden, batch, images, plane=0)
        return hidden

    def _merge(self, hidden: Tensor, batch: LanguageInput, images: PagedCache | None, *, plane: int) -> None:
        """Writes features of plane 0 over the image rows of `hidden` [T, C]; adds features of other planes to them.
        Raises ValueError without image rows, their slots or an image cache."""
        if images is None or batch.image_rows is None or batch.image_slots is None:
            raise ValueError("image_rows: expected their slots and an image cache to read from")
        self._ops.merge_image_tokens(hidden, batch.image_rows, images, batch.image_slots, plane)


def _num_deep(batch: LanguageInput, images: PagedCache | None) -> int:
    """Number of first layers to whose outputs DeepStack features are added in this step; 0 without image rows. Models
    have more layers, since the last one may drop rows."""
    return 0 if images is None or batch.image_rows is None else images.data.shape[1] - 1


def _layers(model: Scope, spec: LanguageSpec) -> Iterator[DecoderLayer]:
    """Builds the layers in order; the index that a layer gets counts layers of its kind."""
    counts: dict[LayerKind, int] = {"attention": 0, "delta": 0}
    for index, scope in enumerate(model.children("layers", spec.num_layers, "num_hidden_layers")):
        kind: LayerKind = spec.layer_kinds[index] if spec.layer_kinds else "attention"
        yield DecoderLayer(scope, spec, kind, counts[kind], is_mixture=index in spec.mixture_layers)
        counts[kind] += 1


class DecoderLayer:
    """The parts of one layer, which `Decoder` calls. `index` counts layers of its kind."""

    def __init__(self, scope: Scope, spec: LanguageSpec, kind: LayerKind, index: int, *, is_mixture: bool) -> None:
        size, eps, centred = spec.hidden_size, spec.rms_eps, spec.centred_norms
        self.input_norm = RmsNorm(scope.child("input_layernorm"), size, eps, centred=centred)
        # [T, C] -> the input of its `out`, or only the given rows of it. Caches are written for all rows in any case.
        self.mix: PagedAttention | GatedAttention | DeltaNet
        if kind == "attention":
            attention = GatedAttention if spec.output_gate else PagedAttention
            self.mix = attention(scope.child("self_attn"), spec, index)
        else:
            assert spec.delta is not None
            self.mix = DeltaNet(scope.child("linear_attn"), spec.delta, size, eps, index)
        self.post_norm = RmsNorm(scope.child("post_attention_layernorm"), size, eps, centred=centred)
        self.mlp: GatedMlp | MixtureMlp
        if is_mixture:
            assert spec.mixture is not None
            self.mlp = MixtureMlp(scope.child("mlp"), size, spec.mixture, spec.hidden_act)
        else:
            self.mlp = GatedMlp(scope.child("mlp"), size, spec.intermediate_size, spec.hidden_act)


# ---- rotary positions

_TABLE_ROWS = 4096


class GrowingTable(ABC):
    """A table with one row per position that grows on demand. Not thread-safe: for one lane. Subclasses call `__init__`
    last, since it makes the first rows."""

    def __init__(self) -> None:
        self._rows = self._rows_from(0)
        # The first table is kept: it was made outside the lane that reads it, so a device could reuse its memory while
        # the lane still reads.
        self._reserved = [self._rows]

    @abstractmethod
    def _rows_from(self, begin: int) -> Tensor:
        """Makes a fixed number of rows from position `begin` on: their bits do not depend on how the table grew."""

    def with_rows(self, end: int) -> Tensor:
        """Returns the table with at least `end` rows. If it must grow, it is copied to a new address."""
        while end > self._rows.shape[0]:
            self._rows = torch.cat((self._rows, self._rows_from(self._rows.shape[0])))
        return self._rows

    def reserve(self, end: int) -> None:
        """Grows the table to at least `end` rows and keeps it alive when it grows again later: graphs captured with its
        address stay valid."""
        rows = self.with_rows(end)
        if not any(kept is rows for kept in self._reserved):
            self._reserved.append(rows)


class RotaryTable(GrowingTable):
    """The cosines and sines of a decoder: [multiple of _TABLE_ROWS, D] float32, cosines in the first half of the
    columns, both multiplied by the config's `attention_factor` if set. Pairs beyond `rotary_dim` have cos 1, sin 0."""

    def __init__(self, spec: LanguageSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec)
        self._factor = _number(spec, "attention_factor") if "attention_factor" in spec.rope_parameters else 1.0
        self._device = device
        self._axes = None if spec.rope_sections is None else _axes(spec).to(device)  # [D/2]: axis of each pair
        self._still = (spec.head_dim - (spec.rotary_dim or spec.head_dim)) // 2  # pairs that are not rotated
        super().__init__()

    def __call__(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [T, D/2] float32. `positions` is [T] int64, or [3, T] if the model has multimodal
        axes; `end` is larger than any of them."""
        table = self.with_rows(end)
        if self._axes is None:
            return angles_at(table, positions)
        rows = positions.index_select(0, self._axes).t()  # [T, D/2]
        cos_table, sin_table = table.chunk(2, dim=1)
        return cos_table.gather(0, rows), sin_table.gather(0, rows)

    def _rows_from(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _TABLE_ROWS, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        still = cos.new_zeros(_TABLE_ROWS, self._still)
        return torch.cat((cos, still + 1, sin, still), dim=1).to(self._device)


def angles_at(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), each [T, D/2], of the rows of a `RotaryTable` at positions [T] that are alike on all axes."""
    cos, sin = table.index_select(0, positions).chunk(2, dim=1)
    return cos, sin


def _axes(spec: LanguageSpec) -> Tensor:
    """Axis of `positions` that rotates each pair, [D/2] int64; 0 for pairs that are not rotated."""
    still = spec.head_dim // 2 - len(spec.rope_axes)
    return torch.tensor((*spec.rope_axes, *[0] * still))


def frequencies(spec: LanguageSpec) -> Tensor:
    """Inverse frequencies of the rotated pairs, [rotary_dim / 2] float32, scaled as the config's `rope_type` says, with
    the arithmetic of transformers. Raises ValueError for an unknown type, KeyError for a missing parameter of the
    type."""
    dim = spec.rotary_dim or spec.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (spec.rope_theta**exponents)
    match spec.rope_parameters.get("rope_type", "default"):
        case "default":
            return plain
        case "linear":
            return plain / _number(spec, "factor")
        case "llama3":
            low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
            turns = _number(spec, "original_max_position_embeddings") * plain / (2 * math.pi)
            # 0: less than `low` turns in the original context, slowed down by the factor; 1: more than `high`, kept.
            share = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - share) * plain / _number(spec, "factor") + share * plain
        case "yarn":
            kept = 1 - _yarn_ramp(spec)
            slowed = 1.0 / (_number(spec, "factor") * spec.rope_theta**exponents)
            return slowed * (1 - kept) + plain * kept
        case kind:
            raise ValueError(f"rope_type: expected default, linear, llama3 or yarn, got {kind!r}")


def _yarn_ramp(spec: LanguageSpec) -> Tensor:
    """YaRN's ramp over the pairs, [rotary_dim / 2] float32: 0 for pairs that turn more than beta_fast times in the
    original context, 1 for pairs that turn less than beta_slow times, linear in between. With `truncate` these limits
    are whole pairs."""
    length, base = _number(spec, "original_max_position_embeddings"), spec.rope_theta
    dim = spec.rotary_dim or spec.head_dim

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(_number(spec, "beta_fast")), pair(_number(spec, "beta_slow"))
    if spec.rope_parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def _number(spec: LanguageSpec, name: str) -> float:
    """The number rope_parameters[name]. Raises KeyError if it is missing."""
    value = spec.rope_parameters[name]
    assert isinstance(value, int | float), name
    return value
