"""Handles of several prompts, read as one handle with all their answers.

Answer i of prompt p has index p * n + i, as in OpenAI's answers. Does not know endpoints or their formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.server.port import Handle


class Several:
    """A handle for several handles with `num_each` answers each. If one fails, all fail; `cancel` cancels all."""

    def __init__(self, name: str, handles: Sequence[Handle], num_each: int) -> None:
        self.id = name
        self._handles = handles
        self._num_each = num_each
        self._reads: dict[asyncio.Task[Piece | None], tuple[int, AsyncIterator[Piece]]] = {}

    @property
    def prompt_usage(self) -> Usage | None:
        usages = [handle.prompt_usage for handle in self._handles]
        return _sum([usage for usage in usages if usage is not None])

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        for read in self._reads:
            if read.done() and not read.cancelled():
                read.exception()  # the client gets one error; this marks the others as retrieved
            read.cancel()

    def expect(self, *, pieces: bool) -> None:
        for handle in self._handles:
            handle.expect(pieces=pieces)

    def offer_pieces_to(self, write: Callable[[Piece], bool]) -> None:
        """Does nothing: a forwarded piece could bypass one of the same handle that `__aiter__` has taken."""

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yields pieces; one piece per handle is taken at a time, so for a slow reader the pieces queue in the
        handles."""
        for place, handle in enumerate(self._handles):
            self._read(place * self._num_each, aiter(handle))
        while self._reads:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                first_index, pieces = self._reads.pop(read)
                if (piece := read.result()) is not None:
                    self._read(first_index, pieces)
                    yield replace(piece, index=first_index + piece.index)

    def _read(self, first_index: int, pieces: AsyncIterator[Piece]) -> None:
        self._reads[asyncio.create_task(_next(pieces))] = first_index, pieces

    def __await__(self) -> Generator[Any, None, Result]:
        return self._all().__await__()

    async def _all(self) -> Result:
        results = await asyncio.gather(*self._handles)
        answers = [answer for result in results for answer in (result.choices or (result,))]
        return replace(answers[0], choices=tuple(answers), usage=usage_of_all(answers, self._num_each))


def usage_of_all(answers: Sequence[Result], num_each: int) -> Usage:
    """The usage of all answers: each prompt counts once, with the cache hits of its first answer."""
    usage = _sum([answer.usage for answer in answers[::num_each]])
    return replace(usage, completion_tokens=sum(answer.usage.completion_tokens for answer in answers))


def _sum(usages: Sequence[Usage]) -> Usage:
    names = Usage.__dataclass_fields__
    return Usage(**{name: sum(getattr(usage, name) for usage in usages) for name in names})


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)
