"""The LLaVA projector: two linear layers from the tower's width to the decoder's. Knows nothing else."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.layers import Linear
from hydra_engine.models.parameters import Scope
from hydra_engine.specs.llava import LlavaVisionSpec


class LlavaProjector:
    def __init__(self, scope: Scope, spec: LlavaVisionSpec) -> None:
        num_in = spec.hidden_size * len(spec.feature_layers)
        self._first = Linear(scope, {"linear_1": spec.feature_size}, num_in, bias=spec.projector_bias)
        self._second = Linear(scope, {"linear_2": spec.feature_size}, spec.feature_size, bias=spec.projector_bias)
        self._act = cast(Activation, spec.projector_act)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, C * feature layers] -> [M, C of the decoder]"""
        return self._second(self._first(x, self._act))
