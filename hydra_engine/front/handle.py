"""What a caller holds of a submitted request: await it, iterate it, cancel it, or ask for its result from plain code.

Fed by the front on its loop; read from any thread and any event loop. Pieces wait in a queue until read; when a reader
is slow they are joined, so the queue stays short. Does not know tokenisation or messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.errors import HydraError

_JOIN_ABOVE = 64


class Handle:
    """One request. Reading pieces consumes them; `result()` and `await` do not. An error is raised by every reader."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.id = request_id
        self.prompt_usage: Usage | None = None  # counts of the prompt, once the request is admitted
        self.cancelled = False  # perhaps before the front has begun with the request
        self._cancel = cancel
        self._condition = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._result: Result | None = None
        self._error: HydraError | None = None

    # ---- the front's side

    def feed(self, piece: Piece) -> None:
        """Adds text; the piece that carries a result ends the stream."""
        with self._condition:
            if len(self._pieces) >= _JOIN_ABOVE and piece.result is None:
                piece = _join(self._pieces.pop(), piece)
            self._pieces.append(piece)
            if piece.result is not None:
                self._result = piece.result
        self._notify()

    def fail(self, error: HydraError) -> None:
        with self._condition:
            self._error = error
        self._notify()

    def _notify(self) -> None:
        with self._condition:
            wakers, self._wakers = self._wakers, []
            self._condition.notify_all()
        for waker in wakers:
            waker()

    # ---- the caller's side

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def cancel(self) -> None:
        """Stops the request at the next step boundary; idempotent, from any thread. Readers get RequestAborted."""
        self.cancelled = True
        self._cancel()

    def result(self, timeout_s: float | None = None) -> Result:
        """Blocks until the request has finished. Raises its HydraError, or TimeoutError."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"request {self.id} has not finished in {timeout_s} s")
        return self._finished()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._pieces) or self.done)
                piece = self._pieces.popleft() if self._pieces else None
            if piece is None:
                self._finished()
                return
            yield piece
            if piece.result is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            await self._changed(lambda: bool(self._pieces) or self.done)
            piece = self._pieces.popleft() if self._pieces else None
            if piece is None:
                self._finished()
                return
            yield piece
            if piece.result is not None:
                return

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        await self._changed(lambda: self.done)
        return self._finished()

    async def _changed(self, ready: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._condition:
                if ready():
                    return
                woken: asyncio.Future[None] = loop.create_future()
                self._wakers.append(_waker(loop, woken))
            await woken

    def _finished(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def _waker(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(resolve)

    return wake


def _join(first: Piece, second: Piece) -> Piece:
    return Piece(first.text + second.text, first.token_ids + second.token_ids, first.logprobs + second.logprobs)
