"""LLaVA-NeXT (LLaVA-1.6): a picture is encoded twice, stretched to one square and cut into tiles at the best of several
resolutions; features of the canvas's borders are dropped, and every feature row ends with a newline. Tower, projector
and decoders are those of LLaVA-1.5.

Features of the canvas are in the prompt row by row across its tiles, so a row of tiles is the smallest part of it that
is a span: the square and each row of tiles are encoded, cached and moved separately, by several encoders if there are.

Sizes are computed in double precision in transformers' order of operations, because a product that should be whole may
be rounded just below or above it and then counts as one pixel less or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.models.llava.spec import build_clip_model, clip_tower, picture_sizes
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, ModelSpec, View
from hydra_engine.models.specs.decoder import activation
from hydra_engine.models.specs.fields import ELSEWHERE, Fields
from hydra_engine.models.specs.vision import SquareVisionSpec, check_picture, normalisation, within_budget

Size = tuple[int, int]  # width, height
PINPOINTS: tuple[Size, ...] = ((672, 336), (336, 672), (672, 672), (336, 1008), (1008, 336))  # transformers' default
MAX_SIDE = 1 << 16  # pixels of a canvas
MAX_PINPOINTS = 1024  # canvases, of which one is chosen for each picture


class Region(NamedTuple):
    """The kept part of a grid of features: rows [top, top + rows) and columns [left, left + columns)."""

    top: int
    left: int
    rows: int
    columns: int

    def rows_of(self, number: int, side: int) -> tuple[int, int]:
        """Returns the rows [first, end) of the grid that are in row `number` of tiles, counted from 1; a tile has
        `side` rows."""
        top = (number - 1) * side
        return max(self.top, top), min(self.top + self.rows, top + side)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextVisionSpec(SquareVisionSpec):
    """LLaVA-NeXT's tower and tiling. `resolutions` are the possible canvases, multiples of the tower's picture size.

    A picture has a span for its square, then one for each row of tiles of its canvas that is not all border. The grid
    of such a span is that of the canvas, with the row's number (from 1) in place of the time; the square's has 0."""

    resolutions: tuple[Size, ...]

    @property
    def max_patches_per_image(self) -> int:
        side = self.tower.image_size
        most = max((width // side) * (height // side) for width, height in self.resolutions)
        return (1 + most) * self.tower.num_patches

    @property
    def max_tokens_per_image(self) -> int:
        """Maximum number of tokens of a picture: one with the aspect ratio of its canvas, of which nothing is
        dropped."""
        canvases = [self._grid(size) for size in self.resolutions]
        return self.tower.num_patches + max(rows * (columns + 1) for rows, columns in canvases)

    @property
    def max_tokens_per_item(self) -> int:
        return self.tower.grid_side * (max(self._grid(size)[1] for size in self.resolutions) + 1)

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        check_picture(width, height)
        side = self.tower.image_size
        canvas = best_resolution(width, height, within_budget(self.resolutions, budget))
        resized = size_within(width, height, canvas)
        corner = ((canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2)
        grid_side, (rows, columns) = self.tower.grid_side, self._grid(canvas)
        square = ItemPlan(side, side, 1, self.tower.num_patches, self.tower.num_patches, (0, grid_side, grid_side))
        kept = unpadded(rows, columns, width, height)
        if not kept.rows:
            return MediaPlan((View.whole(side, side),), (square,))
        first, last = kept.top // grid_side, (kept.top + kept.rows - 1) // grid_side
        seen = View(
            resized, (canvas[0], (last + 1 - first) * side), (corner[0], corner[1] - first * side), (side, side)
        )
        num_tiles = columns // grid_side
        tiles = (
            ItemPlan(
                side,
                side,
                num_tiles,
                num_tiles * self.tower.num_patches,
                len(range(*kept.rows_of(number, grid_side))) * (kept.columns + 1),
                (number, rows, columns),
            )
            for number in range(first + 1, last + 2)
        )
        return MediaPlan((View.whole(side, side), seen), (square, *tiles))

    def num_parameters(self) -> int:
        return SquareVisionSpec.num_parameters(self) + self.feature_size

    def _grid(self, canvas: Size) -> tuple[int, int]:
        """Rows and columns of features; pixels beyond a tile's last whole patch have none."""
        side = self.tower.image_size
        return canvas[1] // side * self.tower.grid_side, canvas[0] // side * self.tower.grid_side


