"""Parts of vision towers: pixel normalisation, patch embedding, pre-norm layers, patch mergers, and whole towers for
pictures of one size. Pixels arrive on the device as one byte per colour.

Weight names are parameters, because the towers differ in little else. Does not know how a user's picture became
pictures of this size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Rotary, Segments
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers.attention import PackedAttention
from hydra_engine.models.layers.basic import GatedMlp, LayerNorm, Linear, Mlp, RmsNorm, Weight
from hydra_engine.models.layers.vision_packing import Packing, TowerInput
from hydra_engine.models.layers.vision_slices import Slices
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import PreprocessSpec
from hydra_engine.models.specs.vision import SquareTowerSpec, SquareVisionSpec, TowerSpec


class PixelNormaliser:
    """Computes (x * rescale - mean) / std in float32, with the product rounded once, exactly as transformers'
    processors do."""

    def __init__(self, spec: PreprocessSpec, device: torch.device) -> None:
        self._rescale = spec.rescale
        self._mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        self._std = torch.tensor(spec.std, dtype=torch.float32, device=device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalises uint8 [..., 3] to float32 of the same shape."""
        return pixels.to(torch.float64).mul_(self._rescale).to(torch.float32).sub_(self._mean).div_(self._std)


class PixelRows:
    """Normalised patches as rows of the compute dtype, zero-padded to `width`. The normalised values of all 256 bytes
    of each colour are tabulated once, on the host."""

    def __init__(self, scope: Scope, preprocess: PreprocessSpec, width: int) -> None:
        self._ops, self._width = scope.ops, width
        colours = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 3)
        table = PixelNormaliser(preprocess, torch.device("cpu"))(colours).to(scope.dtype)
        self._table = table.to(scope.device)

    def __call__(self, patches: Tensor) -> Tensor:
        """Converts uint8 [P, pixels * 3] to [P, width]."""
        return self._ops.pixel_rows(patches, self._table, self._width)


class PatchProjection:
    """The patch embedding: a convolution whose stride is its kernel size, as one matrix product over normalised
    patches. Rows are zero-padded to a multiple of the device's `width_step`."""

    def __init__(
        self,
        scope: Scope,
        name: str,
        num_channels: int,
        kernel: tuple[int, ...],
        preprocess: PreprocessSpec,
        *,
        bias: bool = True,
    ) -> None:
        self.num_values = 3 * math.prod(kernel)  # bytes of a patch
        spare = -self.num_values % scope.ops.width_step
        self._rows = PixelRows(scope, preprocess, self.num_values + spare)
        self._linear = Linear(
            scope, {name: num_channels}, (3, *kernel), bias=bias, arrange=_as_in_memory, spare_in=spare
        )

    def __call__(self, patches: Tensor, residual: Tensor | None = None) -> Tensor:
        """Projects uint8 [P, num_values] to [P, C]."""
        return self._linear(self._rows(patches), residual=residual)


def _as_in_memory(parts: list[Tensor]) -> Tensor:
    """Reorders a kernel [C, 3, *kernel] to [C, kernel * 3], the order of pixels in memory. A bias [C] is unchanged."""
    (tensor,) = parts
    return tensor if tensor.dim() == 1 else tensor.movedim(1, -1).flatten(1)


class PatchNames(NamedTuple):
    """Checkpoint names of the patch embedding. `patch` is a convolution; `leading` counts the leading dimensions of
    size 1 of class token and positions."""

    patch: str
    class_token: str
    positions: str
    leading: tuple[int, int] = (0, 0)


