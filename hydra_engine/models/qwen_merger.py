"""The merger of Qwen2-VL and Qwen2.5-VL towers: the patches of one token, side by side, through two layers."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.layers import LayerNorm, Linear, RmsNorm
from hydra_engine.models.parameters import Scope


class PatchMerger:
    """`norm` is applied to each patch and sits at `ln_q` of the scope."""

    def __init__(self, scope: Scope, norm: LayerNorm | RmsNorm, num_in: int, num_merged: int, num_out: int) -> None:
        self._norm = norm
        self._width = num_in * num_merged
        self._first = Linear(scope, {"mlp.0": self._width}, self._width, bias=True)
        self._second = Linear(scope, {"mlp.2": num_out}, self._width, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[P, C], the patches of a token behind one another -> [P / merged, C of the decoder]"""
        return self._second(self._first(self._norm(x).view(-1, self._width), "gelu"))
