"""What the engine knows about one image of one request: identity, size, and where it sits in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import ImageDigest


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image span of a prompt: prompt tokens [start, start + num_tokens) are placeholders for its features.

    `digest` covers the processed pixels, their geometry and the processor's identity, so equal digests mean equal
    features. `num_patches` is what the vision tower computes (the unit of the image budget); `grid` is (time, rows,
    columns) in patches.
    """

    digest: ImageDigest
    width: int  # of the processed picture, pixels
    height: int
    num_patches: int
    num_tokens: int
    start: int
    grid: tuple[int, int, int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PixelPayload:
    """The processed picture on its way to a vision lane: uint8 RGB, `height * width * 3` bytes, row-major."""

    digest: ImageDigest
    width: int
    height: int
    data: bytes
