"""The caller's handle of a submitted request: await it, iterate it, cancel it, or block for its result.

Fed by the frontend on its loop; read from any thread and any event loop. Pieces wait in a queue until read; for a slow
reader adjacent pieces of one answer are joined, which keeps the queue short. Does not know tokenisation or messages.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import get_ident
from typing import Any

from hydra_engine.core.outputs import Piece, Result, Usage, join_last
from hydra_engine.errors import EngineClosed, HydraError

_JOIN_ABOVE = 64


class Owner:
    """The process that created this object. A forked child has its objects, but neither its threads nor its loop."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid()

    def check(self) -> None:
        """Raises EngineClosed in a forked child, which would wait for ever."""
        if not self.is_here:
            raise EngineClosed(
                f"this engine runs in process {self._pid}, of which this one is a forked child; make an Engine here, "
                "or start the child with multiprocessing's spawn method"
            )


class Handle:
    """A submitted request, readable from any thread and any event loop. Iterating consumes its pieces; `result()` and
    `await` do not. Every reader raises the request's error.

        handle = engine.submit("Tell a story.", max_tokens=200)
        for piece in handle:           # or: async for piece in handle
            print(piece.text, end="")
        print(handle.result().usage)   # or: await handle
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.id = request_id
        self.prompt_usage: Usage | None = None  # counts of the prompt, once the request is admitted
        self.cancelled = False  # may be set before the frontend has started the request
        self._takes_pieces: bool | None = None  # None: `expect` was not called
        self._cancel = cancel
        self._lock = threading.Lock()  # not reentrant, for speed: it is taken for every token
        self._condition = threading.Condition(self._lock)  # for readers that block a thread
        self._num_blocked = 0
        self._waiting: list[_Waiting] = []
        self._offer: Callable[[Piece], bool] | None = None  # given to `offer_pieces_to`, on `_offer_thread`
        self._offer_thread = 0
        self._pieces: deque[Piece] = deque()
        self._owner = Owner()
        self._result: Result | None = None
        self._error: HydraError | None = None

    # ---- the frontend's side

    def feed(self, piece: Piece) -> None:
        """Adds text; the piece that carries a result ends the stream."""
        write, may_write = self._offer, piece.result is None and not self._pieces
        if write is None or not may_write or self._offer_thread != get_ident() or not write(piece):
            self.show(piece, piece.result)

    def show(self, piece: Piece, result: Result | None) -> None:
        """Adds a piece of one of several answers; `result`, the joint one, ends the stream."""
        with self._lock:
            kept = self._takes_pieces is not False
            if kept and (len(self._pieces) < _JOIN_ABOVE or not join_last(self._pieces, piece)):
                self._pieces.append(piece)
            if result is not None:
                self._result = result
            waiting = self._woken()
        for reader in waiting:
            reader.wake()

    def fail(self, error: HydraError) -> None:
        with self._lock:
            self._error = error
            waiting = self._woken()
        for reader in waiting:
            reader.wake()

    def _woken(self) -> list[_Waiting]:
        """Takes the readers to wake after the lock is released. Call it under the lock."""
        if self._num_blocked:
            self._condition.notify_all()
        waiting = self._waiting
        if waiting:
            self._waiting = []
        return waiting

    # ---- the caller's side

    @property
    def done(self) -> bool:
        """True after the result or the error of the request has come."""
        return self._result is not None or self._error is not None

    def expect(self, *, pieces: bool) -> None:
        """Restricts reading to one way; call it before the first token. `pieces`: by pieces, and results have no log
        probabilities; else by the result alone, and pieces are dropped. Without a call both ways work."""
        with self._lock:
            self._takes_pieces = pieces
            if not pieces:
                self._pieces.clear()

    @property
    def takes_pieces(self) -> bool:
        return self._takes_pieces is True

    def offer_pieces_to(self, write: Callable[[Piece], bool]) -> None:
        """Offers every further piece without a result to `write` first, if no piece is queued, which keeps them in
        order, and the frontend runs on this thread. Pieces for which it returns False are queued. It must not
        raise."""
        self._offer, self._offer_thread = write, get_ident()

    def cancel(self) -> None:
        """Stops the request at the next step boundary; idempotent, from any thread. Readers get RequestAborted. No-op
        in a forked child."""
        if not self._owner.is_here:
            return
        self.cancelled = True
        self._cancel()

    def result(self, timeout_s: float | None = None) -> Result:
        """Blocks until the request has finished. Raises its HydraError, or TimeoutError."""
        self._check_owner()
        with self._lock:
            if not self._block(lambda: self.done, timeout_s):
                raise TimeoutError(f"request {self.id} has not finished in {timeout_s} s")
        return self._finished()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            self._check_owner()
            with self._lock:
                self._block(lambda: bool(self._pieces) or self.done)
                piece = self._pieces.popleft() if self._pieces else None
            if piece is None:
                self._finished()
                return
            yield piece

    def _check_owner(self) -> None:
        """Raises EngineClosed in a forked child, unless the request had ended. Call it before taking the lock, which a
        thread lost in the fork may have held and is new then."""
        if not self._owner.is_here:
            if not self.done:
                self._owner.check()
            self._owner, self._lock = Owner(), threading.Lock()
            self._condition = threading.Condition(self._lock)

    def _block(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until `ready`. Returns False after `timeout_s`. Call it under the lock."""
        self._num_blocked += 1
        try:
            return self._condition.wait_for(ready, timeout_s)
        finally:
            self._num_blocked -= 1

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            self._check_owner()
            with self._lock:
                piece = self._pieces.popleft() if self._pieces else None
                changed = self._change() if piece is None and not self.done else None
            if changed is not None:
                await changed
                continue
            if piece is None:
                self._finished()
                return
            yield piece

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        while True:
            self._check_owner()
            with self._lock:
                if self.done:
                    break
                changed = self._change()
            await changed
        return self._finished()

    def _change(self) -> asyncio.Future[None]:
        """A future that the next piece or error resolves. Call it under the lock."""
        reader = _Waiting(asyncio.get_running_loop())
        self._waiting.append(reader)
        return reader.woken

    def _finished(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class _Waiting:
    """A reader that waits on an event loop."""

    __slots__ = ("_loop", "_thread", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = get_ident()
        self.woken: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        """Wakes the reader. Thread-safe; on the loop's own thread, as in the server, it only sets the future."""
        if self._loop.is_closed():
            return
        if self._thread == get_ident():
            self._resolve()
        else:
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)
