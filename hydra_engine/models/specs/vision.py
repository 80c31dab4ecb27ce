"""Shared parts of vision specs: shape and cost of tower layers, towers for pictures of one size, reading of a tower's
config and an image processor's settings, and the arithmetic of picture sizes, in integers. Does not know how a family
cuts a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_engine.core.prompting import PixelBudget
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.specs.base import PreprocessSpec, TowerAttention, VisionSpec
from hydra_engine.models.specs.decoder import activation
from hydra_engine.models.specs.fields import ELSEWHERE, MAX_LAYERS, Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
NO_PROCESSOR = "the model directory has neither processor_config.json nor preprocessor_config.json"
HALF = (0.5, 0.5, 0.5)
Colour = tuple[float, float, float]  # red, green, blue


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """Shape of the pre-norm layers of a vision tower."""

    hidden_size: int
    num_layers: int  # in the checkpoint
    num_heads: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    rms_norms: bool = False  # instead of layer norms
    qkv_bias: bool = True
    qk_norm: bool = False  # RMS norms of whole queries and keys
    gated: bool = False  # the MLP
    layer_scale: bool = False  # a factor for each output of attention and MLP (CaiT, section 2.1)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size if self.rms_norms else 2 * self.hidden_size

    def layer_parameters(self) -> int:
        c, f = self.hidden_size, self.intermediate_size
        mlp = 3 * c * f + 2 * f + c if self.gated else 2 * c * f + f + c
        attention = 4 * c * c + c * (1 + 3 * self.qkv_bias)
        return attention + mlp + 2 * self.norm_parameters + 2 * c * (self.qk_norm + self.layer_scale)

    def layer_work(self, num_rows: int, num_keys: int) -> int:
        """Multiply-adds of one layer for `num_rows` rows that each attend to `num_keys` rows."""
        c, f = self.hidden_size, self.intermediate_size
        return num_rows * (4 * c * c + (3 if self.gated else 2) * c * f + 2 * num_keys * c)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareTowerSpec(TowerSpec):
    """A tower with a class token for pictures of one size. `feature_layers` are the hidden states that are read: n is
    the output of n layers, 0 the embeddings. Later layers are never computed."""

    image_size: int
    patch_size: int
    feature_layers: tuple[int, ...]
    keep_cls: bool = False  # the class token's feature is kept
    patch_bias: bool = True  # of the projection of patches
    pre_norm: bool = False  # a norm before the layers
    final_norm: bool = False  # features are normalised by the norm after the last layer

    @property
    def num_active_layers(self) -> int:
        return max(self.feature_layers)

    @property
    def grid_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_side**2

    @property
    def num_rows(self) -> int:
        """Feature rows of one picture."""
        return self.num_patches + int(self.keep_cls)

    @property
    def feature_size(self) -> int:
        return len(self.feature_layers) * self.hidden_size

    def num_parameters(self) -> int:
        """Number of weights in memory: the tower up to its last active layer."""
        c = self.hidden_size
        embeddings = c * (3 * self.patch_size**2 + self.patch_bias + 1 + self.num_patches + 1)
        norms = 2 * c * (self.pre_norm + self.final_norm)
        return embeddings + norms + self.num_active_layers * self.layer_parameters()

    def flops(self) -> int:
        rows = self.num_patches + 1
        patches = self.num_patches * 3 * self.patch_size**2 * self.hidden_size
        return 2 * (patches + self.num_active_layers * self.layer_work(rows, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareVisionSpec(VisionSpec):
    """A `SquareTowerSpec` with a projector of two linear layers over `merge` x `merge` concatenated features."""

    tower: SquareTowerSpec
    merge: int = 1
    projector_act: str
    projector_bias: bool = True

    @property
    def attention(self) -> TowerAttention:
        return TowerAttention(self.tower.num_heads, self.tower.head_dim, self.tower.num_patches + 1)

    @property
    def num_tokens(self) -> int:
        """Feature rows of one picture after the projector."""
        return self.tower.num_rows // self.merge**2

    @property
    def merged_size(self) -> int:
        """Input width of the projector."""
        return self.tower.feature_size * self.merge**2

    def num_parameters(self) -> int:
        width = self.feature_size
        return self.tower.num_parameters() + width * (self.merged_size + width) + 2 * width * self.projector_bias

    def flops(self, num_patches: int) -> int:
        projector = 2 * self.num_tokens * self.feature_size * (self.merged_size + self.feature_size)
        return (self.tower.flops() + projector) * num_patches // self.tower.num_patches


def tower_config(config: Fields, model_type: str) -> Fields:
    """Returns `vision_config`. Raises CheckpointError if it names another model type."""
    tower = config.section("vision_config")
    name = tower.text("model_type", model_type)
    if name != model_type:
        raise CheckpointError(f"vision model type {name[:40]!r} is not supported; supported is {model_type}{ELSEWHERE}")
    return tower


def tower_shape(tower: Fields, defaults: TowerSpec) -> dict[str, Any]:
    """Reads the first six fields of a TowerSpec; transformers omits values that equal its config class's defaults."""
    hidden_size = tower.integer("hidden_size", defaults.hidden_size)
    num_heads = tower.integer("num_attention_heads", defaults.num_heads)
    if hidden_size % num_heads:
        raise CheckpointError(
            f"the vision tower's hidden size {hidden_size} is not a multiple of its {num_heads} heads"
        )
    return {
        "hidden_size": hidden_size,
        "num_layers": tower.integer("num_hidden_layers", defaults.num_layers, at_most=MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": tower.integer("intermediate_size", defaults.intermediate_size),
        "hidden_act": activation(tower, "hidden_act", defaults.hidden_act),
        "norm_eps": tower.number("layer_norm_eps", defaults.norm_eps),
    }


def check_patches(tower: Fields, image_size: int, patch_size: int) -> None:
    if patch_size > image_size or tower.integer("num_channels", 3) != 3:
        raise CheckpointError("the vision tower must take RGB pictures of at least one patch")


def processor_settings(images: Fields | None) -> Fields:
    if images is None:
        raise CheckpointError(NO_PROCESSOR)
    if not images.flag("do_resize", True):
        raise CheckpointError(f"do_resize false in {images.where} is not supported{ELSEWHERE}")
    return images


def normalisation(
    images: Fields,
    identity: str,
    *,
    mean: Colour = CLIP_MEAN,
    std: Colour = CLIP_STD,
) -> PreprocessSpec:
    """Reads resample, rescale, mean and std of an image processor's settings; the defaults are those of its class."""
    filter_name = RESAMPLE.get(images.integer("resample", 3, at_least=0))
    if filter_name is None:
        raise images.wrong_value("resample", "0, 1, 2 or 3")
    std = _colours(images, "image_std", std)
    if min(std) <= 0:
        raise images.wrong_value("image_std", "three numbers above 0")
    rescales, normalises = images.flag("do_rescale", True), images.flag("do_normalize", True)
    return PreprocessSpec(
        resample=filter_name,
        rescale=images.number("rescale_factor", 1 / 255) if rescales else 1.0,
        mean=_colours(images, "image_mean", mean) if normalises else (0.0, 0.0, 0.0),
        std=std if normalises else (1.0, 1.0, 1.0),
        identity=f"{identity}/{filter_name}",
    )


def _colours(images: Fields, name: str, default: Colour) -> Colour:
    red, green, blue = images.numbers(name, default)
    return red, green, blue


RATES = 1000  # frames a second, and seconds a frame, that a video may claim to have


def check_picture(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise InvalidImage(f"a picture of {width} x {height} pixels is empty")


def check_frames(num_frames: int, fps: float) -> None:
    """Raises InvalidImage for a video without frames or with an impossible frame rate."""
    if num_frames < 1:
        raise InvalidImage("the video has no frames")
    if not 1 / RATES <= fps <= RATES:
        raise InvalidImage(f"the video has {fps:g} frames a second; give a rate from {1 / RATES:g} to {RATES}")


def shortest_edge_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """Returns (width, height) with the shorter side scaled to `shortest_edge` and the other one rounded down."""
    if width <= height:
        return shortest_edge, int(shortest_edge * height / width)
    return int(shortest_edge * width / height), shortest_edge


def within_budget(
    sizes: Sequence[tuple[int, int]], budget: PixelBudget, unit_pixels: int = 1
) -> Sequence[tuple[int, int]]:
    """Filters the sizes that a budget allows; sides are in units of `unit_pixels` pixels of area. Returns the smallest
    sizes if none is small enough, the largest ones if none is large enough."""
    areas = [width * height * unit_pixels for width, height in sizes]
    most = max(areas) if budget.max_pixels is None else max(budget.max_pixels, min(areas))
    allowed = [area for area in areas if area <= most]
    least = 0 if budget.min_pixels is None else min(budget.min_pixels, max(allowed))
    return [size for size, area in zip(sizes, areas, strict=True) if least <= area <= most]
