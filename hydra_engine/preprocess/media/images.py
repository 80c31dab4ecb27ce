"""Pictures: limits before they are decoded, decoding to upright 8-bit RGB, conversion of pictures in memory, and the
views that a model needs, cut from the resized picture.

`inspected` checks untrusted bytes before the decode child sees them. Alpha is blended over white, 16-bit values are
scaled, of animations the first frame is used. Resizing is native, and Pillow's if the extension is missing; both give
the same bits: Pillow's filters and rounding, with its order of the two passes. Pillow's own messages never reach an
error. Decodes in the decode child for untrusted files and in a thread for pictures in memory; imports little else so
that the child starts quickly. Does not know models or where bytes come from.
"""

from __future__ import annotations

import io
import math
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from PIL import Image

from hydra_engine.core.units import size
from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.base import View
from hydra_engine.preprocess.media.containers import Container, broken_image, inspect

if TYPE_CHECKING:
    from hydra_engine.config import MediaConfig

_C: Any
try:
    from hydra_engine import _C
except ImportError as error:  # not built here; `doctor` says so
    _C, _PROBLEM = None, str(error)

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], rows at any stride, pixels of a row contiguous

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_CODES = {name: code for code, name in enumerate(RESAMPLING)}
# From this version on Pillow shrinks tall pictures vertically first, which changes the last bit.
_DOWN_FIRST_SINCE = 13


