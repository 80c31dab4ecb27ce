"""MiniCPM-V's cutting of a picture: one picture of the whole, and a grid of slices if it has more pixels than that.

Published for LLaVA-UHD (section 3.1): as many slices as the picture has tower pictures, in the grid nearest to its
shape. Rounding is that of transformers' processor, floats between integers. Also chooses the frames of a video. Does
not know patches, tokens or marks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.geometry import check_frames

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

    def max_cells(self) -> int:
        """Most cells of one picture or slice of any accepted shape. For a number of rows the largest is the lowest."""
        longest = math.sqrt(MAX_ASPECT)
        least, most = max(int(self.scale / longest), 1), int(self.scale * longest)
        turns = (half * self.cell // 2 + more for half in range(1, 2 * most // self.cell + 2, 2) for more in (0, 1))
        heights = [least, *(height for height in turns if least < height <= most)]
        return max(_nearest(self.scale**2 // h, self.cell) * _nearest(h, self.cell) for h in heights) // self.cell**2


def one_frame_a_second(num_frames: int, fps: float, most: int) -> tuple[int, ...]:
    """Returns the source frames at every whole second; for a video of more than `most` seconds `most` frames, evenly
    spread over every tenth of a second. Raises InvalidImage for a video without frames or with an impossible frame
    rate."""
    check_frames(num_frames, fps)
    duration_s = num_frames / fps
    if duration_s <= most:
        times_s: list[float] = list(range(math.ceil(duration_s)))
    else:
        times_s = [round(tenth * 0.1, 1) for tenth in _spread(int(duration_s / 0.1), most)]
    return tuple(min(int(time_s * fps), num_frames - 1) for time_s in times_s)


def _spread(count: int, most: int) -> list[int]:
    """Selects at most `most` of the numbers 0 to `count` - 1, the first and, unless `most` is 1, the last included."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / max(most - 1, 1)
    return [int(index * step) for index in range(most - 1)] + [count - 1 if most > 1 else 0]


def _nearest(length: int, unit: int) -> int:
    """Returns the multiple of `unit` nearest to `length`, halves to even, at least one."""
    return max(round(length / unit), 1) * unit
