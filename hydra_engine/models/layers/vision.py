"""Vision towers: the packing of a batch's pictures, the pieces in which an encode runs, and the layers, up to whole
towers for pictures of one size. Pixels arrive on the device as one byte per colour.

Packing: integers are computed on the host, sized for the batch or for a given capacity, so that a tower's launches can
be captured once and replayed for other pictures. A batch is filled up to the capacity with padding pictures at its end:
they attend only to themselves, and their features are not read.

Pieces: a vision step can wait between them, at layers and inside large ones. Waiting never changes a result.
Computation inside a layer is cut by rows (or heads), so with deterministic ops the cuts change no result either. The
cost of a piece: without `piece_rows` a layer of the whole batch. With `piece_rows` that many rows of a layer's
products, or attention of some segments or heads with about as many (query, key) pairs as those products have
multiplications; one head of one picture is not cut.

Layers: weight names are parameters, because the towers differ in little else.

Does not know caches, what a wait is for, or how a user's picture became pictures of a tower's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PackedPlan, Rotary, Segments
from hydra_engine.backend.device import Send
from hydra_engine.core.plans import Int64s
from hydra_engine.models.layers.basic import GatedMlp, LayerNorm, Linear, Mlp, RmsNorm, Weight
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import PreprocessSpec
from hydra_engine.models.specs.vision import SquareTowerSpec, SquareVisionSpec, TowerSpec

T = TypeVar("T")
Mix = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


def no_checkpoint() -> None:
    """Returns at once: the `checkpoint` of an encode that never waits for language steps."""


@dataclass(frozen=True, slots=True)
class VisionInput:
    """A batch of image spans and the slots of their features; entry i of every tuple belongs to span i.

    `pixels[i]` is uint8 [pictures, height, width, 3]: a picture, a base picture with its tiles, or the frames of one
    temporal patch, as planned by the family's spec. Spans may differ in size. Models that run through transformers get
    `arrays[i]` instead: their processor's tensors by name.

    A tower calls `checkpoint`, which may block (for language steps), between its layers. With `piece_rows` it also
    calls it inside layers and computes at most that many rows of a layer's products at a time; see the
    head of this file."""

    pixels: tuple[Tensor, ...]
    sources: tuple[tuple[int, int], ...]  # (width, height) of the picture that the user gave
    grids: tuple[tuple[int, int, int], ...]  # (time, rows, columns) in patches
    slots: Tensor  # [sum of num_tokens] int64, image-cache slots in token order
    arrays: tuple[Mapping[str, Tensor], ...] = ()
    checkpoint: Callable[[], None] = no_checkpoint
    piece_rows: int = 0
    send: Send | None = None  # copies a tower's host arrays to the device; None: with blocking copies


class AttentionPiece(NamedTuple):
    """The part of a packed batch's attention with segments [first, last) and heads [head, head_end)."""

    first: int
    last: int
    head: int
    head_end: int