class Window(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    width: int
    height: int


def describe() -> str:
    """Names the resizer in use, and the reason if it is not the native one."""
    if _C is None:
        return f"Pillow: the native extension cannot be loaded ({_PROBLEM}); run `make build`"
    return f"native, {_C.isa()}"


def resize_into(source: Pixels, size: tuple[int, int], resample: str, window: Window, out: Pixels) -> None:
    """Resizes `source` to `size` (width, height) and writes the part in `window` to `out` [window.height, window.width,
    3]."""
    assert out.shape == (window.height, window.width, 3) and out.strides[1:] == (3, 1)
    if _C is None:
        _resize_with_pillow(source, size, resample, window, out)
        return
    height, width, _ = source.shape
    if source.strides[1:] != (3, 1) or source.strides[0] < 3 * width:
        source = np.ascontiguousarray(source)
    stride = source.strides[0] if height > 1 else 3 * width  # numpy's value is arbitrary for one row
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


Picture = Image.Image | Pixels  # RGB

# Raised by Pillow's plugins for broken files: SyntaxError and struct.error by chunk parsers, EOFError for missing
# frames, IndexError, KeyError and TypeError for palettes, zlib.error for compressed text; OSError (with
# UnidentifiedImageError) and ValueError elsewhere. MemoryError: the picture exceeds this process's memory limit.
PIL_ERRORS = (
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
_BAND_PIXELS = 1 << 20
_STRIP_PIXELS = 64
_SIXTEEN_TO_EIGHT = [(value + 128) // 257 for value in range(1 << 16)]


def decode(container: Container) -> Pixels:
    """Returns upright pixels. Raises InvalidImage if the data contradicts the header or is damaged."""
    if container.format == "JPEG":
        pixels = _decode_jpeg(container)
        if pixels is not None:
            return upright_pixels(pixels, container.orientation)
    return np.asarray(_decode_with_pillow(container))


def _decode_with_pillow(container: Container) -> Image.Image:
    try:
        with Image.open(io.BytesIO(container.data), formats=[container.format]) as image:
            if image.size != (container.width, container.height):
                raise broken_image("its header contradicts itself")
            image.load()
            return to_rgb(undo_orientation(image, container.orientation))
    except PIL_ERRORS as error:
        raise broken_image("its data is damaged or incomplete") from error


def _decode_jpeg(container: Container) -> Pixels | None:
    """Returns Pillow's pixels in half of its time. None if Pillow must decide: for rare colour spaces, and for data
    with any error, some of which it tolerates."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(container.data)
        if colours not in ("YCbCr", "Gray") or (width, height) != (container.width, container.height):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(container.data, "RGB")
        return pixels
    except ValueError:
        return None


def num_bytes(views: Sequence[View]) -> int:
    """Bytes of all tiles of all views."""
    return sum(view.num_tiles * view.tile[0] * view.tile[1] * 3 for view in views)


def render(sources: Sequence[Picture], views: Sequence[View], resample: str) -> bytes:
    """Returns all tiles of all views of RGB pictures, concatenated: uint8 RGB, row-major."""
    out = np.empty(num_bytes(views), np.uint8)
    render_into(sources, views, resample, out)
    return out.tobytes()


def render_into(sources: Iterable[Picture], views: Sequence[View], resample: str, out: npt.NDArray[np.uint8]) -> None:
    """Renders as `render` does, into `out` [num_bytes(views)]. Consumes sources one by one, up to the last that views
    need. Raises IndexError if there are too few."""
    tiles_of_source: dict[int, list[tuple[View, npt.NDArray[np.uint8]]]] = {}
    begin = 0
    for view in views:
        shape = (view.num_tiles, view.tile[1], view.tile[0], 3)
        end = begin + math.prod(shape)
        tiles_of_source.setdefault(view.source, []).append((view, out[begin:end].reshape(shape)))
        begin = end
    num_sources, index = max(tiles_of_source, default=-1) + 1, -1
    for index, source in enumerate(islice(sources, num_sources)):
        for view, tiles in tiles_of_source.get(index, ()):
            _render_tiles(np.asarray(source), view, resample, tiles)
    if index + 1 < num_sources:  # `out` would keep old bytes
        raise IndexError(f"views name {num_sources} sources, but there are {index + 1}")


def _render_tiles(source: Pixels, view: View, resample: str, tiles: npt.NDArray[np.uint8]) -> None:
    left, top = view.corner
    width, height = view.tile
    per_row = view.canvas[0] // width
    for index, tile in enumerate(tiles):
        # The tile's position in the resized picture, and the part of the tile that the picture covers.
        x, y = index % per_row * width - left, index // per_row * height - top
        x0, x1 = max(x, 0), min(x + width, view.resize[0])
        y0, y1 = max(y, 0), min(y + height, view.resize[1])
        if (x1 - x0, y1 - y0) != view.tile:
            tile[...] = 0
        if x0 < x1 and y0 < y1:
            window = Window(x0, y0, x1 - x0, y1 - y0)
            resize_into(source, view.resize, resample, window, tile[y0 - y : y1 - y, x0 - x : x1 - x])


def upright_pixels(pixels: Pixels, orientation: int) -> Pixels:
    """Undoes EXIF orientation 1 to 8, as `upright` does."""
    turned = pixels
    if orientation >= 5:
        turned = turned.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        turned = turned[:, ::-1]
    if orientation in (3, 4, 7, 8):
        turned = turned[::-1]
    if turned is pixels:
        return pixels
    result = np.empty_like(turned, order="C")
    width = result.shape[1]
    strip = _STRIP_PIXELS if orientation >= 5 else width  # few source rows, so that their cache lines stay
    for left in range(0, width, strip):
        for channel in range(3):  # five times as fast as all channels at once
            result[:, left : left + strip, channel] = turned[:, left : left + strip, channel]
    return result


def undo_orientation(image: Image.Image, orientation: Any) -> Image.Image:
    """Undoes EXIF orientation 1 to 8; ignores other values."""
    transposition = _TRANSPOSITIONS.get(orientation)
    return image if transposition is None else image.transpose(transposition)


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns a new image, or the same one if it is RGB without transparency."""
    is_transparent = _is_transparent(image)
    if image.mode == "RGB" and not is_transparent:
        return image
    if image.mode == "La":  # Pillow has no direct conversion
        image = image.convert("LA")
    if image.mode.startswith("I;16"):
        convert = _scaled
    elif is_transparent:
        convert = _over_white
    else:
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):  # in bands, to avoid several copies of a large picture
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        result.paste(convert(band), (0, top))
    return result


def _is_transparent(image: Image.Image) -> bool:
    """True if the image has transparency. Ignores a transparent colour of another mode, which Pillow's conversions
    leave behind."""
    key = image.info.get("transparency")
    if key is None or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        return image.has_transparency_data
    if isinstance(key, int):
        return image.mode in ("1", "L", "P") and key <= 255
    return isinstance(key, {"P": bytes, "RGB": tuple}.get(image.mode, ()))


def _scaled(image: Image.Image) -> Image.Image:
    """Converts 16 bits to 8; Pillow's own conversion would clip at 255."""
    return image.convert("I").point(_SIXTEEN_TO_EIGHT, "L").convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba.convert("RGB"), mask=rgba.getchannel("A"))
    return white


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
