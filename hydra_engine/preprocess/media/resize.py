"""Resizing of RGB pictures, part by part into memory that is there; by Pillow where the extension is missing.

Both give the same bits: Pillow's filters and rounding, with its order of the two passes. Does not know files or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

_C: Any
try:
    from hydra_engine import _C
except ImportError as error:  # not built here; `doctor` says so
    _C, _PROBLEM = None, str(error)

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], rows at any distance, pixels in a row next to each other

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_CODES = {name: code for code, name in enumerate(RESAMPLING)}
# Since this version Pillow shrinks tall pictures down before across, which shows in the last bit.
_DOWN_FIRST_SINCE = 13


class Window(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    width: int
    height: int


def describe() -> str:
    """What resizes here, and why it is not the native code if it is not."""
    if _C is None:
        return f"Pillow: the native extension cannot be loaded ({_PROBLEM}); run `make build`"
    return f"native, {_C.isa()}"


def resize_into(source: Pixels, size: tuple[int, int], resample: str, window: Window, out: Pixels) -> None:
    """`out` [window.height, window.width, 3] becomes the window of `source` resized to `size` (width, height)."""
    assert out.shape == (window.height, window.width, 3) and out.strides[1:] == (3, 1)
    if _C is None:
        _resize_with_pillow(source, size, resample, window, out)
        return
    height, width, _ = source.shape
    if source.strides[1:] != (3, 1) or source.strides[0] < 3 * width:
        source = np.ascontiguousarray(source)
    stride = source.strides[0] if height > 1 else 3 * width  # numpy may say anything where nothing follows
    _C.resize_rgb(
        *(source.ctypes.data, stride, width, height, *size),
        *(window.left, window.top, window.width, window.height, out.ctypes.data, out.strides[0]),
        *(_CODES[resample], _goes_down_first((width, height), size)),
    )


def _goes_down_first(source: tuple[int, int], size: tuple[int, int]) -> bool:
    less_width, less_height = source[0] - size[0], source[1] - size[1]
    return _PILLOW_MAJOR >= _DOWN_FIRST_SINCE and less_height > max(0, 2 * less_width)


_PILLOW_MAJOR = int(PIL.__version__.split(".")[0])


def _resize_with_pillow(source: Pixels, size: tuple[int, int], resample: str, window: Window, out: Pixels) -> None:
    resized = Image.fromarray(source).resize(size, RESAMPLING[resample])
    box = (window.left, window.top, window.left + window.width, window.top + window.height)
    out[...] = np.asarray(resized.crop(box))