class Slices:
    """Runs a tower's computations in pieces and calls `checkpoint`, which may block, between them. `piece_rows`: most
    rows of a layer in one piece, rounded up to whole groups (`rows`); 0: layers are not cut."""

    def __init__(self, checkpoint: Callable[[], None], piece_rows: int = 0) -> None:
        self.checkpoint = checkpoint
        self._piece_rows = piece_rows

    def with_checkpoints(self, parts: Iterable[T]) -> Iterator[T]:
        """Yields the parts of a tower and calls `checkpoint` before each and after the last."""
        for part in parts:
            self.checkpoint()
            yield part
        self.checkpoint()

    def rows(self, compute: Callable[..., Tensor], *tensors: Tensor, group: int = 1) -> Tensor:
        """Returns compute(*tensors), computed in pieces of nearly equal numbers of rows. A row of the result must
        depend only on the same row of each tensor; with `group`, on that many adjacent rows, of which it may make
        fewer. The number of rows is a multiple of `group`."""
        results = self._pieces(compute, tensors, group)
        return results[0] if len(results) == 1 else torch.cat(results)

    def row_pairs(self, compute: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both results of compute(*tensors), computed as in `rows` with a `group` of 1."""
        results = self._pieces(compute, tensors, group=1)
        if len(results) == 1:
            return results[0]
        first, second = zip(*results, strict=True)
        return torch.cat(first), torch.cat(second)

    def _pieces(self, compute: Callable[..., T], tensors: Sequence[Tensor], group: int) -> list[T]:
        """Calls `compute` with each piece of the tensors, in order, and `checkpoint` in between; returns results."""
        count = tensors[0].shape[0]
        num_pieces = -(-count // self._piece_rows) if self._piece_rows else 1
        num_pieces = min(num_pieces, count // group)
        if num_pieces <= 1:
            return [compute(*tensors)]
        ends = [count // group * i // num_pieces * group for i in range(num_pieces + 1)]
        results = []
        for begin, end in pairwise(ends):
            if begin:
                self.checkpoint()
            results.append(compute(*(tensor[begin:end] for tensor in tensors)))
        return results

    def attention(self, mix: Mix, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments) -> Tensor:
        """Returns mix(q, k, v, cu_seqlens), [P, H, D], computed in pieces of segments and heads, which do not interact
        (`Ops.attention_packed`), with a checkpoint before each and after the last. One piece, without
        checkpoints, if `piece_rows` is 0 or P is at most that, or if the segments are planned (`PackedPlan`)."""
        num_rows, num_heads, head_dim = q.shape
        # As much work as products with the 9 C * C weights after attention:
        # R * 9 C * C = pairs * heads * 2 D, with C = H * D.
        most = self._piece_rows * 9 * num_heads * num_heads * head_dim // 2
        if not most or num_rows <= self._piece_rows or isinstance(cu_seqlens, PackedPlan):
            return mix(q, k, v, cu_seqlens)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for piece in attention_pieces(cu_seqlens, num_heads, most):
            self.checkpoint()
            rows = slice(cu_seqlens[piece.first], cu_seqlens[piece.last])
            heads = slice(piece.head, piece.head_end)
            bounds = [end - rows.start for end in cu_seqlens[piece.first : piece.last + 1]]
            out[rows, heads] = mix(q[rows, heads], k[rows, heads], v[rows, heads], bounds)
        self.checkpoint()
        return out


def attention_pieces(cu_seqlens: Sequence[int], num_heads: int, most: int) -> Iterator[AttentionPiece]:
    """Yields pieces with at most `most` (query, key) pairs over all their heads, or a single head of one segment if
    that has more. Adjacent segments share a piece if all their heads fit; the heads of one segment are divided as
    equally as possible."""
    runs: list[tuple[int, int, int]] = []  # segments [first, last) and the pairs of one head
    for segment, (begin, end) in enumerate(pairwise(cu_seqlens)):
        first, pairs = segment, (end - begin) ** 2
        if runs and (runs[-1][2] + pairs) * num_heads <= most:
            first, _, earlier = runs.pop()
            pairs += earlier
        runs.append((first, segment + 1, pairs))
    for first, last, pairs in runs:
        num_pieces = -(-num_heads // max(most // max(pairs, 1), 1))
        for head, head_end in pairwise(num_heads * i // num_pieces for i in range(num_pieces + 1)):
            yield AttentionPiece(first, last, head, head_end)


Grid = tuple[int, int, int]  # (time, rows, columns) in patches; time is 1 for every item

_MAX_SPANS = 64  # of pictures in a padded batch, padding not counted
NUM_FILLERS = 2  # pictures of padding at most


class Packing(NamedTuple):
    """The layout of a batch, exact or padded to a capacity in patches. All batches of one capacity have arrays of the
    same lengths, so that their launches can be replayed."""

    num_patches: int
    num_features: int  # rows of the tower's output, padding last
    indices: tuple[Int64s, ...]  # in the tower's own order
    bounds: tuple[Int64s, ...]  # cu_seqlens of each kind of attention; padded with empty segments up to the capacity
    longest: tuple[int, ...]  # upper bound of a segment's length, by kind
    end: int = 0  # more than the largest row or column of a patch in its picture


@dataclass(frozen=True, slots=True)
class TowerInput:
    """The inputs of a tower. In a batch padded to a capacity, all that depends on the pictures is in tensors, so that
    launches can be replayed for others."""

    patches: Tensor  # [P, values] uint8
    indices: tuple[Tensor, ...]  # int64, as `Packing.indices`
    segments: tuple[Segments, ...]
    end: int
    slices: Slices


def tower_input(
    packing: Packing, batch: VisionInput, cut: Callable[[Sequence[Tensor], Tensor], None], num_values: int
) -> TowerInput:
    """Builds the input of a batch that is computed eagerly, without a captured graph: segments stay on the host. Cuts
    the pixels into new patches by the tower's `cut` and `num_values` (bytes of a patch)."""
    if batch.send is not None:
        indices = batch.send(packing.indices)
    else:
        indices = tuple(torch.from_numpy(index).to(batch.slots.device) for index in packing.indices)
    patches = torch.empty((packing.num_patches, num_values), dtype=torch.uint8, device=batch.slots.device)
    cut(batch.pixels, patches)
    return TowerInput(
        patches,
        indices,
        tuple(bounds.tolist() for bounds in packing.bounds),
        packing.end,
        Slices(batch.checkpoint, batch.piece_rows),
    )


def spans_in(capacity: int, granule: int) -> int:
    """Upper bound of the number of segments in a batch padded to `capacity` patches: pictures of at least `granule`
    patches, no more than 64, and two of padding."""
    return min(capacity // granule, _MAX_SPANS) + NUM_FILLERS


def pad_with_grids(grids: Sequence[Grid], capacity: int, merge: int) -> list[Grid] | None:
    """Appends up to two padding grids, 4 * `merge` and `merge` patches high, so that all have `capacity` patches
    together. `capacity` is a multiple of merge * merge, as is every grid's number of patches. None if the grids have
    more patches, or are more than 64."""
    left = capacity - sum(rows * columns for _, rows, columns in grids)
    if left < 0 or len(grids) > min(capacity // merge**2, _MAX_SPANS):
        return None
    height = 4 * merge
    wide = left // (height * merge) * merge
    rest = left - height * wide
    fillers: list[Grid] = [(1, height, wide), (1, merge, rest // merge)]
    return [*grids, *(filler for filler in fillers if filler[2])]


def cumulative_lengths(lengths: Sequence[int] | Int64s, capacity: int = 0) -> Int64s | None:
    """Returns cu_seqlens of segments of these lengths, padded with empty segments to `capacity` segments (0: no
    padding). None if there are more."""
    count = len(lengths)
    if capacity and count > capacity:
        return None
    bounds = np.zeros(max(count, capacity) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1 : count + 1])
    bounds[count + 1 :] = bounds[count]
    return bounds


def pack_pictures(grids: Sequence[Grid], capacity: int, merge: int) -> tuple[list[Grid], Packing] | None:
    """Packs pictures of any size, one segment each, padded to `capacity` patches (0: no padding). Returns their grids,
    padding included, and the packing, whose `indices` are left empty. Sides are multiples of `merge` patches, and
    merge * merge patches make a feature. None if the pictures do not fit."""
    fitted = pad_with_grids(grids, capacity, merge) if capacity else list(grids)
    if fitted is None:
        return None
    sizes = sizes_of(fitted)
    bounds = cumulative_lengths(sizes, spans_in(capacity, merge**2) if capacity else 0)
    if bounds is None:
        return None
    num_patches = sum(sizes)
    longest = num_patches if capacity else max(sizes)
    end = longest_side(capacity, merge) if capacity else max(max(grid) for grid in fitted)
    return fitted, Packing(num_patches, num_patches // merge**2, (), (bounds,), (longest,), end)


def sizes_of(grids: Sequence[Grid]) -> list[int]:
    """Number of patches of each picture."""
    return [rows * columns for _, rows, columns in grids]


def longest_side(capacity: int, merge: int) -> int:
    """Longest possible side of a picture of `capacity` patches, in patches: its width at a height of `merge`."""
    return capacity // merge


def in_merge_order(grid: Tensor, merges: Sequence[int]) -> Tensor:
    """Reorders [rows, columns, ...] to [rows * columns, ...] so that the patches that merge are contiguous at every
    level, and every merge is a view. `merges`: the factor of each merge along a side, last merge first."""
    return _in_levels(grid, merges).reshape(-1, *grid.shape[2:])


def _in_levels(grid: Tensor, merges: Sequence[int]) -> Tensor:
    """Views a grid [rows, columns, ..] with a (row, column) pair of dimensions for the merged grid and one for each
    merge, the last merge first: flattened, they are `in_merge_order`."""
    count = len(merges)
    levels = grid.unflatten(1, (-1, *merges)).unflatten(0, (-1, *merges))
    pairs = [axis for level in range(count + 1) for axis in (level, count + 1 + level)]
    rest = range(2 * (count + 1), levels.dim())
    return levels.permute(*pairs, *rest)


def cut_in_merge_order(
    pixels: Sequence[Tensor], patches: Tensor, patch_size: int, merges: Sequence[int], depth: int = 1
) -> None:
    """Cuts uint8 [pictures, height, width, 3] of each span into `patches`, uint8 [P, depth * patch * patch * 3]
    contiguous, in the order of `in_merge_order`, with one copy per span. A span has `depth` pictures, the temporal
    positions of a patch, or a single one, which is repeated in all of them."""
    begin = 0
    for pictures in pixels:
        cut = pictures.unflatten(2, (-1, patch_size)).unflatten(1, (-1, patch_size))
        levels = _in_levels(cut.permute(1, 3, 0, 2, 4, 5), merges)  # [.., pictures, patch, patch, 3]
        end = begin + cut.shape[1] * cut.shape[3]
        patches[begin:end].view(*levels.shape[:-4], depth, *levels.shape[-3:]).copy_(levels)
        begin = end
    assert begin == patches.shape[0], "as many patches as the plan says"


_QK_NORM_EPS = 1e-6  # no config names it


class PackedAttention:
    """Bidirectional attention within packed segments, out(mix(project(x))): a row attends to all rows of its segment.

    `qkv` names the checkpoint's input projections, one (fused) or three, with biases if `qkv_bias`; `out` names the
    output projection, which always has a bias. `qk_norm` names two RMS norms of whole queries and keys, applied before
    the split into heads; `out_scale` names a vector with a factor per output (layer scale)."""

    def __init__(
        self,
        scope: Scope,
        num_channels: int,
        num_heads: int,
        *,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        qkv_bias: bool = True,
        qk_norm: tuple[str, str] | None = None,
        out_scale: str | None = None,
    ) -> None:
        self._ops = scope.ops
        self._num_channels = num_channels
        self._num_heads = num_heads
        self._scale = (num_channels // num_heads) ** -0.5
        parts = {name: 3 * num_channels // len(qkv) for name in qkv}
        self.project = Linear(scope, parts, num_channels, bias=qkv_bias)
        self._norms = tuple(RmsNorm(scope.child(name), num_channels, _QK_NORM_EPS) for name in qk_norm or ())
        self.out = Linear(scope, {out: num_channels}, num_channels, bias=True, scale=out_scale)

    def mix(self, projected: Tensor, cu_seqlens: Segments, rotary: Rotary | None, slices: Slices) -> Tensor:
        """Returns attention on the output of `project`, [P, 3 * C] -> [P, C], the input of `out`. Queries and keys are
        normalised if the layer has such norms, then rotated if there is a `rotary`."""
        q, k, v = projected.unflatten(1, (3, self._num_heads, -1)).unbind(1)  # each [P, H, D]
        if self._norms:
            q, k = (norm(part.flatten(1)).view(q.shape) for norm, part in zip(self._norms, (q, k), strict=True))
        if rotary is not None and self._norms:
            q, k = self._ops.rotate(q, *rotary), self._ops.rotate(k, *rotary)
        elif rotary is not None:
            heads = projected.unflatten(1, (3 * self._num_heads, -1))
            q, k = self._ops.rotate(heads[:, : 2 * self._num_heads], *rotary).chunk(2, dim=1)
        return slices.attention(self._attend, q, k, v, cu_seqlens).view(-1, self._num_channels)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments) -> Tensor:
        return self._ops.attention_packed(q, k, v, cu_seqlens, self._scale)


def normalise_pixels(pixels: Tensor, spec: PreprocessSpec) -> Tensor:
    """Returns (x * rescale - mean) / std of uint8 [..., 3] on the CPU, in float32: the product is computed in float64
    and rounded to float32 before the rest, exactly as in transformers' processors."""
    mean, std = (torch.tensor(colours, dtype=torch.float32) for colours in (spec.mean, spec.std))
    return pixels.to(torch.float64).mul_(spec.rescale).to(torch.float32).sub_(mean).div_(std)


class PixelRows:
    """Converts patches to rows of normalised pixels in the compute dtype, zero-padded to `width`, by a table of the
    normalised values of all 256 bytes of each colour."""

    def __init__(self, scope: Scope, preprocess: PreprocessSpec, width: int) -> None:
        self._ops, self._width = scope.ops, width
        colours = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 3)
        self._table = normalise_pixels(colours, preprocess).to(scope.dtype).to(scope.device)

    def __call__(self, patches: Tensor) -> Tensor:
        """Returns the rows [P, width] of patches, uint8 [P, pixels * 3]."""
        return self._ops.pixel_rows(patches, self._table, self._width)


class PatchProjection:
    """The patch embedding: a convolution whose stride is its kernel size, as one matrix product over normalised
    patches. Their width, `num_values`, is zero-padded to a multiple of the device's `width_step`."""

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
        """Projects uint8 [P, num_values] to [P, C] and adds `residual`, [P, C], if there is one."""
        return self._linear(self._rows(patches), residual=residual)


def _as_in_memory(parts: list[Tensor]) -> Tensor:
    """Flattens the one part, a kernel [C, 3, *kernel], to [C, pixels * 3], the order of a patch's bytes. A bias [C] is
    returned unchanged."""
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
        """Embeds the patches that `cut` wrote: [I * (1 + patches of a picture), C] for I pictures, the class token
        first in each."""
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
    """Checkpoint names of one tower layer. `scales` name factors of the outputs of attention and MLP (layer scale;
    CaiT, section 2.1). A gated MLP has fixed names and no scale: it ignores `mlp` and scales[1]."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    scales: tuple[str, str] | None = None


class VisionLayer:
    """A pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)). `then` is the first norm of the next
    layer; see `link_norms`."""

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
            return slices.rows(self._project_and_mlp, mixed, x), None
        normed, x = slices.row_pairs(partial(self._with_norm, self.then), mixed, x)
        return x, normed

    def _project_and_mlp(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Computes the layer after attention for any subset of rows: projection, residual, norm, MLP, residual. mixed:
        input of the projection; residual: the layer's input."""
        normed, x = self._norm2.normalise_sum(self._attention.out, mixed, residual)
        return self._mlp(normed, residual=x)

    def _with_norm(self, norm: LayerNorm | RmsNorm, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = self._project_and_mlp(mixed, residual)."""
        normed, x = self._norm2.normalise_sum(self._attention.out, mixed, residual)
        return self._mlp.with_norm(norm, normed, residual=x)


def link_norms(layers: Sequence[VisionLayer]) -> Sequence[VisionLayer]:
    """Sets `then` of each layer but the last to the first norm of the next, so that a residual sum and the norm after
    it can be one launch. Returns the layers."""
    for layer, behind in pairwise(layers):
        layer.then = behind.norm1
    return layers


class PatchMerger:
    """Concatenates the rows of each token, `width` values in all, and applies a norm and an MLP. The norm is of the
    concatenated rows if `norm_merged`, else of each single row before they are concatenated."""

    def __init__(self, norm: Callable[[Tensor], Tensor], mlp: Mlp, width: int, *, norm_merged: bool) -> None:
        self._norm, self._mlp, self._width, self._norm_merged = norm, mlp, width, norm_merged

    def __call__(self, x: Tensor) -> Tensor:
        """Merges [P, C], with the rows of a token contiguous, to [P * C / width, C of the decoder]."""
        if self._norm_merged:
            return self._mlp(self._norm(x.view(-1, self._width)))
        return self._mlp(self._norm(x).view(-1, self._width))


class TowerNames(NamedTuple):
    """Checkpoint names of a tower for pictures of one size. Weights of a norm that the spec lacks are not read.
    `unread`: prefixes of other tensors that the checkpoint may have and the model does not use."""

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
        """Packs a batch with one segment per picture, padded with pictures to as many as `capacity` patches hold (0: no
        padding). None if it does not fit."""
        count = sum(pictures.shape[0] for pictures in batch.pixels)
        if capacity:
            if count * self.granule > capacity:
                return None
            count = capacity // self.granule
        num_rows = self.granule + 1
        bounds = np.arange(count + 1) * num_rows
        return Packing(count * self.granule, count * self._spec.num_tokens, (), (bounds,), (num_rows,))

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        """Cuts the pictures of all spans into `patches`, uint8 [P, num_values] contiguous, span after span."""
        counts = [pictures.shape[0] * self.granule for pictures in pixels]
        for pictures, rows in zip(pixels, patches.split(counts), strict=True):
            self._embed.cut(pictures, rows)

    def _states(self, inputs: TowerInput) -> Tensor:
        """Returns the hidden states that the projector reads, [I, rows per picture, C * feature layers] of I pictures,
        normed if the tower has a final norm, and without the class token unless the spec keeps it."""
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
