"""What vision towers are made of: patches with a class token and positions, pre-norm layers, mergers of patches; and
whole towers for pictures of one size.

Names of weights are parameters, because the towers differ in little else. Does not know how a user's picture became
pictures of this size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Rotary, Segments
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers.attention import PackedAttention
from hydra_engine.models.layers.basic import GatedMlp, LayerNorm, Mlp, RmsNorm, Weight
from hydra_engine.models.layers.pixels import PatchProjection
from hydra_engine.models.layers.vision_packing import Packing, TowerInput
from hydra_engine.models.layers.vision_slices import Slices
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import PreprocessSpec


class PatchShape(NamedTuple):
    side: int  # patches in a row and in a column of a picture
    patch_size: int  # pixels
    num_channels: int
    bias: bool


class PatchNames(NamedTuple):
    """`patch` is a convolution. `leading`: how many dimensions of 1 class token and positions begin with."""

    patch: str = "patch_embedding"
    class_token: str = "class_embedding"
    positions: str = "position_embedding.weight"
    leading: tuple[int, int] = (0, 0)


class PatchEmbeddings:
    """Normalised patches through one matrix, the class token before them, positions added."""

    def __init__(
        self, scope: Scope, shape: PatchShape, preprocess: PreprocessSpec, names: PatchNames | None = None
    ) -> None:
        names = names or PatchNames()
        size, patch = shape.num_channels, shape.patch_size
        self._shape = shape
        self.num_patches = shape.side**2  # of a picture
        class_ones, position_ones = ((1,) * count for count in names.leading)
        self._class = Weight(scope, names.class_token, (*class_ones, size))
        self._positions = Weight(scope, names.positions, (*position_ones, self.num_patches + 1, size))
        self._project = PatchProjection(scope.at(names.patch), size, (patch, patch), preprocess, bias=shape.bias)
        self.num_values = self._project.num_values

    def __call__(self, patches: Tensor, slices: Slices) -> Tensor:
        """What `cut` gives -> [I * rows per picture, C]"""
        size = self._shape.num_channels
        positions = self._positions.tensor.view(-1, size)
        projected = slices.rows(self._project, patches).view(-1, self.num_patches, size)
        rows = projected.new_empty((projected.shape[0], *positions.shape))  # [I, 1 + patches, C]
        rows[:, 0] = self._class.tensor.view(size) + positions[0]
        torch.add(projected, positions[1:], out=rows[:, 1:])
        return rows.view(-1, size)

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 [I, height, width, 3] -> uint8 [I * patches, patch * patch * 3]; pixels beyond the last whole patch are
        dropped, as a convolution does."""
        side, patch = self._shape.side, self._shape.patch_size
        whole = pixels[:, : side * patch, : side * patch].unflatten(1, (side, patch)).unflatten(3, (side, patch))
        return whole.transpose(2, 3).reshape(-1, patch * patch * 3)


class LayerShape(NamedTuple):
    num_channels: int
    num_heads: int
    intermediate_size: int
    act: str
    eps: float
    rms_norms: bool = False  # instead of layer norms
    qkv_bias: bool = True
    qk_norm: bool = False
    gated: bool = False  # the MLP


