"""A front worker's end of the relay: numbers for what it asks, and a place for each answer.

`remote_engine.py` and `remote_commons.py` ask through it. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.errors import HydraError, from_info
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.auth import Keys
from hydra_engine.server.context import Endable
from hydra_engine.server.relay_link import Link

T = TypeVar("T")

SILENT_S = 5.0  # without a frame: the engine's process makes no progress


class Submission(Protocol):
    """What becomes of one; called on the loop."""

    def admitted(self, prompt_usage: Usage | None) -> None: ...

    def feed(self, piece: Piece) -> None: ...

    def end(self, result: Result | None) -> None: ...

    def fail(self, error: HydraError) -> None: ...


class RelayClient:
    def __init__(self, link: Link[wire.ToWorker]) -> None:
        self.keys = Keys()
        self.state: wire.State | None = None
        self.loaded: wire.Loaded | None = None
        self.generations: dict[int, Endable] = {}
        self.link = link
        self.start: asyncio.Future[wire.Start] = asyncio.get_running_loop().create_future()  # the first frame
        self.on_state: Callable[[wire.State], None] = lambda _: None
        self.on_shutdown: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._submissions: dict[int, Submission] = {}
        self._questions: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._heard_s = self._loop.time()
        link.on_message = self._take

    @property
    def is_silent(self) -> bool:
        """Nothing has come for a while, where something comes at intervals."""
        return self._loop.time() - self._heard_s > SILENT_S

    def next_number(self) -> int:
        return next(self._numbers)

    # ---- submissions

    def submit(self, message: wire.Submit, submission: Submission) -> None:
        """Raises OverflowError or ValueError for what cannot be sent."""
        self.link.send_encoded(wire.encode(message))
        self._submissions[message.number] = submission

    def forget(self, number: int) -> None:
        """Nobody waits for this submission any more; harmless behind its end."""
        if self._submissions.pop(number, None) is not None:
            self.link.send(wire.Cancel(number))

    # ---- questions

    async def ask(self, question: wire.Question, kind: type[T]) -> T:
        """Raises the HydraError that is the answer. Cancelling it takes the question back."""
        return msgspec.msgpack.decode(await self.ask_raw(question), type=kind)

    async def ask_raw(self, question: wire.Question) -> msgspec.Raw:
        number = self.next_number()
        answer = self.put(number, question)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._questions.pop(number, None) is not None:
                self.link.send(wire.Cancel(number))
            raise

    def put(self, number: int, question: wire.Question) -> asyncio.Future[msgspec.Raw]:
        """For those who want the answer whatever becomes of themselves."""
        self.link.send_encoded(wire.encode(wire.Ask(number, question)))
        answer = self._questions[number] = self._loop.create_future()
        return answer

    # ---- what comes

    def _take(self, message: wire.ToWorker) -> None:
        self._heard_s = self._loop.time()
        match message:
            case wire.Pieces(numbers, texts, token_ids):
                find = self._submissions.get
                for number, text, token_id in zip(numbers, texts, token_ids, strict=True):
                    if (submission := find(number)) is not None:
                        submission.feed(Piece(text, (token_id,)))
            case wire.OnePiece(number, piece):
                if (submission := self._submissions.get(number)) is not None:
                    submission.feed(piece)
            case wire.Admitted(number, prompt_usage):
                if (submission := self._submissions.get(number)) is not None:
                    submission.admitted(prompt_usage)
            case wire.Ended(number, result):
                if (submission := self._submissions.pop(number, None)) is not None:
                    submission.end(result)
            case wire.Answer(number, body):
                answer = self._questions.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            case wire.Failed(number, info):
                self._fail(number, from_info(info))
            case wire.EndGeneration(number, info):
                if (generation := self.generations.get(number)) is not None:
                    generation.end(from_info(info))
            case wire.State():
                self.state = message
                self.on_state(message)
            case wire.Loaded():
                self.loaded = message
            case wire.KeysHold(keys):
                self.keys.keys = keys
            case wire.Shutdown():
                self.on_shutdown()
            case wire.Start():
                # Frames that follow may come before whoever waits for this one goes on.
                self.keys.keys, self.keys.admin = message.keys, message.admin
                self.start.set_result(message)

    def _fail(self, number: int, error: HydraError) -> None:
        submission, answer = self._submissions.pop(number, None), self._questions.pop(number, None)
        if submission is not None:
            submission.fail(error)
        elif answer is not None and not answer.done():
            answer.set_exception(error)
