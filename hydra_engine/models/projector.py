"""The LLaVA projector: two linear layers from the tower's width to the decoder's. Knows nothing else."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.layers import Linear
from hydra_engine.models.parameters import Scope


class LlavaProjector:
    def __init__(self, scope: Scope, num_in: int, num_out: int, *, act: str, bias: bool) -> None:
        self._first = Linear(scope, {"linear_1": num_out}, num_in, bias=bias)
        self._second = Linear(scope, {"linear_2": num_out}, num_out, bias=bias)
        self._act = cast(Activation, act)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, C * feature layers] -> [M, C of the decoder]"""
        return self._second(self._first(x, self._act))
