"""Pictures on the device: from uint8 to the numbers that a tower's first matrix takes.

One byte per colour travels to the device; normalising happens there, with the processors' arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.specs.base import PreprocessSpec


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
