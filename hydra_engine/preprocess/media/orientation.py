"""Which way is up: the orientation that EXIF or XMP tell of a picture, as Pillow's `exif_transpose` understands them.

A picture then has one answer, whether it comes as a file or opened by Pillow, and the same one as in transformers.
Unlike Pillow nothing but this one value is read, so the work is bounded by the number of entries. Raises nothing: what
cannot be read tells nothing. Does not know file formats, but how a PNG writes such data as text.
"""

from __future__ import annotations

import re
import struct
import zlib

_TAG = 0x0112
# Byte orders by the beginning of a block; only the first two are right, but Pillow takes them all.
_ORDERS = {b"MM\0*": ">", b"II*\0": "<", b"MM*\0": ">", b"II\0*": "<", b"MM\0+": ">"}
# By TIFF's type: bytes of one value, and how a number of it is read. Texts and raw bytes are no numbers.
_TYPES = {
    **{1: (1, ""), 2: (1, ""), 3: (2, "H"), 4: (4, "L"), 5: (8, "LL"), 6: (1, "b"), 7: (1, ""), 8: (2, "h")},
    **{9: (4, "l"), 10: (8, "ll"), 11: (4, "f"), 12: (8, "d"), 13: (4, "L"), 16: (8, "Q")},
}
_EXIF_MARKS = re.compile(b"(?:Exif\0\0){1,2}")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_MAX_TEXT = 1 << 20  # of a compressed text in a PNG, as in Pillow


def orientation_of(exif: bytes, xmp: bytes) -> int:
    """1 to 8. EXIF counts, XMP where EXIF does not mention it. Empty: the file has no such data."""
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
    """The value in the first directory, None where it has none; 0 for one that is no number."""
    (directory,) = struct.unpack_from(order + "L", tiff, 4)
    if directory + 2 > len(tiff):
        return None
    (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
    entries = tiff[directory + 2 : directory + 2 + 12 * num_entries]
    num_bytes = 0  # of values elsewhere; Pillow reads no more than there are
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
            if end > len(tiff):  # cut off here, and Pillow reads no further
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
    """EXIF data that ImageMagick wrote as lines of hexadecimal digits, behind a name and a length."""
    try:
        return bytes.fromhex("".join(text[:_MAX_TEXT].decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b"\0"  # no EXIF data either


def text_of(chunk: bytes) -> bytes:
    """What a PNG's chunk of text, from its kind on, says behind its keyword."""
    kind, value = chunk[:4], chunk.partition(b"\0")[2]
    is_compressed = kind == b"zTXt"
    if kind == b"iTXt":  # also the language, and the keyword in it
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
