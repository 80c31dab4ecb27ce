"""Spans of visual features in a prompt: identity, size and position, and the pixels to encode them from.

A span is what the vision lane encodes at once: a picture, one tile of a picture, or one temporal patch of a video, as
the model family divides the user's media. Every span is called an image here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import ImageDigest


@dataclass(frozen=True, slots=True)
class RopeSpan:
    """Multimodal rotary positions of one span, for models that have them.

    Token i of the span has position (time, row + i // columns, column + i % columns). Text behind the span, up to the
    next one or the end of the prompt, has on all three axes its place in the prompt plus `text_delta`.
    """

    time: int
    row: int
    column: int
    columns: int
    text_delta: int


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image span of a prompt: prompt tokens [start, start + num_tokens) are placeholders for its features.

    `digest` covers everything that determines the features (source, part of it, identity of the processor), so equal
    digests mean equal features. `num_patches`: patches that the vision tower computes, the unit of the image budget.
    """

    digest: ImageDigest
    width: int  # pixels of the user's picture, upright
    height: int
    num_patches: int
    num_tokens: int
    start: int
    # (time, rows, columns) in patches of each picture that the tower gets, or as the family's spec defines it.
    grid: tuple[int, int, int]
    rope: RopeSpan | None = None
    whole: bool = False  # its tokens attend to each other in both directions: no prefill chunk ends inside it
    source: int = 0  # index of its picture or video among the request's media

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array inside a payload: name, numpy dtype, shape. The bytes of the arrays are concatenated."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PixelPayload:
    """The pixels of one span, for a vision lane.

    Plain: `count` pictures of one size, uint8 RGB, `count * height * width * 3` bytes, row-major. With `arrays` the
    bytes are those arrays instead (models that run through transformers' own processors).
    """

    digest: ImageDigest
    width: int
    height: int
    data: bytes
    count: int = 1
    arrays: tuple[ArrayLayout, ...] = ()