def best_resolution(width: int, height: int, resolutions: Sequence[Size]) -> Size:
    """Returns the canvas that keeps most pixels of the picture; of several the one that wastes least, then the first
    (LLaVA-NeXT, "dynamic high resolution")."""

    def merit(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[0] / width, canvas[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(resolutions, key=merit)


def size_within(width: int, height: int, canvas: Size) -> Size:
    """Returns the largest size within the canvas with the picture's aspect ratio; the shorter side is rounded up."""
    scale_x, scale_y = canvas[0] / width, canvas[1] / height
    if scale_x < scale_y:
        return canvas[0], min(math.ceil(height * scale_x), canvas[1])
    return min(math.ceil(width * scale_y), canvas[0]), canvas[1]


def unpadded(rows: int, columns: int, width: int, height: int) -> Region:
    """Returns the part of a canvas's grid that a picture of that size covers. Both sides lose equally many rows
    or columns of border, so of an odd number one stays. The part of a very thin picture may be empty."""
    if width / height > columns / rows:
        border = (rows - int(round(height * (columns / width), 7))) // 2
        return Region(border, 0, rows - 2 * border, columns)
    border = (columns - int(round(width * (rows / height), 7))) // 2
    return Region(0, border, rows, columns - 2 * border)


def build_llava_next(files: ModelFiles) -> ModelSpec:
    return build_clip_model(files, "llava_next", _vision)


def _vision(config: Fields, settings: Fields, feature_size: int) -> LlavaNextVisionSpec:
    tower = clip_tower(config)
    if tower.keep_cls:
        raise config.wrong_value("vision_feature_select_strategy", '"default": class tokens have no place in a grid')
    _check_sizes(settings, tower.image_size)
    resolutions = read_resolutions(config, tower.image_size, PINPOINTS)
    if read_resolutions(settings, tower.image_size, resolutions) != resolutions:
        raise CheckpointError(f"image_grid_pinpoints of {config.where} and of {settings.where} differ")
    return LlavaNextVisionSpec(
        tower=tower,
        projector_act=activation(config, "projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", True),
        feature_size=feature_size,
        resolutions=resolutions,
        preprocess=normalisation(settings, f"llava_next/{tower.image_size}"),
    )


def _check_sizes(settings: Fields, side: int) -> None:
    """Raises CheckpointError if tiles would be resized again: they must have the tower's size."""
    if not settings.flag("do_center_crop", True):
        raise CheckpointError(f"do_center_crop false in {settings.where} is not supported{ELSEWHERE}")
    shortest_edge, (height, width) = picture_sizes(settings, side)
    if (height, width) != (side, side) or shortest_edge not in (0, side):
        raise CheckpointError(f"size and crop_size in {settings.where} must be {side}, as the tower's image_size")


def read_resolutions(fields: Fields, side: int, default: tuple[Size, ...]) -> tuple[Size, ...]:
    """Reads image_grid_pinpoints, a list of [height, width]; `default` where it is absent."""
    pinpoints = fields.get("image_grid_pinpoints")
    if pinpoints is None:
        pinpoints = [[height, width] for width, height in default]
    if not isinstance(pinpoints, list) or not pinpoints:
        raise fields.wrong_value("image_grid_pinpoints", "a list of heights and widths")
    if len(pinpoints) > MAX_PINPOINTS:
        raise fields.wrong_value("image_grid_pinpoints", f"at most {MAX_PINPOINTS} pairs")
    sizes = []
    for pinpoint in pinpoints:
        values = pinpoint if isinstance(pinpoint, list) else []
        if len(values) != 2 or any(type(n) is not int or not 0 < n <= MAX_SIDE or n % side for n in values):
            raise fields.wrong_value("image_grid_pinpoints", f"pairs of multiples of the tower's {side} pixels")
        sizes.append((values[1], values[0]))
    return tuple(sizes)
