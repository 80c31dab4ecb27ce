"""Qwen2.5-VL: most layers of the tower attend within square windows of a picture, a few within the whole of it.

Rows are put in the order of windows before the first layer, token by token, and back behind the merger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.attention import PackedAttention, Rotary
from hydra_engine.models.family import Family
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers import GatedMlp, RmsNorm
from hydra_engine.models.parameters import Scope
from hydra_engine.models.qwen2_vl import EPS, QWEN_RENAMES
from hydra_engine.models.qwen_merger import PatchMerger
from hydra_engine.models.qwen_patches import Grid, PatchEmbedding, PatchRotary, patch_places, segments
from hydra_engine.models.vision_layers import run_layer
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.qwen2_vl import Qwen2VisionSpec, QwenTower


class Windows(NamedTuple):
    order: Tensor  # [tokens] int64: which token comes at each place, windows one after another
    cu_seqlens: list[int]  # of the windows, in patches


class Qwen25Vision:
    """Every span is a picture or a temporal patch of a video; nothing beyond it is attended to."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, Qwen2VisionSpec)
        self._tower, geometry, scope = spec.tower, spec.geometry, scope.at("visual")
        size = self._tower.hidden_size
        self._merge, self._device = geometry.merge_size, scope.device
        self._embed = PatchEmbedding(scope.at("patch_embed"), geometry, size, spec.preprocess, bias=False)
        self._rotary = PatchRotary(self._tower.head_dim, self._tower.rope_theta, scope.device)
        self._blocks = tuple(Qwen25Block(scope.at(f"blocks.{i}"), self._tower) for i in range(self._tower.num_layers))
        merger = scope.at("merger")
        norm = RmsNorm(merger.at("ln_q"), size, EPS)
        self._merger = PatchMerger(merger, norm, size, geometry.patches_per_token, spec.feature_size)

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, the merger."""
        return len(self._blocks) + 2

    def __call__(self, batch: VisionInput) -> tuple[Tensor, ...]:
        slices = Slices(batch.checkpoint, batch.piece_rows)
        merged = self._merge**2
        places = patch_places(batch.grids, self._merge, self._device)  # [2, P]
        windows = cut_windows(places[:, ::merged] // self._merge, batch.grids, self._merge, self._tower.window_tokens)
        places = places.view(2, -1, merged).index_select(1, windows.order).view(2, -1)
        rotary = self._rotary(places, max(max(grid) for grid in batch.grids))
        whole = segments(batch.grids)
        embedded = self._embed(batch.pixels, slices)  # [P, C]
        x = embedded.view(-1, merged, embedded.shape[1]).index_select(0, windows.order).view(embedded.shape)
        for index, block in enumerate(slices.between(self._blocks)):
            x = block(x, whole if index in self._tower.full_layers else windows.cu_seqlens, rotary, slices)
        features = slices.rows(self._merger, x, group=merged)
        return (torch.empty_like(features).index_copy_(0, windows.order, features),)


class Qwen25Block:
    def __init__(self, scope: Scope, tower: QwenTower) -> None:
        size = tower.hidden_size
        self._norm1 = RmsNorm(scope.at("norm1"), size, EPS)
        self._attention = PackedAttention(scope.at("attn"), size, tower.num_heads, qkv=("qkv",), out="proj")
        self._norm2 = RmsNorm(scope.at("norm2"), size, EPS)
        act = cast(Activation, tower.hidden_act)
        self._mlp = GatedMlp(scope.at("mlp"), size, tower.intermediate_size, act, bias=True)

    def __call__(self, x: Tensor, cu_seqlens: Sequence[int], rotary: Rotary, slices: Slices) -> Tensor:
        return run_layer(x, self._norm1, self._attention, self._add_mlp, cu_seqlens, rotary, slices)

    def _add_mlp(self, x: Tensor) -> Tensor:
        return self._mlp(self._norm2(x), residual=x)


def cut_windows(tokens: Tensor, grids: Sequence[Grid], merge: int, side: int) -> Windows:
    """Windows of `side` by `side` tokens from the upper left corner of every picture; those at its right and lower
    edges are smaller. `tokens` [2, tokens] int64: row and column of every token in its picture, pictures packed."""
    sizes = torch.tensor([(rows // merge, columns // merge) for _, rows, columns in grids], device=tokens.device)
    across = -(-sizes // side)  # [items, 2] windows down and across
    firsts = torch.cumsum(across.prod(1), 0) - across.prod(1)  # number of the first window of each picture
    counts = sizes.prod(1)
    rows, columns = (tokens // side).unbind(0)
    number = firsts.repeat_interleave(counts) + rows * across[:, 1].repeat_interleave(counts) + columns
    ends = torch.bincount(number).cumsum(0) * merge**2
    return Windows(torch.argsort(number, stable=True), [0, *ends.tolist()])


QWEN2_5_VL = Family(Qwen25Vision, vision_names=("visual.",), renames=QWEN_RENAMES)
