"""Arithmetic of picture sizes that several families share, and the refusals that go with it. Integers in and out."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.prompting import PixelBudget
from hydra_engine.errors import InvalidImage, InvalidRequest

RATES = 1000  # frames a second, and seconds a frame, that a video may claim to have


def check_picture(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise InvalidImage(f"a picture of {width} x {height} pixels is empty")


def check_frames(num_frames: int, fps: float) -> None:
    """Refuses a video that says impossible things of itself."""
    if num_frames < 1:
        raise InvalidImage("the video has no frames")
    if not 1 / RATES <= fps <= RATES:
        raise InvalidImage(f"the video has {fps:g} frames a second; give a rate from {1 / RATES:g} to {RATES}")


def no_videos() -> InvalidRequest:
    return InvalidRequest("this model takes no videos; send pictures instead", code="video_not_supported")


def shortest_edge_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """(width, height): the shorter side becomes `shortest_edge`; the other one keeps the aspect, rounded down."""
    if width <= height:
        return shortest_edge, int(shortest_edge * height / width)
    return int(shortest_edge * width / height), shortest_edge


def within_budget(
    sizes: Sequence[tuple[int, int]], budget: PixelBudget, unit_pixels: int = 1
) -> Sequence[tuple[int, int]]:
    """The sizes that a budget allows, their sides in units whose squares have so many pixels; the smallest ones where
    it allows none, the largest ones where it demands more."""
    areas = [width * height * unit_pixels for width, height in sizes]
    most = max(areas) if budget.max_pixels is None else max(budget.max_pixels, min(areas))
    allowed = [area for area in areas if area <= most]
    least = 0 if budget.min_pixels is None else min(budget.min_pixels, max(allowed))
    return [size for size, area in zip(sizes, areas, strict=True) if least <= area <= most]
