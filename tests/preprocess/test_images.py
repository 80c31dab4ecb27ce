import io
import random
import re
import struct
import time
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageFile

from hydra_engine.config import MediaConfig
from hydra_engine.errors import InvalidImage
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import from_pil, inspect, inspected, upright_size

LIMITS = MediaConfig()
Encode = Callable[..., bytes]
Picture = Callable[..., Image.Image]
LEAKS = re.compile(r"0x[0-9a-f]{4}|BytesIO|<|/|PIL|Traceback")


def decode(data: bytes, limits: MediaConfig) -> Image.Image:
    return Image.fromarray(images.decode(inspected(data, limits)))


def probed(data: bytes) -> tuple[int, int]:
    """(width, height) of the upright picture, from the header alone."""
    return upright_size(inspect(data))


def refused(data: bytes, limits: MediaConfig = LIMITS) -> InvalidImage:
    with pytest.raises(InvalidImage) as caught:
        decode(data, limits)
    message = caught.value.message
    assert not LEAKS.search(message) and "\n" not in message and len(message) < 200
    return caught.value


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + b"".join(chunks) + png_chunk(b"IEND", b"")


def exif(orientation: int) -> bytes:
    return b"Exif\0\0" + b"MM\0*\0\0\0\x08" + struct.pack(">HHHIHH", 1, 0x0112, 3, 1, orientation, 0) + b"\0" * 4


# ---- hostile files


def test_bombs_are_refused_by_their_header() -> None:
    one_bit = png(13300, 13300, png_chunk(b"IDAT", zlib.compress(b"\0" * (13300 * 1663), 9)), depth=1, colour=0)
    assert len(one_bit) < 40_000
    bombs = {
        "png": one_bit,
        "png header only": png(65535, 65535),
        "png beyond every limit": png(2**31 - 1, 2**31 - 1),
        "gif": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",\0\0\0\0\1\0\1\0\0\2\1\0\0;",
        "gif frame beyond the screen": b"GIF89a\1\0\1\0\0\0\0," + struct.pack("<HHHHB", 0, 0, 9500, 9500, 0) + b"\2\0;",
        "webp": b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\xff\x00" * 2,
        "jpeg": b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\1\1\x11\0\xff\xda\0\x08\1\1\0\0\x3f\0\0\xff\xd9",
    }
    for name, bomb in bombs.items():
        begin = time.thread_time()
        assert refused(bomb).code == "image_too_large", name
        assert time.thread_time() - begin < 0.1, name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PN",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"<!DOCTYPE html><html></html>",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"II*\0" + b"\0" * 40,
        b"\0\0\1\0\1\0",
        b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40,
        b"\0" * 1000,
        b"P6 1 1 255 abc",
    ],
)
def test_other_formats_are_refused_by_their_first_bytes(data: bytes) -> None:
    assert refused(data).code == "unsupported_image_format"


def test_formats_that_pillow_knows_and_we_do_not_list_are_refused(encoded: Encode, picture: Picture) -> None:
    for format in ("TIFF", "PPM", "ICO", "TGA", "PCX", "EPS", "SGI", "DDS"):
        assert refused(encoded(picture(16, 16), format)).code == "unsupported_image_format", format


FILES = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), ("WEBP", {}), ("BMP", {})]


@pytest.mark.parametrize(("format", "options"), FILES)
def test_damaged_files_end_in_an_answer(encoded: Encode, picture: Picture, format: str, options: dict) -> None:
    whole, rng = encoded(picture(24, 18), format, **options), random.Random(3)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode(bytes(damaged), LIMITS)
        except InvalidImage as error:
            assert not LEAKS.search(error.message), error.message


def test_work_before_the_pixels_is_bounded() -> None:
    tiny_chunks = png(9, 9, png_chunk(b"tEXt", b"") * 200_000)
    tiny_segments = b"\xff\xd8" + b"\xff\xe0\0\2" * 200_000
    tiny_blocks = b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1x" * 500_000 + b"\0;"
    many_scans = b"\xff\xda\0\x08\1\1\0\0\x3f\0\0" * 1000
    many_scans = b"\xff\xd8\xff\xc2\0\x0b\x08\0\x10\0\x10\1\1\x11\0" + many_scans + b"\xff\xd9"
    for data in (tiny_chunks, tiny_segments, tiny_blocks, many_scans):
        begin = time.thread_time()
        assert refused(data).code == "image_decode_failed"
        assert time.thread_time() - begin < 0.5


