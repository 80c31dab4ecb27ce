"""Files that go on behind their picture, and files whose last bytes are missing."""

import io
import os
import random
import struct
import time

import numpy as np
import pytest
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import PIL_ERRORS, inspect, inspected, to_rgb
from tests.preprocess.test_images import FILES, LIMITS, Encode, Picture, png, png_chunk, refused, rgb

CLIP = random.Random(1).randbytes(1 << 20)


def as_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(to_rgb(image))


# ---- what lies behind a picture


@pytest.mark.parametrize(("format", "options"), [*FILES, ("WEBP", {"lossless": True})])
def test_what_follows_a_picture_changes_nothing(encoded: Encode, picture: Picture, format: str, options: dict) -> None:
    data = encoded(picture(24, 18), format, **options)
    further = encoded(picture(32, 16, seed=1), "JPEG", progressive=True)
    for trailer in (b"trailing bytes \xff\x00", b"\0" * 99, b"\xff" * 99, b"\xff\xda" * 99, CLIP, data, further + CLIP):
        container = inspected(data + trailer, LIMITS)
        assert np.array_equal(images.decode(container), rgb(data))
        if format not in ("BMP", "GIF"):  # which are as long as they were
            assert container.data == inspected(data, LIMITS).data


JPEGS = [
    *({}, {"progressive": True}, {"progressive": True, "restart_marker_blocks": 3}, {"restart_marker_rows": 1}),
    *({"quality": 100, "subsampling": 0}, {"keep_rgb": True}),
]


@pytest.mark.parametrize("options", JPEGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_clip_of_a_motion_photo_is_no_part_of_the_picture(
    encoded: Encode, picture: Picture, mode: str, options: dict
) -> None:
    if mode != "RGB" and "keep_rgb" in options:
        options = {"optimize": True}
    data = encoded(picture(160, 120).convert(mode), "JPEG", **options)
    container = inspected(data + CLIP * 6, LIMITS)
    assert container.data.endswith(b"\xff\xd9") and len(container.data) <= len(data)
    assert np.array_equal(images.decode(container), as_pillow(data + CLIP * 6))


def test_of_several_pictures_in_a_file_the_first_is_shown(encoded: Encode, picture: Picture) -> None:
    """Cameras write a second view, and telephones a preview or a map of brightness, behind the picture."""
    first, second = picture(48, 32), picture(48, 32, seed=4)
    data = encoded(first, "MPO", save_all=True, append_images=[second, second])
    assert np.array_equal(rgb(data), as_pillow(data)) and np.array_equal(rgb(data), rgb(encoded(first, "JPEG")))
    assert np.array_equal(rgb(data + CLIP * 5), rgb(data))


def between_scans(data: bytes, change: bytes) -> bytes:
    """A progressive JPEG with further bytes in front of the tables of its second scan."""
    place = data.index(b"\xff\xc4", data.index(b"\xff\xda"))
    return data[:place] + change + data[place:]


def test_markers_inside_and_between_scans_are_no_ends(encoded: Encode, picture: Picture) -> None:
    plain = encoded(picture(80, 60), "JPEG", progressive=True, quality=80)
    thumbnail = encoded(picture(16, 16), "JPEG")
    segment = struct.pack(">H", len(thumbnail) + 8) + b"Exif\0\0" + thumbnail
    between = {
        "padding": b"\xff" * 7,
        "comment": b"\xff\xfe\0\x08\xff\xd9\xff\xda\xff\xd9",
        "thumbnail": b"\xff\xe1" + segment,
        "restarts": b"\xff\xd0\xff\xd7",
        "number of lines": b"\xff\xdc\0\4\0\x3c",
    }
    for name, change in between.items():
        data = between_scans(plain, change)
        assert np.array_equal(rgb(data), rgb(plain)), name
        assert np.array_equal(as_pillow(data), rgb(plain)), name
        assert np.array_equal(rgb(data + CLIP), rgb(plain)), name
    for name in ("padding", "comment", "thumbnail"):
        data = plain[:2] + between[name] + plain[2:]
        assert np.array_equal(rgb(data + CLIP), rgb(plain)), name
    assert np.array_equal(rgb(plain[:-2] + b"\xff" * 5 + plain[-2:] + CLIP), rgb(plain))
    junk = plain[:20] + b"junk" + plain[20:]  # behind the first segment, and Pillow skips it
    assert np.array_equal(rgb(junk), as_pillow(junk))


def test_scans_are_counted_to_the_end_of_the_picture(encoded: Encode, picture: Picture) -> None:
    plain = encoded(picture(40, 30), "JPEG", progressive=True)
    last = plain[plain.rindex(b"\xff\xda") : -2]
    num_scans = plain.count(b"\xff\xda")
    assert 6 < num_scans < 50

    def of(number: int) -> bytes:
        return plain[:-2] + last * (number - num_scans) + plain[-2:]

    assert np.array_equal(rgb(of(50) + CLIP + b"\xff\xda" * 1000), as_pillow(of(50)))
    assert "too many scans" in refused(of(51)).message
    assert "too many scans" in refused(of(51) + CLIP).message


def test_reading_to_the_end_of_a_file_is_bounded(encoded: Encode, picture: Picture) -> None:
    whole = encoded(picture(24, 18), "JPEG")
    head, gif = whole[: whole.index(b"\xff\xda") + 14], b"GIF89a\1\0\1\0\0\0\0"
    hostile = {
        "clip": whole + b"\xff" * 4_000_000,
        "padding": head + b"\xff" * 4_000_000,
        "stuffing": head + b"\xff\0" * 2_000_000,
        "restarts": head + b"\xff\xd0" * 2_000_000,
        "reserved": head + b"\xff\x01" * 2_000_000,
        "beginnings": head + b"\xff\xd8" * 2_000_000,
        "segments": head + b"\xff\xe0\0\2" * 1_000_000,
        "scans": head + b"\xff\xda\0\2" * 1_000_000,
        "zeros": gif + b"\0" * 4_000_000,
        "extensions": gif + b"!\xfe\0" * 2_000_000,
        "blocks": gif + b"!\xfe" + b"\1x" * 2_000_000,
    }
    for name, data in hostile.items():
        begin = time.process_time()
        if name == "clip":
            inspect(data)
        else:
            with pytest.raises(InvalidImage, match=r"ends too early|too many"):
                inspect(data)
        assert time.process_time() - begin < 0.5, name


# ---- files whose last bytes are missing


def judged(data: bytes) -> np.ndarray | None:
    try:
        return rgb(data)
    except InvalidImage as error:
        assert error.code in ("image_decode_failed", "unsupported_image_format")
        return None


def judged_by_pillow(data: bytes) -> np.ndarray | None:
    try:
        return as_pillow(data)
    except PIL_ERRORS:
        return None


@pytest.mark.parametrize("size", [(24, 18), (23, 17)])
@pytest.mark.parametrize(
    ("format", "options", "may_lack"),
    [
        ("PNG", {}, 20),  # the end, and of the pixels both checksums
        ("PNG", {"mode": "P"}, 20),
        ("GIF", {}, 2),
        ("WEBP", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("BMP", {}, 0),
        ("BMP", {"mode": "P"}, 0),
    ],
)
def test_a_file_without_its_last_bytes_is_judged_as_pillow_does(
    encoded: Encode, picture: Picture, format: str, options: dict, may_lack: int, size: tuple[int, int]
) -> None:
    """A picture is shown if all of its pixels are there."""
    options = dict(options)
    whole = encoded(picture(*size).convert(options.pop("mode", "RGB")), format, **options)
    assert judged(whole) is not None
    for end in {*range(0, len(whole), 10), *range(len(whole) - 40, len(whole))}:
        found, expected = judged(whole[:end]), judged_by_pillow(whole[:end])
        assert (found is None) == (expected is None), end
        assert found is None or np.array_equal(found, expected), end
        if len(whole) - end <= may_lack:
            assert np.array_equal(found, rgb(whole)), end
        if len(whole) - end > 40:
            assert found is None, end


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "CMYK"}, {"mode": "L"}])
def test_a_jpeg_needs_its_end(encoded: Encode, picture: Picture, options: dict) -> None:
    """Pillow takes some without, where its decoder happens to have read enough."""
    options = dict(options)
    whole = encoded(picture(24, 18).convert(options.pop("mode", "RGB")), "JPEG", **options)
    for end in {*range(3, len(whole), 10), *range(len(whole) - 40, len(whole))}:
        assert refused(whole[:end]).message == "the image cannot be decoded: it ends too early", end


