"""Pictures on the device: from uint8 to the numbers that a tower's first matrix takes.

One byte per colour travels to the device; normalising happens there, with the processors' arithmetic.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hydra_engine.backend.base import PackedLinear
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import PreprocessSpec


class PixelNormaliser:
    """(x * rescale - mean) / std in float32, the product rounded once, exactly as transformers' processors do."""

    def __init__(self, spec: PreprocessSpec, device: torch.device) -> None:
        self._rescale = spec.rescale
        self._mean = torch.tensor(spec.mean, dtype=torch.float32, device=device)
        self._std = torch.tensor(spec.std, dtype=torch.float32, device=device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [..., 3] -> float32"""
        return pixels.to(torch.float64).mul_(self._rescale).to(torch.float32).sub_(self._mean).div_(self._std)

    def rows(self, patches: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [P, pixels * 3] -> [P, pixels * 3] of `dtype`"""
        return self(patches.unflatten(1, (-1, 3))).to(dtype).flatten(1)


class PatchProjection:
    """Normalised patches through the matrix of a convolution whose steps are its kernel's size."""

    packed: PackedLinear

    def __init__(
        self, scope: Scope, num_channels: int, kernel: tuple[int, ...], preprocess: PreprocessSpec, *, bias: bool = True
    ) -> None:
        self._ops, self._dtype = scope.ops, scope.dtype
        self._normalise = PixelNormaliser(preprocess, scope.device)
        self.num_values = 3 * math.prod(kernel)  # bytes of a patch
        shapes: dict[str, tuple[int, ...]] = {"weight": (num_channels, 3, *kernel)}
        if bias:
            shapes["bias"] = (num_channels,)
        self._num_parts = len(shapes)
        self._arrived: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            scope.want(name, shape, partial(self._fill, name))
        scope.hold(self)

    def __call__(self, patches: Tensor, residual: Tensor | None = None) -> Tensor:
        """uint8 [P, num_values] -> [P, C]"""
        return self._ops.linear(self._normalise.rows(patches, self._dtype), self.packed, residual=residual)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def _fill(self, name: str, tensor: Tensor) -> None:
        """[C, 3, *kernel] -> [C, kernel * 3], the order of pixels in memory."""
        self._arrived[name] = tensor
        if len(self._arrived) == self._num_parts:
            weight = self._arrived.pop("weight").movedim(1, -1).flatten(1)
            self.packed = self._ops.pack_linear(weight, self._arrived.pop("bias", None))
