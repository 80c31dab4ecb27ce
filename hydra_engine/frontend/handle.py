"""What a caller holds of a submitted request: await it, iterate it, cancel it, or ask for its result from plain code.

Fed by the frontend on its loop; read from any thread and any event loop. Pieces wait in a queue until read; when a
reader is slow those of one answer are joined, so the queue stays short. Does not know tokenisation or messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import get_ident
from typing import Any

from hydra_engine.core.outputs import Piece, Result, Usage, join_last
from hydra_engine.errors import HydraError
from hydra_engine.frontend.owner import Owner

_JOIN_ABOVE = 64


class Handle:
    """One request. Reading pieces consumes them; `result()` and `await` do not. An error is raised by every reader."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.id = request_id
        self.prompt_usage: Usage | None = None  # counts of the prompt, once the request is admitted
        self.cancelled = False  # perhaps before the frontend has begun with the request
        self._takes_pieces: bool | None = None  # None: nobody has said
        self._cancel = cancel
        self._lock = threading.Lock()  # plain: it is taken for every token
        self._condition = threading.Condition(self._lock)  # for readers that block a thread
        self._num_blocked = 0
        self._waiting: list[_Waiting] = []
        self._taker: Callable[[Piece], bool] | None = None
        self._taker_thread = 0
        self._pieces: deque[Piece] = deque()
        self._owner = Owner()
        self._result: Result | None = None
        self._error: HydraError | None = None

    # ---- the frontend's side

    def feed(self, piece: Piece) -> None:
        """Adds text; the piece that carries a result ends the stream."""
        if self._taker is not None and piece.result is None and self._given(piece):
            return
        self.show(piece, piece.result)

    def show(self, piece: Piece, result: Result | None) -> None:
        """Adds text of one of several answers; `result` is that of all of them and ends the stream."""
        with self._lock:
            kept = self._takes_pieces is not False
            if kept and (len(self._pieces) < _JOIN_ABOVE or not join_last(self._pieces, piece)):
                self._pieces.append(piece)
            if result is not None:
                self._result = result
            waiting = self._woken()
        for reader in waiting:
            reader.wake()

    def _given(self, piece: Piece) -> bool:
        """The reader's thread is the frontend's and it waits for this very piece, so that none can overtake another."""
        assert self._taker is not None
        return self._taker_thread == get_ident() and not self._pieces and self._taker(piece)

    def fail(self, error: HydraError) -> None:
        with self._lock:
            self._error = error
            waiting = self._woken()
        for reader in waiting:
            reader.wake()

    def _woken(self) -> list[_Waiting]:
        """Under the lock; whom to wake once it is given back."""
        if self._num_blocked:
            self._condition.notify_all()
        waiting = self._waiting
        if waiting:
            self._waiting = []
        return waiting

    # ---- the caller's side

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def expect(self, *, pieces: bool) -> None:
        """Says before the first token in which one way this is read: piece by piece, and results then have no log
        probabilities, or its result alone, and pieces are not kept. Unsaid, both ways are open."""
        with self._lock:
            self._takes_pieces = pieces
            if not pieces:
                self._pieces.clear()

    @property
    def takes_pieces(self) -> bool:
        return self._takes_pieces is True

    def forward(self, take: Callable[[Piece], bool]) -> None:
        """From now on `take` is asked first about every piece without a result, as long as none waits to be read, and
        if the frontend runs on this thread; those for which it says no are read as ever. It must not raise."""
        self._taker, self._taker_thread = take, get_ident()

    def cancel(self) -> None:
        """Stops the request at the next step boundary; idempotent, from any thread. Readers get RequestAborted."""
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
        """Raises EngineClosed in a forked child. Called before the lock is taken, which a thread that the fork left
        behind may have held."""
        if not self.done:
            self._owner.check()

    def _block(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Under the lock. False: it took too long."""
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
        """Under the lock; what the next piece or error resolves."""
        reader = _Waiting(asyncio.get_running_loop())
        self._waiting.append(reader)
        return reader.woken

    def _finished(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class _Waiting:
    """A reader on an event loop."""

    __slots__ = ("_loop", "_thread", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = get_ident()
        self.woken: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        """Wakes the reader, from any thread. On the loop's own, as in the server, that takes no more than the
        future."""
        if self._loop.is_closed():
            return
        if self._thread == get_ident():
            self._resolve()
        else:
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)
