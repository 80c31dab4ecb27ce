"""The tower of openPangu-VL-7B: Qwen2.5-VL's window tower, whose outputs of several layers pass mergers of their own;
a projection takes their sum to the decoder. See `spec.py` for the names of its weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from hydra_engine.models.layers.basic import Linear, RmsNorm
from hydra_engine.models.layers.vision import TowerInput
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.openpangu.spec import OpenPanguVisionSpec
from hydra_engine.models.qwen_vl.model import LAYER, QWEN_RENAMES, WindowVision, qwen2_merger

FUSED = LAYER._replace(mlp=("mlp.up_proj", "mlp.down_proj"))
SPLIT = FUSED._replace(qkv=("q", "k", "v"))


class OpenPanguVision(WindowVision):
    renames = QWEN_RENAMES

    def __init__(self, scope: Scope, spec: OpenPanguVisionSpec) -> None:
        scope = scope.child("visual")
        super().__init__(scope, spec, names=SPLIT if scope.holds("blocks.0.attn.q.weight") else FUSED)
        tower = spec.tower
        final = RmsNorm(scope.child("final_layernorm"), tower.hidden_size, tower.norm_eps)
        count = 1 + len(spec.read_layers)
        self._merger, *others = (
            qwen2_merger(place, spec, RmsNorm, spec.merger_size, before=final)
            for place in scope.children("merger", count, "mm_unit_vision_select_layer", kind="mergers")
        )
        self._deep_mergers = dict(zip(spec.read_layers, others, strict=True))
        self._project = Linear(
            scope.child("vision_projection"), {"fc1": spec.feature_size}, spec.merger_size, bias=True
        )
        self.num_slices += count

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        merged, *others = super().__call__(inputs)
        for plane in reversed(others):  # from the last layer to the first
            merged = merged + plane
        inputs.slices.checkpoint()
        return (inputs.slices.rows(self._project, silu(merged)),)
