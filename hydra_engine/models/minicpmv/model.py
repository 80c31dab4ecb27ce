"""MiniCPM-V 4.6: pictures of any size packed into one pass through the tower, a 2 x 2 merger inside it and more mergers
after it. Does not know prompts, slices or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PackedPlan, Segments
from hydra_engine.core.plans import Int64s
from hydra_engine.models.layers.basic import LayerNorm, Mlp, Weight
from hydra_engine.models.layers.vision import (
    LayerNames,
    PackedAttention,
    Packing,
    PatchMerger,
    PatchProjection,
    Slices,
    TowerInput,
    VisionInput,
    VisionLayer,
    cut_in_merge_order,
    in_merge_order,
    link_norms,
    no_checkpoint,
    pack_pictures,
)
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.minicpmv.spec import MiniCpmVisionSpec

MERGER_EPS = 1e-6  # of the norms after the tower, independent of the config

_WHOLE = Slices(no_checkpoint)  # windows are computed in the pieces that rows are cut into


class MiniCpmVision:
    """MiniCPM-V's tower and mergers; every span is one picture: the whole, or a slice."""

    weight_names = ("vision_tower.", "merger.")
    # Files have the names that transformers has in memory.
    renames = (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.merger.", "merger."),
    )

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        self._spec = spec
        tower = scope.child("vision_tower")
        size, patch = spec.tower.hidden_size, (spec.patch_size, spec.patch_size)
        embeddings = tower.child("embeddings")
        self._positions = Weight(embeddings, "position_embedding.weight", (spec.num_positions**2, size))
        self._embed = PatchProjection(embeddings, "patch_embedding", size, patch, spec.preprocess)
        places = tower.children("encoder.layers", spec.tower.num_layers, "num_hidden_layers")
        self._layers = [VisionLayer(place, spec.tower, LayerNames()) for place in places]
        behind = 0 if spec.insert_layer is None else spec.insert_layer + 1
        for part in (self._layers[:behind], self._layers[behind:]):
            link_norms(part)
        self._inner: WindowMerger | None = None
        if spec.insert_layer is None:
            tower.skip("vit_merger.")
        else:
            self._inner = WindowMerger(tower.child("vit_merger"), spec)
        self._norm = LayerNorm(tower.child("post_layernorm"), size, spec.tower.norm_eps)
        self._merge = Merger(scope.child("merger"), spec)
        self._merges = (2,) * spec.all_rounds
        self.granule, self.num_values = 4**spec.all_rounds, self._embed.num_values
        # The work before the layers, the layers, a merger between them, the work after them. The layers before that
        # merger have four times the rows of the later ones.
        self.num_slices = len(self._layers) + 2 + (self._inner is not None)

    def reserve(self, capacity: int) -> None:
        """Does nothing: calls read no tables that depend on the capacity."""

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        """Packs a batch. `indices`: positions of the patches. `bounds`: pictures, and with an inner merger also the
        pictures after it, and its windows."""
        fitted = pack_pictures(batch.grids, capacity, 2 ** len(self._merges))
        if fitted is None:
            return None
        grids, packing = fitted
        packing = packing._replace(indices=(np.concatenate([self._places(*grid[1:]) for grid in grids]),))
        if self._inner is None:
            return packing
        (bounds,), (longest,) = packing.bounds, packing.longest
        windows = np.arange(0, packing.num_patches + 1, 4)
        return packing._replace(bounds=(bounds, bounds // 4, windows), longest=(longest, longest // 4, 4))

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        cut_in_merge_order(pixels, patches, self._spec.patch_size, self._merges)

    def _places(self, rows: int, columns: int) -> Int64s:
        """Rows of the position table nearest to the patches of a picture, [P]."""
        side = self._spec.num_positions
        row, column = nearest_positions(rows, side), nearest_positions(columns, side)
        return in_merge_order(row[:, None] * side + column, self._merges).numpy()

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        (places,), slices, cu_seqlens = inputs.indices, inputs.slices, inputs.segments[0]
        x = slices.rows(self._embed, inputs.patches, self._positions.tensor.index_select(0, places))
        normed = None
        for index, layer in enumerate(slices.with_checkpoints(self._layers)):
            x, normed = layer(x, cu_seqlens, slices, normed=normed)
            if self._inner is not None and index == self._spec.insert_layer:
                slices.checkpoint()
                _, cu_seqlens, windows = inputs.segments
                x = slices.rows(partial(self._inner, windows=windows), x, group=4)
        return (slices.rows(self._merge, self._norm(x), group=4**self._spec.num_rounds),)


@lru_cache(maxsize=512)
def nearest_positions(length: int, num_positions: int) -> Tensor:
    """Position of each of `length` patches along a side, [length] int64. Fractions are compared in float32 as in
    transformers, because the last bit decides ties."""
    bounds = torch.arange(1 / num_positions, 1.0, 1 / num_positions)
    return torch.bucketize(torch.arange(length) / length, bounds, right=True)


class WindowMerger:
    """A merger of 2 x 2 windows: attention within each window, then its mean plus an MLP of its four rows."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        size, inner = spec.tower.hidden_size, 4 * spec.tower.intermediate_size
        self._size = size
        self._norm1 = LayerNorm(scope.child("layer_norm1"), size, spec.tower.norm_eps)
        self._attention = PackedAttention(scope.child("self_attn"), size, spec.tower.num_heads)
        self._norm2 = LayerNorm(scope.child("pre_norm"), 4 * size, spec.tower.norm_eps)
        self._mlp = Mlp(scope, ("linear_1", "linear_2"), 4 * size, inner, size, "gelu_tanh")

    def __call__(self, x: Tensor, windows: Segments) -> Tensor:
        """Merges [P, C] to [P / 4, C]. `windows` may have more windows than x has, unless they are planned."""
        if not isinstance(windows, PackedPlan):
            windows = windows[: x.shape[0] // 4 + 1]
        mixed = self._attention.mix(self._attention.project(self._norm1(x)), windows, None, _WHOLE)
        x = self._attention.out(mixed, residual=x)
        first, second, third, fourth = x.view(-1, 4, self._size).float().unbind(1)
        mean = (((first + second) + third) + fourth).mul_(0.25).to(x.dtype)
        return self._mlp(self._norm2(x.view(-1, 4 * self._size)), residual=mean)


class Merger:
    """A chain of 4-to-1 mergers, one per MLP of the checkpoint; the last one has the decoder's width."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        width = 4 * spec.tower.hidden_size
        self._steps = []
        for index, step in enumerate(scope.children("mlp", spec.num_rounds, "merger_times")):
            num_out = spec.feature_size if index == spec.num_rounds - 1 else spec.tower.hidden_size
            norm = LayerNorm(step.child("pre_norm"), width, MERGER_EPS)
            mlp = Mlp(step, ("linear_1", "linear_2"), width, width, num_out, "gelu")
            self._steps.append(PatchMerger(norm, mlp, width, norm_merged=True))

    def __call__(self, x: Tensor) -> Tensor:
        """Merges [M * 4 ** rounds, C] to [M, C of the decoder]."""
        for step in self._steps:
            x = step(x)
        return x
