"""Layers that hold weights: linear (several checkpoint matrices fused into one), norms, embedding, MLPs.

A layer declares its slots when it is built and is ready after they are filled. All arithmetic is in the backend's ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby, repeat
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hydra_engine.backend.base import Activation, DeferredNorm, PackedLinear, RowNorm
from hydra_engine.backend.quantized import QuantizedWeight, stacked
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.loading.quantize import quantized_matrix


class Linear:
    """A linear layer: act(x @ W^T + bias) + residual. W concatenates the outputs of `parts`, checkpoint names with
    their numbers of outputs.

    `scale` names a checkpoint vector with one factor per output (layer scale); it is multiplied into weights and biases
    once, at load. `arrange` joins the parts' weights, and likewise their biases, in place of torch.cat. `num_in` lists
    all dimensions but the first if the checkpoint's weight has more than two; such a weight needs an `arrange` that
    flattens it. Parts may be quantised in the checkpoint if they are matrices; floats are quantised at load if the
    scope says so. `spare_out` zero outputs are appended to each part; `spare_in` zero columns are appended to W, for
    inputs that are zero in every x."""

    packed: tuple[PackedLinear, ...]  # one for all parts, unless they are quantised in several ways

    def __init__(
        self,
        scope: Scope,
        parts: Mapping[str, int],
        num_in: int | tuple[int, ...],
        *,
        bias: bool,
        scale: str | None = None,
        arrange: Callable[[list[Tensor]], Tensor] | None = None,
        spare_out: int = 0,
        spare_in: int = 0,
    ) -> None:
        self._ops, self._dtype, self._quantize = scope.ops, scope.dtype, scope.quantize
        self._weights = [f"{name}.weight" for name in parts]
        self._biases = [f"{name}.bias" for name in parts] if bias else []
        self._scale = scale
        self._spare_out, self._spare_in = spare_out, spare_in
        self._arrange = arrange or _stacked
        self._weights_arrived: dict[str, Tensor | QuantizedWeight] = {}
        self._vectors_arrived: dict[str, Tensor] = {}
        shape_in = num_in if isinstance(num_in, tuple) else (num_in,)
        for name, num_out in parts.items():
            fill = partial(self._fill_weight, f"{name}.weight")
            quantized = fill if len(shape_in) == 1 else None
            whole = scale is None  # scaled weights need more than 16 bits
            scope.declare(f"{name}.weight", (num_out, *shape_in), fill, fill_quantized=quantized, matrix=whole)
            if bias:
                scope.declare(f"{name}.bias", (num_out,), partial(self._fill_vector, f"{name}.bias"))
        if scale is not None:
            scope.declare(scale, (sum(parts.values()),), partial(self._fill_vector, scale))
        scope.register(self)

    def __call__(self, x: Tensor, act: Activation = "none", *, residual: Tensor | None = None) -> Tensor:
        """Returns act(x @ W^T + bias) + residual [T, N], with spare outputs. x: [T, K]; `residual` is not written."""
        if len(self.packed) == 1:
            return self._ops.linear(x, self.packed[0], act=act, residual=residual)
        cuts = [part.num_out for part in self.packed]
        residuals = [None] * len(cuts) if residual is None else residual.split(cuts, dim=1)
        parts = zip(self.packed, residuals, strict=True)
        return torch.cat([self._ops.linear(x, part, act=act, residual=rest) for part, rest in parts], dim=1)

    def _fill_weight(self, name: str, weight: Tensor | QuantizedWeight) -> None:
        """Keeps the weight of a part, with its spare outputs, until all parts have arrived and are packed."""
        self._weights_arrived[name] = _padded(weight, self._spare_out, 0)
        self._pack_if_complete()

    def _fill_vector(self, name: str, tensor: Tensor) -> None:
        """Keeps a bias or the scale, with zeros for spare outputs, until all parts have arrived and are packed."""
        self._vectors_arrived[name] = pad(tensor, (0, self._spare_out)) if self._spare_out else tensor
        self._pack_if_complete()

    def _pack_if_complete(self) -> None:
        """Sets `packed` and drops the parts once all have arrived, so that while a model loads only one layer exists
        both packed and unpacked."""
        weights, vectors = self._weights_arrived, self._vectors_arrived
        if len(weights) < len(self._weights) or len(vectors) < len(self._biases) + (self._scale is not None):
            return
        bias = self._arrange([vectors.pop(name) for name in self._biases]) if self._biases else None
        joined = self._joined([weights.pop(name) for name in self._weights])
        counts = [weight.shape[0] for weight in joined]
        if self._scale is not None:
            factors = vectors.pop(self._scale)
            joined = [_scaled(weight, part) for weight, part in zip(joined, factors.split(counts), strict=True)]
            bias = None if bias is None else _scaled_tensor(bias, factors)
        biases = [None] * len(counts) if bias is None else bias.split(counts)
        joined = [_padded(quantized_weight(weight, self._quantize), 0, self._spare_in) for weight in joined]
        self.packed = tuple(map(self._ops.pack_linear, joined, biases, repeat(self._dtype)))

    def _joined(self, parts: list[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
        """Joins adjacent parts of one quantisation format; returns one weight for each run of them. With `arrange` all
        parts must have one format, so a mixture is dequantised first."""
        groups = [list(group) for _, group in groupby(parts, _stack_key)]
        if len(groups) > 1 and self._arrange is not _stacked:
            groups = [[part.dequantized(self._dtype) if isinstance(part, QuantizedWeight) else part for part in parts]]
        return [self._join(group) for group in groups]

    def _join(self, parts: list[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        """Joins parts of one quantisation format. Quantised parts are concatenated, and their outputs then permuted as
        `arrange` permutes output numbers."""
        weights = [part for part in parts if isinstance(part, QuantizedWeight)]
        if not weights:
            return self._arrange([part for part in parts if isinstance(part, Tensor)])
        if self._arrange is _stacked:
            return stacked(weights)
        counts = [weight.num_out for weight in weights]
        return stacked(weights).rows(self._arrange(list(torch.arange(sum(counts)).split(counts))))


def quantized_weight(weight: Tensor | QuantizedWeight, num_bits: int | None) -> Tensor | QuantizedWeight:
    """Quantises a float weight to `num_bits`. Returns it as it is if that is None or the weight is quantised
    already."""
    if num_bits is None or isinstance(weight, QuantizedWeight):
        return weight
    return quantized_matrix(weight, num_bits)


def _padded(weight: Tensor | QuantizedWeight, num_out: int, num_in: int) -> Tensor | QuantizedWeight:
    """Appends `num_out` zero outputs and `num_in` zero inputs."""
    if not num_out and not num_in:
        return weight
    if isinstance(weight, QuantizedWeight):
        return weight.padded(num_out, num_in)
    return pad(weight, (0, num_in, 0, num_out))


def _stack_key(weight: Tensor | QuantizedWeight) -> object:
    """Returns a key of the quantisation format: weights with equal keys can be concatenated. None for floats."""
    return None if isinstance(weight, Tensor) else weight.stack_key


def _scaled(weight: Tensor | QuantizedWeight, factors: Tensor) -> Tensor | QuantizedWeight:
    """Multiplies the weights of output n by factors[n]; of quantised weights, their scales and offsets."""
    if isinstance(weight, QuantizedWeight):
        return weight.scaled(factors)
    return _scaled_tensor(weight, factors[:, None])


def _scaled_tensor(tensor: Tensor, factors: Tensor) -> Tensor:
    """Multiplies in float32 and rounds once, to the tensor's dtype."""
    return (tensor.float() * factors.float()).to(tensor.dtype)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Concatenates along the first dimension; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Weight:
    """A tensor of the checkpoint, loaded in `dtype` (None: the compute dtype) and kept unchanged or as the result of
    `transform`."""

    packed: tuple[Tensor]

    def __init__(
        self,
        scope: Scope,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._transform = transform
        scope.declare(name, shape, self._fill, dtype=dtype)
        scope.register(self)

    @property
    def tensor(self) -> Tensor:
        return self.packed[0]

    def _fill(self, tensor: Tensor) -> None:
        self.packed = (tensor if self._transform is None else self._transform(tensor),)


class RmsNorm:
    """RMS norm over the last dimension. `centred`: the checkpoint stores weight - 1; the weight is then float32."""

    def __init__(self, scope: Scope, num_channels: int, eps: float, *, centred: bool = False) -> None:
        self._ops = scope.ops
        self._eps = eps
        if centred:
            wide = torch.float32
            self._weight = Weight(scope, "weight", (num_channels,), dtype=wide, transform=lambda weight: weight + 1.0)
        else:
            self._weight = Weight(scope, "weight", (num_channels,))

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight.tensor, self._eps)

    def after_linear(self, linear: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Returns (norm(y), y), y = linear(x) + residual. The norm may be deferred, and `residual` may be overwritten
        with y, so the caller must not use it again. `linear` has one packed weight."""
        (packed,) = linear.packed
        return self._ops.linear_add_rms_norm(x, packed, residual, self._weight.tensor, self._eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = x + residual; `residual` may be overwritten with y."""
        return self._ops.add_rms_norm(x, residual, self._weight.tensor, self._eps)

    def normalise_sum(self, linear: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = linear(x) + residual. `residual` is not written. `linear` has one packed weight."""
        (packed,) = linear.packed
        return self._ops.linear_add_norm(x, packed, residual, RowNorm(self._weight.tensor, None, self._eps))


class LayerNorm:
    def __init__(self, scope: Scope, num_channels: int, eps: float) -> None:
        self._ops = scope.ops
        self._weight = Weight(scope, "weight", (num_channels,))
        self._bias = Weight(scope, "bias", (num_channels,))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self._weight.tensor, self._bias.tensor, self._eps)

    def normalise_sum(self, linear: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = linear(x) + residual. `residual` is not written. `linear` has one packed weight."""
        (packed,) = linear.packed
        norm = RowNorm(self._weight.tensor, self._bias.tensor, self._eps)
        return self._ops.linear_add_norm(x, packed, residual, norm)


class Head:
    """The output projection, [T, C] -> logits [T, V] float32. Declares no tensor of the checkpoint: `Decoder` fills it
    with the checkpoint's head; without one, the embedding to which it is tied does. If matrices are quantised at load,
    a float head gets 8 bits, whatever width they get."""

    packed: tuple[PackedLinear]

    def __init__(self, scope: Scope) -> None:
        self._ops, self._dtype, self._quantize = scope.ops, scope.dtype, 8 if scope.quantize else None
        scope.register(self)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed[0], out_dtype=torch.float32)

    def fill(self, weight: Tensor | QuantizedWeight) -> None:
        """Packs the weight, [V, C], in place of one that was packed before."""
        self.packed = (self._ops.pack_linear(quantized_weight(weight, self._quantize), rows=self._dtype),)


class Embedding:
    """The token table: token ids [T] -> [T, C] in the compute dtype. The table is never quantised; `tied_head` is
    filled with the same weight, still quantised if the checkpoint's is. `substitute`: see `Scope.declare`."""

    packed: tuple[Tensor]  # [rows, C]

    def __init__(
        self, scope: Scope, num_rows: int, num_channels: int, *, tied_head: Head | None, substitute: str | None = None
    ) -> None:
        self._tied_head, self._dtype = tied_head, scope.dtype
        self.is_filled = False
        shape, fill = (num_rows, num_channels), self.fill
        scope.declare("weight", shape, fill, fill_quantized=fill, matrix=True, substitute=substitute)
        scope.register(self)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.packed[0].index_select(0, token_ids).to(self._dtype)

    def fill(self, weight: Tensor | QuantizedWeight) -> None:
        """Keeps the table, dequantised, and fills the tied head if there is one."""
        self.is_filled = True
        self.packed = (weight.dequantized(self._dtype) if isinstance(weight, QuantizedWeight) else weight,)
        if self._tied_head is not None:
            self._tied_head.fill(weight)


class GatedMlp:
    """A gated MLP: down(act(gate(x)) * up(x)) + residual, with checkpoint names gate_proj, up_proj and down_proj. The
    inner width is padded with zeros to a multiple of the device's `width_step`."""

    def __init__(self, scope: Scope, num_channels: int, num_inner: int, act: str, *, bias: bool = False) -> None:
        self._ops = scope.ops
        self._act = cast(Activation, act)
        spare = -num_inner % scope.ops.width_step
        gate_up = {"gate_proj": num_inner, "up_proj": num_inner}
        self._gate_up = Linear(scope, gate_up, num_channels, bias=bias, spare_out=spare)
        self.down = Linear(scope, {"down_proj": num_channels}, num_inner, bias=bias, spare_in=spare)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        return self.down(self.inner(x), residual=residual)

    def with_norm(self, norm: RmsNorm | LayerNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = mlp(x) + residual. `residual` is not written."""
        return norm.normalise_sum(self.down, self.inner(x), residual)

    def inner(self, x: Tensor | DeferredNorm) -> Tensor:
        """Returns act(gate(x)) * up(x), [T, padded inner width], the input of `down`."""
        return self._ops.linear_act_and_mul(x, self._gate_up.packed, self._act)

    def finish(self, norm: RmsNorm, inner: Tensor, residual: Tensor) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Returns (norm(y), y), y = down(inner) + residual. The norm may be deferred, and `residual` may be overwritten
        with y."""
        return norm.after_linear(self.down, inner, residual)


class Mlp:
    """A two-layer MLP: second(act(first(x))) + residual. `names` are the checkpoint names of the two layers, `scale` is
    the second layer's (see `Linear`). The inner width is padded with zeros as in `GatedMlp`: act(0) is 0."""

    def __init__(
        self,
        scope: Scope,
        names: tuple[str, str],
        num_in: int,
        num_inner: int,
        num_out: int,
        act: str,
        *,
        bias: bool = True,
        scale: str | None = None,
    ) -> None:
        spare = -num_inner % scope.ops.width_step
        self._first = Linear(scope, {names[0]: num_inner}, num_in, bias=bias, spare_out=spare)
        self._second = Linear(scope, {names[1]: num_out}, num_inner, bias=bias, scale=scale, spare_in=spare)
        self._act = cast(Activation, act)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        return self._second(self._first(x, self._act), residual=residual)

    def with_norm(self, norm: RmsNorm | LayerNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), y = mlp(x) + residual. `residual` is not written."""
        return norm.normalise_sum(self._second, self._first(x, self._act), residual)
