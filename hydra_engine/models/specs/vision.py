"""What all families read of a vision tower's config and of an image processor's settings.

Does not know how a picture is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import PreprocessSpec
from hydra_engine.models.specs.fields import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareTowerSpec:
    """A tower for pictures of one size, with a class token. Hidden state n is the output of n layers, 0 the embeddings:
    layers behind the last state that is read are never computed."""

    hidden_size: int
    num_layers: int  # in the checkpoint
    num_active_layers: int
    num_heads: int
    intermediate_size: int
    image_size: int
    patch_size: int
    hidden_act: str
    norm_eps: float

    @property
    def grid_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Of one picture."""
        return self.grid_side**2

    def flops(self) -> int:
        """Of one picture."""
        c, rows = self.hidden_size, self.num_patches + 1
        layer = rows * (4 * c * c + 2 * c * self.intermediate_size) + 2 * rows * rows * c
        return 2 * (self.num_patches * 3 * self.patch_size**2 * c + self.num_active_layers * layer)


def tower_config(config: Fields, model_type: str) -> Fields:
    """`vision_config`, of that model type where it names one."""
    tower = config.section("vision_config")
    named = tower.text("model_type", model_type)
    if named != model_type:
        raise CheckpointError(f"vision model type {named[:40]!r} is not supported; supported is {model_type}")
    return tower


def check_tower(tower: Fields, hidden_size: int, num_heads: int, image_size: int, patch_size: int) -> None:
    if hidden_size % num_heads:
        raise CheckpointError(
            f"the vision tower's hidden size {hidden_size} is not a multiple of its {num_heads} heads"
        )
    if patch_size > image_size or tower.integer("num_channels", 3) != 3:
        raise CheckpointError("the vision tower must take RGB pictures of at least one patch")


def processor_settings(images: Fields | None) -> Fields:
    if images is None:
        raise CheckpointError("the model directory has neither processor_config.json nor preprocessor_config.json")
    if not images.flag("do_resize", True):
        raise CheckpointError(f"do_resize false in {images.where} is not supported")
    return images


def normalisation(
    images: Fields,
    identity: str,
    *,
    mean: tuple[float, float, float] = CLIP_MEAN,
    std: tuple[float, float, float] = CLIP_STD,
    resample: int = 3,
) -> PreprocessSpec:
    """resample, rescale, mean and std of an image processor's settings; the defaults are those of its class."""
    filter_name = RESAMPLE.get(images.integer("resample", resample, at_least=0))
    if filter_name is None:
        raise images.wrong("resample", "0, 1, 2 or 3")
    std = _colours(images, "image_std", std)
    if min(std) <= 0:
        raise images.wrong("image_std", "three numbers above 0")
    rescales, normalises = images.flag("do_rescale", True), images.flag("do_normalize", True)
    return PreprocessSpec(
        resample=filter_name,
        rescale=images.number("rescale_factor", 1 / 255) if rescales else 1.0,
        mean=_colours(images, "image_mean", mean) if normalises else (0.0, 0.0, 0.0),
        std=std if normalises else (1.0, 1.0, 1.0),
        identity=f"{identity}/{filter_name}",
    )


def _colours(images: Fields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    red, green, blue = images.numbers(name, default)
    return red, green, blue
