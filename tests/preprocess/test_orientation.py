"""Orientation of pictures, compared with Pillow: transformers shows models the result of `exif_transpose`."""

import io
import random
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from hydra_engine.config import MediaConfig
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import PIL_ERRORS, from_pil, inspect, inspected, orientation_of, upright_size
from tests.preprocess.test_images import png, png_chunk

LIMITS = MediaConfig()
PICTURE = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3)
Encode = Callable[..., bytes]

SHORT, LONG = "H", "L"
KINDS = {"H": 3, "L": 4, "b": 6, "h": 8, "l": 9, "f": 11, "d": 12, "LL": 5, "B": 1}


def tiff(orientation: int, form: str = SHORT, order: str = "<", before: bytes = b"", behind: bytes = b"") -> bytes:
    """EXIF data. `before`: entries in front of the orientation, 12 bytes each."""
    value = struct.pack(order + form, *((orientation,) if len(form) == 1 else (orientation * 2, 2)))
    num_entries = len(before) // 12 + 1
    head = {"<": b"II*\0\x08\0\0\0", ">": b"MM\0*\0\0\0\x08"}[order] + struct.pack(order + "H", num_entries) + before
    entry = struct.pack(order + "HHL", 0x0112, KINDS[form], 1)
    if len(value) > 4:
        behind, value = value + behind, struct.pack(order + "L", len(head) + len(entry) + 8)
    return head + entry + value.ljust(4, b"\0") + b"\0" * 4 + behind


def xmp(orientation: int, form: str = 'tiff:Orientation="%d"/>') -> bytes:
    start = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
    return (start + form % orientation + "</x:xmpmeta>").encode()


ELEMENT = "><tiff:Orientation>%d</tiff:Orientation></rdf:Description>"


def app1(body: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def jpeg(*segments: bytes) -> bytes:
    buffer = io.BytesIO()
    PICTURE.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()[:2] + b"".join(segments) + buffer.getvalue()[2:]


def exif_segments(data: bytes, size: int = 60_000) -> bytes:
    return b"".join(app1(b"Exif\0\0" + data[begin : begin + size]) for begin in range(0, len(data), size))


def xmp_segment(packet: bytes) -> bytes:
    return app1(b"http://ns.adobe.com/xap/1.0/\0" + packet)


def idat() -> bytes:
    rows = np.asarray(PICTURE).reshape(4, 18)
    return png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))


def profile(data: bytes) -> bytes:
    """EXIF data as ImageMagick writes it."""
    return f"\nexif\n{len(data):8}\n{data.hex()}\n".encode()


def itxt(keyword: bytes, text: bytes, compressed: bool = False) -> bytes:
    flags = b"\1\0" if compressed else b"\0\0"
    return png_chunk(b"iTXt", keyword + b"\0" + flags + b"\0\0" + (zlib.compress(text) if compressed else text))


def webp(**options: bytes) -> bytes:
    buffer = io.BytesIO()
    PICTURE.save(buffer, "WEBP", lossless=True, **options)
    return buffer.getvalue()


def unannounced(data: bytes) -> bytes:
    """A WebP whose header says that it has neither EXIF nor XMP."""
    return data[:20] + bytes([data[20] & ~0x0C]) + data[21:]


