"""What the engine knows about one span of visual features of one request: identity, size, and where it sits.

A span is what the vision lane encodes at once: a picture, one tile of a picture, or one temporal patch of a video,
whatever the model family makes of what the user gave. All of them are called images here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import ImageDigest


@dataclass(frozen=True, slots=True)
class RopeSpan:
    """Multimodal rotary positions of one span, for models that have them.

    Token i of the span sits at (time, row + i // columns, column + i % columns). Text behind the span, up to the next
    one or the end of the prompt, sits on all three axes at its place in the prompt plus `text_delta`.
    """

    time: int
    row: int
    column: int
    columns: int
    text_delta: int


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image span of a prompt: prompt tokens [start, start + num_tokens) are placeholders for its features.

    `digest` covers what the features follow from (the source, which part of it, the processor's identity), so equal
    digests mean equal features. `num_patches` is what the vision tower computes (the unit of the image budget).
    """

    digest: ImageDigest
    width: int  # of the upright picture that the user gave, pixels
    height: int
    num_patches: int
    num_tokens: int
    start: int
    # (time, rows, columns) in patches of each picture that the tower sees, or as the family's spec says.
    grid: tuple[int, int, int]
    rope: RopeSpan | None = None
    whole: bool = False  # its rows see each other: no chunk of a prefill ends inside it
    source: int = 0  # which of the pictures and videos of its request it is (a part of)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array inside a payload that is not plain pictures: name, numpy dtype, shape; bytes follow one another."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PixelPayload:
    """What a vision lane needs to encode one span.

    Plain: `count` pictures of one size, uint8 RGB, `count * height * width * 3` bytes, row-major. With `arrays` the
    bytes are those arrays instead (models that run through transformers' own processors).
    """

    digest: ImageDigest
    width: int
    height: int
    data: bytes
    count: int = 1
    arrays: tuple[ArrayLayout, ...] = ()
