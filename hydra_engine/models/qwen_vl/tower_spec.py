"""Towers of the Qwen-VL families: the shape of their layers and what their specs have in common."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.models.qwen_vl.geometry_spec import PatchGeometry, PixelLimits, budgeted_size, most_tokens
from hydra_engine.models.specs.assemble import ModelFiles, model_spec
from hydra_engine.models.specs.base import LanguageSpec, MediaPlan, ModelSpec, View, VisionSpec
from hydra_engine.models.specs.fields import Fields


@dataclass(frozen=True, slots=True)
class QwenTower:
    """Shape of the layers. Qwen2.5-VL: `window_tokens` is the side of a window, in which all layers but `full_layers`
    attend, and the MLPs are gated. The others: 0, plain MLPs, LayerNorm instead of RMSNorm."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str
    rope_theta: float
    window_tokens: int = 0
    full_layers: frozenset[int] = frozenset()

    @property
    def windowed(self) -> bool:
        return self.window_tokens > 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size if self.windowed else 2 * self.hidden_size

    def layer_parameters(self) -> int:
        c, f = self.hidden_size, self.intermediate_size
        mlp = 3 * c * f + 2 * f + c if self.windowed else 2 * c * f + f + c
        return 4 * (c * c + c) + mlp + 2 * self.norm_parameters

    def layer_flops(self, num_rows: int) -> int:
        """Of one layer, attention not counted."""
        mlp = (3 if self.windowed else 2) * self.hidden_size * self.intermediate_size
        return 2 * num_rows * (4 * self.hidden_size**2 + mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridVisionSpec(VisionSpec):
    """A tower for pictures of any size: a picture is one span."""

    tower: QwenTower
    geometry: PatchGeometry
    limits: PixelLimits

    @property
    def merged_size(self) -> int:
        """Channels of the patches of one token side by side."""
        return self.tower.hidden_size * self.geometry.patches_per_token

    def merger_parameters(self) -> int:
        """Of its two linear layers."""
        return (self.merged_size + 1) * self.merged_size + (self.merged_size + 1) * self.feature_size

    @property
    def max_tokens_per_image(self) -> int:
        return most_tokens(self.geometry.factor, self.limits)

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        size = budgeted_size(width, height, self.geometry.factor, self.limits, budget)
        return MediaPlan((View.whole(*size),), (self.geometry.item(size),))


def build_grid_model(
    files: ModelFiles, family: str, text: Fields, language: LanguageSpec, vision: GridVisionSpec
) -> ModelSpec:
    return model_spec(
        files,
        family,
        text,
        language,
        vision=vision,
        image_token_id=files.config.integer("image_token_id", 151655, at_least=0),
        video_token_id=files.config.integer("video_token_id", 151656, at_least=0),
    )
