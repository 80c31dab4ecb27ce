"""The file formats of pictures, read just far enough to know size, orientation and completeness before decoding.

Every parser bounds its own work and returns the file reduced to what pixels need: colour profiles, thumbnails, comments
and camera data never reach the decoder, whose parsers for them have no limits. Does not know Pillow or limits of size.
"""

from __future__ import annotations

import re
import struct
from itertools import islice
from typing import NamedTuple

from hydra_engine.errors import InvalidImage

_MAX_SEGMENTS = 4096  # of a JPEG before its pixels, of a RIFF file
_MAX_SCANS = 50  # of a progressive JPEG; every scan walks over the whole picture again
_MAX_CHUNKS = 1 << 16  # of a PNG
_MAX_BLOCKS = 1 << 18  # of a GIF, 255 bytes each

_SCAN = re.compile(b"\xff\xda")  # a third of the time of bytes.count
_ORIENTATION_TAG = 0x0112


class Container(NamedTuple):
    """`orientation` is EXIF's 1 to 8; `data` what the decoder gets; width and height before orientation."""

    format: str
    width: int
    height: int
    orientation: int
    data: bytes


def inspect(data: bytes) -> Container:
    """Raises InvalidImage: unsupported_image_format by the first bytes, image_decode_failed for a broken file."""
    for magic, parse in _PARSERS:
        if data.startswith(magic):
            try:
                return parse(data)
            except (struct.error, IndexError) as error:  # reads beyond the end of the file
                raise broken("it ends too early") from error
    raise InvalidImage(
        "the image has an unsupported format; supported: PNG, JPEG, WEBP, GIF, BMP", code="unsupported_image_format"
    )


def broken(reason: str) -> InvalidImage:
    return InvalidImage(f"the image cannot be decoded: {reason}")


def _png(data: bytes) -> Container:
    width, height = struct.unpack_from(">II", data, 16)
    if data[12:16] != b"IHDR":
        raise broken("its header is missing")
    kept, orientation, offset = [data[:8]], 1, 8
    for _ in range(_MAX_CHUNKS):
        length, kind = struct.unpack_from(">I4s", data, offset)
        end = offset + 12 + length
        if end > len(data):
            raise broken("it ends too early")
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            kept.append(data[offset:end])
        elif kind == b"eXIf":
            orientation = _orientation(data[offset + 8 : end - 4])
        if kind == b"IEND":
            return Container("PNG", width, height, orientation, b"".join(kept))
        offset = end
    raise broken("it has too many parts")


def _jpeg(data: bytes) -> Container:
    kept, size, orientation, offset = [data[:2]], None, 1, 2
    for _ in range(_MAX_SEGMENTS):
        while data[offset] == 0xFF and data[offset + 1] == 0xFF:  # padding
            offset += 1
        if data[offset] != 0xFF:
            raise broken("a marker is missing")
        marker = data[offset + 1]
        if marker == 0xDA:
            break
        (length,) = struct.unpack_from(">H", data, offset + 2)
        segment = data[offset : offset + 2 + length]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", segment, 5)
            size = (width, height)
        if marker == 0xE1 and segment[4:10] == b"Exif\0\0":
            orientation = _orientation(segment[10:])
        if not (0xE1 <= marker <= 0xED or marker in (0xEF, 0xFE)):  # other application data and comments
            kept.append(segment)
        offset += 2 + length
    else:
        raise broken("it has too many parts")
    end = data.rfind(b"\xff\xd9", offset)
    if size is None or end < 0:
        raise broken("it ends too early")
    if sum(1 for _ in islice(_SCAN.finditer(data, offset, end), _MAX_SCANS + 1)) > _MAX_SCANS:
        raise broken("it has too many scans")
    kept.append(data[offset : end + 2])
    return Container("JPEG", *size, orientation, b"".join(kept))


def _gif(data: bytes) -> Container:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    seen_image = False
    blocks_left = _MAX_BLOCKS
    while data[offset] != 0x3B:
        if data[offset] == 0x2C:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, offset + 1)
            if not seen_image:
                width, height = max(width, left + frame_width), max(height, top + frame_height)
            seen_image = True
            offset += 11 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
        elif data[offset] == 0x21:
            offset += 2
        else:
            raise broken("a block is missing")
        while data[offset]:
            offset += 1 + data[offset]
            blocks_left -= 1
            if blocks_left == 0:
                raise broken("it has too many parts")
        offset += 1
    if not seen_image:
        raise broken("it holds no picture")
    return Container("GIF", width, height, 1, data)


def _webp(data: bytes) -> Container:
    (length,) = struct.unpack_from("<I", data, 4)
    if data[8:12] != b"WEBP":
        raise InvalidImage("the image has an unsupported format", code="unsupported_image_format")
    if length + 8 > len(data):
        raise broken("it ends too early")
    kept: list[bytes] = []
    size, orientation, offset = None, 1, 12
    for _ in range(_MAX_SEGMENTS):
        if offset + 8 > length + 8:
            break
        kind, size_bytes = struct.unpack_from("<4sI", data, offset)
        end = offset + 8 + size_bytes + (size_bytes & 1)
        if size is None:
            size = _webp_size(kind, data[offset + 8 : offset + 18])
        if kind == b"EXIF":
            orientation = _orientation(data[offset + 8 : end].removeprefix(b"Exif\0\0"))
        elif kind not in (b"ICCP", b"XMP "):
            kept.append(data[offset:end])
        offset = end
    else:
        raise broken("it has too many parts")
    if size is None:
        raise broken("it holds no picture")
    body = b"".join(kept)
    if body.startswith(b"VP8X"):  # forget the parts that were left out
        body = body[:8] + bytes([body[8] & ~0x2C]) + body[9:]
    return Container("WEBP", *size, orientation, b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body)


def _webp_size(kind: bytes, head: bytes) -> tuple[int, int]:
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 1)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 6)
        return width & 0x3FFF, height & 0x3FFF
    raise broken("it holds no picture")


def _bmp(data: bytes) -> Container:
    pixels_at, header_size = struct.unpack_from("<II", data, 10)
    if header_size == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    elif header_size in (40, 52, 56, 64, 108, 124):
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)  # negative: rows from top to bottom
    else:
        raise broken("its header is unknown")
    if compression not in (0, 3):
        raise InvalidImage("compressed BMP images are not supported", code="unsupported_image_format")
    if width <= 0 or (width * depth + 31) // 32 * 4 * height > len(data) - pixels_at:
        raise broken("it ends too early")
    return Container("BMP", width, height, 1, data)


def _orientation(tiff: bytes) -> int:
    """The orientation in a block of EXIF data; 1 where it says nothing readable."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == _ORIENTATION_TAG:
                return value if kind == 3 and count == 1 and 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


_PARSERS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)
