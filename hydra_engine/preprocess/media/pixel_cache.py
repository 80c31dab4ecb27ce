"""An LRU cache of processed pictures, so that the same one is decoded once.

Bounded in bytes of pixels. Safe from any thread: a caller waits for an entry that another thread is making. Does not
know how payloads are made, and never keeps a failure.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from hydra_engine.core.media import PixelPayload
from hydra_engine.errors import HydraError, from_info

Payloads = tuple[PixelPayload, ...]


class PixelCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Payloads] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[bytes, Future[Payloads]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get_or_make(self, key: bytes, make: Callable[[], Payloads]) -> Payloads:
        """Blocking. What `make` raises reaches everybody who waits for this key, and the next call makes it again."""
        if self.max_bytes == 0:
            return make()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                return known
            promise = self._making.get(key)
            if promise is None:
                mine = self._making[key] = Future()
        return self._make(key, mine, make) if promise is None else _wait(promise)

    def clear(self) -> None:
        """Forgets everything; what is being made is kept when it is there."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

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


def _wait(promise: Future[Payloads]) -> Payloads:
    try:
        return promise.result()
    except HydraError as error:
        raise _copy(error) from error


def _copy(error: BaseException) -> BaseException:
    """Of an error for a user: every request writes into its own where in the request it came from."""
    return from_info(error.info()) if isinstance(error, HydraError) else error


def _size_of(payloads: Payloads) -> int:
    return sum(len(payload.data) for payload in payloads)
