"""Parsers of picture formats that read size, orientation and completeness before decoding.

Every parser bounds its own work and returns the file reduced to what pixels need: colour profiles, thumbnails, comments
and camera data never reach the decoder, whose parsers for them are unbounded.

The orientation is read from EXIF or XMP as Pillow's `exif_transpose` understands them, so a picture has the same one
whether it is a file or opened by Pillow, and the same as in transformers. Unlike Pillow this reads only this one value,
so the work is bounded by the number of entries; unreadable data counts as upright.

Does not know Pillow or limits on size.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

from hydra_engine.errors import InvalidImage

_TAG = 0x0112
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
        if tag == _TAG:
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