def test_what_follows_the_pixels_of_a_png_may_be_broken(encoded: Encode, picture: Picture) -> None:
    whole = encoded(picture(24, 18))
    for behind in (b"", b"\0" * 50, os.urandom(50), png_chunk(b"tEXt", b"a\0b"), png_chunk(b"IEND", b"")[:7]):
        assert np.array_equal(rgb(whole[:-12] + behind), rgb(whole))
    assert refused(png(9, 9)[:-12]).message == "the image cannot be decoded: it ends too early"
    assert refused(whole[: whole.index(b"IDAT") + 40]).code == "image_decode_failed"


def test_gifs_are_read_to_the_end_of_their_first_picture(encoded: Encode, picture: Picture) -> None:
    colours = [Image.new("RGB", (12, 12), colour) for colour in ("red", "green", "blue")]
    whole = encoded(colours[0], "GIF", save_all=True, append_images=colours[1:], comment=b"x" * 600)
    second = whole.index(b",", whole.index(b",") + 1)
    assert np.array_equal(rgb(whole[: second + 5]), rgb(whole)) and rgb(whole).tolist()[0][0] == [255, 0, 0]
    first = whole.index(b"!")
    for between in (b"\0", b"\0" * 9, b"\1\2\3", b"!\xfe\0", b"!\xf9\0", b"!\x01\2ab\0\0\0"):
        data = whole[:first] + between + whole[first:]
        assert np.array_equal(rgb(data), rgb(whole)), between
    palette = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    keyed = encoded(palette, "GIF", transparency=1, comment=b"x")
    assert rgb(keyed[:-1]).tolist() == [[[255, 0, 0], [255] * 3, [0, 0, 255]]]
    assert refused(b"GIF89a\1\0\1\0\0\0\0!\xfe\1x\0;").message == "the image cannot be decoded: it holds no picture"