XMP, RAW = b"XML:com.adobe.xmp", b"Raw profile type exif"
TAG = struct.pack("<HHLL", 0x010F, 2, 20, 0)  # a text of 20 bytes at the beginning
CUT = struct.pack("<HHLL", 0x010F, 2, 20, 9999)  # and one that is cut off
CASES: dict[str, Callable[[int], bytes]] = {
    "jpeg": lambda n: jpeg(exif_segments(tiff(n))),
    "jpeg, big-endian": lambda n: jpeg(exif_segments(tiff(n, order=">"))),
    "jpeg, long": lambda n: jpeg(exif_segments(tiff(n, LONG))),
    "jpeg, long, big-endian": lambda n: jpeg(exif_segments(tiff(n, LONG, ">"))),
    "jpeg, signed": lambda n: jpeg(exif_segments(tiff(n, "l"))),
    "jpeg, float": lambda n: jpeg(exif_segments(tiff(n, "f"))),
    "jpeg, double": lambda n: jpeg(exif_segments(tiff(n, "d"))),
    "jpeg, rational": lambda n: jpeg(exif_segments(tiff(n, "LL"))),
    "jpeg, bytes": lambda n: jpeg(exif_segments(tiff(n, "B"))),
    "jpeg, behind another entry": lambda n: jpeg(exif_segments(tiff(n, before=TAG))),
    "jpeg, behind one cut off": lambda n: jpeg(exif_segments(tiff(n, before=CUT))),
    "jpeg, two values": lambda n: jpeg(exif_segments(tiff(n)), exif_segments(tiff(1))),
    "jpeg, first 1": lambda n: jpeg(exif_segments(tiff(1)), exif_segments(tiff(n))),
    "jpeg, two segments": lambda n: jpeg(exif_segments(tiff(n, behind=b"x" * 90_000))),
    "jpeg, value in the second": lambda n: jpeg(exif_segments(tiff(n, before=TAG * 9), 50)),
    "jpeg, twice Exif": lambda n: jpeg(exif_segments(b"Exif\0\0" + tiff(n))),
    "jpeg, broken": lambda n: jpeg(exif_segments(b"XX" + tiff(n)[2:])),
    "jpeg, empty and xmp": lambda n: jpeg(app1(b"Exif\0\0"), xmp_segment(xmp(n))),
    "jpeg, xmp": lambda n: jpeg(xmp_segment(xmp(n))),
    "jpeg, xmp element": lambda n: jpeg(xmp_segment(xmp(n, ELEMENT))),
    "jpeg, two xmp": lambda n: jpeg(xmp_segment(xmp(3)), xmp_segment(xmp(n))),
    "jpeg, xmp and exif": lambda n: jpeg(xmp_segment(xmp(8)), exif_segments(tiff(n))),
    "jpeg, xmp and exif of 0": lambda n: jpeg(xmp_segment(xmp(n)), exif_segments(tiff(0))),
    "jpeg, xmp and other exif": lambda n: jpeg(
        exif_segments(tiff(3).replace(b"\x12\x01", b"\x1a\x01")), xmp_segment(xmp(n))
    ),
    "png": lambda n: png(6, 4, png_chunk(b"eXIf", tiff(n)), idat()),
    "png, behind the pixels": lambda n: png(6, 4, idat(), png_chunk(b"eXIf", tiff(n))),
    "png, with Exif": lambda n: png(6, 4, png_chunk(b"eXIf", b"Exif\0\0" + tiff(n)), idat()),
    "png, two blocks": lambda n: png(6, 4, png_chunk(b"eXIf", tiff(3)), png_chunk(b"eXIf", tiff(n)), idat()),
    "png, xmp": lambda n: png(6, 4, itxt(XMP, xmp(n)), idat()),
    "png, xmp element": lambda n: png(6, 4, itxt(XMP, xmp(n, ELEMENT), compressed=True), idat()),
    "png, xmp as text": lambda n: png(6, 4, png_chunk(b"tEXt", XMP + b"\0" + xmp(n)), idat()),
    "png, profile": lambda n: png(6, 4, png_chunk(b"tEXt", RAW + b"\0" + profile(b"Exif\0\0" + tiff(n))), idat()),
    "png, packed profile": lambda n: png(
        6, 4, idat(), png_chunk(b"zTXt", RAW + b"\0\0" + zlib.compress(profile(tiff(n))))
    ),
    "png, profile in iTXt": lambda n: png(6, 4, itxt(RAW, profile(tiff(n)), compressed=True), idat()),
    "png, profile and eXIf": lambda n: png(6, 4, itxt(RAW, profile(tiff(n))), png_chunk(b"eXIf", tiff(3)), idat()),
    "png, profile and xmp": lambda n: png(6, 4, itxt(RAW, profile(tiff(n))), itxt(XMP, xmp(3)), idat()),
    "png, exif as text": lambda n: png(6, 4, png_chunk(b"tEXt", b"exif\0" + tiff(n)), idat()),
    "webp": lambda n: webp(exif=tiff(n)),
    "webp, with Exif": lambda n: webp(exif=b"Exif\0\0" + tiff(n, order=">")),
    "webp, xmp": lambda n: webp(xmp=xmp(n)),
    "webp, xmp element": lambda n: webp(xmp=xmp(n, ELEMENT), exif=b"Exif\0\0"),
    "webp, both": lambda n: webp(xmp=xmp(3), exif=tiff(n)),
    "webp, not announced": lambda n: unannounced(webp(xmp=xmp(n), exif=tiff(n))),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Pillow warns of broken EXIF."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def as_pillow(data: bytes) -> np.ndarray:
    """The picture that transformers shows a model; as it is stored where Pillow fails to turn it."""
    with Image.open(io.BytesIO(data)) as image:
        try:
            turned = ImageOps.exif_transpose(image)
        except PIL_ERRORS:
            turned = image
        return np.asarray(turned.convert("RGB"))


@pytest.mark.parametrize("case", CASES)
def test_a_picture_stands_as_in_transformers_as_a_file_and_opened_by_pillow(case: str) -> None:
    for orientation in range(10):
        data = CASES[case](orientation)
        expected = as_pillow(data)
        assert np.array_equal(images.decode(inspected(data, LIMITS)), expected), orientation
        assert upright_size(inspect(data)) == expected.shape[1::-1]
        with Image.open(io.BytesIO(data)) as image:
            assert np.array_equal(from_pil(image, LIMITS), expected), orientation


def test_the_cases_are_told_apart() -> None:
    """Pillow turns what these cases are about, so that files which are not turned cannot pass for it."""
    turned = {case for case, data in CASES.items() if as_pillow(data(6)).shape == (6, 4, 3)}
    assert CASES.keys() - turned == {
        *("jpeg, bytes", "jpeg, behind one cut off", "jpeg, first 1", "jpeg, broken", "jpeg, xmp and exif of 0"),
        *("png, profile and eXIf", "webp, not announced"),
    }


def test_what_a_caller_says_of_its_picture_counts(encoded: Encode) -> None:
    image = PICTURE.copy()
    image.getexif()[0x0112] = 6
    assert from_pil(image, LIMITS).size == (4, 6)
    tagged = Image.open(io.BytesIO(encoded(PICTURE, "TIFF", tiffinfo={0x0112: 8})))
    assert np.array_equal(from_pil(tagged, LIMITS), as_pillow(encoded(PICTURE, "TIFF", tiffinfo={0x0112: 8})))
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp(5).decode(), zip=True)
    data = encoded(PICTURE, "PNG", pnginfo=info)
    assert np.array_equal(images.decode(inspected(data, LIMITS)), as_pillow(data))


