"""Images of a step -> a vision model's input: arrays built and sent in one go. Does not know caches or requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from hydra_engine.backend.device import Device
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.plans import EncodeItem, Int64s
from hydra_engine.core.request import ImageItem
from hydra_engine.models.inputs import VisionInput


def vision_slots(items: Sequence[EncodeItem], block_size: int) -> Int64s:
    """Image cache slots of the features of all items, in order."""
    return np.concatenate([item.slots(block_size) for item in items])


def vision_input(
    images: Sequence[ImageItem],
    payloads: Sequence[PixelPayload],
    slots: Int64s,
    device: Device,
) -> VisionInput:
    """Builds the model's input and sends it to the device. `payloads[i]` belongs to `images[i]`; `slots` come from
    `vision_slots`."""
    plain = not payloads[0].arrays
    given = [{"pixels": _pictures(payload)} if plain else _arrays(payload) for payload in payloads]
    sent_slots, *sent = device.send((slots, *chain.from_iterable(arrays.values() for arrays in given)))
    values = iter(sent)
    arrays = tuple({name: next(values) for name in arrays} for arrays in given)
    return VisionInput(
        pixels=tuple(named["pixels"] for named in arrays) if plain else (),
        sources=tuple((image.width, image.height) for image in images),
        grids=tuple(image.grid for image in images),
        slots=sent_slots,
        arrays=() if plain else arrays,
        send=device.send,
    )


def _pictures(payload: PixelPayload) -> npt.NDArray[np.uint8]:
    """Pixels [pictures, height, width, 3]. Copied, because bytes are read-only."""
    flat = np.frombuffer(payload.data, dtype=np.uint8).copy()
    return flat.reshape(payload.count, payload.height, payload.width, 3)


def _arrays(payload: PixelPayload) -> dict[str, npt.NDArray[np.generic]]:
    arrays, begin = {}, 0
    for layout in payload.arrays:
        dtype, count = np.dtype(layout.dtype), math.prod(layout.shape)
        values = np.frombuffer(payload.data, dtype=dtype, count=count, offset=begin).reshape(layout.shape)
        arrays[layout.name] = values.copy()
        begin += count * dtype.itemsize
    return arrays
