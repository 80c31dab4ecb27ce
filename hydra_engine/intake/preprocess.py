"""An RGB picture to the pixels that the vision tower wants, equal to transformers' Pillow-based processors.

The result stays uint8; `scale_and_shift` is the normalisation, which the device does. Does not know tensors or files.
"""

from __future__ import annotations

import hashlib
from math import ceil

import numpy as np
import numpy.typing as npt
from PIL import Image

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.specs.base import ImageGeometry, PreprocessSpec

_DIGEST_VERSION = b"hydra-image-1"
_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}


def process(image: Image.Image, spec: PreprocessSpec, geometry: ImageGeometry) -> PixelPayload:
    """Resize, and crop where the spec says so, to geometry.width x geometry.height."""
    resample = _FILTERS[spec.resample]
    if spec.resize == "shortest_edge":
        resized = image.resize(shortest_edge_size(image.width, image.height, spec.shortest_edge), resample)
        pixels = center_crop(np.asarray(resized), spec.crop_width, spec.crop_height)
    else:
        pixels = np.asarray(image.resize((geometry.width, geometry.height), resample))
    height, width, _ = pixels.shape
    assert (width, height) == (geometry.width, geometry.height), "the spec's geometry and its preprocessing disagree"
    data = pixels.tobytes()
    return PixelPayload(image_digest(spec.identity, width, height, data), width, height, data)


def shortest_edge_size(width: int, height: int, shortest_edge: int) -> tuple[int, int]:
    """The shorter side becomes `shortest_edge`; the other one keeps the aspect, rounded down."""
    if width <= height:
        return shortest_edge, int(shortest_edge * height / width)
    return int(shortest_edge * width / height), shortest_edge


def center_crop(pixels: npt.NDArray[np.uint8], width: int, height: int) -> npt.NDArray[np.uint8]:
    """[H, W, 3] -> [height, width, 3]; where the picture is smaller, zeros go around it."""
    old_height, old_width, _ = pixels.shape
    top, left = (old_height - height) // 2, (old_width - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    padded = np.zeros((max(height, old_height), max(width, old_width), 3), np.uint8)
    pad_top, pad_left = ceil((padded.shape[0] - old_height) / 2), ceil((padded.shape[1] - old_width) / 2)
    padded[pad_top : pad_top + old_height, pad_left : pad_left + old_width] = pixels
    top, left = top + pad_top, left + pad_left
    return padded[top : top + height, left : left + width]


def scale_and_shift(spec: PreprocessSpec) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Rescale and normalise in one step, per channel: x = uint8 * scale + shift."""
    mean, std = np.asarray(spec.mean, np.float64), np.asarray(spec.std, np.float64)
    return (spec.rescale / std).astype(np.float32), (-mean / std).astype(np.float32)


def image_digest(identity: str, width: int, height: int, pixels: bytes) -> ImageDigest:
    """BLAKE2b-256 over every part with its length, so no two tuples run together."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (_DIGEST_VERSION, identity.encode(), b"%d" % width, b"%d" % height, b"RGB", pixels):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return ImageDigest(digest.digest())
