"""What a model family is, without torch: shapes, image geometry, positions, byte and FLOP formulas.

A spec is parsed from config.json (and the processor's config) alone. Intake, admission, budgets and the planner work
from it; `models/` builds modules that agree with it. Does not know tensors, weights or files other than JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hydra_engine.core.media import ImageItem

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ImageGeometry(NamedTuple):
    """What a picture of some size becomes."""

    width: int  # of the processed picture, pixels
    height: int
    num_patches: int  # rows of the vision tower, CLS token not counted
    num_tokens: int  # placeholders in the prompt, rows in the image cache
    grid: tuple[int, int, int]  # (time, rows, columns) in patches


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """How pixels get from a decoded RGB picture to the tower, with transformers' field meanings.

    `resize` is "shortest_edge" (then centre crop to crop_height x crop_width), or "exact".
    """

    resize: str
    shortest_edge: int
    crop_width: int
    crop_height: int
    resample: str  # "bicubic", "bilinear", "lanczos", "nearest"
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    identity: str  # part of every image digest: family, sizes, resample; changes when the pixels would


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    attention_bias: bool = False
    hidden_act: str = "silu"
    rope_parameters: dict[str, object] = field(default_factory=dict)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype_bytes

    def num_parameters(self) -> int:
        """Weights of the decoder with embeddings and head."""
        c, d = self.hidden_size, self.head_dim
        attention = c * (self.num_heads + 2 * self.num_kv_heads) * d + self.num_heads * d * c
        layer = attention + 3 * c * self.intermediate_size + 2 * c
        return self.num_layers * layer + self.vocab_size * c * (1 if self.tie_embeddings else 2) + c

    def flops_per_token(self, num_context: int) -> int:
        """Multiply-adds times two of one token through the layers (head not counted) with that much context."""
        c, d = self.hidden_size, self.head_dim
        linear = c * (2 * self.num_heads + 2 * self.num_kv_heads) * d + 3 * c * self.intermediate_size
        return self.num_layers * 2 * (linear + 2 * num_context * self.num_heads * d)


class VisionSpec(Protocol):
    """A family's tower: geometry and cost. Concrete dataclasses live beside their family."""

    @property
    def preprocess(self) -> PreprocessSpec: ...

    @property
    def feature_size(self) -> int:
        """C of the image cache."""
        ...

    @property
    def num_planes(self) -> int:
        """Feature planes per image: 1 but for deepstack models."""
        ...

    @property
    def max_tokens_per_image(self) -> int: ...

    @property
    def max_patches_per_image(self) -> int: ...

    def geometry(self, width: int, height: int) -> ImageGeometry:
        """Of a decoded (orientation applied) picture; raises InvalidImage for a shape the family cannot take."""
        ...

    def num_parameters(self) -> int: ...

    def flops(self, num_patches: int) -> int: ...


PositionRule = Callable[[int, Sequence[ImageItem]], "list[int] | list[list[int]]"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One checkpoint's shape. `vision` is None for text-only checkpoints."""

    family: str  # "llava", ...
    architecture: str  # architectures[0] of config.json
    language: LanguageSpec
    vision: VisionSpec | None
    image_token_id: int | None
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the stored weights: "bfloat16", ...

    @property
    def max_model_len(self) -> int:
        return self.language.max_position
