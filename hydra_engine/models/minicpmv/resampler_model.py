"""MiniCPM-V 2.6: pictures of any size packed into one pass through a SigLIP tower, and a resampler, whose learned
queries attend to the patches of each picture. Does not know prompts, slices or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PackedLinear, Segments
from hydra_engine.core.plans import Int64s
from hydra_engine.models.layers.basic import LayerNorm, Linear, Weight
from hydra_engine.models.layers.vision import (
    NUM_FILLERS,
    Grid,
    LayerNames,
    Packing,
    PatchProjection,
    Slices,
    TowerInput,
    VisionInput,
    VisionLayer,
    cumulative_lengths,
    cut_in_merge_order,
    link_norms,
    sizes_of,
    spans_in,
)
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.minicpmv.resampler_spec import HEAD_DIM, ResampledVisionSpec

NORM_EPS = 1e-6  # of the resampler's norms, independent of the config


class ResampledVision:
    """MiniCPM-V 2.6's tower and resampler; every span is one picture: the whole, or a slice."""

    weight_names = ("vision_tower.", "resampler.")
    renames = (
        ("llm.model.", "language_model.model."),
        ("llm.lm_head.", "language_model.lm_head."),
        ("vpm.", "vision_tower."),
        ("resampler.proj", "resampler.proj.weight"),
        ("resampler.attn.in_proj_weight", "resampler.attn.in_proj.weight"),
        ("resampler.attn.in_proj_bias", "resampler.attn.in_proj.bias"),
    )

    def __init__(self, scope: Scope, spec: ResampledVisionSpec) -> None:
        self._spec = spec
        tower = scope.child("vision_tower")
        size, patch = spec.tower.hidden_size, (spec.patch_size, spec.patch_size)
        embeddings = tower.child("embeddings")
        self._positions = Weight(embeddings, "position_embedding.weight", (spec.num_positions**2, size))
        self._embed = PatchProjection(embeddings, "patch_embedding", size, patch, spec.preprocess)
        places = tower.children("encoder.layers", spec.tower.num_layers, "num_hidden_layers")
        self._layers = link_norms([VisionLayer(place, spec.tower, LayerNames()) for place in places])
        self._norm = LayerNorm(tower.child("post_layernorm"), size, spec.tower.norm_eps)
        self._resampler = Resampler(scope.child("resampler"), spec)
        # A padded batch has as many queries as patches, so its pictures have at least as many patches as queries.
        self.granule, self.num_values = spec.num_queries, self._embed.num_values
        self.num_slices = len(self._layers) + 3  # the work before the layers, the layers, attention, the work after it

    def reserve(self, capacity: int) -> None:
        """Does nothing: calls read no tables that depend on the capacity."""

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        """Packs a batch. `indices`: positions of the patches, their columns and rows, the patch and the query of every
        row of the resampler's attention, and the rows that are tokens. `bounds`: pictures, of the tower and of the
        resampler. None if it does not fit, or if a picture of a padded batch has fewer patches than queries."""
        queries = self._spec.num_queries
        sizes = sizes_of(batch.grids)
        left = capacity - sum(sizes) if capacity else 0
        if capacity and (left < 0 or min(sizes, default=queries) < queries):
            return None
        copies = [-(-queries // length) for length in sizes]
        if left:
            sizes, copies = [*sizes, left], [*copies, 1]
        most = spans_in(capacity, queries) if capacity else 0
        pictures = cumulative_lengths(sizes, most)
        segments = cumulative_lengths(np.repeat(sizes, copies), most)
        if pictures is None or segments is None:
            return None
        begins = np.cumsum([0, *np.multiply(sizes, copies)])[: len(batch.grids)]
        tokens = (begins[:, None] + np.arange(queries)).ravel()
        num_features = (most - NUM_FILLERS) * queries if capacity else len(tokens)
        indices = (
            *np.concatenate([*map(self._places, batch.grids), np.zeros((3, left), dtype=np.int64)], axis=1),
            *_attention_rows(sizes, copies, queries),
            np.concatenate([tokens, np.zeros(num_features - len(tokens), dtype=np.int64)]),
        )
        longest = capacity or max(sizes)
        return Packing(sum(sizes), num_features, indices, (pictures, segments), (longest, longest))

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        cut_in_merge_order(pixels, patches, self._spec.patch_size, ())

    def _places(self, grid: Grid) -> Int64s:
        """Returns of each patch of a picture the row of the position table, its column and its row, [3, P]."""
        _, rows, columns = grid
        side = self._spec.num_positions
        row, column = np.divmod(np.arange(rows * columns), columns)
        place = fractional_positions(rows, side)[row] * side + fractional_positions(columns, side)[column]
        return np.stack([place, column, row])

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        places, columns, rows, attended, queries, tokens = inputs.indices
        slices, (pictures, segments) = inputs.slices, inputs.segments
        x = slices.rows(self._embed, inputs.patches, self._positions.tensor.index_select(0, places))
        normed = None
        for layer in slices.with_checkpoints(self._layers):
            x, normed = layer(x, pictures, slices, normed=normed)
        keys, values = slices.row_pairs(self._keys_and_values, x, columns, rows)
        keys, values = keys.index_select(0, attended), values.index_select(0, attended)
        mixed = self._resampler.mix(keys, values, queries, segments, slices)
        slices.checkpoint()
        return (slices.rows(self._resampler.finish, mixed.index_select(0, tokens)),)

    def _keys_and_values(self, x: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._resampler.keys_and_values(self._norm(x), columns, rows)


def _attention_rows(sizes: Sequence[int], copies: Sequence[int], num_queries: int) -> tuple[Int64s, Int64s]:
    """Returns (patch, query) of every row of the resampler's attention. Attention has as many queries as keys, so a
    picture with more patches than queries repeats its last query, and one with fewer is attended to in several
    copies. Of a tower's work for a picture of 1024 patches the repeated queries add a hundredth."""
    patches, queries, begin = [], [], 0
    for length, count in zip(sizes, copies, strict=True):
        rows = np.arange(length * count)
        patches.append(begin + rows % length)
        queries.append(np.minimum(rows, num_queries - 1))
        begin += length
    return np.concatenate(patches), np.concatenate(queries)


@lru_cache(maxsize=512)
def fractional_positions(length: int, num_positions: int) -> Int64s:
    """Position of each of `length` patches along a side. Fractions are multiples of a step in float32, as in the
    published model, because the last bit decides ties."""
    bounds = torch.arange(1 / num_positions, 1.0, 1 / num_positions)
    fractions = torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(length)))
    positions: Int64s = torch.bucketize(fractions, bounds, right=True).numpy()
    return positions


class Resampler:
    """Learned queries attend to the patches of a picture; keys have the patches' places added, values do not."""

    def __init__(self, scope: Scope, spec: ResampledVisionSpec) -> None:
        width = spec.feature_size
        self._num_heads = spec.num_heads
        self._ops = scope.ops
        self._queries = Weight(scope, "query", (spec.num_queries, width))
        self._project = Linear(scope, {"kv_proj": width}, spec.tower.hidden_size, bias=False) if spec.projects else None
        self._norm_queries, self._norm_keys, self._norm_out = (
            LayerNorm(scope.child(name), width, NORM_EPS) for name in ("ln_q", "ln_kv", "ln_post")
        )
        attention = scope.child("attn")
        self._in = InProjections(attention.child("in_proj"), width)
        self._out = Linear(attention, {"out_proj": width}, width, bias=True)
        self._last = Linear(scope, {"proj": width}, width, bias=False, arrange=lambda parts: parts[0].t().contiguous())
        self._sines = sines(spec.images.max_side, width // 2).to(scope.dtype).to(scope.device)

    def keys_and_values(self, x: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the tower's features, [P, C of the tower] -> twice [P, C]."""
        if self._project is not None:
            x = self._project(x)
        x = self._norm_keys(x)
        places = torch.cat([self._sines.index_select(0, columns), self._sines.index_select(0, rows)], dim=1)
        return self._in.key(x + places), self._in.value(x)

    def mix(self, keys: Tensor, values: Tensor, queries: Tensor, segments: Segments, slices: Slices) -> Tensor:
        """Returns attention of the numbered queries to the keys of their segment, [R, C]."""
        found = slices.rows(lambda rows: self._in.query(self._norm_queries(rows)), self._queries.tensor)
        q, k, v = (rows.unflatten(1, (self._num_heads, -1)) for rows in (found.index_select(0, queries), keys, values))
        return slices.attention(self._attend, q, k, v, segments).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments) -> Tensor:
        return self._ops.attention_packed(q, k, v, cu_seqlens, HEAD_DIM**-0.5)

    def finish(self, mixed: Tensor) -> Tensor:
        return self._last(self._norm_out(self._out(mixed)))


class InProjections:
    """The projections of queries, keys and values, which a checkpoint has in one matrix and which take different
    inputs."""

    packed: tuple[PackedLinear, ...]

    def __init__(self, scope: Scope, width: int) -> None:
        self._ops, self._dtype = scope.ops, scope.dtype
        self._arrived: dict[str, Tensor] = {}
        scope.declare("weight", (3 * width, width), partial(self._fill, "weight"), matrix=True)
        scope.declare("bias", (3 * width,), partial(self._fill, "bias"))
        scope.register(self)

    def query(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed[0])

    def key(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed[1])

    def value(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed[2])

    def _fill(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == 2:
            parts = zip(self._arrived.pop("weight").chunk(3), self._arrived.pop("bias").chunk(3), strict=True)
            self.packed = tuple(self._ops.pack_linear(weight, bias, self._dtype) for weight, bias in parts)


def sines(length: int, width: int) -> Tensor:
    """Sines, then cosines, of positions 0 to `length` - 1 at falling frequencies, [length, width] float32."""
    frequencies = 1.0 / 10000 ** (np.arange(width // 2, dtype=np.float32) / np.float32(width / 2))
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
