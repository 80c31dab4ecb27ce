"""The `EnginePort` of a front worker: the engine is in another process.

What changes seldom (health, instances, gauges, the model's facts) is what that process has told last; everything else
is asked. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import msgspec

from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import InstanceSummary, LedgerReport, Status
from hydra_engine.core.outputs import Piece, Result, Usage, join_last
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.errors import EngineClosed, HydraError, InvalidRequest, RequestAborted
from hydra_engine.observe.live import Activity
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.relay_client import RelayClient

GENERATION: ContextVar[int] = ContextVar("generation", default=0)  # in which a submission is made

_JOIN_ABOVE = 64  # pieces that wait for a slow reader


class RemoteEngine:
    def __init__(self, client: RelayClient, model_name: str, created: int) -> None:
        self.created = created
        self._client = client
        self._model_name = model_name
        self._loop = asyncio.get_running_loop()

    # ---- what was told

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def max_model_len(self) -> int:
        return self._loaded.max_model_len

    @property
    def chat_template(self) -> str | None:
        return self._loaded.chat_template

    @property
    def summaries(self) -> Sequence[InstanceSummary]:
        return self._client.loaded.summaries if self._client.loaded is not None else ()

    @property
    def _loaded(self) -> wire.Loaded:
        if self._client.loaded is None:
            raise EngineClosed("the model is not loaded")
        return self._client.loaded

    def health(self) -> tuple[bool, str]:
        state = self._client.state
        if state is None:
            return False, "loading"
        if self._client.is_silent:
            return False, "hung"
        return state.serving, state.reason

    def instances(self) -> tuple[InstanceState, ...]:
        state = self._client.state
        if state is None:
            return ()
        summaries = {summary.name: summary for summary in self.summaries}
        return tuple(replace(one, summary=summaries.get(one.name)) for one in state.instances)

    def statuses(self) -> Mapping[str, Status]:
        return self._client.state.statuses if self._client.state is not None else {}

    def stats(self) -> Status | None:
        return self._client.state.total if self._client.state is not None else None

    # ---- what is asked

    async def asubmit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        images: Any = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        raw: bool = False,
        slo: Slo | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template: TemplateOptions | None = None,
        pixels: PixelBudget | None = None,
    ) -> RemoteHandle:
        assert images is None, "pictures come in messages"
        number = self._client.next_number()
        handle = RemoteHandle(self._client, number, request_id or f"req-{number}")
        asked = wire.Submit(
            number=number,
            generation=GENERATION.get(),
            request_id=handle.id,
            prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
            messages=None if messages is None else list(messages),
            sampling=sampling or SamplingParams(),
            raw=raw,
            slo=slo or Slo(),
            cache_salt=cache_salt,
            priority=priority,
            template=wire.encode_template(template),
            pixels=pixels,
        )
        try:
            self._client.submit(asked, handle)
        except (OverflowError, ValueError) as error:  # numbers over 64 bits, halves of surrogate pairs
            raise InvalidRequest("the request holds a number or a text that cannot be processed") from error
        try:
            await handle.admission
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle

    async def aactivity(self, since: int = 0, limit: int = 100) -> Activity:
        return await self._client.ask(wire.GetActivity(since, limit), Activity)

    async def aset_topology(self, text: str) -> None:
        await self._client.ask_raw(wire.SetTopology(text))

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        await self._client.ask_raw(wire.ResetCaches(kv, images))

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """From any thread but the loop's."""
        asking = asyncio.run_coroutine_threadsafe(self._client.ask_raw(wire.TraceEvents(seconds)), self._loop)
        events: list[dict[str, Any]] = msgspec.msgpack.decode(asking.result())
        return events

    async def aledger(self) -> LedgerReport:
        return await self._client.ask(wire.GetLedger(), LedgerReport)

    async def atokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        add_special_tokens: bool = True,
        template: TemplateOptions | None = None,
    ) -> list[int]:
        plain, options = None if messages is None else list(messages), wire.encode_template(template)
        return await self._client.ask(wire.Tokenize(prompt, plain, add_special_tokens, options), list[int])

    async def acount_tokens(
        self, messages: Sequence[dict[str, Any]], *, template: TemplateOptions | None = None
    ) -> int:
        return await self._client.ask(wire.CountTokens(list(messages), wire.encode_template(template)), int)

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        return await self._client.ask(wire.SpellTokens(list(token_ids)), list[str])

    async def adetokenize(self, token_ids: Sequence[int]) -> str:
        return await self._client.ask(wire.Detokenize(list(token_ids)), str)


class RemoteHandle:
    """One submission, read in one way and by one reader."""

    def __init__(self, client: RelayClient, number: int, request_id: str) -> None:
        self.id = request_id
        self.prompt_usage: Usage | None = None
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._number = number
        self._pieces: deque[Piece] = deque()
        self._taker: Callable[[Piece], bool] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._result: Result | None = None
        self._error: HydraError | None = None
        self._done = False

    # ---- what becomes of it

    def admitted(self, prompt_usage: Usage | None) -> None:
        self.prompt_usage = prompt_usage
        if not self.admission.done():
            self.admission.set_result(None)

    def feed(self, piece: Piece) -> None:
        if self._taker is not None and piece.result is None and not self._pieces and self._taker(piece):
            return
        if len(self._pieces) < _JOIN_ABOVE or not join_last(self._pieces, piece):
            self._pieces.append(piece)
        self._wake()

    def end(self, result: Result | None) -> None:
        self._done, self._result = True, result
        self._wake()

    def fail(self, error: HydraError) -> None:
        self._done, self._error = True, error
        if not self.admission.done():
            self.admission.set_exception(error)
        self._wake()

    # ---- its reader

    def forward(self, take: Callable[[Piece], bool]) -> None:
        self._taker = take

    def cancel(self) -> None:
        self._client.forget(self._number)
        if not self._done:
            self._done, self._error = True, RequestAborted("the request was cancelled")
            self._wake()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        self._client.link.send(wire.Read(self._number, pieces=True))
        while True:
            if self._pieces:
                yield self._pieces.popleft()
            elif self._done:
                self._check()
                return
            else:
                await self._change()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        self._client.link.send(wire.Read(self._number, pieces=False))
        while not self._done:
            await self._change()
        self._check()
        assert self._result is not None
        return self._result

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _change(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
