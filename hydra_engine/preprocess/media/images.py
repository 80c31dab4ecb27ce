"""Pictures: from the bytes of a file, or a picture in memory, to the views that a model needs.

`inspected` reads format, size and orientation of untrusted bytes and checks limits before the decode child sees them.
Every parser of a format bounds its own work and returns the file reduced to what pixels need: colour profiles,
thumbnails, comments and camera data never reach the decoder, whose parsers for them are unbounded.

The orientation is read from EXIF or XMP as Pillow's `exif_transpose` understands them, so a picture has the same one
whether it is a file or opened by Pillow, and the same as in transformers. Unlike Pillow this reads only this one value,
so the work is bounded by the number of entries; unreadable data counts as upright.

Alpha is blended over white, 16-bit values are scaled, of animations the first frame is used. Resizing is native, and
Pillow's if the extension is missing; both give the same bits: Pillow's filters and rounding, with its order of the two
passes. Pillow's own messages never reach an error. Decodes in the decode child for untrusted files and in a thread for
pictures in memory; imports little else so that the child starts quickly. Does not know models or where bytes come from.
"""

from __future__ import annotations

import io
import math
import re
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


# ---- formats: size, orientation and completeness, without decoding

_ORIENTATION_TAG = 0x0112
# Byte orders by first bytes; only the first two are valid, but Pillow accepts all.
_ORDERS = {b"MM\0*": ">", b"II*\0": "<", b"MM*\0": ">", b"II\0*": "<", b"MM\0+": ">"}
# By TIFF type: bytes of one value, and its struct format. Texts and raw bytes are no numbers.
_TYPES = {
    **{1: (1, ""), 2: (1, ""), 3: (2, "H"), 4: (4, "L"), 5: (8, "LL"), 6: (1, "b"), 7: (1, ""), 8: (2, "h")},
    **{9: (4, "l"), 10: (8, "ll"), 11: (4, "f"), 12: (8, "d"), 13: (4, "L"), 16: (8, "Q")},
}
_EXIF_MARKS = re.compile(b"(?:Exif\0\0){1,2}")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_MAX_TEXT = 1 << 20  # bytes of a text in a PNG, as in Pillow


def orientation_of(exif: bytes, xmp: bytes) -> int:
    """1 to 8, from EXIF, or from XMP if EXIF has no entry. Empty bytes: the file has no such data."""
    mark = _EXIF_MARKS.match(exif)
    tiff = exif[mark.end() :] if mark else exif
    found: float | None = None
    if tiff:
        order = _ORDERS.get(tiff[:4])
        if order is None or len(tiff) < 8:
            return 1
        found = _in_tiff(tiff, order)
    if found is None and (written := _XMP_ORIENTATION.search(xmp)):
        found = int(written[1])
    return int(found) if found is not None and found in range(2, 9) else 1


