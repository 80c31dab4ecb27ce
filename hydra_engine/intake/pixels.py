"""Pillow at work: an inspected file to an upright 8-bit RGB picture, and that to the size that a model wants.

Alpha lies over white, 16-bit values are scaled, animations give their first frame. Runs in the decode child for what
strangers send and in a thread for what is in memory already; imports nothing else so that the child starts quickly.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import NamedTuple

from PIL import Image

from hydra_engine.intake.containers import Container, broken

# What Pillow's plugins raise on broken files: SyntaxError and struct.error from the parsers of chunks, EOFError from
# missing frames, IndexError, KeyError and TypeError from palettes, zlib.error from compressed text; OSError (with
# UnidentifiedImageError) and ValueError elsewhere. MemoryError: a picture that this process may not hold.
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

RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}
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
_SIXTEEN_TO_EIGHT = [(value + 128) // 257 for value in range(1 << 16)]


class Fit(NamedTuple):
    """What becomes of a picture: its shorter side gets `shortest_edge` pixels, then the middle is cut out; with 0 there
    it is stretched to width x height."""

    width: int
    height: int
    shortest_edge: int
    resample: Image.Resampling


def decode(container: Container) -> Image.Image:
    """Raises InvalidImage for data that is not what the header promised."""
    try:
        with Image.open(io.BytesIO(container.data), formats=[container.format]) as image:
            if image.size != (container.width, container.height):
                raise broken("its header contradicts itself")
            image.load()
            return to_rgb(upright(image, container.orientation))
    except PIL_ERRORS as error:
        raise broken("its data is damaged or incomplete") from error


def fit(image: Image.Image, target: Fit) -> Image.Image:
    """Equal to transformers' Pillow-based processors. Where the resized picture is too small, black goes around it."""
    if target.shortest_edge == 0:
        return image.resize((target.width, target.height), target.resample)
    resized = image.resize(shortest_edge_size(image.width, image.height, target.shortest_edge), target.resample)
    left, top = (resized.width - target.width) // 2, (resized.height - target.height) // 2
    return resized.crop((left, top, left + target.width, top + target.height))


def shortest_edge_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """The shorter side becomes `shortest_edge`; the other one keeps the aspect, rounded down."""
    if width <= height:
        return shortest_edge, int(shortest_edge * height / width)
    return int(shortest_edge * width / height), shortest_edge


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """EXIF's orientation 1 to 8 undone."""
    transposition = _TRANSPOSITIONS.get(orientation)
    return image if transposition is None else image.transpose(transposition)


def to_rgb(image: Image.Image) -> Image.Image:
    """A new image, or the same one where it is RGB without transparency."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        convert = _scaled
    elif image.has_transparency_data:
        convert = _over_white
    else:
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):  # in bands, because a large picture would exist several times
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        band.info.update(image.info)  # a colour that is transparent is named there
        result.paste(convert(band), (0, top))
    return result


def _scaled(image: Image.Image) -> Image.Image:
    """16 bits to 8; Pillow's own conversion would clip at 255."""
    return image.convert("I").point(_SIXTEEN_TO_EIGHT, "L").convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba.convert("RGB"), mask=rgba.getchannel("A"))
    return white
