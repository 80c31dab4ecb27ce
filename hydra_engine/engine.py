"""`Engine`: the public face. Blocking, streaming and async forms of the same calls on one class.

The engine's loop runs in a thread of its own, so the blocking calls also work inside a running event loop (Jupyter)
and the async ones in any loop. The server starts the same class on its own loop and has no other way in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, Unpack, overload

from hydra_engine.cluster.supervisor import Ahead
from hydra_engine.config import DEMO_MODEL, EngineConfig, config_from_options
from hydra_engine.core.call import GenerationCall, Role
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import InstanceSummary, LedgerReport, Status
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.frontend.batch import run_batch
from hydra_engine.frontend.call import (
    BatchOptions,
    CallOptions,
    Images,
    Messages,
    Prompt,
    Videos,
    call_of,
    one_of,
    with_prompt,
)
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.life import EngineLife
from hydra_engine.telemetry.trace import Activity


class Engine(EngineLife):
    """A model, loaded and ready to answer.

        with Engine("path/to/model") as engine:
            print(engine.generate("What is in this picture?", images="cat.jpg", max_tokens=64).text)

    `model` is a Hugging Face directory, a hub id or "demo". Options are the fields of `EngineConfig` and of its parts
    (`max_model_len=`, `kv_cache_gib=`, `tpot_slo="40ms"`, ...). `progress`: None shows bars on a terminal. `processes`
    runs the instance in a process of its own, as `hydra-engine serve` does; several instances always run so. What a
    request may have besides its prompt is listed in `CallOptions`; sampling is given as a `SamplingParams` or as its
    fields by keyword.
    `with`, `async with`, `close` and `aclose` end it, also inside a running event loop; so does the interpreter's exit.
    Raises ConfigError, CheckpointError or ResourceError when it cannot start.
    """

    def __init__(
        self, model: str | Path = DEMO_MODEL, *, progress: bool | None = None, processes: bool = False, **options: Any
    ) -> None:
        self._prepare(config_from_options(str(model), options), processes=processes)
        self._start_on_thread(progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool | None = None, processes: bool = False) -> Self:
        """The same, from a whole configuration."""
        parts = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
        return cls(config.model, progress=progress, processes=processes, **parts)

    @classmethod
    def unstarted(cls, config: EngineConfig, ahead: Ahead | None = None) -> Self:
        """For the server: lives on the caller's loop once `astart` is awaited; the instance is its own process, one of
        `ahead` if it is there."""
        engine = cls.__new__(cls)
        engine._prepare(config, processes=True, ahead=ahead)
        return engine

    # ---- one request

    def submit(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Handle:
        """Starts a request and returns at once; what is found wrong with it later is raised to the handle's readers.
        `prompt` is text, token ids or chat messages."""
        frontend, call = self.frontend, self._call(prompt, images, videos, request_id, **options)
        number, handle = frontend.open_handle(call.request_id)
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(frontend.submit_detached(number, handle, call), self._loop)
        return handle

    async def asubmit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        images: Images = None,
        videos: Videos = None,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Handle:
        """Starts a request and returns when it is admitted; raises its RequestError here if it is refused."""
        return await self.add_request(self._call(one_of(prompt, messages), images, videos, request_id, **options))

    async def add_request(self, call: GenerationCall) -> Handle:
        """The same for a call that is made already, as the server makes them."""
        number, handle = self.frontend.open_handle(call.request_id)
        await self._await(self.frontend.submit(number, handle, call))
        return handle

    def _call(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> GenerationCall:
        return with_prompt(call_of(options, self.default_sampling_params, request_id), prompt, images, videos)

    def stream(
        self, prompt: Prompt | Messages, images: Images = None, videos: Videos = None, **options: Unpack[CallOptions]
    ) -> Iterator[Piece]:
        """Pieces of text as they come; the last one carries `.result`. Leaving the loop early cancels the request."""
        handle = self.submit(prompt, images, videos, **options)
        try:
            yield from handle
        finally:
            handle.cancel()

    async def astream(
        self, prompt: Prompt | Messages, images: Images = None, videos: Videos = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[Piece]:
        handle = self.submit(prompt, images, videos, **options)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    # ---- one or many, to the end

    @overload  # text is a sequence of texts to a type checker
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    def generate(self, prompts: Any, images: Any = None, videos: Any = None, **options: Any) -> Any:
        """Text in, `Result` out; a list in, a list out in the same order. For a list, `images` and `videos` are lists
        with one entry per prompt (None, one or several). See `BatchOptions` for keywords. With `n=3` a Result is its
        first answer and has all three as `.choices`."""
        return self._wait_batch(prompts, images, videos, options)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    async def agenerate(self, prompts: Any, images: Any = None, videos: Any = None, **options: Any) -> Any:
        return await self._await(self._batch(prompts, images, videos, options, []))

    @overload
    def chat(
        self, messages: Messages, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    def chat(self, messages: Any, images: Any = None, videos: Any = None, **options: Any) -> Any:
        """One conversation (a list of messages) or a list of conversations; otherwise as `generate`. `images` and
        `videos` take the places that the messages leave open for them ({"type": "image"}), or come before the text of
        the user's last message."""
        return self._wait_batch(messages, images, videos, options)

    @overload
    async def achat(
        self, messages: Messages, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    async def achat(
        self,
        messages: Sequence[Messages],
        images: Sequence[Images] | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    async def achat(self, messages: Any, images: Any = None, videos: Any = None, **options: Any) -> Any:
        return await self._await(self._batch(messages, images, videos, options, []))

    def _wait_batch(self, prompts: Any, images: Any, videos: Any, options: dict[str, Any]) -> Any:
        """An interrupt cancels what still runs and carries what had ended, None for the others, as `.results`."""
        ended: list[Result | None] = []
        try:
            return self._wait(self._batch(prompts, images, videos, options, ended))
        except KeyboardInterrupt as interrupt:
            interrupt.results = list(ended)  # type: ignore[attr-defined]
            raise

    def _batch(
        self, prompts: Any, images: Any, videos: Any, options: dict[str, Any], ended: list[Result | None]
    ) -> Coroutine[Any, Any, Any]:
        return run_batch(self.frontend, prompts, images, videos, options, self.default_sampling_params, ended)

    # ---- what the engine knows

    @property
    def summary(self) -> InstanceSummary:
        """Of the first instance; `summaries` has all."""
        return self.frontend.summaries[0]

    @property
    def summaries(self) -> list[InstanceSummary]:
        return self.frontend.summaries

    @property
    def max_model_len(self) -> int:
        return self.frontend.max_model_len

    @property
    def chat_template(self) -> str | None:
        """The model's own, or the one given instead."""
        return self.frontend.preprocessor.chat_template

    @property
    def tool_template(self) -> str | None:
        """The chat template of conversations with tools."""
        return self.frontend.preprocessor.tool_template

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        """What the chat template writes behind a last message of this role for the answer to begin; empty without a
        template."""
        return await self._await(self.frontend.preprocessor.generation_prompt(options, role, client))

    @property
    def model_name(self) -> str:
        return self.config.model_name

    def stats(self) -> Status | None:
        """The latest gauges (`.kv_used`, `.num_running`, ...) of all instances added up, a fraction of a second old;
        None before the first."""
        return self.frontend.statuses.total()

    def statuses(self) -> dict[str, Status]:
        """The same for each instance that is up."""
        return self.frontend.statuses.latest

    def instances(self) -> tuple[InstanceState, ...]:
        """The instances of the topology: roles, conditions, restarts, latest reports. None before they are started and
        after they have been stopped."""
        return () if self._closed or self._frontend is None else self._frontend.instances()

    def activity(self, since: int = 0, limit: int = 100, client: str | None = None) -> Activity:
        """Places of running requests, and the stages of those that have ended behind the first `since` ones; of all
        clients of a server or of one."""
        return self.frontend.activity(since, limit, client)

    def set_topology(self, text: str) -> None:
        """Switches the roles of running instances, each after it has finished what it has; requests go on meanwhile.
        Raises ConfigError where an instance lacks the weights for its new role."""
        self._wait(self.frontend.set_topology(text))

    async def aset_topology(self, text: str) -> None:
        await self._await(self.frontend.set_topology(text))

    def health(self) -> tuple[bool, str]:
        if self._closed:
            return False, "closed"
        return self._frontend.health() if self._frontend is not None else (False, "loading")

    @property
    def lost(self) -> bool:
        """Nothing can be served any more, and no instance that could is going to be started again."""
        return self._frontend is not None and self._frontend.lost

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        """Called on the engine's loop with the Result of every request that ends, failed ones included."""
        self.frontend.observers.append(lambda _, result: observer(result))

    def record_workload(self, write: Callable[[bytes], None]) -> None:
        """`write` gets the lines of a workload file (`telemetry/workload.py`) for requests that come from now on, the
        last ones while the engine closes. It is called on the engine's loop, and so is this."""
        self._recordings.append(self.frontend.record_workload(write))

    def ledger(self) -> LedgerReport:
        """What is held right now; `.at_rest` when nothing is."""
        return self._wait(self.frontend.ledger())

    async def aledger(self) -> LedgerReport:
        return await self._await(self.frontend.ledger())

    def reset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """Forgets reusable KV, or pictures and their features, or both; what running requests hold stays."""
        self._wait(self.frontend.reset_caches(kv=kv, images=images))

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        await self._await(self.frontend.reset_caches(kv=kv, images=images))

    async def acount_tokens(self, messages: Messages, *, template: TemplateOptions | None = None) -> int:
        """How long the prompt of these messages is, with what their pictures take; nothing is generated."""
        return await self.count_tokens(self._call(messages, template=template))

    async def count_tokens(self, call: GenerationCall) -> int:
        return len(await self._await(self.frontend.prompt_ids(call)))

    async def atokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        template: TemplateOptions | None = None,
    ) -> list[int]:
        """Token ids of a raw text or of messages, as a request's: pictures are opened, and each has as many
        placeholders as it takes."""
        return await self.tokenize(self._call(one_of(prompt, messages), template=template, raw=True))

    async def tokenize(self, call: GenerationCall) -> list[int]:
        if any(part for message in call.messages for part in message.media):
            return list(await self._await(self.frontend.prompt_ids(call)))
        return await self._await(self.frontend.preprocessor.tokenize(call))

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each; empty for ids outside it."""
        return await asyncio.to_thread(self.frontend.preprocessor.tokenizer.tokens, token_ids)

    async def adetokenize(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        return await self.detokenize(token_ids, "")

    async def detokenize(self, token_ids: Sequence[int], client: str) -> str:
        """`adetokenize`, in turn with what other clients ask for."""
        return await self._await(self.frontend.preprocessor.detokenize(token_ids, client))

    def export_trace(self, path: str | Path) -> None:
        """Chrome trace JSON of the last requests' stages; open it in ui.perfetto.dev."""
        self.frontend.trace.write(path)

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """The same as events, of the last `seconds` only. From any thread."""
        return self.frontend.trace_events(seconds)
