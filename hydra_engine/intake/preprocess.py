"""What a model family's processor does to a picture, as values: how to fit it and what names it.

The pixels stay uint8; the tower normalises them on its device. Does not know tensors or files.
"""

from __future__ import annotations

import hashlib

from PIL import Image

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.intake.pixels import RESAMPLING, Fit, fit
from hydra_engine.specs.base import ImageGeometry, PreprocessSpec

_DIGEST_VERSION = b"hydra-image-1"


def fit_of(spec: PreprocessSpec, geometry: ImageGeometry) -> Fit:
    shortest_edge = spec.shortest_edge if spec.resize == "shortest_edge" else 0
    return Fit(geometry.width, geometry.height, shortest_edge, RESAMPLING[spec.resample])


def process(image: Image.Image, spec: PreprocessSpec, geometry: ImageGeometry) -> PixelPayload:
    """An RGB picture to the pixels that the vision tower wants."""
    return payload_of(fit(image, fit_of(spec, geometry)).tobytes(), spec, geometry)


def payload_of(pixels: bytes, spec: PreprocessSpec, geometry: ImageGeometry) -> PixelPayload:
    width, height = geometry.width, geometry.height
    return PixelPayload(image_digest(spec.identity, width, height, pixels), width, height, pixels)


def image_digest(identity: str, width: int, height: int, pixels: bytes) -> ImageDigest:
    """BLAKE2b-256 over every part with its length, so no two tuples run together."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (_DIGEST_VERSION, identity.encode(), b"%d" % width, b"%d" % height, b"RGB", pixels):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return ImageDigest(digest.digest())
