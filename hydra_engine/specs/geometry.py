"""Arithmetic of picture sizes that several families share, and the refusals that go with it. Integers in and out."""

from __future__ import annotations

from hydra_engine.errors import InvalidImage, InvalidRequest


def check_picture(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise InvalidImage(f"a picture of {width} x {height} pixels is empty")


def no_videos() -> InvalidRequest:
    return InvalidRequest("this model takes no videos; send pictures instead", code="video_not_supported")


def shortest_edge_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """(width, height): the shorter side becomes `shortest_edge`; the other one keeps the aspect, rounded down."""
    if width <= height:
        return shortest_edge, int(shortest_edge * height / width)
    return int(shortest_edge * width / height), shortest_edge
