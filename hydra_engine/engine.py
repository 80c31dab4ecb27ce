"""`Engine`: the public API, with blocking, streaming and async forms of the same calls on one class.

The engine's loop runs in its own thread, so the blocking calls also work inside a running event loop (Jupyter) and the
async ones in any loop. The server starts the same class on its own loop and uses nothing below it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from hydra_engine.cluster.launcher import Ahead
from hydra_engine.config import DEMO_MODEL, EngineConfig, EngineOptions, check_start, config_from_options
from hydra_engine.config.options import as_keywords, warning_of_units
from hydra_engine.core.call import GenerationCall, Role
from hydra_engine.core.instances import InstanceSpec, InstanceState, Topology
from hydra_engine.core.instances import Role as InstanceRole
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.core.prompting import MediaLimits, TemplateOptions
from hydra_engine.core.reports import InstanceSummary, LedgerReport, Status
from hydra_engine.core.sampling import GenerationDefaults, SamplingParams
from hydra_engine.errors import ConfigError, EngineClosed, HydraError
from hydra_engine.frontend.batch import run_batch
from hydra_engine.frontend.call import (
    BatchOptions,
    CallOptions,
    Images,
    Messages,
    Prompt,
    Videos,
    make_call,
    split_sampling,
    with_prompt,
)
from hydra_engine.frontend.frontend import Frontend
from hydra_engine.frontend.handle import Handle, Owner
from hydra_engine.frontend.progress import LoadProgress
from hydra_engine.models.specs.generation import read_generation
from hydra_engine.preprocess.model_files import find_model_files
from hydra_engine.preprocess.text.template_files import read_template
from hydra_engine.preprocess.text.tokenizer import load_transformers_tokenizer
from hydra_engine.telemetry.trace import Activity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 1.0  # after the end, for tasks that are about to notice it


class Engine:
    """A loaded model that answers requests, from any thread or event loop.

        with Engine("path/to/model") as engine:
            print(engine.generate("What is in this picture?", images="cat.jpg", max_tokens=64).text)

    Parameters:

    - model: a Hugging Face directory, a GGUF file, a hub id, or "demo" (default), which ships with the engine.
    - progress: shows bars while loading; None (default): only on a terminal.
    - processes: runs the instance in its own process, as `hydra-engine serve` does; default False. Several instances
        always have a process each.
    - options: the options of the command line as keywords, also under vLLM's names; see below.

    Options of a request are listed in `hydra_engine.frontend.call.CallOptions`; sampling is given as a `SamplingParams`
    or as its fields by keyword. `with`, `async with`, `close` and `aclose` end the engine, also inside a running event
    loop; so does the interpreter's exit.

    Raises ConfigError, CheckpointError, ResourceError or BackendError if it cannot start. Every call raises
    EngineClosed after the end and in a forked child.

    Often used options; docs/options.md and `hydra_engine.config.keywords.EngineOptions` have all:

    - device: "cpu" or "cuda:0"; "auto" (default): a GPU if there is one. dtype: "float32", "bfloat16" or "float16".
    - max_model_len: longest prompt plus output in tokens. threads: of a CPU.
    - quantization: "int8" or "int4" quantises the decoder's matrices while they are loaded.
    - kv_cache_gib: memory of the KV cache. gpu_memory_utilization: share of a GPU, default 0.9.
    - max_num_seqs, token_budget: requests at once, and tokens of one step. prefix_caching: default True.
    - tpot_slo, ttft_slo: latency limits such as "40ms" or seconds. topology: instances, such as "EP+D".
    - download, revision: of a hub id. trust_remote_code, model_impl: models that the engine does not know.
    - max_images, max_videos: limits of a request. chat_template: a file.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # runs the whole frontend
    _thread: LoopThread | None = None  # runs the loop, unless the caller does

    def __init__(
        self,
        model: str | Path = DEMO_MODEL,
        *,
        progress: bool | None = None,
        processes: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        with _errors_with_keywords():
            self._open(config_from_options(model, options), progress, processes)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool | None = None, processes: bool = False) -> Self:
        """Starts an engine from a complete configuration; otherwise like `Engine(...)`. Errors name flags."""
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, not {type(config).__name__}", param="config")
        engine = cls.__new__(cls)
        engine._open(config, progress, processes)
        return engine

    def _open(self, config: EngineConfig, progress: bool | None, processes: bool) -> None:
        progress, processes = check_start(progress, processes)
        if (warning := warning_of_units(config)) is not None:
            logger.warning(warning)
        self._prepare(config, processes=processes)
        self._start_on_thread(progress)

    @classmethod
    def create_unstarted(
        cls, config: EngineConfig, ahead: Ahead | None = None, preloaded: Preloaded | None = None
    ) -> Self:
        """Returns an engine for the server: `astart` starts it on the caller's loop. The instance has its own process,
        one of `ahead` or a fork of `preloaded` if that is given."""
        engine = cls.__new__(cls)
        engine._prepare(config, processes=True, ahead=ahead, preloaded=preloaded)
        return engine

    def _prepare(
        self,
        config: EngineConfig,
        *,
        processes: bool,
        ahead: Ahead | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        self._owner = Owner()
        self.config = config = find_model_files(config)
        if config.chat_template is not None:
            read_template(config.chat_template)  # raises before gigabytes are read
        self.created = int(time.time())
        self._processes = processes or config.cluster.launcher is not None or len(config.parsed_topology.instances) > 1
        self._ahead, self._preloaded = ahead, preloaded
        self._frontend: Frontend | None = None
        self._closed = False
        use_file = config.generation_config == "auto"
        found = read_generation(config.model_path, config.override_generation_config, use_file=use_file)
        self.default_sampling_params, rules, unfollowed = found
        self._defaults = GenerationDefaults(found.sampling.max_tokens, rules)
        if unfollowed:
            logger.warning(
                "the model's generation settings %s are not followed; answers may differ from those of transformers",
                ", ".join(unfollowed),
            )

    def _start_on_thread(self, progress: bool | None) -> None:
        self._thread = LoopThread("hydra-engine")
        self._loop = self._thread.loop
        atexit.register(self.close)
        try:
            self._thread.run(self._start(progress))
        except BaseException:
            self.close()
            raise

    async def astart(self, progress: bool | None = None, tell: Callable[[str], None] | None = None) -> None:
        """Starts on the running loop. `tell` receives a line per phase if there are no bars."""
        self._loop = asyncio.get_running_loop()
        await self._start(progress, tell)

    async def _start(self, progress: bool | None, tell: Callable[[str], None] | None = None) -> None:
        self._frontend = Frontend(
            self.config,
            processes=self._processes,
            defaults=self._defaults,
            ahead=self._ahead,
            preloaded=self._preloaded,
        )
        with LoadProgress(progress, tell) as bar:
            await self._frontend.start(bar.update)

    @property
    def frontend(self) -> Frontend:
        """The running frontend. Raises EngineClosed after the engine's end and in a forked child."""
        self._owner.check()
        if self._closed or self._frontend is None:
            raise EngineClosed("the engine is closed; make a new Engine")
        return self._frontend

    @property
    def _ended(self) -> bool:
        return self._closed or not self._owner.is_here

    def __repr__(self) -> str:
        states, condition = self.instances(), self.health()[1]
        device, topology = self.config.device, self.config.topology
        if states:
            topology = str(Topology(tuple(InstanceSpec(InstanceRole.parse(state.role), "auto") for state in states)))
            device = next((state.summary.device for state in states if state.summary is not None), device)
        shown = "running" if condition == "ok" else condition
        return f"<Engine {self.config.model}, {device}, {topology}, {shown}>"

    # ---- end

    def close(self) -> None:
        """Ends running requests with EngineClosed and frees everything. Idempotent and thread-safe; a second caller
        waits for the same end. No-op in a forked child and after `astart` (use `aclose`). Raises RuntimeError on the
        engine's own loop."""
        if self._thread is None or not self._owner.is_here:
            return
        if self._thread.is_current:
            raise RuntimeError("the engine cannot be closed from its own loop; close it from another thread")
        self._closed = True
        try:
            self._thread.end(self._close_frontend)
        finally:
            atexit.unregister(self.close)

    async def aclose(self) -> None:
        """Does what `close` does, without blocking the caller's loop."""
        if not self._owner.is_here:
            return
        if self._thread is not None:
            await asyncio.to_thread(self.close)
        elif not self._closed:
            self._closed = True
            await self._close_frontend()

    async def _close_frontend(self) -> None:
        if self._frontend is not None:
            await self._frontend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # ---- one loop, any caller

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and blocks for it. Not from that loop. Raises EngineClosed."""
        assert self._thread is not None
        try:
            self.frontend  # noqa: B018 - raises where no loop would run the coroutine
        except EngineClosed:
            coroutine.close()
            raise
        return self._thread.run(coroutine)

    async def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop and awaits it from any loop."""
        assert self._loop is not None
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

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
        """Starts a request and returns its handle at once. `prompt` is text, token ids, chat messages or vLLM's
        {"prompt": ..}; `images` and `videos` are one, several or None (default); `request_id` is chosen if None;
        `CallOptions` lists the keywords. Raises InvalidRequest for a wrong argument and for an open file that cannot be
        read; errors found later are raised to the readers of the handle.

            handle = engine.submit("What is in this picture?", images="cat.jpg", max_tokens=64)
            print(handle.result().text)
        """
        frontend, call = self.frontend, self._call(prompt, images, videos, request_id, **options)
        number, handle = frontend.open_handle(call.request_id)
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(frontend.submit_detached(number, handle, call), self._loop)
        return handle

    async def asubmit(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> Handle:
        """Starts a request and returns its handle when it is admitted; otherwise like `submit`. Raises the request's
        RequestError if it is refused."""
        return await self.add_request(self._call(prompt, images, videos, request_id, **options))

    def _call(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        request_id: str | None = None,
        **options: Unpack[CallOptions],
    ) -> GenerationCall:
        images, given = split_sampling(images, options)
        return with_prompt(make_call(given, self.default_sampling_params, request_id), prompt, images, videos)

    def stream(
        self, prompt: Prompt | Messages, images: Images = None, videos: Videos = None, **options: Unpack[CallOptions]
    ) -> Iterator[Piece]:
        """Yields pieces of text as they come; the last one has `.result`. Leaving the loop early cancels the request.
        Takes what `submit` takes. Raises InvalidRequest, or the request's HydraError if it fails.

            for piece in engine.stream("What is in this picture?", images="cat.jpg"):
                print(piece.text, end="")
        """
        handle = self.submit(prompt, images, videos, **options)
        try:
            yield from handle
        finally:
            handle.cancel()

    async def astream(
        self, prompt: Prompt | Messages, images: Images = None, videos: Videos = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[Piece]:
        """`stream` for an event loop: `async for piece in engine.astream(..)`."""
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
        images: Sequence[Images] | SamplingParams | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        images: Images | Sequence[Images] = None,
        videos: Videos | Sequence[Videos] = None,
        **options: Unpack[BatchOptions],
    ) -> Result | list[Result]:
        """Generates to the end: one prompt gives a `Result`, a list gives a list of results in the same order.

        A prompt is text, token ids or vLLM's {"prompt": .., "multi_modal_data": {"image": ..}}. An image is a path, a
        URL, a data URL, bytes, an open file, a Pillow image, or an array or tensor [H, W, 3]; a video is one of the
        first five or its frames. For a list of prompts, `images` and `videos` are lists with one entry per prompt:
        None, one or several.

        Keywords, all optional, of `BatchOptions` in hydra_engine.frontend.call:

        - temperature, max_tokens, stop, seed, n, ...: the fields of `SamplingParams`; or sampling=SamplingParams(..),
          vLLM's sampling_params=, or such an object in the place of `images`.
        - response_format, grammar: structured output, as in the OpenAI API or a pydantic model; a `Grammar`.
        - raw: True skips the chat template. template: `TemplateOptions`. pixels: `PixelBudget`, sizes of pictures.
        - slo: `Slo`, latency limits in seconds. priority: smaller goes first. cache_salt: separates caches.
        - on_error: "return" puts an error into `Result.error`; "raise" (default) raises the first one after all have
          ended. progress: True shows a bar, None (default) for several prompts on a terminal.

        With `n=3` a Result is its first answer and has all three in `.choices`. An interrupt cancels what still runs;
        the KeyboardInterrupt has the finished results as `.results`, None for the rest. Raises InvalidRequest for wrong
        arguments, and the requests' `HydraError`, with the number of the prompt as `.index`.

            results = engine.generate(["First?", "Second?"], images=["a.png", None], max_tokens=32)
        """
        return self._wait_batch(prompts, images, videos, options)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        images: Sequence[Images] | SamplingParams | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        images: Images | Sequence[Images] = None,
        videos: Videos | Sequence[Videos] = None,
        **options: Unpack[BatchOptions],
    ) -> Result | list[Result]:
        """`generate` for an event loop. Cancelling the task cancels what still runs."""
        return await self._await(self._batch(prompts, images, videos, options, []))

    @overload
    def chat(
        self, messages: Messages, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        images: Sequence[Images] | SamplingParams | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        images: Images | Sequence[Images] = None,
        videos: Videos | Sequence[Videos] = None,
        **options: Unpack[BatchOptions],
    ) -> Result | list[Result]:
        """Answers one conversation, a list of messages {"role": .., "content": ..}, or a list of conversations;
        otherwise like `generate`, with the same keywords. `images` and `videos` fill the places that the messages leave
        open for them ({"type": "image"}), or come before the text of the user's last message.

            engine.chat([{"role": "user", "content": "What is in this picture?"}], images="cat.jpg").text
        """
        return self._wait_batch(messages, images, videos, options)

    @overload
    async def achat(
        self, messages: Messages, images: Images = None, videos: Videos = None, **options: Unpack[BatchOptions]
    ) -> Result: ...
    @overload
    async def achat(
        self,
        messages: Sequence[Messages],
        images: Sequence[Images] | SamplingParams | None = None,
        videos: Sequence[Videos] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Result]: ...
    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        images: Images | Sequence[Images] = None,
        videos: Videos | Sequence[Videos] = None,
        **options: Unpack[BatchOptions],
    ) -> Result | list[Result]:
        """`chat` for an event loop. Cancelling the task cancels what still runs."""
        return await self._await(self._batch(messages, images, videos, options, []))

    def _wait_batch(self, prompts: Any, images: Any, videos: Any, options: BatchOptions) -> Result | list[Result]:
        """Runs a batch and blocks. A KeyboardInterrupt cancels what still runs and carries the finished results as
        `.results`, None for unfinished requests."""
        ended: list[Result | None] = []
        try:
            return self._wait(self._batch(prompts, images, videos, options, ended))
        except KeyboardInterrupt as interrupt:
            interrupt.results = list(ended)  # type: ignore[attr-defined]
            raise

    def _batch(
        self, prompts: Any, images: Any, videos: Any, options: BatchOptions, ended: list[Result | None]
    ) -> Coroutine[Any, Any, Result | list[Result]]:
        return run_batch(self.frontend, prompts, images, videos, dict(options), self.default_sampling_params, ended)

    # ---- what the engine knows

    @property
    def summary(self) -> InstanceSummary:
        """The summary of the first instance; `summaries` has one per instance. Printing it gives lines for a reader."""
        return self.frontend.summaries[0]

    @property
    def summaries(self) -> list[InstanceSummary]:
        """Model, device, sizes of caches in bytes and limits of a step of each instance, in the topology's order."""
        return self.frontend.summaries

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.frontend.max_model_len

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, or the one that replaces it; None if there is neither."""
        return self.frontend.preprocessor.chat_template

    @property
    def tool_template(self) -> str | None:
        """The chat template of conversations with tools; None without one."""
        return self.frontend.preprocessor.tool_template

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        """The text that the chat template writes after a last message of this role so that the answer begins; empty
        without a template."""
        return await self._await(self.frontend.preprocessor.generation_prompt(options, role, client))

    @property
    def media_limits(self) -> MediaLimits:
        """The pictures and videos that one request may have."""
        return self.frontend.preprocessor.media_limits

    @property
    def model_name(self) -> str:
        """The name of the model in answers of the API."""
        return self.config.model_name

    def stats(self) -> Status | None:
        """The latest gauges (`.kv_used`, a share from 0 to 1, `.num_running`, ...) summed over instances, a fraction of
        a second old; None before the first report. Printing them gives a line for a reader."""
        return self.frontend.statuses.total()

    def statuses(self) -> dict[str, Status]:
        """The latest gauges of each running instance, by its name."""
        return self.frontend.statuses.latest

    def instances(self) -> tuple[InstanceState, ...]:
        """The instances of the topology: roles, conditions, restarts, latest reports. Empty before they are started and
        after they have been stopped."""
        return () if self._ended or self._frontend is None else self._frontend.instances()

    def activity(self, since: int = 0, limit: int = 100, client: str | None = None) -> Activity:
        """The positions of running requests (the `limit` oldest), and the stages of ended ones (the `limit` latest
        after the first `since`); of all clients, or of `client`."""
        return self.frontend.activity(since, limit, client)

    def set_topology(self, text: str) -> None:
        """Switches the roles of running instances to `text` (such as "EP+D"), each after it has finished its work;
        requests go on meanwhile. Returns when all have switched. Raises ConfigError if an instance has no weights for
        its new role."""
        self._wait(self.frontend.set_topology(text))

    async def aset_topology(self, text: str) -> None:
        """`set_topology` for an event loop."""
        await self._await(self.frontend.set_topology(text))

    def health(self) -> tuple[bool, str]:
        """Returns (True, "ok") if every stage is served, else False and a word why: loading, draining, hung,
        instance_lost or closed (also in a forked child)."""
        if self._ended:
            return False, "closed"
        return self._frontend.health() if self._frontend is not None else (False, "loading")

    @property
    def lost(self) -> bool:
        """True if no request can be served any more and no instance will be restarted that could."""
        return self._frontend is not None and self._frontend.lost

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        """Calls `observer` on the engine's loop with the Result of every request that ends, failed ones included."""
        self.frontend.observers.append(lambda _, result: observer(result))

    def ledger(self) -> LedgerReport:
        """The blocks and slots that all instances hold now; `.at_rest` is True if there are none. Raises
        TimeoutError."""
        return self._wait(self.frontend.ledger())

    async def aledger(self) -> LedgerReport:
        """`ledger` for an event loop."""
        return await self._await(self.frontend.ledger())

    def reset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """Drops reusable KV (`kv`), pictures and their features (`images`), or both (default); blocks of running
        requests stay."""
        self._wait(self.frontend.reset_caches(kv=kv, images=images))

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """`reset_caches` for an event loop."""
        await self._await(self.frontend.reset_caches(kv=kv, images=images))

    # ---- tokens

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer as transformers' AutoTokenizer loads it, with the engine's chat template; the caller's
        own, loaded into this process on first use (about a second). It knows nothing of pictures: `tokenize` does.
        Raises CheckpointError."""
        tokenizer = load_transformers_tokenizer(self.config.model_path, self.frontend.preprocessor.tokenizer_class)
        tokenizer.chat_template = self.chat_template
        return tokenizer

    def tokenize(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        template: TemplateOptions | None = None,
    ) -> list[int]:
        """Returns the token ids of a prompt: text as it is, as in a request with `raw=True`; messages as the chat
        template writes them. Each picture has as many placeholders as it has features; none is encoded. Raises
        InvalidRequest, or the error of a picture.

            engine.tokenize([{"role": "user", "content": "What is in this picture?"}], images="cat.jpg")
        """
        return self._wait(self.tokenize_call(self._call(prompt, images, videos, template=template, raw=True)))

    async def atokenize(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        template: TemplateOptions | None = None,
    ) -> list[int]:
        """`tokenize` for an event loop."""
        return await self.tokenize_call(self._call(prompt, images, videos, template=template, raw=True))

    def count_tokens(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        template: TemplateOptions | None = None,
    ) -> int:
        """Number of token ids that `tokenize` returns."""
        return len(self.tokenize(prompt, images, videos, template=template))

    async def acount_tokens(
        self,
        prompt: Prompt | Messages,
        images: Images = None,
        videos: Videos = None,
        *,
        template: TemplateOptions | None = None,
    ) -> int:
        """`count_tokens` for an event loop."""
        return len(await self.atokenize(prompt, images, videos, template=template))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included. Raises InvalidRequest for ids outside the
        vocabulary."""
        return self._wait(self.adetokenize(token_ids))

    async def adetokenize(self, token_ids: Sequence[int], client: str = "") -> str:
        """`detokenize` for an event loop; takes turns with requests of other clients than `client`."""
        return await self._await(self.frontend.preprocessor.detokenize(token_ids, client))

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id; empty for ids outside it."""
        return await asyncio.to_thread(self.frontend.preprocessor.tokenizer.tokens, token_ids)

    # ---- traces

    def export_trace(self, path: str | Path) -> None:
        """Writes the stages of the last requests to `path` as Chrome trace JSON; open it in ui.perfetto.dev. Raises
        OSError."""
        self.frontend.trace.write(path)

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """Chrome trace events of the last `seconds`. Thread-safe."""
        return self.frontend.trace_events(seconds)

    # ---- complete calls, as the server makes them

    async def add_request(self, call: GenerationCall) -> Handle:
        """Starts a request from a complete call, as the server does, and returns its handle when it is admitted. Raises
        the request's RequestError if it is refused."""
        number, handle = self.frontend.open_handle(call.request_id)
        await self._await(self.frontend.submit(number, handle, call))
        return handle

    async def tokenize_call(self, call: GenerationCall) -> list[int]:
        """Token ids of a call's prompt; its pictures are opened, and each has as many placeholders as it has features.
        Text without pictures may be longer than any request."""
        if call.media or any(part for message in call.messages for part in message.media):
            return list(await self._await(self.frontend.prompt_ids(call)))
        return await self._await(self.frontend.preprocessor.tokenize(call))

    async def count_call_tokens(self, call: GenerationCall) -> int:
        """Number of tokens of a call's prompt, image tokens included. Opens its pictures, generates nothing. Raises the
        RequestError with which the call would be refused."""
        return len(await self._await(self.frontend.prompt_ids(call)))