class PatchEmbeddings:
    """Projects patches, prepends the class token and adds the learned positions."""

    def __init__(self, scope: Scope, spec: SquareTowerSpec, preprocess: PreprocessSpec, names: PatchNames) -> None:
        size, patch = spec.hidden_size, spec.patch_size
        self._spec = spec
        class_ones, position_ones = ((1,) * count for count in names.leading)
        self._class = Weight(scope, names.class_token, (*class_ones, size))
        self._positions = Weight(scope, names.positions, (*position_ones, spec.num_patches + 1, size))
        self._project = PatchProjection(scope, names.patch, size, (patch, patch), preprocess, bias=spec.patch_bias)
        self.num_values = self._project.num_values

    def __call__(self, patches: Tensor, slices: Slices) -> Tensor:
        """Embeds the patches that `cut` wrote: [I * rows per picture, C]."""
        size = self._spec.hidden_size
        positions = self._positions.tensor.view(-1, size)
        projected = slices.rows(self._project, patches).view(-1, self._spec.num_patches, size)
        rows = projected.new_empty((projected.shape[0], *positions.shape))  # [I, 1 + patches, C]
        rows[:, 0] = self._class.tensor.view(size) + positions[0]
        torch.add(projected, positions[1:], out=rows[:, 1:])
        return rows.view(-1, size)

    def cut(self, pixels: Tensor, patches: Tensor) -> None:
        """Cuts uint8 [I, height, width, 3] into `patches`, uint8 [I * patches, patch * patch * 3] contiguous. Pixels
        beyond the last whole patch are dropped, as a convolution does."""
        side, patch = self._spec.grid_side, self._spec.patch_size
        whole = pixels[:, : side * patch, : side * patch].unflatten(1, (side, patch)).unflatten(3, (side, patch))
        patches.view(-1, side, side, patch, patch, 3).copy_(whole.transpose(2, 3))