def test_camera_data_with_overlapping_fields_does_not_reach_the_decoder(encoded: Encode, picture: Picture) -> None:
    """Pillow would copy every field: here 5,000 times 64 kB."""
    fields = b"".join(struct.pack("<HHII", 0x9000 + tag, 7, 60_000, 0) for tag in range(5000))
    block = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 5000) + fields + b"\0" * 4
    assert len(block) < 65_000
    plain = encoded(picture(24, 18), "JPEG")
    jpeg = plain[:2] + (b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block) * 20 + plain[2:]
    begin = time.perf_counter()
    assert decode(jpeg, LIMITS).tobytes() == decode(plain, LIMITS).tobytes()
    assert time.perf_counter() - begin < 0.2


def test_compressed_extras_of_a_png_are_left_out() -> None:
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    row = zlib.compress(b"\0abcdef" * 2)
    chunks = [png_chunk(b"iCCP", b"x\0\0" + bomb), *[png_chunk(b"zTXt", b"k\0\0" + bomb)] * 5, png_chunk(b"IDAT", row)]
    begin = time.perf_counter()
    assert decode(png(2, 2, *chunks), LIMITS).tobytes() == b"abcdefabcdef"
    assert time.perf_counter() - begin < 0.1


def test_bytes_and_pixels_and_shape_have_limits(encoded: Encode, picture: Picture) -> None:
    data = encoded(picture(40, 30))
    assert refused(data, MediaConfig(max_image_bytes=len(data) - 1)).code == "image_too_large"
    assert refused(data, MediaConfig(max_image_pixels=1199)).code == "image_too_large"
    assert decode(data, MediaConfig(max_image_pixels=1200, max_image_bytes=len(data))).size == (40, 30)
    for width, height in ((1, 10_000), (20_000, 1), (201, 1), (1, 201), (402, 2)):
        assert refused(encoded(Image.new("RGB", (width, height)))).code == "image_aspect_ratio"
    for width, height in ((1, 1), (199, 1), (1, 200), (400, 2), (27, 28), (31, 639)):
        assert decode(encoded(Image.new("RGB", (width, height))), LIMITS).size == (width, height)
    assert refused(png(0, 5)).code == "image_decode_failed"


def test_pillows_global_limits_and_warnings_stay_as_they_are(encoded: Encode) -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, warnings.filters[:])
    wide_open = MediaConfig(max_image_pixels=1 << 40)
    assert refused(png(60_000, 60_000), wide_open).code == "image_too_large"
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, warnings.filters)


def test_probe_reads_the_upright_size_without_decoding(encoded: Encode, picture: Picture) -> None:
    for format, options in FILES:
        assert probed(encoded(picture(24, 18), format, **options)) == (24, 18)
    assert probed(encoded(picture(24, 18), "JPEG", exif=exif(6))) == (18, 24)
    assert probed(png(30_000, 20_000)) == (30_000, 20_000)


# ---- modes


def rgb(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, LIMITS)).astype(int)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP"])
def test_lossless_rgb_arrives_unchanged(encoded: Encode, picture: Picture, format: str) -> None:
    image = picture(33, 21)
    options = {"lossless": True} if format == "WEBP" else {}
    assert np.array_equal(rgb(encoded(image, format, **options)), np.asarray(image))


JPEGS = [
    {},
    {"progressive": True},
    {"subsampling": 0},
    {"subsampling": 1},
    {"quality": 30, "optimize": True},
    {"quality": 100, "restart_marker_rows": 1},
    {"keep_rgb": True},
]


@pytest.mark.parametrize("options", JPEGS)
def test_jpeg_pixels_are_those_of_pillow(encoded: Encode, picture: Picture, options: dict) -> None:
    for width, height in ((61, 47), (1, 1), (1, 40), (17, 2), (160, 120)):
        for mode in ("RGB", "L", "CMYK"):
            if mode != "RGB" and options == {"keep_rgb": True}:
                continue
            data = encoded(picture(width, height).convert(mode), "JPEG", **options)
            assert np.array_equal(rgb(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))), (width, mode)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 95, "restart_marker_rows": 1}])
