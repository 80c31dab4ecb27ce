"""`Engine`: the public face. Blocking, streaming and async forms of the same calls on one class.

The engine's loop runs in a thread of its own, so the blocking calls also work inside a running event loop (Jupyter)
and the async ones in any loop. The server starts the same class on its own loop and has no other way in.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from hydra_engine.config import DEMO_MODEL, EngineConfig, config_from_options
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import InstanceSummary, LedgerReport, Status
from hydra_engine.core.outputs import FinishReason, Piece, RequestMetrics, Result, Usage
from hydra_engine.core.prompting import PixelBudget, TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.core.roles import Topology
from hydra_engine.errors import EngineClosed, HydraError, InvalidRequest
from hydra_engine.front.front import Call, Front
from hydra_engine.front.handle import Handle
from hydra_engine.front.progress import BatchProgress, LoadProgress
from hydra_engine.observe.live import Activity

T = TypeVar("T")
OnError = Literal["raise", "return"]
Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class Engine:
    """A model, loaded and ready to answer.

        with Engine("path/to/model") as engine:
            print(engine.generate("What is in this picture?", images="cat.jpg", max_tokens=64).text)

    `model` is a Hugging Face directory or "demo". Options are the fields of `EngineConfig` and of its parts
    (`max_model_len=`, `kv_cache_gib=`, `tpot_slo="40ms"`, ...). `progress`: None shows bars on a terminal. `processes`
    runs the instance in a process of its own, as `hydra-engine serve` does; several instances always run so. Sampling
    is given as a `SamplingParams` or as its fields by keyword; `slo` are a request's own limits, `priority` its place
    (the smaller one goes first).
    Raises ConfigError, CheckpointError or ResourceError when it cannot start.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # where everything of the front runs
    _thread: threading.Thread | None = None  # that runs the loop, unless the caller does

    def __init__(
        self, model: str | Path = DEMO_MODEL, *, progress: bool | None = None, processes: bool = False, **options: Any
    ) -> None:
        self._prepare(config_from_options(str(model), options), processes=processes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="hydra-engine", daemon=True)
        self._thread.start()
        try:
            self._wait(self._start(progress))
        except BaseException:
            self._stop_thread()
            raise
        atexit.register(self.close)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool | None = None, processes: bool = False) -> Self:
        """The same, from a whole configuration."""
        parts = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
        return cls(config.model, progress=progress, processes=processes, **parts)

    @classmethod
    def unstarted(cls, config: EngineConfig) -> Self:
        """For the server: lives on the caller's loop once `astart` is awaited; the instance is its own process."""
        engine = cls.__new__(cls)
        engine._prepare(config, processes=True)
        return engine

    def _prepare(self, config: EngineConfig, *, processes: bool) -> None:
        self.config = config
        self.created = int(time.time())
        self._processes = processes or len(Topology.parse(config.topology).instances) > 1
        self._front: Front | None = None
        self._closed = False

    async def astart(self, progress: bool | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self._start(progress)

    async def _start(self, progress: bool | None) -> None:
        self._front = Front(self.config, processes=self._processes)
        with LoadProgress(_wanted(progress)) as bar:
            await self._front.start(bar.update)

    # ---- one loop, any caller

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and blocks for it; not from that loop itself."""
        assert self._loop is not None and self._thread is not threading.current_thread()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and awaits it from whichever loop this is."""
        assert self._loop is not None
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @property
    def front(self) -> Front:
        if self._closed or self._front is None:
            raise EngineClosed("the engine is closed; make a new Engine")
        return self._front

    # ---- one request

    def submit(
        self,
        prompt: Prompt | Messages,
        images: Any = None,
        *,
        sampling: SamplingParams | None = None,
        raw: bool = False,
        request_id: str | None = None,
        slo: Slo | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template: TemplateOptions | None = None,
        pixels: PixelBudget | None = None,
        **parameters: Any,
    ) -> Handle:
        """Starts a request and returns at once; what is wrong with it is raised to the handle's readers. `prompt` is
        text, token ids or chat messages."""
        front = self.front
        call = _call(prompt, images, sampling, parameters, raw, slo, cache_salt, priority, template, pixels)
        number, handle = front.open_handle(request_id)
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(front.submit_detached(number, handle, call), self._loop)
        return handle

    async def asubmit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        images: Any = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        raw: bool = False,
        slo: Slo | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template: TemplateOptions | None = None,
        pixels: PixelBudget | None = None,
        **parameters: Any,
    ) -> Handle:
        """Starts a request and returns when it is admitted; raises its RequestError here if it is refused."""
        front = self.front
        what = messages if messages is not None else prompt
        call = _call(what, images, sampling, parameters, raw, slo, cache_salt, priority, template, pixels)
        number, handle = front.open_handle(request_id)
        await self._await(front.submit(number, handle, call))
        return handle

    def stream(self, prompt: Prompt | Messages, images: Any = None, **options: Any) -> Iterator[Piece]:
        """Pieces of text as they come; the last one carries `.result`. Leaving the loop early cancels the request."""
        handle = self.submit(prompt, images, **options)
        try:
            yield from handle
        finally:
            handle.cancel()

    async def astream(self, prompt: Prompt | Messages, images: Any = None, **options: Any) -> AsyncIterator[Piece]:
        handle = self.submit(prompt, images, **options)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    # ---- one or many, to the end

    def generate(self, prompts: Any, images: Any = None, **options: Any) -> Any:
        """Text in, `Result` out; a list in, a list out in the same order. For a list, `images` is a list with one
        entry per prompt (None, one image or a list). See `SamplingParams` for keywords; `on_error="return"` puts the
        error of a failed request into its Result, "raise" (default) raises the first one after all have ended. With
        `n=3` a Result is its first answer and has all three as `.choices`."""
        partial: list[Result | None] = []
        return self._wait_batch(self._generate(prompts, images, options, partial), partial)

    async def agenerate(self, prompts: Any, images: Any = None, **options: Any) -> Any:
        return await self._await(self._generate(prompts, images, options, []))

    def chat(self, messages: Any, **options: Any) -> Any:
        """One conversation (a list of messages) or a list of conversations; otherwise as `generate`."""
        partial: list[Result | None] = []
        return self._wait_batch(self._chat(messages, options, partial), partial)

    async def achat(self, messages: Any, **options: Any) -> Any:
        return await self._await(self._chat(messages, options, []))

    def _wait_batch(self, coroutine: Coroutine[Any, Any, T], partial: list[Result | None]) -> T:
        """An interrupt cancels what still runs and carries what had ended, None for the others, as `.results`."""
        if self._thread is threading.current_thread():
            coroutine.close()
            raise RuntimeError("blocking calls cannot run on the engine's own loop; use the async form")
        if self._closed:
            coroutine.close()
            raise EngineClosed("the engine is closed; make a new Engine")
        try:
            return self._wait(coroutine)
        except KeyboardInterrupt as interrupt:
            interrupt.results = list(partial)  # type: ignore[attr-defined]
            raise

    async def _generate(self, prompts: Any, images: Any, options: dict[str, Any], partial: list[Result | None]) -> Any:
        single = isinstance(prompts, str) or _is_token_ids(prompts)
        items = [prompts] if single else list(prompts)
        if single:
            pictures = [images]
        elif images is None:
            pictures = [None] * len(items)
        else:
            pictures = list(images)
            if len(pictures) != len(items):
                raise InvalidRequest(f"{len(items)} prompts but {len(pictures)} entries in images", param="images")
        return await self._batch(items, pictures, single, partial, **options)

    async def _chat(self, messages: Any, options: dict[str, Any], partial: list[Result | None]) -> Any:
        single = bool(messages) and isinstance(messages[0], dict)
        items = [messages] if single else list(messages)
        return await self._batch(items, [None] * len(items), single, partial, **options)

    async def _batch(
        self,
        items: list[Any],
        pictures: list[Any],
        single: bool,
        partial: list[Result | None],
        *,
        sampling: SamplingParams | None = None,
        raw: bool = False,
        slo: Slo | None = None,
        cache_salt: str = "",
        priority: int = 0,
        template: TemplateOptions | None = None,
        pixels: PixelBudget | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **parameters: Any,
    ) -> Any:
        front = self.front
        calls = [
            _call(item, images, sampling, parameters, raw, slo, cache_salt, priority, template, pixels)
            for item, images in zip(items, pictures, strict=True)
        ]
        # Enough to keep the lanes busy and their intake ahead of them, never so many that the queue refuses.
        limits = self.config.scheduler
        partial.extend([None] * len(calls))
        num_answers = max((call.sampling.n for call in calls), default=1)
        window = asyncio.Semaphore(max(1, min(2 * limits.max_num_seqs, limits.max_queue // 2) // num_answers))
        with BatchProgress(len(calls), _wanted(progress) and len(calls) > 1, front.stats) as bar:

            async def run(index: int, call: Call) -> Result:
                async with window:
                    number, handle = front.open_handle()
                    try:
                        await front.submit(number, handle, call)
                        result = await handle
                    except HydraError as error:
                        result = _failed(handle.id, error)
                    finally:
                        handle.cancel()
                    partial[index] = result
                    bar.add(result)
                    return result

            results = await asyncio.gather(*(run(index, call) for index, call in enumerate(calls)))
        if on_error == "raise":
            for index, result in enumerate(results):
                if result.error is not None:
                    if not single:
                        result.error.add_note(f"request {index} of {len(results)}; the others have ended")
                    raise result.error
        return results[0] if single else results

    # ---- what the engine knows

    @property
    def summary(self) -> InstanceSummary:
        """Of the first instance; `summaries` has all."""
        return self.front.summaries[0]

    @property
    def summaries(self) -> list[InstanceSummary]:
        return self.front.summaries

    @property
    def max_model_len(self) -> int:
        return self.front.max_model_len

    @property
    def chat_template(self) -> str | None:
        """The model's own, or the one given instead."""
        return self.front.intake.chat_template

    @property
    def model_name(self) -> str:
        return self.config.model_name

    def stats(self) -> Status | None:
        """The latest gauges (`.kv_used`, `.num_running`, ...) of all instances added up, a fraction of a second old;
        None before the first."""
        return self.front.stats()

    def statuses(self) -> dict[str, Status]:
        """The same for each instance that is up."""
        return self.front.statuses()

    def instances(self) -> tuple[InstanceState, ...]:
        """The instances of the topology: roles, conditions, restarts, latest reports. None before they are started and
        after they have been stopped."""
        return () if self._closed or self._front is None else self._front.instances()

    def activity(self, since: int = 0, limit: int = 100) -> Activity:
        """Where running requests are, and the stages of those that have ended behind the first `since` ones."""
        return self.front.activity(since, limit)

    async def aactivity(self, since: int = 0, limit: int = 100) -> Activity:
        return self.activity(since, limit)

    def set_topology(self, text: str) -> None:
        """Switches the roles of running instances, each after it has finished what it has; requests go on meanwhile.
        Raises ConfigError where an instance lacks the weights for its new role."""
        self._wait(self.front.set_topology(text))

    async def aset_topology(self, text: str) -> None:
        await self._await(self.front.set_topology(text))

    def health(self) -> tuple[bool, str]:
        if self._closed:
            return False, "closed"
        return self._front.health() if self._front is not None else (False, "loading")

    @property
    def lost(self) -> bool:
        """Nothing can be served any more, and no instance that could is going to be started again."""
        return self._front is not None and self._front.lost

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        """Called on the engine's loop with the Result of every request that ends, failed ones included."""
        self.front.add_observer(observer)

    def ledger(self) -> LedgerReport:
        """What is held right now; `.at_rest` when nothing is."""
        return self._wait(self.front.ledger())

    async def aledger(self) -> LedgerReport:
        return await self._await(self.front.ledger())

    def reset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """Forgets reusable KV, or pictures and their features, or both; what running requests hold stays."""
        self._wait(self.front.reset_caches(kv=kv, images=images))

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        await self._await(self.front.reset_caches(kv=kv, images=images))

    async def acount_tokens(self, messages: Messages, *, template: TemplateOptions | None = None) -> int:
        """How long the prompt of these messages is, with what their pictures take; nothing is generated."""
        call = _call(messages, None, None, {}, False, None, "", 0, template, None)
        return await self._await(self.front.count_tokens(call))

    async def atokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
        template: TemplateOptions | None = None,
    ) -> list[int]:
        return await self._await(
            self.front.intake.tokenize(
                prompt, messages=messages, add_special_tokens=add_special_tokens, template=template
            )
        )

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each; empty for ids outside it."""
        return await asyncio.to_thread(self.front.intake.tokenizer.tokens, token_ids)

    async def adetokenize(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        tokenizer = self.front.intake.tokenizer
        if any(not 0 <= token_id < tokenizer.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be between 0 and {tokenizer.vocab_size - 1}", param="tokens")
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def export_trace(self, path: str | Path) -> None:
        """Chrome trace JSON of the last requests' stages; open it in ui.perfetto.dev."""
        self.front.trace.write(path)

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """The same as events, of the last `seconds` only. From any thread."""
        return self.front.trace_events(seconds)

    # ---- end

    def close(self) -> None:
        """Ends running requests with EngineClosed and frees everything. Idempotent."""
        if self._closed or self._front is None or self._thread is None:
            return
        front, self._closed = self._front, True
        atexit.unregister(self.close)
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(front.close(), self._loop).result()
        self._stop_thread()

    async def aclose(self) -> None:
        if self._closed or self._front is None:
            return
        front, self._closed = self._front, True
        await self._await(front.close())
        if self._thread is not None:
            self._stop_thread()

    def _stop_thread(self) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _call(
    what: Any,
    images: Any,
    sampling: SamplingParams | None,
    parameters: dict[str, Any],
    raw: bool,
    slo: Slo | None,
    cache_salt: str,
    priority: int,
    template: TemplateOptions | None,
    pixels: PixelBudget | None,
) -> Call:
    if sampling is not None and parameters:
        raise InvalidRequest(f"give either sampling= or keywords, not both ({next(iter(parameters))})")
    known = {f.name for f in fields(SamplingParams)}
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise InvalidRequest(f"unknown parameter {unknown[0]!r}", param=unknown[0])
    chosen = sampling or SamplingParams(**parameters)
    is_chat = bool(what) and not isinstance(what, str) and isinstance(what[0], dict)
    asked: dict[str, Any] = {"messages" if is_chat else "prompt": what}
    return Call(
        chosen,
        **asked,
        images=images,
        raw=raw,
        slo=slo or Slo(),
        cache_salt=cache_salt,
        priority=priority,
        template=template or TemplateOptions(),
        pixels=pixels or PixelBudget(),
    )


def _failed(request_id: str, error: HydraError) -> Result:
    return Result(request_id, "", (), FinishReason.ERROR, Usage(0, 0), RequestMetrics(), error=error)


def _is_token_ids(prompts: Any) -> bool:
    return bool(prompts) and isinstance(prompts[0], int)


def _wanted(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
