"""Pixels that a channel has carried lately: while its ends keep them they are not sent again, so that each turn of a
conversation brings an instance its own pictures and not all earlier ones.

Both ends see the same messages in the same order and keep by one rule: the sender knows what the receiver has. Only
requests with the same `cache_salt` share pixels, since the time it takes would reveal other clients' pictures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import Encode, PixelPayload, ResetCaches, Submit, ToInstance

M = TypeVar("M", bound=ToInstance)
_Key = tuple[str, ImageDigest]  # (salt, digest)


class KnownPixels:
    """The pixels that one end of a channel keeps: the last `max_bytes`, those out first that were needed longest ago.

    The sender calls `shorten` and keeps sizes; the receiver calls `complete` and keeps data.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[_Key, tuple[int, bytes]] = OrderedDict()  # (size, data or nothing)

    def shorten(self, message: M) -> M:
        """Returns the message without the data of pixels that the receiver has kept. It must be sent."""
        return self._replaced(message, self._shortened)

    def complete(self, message: M) -> M:
        """Returns a message of `shorten` with the data of all its pixels. Raises KeyError if some were not kept."""
        return self._replaced(message, self._completed)

    def clear(self) -> None:
        self._kept.clear()
        self.num_bytes = 0

    def _replaced(self, message: M, replaced: Callable[[str, PixelPayload], PixelPayload]) -> M:
        if isinstance(message, ResetCaches) and message.images:
            self.clear()
        if not isinstance(message, Submit | Encode) or not message.pixels:
            return message
        salt = message.request.cache_salt
        return msgspec.structs.replace(message, pixels=tuple(replaced(salt, one) for one in message.pixels))

    def _shortened(self, salt: str, payload: PixelPayload) -> PixelPayload:
        key = salt, payload.digest
        if key in self._kept:
            self._kept.move_to_end(key)
            return replace(payload, data=b"")
        self._keep(key, len(payload.data), b"")
        return payload

    def _completed(self, salt: str, payload: PixelPayload) -> PixelPayload:
        key = salt, payload.digest
        if payload.data:
            self._keep(key, len(payload.data), payload.data)
            return payload
        self._kept.move_to_end(key)
        return replace(payload, data=self._kept[key][1])

    def _keep(self, key: _Key, size: int, data: bytes) -> None:
        if size > self._max_bytes:
            return
        self._kept[key] = size, data
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (size, _) = self._kept.popitem(last=False)
            self.num_bytes -= size