@contextmanager
def _errors_with_keywords() -> Iterator[None]:
    """Spells flags in errors of its body as keywords of `Engine(...)`."""
    try:
        yield
    except HydraError as error:
        raise error.with_message(as_keywords(error.message)) from error.__cause__


class LoopThread:
    """An event loop on its own thread; runs until `end`, independent of the caller's loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ending: Future[None] | None = None
        self._thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread, which must not block for itself."""
        return self._thread is threading.current_thread()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks for the coroutine's result; an interrupt cancels it. Raises RuntimeError on the loop's own thread."""
        if self.is_current:
            coroutine.close()
            raise RuntimeError("blocking calls cannot run on the engine's own loop; use the async form")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, stops the loop and joins the thread. A second caller waits for the same end."""
        with self._lock:
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(last(), self.loop)
                self._ending.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        try:
            self._ending.result()
        finally:
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, then cleans up as `asyncio.run` does: on this thread, since a thread that runs
    another loop cannot. Joins the executor without a new thread, which Python 3.12 refuses at interpreter exit."""
    executor = ThreadPoolExecutor(thread_name_prefix="hydra-engine")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for cancels in (False, True):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            if cancels and not task.cancelling():
                task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=None if cancels else GRACE_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    executor.shutdown()
    loop.close()
