"""Untrusted bytes, Pillow images and arrays to an upright 8-bit RGB picture.

Limits hold on the header, before any pixel exists. Alpha lies over white, 16-bit values are scaled, animations give
their first frame. Pillow's own words never reach an error. Does not know models, resizing or where bytes come from.
"""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.errors import InvalidImage
from hydra_engine.intake.containers import broken, inspect

# What Pillow's plugins raise on broken files: SyntaxError and struct.error from the parsers of chunks, EOFError from
# missing frames, IndexError, KeyError and TypeError from palettes, zlib.error from compressed text; OSError (with
# UnidentifiedImageError) and ValueError elsewhere. MemoryError: a picture that this machine cannot hold.
_PIL_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_BAND_PIXELS = 1 << 20

# Pictures this large are decoded one at a time, so memory stays bounded whatever the number of threads.
_LARGE_PIXELS = 12_000_000
_large = threading.Lock()
# A Pillow image that a caller shares between requests loads itself on first use, which is not safe from two threads.
_loading = threading.Lock()


def probe(data: bytes) -> tuple[int, int]:
    """(width, height) of the upright picture, from the header alone. Raises InvalidImage."""
    container = inspect(data)
    if container.orientation >= 5:
        return container.height, container.width
    return container.width, container.height


def check_size(width: int, height: int, limits: MediaConfig) -> None:
    """Raises InvalidImage with code image_too_large or image_aspect_ratio."""
    if width < 1 or height < 1:
        raise broken("it has no pixels")
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


def decode(data: bytes, limits: MediaConfig) -> Image.Image:
    """An encoded file to an upright RGB picture. Raises InvalidImage."""
    check_bytes(len(data), limits)
    container = inspect(data)
    check_size(container.width, container.height, limits)
    with _room_for(container.width * container.height):
        try:
            with Image.open(io.BytesIO(container.data), formats=[container.format]) as image:
                check_size(*image.size, limits)
                image.load()
                return _to_rgb(_upright(image, container.orientation))
        except _PIL_ERRORS as error:
            raise broken("its data is damaged or incomplete") from error


def check_bytes(num_bytes: int, limits: MediaConfig) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidImage(
            f"the image has {num_bytes} bytes; at most {limits.max_image_bytes} are allowed", code="image_too_large"
        )


def from_pil(image: Image.Image, limits: MediaConfig) -> Image.Image:
    """A caller's own picture, which stays as it is; EXIF orientation is applied."""
    check_size(*image.size, limits)
    with _room_for(image.width * image.height):
        try:
            with _loading:
                own = image.copy()
                orientation = image.getexif().get(_ORIENTATION_TAG, 1)
            return _to_rgb(_upright(own, orientation if isinstance(orientation, int) else 1))
        except _PIL_ERRORS as error:
            raise broken("the Pillow image cannot be loaded") from error


def from_array(value: Any, limits: MediaConfig) -> Image.Image:
    """A numpy array or a tensor: rows x columns (x channels; channels first is understood), uint8 or floats 0 to 1."""
    pixels = _channels_last(_as_numpy(value))
    check_size(pixels.shape[1], pixels.shape[0], limits)
    if pixels.dtype != np.uint8:
        if not np.issubdtype(pixels.dtype, np.floating):
            raise broken("arrays must hold uint8 values or floats from 0 to 1")
        if not (pixels.min() >= 0.0 and pixels.max() <= 1.0):  # also false for NaN
            raise broken("arrays of floats must hold values from 0 to 1")
        pixels = np.rint(pixels.astype(np.float32) * 255.0).astype(np.uint8)
    return _to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))


def _as_numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    for step in ("detach", "cpu"):  # a tensor, known by its methods
        value = getattr(value, step, lambda same=value: same)()
    try:
        return np.asarray(value.numpy())
    except (TypeError, RuntimeError) as error:  # bfloat16 has no numpy form
        raise broken("the tensor has no numpy form; give uint8 or float32") from error


def _channels_last(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise broken("arrays must have the shape (height, width) or (height, width, 1, 3 or 4)")
    if pixels.size == 0:
        raise broken("it has no pixels")
    return pixels


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    transposition = _TRANSPOSITIONS.get(orientation)
    return image if transposition is None else image.transpose(transposition)


def _to_rgb(image: Image.Image) -> Image.Image:
    """A new image, or the same one where it is RGB without transparency."""
    if image.mode in _SIXTEEN_BIT_MODES:
        return _from_sixteen_bits(image)
    if image.has_transparency_data:
        return _over_white(image)
    if image.mode == "RGB":
        return image
    return image.convert("RGB")


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    """Pillow's own conversion would clip at 255."""
    wide = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
    return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    """In bands of rows, because a large picture would otherwise exist four times."""
    result = Image.new("RGB", image.size, "white")
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        band = image.crop((0, top, image.width, bottom))
        band.info.update(image.info)
        rgba = band.convert("RGBA")
        result.paste(rgba.convert("RGB"), (0, top), rgba.getchannel("A"))
    return result


@contextmanager
def _room_for(num_pixels: int) -> Iterator[None]:
    if num_pixels < _LARGE_PIXELS:
        yield
    else:
        with _large:
            yield
