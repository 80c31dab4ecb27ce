"""The pixels of an image span, from the preprocessor to a vision lane."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.ids import ImageDigest


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
