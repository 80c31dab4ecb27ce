"""The engine's interface for the server: all that HTTP may call of inference.

`hydra_engine.engine.Engine` implements it; tests implement it with a script. All calls come from the server's loop and
must not block it. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from hydra_engine.core.call import GenerationCall, Role
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.core.prompting import MediaLimits, TemplateOptions
from hydra_engine.core.reports import InstanceSummary, Status
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.telemetry.trace import Activity


class Handle(Protocol):
    """A submitted request. Both ways of reading it, iteration and await, raise a HydraError if the request failed."""

    id: str

    @property
    def prompt_usage(self) -> Usage | None:
        """Counts of the prompt, without completion tokens; None until the request is admitted."""
        ...

    def expect(self, *, pieces: bool) -> None:
        """Declares, after admission, the one way in which the request is read. With `pieces` its result has no log
        probabilities."""
        ...

    def offer_pieces_to(self, write: Callable[[Piece], bool]) -> None:
        """Lets `write` receive pieces without a result directly, on the calling loop, while no other piece is queued.
        If it returns False the piece is read as usual. It must not raise."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Yields pieces of text; the last one has `.result`."""
        ...

    def __await__(self) -> Generator[Any, None, Result]: ...

    def cancel(self) -> None:
        """Ends the request at the next step boundary. Idempotent, also after its end."""
        ...


class EnginePort(Protocol):
    """An engine as the server uses it. `max_model_len`, `media_limits`, tokenisation and submission need a loaded
    model; until then `health` returns `loading`."""

    created: int

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def media_limits(self) -> MediaLimits: ...

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Sampling of requests for the parameters that they leave out."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, from which the formats of thinking and tool calls are detected; None without
        one."""
        ...

    @property
    def tool_template(self) -> str | None:
        """The text of the chat template of conversations with tools; None without one."""
        ...

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        """The text that the chat template writes after a last message of this role so that the answer begins; empty
        without a template."""
        ...

    async def add_request(self, call: GenerationCall) -> Handle:
        """Fetches, decodes, renders, tokenises and admits a request, then returns its handle. Raises the request's
        HydraError; cancelling the call undoes what it has begun."""
        ...

    @property
    def summaries(self) -> Sequence[InstanceSummary]:
        """A summary per instance, in the topology's order; empty while the model loads."""
        ...

    def instances(self) -> tuple[InstanceState, ...]:
        """The instances in the topology's order; empty before they are started and after the end."""
        ...

    def statuses(self) -> Mapping[str, Status]:
        """The latest gauges of each instance that has reported, by its name."""
        ...

    def stats(self) -> Status | None:
        """The latest gauges, summed over instances; None before the first."""
        ...

    def activity(self, since: int = 0, limit: int = 100, client: str | None = None) -> Activity:
        """The positions of running requests (the `limit` oldest), and the stages of ended ones (the `limit` latest
        after the first `since`); of all clients, or of `client`."""
        ...

    async def aset_topology(self, text: str) -> None:
        """Changes the topology and returns when the instances serve these roles. Raises ConfigError, with nothing
        changed, for an impossible topology."""
        ...

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """Drops reusable KV, or pictures and their features, or both; blocks of running requests stay."""
        ...

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """Chrome trace events of the last `seconds`, of requests that have ended. Thread-safe."""
        ...

    def health(self) -> tuple[bool, str]:
        """(every stage is served and makes progress, reason); the reason is ok, loading, draining, hung, instance_lost
        or closed. A lost instance may be restarted."""
        ...

    async def tokenize_call(self, call: GenerationCall) -> list[int]:
        """Token ids of a call's prompt; pictures are opened, and each has as many placeholders as it takes. Raises for
        pictures what `add_request` raises."""
        ...

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        ...

    async def count_call_tokens(self, call: GenerationCall) -> int:
        """Number of tokens of a call's prompt, image tokens included; opens its pictures. Raises what `add_request`
        raises."""
        ...

    async def adetokenize(self, token_ids: Sequence[int], client: str) -> str:
        """Returns the text of token ids. Raises InvalidRequest for ids outside the vocabulary."""
        ...

    @property
    def lost(self) -> bool:
        """True if no request can be served any more and no instance will be restarted that could. The server ends
        then."""
        ...

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        """Calls `observer` on the loop with the Result of every request that ends, failed ones included."""
        ...
