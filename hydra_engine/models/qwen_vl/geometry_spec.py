"""Picture sizes of the Qwen-VL families: any size is kept, rounded to whole merge blocks between two pixel counts.

Reads those settings in their old layout (`min_pixels`, `max_pixels`) and their new one (`size`). Does not know towers,
nor how many frames a video gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.core.options import SpecOptions
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, ConfigError, InvalidImage
from hydra_engine.models.specs.base import ItemPlan
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.geometry import check_picture

MAX_ASPECT = 200
MAX_FRAMES = 64  # of one temporal patch


class PixelLimits(NamedTuple):
    """Wanted range of pixels of a resized picture or frame; very long ones may be outside."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """The geometry of patches. A patch is `patch_size` pixels wide and high and `temporal_patch_size` pictures deep;
    `merge_size` by `merge_size` patches make one token."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def factor(self) -> int:
        """Side of a token in pixels; widths and heights are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    def item(self, size: tuple[int, int], num_pictures: int = 1, *, time: int = 0, continues: bool = False) -> ItemPlan:
        """Plans one temporal patch of resized pictures; `size` is (width, height), multiples of `factor`."""
        width, height = size
        rows, columns = height // self.factor, width // self.factor
        return ItemPlan(
            width=width,
            height=height,
            num_pictures=num_pictures,
            num_patches=rows * columns * self.patches_per_token,
            num_tokens=rows * columns,
            grid=(1, height // self.patch_size, width // self.patch_size),
            rows=rows,
            columns=columns,
            time=time,
            continues=continues,
        )


PICTURES = PixelLimits(56 * 56, 1280 * 28 * 28)  # the picture processor class's


def smart_resize(
    width: int, height: int, factor: int, limits: PixelLimits, num_frames: int = 1, depth: int = 1
) -> tuple[int, int]:
    """Returns (width, height), each side rounded to the nearest multiple of `factor`, halves to even. If that violates
    the limits, both sides are first scaled by one factor and then rounded into them. The limits are for `num_frames`
    pictures of this size together; in the comparison their number is rounded to whole temporal patches of `depth`.

    The arithmetic is that of the families' processors to the last bit: float64, in this order."""
    check_picture(width, height)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImage(
            f"a picture of {width} x {height} pixels is too long; its sides may differ by a factor of {MAX_ASPECT}",
            code="image_aspect_ratio",
        )
    wide, high = round(width / factor) * factor, round(height / factor) * factor
    pixels = round(num_frames / depth) * depth * wide * high
    if pixels > limits.max_pixels:
        wide, high = _filling(width, height, factor, limits.max_pixels, num_frames)
    elif pixels < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (num_frames * height * width))
        wide = math.ceil(width * grow / factor) * factor
        high = math.ceil(height * grow / factor) * factor
    return wide, high


def budgeted_size(width: int, height: int, factor: int, limits: PixelLimits, budget: PixelBudget) -> tuple[int, int]:
    """Applies `smart_resize` within limits and budget. A picture that rounding would enlarge beyond the budget is
    shrunk to it, so that `max_image_tokens` of the limits holds for every budget."""
    if budget == AS_CONFIGURED:
        return smart_resize(width, height, factor, limits)
    most = limits.max_pixels if budget.max_pixels is None else min(budget.max_pixels, limits.max_pixels)
    least = limits.min_pixels if budget.min_pixels is None else budget.min_pixels
    wide, high = smart_resize(width, height, factor, PixelLimits(min(least, most), most))
    if wide * high > most:
        wide, high = _filling(width, height, factor, most)
    return wide, high


def _filling(width: int, height: int, factor: int, pixels: int, num_frames: int = 1) -> tuple[int, int]:
    """Scales the picture to `pixels` in all frames together, keeping its shape, with both sides rounded down to whole
    blocks, at least one."""
    shrink = math.sqrt(num_frames * height * width / pixels)
    wide = max(factor, math.floor(width / shrink / factor) * factor)
    return wide, max(factor, math.floor(height / shrink / factor) * factor)


def max_image_tokens(factor: int, limits: PixelLimits) -> int:
    """Upper bound of the number of `factor` by `factor` blocks of any picture that `smart_resize` takes."""
    block = factor * factor
    # Shrunk: within the maximum, or one side stuck at one block and the other as long as the aspect allows.
    most = max(limits.max_pixels // block, math.isqrt(MAX_ASPECT * limits.max_pixels) // factor)
    # Grown: sides a, b with a * b = min_pixels, both rounded up; a may lie just above any multiple of the factor.
    most = max(most, math.isqrt(MAX_ASPECT * limits.min_pixels) // factor + 1)
    for rows in range(2, math.isqrt(limits.min_pixels) // factor + 3):
        most = max(most, rows * (limits.min_pixels // ((rows - 1) * block) + 1))
    return most


def pixel_limits(settings: Fields, default: PixelLimits, options: SpecOptions) -> PixelLimits:
    """Returns the user's limits, else `min_pixels` and `max_pixels`, else `shortest_edge` and `longest_edge` of `size`
    (pixel counts in spite of their names), else the default of the processor's class."""
    size = settings.section_if_present("size")
    least = _limit(settings, size, "min_pixels", "shortest_edge", default.min_pixels)
    most = _limit(settings, size, "max_pixels", "longest_edge", default.max_pixels)
    if least > most:
        raise CheckpointError(f"{settings.where} asks for pictures of at least {least} and at most {most} pixels")
    least = least if options.min_pixels is None else options.min_pixels
    most = most if options.max_pixels is None else options.max_pixels
    if not 1 <= least <= most:
        raise ConfigError(f"min_pixels {least} and max_pixels {most} contradict each other: give 1 <= min <= max")
    return PixelLimits(least, most)


def _limit(settings: Fields, size: Fields | None, name: str, edge: str, default: int) -> int:
    if name in settings:
        return settings.integer(name)
    return default if size is None else size.integer(edge)


def patch_geometry(tower: Fields, settings: Fields, patch_size: int) -> PatchGeometry:
    """Reads the tower's config and a processor's settings, which must agree; `patch_size` is the default of both."""
    geometry = PatchGeometry(
        patch_size=tower.integer("patch_size", patch_size),
        merge_size=tower.integer("spatial_merge_size", 2),
        temporal_patch_size=tower.integer("temporal_patch_size", 2, at_most=MAX_FRAMES),
    )
    for name, default in (("patch_size", patch_size), ("merge_size", 2), ("temporal_patch_size", 2)):
        expected = getattr(geometry, name)
        if settings.integer(name, default) != expected:
            raise settings.wrong_value(name, f"{expected}, as the vision tower has it")
    if tower.integer("in_channels", 3) != 3:
        raise tower.wrong_value("in_channels", "3 colours")
    return geometry
