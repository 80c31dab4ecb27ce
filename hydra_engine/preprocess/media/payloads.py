"""Payloads for the vision tower, one per span of features, with names: made of the pixels of a plan's views.

The pixels stay uint8; the tower normalises them on its device. A name says where features come from, not what the
pixels are: hashing costs the compressed file, not what became of it. Does not know tensors or files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from PIL import Image

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.models.specs.base import MediaPlan, PreprocessSpec, View
from hydra_engine.preprocess.media.pixels import num_bytes, render

_DIGEST_VERSION = b"hydra-image-2"


def process(image: Image.Image, content: bytes, plan: MediaPlan, spec: PreprocessSpec) -> tuple[PixelPayload, ...]:
    """An upright RGB picture in memory to what the vision tower wants; `content` is its content digest."""
    return payloads_of(render([image], plan.views, spec.resample), content, plan, spec)


def payloads_of(data: bytes, content: bytes, plan: MediaPlan, spec: PreprocessSpec) -> tuple[PixelPayload, ...]:
    """One payload per item of the plan, in order. `data` is what `pixels.render` made of the plan's views."""
    assert len(data) == num_bytes(plan.views)
    source = plan_digest(content, plan.views, spec)
    payloads = []
    begin = 0
    for index, item in enumerate(plan.items):
        end = begin + item.num_pictures * item.width * item.height * 3
        # Positions are part of it: cached keys and values depend on them, and blocks are named by these digests.
        place = (item.rows, item.columns, item.time, int(item.continues))
        geometry = struct.pack("<10q", index, item.width, item.height, *item.grid, *place)
        digest = ImageDigest(_digest((_DIGEST_VERSION, source, geometry, b"%d" % item.num_pictures)))
        payloads.append(PixelPayload(digest, item.width, item.height, data[begin:end], item.num_pictures))
        begin = end
    assert begin == len(data)
    return tuple(payloads)


def plan_digest(content: bytes, views: tuple[View, ...], spec: PreprocessSpec) -> bytes:
    """32 bytes: names all payloads of one source under one plan. Also the key of a cache of payloads."""
    numbers = [number for v in views for number in (*v.resize, *v.canvas, *v.corner, *v.tile, v.source)]
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return _digest((_DIGEST_VERSION, spec.identity.encode(), spec.resample.encode(), content, packed))


def content_of_file(data: bytes) -> bytes:
    """32 bytes that name an encoded picture."""
    return _digest((b"file", data))


def content_of_image(image: Image.Image) -> bytes:
    """32 bytes that name a decoded picture."""
    return _digest((b"image", image.mode.encode(), b"%d" % image.width, b"%d" % image.height, image.tobytes()))


def _digest(parts: Iterable[bytes]) -> bytes:
    """BLAKE2b-256 over every part with its length, so no two tuples run together."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