def damaged_exif(rng: random.Random) -> bytes:
    """Entries of every type, size and place, right and wrong."""
    order = rng.choice("<>")
    words = struct.Struct(order + "L")
    entries = b""
    for _ in range(rng.randint(0, 5)):
        tag, kind = rng.choice([0x0112, 0x0112, 0x010F, 0x8769, 0x011A]), rng.choice([3, 3, 3, *range(18)])
        value = struct.pack(order + "HH", rng.randint(0, 9), 0) if kind in (3, 8) else words.pack(rng.randint(0, 9))
        if rng.random() < 0.4:
            value = words.pack(rng.choice([0, 8, 20, 30, 60, 90, 150, 9999]))
        entries += struct.pack(order + "HHL", tag, kind, rng.choice([1, 1, 1, 1, 0, 2, 4, 8, 1 << 31])) + value
    begins = [b"II*\0", b"II*\0", b"II\0*", b"II+\0"] if order == "<" else [b"MM\0*", b"MM\0*", b"MM*\0", b"MM\0+"]
    num_entries = len(entries) // 12 + rng.choice([0, 0, 0, 1, 9000])
    data = rng.choice(begins) + words.pack(rng.choice([8, 8, 8, 0, 9, 5000])) + struct.pack(order + "H", num_entries)
    data += entries + rng.choice([b"\0" * 4, b""]) + bytes(rng.randrange(9) for _ in range(rng.randrange(60)))
    return b"Exif\0\0" * rng.randint(0, 3) + (data if rng.random() < 0.9 else data[: rng.randrange(len(data))])


def test_damaged_exif_is_read_as_pillow_does() -> None:
    rng, seen = random.Random(7), set()
    for _ in range(4000):
        exif, packet = damaged_exif(rng), rng.choice([b"", xmp(rng.randint(0, 9))])
        image = Image.new("1", (1, 1))
        image.info |= {"exif": exif, "xmp": packet}
        try:
            expected = image.getexif().get(0x0112, 1)
        except PIL_ERRORS:
            expected = 1
        found = orientation_of(exif, packet)
        assert found == (expected if expected in images._TRANSPOSITIONS else 1), (exif, packet)
        seen.add(found)
    assert seen == set(range(1, 9))


def test_asking_for_the_orientation_is_bounded() -> None:
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    entry = struct.pack("<HHLL", 0x010F, 2, 5, 8)
    directory = b"II*\0\x08\0\0\0\xff\xff" + entry * 65_535
    hostile = {
        "inflating": png(6, 4, *[png_chunk(b"zTXt", RAW + b"\0\0" + bomb)] * 50, itxt(XMP, bomb), idat()),
        "digits": png(6, 4, png_chunk(b"tEXt", RAW + b"\0\n\n\n" + b"ab\n" * 3_000_000), idat()),
        "xmp": png(6, 4, itxt(XMP, b"tiff:Orientation" * 600_000), idat()),
        "entries": png(6, 4, *[png_chunk(b"eXIf", directory)] * 10, idat()),
        "segments": jpeg(*[app1(b"Exif\0\0" + entry * 5000)] * 150),
    }
    for name, data in hostile.items():
        begin = time.process_time()
        assert inspect(data).orientation == 1, name
        assert time.process_time() - begin < 0.5, name
