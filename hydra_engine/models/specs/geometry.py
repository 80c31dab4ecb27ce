"""Arithmetic of picture sizes that several families share, and its errors. Integers in and out."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.prompting import PixelBudget
from hydra_engine.errors import InvalidImage, InvalidRequest

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


def no_videos() -> InvalidRequest:
    return InvalidRequest("this model takes no videos; send pictures instead", code="video_not_supported")


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
