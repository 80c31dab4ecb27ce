"""Payloads for the vision tower, one per span of features, with digests, made from the pixels of a plan's views.

The pixels stay uint8; the tower normalises them on its device. A digest names the source and plan of the features, not
the pixels: the compressed file is hashed, not its decoded form. Does not know tensors or files.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from PIL import Image

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.errors import HydraError, from_info
from hydra_engine.models.specs.base import MediaPlan, PreprocessSpec, View
from hydra_engine.preprocess.media.images import num_bytes

_DIGEST_VERSION = b"hydra-image-2"


def payloads_of(data: bytes, content: bytes, plan: MediaPlan, spec: PreprocessSpec) -> tuple[PixelPayload, ...]:
    """Returns one payload per item of the plan, in order. `data` is the result of `images.render` for the plan's
    views."""
    assert len(data) == num_bytes(plan.views)
    source = plan_digest(content, plan.views, spec)
    payloads = []
    begin = 0
    for index, item in enumerate(plan.items):
        end = begin + item.num_pictures * item.width * item.height * 3
        # Positions are included: KV depends on them, and KV blocks are keyed by these digests.
        place = (item.rows, item.columns, item.time, int(item.continues))
        geometry = struct.pack("<10q", index, item.width, item.height, *item.grid, *place)
        digest = ImageDigest(_digest((_DIGEST_VERSION, source, geometry, b"%d" % item.num_pictures)))
        payloads.append(PixelPayload(digest, item.width, item.height, data[begin:end], item.num_pictures))
        begin = end
    assert begin == len(data)
    return tuple(payloads)


def plan_digest(content: bytes, views: tuple[View, ...], spec: PreprocessSpec) -> bytes:
    """32 bytes that name all payloads of one source under one plan; also their cache key."""
    numbers = [number for v in views for number in (*v.resize, *v.canvas, *v.corner, *v.tile, v.source)]
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return _digest((_DIGEST_VERSION, spec.identity.encode(), spec.resample.encode(), content, packed))


def content_of_file(data: bytes) -> bytes:
    """32 bytes that name an encoded picture."""
    return _digest((b"file", data))


def content_of_image(image: Image.Image) -> bytes:
    """32 bytes that name a decoded picture."""
    return _digest((b"image", image.mode.encode(), b"%d" % image.width, b"%d" % image.height, image.tobytes()))


def content_of_frames(contents: Sequence[bytes], frames: Sequence[int]) -> bytes:
    """32 bytes that name chosen frames of a video. `contents`: the file's digest, or one for each chosen picture."""
    return _digest((b"frames", b"".join(contents), struct.pack(f"<{len(frames)}q", *frames)))


def _digest(parts: Iterable[bytes]) -> bytes:
    """BLAKE2b-256 over every part with its length, so that no two tuples collide by concatenation."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


Payloads = tuple[PixelPayload, ...]


class PixelCache:
    """An LRU cache of processed pictures, bounded by the bytes of their pixels (0: off). Requests that need the same
    picture at the same time decode it once. Thread-safe; no thread waits for another's decoding. Never keeps a
    failure."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Payloads] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[bytes, Future[Payloads]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> Payloads | None:
        with self._lock:
            return self._known(key)

    def get_or_make(self, key: bytes, make: Callable[[], Payloads]) -> Payloads | Future[Payloads]:
        """Returns the payloads, or a future for `await_payloads` if another thread is making them. An exception of
        `make` reaches all who wait for this key; the next call makes it again."""
        if self.max_bytes == 0:
            return make()
        with self._lock:
            known = self._known(key) or self._making.get(key)
            if known is not None:
                return known
            mine = self._making[key] = Future()
            mine.set_running_or_notify_cancel()  # so that a waiter cannot cancel it for others
        return self._make(key, mine, make)

    def clear(self) -> None:
        """Drops all entries; those being made are still added later."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _known(self, key: bytes) -> Payloads | None:
        known = self._entries.get(key)
        if known is not None:
            self._entries.move_to_end(key)
        return known

    def _make(self, key: bytes, promise: Future[Payloads], make: Callable[[], Payloads]) -> Payloads:
        try:
            payloads = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            promise.set_exception(_copy(error))
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, payloads)
        promise.set_result(payloads)
        return payloads

    def _keep(self, key: bytes, payloads: Payloads) -> None:
        size = _size_of(payloads)
        if size > self.max_bytes:
            return
        self._entries[key] = payloads
        self._num_bytes += size
        while self._num_bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _size_of(dropped)


async def await_payloads(promise: Future[Payloads]) -> Payloads:
    """Awaits payloads made in another thread."""
    try:
        return await asyncio.wrap_future(promise)
    except HydraError as error:
        raise _copy(error) from error


def _copy(error: BaseException) -> BaseException:
    """Copies a HydraError, since every request sets its own `param`."""
    return from_info(error.info()) if isinstance(error, HydraError) else error


def _size_of(payloads: Payloads) -> int:
    return sum(len(payload.data) for payload in payloads)
