"""The tower of MiniCPM-V 4.6: pictures of any size packed into one pass, 2 x 2 neighbours merged inside and behind it.

The patches of an item stand in merge order from the beginning: what will merge is neighbours on every level, so every
merge is a view. Does not know prompts, slices or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Activation, PackedLinear, PackedPlan, Segments
from hydra_engine.models.attention import PackedAttention
from hydra_engine.models.layers import LayerNorm, Linear, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.models.pixels import PixelNormaliser
from hydra_engine.models.vision_layers import LayerShape, VisionLayer
from hydra_engine.models.vision_packing import Grid, Ints, Packing, TowerInput, bounds_of
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.minicpmv import MiniCpmVisionSpec

MERGER_EPS = 1e-6  # of the norms behind the tower, whatever the config says of the tower's


class MiniCpmTower:
    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        self._spec = spec
        self._embed = PackedPatches(scope.at("embeddings"), spec)
        act = cast(Activation, spec.hidden_act)
        shape = LayerShape(spec.hidden_size, spec.num_heads, spec.intermediate_size, act, spec.layer_norm_eps)
        self._layers = tuple(VisionLayer(scope.at(f"encoder.layers.{i}"), shape) for i in range(spec.num_layers))
        self._merge = None
        if spec.insert_layer is None:
            scope.skip("vit_merger.")
        else:
            self._merge = WindowMerger(scope.at("vit_merger"), spec)
        self._norm = LayerNorm(scope.at("post_layernorm"), spec.hidden_size, spec.layer_norm_eps)

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, a merger between them, what comes behind.
        Those before that merger have four times the rows of the others."""
        return len(self._layers) + 2 + (self._merge is not None)

    @property
    def num_values(self) -> int:
        return self._embed.num_values

    def pack(self, grids: Sequence[Grid], num_segments: int) -> Packing | None:
        """Indices: positions of the patches. Segments, at least `num_segments` of them: pictures, and where the merger
        inside comes what is left of them behind it, and its windows."""
        sizes = [rows * columns for _, rows, columns in grids]
        bounds = bounds_of(sizes, num_segments)
        if bounds is None:
            return None
        num_patches = sum(sizes)
        longest = num_patches if num_segments else max(sizes)
        packing = Packing(
            num_patches,
            num_patches // 4**self._spec.all_rounds,
            (self._embed.places(grids),),
            (bounds,),
            (longest,),
        )
        if self._merge is None:
            return packing
        windows = np.arange(0, num_patches + 1, 4)
        return packing._replace(bounds=(bounds, bounds // 4, windows), longest=(longest, longest // 4, 4))

    def cut(self, pixels: Tensor) -> Tensor:
        """As `PackedPatches.cut`."""
        return self._embed.cut(pixels)

    def __call__(self, inputs: TowerInput) -> Tensor:
        """[rows, C] in merge order; items keep their order."""
        (places,), slices, cu_seqlens = inputs.indices, inputs.slices, inputs.segments[0]
        x = self._embed(inputs.patches, places, slices)
        for index, layer in enumerate(slices.between(self._layers)):
            x = layer(x, cu_seqlens, slices)
            if self._merge is not None and index == self._spec.insert_layer:
                slices.checkpoint()
                _, cu_seqlens, windows = inputs.segments
                x = slices.rows(partial(self._merge, windows=windows), x, group=4)
        return self._norm(x)


class PackedPatches:
    """Normalised patches through one matrix, plus the learned positions nearest to their places."""

    packed: PackedLinear

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        size, patch = spec.hidden_size, spec.patch_size
        self._ops, self._dtype = scope.ops, scope.dtype
        self._patch, self._rounds, self._side = patch, spec.all_rounds, spec.num_positions
        self._normalise = PixelNormaliser(spec.preprocess, scope.device)
        self._positions = Weight(scope, "position_embedding.weight", (spec.num_positions**2, size))
        self._arrived: dict[str, Tensor] = {}
        scope.want("patch_embedding.weight", (size, 3, patch, patch), partial(self._fill, "weight"))
        scope.want("patch_embedding.bias", (size,), partial(self._fill, "bias"))
        scope.hold(self)

    def __call__(self, patches: Tensor, places: Tensor, slices: Slices) -> Tensor:
        """What `cut` gives, and `places` -> [P, C]"""
        return slices.rows(self._project, patches, self._positions.tensor.index_select(0, places))

    def places(self, grids: Sequence[Grid]) -> Ints:
        """[P]: rows of the table of positions."""
        found = [self._places(rows, columns).numpy() for _, rows, columns in grids]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def num_values(self) -> int:
        """Bytes of a patch."""
        return 3 * self._patch**2

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 [1, height, width, 3] -> uint8 [patches, patch * patch * 3]"""
        patch = self._patch
        whole = pixels[0].unflatten(0, (-1, patch)).unflatten(2, (-1, patch)).transpose(1, 2)
        return in_merge_order(whole, self._rounds).view(-1, self.num_values)

    def _project(self, patches: Tensor, positions: Tensor) -> Tensor:
        return self._ops.linear(self._normalise.rows(patches, self._dtype), self.packed, residual=positions)

    def _places(self, rows: int, columns: int) -> Tensor:
        """[patches] int64: rows of the table of positions."""
        row, column = nearest_positions(rows, self._side), nearest_positions(columns, self._side)
        return in_merge_order(row[:, None] * self._side + column, self._rounds)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """[C, 3, patch, patch] -> [C, patch * patch * 3], the order of pixels in memory."""
        self._arrived[name] = tensor
        if len(self._arrived) == 2:
            weight = self._arrived.pop("weight").permute(0, 2, 3, 1)
            self.packed = self._ops.pack_linear(weight.reshape(weight.shape[0], -1), self._arrived.pop("bias"))


def in_merge_order(grid: Tensor, rounds: int) -> Tensor:
    """[rows, columns, ...] -> [rows * columns, ...]: row by row of blocks of 2 ** rounds, and every block cut into
    four quarters, left before right and upper before lower, down to single patches."""
    twos = (2,) * rounds
    levels = grid.unflatten(1, (-1, *twos)).unflatten(0, (-1, *twos))
    pairs = [axis for level in range(rounds + 1) for axis in (level, rounds + 1 + level)]
    rest = range(2 * (rounds + 1), levels.dim())
    return levels.permute(*pairs, *rest).reshape(-1, *grid.shape[2:])


@lru_cache(maxsize=512)
def nearest_positions(length: int, num_positions: int) -> Tensor:
    """[length] int64: which of a side's positions each of `length` patches takes. Fractions of the side are compared
    in float32 as transformers does, because at ties the last bit decides."""
    bounds = torch.arange(1 / num_positions, 1.0, 1 / num_positions)
    return torch.bucketize(torch.arange(length) / length, bounds, right=True)


class WindowMerger:
    """Attention within windows of 2 x 2 rows, then every window becomes one: its mean and what an MLP makes of it."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        size, inner = spec.hidden_size, 4 * spec.intermediate_size
        self._size = size
        self._norm1 = LayerNorm(scope.at("layer_norm1"), size, spec.layer_norm_eps)
        self._attention = PackedAttention(scope.at("self_attn"), size, spec.num_heads)
        self._norm2 = LayerNorm(scope.at("pre_norm"), 4 * size, spec.layer_norm_eps)
        self._first = Linear(scope, {"linear_1": inner}, 4 * size, bias=True)
        self._second = Linear(scope, {"linear_2": size}, inner, bias=True)

    def __call__(self, x: Tensor, windows: Segments) -> Tensor:
        """[P, C] -> [P / 4, C]; there may be more windows than the rows have, unless they are planned."""
        if not isinstance(windows, PackedPlan):
            windows = windows[: x.shape[0] // 4 + 1]
        x = self._attention(self._norm1(x), x, windows)
        one, two, three, four = x.view(-1, 4, self._size).float().unbind(1)
        mean = (((one + two) + three) + four).mul_(0.25).to(x.dtype)
        return self._second(self._first(self._norm2(x.view(-1, 4 * self._size)), "gelu_tanh"), residual=mean)


class Merger:
    """Four rows become one, as often as the checkpoint has MLPs; the last leads to the decoder's width."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        widths = [spec.hidden_size] * (spec.num_rounds - 1) + [spec.feature_size]
        self._steps = tuple(
            MergeMlp(scope.at(f"mlp.{index}"), spec.hidden_size, width) for index, width in enumerate(widths)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[M * 4 ** rounds, C] -> [M, C of the decoder]"""
        for step in self._steps:
            x = step(x)
        return x


class MergeMlp:
    def __init__(self, scope: Scope, num_channels: int, num_out: int) -> None:
        self._width = 4 * num_channels
        self._norm = LayerNorm(scope.at("pre_norm"), self._width, MERGER_EPS)
        self._first = Linear(scope, {"linear_1": self._width}, self._width, bias=True)
        self._second = Linear(scope, {"linear_2": num_out}, self._width, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._second(self._first(self._norm(x.view(-1, self._width)), "gelu"))