def test_damaged_jpegs_are_judged_as_pillow_does(
    encoded: Encode, picture: Picture, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast decoder is believed only where it finds nothing wrong, and then Pillow finds the same pixels."""
    whole, rng, num_fast = encoded(picture(40, 30), "JPEG", **options), random.Random(5), 0
    fast = images._decode_jpeg
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        del damaged[rng.choice([len(damaged), rng.randrange(len(damaged))]) :]
        try:
            container = inspected(bytes(damaged), LIMITS)
        except InvalidImage:
            continue
        found = fast(container)
        if found is not None:
            num_fast += 1
            with monkeypatch.context() as patch:
                patch.setattr(images, "_decode_jpeg", lambda container: None)
                assert np.array_equal(images.decode(container._replace(orientation=1)), found)
    assert num_fast > 10


def test_grey_one_bit_and_palette_pictures_become_rgb(encoded: Encode, picture: Picture) -> None:
    grey = picture(20, 10).convert("L")
    expected = np.stack([np.asarray(grey)] * 3, -1)
    for format in ("PNG", "BMP"):
        assert np.array_equal(rgb(encoded(grey, format)), expected)
    one_bit = grey.convert("1")
    assert np.array_equal(rgb(encoded(one_bit)), np.asarray(one_bit.convert("RGB")))
    palette = picture(20, 10).quantize(16)
    for format in ("PNG", "GIF", "BMP"):
        assert np.array_equal(rgb(encoded(palette, format)), np.asarray(palette.convert("RGB")))


def test_alpha_lies_over_white(encoded: Encode, picture: Picture) -> None:
    rgba = picture(40, 30, channels=4)
    values = np.asarray(rgba).astype(float)
    alpha = values[..., 3:] / 255
    expected = values[..., :3] * alpha + 255 * (1 - alpha)
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        assert np.abs(rgb(encoded(rgba, format, **options)) - expected).max() <= 1
    grey_alpha = Image.merge("LA", (rgba.getchannel("R"), rgba.getchannel("A")))
    grey_expected = values[..., :1] * alpha + 255 * (1 - alpha)
    assert np.abs(rgb(encoded(grey_alpha)) - grey_expected).max() <= 1


def test_transparent_colours_are_white(encoded: Encode) -> None:
    palette = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for format in ("PNG", "GIF"):
        assert rgb(encoded(palette, format, transparency=1)).tolist() == [[[255, 0, 0], [255] * 3, [0, 0, 255]]]
    assert rgb(encoded(palette, transparency=bytes([0, 255, 255])))[0].tolist() == [[255] * 3, [0, 255, 0], [0, 0, 255]]
    keyed = Image.fromarray(np.array([[[9, 8, 7], [1, 2, 3]]], np.uint8))
    assert rgb(encoded(keyed, transparency=(9, 8, 7))).tolist() == [[[255] * 3, [1, 2, 3]]]
    grey = Image.fromarray(np.array([[5, 6]], np.uint8))
    assert rgb(encoded(grey, transparency=5)).tolist() == [[[255] * 3, [6] * 3]]


def test_large_alpha_is_composed_in_bands_without_seams() -> None:
    values = np.zeros((1400, 1000, 4), np.uint8)
    values[..., 0], values[..., 3] = 200, np.linspace(0, 255, 1400, dtype=np.uint8)[:, None]
    mine = np.asarray(from_pil(Image.fromarray(values), LIMITS)).astype(float)
    alpha = values[..., 3:] / 255
    assert np.abs(mine - (values[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1


def test_sixteen_bits_are_scaled_not_clipped(encoded: Encode) -> None:
    ramp = np.linspace(0, 65535, 128, dtype=np.uint16)[None]
    shown = rgb(encoded(Image.fromarray(ramp)))
    assert np.abs(shown[0, :, 0] - ramp[0] / 257).max() <= 1 and (shown[..., 0] == shown[..., 2]).all()
    colours = np.stack([ramp[0], ramp[0][::-1], ramp[0] // 2], -1).astype(">u2")
    body = png_chunk(b"IDAT", zlib.compress(b"\0" + colours.tobytes()))
    assert np.abs(rgb(png(128, 1, body, depth=16))[0] - colours / 257).max() <= 1


def test_cmyk_is_converted(encoded: Encode) -> None:
    image = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(rgb(encoded(image, "JPEG", quality=95)) - [0, 255, 255]).max() <= 8


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_all_orientations_are_turned_upright(encoded: Encode, picture: Picture, format: str) -> None:
    upright = picture(32, 16)
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }
    options = {"quality": 95, "subsampling": 0} if format == "JPEG" else {"lossless": True} if format == "WEBP" else {}
    for orientation, image in stored.items():
        block = exif(orientation)
        shown = rgb(encoded(image, format, exif=block[6:] if format == "PNG" else block, **options))
        assert shown.shape == (16, 32, 3)
        assert np.abs(shown - np.asarray(upright).astype(int)).mean() < 3, orientation
    assert np.array_equal(rgb(encoded(upright, "PNG", exif=exif(77)[6:])), np.asarray(upright))


def test_animations_show_their_first_frame(encoded: Encode) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    frames = [Image.new("RGB", (12, 12), colour) for colour in colours]
    for format in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:] * 100)
        assert np.abs(rgb(data) - [255, 0, 0]).max() <= 3, format


def test_all_small_sizes_keep_their_geometry(encoded: Encode) -> None:
    for width in range(1, 65, 3):
        for height in range(1, 65, 3):
            data = encoded(Image.new("L", (width, height)), "BMP")
            assert probed(data) == decode(data, LIMITS).size == (width, height)
