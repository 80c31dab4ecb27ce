"""The CLIP vision tower up to the last hidden state that is read: uint8 pictures in, hidden states out.

Layers that nobody reads are neither loaded nor computed. Does not know the projector or caches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.layers import LayerNorm
from hydra_engine.models.parameters import Scope
from hydra_engine.models.vision_layers import LayerShape, PatchEmbeddings, PatchShape, VisionLayer
from hydra_engine.models.vision_packing import Squares, TowerInput
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.clip import ClipSpec


class ClipTower:
    def __init__(self, scope: Scope, spec: ClipSpec, preprocess: PreprocessSpec) -> None:
        self._spec = spec
        patches = PatchShape(spec.grid_side, spec.patch_size, spec.hidden_size, bias=False)
        self._embed = PatchEmbeddings(scope.at("embeddings"), patches, preprocess)
        # The misspelling is the checkpoints'.
        self._pre_norm = LayerNorm(scope.at("pre_layrnorm"), spec.hidden_size, spec.layer_norm_eps)
        act = cast(Activation, spec.hidden_act)
        shape = LayerShape(spec.hidden_size, spec.num_heads, spec.intermediate_size, act, spec.layer_norm_eps)
        self._layers = tuple(VisionLayer(scope.at(f"encoder.layers.{i}"), shape) for i in range(spec.num_active_layers))
        unread = range(spec.num_active_layers, spec.num_layers)
        scope.skip("post_layernorm.", "embeddings.position_ids", *(f"encoder.layers.{i}." for i in unread))

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, what comes behind."""
        return len(self._layers) + 2

    @property
    def squares(self) -> Squares:
        spec = self._spec
        return Squares(spec.num_patches, spec.num_patches + 1, spec.num_rows, self._embed.num_values)

    def cut(self, pixels: Tensor) -> Tensor:
        """As `PatchEmbeddings.cut`."""
        return self._embed.cut(pixels)

    def __call__(self, inputs: TowerInput) -> Tensor:
        """Pictures, each a segment -> [I * rows per picture, C * feature layers]"""
        rows, slices, (cu_seqlens,) = self.squares.num_rows, inputs.slices, inputs.segments
        state = self._pre_norm(self._embed(inputs.patches, slices))  # [I * rows, C]
        wanted = self._spec.feature_layers
        states = {0: state} if 0 in wanted else {}
        for index, layer in enumerate(slices.between(self._layers), start=1):
            state = layer(state, cu_seqlens, slices)
            if index in wanted:
                states[index] = state
        features = state if len(wanted) == 1 else torch.cat([states[index] for index in wanted], dim=1)
        if self._spec.keep_cls:
            return features
        return features.view(-1, rows, features.shape[1])[:, 1:].reshape(-1, features.shape[1])
