"""The CLIP vision tower up to the last hidden state that is read: uint8 pictures in, hidden states out.

The picture is normalised here, with the processor's arithmetic, so that one byte per colour travels. Layers that
nobody reads are neither loaded nor computed. Does not know the projector or caches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hydra_engine.backend.base import Activation, PackedLinear
from hydra_engine.models.attention import PackedAttention
from hydra_engine.models.layers import LayerNorm, Linear, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.llava import LlavaVisionSpec


class ClipTower:
    def __init__(self, scope: Scope, spec: LlavaVisionSpec) -> None:
        self._spec = spec
        self._embed = ClipEmbeddings(scope.at("embeddings"), spec)
        # The misspelling is the checkpoints'.
        self._pre_norm = LayerNorm(scope.at("pre_layrnorm"), spec.hidden_size, spec.layer_norm_eps)
        self._layers = tuple(ClipLayer(scope.at(f"encoder.layers.{i}"), spec) for i in range(spec.num_active_layers))
        unread = range(spec.num_active_layers, spec.num_layers)
        scope.skip("post_layernorm.", "embeddings.position_ids", *(f"encoder.layers.{i}." for i in unread))

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [I, height, width, 3] -> [I * num_tokens, C * feature layers]"""
        num_images, rows = pixels.shape[0], self._spec.max_patches_per_image + 1
        cu_seqlens = range(0, num_images * rows + 1, rows)
        state = self._pre_norm(self._embed(pixels))  # [I * rows, C]
        wanted = self._spec.feature_layers
        states = {0: state} if 0 in wanted else {}
        for index, layer in enumerate(self._layers, start=1):
            state = layer(state, cu_seqlens)
            if index in wanted:
                states[index] = state
        features = state if len(wanted) == 1 else torch.cat([states[index] for index in wanted], dim=1)
        if self._spec.keep_cls:
            return features
        return features.view(num_images, rows, -1)[:, 1:].reshape(num_images * (rows - 1), -1)


class ClipEmbeddings:
    """Normalised patches through one matrix, the class token before them, positions added."""

    packed: PackedLinear

    def __init__(self, scope: Scope, spec: LlavaVisionSpec) -> None:
        self._ops = scope.ops
        self._dtype = scope.dtype
        self._side, self._patch = spec.grid_side, spec.patch_size
        self._normalise = PixelNormaliser(spec.preprocess, scope.device)
        num_rows = spec.max_patches_per_image + 1
        self._class = Weight(scope, "class_embedding", (spec.hidden_size,))
        self._positions = Weight(scope, "position_embedding.weight", (num_rows, spec.hidden_size))
        scope.want("patch_embedding.weight", (spec.hidden_size, 3, self._patch, self._patch), self._fill)
        scope.hold(self)

    def __call__(self, pixels: Tensor) -> Tensor:
        num_images, positions = pixels.shape[0], self._positions.tensor
        patches = self._ops.linear(self._patches(pixels), self.packed).view(num_images, -1, positions.shape[1])
        rows = patches.new_empty((num_images, *positions.shape))  # [I, 1 + patches, C]
        rows[:, 0] = self._class.tensor + positions[0]
        torch.add(patches, positions[1:], out=rows[:, 1:])
        return rows.view(-1, positions.shape[1])

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def _patches(self, pixels: Tensor) -> Tensor:
        """[I * patches, patch * patch * 3]; pixels beyond the last whole patch are dropped, as a convolution does."""
        side, patch = self._side, self._patch
        whole = pixels[:, : side * patch, : side * patch].unflatten(1, (side, patch)).unflatten(3, (side, patch))
        flat = whole.transpose(2, 3).reshape(-1, patch * patch, 3)
        return self._normalise(flat).to(self._dtype).view(-1, patch * patch * 3)

    def _fill(self, tensor: Tensor) -> None:
        """[C, 3, patch, patch] -> [C, patch * patch * 3], the order of pixels in memory."""
        self.packed = self._ops.pack_linear(tensor.permute(0, 2, 3, 1).reshape(tensor.shape[0], -1))


class PixelNormaliser:
    """(x * rescale - mean) / std in float32, the product rounded once, exactly as transformers' processors do."""

    def __init__(self, spec: PreprocessSpec, device: torch.device) -> None:
        self._rescale = spec.rescale
        self._mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        self._std = torch.tensor(spec.std, dtype=torch.float32, device=device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [..., 3] -> float32"""
        return pixels.to(torch.float64).mul_(self._rescale).to(torch.float32).sub_(self._mean).div_(self._std)


class ClipLayer:
    def __init__(self, scope: Scope, spec: LlavaVisionSpec) -> None:
        size = spec.hidden_size
        self._norm1 = LayerNorm(scope.at("layer_norm1"), size, spec.layer_norm_eps)
        self._attention = PackedAttention(scope.at("self_attn"), size, spec.num_heads)
        self._norm2 = LayerNorm(scope.at("layer_norm2"), size, spec.layer_norm_eps)
        self._fc1 = Linear(scope, {"mlp.fc1": spec.intermediate_size}, size, bias=True)
        self._fc2 = Linear(scope, {"mlp.fc2": size}, spec.intermediate_size, bias=True)
        self._act = cast(Activation, spec.hidden_act)

    def __call__(self, x: Tensor, cu_seqlens: range) -> Tensor:
        """Returns new memory; `x` may be a state that is still wanted."""
        x = self._attention(self._norm1(x), x, cu_seqlens)
        return self._fc2(self._fc1(self._norm2(x), self._act), residual=x)
