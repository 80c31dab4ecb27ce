"""Sides of the cases in op_cases/: the CUDA ops on a device, or interpreted on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda.ops import CudaOps

Arrays = Sequence[npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Side:
    device: torch.device
    ops: CudaOps
    exact: CudaOps  # deterministic

    def there(self, host: Tensor) -> Tensor:
        """The same view of a copy of the whole memory behind it."""
        memory = torch.empty(0, dtype=host.dtype).set_(host.untyped_storage())
        return memory.to(self.device, copy=True).as_strided(host.shape, host.stride(), host.storage_offset())

    def cache(self, host: PagedCache) -> PagedCache:
        return PagedCache(self.there(host.data))


def interpreted() -> Side:
    """Needs a process in which Triton interprets. No op of the extension's can be called."""

    def send(arrays: Arrays) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array.copy()) for array in arrays)

    host = torch.device("cpu")
    return Side(host, CudaOps(host, 4, send), CudaOps(host, 4, send, deterministic=True))
