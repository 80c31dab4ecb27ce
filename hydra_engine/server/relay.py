"""The engine's side of one front worker: does what the worker asks, sends it what comes of it, and gives up all of it
when the worker has gone.

Generations of a worker count among all others in `OwnCommons`. Does not know processes: `front_workers.py` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from hydra_engine.cluster.wire import WireError, frames
from hydra_engine.core.outputs import Piece
from hydra_engine.errors import ErrorInfo, HydraError, RequestFailed
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.admin import TopologySwitch
from hydra_engine.server.commons import OwnCommons
from hydra_engine.server.port import EnginePort, Forwarding, Handle
from hydra_engine.server.relay_link import Link

logger = logging.getLogger(__name__)

_NO_GENERATION = 0


class Relay:
    """Of one life of a worker. `push_state` sends the state at once; `on_beat` gets the worker's signs of life."""

    def __init__(
        self,
        engine: EnginePort,
        commons: OwnCommons,
        switch: TopologySwitch,
        link: Link[wire.ToMain],
        *,
        push_state: Callable[[], None],
        on_hello: Callable[[], None],
        on_beat: Callable[[wire.Beat], None],
    ) -> None:
        self._engine = engine
        self._commons = commons
        self._switch = switch
        self._link = link
        self._push_state = push_state
        self._on_hello = on_hello
        self._on_beat = on_beat
        self._generations: dict[int, _Generation] = {}
        self._refused: dict[int, HydraError] = {}  # generations that were not let in
        self._tasks: dict[int, asyncio.Task[None]] = {}  # submissions and questions that take time
        self._readers: dict[int, asyncio.Future[bool]] = {}  # admitted submissions: whether pieces are waited for
        self._bodies = commons.bodies.lease()
        self._seats: list[ExitStack] = []
        link.on_message = self._take

    @property
    def at_rest(self) -> bool:
        return not (self._generations or self._tasks or self._readers or self._seats)

    def close(self) -> None:
        """The worker has gone: nobody waits for anything any more."""
        for task in list(self._tasks.values()):
            task.cancel()
        for generation in self._generations.values():
            generation.left.close()
        for seat in self._seats:
            seat.close()
        self._generations.clear()
        self._seats.clear()
        self._bodies.release()

    # ---- what comes

    def _take(self, message: wire.ToMain) -> None:
        match message:
            case wire.Submit():
                self._submit(message)
            case wire.Read(number, pieces):
                reader = self._readers.get(number)
                if reader is not None and not reader.done():
                    reader.set_result(pieces)
            case wire.Cancel(number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case wire.Open():
                self._open(message)
            case wire.Close(number):
                self._refused.pop(number, None)
                if (generation := self._generations.pop(number, None)) is not None:
                    generation.left.close()
            case wire.Ask(number, question):
                self._ask(number, question)
            case wire.Counted():
                self._count(message)
            case wire.Beat():
                for lag_s in message.lags:
                    self._commons.lagged(lag_s)
                self._on_beat(message)
            case wire.GiveBack(num_bytes):
                self._bodies.give_back(min(num_bytes, self._bodies.held))
            case wire.LeaveSeat():
                if self._seats:
                    self._seats.pop().close()
            case wire.Hello():
                self._on_hello()

    def _count(self, counted: wire.Counted) -> None:
        for route, status, client, method, seconds in counted.answered:
            self._commons.answered(route, status, client, method=method, seconds=seconds)
        for num_choices, most_tokens in counted.generated:
            self._commons.generated(num_choices, most_tokens)
        for code in counted.rejected:
            self._commons.rejected(code)

    # ---- generations

    def _open(self, asked: wire.Open) -> None:
        generation = _Generation(self._link, asked.number)
        running = self._commons.admit(generation, asked.client, asked.tenant, asked.ids, asked.num_answers)
        try:
            generation.left.enter_context(running)
        except HydraError as error:
            self._refused[asked.number] = error
        else:
            self._generations[asked.number] = generation

    def _submit(self, asked: wire.Submit) -> None:
        if asked.generation != _NO_GENERATION and asked.generation not in self._generations:
            # Refused, or left meanwhile: then nobody reads this.
            error = self._refused.get(asked.generation) or RequestFailed("the request has ended")
            self._link.send(wire.Failed(asked.number, error.info()))
            return
        self._start(asked.number, self._serve(asked), asked.request_id)

    async def _serve(self, asked: wire.Submit) -> None:
        number = asked.number
        handle = await self._engine.asubmit(
            asked.prompt,
            messages=asked.messages,
            sampling=asked.sampling,
            request_id=asked.request_id,
            raw=asked.raw,
            slo=asked.slo,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            template=wire.decode_template(asked.template),
            pixels=asked.pixels,
        )
        try:
            reader = self._readers[number] = asyncio.get_running_loop().create_future()
            self._link.send(wire.Admitted(number, handle.prompt_usage))
            if await reader:
                await self._stream(number, handle)
                ended = wire.Ended(number)
            else:
                ended = wire.Ended(number, await handle)
            self._send_large(ended)
        finally:
            self._readers.pop(number, None)
            handle.cancel()

    async def _stream(self, number: int, handle: Handle) -> None:
        stream = _Stream(self._link, number)
        if isinstance(handle, Forwarding):
            handle.forward(stream.take)
        async for piece in handle:
            stream.is_behind = True
            await self._link.room()
            if stream.is_short(piece):
                stream.put(piece)
            else:
                self._send_large(wire.OnePiece(number, piece))
            stream.is_behind = False

    def _send_large(self, message: wire.OnePiece | wire.Ended) -> None:
        """Raises RequestFailed for what is more than a frame can be."""
        body = wire.encode(message)
        try:
            frames([body], wire.MAX_DOWN_BYTES)
        except WireError as error:
            raise RequestFailed("the answer is too large to be sent; ask for fewer log probabilities") from error
        self._link.send_encoded(body)

    # ---- questions

    def _ask(self, number: int, question: wire.Question) -> None:
        engine, commons = self._engine, self._commons
        match question:
            case wire.CountRequest(client):
                self._answer_now(number, partial(commons.count_now, client))
            case wire.Grant(least, rather):
                self._answer_now(number, lambda: self._grant(least, rather))
            case wire.Fits(num_bytes):
                self._answer_now(number, lambda: commons.bodies.fits(num_bytes))
            case wire.EndRequests(tenant, one):
                self._answer_now(number, lambda: commons.end_now(tenant, one))
            case wire.NumRunning():
                self._answer_now(number, lambda: commons.lifecycle.num_running)
            case wire.GetOutcomes():
                self._answer_now(number, lambda: commons.metrics.outcomes)
            case wire.MetricsPage(accept):
                self._answer_now(number, lambda: commons.page_now(accept))
            case wire.TakeSeat():
                self._answer_now(number, self._take_seat)
            case wire.GetActivity(since, limit):
                self._answer_later(number, engine.aactivity(since, limit))
            case wire.Tokenize(prompt, messages, add_special_tokens, template):
                options = wire.decode_template(template)
                tokens = engine.atokenize(
                    prompt, messages=messages, add_special_tokens=add_special_tokens, template=options
                )
                self._answer_later(number, tokens)
            case wire.CountTokens(messages, template):
                counting = engine.acount_tokens(messages, template=wire.decode_template(template))
                self._answer_later(number, counting)
            case wire.SpellTokens(token_ids):
                self._answer_later(number, engine.atoken_strs(token_ids))
            case wire.Detokenize(token_ids):
                self._answer_later(number, engine.adetokenize(token_ids))
            case wire.SetTopology(text):
                self._answer_later(number, self._set_topology(text))
            case wire.ResetCaches(kv, images):
                self._answer_later(number, engine.areset_caches(kv=kv, images=images))
            case wire.TraceEvents(seconds):
                self._answer_later(number, asyncio.to_thread(_trace, engine, seconds))
            case wire.GetLedger():
                self._answer_later(number, engine.aledger())

    def _answer_now(self, number: int, find: Callable[[], object]) -> None:
        try:
            answer = find()
        except HydraError as error:
            self._link.send(wire.Failed(number, error.info()))
        else:
            self._link.send(wire.Answer(number, msgspec.Raw(wire.encode(answer))))

    def _answer_later(self, number: int, finding: Coroutine[Any, Any, object]) -> None:
        async def answer() -> None:
            found = await finding
            self._link.send(wire.Answer(number, msgspec.Raw(wire.encode(found))))

        self._start(number, answer(), "a question of a front worker")

    def _grant(self, least: int, rather: int) -> int:
        return next((num_bytes for num_bytes in (rather, least) if self._bodies.take(num_bytes)), 0)

    def _take_seat(self) -> None:
        with ExitStack() as seat:
            seat.enter_context(self._commons.seat())
            self._seats.append(seat.pop_all())

    async def _set_topology(self, text: str) -> None:
        await self._switch.carry_out(text)
        self._push_state()

    # ---- tasks

    def _start(self, number: int, doing: Coroutine[Any, Any, None], what: str) -> None:
        task = self._tasks[number] = asyncio.create_task(doing)
        task.add_done_callback(partial(self._ended, number, what))

    def _ended(self, number: int, what: str, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._link.send(wire.Failed(number, _told(error, what)))


class _Generation:
    """One that runs in a worker; `left` is closed when it does not any more."""

    def __init__(self, link: Link[wire.ToMain], number: int) -> None:
        self.left = ExitStack()
        self._link = link
        self._number = number
        self._is_ending = False

    def end(self, error: HydraError) -> bool:
        if self._is_ending:
            return False
        self._is_ending = True
        self._link.send(wire.EndGeneration(self._number, error.info()))
        return True


class _Stream:
    """The pieces of one submission on their way. While `is_behind`, one that was taken from the handle is still to be
    sent, and none may overtake it."""

    __slots__ = ("_link", "_number", "is_behind")

    def __init__(self, link: Link[wire.ToMain], number: int) -> None:
        self.is_behind = False
        self._link = link
        self._number = number

    def take(self, piece: Piece) -> bool:
        """False: it waits in the handle, where those that wait for a worker that does not read are joined."""
        if self.is_behind or self._link.congested or not self.is_short(piece):
            return False
        self.put(piece)
        return True

    @staticmethod
    def is_short(piece: Piece) -> bool:
        return (
            len(piece.token_ids) == 1
            and piece.result is None
            and not (piece.logprobs or piece.index or piece.prompt_token_ids or piece.prompt_logprobs)
        )

    def put(self, piece: Piece) -> None:
        pieces = self._link.tail
        if type(pieces) is not wire.Pieces:
            pieces = wire.Pieces([], [], [])
            self._link.send(pieces)
        pieces.numbers.append(self._number)
        pieces.texts.append(piece.text)
        pieces.token_ids.append(piece.token_ids[0])


def _trace(engine: EnginePort, seconds: float) -> msgspec.Raw:
    """Thousands of spans take longer than the loop may be held."""
    return msgspec.Raw(wire.encode(engine.trace_events(seconds)))


def _told(error: BaseException, what: str) -> ErrorInfo:
    if isinstance(error, HydraError):
        return error.info()
    logger.error("%s: unexpected error", what, exc_info=error)
    return RequestFailed("internal error; the server's log has the details under this request's id").info()
