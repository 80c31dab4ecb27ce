"""A picture's orientation from EXIF or XMP, as Pillow's `exif_transpose` understands them.

So a picture has the same orientation whether it is a file or opened by Pillow, and the same as in transformers. Unlike
Pillow this reads only this one value, so the work is bounded by the number of entries. Raises nothing: unreadable data
counts as upright. Does not know file formats, except for a PNG's text chunks.
"""

from __future__ import annotations

import re
import struct
import zlib

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