class LayerNames(NamedTuple):
    """Checkpoint names of one tower layer. `scales` are factors of the outputs of attention and MLP (layer scale; CaiT,
    section 2.1). `mlp` is ignored by a gated MLP, which has fixed names."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    scales: tuple[str, str] | None = None


class VisionLayer:
    """A pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)). `then` is the first norm of the next
    layer, if that layer is chained to this one; see `chained`."""

    then: LayerNorm | RmsNorm | None = None

    def __init__(self, scope: Scope, spec: TowerSpec, names: LayerNames) -> None:
        size, inner, act = spec.hidden_size, spec.intermediate_size, spec.hidden_act
        norm = RmsNorm if spec.rms_norms else LayerNorm
        attention_scale, mlp_scale = names.scales or (None, None)
        self.norm1 = norm(scope.child(names.norms[0]), size, spec.norm_eps)
        self._attention = PackedAttention(
            scope,
            size,
            spec.num_heads,
            qkv=tuple(f"{names.attention}.{name}" for name in names.qkv),
            out=f"{names.attention}.{names.out}",
            qkv_bias=spec.qkv_bias,
            qk_norm=(f"{names.attention}.q_norm", f"{names.attention}.k_norm") if spec.qk_norm else None,
            out_scale=attention_scale,
        )
        self._norm2 = norm(scope.child(names.norms[1]), size, spec.norm_eps)
        self._mlp: GatedMlp | Mlp
        if spec.gated:
            self._mlp = GatedMlp(scope.child("mlp"), size, inner, act, bias=True)
        else:
            self._mlp = Mlp(scope, names.mlp, size, inner, size, act, scale=mlp_scale)

    def __call__(
        self,
        x: Tensor,
        cu_seqlens: Segments,
        slices: Slices,
        rotary: Rotary | None = None,
        *,
        normed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (y, then(y)), or (y, None) without `then`; y is new memory, [P, C], and `x` is not written. `normed`
        is norm1(x) if the previous layer has computed it. Computes in the pieces of `slices`: everything but attention
        is row-wise."""
        if normed is None:
            projected = slices.rows(lambda rows: self._attention.project(self.norm1(rows)), x)
        else:
            projected = slices.rows(self._attention.project, normed)
        mixed = self._attention.mix(projected, cu_seqlens, rotary, slices)
        if self.then is None:
            return slices.rows(self._behind_mix, mixed, x), None
        normed, x = slices.row_pairs(partial(self._with_norm, self.then), mixed, x)
        return x, normed

    def _behind_mix(self, mixed: Tensor, residual: Tensor) -> Tensor:
        normed, x = self._norm2.normalise_sum(self._attention.out, mixed, residual)
        return self._mlp(normed, residual=x)

    def _with_norm(self, norm: LayerNorm | RmsNorm, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, x = self._norm2.normalise_sum(self._attention.out, mixed, residual)
        return self._mlp.with_norm(norm, normed, residual=x)


def link_norms(layers: Sequence[VisionLayer]) -> Sequence[VisionLayer]:
    """Links each layer to the first norm of the next, so that a residual sum and the norm after it can be one
    launch."""
    for layer, behind in pairwise(layers):
        layer.then = behind.norm1
    return layers


class PatchMerger:
    """Concatenates the rows of one token and applies an MLP. The norm is of the concatenated rows if `norm_merged`,
    else of each single row."""

    def __init__(self, norm: LayerNorm | RmsNorm, mlp: Mlp, width: int, *, norm_merged: bool) -> None:
        self._norm, self._mlp, self._width, self._norm_merged = norm, mlp, width, norm_merged

    def __call__(self, x: Tensor) -> Tensor:
        """Merges [P, C], with the rows of a token contiguous, to [P * C / width, C of the decoder]."""
        if self._norm_merged:
            return self._mlp(self._norm(x.view(-1, self._width)))
        return self._mlp(self._norm(x).view(-1, self._width))


class TowerNames(NamedTuple):
    """Checkpoint names of a tower for pictures of one size. `unread`: prefixes of tensors that the model does not
    use."""

    patches: PatchNames
    layers: str
    layer: LayerNames
    pre_norm: str
    final_norm: str
    unread: tuple[str, ...]


class SquareVision:
    """A tower with a class token for pictures of one size: implements `Vision` of `vlm.py` except its call. Stops at
    the last hidden state that is read; layers after it are neither loaded nor computed."""

    def __init__(self, scope: Scope, vision: SquareVisionSpec, names: TowerNames) -> None:
        self._spec, spec = vision, vision.tower
        scope = scope.child("vision_tower")
        self._embed = PatchEmbeddings(scope.child("embeddings"), spec, vision.preprocess, names.patches)
        norms = [(names.pre_norm, spec.pre_norm), (names.final_norm, spec.final_norm)]
        self._pre_norm, self._final_norm = (
            LayerNorm(scope.child(name), spec.hidden_size, spec.norm_eps) if held else None for name, held in norms
        )
        num_active = spec.num_active_layers
        places = scope.children(names.layers, num_active, "num_hidden_layers", held=spec.num_layers)
        self._layers = link_norms([VisionLayer(place, spec, names.layer) for place in places])
        scope.skip(*names.unread, *(f"{names.layers}.{i}." for i in range(num_active, spec.num_layers)))
        scope.skip(*(f"{name}." for name, held in norms if name and not held))
        self.granule, self.num_values = spec.num_patches, self._embed.num_values
        self.num_slices = num_active + 2  # the layers, and the work before and after them

    def reserve(self, capacity: int) -> None:
        """Does nothing: calls read no tables that depend on the capacity."""

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        count = sum(pictures.shape[0] for pictures in batch.pixels)
        if capacity:
            if count * self.granule > capacity:
                return None
            count = capacity // self.granule
        num_rows = self.granule + 1
        bounds = np.arange(count + 1) * num_rows
        return Packing(count * self.granule, count * self._spec.num_tokens, (), (bounds,), (num_rows,))

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        counts = [pictures.shape[0] * self.granule for pictures in pixels]
        for pictures, rows in zip(pixels, patches.split(counts), strict=True):
            self._embed.cut(pictures, rows)

    def _states(self, inputs: TowerInput) -> Tensor:
        """Runs the tower with one segment per picture: [I, rows per picture, C * feature layers]."""
        slices, (cu_seqlens,), spec = inputs.slices, inputs.segments, self._spec.tower
        state = self._embed(inputs.patches, slices)  # [I * rows, C]
        if self._pre_norm is not None:
            state = self._pre_norm(state)
        states = {0: state} if 0 in spec.feature_layers else {}
        normed = None
        for index, layer in enumerate(slices.with_checkpoints(self._layers), start=1):
            state, normed = layer(state, cu_seqlens, slices, normed=normed)
            if index in spec.feature_layers:
                states[index] = state
        if len(spec.feature_layers) > 1:
            state = torch.cat([states[index] for index in spec.feature_layers], dim=1)
        if self._final_norm is not None:
            state = self._final_norm(state)
        features = state.view(-1, spec.num_patches + 1, state.shape[1])
        return features if spec.keep_cls else features[:, 1:]
