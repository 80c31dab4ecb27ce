import hashlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hydra_engine.intake.preprocess import image_digest, process
from hydra_engine.specs.base import ImageGeometry, PreprocessSpec

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def clip(shortest: int, crop_width: int, crop_height: int, resample: str = "bicubic") -> PreprocessSpec:
    return PreprocessSpec("shortest_edge", shortest, crop_width, crop_height, resample, 1 / 255, MEAN, STD, "clip")


def square(width: int, height: int) -> ImageGeometry:
    return ImageGeometry(width, height, 1, 1, (1, 1, 1))


def pixels_of(image: Image.Image, spec: PreprocessSpec) -> np.ndarray:
    payload = process(image, spec, square(spec.crop_width, spec.crop_height))
    return np.frombuffer(payload.data, np.uint8).reshape(payload.height, payload.width, 3)


def sizes() -> list[tuple[int, int]]:
    rng = random.Random(7)
    special = [(1, 1), (1, 7), (7, 1), (2, 3), (27, 28), (31, 639), (84, 84), (83, 85), (85, 83), (1, 150), (640, 480)]
    return special + [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(30)]


@pytest.mark.parametrize(("shortest", "crop_width", "crop_height"), [(84, 84, 84), (56, 84, 70), (30, 21, 63)])
def test_pixels_equal_those_of_transformers(
    picture: Callable[..., Image.Image], shortest: int, crop_width: int, crop_height: int
) -> None:
    """The second and third crop are larger than the resized picture: zeros around it."""
    spec = clip(shortest, crop_width, crop_height)
    oracle = CLIPImageProcessorPil(
        size={"shortest_edge": shortest}, crop_size={"height": crop_height, "width": crop_width}
    )
    for width, height in sizes():
        image = picture(width, height, seed=width)
        mine = pixels_of(image, spec)
        plain = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(mine.transpose(2, 0, 1), plain), (width, height)


@pytest.mark.parametrize("resample", ["bilinear", "lanczos", "nearest"])
def test_other_filters_are_those_of_transformers(picture: Callable[..., Image.Image], resample: str) -> None:
    oracle = CLIPImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        resample=getattr(Image.Resampling, resample.upper()),
    )
    image = picture(61, 47)
    plain = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    assert np.array_equal(pixels_of(image, clip(28, 28, 28, resample)).transpose(2, 0, 1), plain)


def test_exact_resizes_to_the_geometry_without_a_crop(picture: Callable[..., Image.Image]) -> None:
    spec = replace(clip(0, 0, 0), resize="exact")
    payload = process(picture(50, 40), spec, square(64, 32))
    assert (payload.width, payload.height, len(payload.data)) == (64, 32, 64 * 32 * 3)
    assert payload.data == picture(50, 40).resize((64, 32), Image.Resampling.BICUBIC).tobytes()


def test_the_digest_is_a_hash_over_parts_with_their_lengths() -> None:
    parts = [b"hydra-image-1", b"clip", b"2", b"1", b"RGB", b"abcdef"]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    assert image_digest("clip", 2, 1, b"abcdef") == hashlib.blake2b(framed, digest_size=32).digest()


def test_near_pairs_never_share_a_digest() -> None:
    rng = random.Random(0)
    seen: dict[bytes, tuple[str, int, int, bytes]] = {}
    for _ in range(10_000):
        width, height = rng.choice([(1, 12), (12, 1), (3, 4), (4, 3), (2, 6), (6, 2)])
        identity, body = rng.choice(["clip", "clip1", "cli"]), bytes(rng.randrange(2) for _ in range(12)) * 3
        key = (identity, width, height, body)
        digest = image_digest(*key)
        assert seen.setdefault(digest, key) == key
    assert len(seen) == len(set(seen.values())) > 5000
