"""The InternViT tower up to the hidden state that is read: uint8 tiles in, hidden states of their patches out.

Layer scale is multiplied into the weights of the projections before it. Does not know the projector or caches.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.layers import LayerNorm
from hydra_engine.models.parameters import Scope
from hydra_engine.models.vision_layers import (
    LayerNames,
    LayerShape,
    PatchEmbeddings,
    PatchNames,
    PatchShape,
    VisionLayer,
)
from hydra_engine.models.vision_packing import Squares, TowerInput
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.internvl import InternVitSpec

_PATCHES = PatchNames("patch_embeddings.projection", "cls_token", "position_embeddings", leading=(2, 1))
_LAYER = LayerNames(
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    out="projection_layer",
    scales=("lambda_1", "lambda_2"),
)


class InternVit:
    def __init__(self, scope: Scope, spec: InternVitSpec, preprocess: PreprocessSpec) -> None:
        size = spec.hidden_size
        self._num_patches = spec.num_patches
        patches = PatchShape(spec.grid_side, spec.patch_size, size, bias=True)
        self._embed = PatchEmbeddings(scope.at("embeddings"), patches, preprocess, _PATCHES)
        shape = LayerShape(
            size,
            spec.num_heads,
            spec.intermediate_size,
            cast(Activation, spec.hidden_act),
            spec.norm_eps,
            rms_norms=spec.rms_norms,
            qkv_bias=spec.qkv_bias,
            qk_norm=spec.qk_norm,
        )
        layers = range(spec.feature_layer)
        self._layers = tuple(VisionLayer(scope.at(f"encoder.layer.{i}"), shape, _LAYER) for i in layers)
        self._norm = LayerNorm(scope.at("layernorm"), size, spec.norm_eps) if spec.final_norm else None
        unread = range(spec.feature_layer, spec.num_layers)
        scope.skip("embeddings.mask_token", *(f"encoder.layer.{i}." for i in unread))
        if self._norm is None:
            scope.skip("layernorm.")

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, what comes behind."""
        return len(self._layers) + 2

    @property
    def squares(self) -> Squares:
        return Squares(self._num_patches, self._num_patches + 1, self._num_patches, self._embed.num_values)

    def cut(self, pixels: Tensor) -> Tensor:
        """As `PatchEmbeddings.cut`."""
        return self._embed.cut(pixels)

    def __call__(self, inputs: TowerInput) -> Tensor:
        """Tiles, each a segment -> [I, patches, C] without class tokens"""
        (cu_seqlens,) = inputs.segments
        state = self._embed(inputs.patches, inputs.slices)  # [I * rows, C]
        for layer in inputs.slices.between(self._layers):
            state = layer(state, cu_seqlens, inputs.slices)
        if self._norm is not None:
            state = self._norm(state)
        return state.view(-1, self.squares.num_rows, state.shape[1])[:, 1:]
