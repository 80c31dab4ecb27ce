"""Pictures that are in memory already: Pillow's of every mode, arrays and tensors."""

import io

import numpy as np
import pytest
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.preprocess.media.images import from_array, from_pil
from tests.preprocess.test_images import LIMITS, Encode, Picture, exif, rgb


def test_a_callers_picture_is_left_alone(picture: Picture, encoded: Encode) -> None:
    image = Image.open(io.BytesIO(encoded(picture(32, 16), "JPEG", exif=exif(6))))
    assert from_pil(image, LIMITS).size == (16, 32)
    assert image.size == (32, 16)
    assert from_pil(Image.new("F", (3, 2), 127.0), LIMITS).getpixel((0, 0)) == (127, 127, 127)
    with pytest.raises(InvalidImage, match="Pillow"):
        from_pil(Image.open(io.BytesIO(encoded(picture(64, 64), "JPEG", quality=100)[:-300])), LIMITS)


CONVERTED = ["1", "L", "P", "I", "F", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]


@pytest.mark.parametrize("mode", CONVERTED)
def test_modes_without_transparency_are_those_of_transformers(picture: Picture, mode: str) -> None:
    image = picture(20, 10)
    image = Image.frombytes("LAB", image.size, image.tobytes()) if mode == "LAB" else image.convert(mode)
    assert np.array_equal(np.asarray(from_pil(image, LIMITS)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_modes_with_transparency_lie_over_white(picture: Picture, mode: str) -> None:
    """Processors of transformers that support transparency convert so."""
    image = picture(20, 10, channels=4)
    rgba = image.convert("LA").convert("RGBA") if mode in ("LA", "La") else image
    if mode == "PA":
        image = picture(20, 10).convert("P").convert("PA")
        image.putalpha(picture(20, 10).convert("L"))
        rgba = image.convert("RGBA")
    shown = from_pil(image if mode == "PA" else image.convert(mode.upper()).convert(mode), LIMITS)
    white = Image.new("RGBA", image.size, "white")
    expected = np.asarray(Image.alpha_composite(white, rgba).convert("RGB")).astype(int)
    assert np.abs(np.asarray(shown).astype(int) - expected).max() <= 2


ORDERS = {"I;16L": "<u2", "I;16B": ">u2", "I;16N": "=u2"}


def test_a_transparent_colour_of_another_mode_counts_for_nothing(picture: Picture) -> None:
    """Pillow keeps it in some conversions: from a palette to one bit, for example."""
    palette = picture(20, 10).quantize(8)
    palette.info["transparency"] = bytes([0, 128, 255])
    deep = Image.fromarray(np.arange(200, dtype=np.uint16).reshape(10, 20))
    deep.info["transparency"] = 1394
    forms = [palette.convert("1"), palette.convert("I"), deep.convert("P"), *map(picture(20, 10).convert, CONVERTED)]
    for image in forms:
        expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(np.asarray(from_pil(image, LIMITS)), expected), image.mode
    for key in (bytes([0, 128]), 1394):
        image = picture(20, 10).copy()
        image.info["transparency"] = key
        assert np.array_equal(np.asarray(from_pil(image, LIMITS)), np.asarray(image)), key


def test_32_bit_integers_are_clipped_and_16_bit_ones_scaled(encoded: Encode) -> None:
    values = np.array([[-9, 0, 100, 255, 256, 70_000]], np.int32)
    assert np.asarray(from_pil(Image.fromarray(values), LIMITS))[0, :, 1].tolist() == [0, 0, 100, 255, 255, 255]
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16)[None]
    expected = (ramp.astype(int) + 128) // 257
    image = Image.fromarray(ramp)
    for mode in ("I;16", "I;16L", "I;16B", "I;16N"):
        form = image if mode == "I;16" else Image.frombytes(mode, image.size, ramp.astype(ORDERS[mode]).tobytes())
        assert np.array_equal(np.asarray(from_pil(form, LIMITS))[..., 0], expected), mode
    opened = Image.open(io.BytesIO(encoded(image)))
    assert np.array_equal(np.asarray(from_pil(opened, LIMITS)), rgb(encoded(image)))


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_arrays_of_all_integers_hold_the_same_values(picture: Picture, kind: str) -> None:
    values = np.asarray(picture(20, 10)) // (2 if kind == "int8" else 1)
    assert np.array_equal(np.asarray(from_array(values.astype(kind), LIMITS)), values)


def test_arrays_in_every_layout_are_the_same_picture(picture: Picture) -> None:
    values = np.asarray(picture(20, 10))

    class Tensor:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def detach(self) -> "Tensor":
            return self

        cpu = detach

        def numpy(self) -> np.ndarray:
            return self.values

    forms = [values, values.transpose(2, 0, 1), values / 255, (values / 255).astype(np.float16).astype(np.float32)]
    for form in (*forms, *(Tensor(form) for form in forms), np.asfortranarray(values)):
        assert np.abs(np.asarray(from_array(form, LIMITS)).astype(int) - values).max() <= 1
    assert np.array_equal(np.asarray(from_array(values[..., 0], LIMITS))[..., 2], values[..., 0])
    assert np.array_equal(np.asarray(from_array(values[..., :1], LIMITS))[..., 2], values[..., 0])


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((5,), np.uint8),
        np.full((2, 2, 3), 256),
        np.full((2, 2, 3), -1),
        np.ones((2, 2, 3), bool),
        np.full((2, 2, 3), 1.5),
        np.full((2, 2, 3), -0.1),
        np.full((2, 2, 3), np.nan),
        np.zeros((0, 3, 3), np.uint8),
        np.array([["a"]]),
        np.zeros((1, 300, 3), np.uint8),
    ],
)
def test_wrong_arrays_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(InvalidImage):
        from_array(wrong, LIMITS)