def _in_tiff(tiff: bytes, order: str) -> float | None:
    """The value in the first directory, None if there is none; 0 if it is no number."""
    (directory,) = struct.unpack_from(order + "L", tiff, 4)
    if directory + 2 > len(tiff):
        return None
    (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
    entries = tiff[directory + 2 : directory + 2 + 12 * num_entries]
    num_bytes = 0  # of values outside the entries; Pillow reads no more than the block has
    seen = set()
    for tag, kind, count, value in struct.iter_unpack(order + "HHL4s", entries[: len(entries) // 12 * 12]):
        size, form = _TYPES.get(kind, (0, ""))
        begin, end = 0, count * size
        if tag in seen or end == 0:
            continue
        if end > 4:
            num_bytes += end
            if num_bytes > len(tiff):
                continue
            (begin,) = struct.unpack(order + "L", value)
            end += begin
            if end > len(tiff):  # truncated; Pillow stops here too
                return None
        seen.add(tag)
        if tag == _ORIENTATION_TAG:
            if not form:
                return 0
            number, *others = struct.unpack_from(order + form, tiff if end > 4 else value, begin)
            below = others[0] if others else 1
            return float(number / below) if below else 0
    return None


def from_raw_profile(text: bytes) -> bytes:
    """The EXIF data in ImageMagick's form: lines of hexadecimal digits after a name and a length."""
    try:
        return bytes.fromhex("".join(text[:_MAX_TEXT].decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b"\0"  # not EXIF either


def png_text(chunk: bytes) -> bytes:
    """The text after the keyword in a PNG's text chunk; `chunk` begins with its type."""
    kind, value = chunk[:4], chunk.partition(b"\0")[2]
    is_compressed = kind == b"zTXt"
    if kind == b"iTXt":  # language and translated keyword precede the text
        is_compressed = value[:1] > b"\0"
        value = b"".join(value[2:].split(b"\0", 2)[2:])
    elif is_compressed:
        value = value[1:]
    if not is_compressed:
        return value
    try:
        return zlib.decompressobj().decompress(value, _MAX_TEXT)
    except zlib.error:
        return b""


_MAX_SEGMENTS = 4096  # in a JPEG or a RIFF file
_MAX_SCANS = 50  # in a progressive JPEG; each scan covers the whole picture
_MAX_CHUNKS = 1 << 16  # in a PNG
_MAX_BLOCKS = 1 << 17  # in a GIF, 255 bytes each

_SEGMENT = re.compile(b"\xff[\xc0-\xcf\xd9-\xfe]")  # in a JPEG: not FF 00, which is data, nor markers without content
_XMP_SEGMENT = b"http://ns.adobe.com/xap/1.0/\0"
_GIF_BLOCK = re.compile(b"[!,;]")
_IEND = b"\0\0\0\0IEND\xae\x42\x60\x82"


class Container(NamedTuple):
    """A file reduced for decoding. `orientation` is EXIF's, 1 to 8; `data` goes to the decoder; width and height are
    those before orientation."""

    format: str
    width: int
    height: int
    orientation: int
    data: bytes


def inspect(data: bytes) -> Container:
    """Parses a file's header. Raises InvalidImage: unsupported_image_format by the first bytes, image_decode_failed for
    a broken file."""
    for magic, parse in _PARSERS:
        if data.startswith(magic):
            try:
                return parse(data)
            except (struct.error, IndexError) as error:  # a read beyond the end of the file
                raise broken_image("it ends too early") from error
    raise InvalidImage(
        "the image has an unsupported format; supported: PNG, JPEG, WEBP, GIF, BMP", code="unsupported_image_format"
    )


def broken_image(reason: str) -> InvalidImage:
    return InvalidImage(f"the image cannot be decoded: {reason}")


def broken_video(reason: str) -> InvalidImage:
    return InvalidImage(f"the video cannot be decoded: {reason}", code="video_decode_failed")


def _png(data: bytes) -> Container:
    width, height = struct.unpack_from(">II", data, 16)
    if data[12:16] != b"IHDR":
        raise broken_image("its header is missing")
    kept, exif, xmp, profile = [data[:8]], None, b"", b""
    offset, has_pixels = 8, False
    for _ in range(_MAX_CHUNKS):
        kind, end = data[offset + 4 : offset + 8], offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        has_pixels = has_pixels or kind == b"IDAT"
        if end > len(data) and not has_pixels:
            raise broken_image("it ends too early")
        if kind == b"IEND" or end > len(data):  # the decoder finds missing pixels
            kept.append(data[offset:] if kind == b"IDAT" else _IEND)
            break
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):
            kept.append(data[offset:end])
        elif kind == b"eXIf":
            exif = b"Exif\0\0" + data[offset + 8 : end - 4]
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            if data.startswith(b"XML:com.adobe.xmp\0", offset + 8):
                xmp = data[offset + 4 : end - 4]
            elif data.startswith(b"Raw profile type exif\0", offset + 8):
                profile = data[offset + 4 : end - 4]
            elif kind == b"tEXt" and data.startswith(b"exif\0", offset + 8):
                exif = data[offset + 13 : end - 4]
        offset = end
    else:
        raise broken_image("it has too many parts")
    if exif is None:
        exif = from_raw_profile(png_text(profile))
    return Container("PNG", width, height, orientation_of(exif, png_text(xmp)), b"".join(kept))


def _jpeg(data: bytes) -> Container:
    """Parses up to the first end marker after pixels: phones append clips, and cameras further pictures."""
    exif: list[bytes] = []
    kept, size, xmp, first_scan, num_scans, offset = [data[:2]], None, b"", 0, 0, 2
    for _ in range(_MAX_SEGMENTS):
        found = _SEGMENT.search(data, offset)  # skips padding, pixels and what Pillow skips
        if found is None:
            raise broken_image("it ends too early")
        offset, marker = found.start(), data[found.start() + 1]
        if marker == 0xD9:
            break
        (length,) = struct.unpack_from(">H", data, offset + 2)
        segment = data[offset : offset + 2 + length]
        if marker == 0xDA:
            num_scans += 1
            first_scan = first_scan or offset
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", segment, 5)
            size = (width, height)
        elif marker == 0xE1 and not first_scan and segment.startswith(b"Exif\0\0", 4):
            exif.append(segment[10 if exif else 4 :])  # one block of EXIF may need several segments
        elif marker == 0xE1 and not first_scan and segment.startswith(_XMP_SEGMENT, 4):
            xmp = segment[4 + len(_XMP_SEGMENT) :]
        # Drops other application data and comments.
        if not (first_scan or 0xE1 <= marker <= 0xED or marker in (0xEF, 0xFE)):
            kept.append(segment)
        offset += 2 + length
    else:
        raise broken_image("it has too many parts")
    if size is None or not first_scan:
        raise broken_image("it holds no picture")
    if num_scans > _MAX_SCANS:
        raise broken_image("it has too many scans")
    kept.append(data[first_scan : offset + 2])
    return Container("JPEG", *size, orientation_of(b"".join(exif), xmp), b"".join(kept))


def _gif(data: bytes) -> Container:
    """Keeps the first picture and its transparency."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    kept, blocks_left = [data[:offset]], _MAX_BLOCKS
    while True:
        found = _GIF_BLOCK.search(data, offset)  # skips what Pillow skips, often zero bytes
        if found is None:
            raise broken_image("it ends too early")
        if found[0] == b";":
            raise broken_image("it holds no picture")
        begin = offset = found.start()
        is_picture = found[0] == b","
        if is_picture:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, begin + 1)
            width, height = max(width, left + frame_width), max(height, top + frame_height)
            offset += 11 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
        else:
            offset += 2
        while offset < len(data) and data[offset] and blocks_left > 0:
            offset += 1 + data[offset]
            blocks_left -= 1
        offset, blocks_left = offset + 1, blocks_left - 1
        if blocks_left < 0:
            raise broken_image("it has too many parts")
        if is_picture or (data.startswith(b"!\xf9", begin) and data[begin + 2] >= 4):
            kept.append(data[begin:offset])
        if is_picture:  # the decoder finds missing pixels
            return Container("GIF", width, height, 1, b"".join(kept))


def _webp(data: bytes) -> Container:
    (length,) = struct.unpack_from("<I", data, 4)
    if data[8:12] != b"WEBP":
        raise InvalidImage("the image has an unsupported format", code="unsupported_image_format")
    if length + 8 > len(data):
        raise broken_image("it ends too early")
    kept: list[bytes] = []
    metadata: dict[bytes, bytes] = {}
    size, offset = None, 12
    for _ in range(_MAX_SEGMENTS):
        if offset + 8 > length + 8:
            break
        kind, size_bytes = struct.unpack_from("<4sI", data, offset)
        end = offset + 8 + size_bytes + (size_bytes & 1)
        if size is None:
            size = _webp_size(kind, data[offset + 8 : offset + 18])
        if kind in (b"EXIF", b"XMP "):
            metadata.setdefault(kind, data[offset + 8 : offset + 8 + size_bytes])
        elif kind != b"ICCP":
            kept.append(data[offset:end])
        offset = end
    else:
        raise broken_image("it has too many parts")
    if size is None:
        raise broken_image("it holds no picture")
    body, flags = b"".join(kept), 0
    if body.startswith(b"VP8X"):  # clear the flags of dropped chunks
        flags = body[8]
        body = body[:8] + bytes([flags & ~0x2C]) + body[9:]
    # libwebp ignores chunks that the header does not announce.
    exif, xmp = (metadata.get(kind, b"") if flags & flag else b"" for kind, flag in ((b"EXIF", 8), (b"XMP ", 4)))
    packed = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    return Container("WEBP", *size, orientation_of(exif, xmp), packed)


def _webp_size(kind: bytes, head: bytes) -> tuple[int, int]:
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 1)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 6)
        return width & 0x3FFF, height & 0x3FFF
    raise broken_image("it holds no picture")


def _bmp(data: bytes) -> Container:
    pixels_at, header_size = struct.unpack_from("<II", data, 10)
    if header_size == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    elif header_size in (40, 52, 56, 64, 108, 124):
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)  # negative: rows from top to bottom
    else:
        raise broken_image("its header is unknown")
    if compression not in (0, 3):
        raise InvalidImage("compressed BMP images are not supported", code="unsupported_image_format")
    row, stride = (width * depth + 7) // 8, (width * depth + 31) // 32 * 4  # the last row needs no padding
    if width <= 0 or stride * (height - 1) + row > len(data) - pixels_at:
        raise broken_image("it ends too early")
    return Container("BMP", width, height, 1, data)


_PARSERS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)


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


# ---- resizing


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


# ---- decoding and rendering

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
    if view.before is not None:
        whole = np.empty((view.before[1], view.before[0], 3), np.uint8)
        resize_into(source, view.before, "bicubic", Window(0, 0, *view.before), whole)
        source = whole
    source = source if view.padding is None else _squared(source, view.padding)
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


def _squared(source: Pixels, colour: tuple[int, int, int]) -> Pixels:
    """Puts a picture that is no square in the middle of one; of an odd border the smaller half is first."""
    height, width, _ = source.shape
    if width == height:
        return source
    side = max(width, height)
    left, top = (side - width) // 2, (side - height) // 2
    square = np.full((side, side, 3), colour, np.uint8)
    square[top : top + height, left : left + width] = source
    return square


def upright_pixels(pixels: Pixels, orientation: int) -> Pixels:
    """Undoes EXIF orientation 1 to 8, as `undo_orientation` does."""
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


# ---- pictures in memory

# A Pillow image shared between requests loads lazily, which is not thread-safe.
_loading = threading.Lock()


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