class LayerNames(NamedTuple):
    """`scales` multiply what attention and MLP add to the rows (layer scale; CaiT, section 2.1). A gated MLP has names
    of its own."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    scales: tuple[str, str] | None = None


CLIP_NAMES = LayerNames()


class VisionLayer:
    """x + attention(norm(x)), and then x + mlp(norm(x))."""

    def __init__(self, scope: Scope, shape: LayerShape, names: LayerNames = CLIP_NAMES) -> None:
        size, inner, act = shape.num_channels, shape.intermediate_size, shape.act
        norm = RmsNorm if shape.rms_norms else LayerNorm
        attention_scale, mlp_scale = names.scales or (None, None)
        self._norm1 = norm(scope.at(names.norms[0]), size, shape.eps)
        self._attention = PackedAttention(
            scope,
            size,
            shape.num_heads,
            qkv=tuple(f"{names.attention}.{name}" for name in names.qkv),
            out=f"{names.attention}.{names.out}",
            qkv_bias=shape.qkv_bias,
            qk_norm=(f"{names.attention}.q_norm", f"{names.attention}.k_norm") if shape.qk_norm else None,
            out_scale=attention_scale,
        )
        self._norm2 = norm(scope.at(names.norms[1]), size, shape.eps)
        self._mlp: GatedMlp | Mlp
        if shape.gated:
            self._mlp = GatedMlp(scope.at("mlp"), size, inner, act, bias=True)
        else:
            self._mlp = Mlp(scope, names.mlp, size, inner, size, act, scale=mlp_scale)

    def __call__(self, x: Tensor, cu_seqlens: Segments, slices: Slices, rotary: Rotary | None = None) -> Tensor:
        """[P, C] -> new memory; `x` may be a state that is still wanted. In as many pieces as `slices` wants; all that
        is not attention goes row by row."""
        projected = slices.rows(lambda rows: self._attention.project(self._norm1(rows)), x)
        mixed = self._attention.mix(projected, cu_seqlens, rotary, slices)
        return slices.rows(self._behind_mix, mixed, x)

    def _behind_mix(self, mixed: Tensor, residual: Tensor) -> Tensor:
        x = self._attention.out(mixed, residual)
        return self._mlp(self._norm2(x), residual=x)


class PatchMerger:
    """The rows of one token, side by side, through an MLP; the norm is of each row, or, `norm_merged`, of all of
    them."""

    def __init__(self, norm: LayerNorm | RmsNorm, mlp: Mlp, width: int, *, norm_merged: bool) -> None:
        self._norm, self._mlp, self._width, self._norm_merged = norm, mlp, width, norm_merged

    def __call__(self, x: Tensor) -> Tensor:
        """[P, C], the rows of a token behind one another -> [P * C / width, C of the decoder]"""
        if self._norm_merged:
            return self._mlp(self._norm(x.view(-1, self._width)))
        return self._mlp(self._norm(x).view(-1, self._width))


class SquareTower:
    """A tower for pictures of one size, each with a class token, up to the last hidden state that is read.

    `feature_layers` are the states that are read, 0 being the embeddings; `norms` stand before the layers and behind
    them.
    """

    def __init__(
        self,
        embed: PatchEmbeddings,
        layers: Sequence[VisionLayer],
        norms: tuple[LayerNorm | None, LayerNorm | None],
        feature_layers: tuple[int, ...],
        *,
        keep_cls: bool = False,
    ) -> None:
        self.embed, self.keep_cls = embed, keep_cls
        self._layers, self._feature_layers = layers, feature_layers
        self._pre_norm, self._post_norm = norms
        self.num_slices = len(layers) + 2  # what comes before the layers, the layers, what comes behind

    def __call__(self, inputs: TowerInput) -> Tensor:
        """Pictures, each a segment -> [I, rows per picture, C * feature layers]"""
        slices, (cu_seqlens,) = inputs.slices, inputs.segments
        state = self.embed(inputs.patches, slices)  # [I * rows, C]
        if self._pre_norm is not None:
            state = self._pre_norm(state)
        states = {0: state} if 0 in self._feature_layers else {}
        for index, layer in enumerate(slices.between(self._layers), start=1):
            state = layer(state, cu_seqlens, slices)
            if index in self._feature_layers:
                states[index] = state
        if len(self._feature_layers) > 1:
            state = torch.cat([states[index] for index in self._feature_layers], dim=1)
        if self._post_norm is not None:
            state = self._post_norm(state)
        features = state.view(-1, self.embed.num_patches + 1, state.shape[1])
        return features if self.keep_cls else features[:, 1:]


class SquareVision:
    """`Vision` of `vlm.py` but for the call, for towers that take pictures of one size."""

    def __init__(self, tower: SquareTower, num_features: int) -> None:
        """`num_features` of one picture."""
        self._tower, self._num_features = tower, num_features
        self.granule, self.num_values, self.num_slices = (
            tower.embed.num_patches,
            tower.embed.num_values,
            tower.num_slices,
        )

    def reserve(self, room: int) -> None:
        """Nothing that they read depends on a room."""

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        count = sum(pictures.shape[0] for pictures in batch.pixels)
        if room:
            if count * self.granule > room:
                return None
            count = room // self.granule
        num_rows = self.granule + 1
        bounds = np.arange(count + 1) * num_rows
        return Packing(count * self.granule, count * self._num_features, (), (bounds,), (num_rows,))

    def cut(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return [self._tower.embed.cut(pictures) for pictures in pixels]
