"""Limits on pictures before they are decoded, and conversion of pictures in memory.

`inspected` checks untrusted bytes before the decode child sees them. Pillow's own messages never reach an error. Does
not know models, resizing or where bytes come from.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidImage
from hydra_engine.preprocess.media.containers import Container, broken_image, inspect
from hydra_engine.preprocess.media.pixels import PIL_ERRORS, to_rgb, undo_orientation

_ORIENTATION_TAG = 0x0112

# A Pillow image shared between requests loads lazily, which is not thread-safe.
_loading = threading.Lock()


def upright_size(container: Container) -> tuple[int, int]:
    if container.orientation >= 5:
        return container.height, container.width
    return container.width, container.height


def inspected(data: bytes, limits: MediaConfig) -> Container:
    """Parses the header of a file that may be decoded. Raises InvalidImage."""
    if len(data) > limits.max_image_bytes:
        raise InvalidImage(f"the image is larger than {size(limits.max_image_bytes)}", code="image_too_large")
    container = inspect(data)
    check_size(container.width, container.height, limits)
    return container


def check_size(width: int, height: int, limits: MediaConfig) -> None:
    """Raises InvalidImage with code image_too_large or image_aspect_ratio."""
    if width < 1 or height < 1:
        raise broken_image("it has no pixels")
    most = min(limits.max_image_pixels, Image.MAX_IMAGE_PIXELS or limits.max_image_pixels)
    if width * height > most:
        raise InvalidImage(
            f"the image has {width} x {height} pixels; at most {most} are allowed", code="image_too_large"
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise InvalidImage(
            f"the image has {width} x {height} pixels; at most {limits.max_aspect_ratio:g} to 1 is allowed",
            code="image_aspect_ratio",
        )


def from_pil(image: Image.Image, limits: MediaConfig) -> Image.Image:
    """Returns the caller's picture as upright RGB, by EXIF orientation; the original is unchanged. Raises
    InvalidImage."""
    check_size(*image.size, limits)
    try:
        with _loading:
            own = image.copy()
            orientation = _orientation(image)
        return to_rgb(undo_orientation(own, orientation))
    except PIL_ERRORS as error:
        raise broken_image("the Pillow image cannot be loaded") from error


def _orientation(image: Image.Image) -> Any:
    """The EXIF orientation that Pillow's `exif_transpose` would apply; 1 if it would fail."""
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1)
    except PIL_ERRORS:
        return 1


def from_array(value: Any, limits: MediaConfig) -> Image.Image:
    """Converts a numpy array or tensor: [height, width] or [height, width, 1, 3 or 4], channels first accepted;
    integers from 0 to 255 or floats from 0 to 1. Raises InvalidImage."""
    pixels = _channels_last(_as_numpy(value))
    check_size(pixels.shape[1], pixels.shape[0], limits)
    if np.issubdtype(pixels.dtype, np.integer):
        if not (pixels.min() >= 0 and pixels.max() <= 255):
            raise broken_image("arrays of integers must hold values from 0 to 255; give 16-bit values divided by 65535")
        pixels = pixels.astype(np.uint8, copy=False)
    elif np.issubdtype(pixels.dtype, np.floating):
        if not (pixels.min() >= 0.0 and pixels.max() <= 1.0):  # also false for NaN
            raise broken_image("arrays of floats must hold values from 0 to 1; divide values up to 255 by 255")
        pixels = np.rint(pixels.astype(np.float32) * 255.0).astype(np.uint8)
    else:
        raise broken_image("arrays must hold integers from 0 to 255 or floats from 0 to 1")
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))


def _as_numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    for method in ("detach", "cpu"):  # tensors have these
        value = getattr(value, method, lambda same=value: same)()
    try:
        return np.asarray(value.numpy())
    except (TypeError, RuntimeError) as error:  # bfloat16 has no numpy form
        raise broken_image("the tensor has no numpy form; give uint8 or float32") from error


def _channels_last(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise broken_image("arrays must have the shape (height, width) or (height, width, 1, 3 or 4)")
    if pixels.size == 0:
        raise broken_image("it has no pixels")
    return pixels
