"""Inputs of the cases, and the reference for their results."""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.backend.reference.ops import ReferenceOps

REFERENCE = ReferenceOps()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
