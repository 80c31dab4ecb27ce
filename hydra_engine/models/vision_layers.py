"""What towers for pictures of one size are made of: patches with a class token and positions, pre-norm layers.

Names of weights are parameters, because the towers differ in little else. Does not know which states are read, what
projectors make of them, or how a user's picture became pictures of this size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.base import Activation, PackedLinear, Segments
from hydra_engine.models.attention import PackedAttention, Rotary
from hydra_engine.models.layers import LayerNorm, Linear, RmsNorm, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.models.pixels import PixelNormaliser
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import PreprocessSpec


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

    packed: PackedLinear

    def __init__(
        self, scope: Scope, shape: PatchShape, preprocess: PreprocessSpec, names: PatchNames | None = None
    ) -> None:
        names = names or PatchNames()
        size, patch = shape.num_channels, shape.patch_size
        self._ops, self._dtype = scope.ops, scope.dtype
        self._shape = shape
        self._normalise = PixelNormaliser(preprocess, scope.device)
        class_ones, position_ones = ((1,) * count for count in names.leading)
        self._class = Weight(scope, names.class_token, (*class_ones, size))
        self._positions = Weight(scope, names.positions, (*position_ones, shape.side**2 + 1, size))
        self._arrived: dict[str, Tensor] = {}
        self._slots: dict[str, tuple[int, ...]] = {"weight": (size, 3, patch, patch)}
        if shape.bias:
            self._slots["bias"] = (size,)
        for name, wanted in self._slots.items():
            scope.want(f"{names.patch}.{name}", wanted, partial(self._fill, name))
        scope.hold(self)

    def __call__(self, patches: Tensor, slices: Slices) -> Tensor:
        """What `cut` gives -> [I * rows per picture, C]"""
        size = self._shape.num_channels
        positions = self._positions.tensor.view(-1, size)
        projected = slices.rows(self._project, patches).view(-1, self._shape.side**2, size)
        rows = projected.new_empty((projected.shape[0], *positions.shape))  # [I, 1 + patches, C]
        rows[:, 0] = self._class.tensor.view(size) + positions[0]
        torch.add(projected, positions[1:], out=rows[:, 1:])
        return rows.view(-1, size)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def num_values(self) -> int:
        """Bytes of a patch."""
        return 3 * self._shape.patch_size**2

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 [I, height, width, 3] -> uint8 [I * patches, patch * patch * 3]; pixels beyond the last whole patch are
        dropped, as a convolution does."""
        side, patch = self._shape.side, self._shape.patch_size
        whole = pixels[:, : side * patch, : side * patch].unflatten(1, (side, patch)).unflatten(3, (side, patch))
        return whole.transpose(2, 3).reshape(-1, patch * patch * 3)

    def _project(self, patches: Tensor) -> Tensor:
        return self._ops.linear(self._normalise.rows(patches, self._dtype), self.packed)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """[C, 3, patch, patch] -> [C, patch * patch * 3], the order of pixels in memory."""
        self._arrived[name] = tensor
        if len(self._arrived) == len(self._slots):
            weight = self._arrived.pop("weight").permute(0, 2, 3, 1)
            self.packed = self._ops.pack_linear(weight.reshape(weight.shape[0], -1), self._arrived.pop("bias", None))


class LayerShape(NamedTuple):
    num_channels: int
    num_heads: int
    intermediate_size: int
    act: Activation
    eps: float
    rms_norms: bool = False  # instead of layer norms
    qkv_bias: bool = True
    qk_norm: bool = False


class LayerNames(NamedTuple):
    """`scales` multiply what attention and MLP add to the rows (layer scale; CaiT, section 2.1)."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    out: str = "out_proj"
    scales: tuple[str, str] | None = None


class VisionLayer:
    """x + attention(norm(x)), and then x + mlp(norm(x))."""

    def __init__(self, scope: Scope, shape: LayerShape, names: LayerNames | None = None) -> None:
        names = names or LayerNames()
        size, place = shape.num_channels, names.attention
        norm = RmsNorm if shape.rms_norms else LayerNorm
        attention_scale, mlp_scale = names.scales or (None, None)
        self._act = shape.act
        self._norm1 = norm(scope.at(names.norms[0]), size, shape.eps)
        self._attention = PackedAttention(
            scope,
            size,
            shape.num_heads,
            qkv=(f"{place}.q_proj", f"{place}.k_proj", f"{place}.v_proj"),
            out=f"{place}.{names.out}",
            qkv_bias=shape.qkv_bias,
            qk_norm=(f"{place}.q_norm", f"{place}.k_norm") if shape.qk_norm else None,
            out_scale=attention_scale,
        )
        self._norm2 = norm(scope.at(names.norms[1]), size, shape.eps)
        self._fc1 = Linear(scope, {"mlp.fc1": shape.intermediate_size}, size, bias=True)
        self._fc2 = Linear(scope, {"mlp.fc2": size}, shape.intermediate_size, bias=True, scale=mlp_scale)

    def __call__(self, x: Tensor, cu_seqlens: Segments, slices: Slices) -> Tensor:
        """[P, C] -> new memory; `x` may be a state that is still wanted."""
        return run_layer(x, self._norm1, self._attention, self._add_mlp, cu_seqlens, None, slices)

    def _add_mlp(self, x: Tensor) -> Tensor:
        return self._fc2(self._fc1(self._norm2(x), self._act), residual=x)


def run_layer(
    x: Tensor,
    norm: Callable[[Tensor], Tensor],
    attention: PackedAttention,
    add_mlp: Callable[[Tensor], Tensor],
    cu_seqlens: Segments,
    rotary: Rotary | None,
    slices: Slices,
) -> Tensor:
    """add_mlp(x + attention(norm(x))): [P, C] -> new memory. `add_mlp` is a function of rows. In as many pieces as
    `slices` wants; all that is not attention goes row by row."""
    projected = slices.rows(lambda rows: attention.project(norm(rows)), x)
    mixed = attention.mix(projected, cu_seqlens, rotary, slices)
    return slices.rows(lambda rows, residual: add_mlp(attention.out(rows, residual)), mixed, x)
