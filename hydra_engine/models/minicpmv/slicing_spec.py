"""Pictures cut into slices, and the marks around them in a prompt: what MiniCPM-V's models have in common.

A picture is encoded whole, resized to about `scale` squared pixels, and if it has more, also as a grid of slices of
about that size: as many as its pixels fill, in the grid nearest to its shape (LLaVA-UHD, section 3.1). Rounding is that
of the models' processors, floats between integers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, View, VisionSpec
from hydra_engine.models.specs.vision import TowerSpec, check_picture

MAX_SLICES, MAX_SCALE = 1024, 1 << 14  # beyond any processor's limits
MAX_ASPECT = 200  # beyond, one picture could become thousands of tokens: its shorter side is never below one cell


@dataclass(frozen=True, slots=True)
class Slicing:
    """Settings of the cut. `scale` squared is the target number of pixels of a picture or slice, `cell` the side of one
    token in pixels. Sizes are (width, height), grids (rows, columns). `max_slices` 1: no slices. A small picture counts
    as one that fills `min_slices`."""

    scale: int
    cell: int
    max_slices: int
    min_slices: int = 1

    def with_budget(self, budget: PixelBudget) -> Slicing:
        """Returns a slicing with fewer slices, down to none, or with more for small pictures. The picture of the whole
        is not counted and keeps its size."""
        if budget == AS_CONFIGURED:
            return self
        most, least = self.max_slices, self.min_slices
        if budget.max_pixels is not None:
            most = max(1, min(most, budget.max_pixels // self.scale**2))
        if budget.min_pixels is not None:
            least = max(1, budget.min_pixels // self.scale**2)
        return replace(self, max_slices=most, min_slices=min(least, most))

    def fit_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size in whole cells with about `scale` squared pixels and about this shape."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidImage(
                f"a picture of {width} x {height} pixels is too long for this model; it takes up to {MAX_ASPECT} to 1",
                code="image_aspect_ratio",
            )
        aspect = width / height
        rows = int(self.scale / math.sqrt(aspect))
        return _nearest(int(rows * aspect), self.cell), _nearest(rows, self.cell)

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns the grid of slices; None for a picture that is not cut."""
        target = min(max(-(-width * height // self.scale**2), self.min_slices), self.max_slices)
        if target <= 1:
            return None
        shape = math.log(width / height)
        best, least = (1, 1), math.inf
        for count in (target - 1, target, target + 1):
            if not 1 < count <= self.max_slices:
                continue
            for rows in (n for n in range(1, count + 1) if count % n == 0):
                error = abs(shape - math.log(count // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, count // rows), error
        return best

    def slice_size(self, width: int, height: int, grid: tuple[int, int]) -> tuple[int, int]:
        rows, columns = grid
        return self.fit_size(_nearest(width, columns) // columns, _nearest(height, rows) // rows)

    @property
    def max_side(self) -> int:
        """Upper bound of the cells along a side of a picture or slice."""
        return int(self.scale * math.sqrt(MAX_ASPECT) / self.cell) + 1

    def max_cells(self) -> int:
        """Maximum number of cells of a picture or slice of any accepted shape. Of all pictures with a number of rows
        the lowest has the most columns, so only the heights at which rounding adds a row are tried."""
        longest = math.sqrt(MAX_ASPECT)
        least, most = max(int(self.scale / longest), 1), int(self.scale * longest)
        turns = (half * self.cell // 2 + more for half in range(1, 2 * most // self.cell + 2, 2) for more in (0, 1))
        heights = [least, *(height for height in turns if least < height <= most)]
        return max(_nearest(self.scale**2 // h, self.cell) * _nearest(h, self.cell) for h in heights) // self.cell**2


def _nearest(length: int, unit: int) -> int:
    """Returns the multiple of `unit` nearest to `length`, halves to even, at least one."""
    return max(round(length / unit), 1) * unit


Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Marks:
    """Pairs of tokens around the features of a picture, of a slice, and around a picture's number."""

    picture: Pair
    slice: Pair
    number: Pair | None  # None: pictures are not numbered


class SlicedPicture(NamedTuple):
    """A picture as tower input: the whole, then slices row by row, `columns` in a row."""

    views: tuple[View, ...]
    whole: ItemPlan
    slices: tuple[ItemPlan, ...] = ()
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedVisionSpec(VisionSpec):
    """A tower for pictures of any shape, of which every picture and every slice is one."""

    tower: TowerSpec
    patch_size: int
    num_positions: int  # along each side of the table of learned positions
    marks: Marks
    images: Slicing

    @abstractmethod
    def num_tokens(self, num_patches: int) -> int:
        """Number of tokens of a picture or slice."""

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        check_picture(width, height)
        cut = self._cut(self.images.with_budget(budget), width, height)
        return MediaPlan(cut.views, self._marked(cut, 1), number=self.marks.number)

    def _cut(self, slicing: Slicing, width: int, height: int) -> SlicedPicture:
        whole = slicing.fit_size(width, height)
        grid = slicing.grid(width, height)
        if grid is None:
            return SlicedPicture((View.whole(*whole),), self._item(whole))
        rows, columns = grid
        tile = slicing.slice_size(width, height, grid)
        canvas = (tile[0] * columns, tile[1] * rows)
        views = (View.whole(*whole), View(canvas, canvas, (0, 0), tile))
        return SlicedPicture(views, self._item(whole), (self._item(tile),) * (rows * columns), columns)

    def _item(self, size: tuple[int, int]) -> ItemPlan:
        width, height = size
        rows, columns = height // self.patch_size, width // self.patch_size
        return ItemPlan(width, height, 1, rows * columns, self.num_tokens(rows * columns), (1, rows, columns))

    def _marked(self, cut: SlicedPicture, times: int) -> tuple[str | ItemPlan, ...]:
        """Returns marks around every item, with line breaks between rows of slices, repeated for each of `times`
        frames."""
        (opening, closing), (slice_opening, slice_closing) = self.marks.picture, self.marks.slice
        parts: list[str | ItemPlan] = []
        text = ""
        for _ in range(times):
            parts += [text + opening, cut.whole]
            text = closing
            for index, tile in enumerate(cut.slices):
                line_break = "\n" if index and index % cut.columns == 0 else ""
                parts += [text + line_break + slice_opening, tile]
                text = slice_closing
        return (*parts, text)
