"""What the server needs from an engine, and nothing else: the one door between HTTP and inference.

`hydra_engine.engine.Engine` implements it; tests implement it with a script. Everything is called on the server's
loop and must not block it. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from hydra_engine.core.call import GenerationCall, Role
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import InstanceSummary, LedgerReport, Status
from hydra_engine.core.outputs import Piece, Result, Usage
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.request import SamplingParams
from hydra_engine.telemetry.trace import Activity


class Handle(Protocol):
    """One submitted request. Both ways of reading it raise a HydraError when the request failed."""

    id: str

    @property
    def prompt_usage(self) -> Usage | None:
        """Counts of the prompt with no completion tokens yet; known once the request is admitted."""
        ...

    def expect(self, *, pieces: bool) -> None:
        """Says, once it is admitted, in which one way it is read. The result of one that is read piece by piece has no
        log probabilities."""
        ...

    def forward(self, take: Callable[[Piece], bool]) -> None:
        """From now on `take` may be called with a piece without a result as it comes, on the loop that this is called
        on, while no other piece waits; where it returns False the piece is read as ever. It must not raise."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces of text; the last one has `.result`."""
        ...

    def __await__(self) -> Generator[Any, None, Result]: ...

    def cancel(self) -> None:
        """Ends the request at the next step boundary; idempotent, also after its end."""
        ...


class EnginePort(Protocol):
    """`max_model_len`, tokenisation and submission need a loaded model; until then `health` says `loading`."""

    created: int

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What requests are sampled with where they do not say."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Its text; how a model thinks and writes tool calls can be read there."""
        ...

    @property
    def tool_template(self) -> str | None:
        """The same of conversations with tools."""
        ...

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        """What its chat template writes behind a last message of this role for the answer to begin; empty without a
        template."""
        ...

    async def add_request(self, call: GenerationCall) -> Handle:
        """Fetches, decodes, renders, tokenises and admits before it returns. Raises the request's HydraError;
        cancelling the call gives up everything that it has begun."""
        ...

    @property
    def summaries(self) -> Sequence[InstanceSummary]:
        """One for each instance, in the topology's order; empty while the model loads."""
        ...

    def instances(self) -> tuple[InstanceState, ...]:
        """In the topology's order; empty before they are started and after the end."""
        ...

    def statuses(self) -> Mapping[str, Status]:
        """The latest gauges of each instance that has reported, by its name."""
        ...

    def stats(self) -> Status | None:
        """The latest gauges, summed over instances; None before the first."""
        ...

    def activity(self, since: int = 0, limit: int = 100, client: str | None = None) -> Activity:
        """Where running requests are, the oldest `limit`, and the stages of those that have ended behind the first
        `since` ones, the latest `limit`; of all clients or of one."""
        ...

    async def aset_topology(self, text: str) -> None:
        """Returns when the instances serve these roles. Raises ConfigError, with nothing changed, for a topology that
        cannot be had."""
        ...

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        """Forgets reusable KV, or pictures and their features, or both; what running requests hold stays."""
        ...

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """Chrome trace events of what happened in the last `seconds` to requests that have ended. From any thread."""
        ...

    def health(self) -> tuple[bool, str]:
        """(every stage is served and makes progress, reason): ok, loading, draining, hung, instance_lost or closed.
        What is lost may be started again."""
        ...

    async def aledger(self) -> LedgerReport: ...

    async def tokenize(self, call: GenerationCall) -> list[int]:
        """Token ids of a call's prompt; pictures are opened, and each has as many placeholders as it takes. Raises for
        them what `add_request` would."""
        ...

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each."""
        ...

    async def count_tokens(self, call: GenerationCall) -> int:
        """How long a call's prompt is, with what its pictures take, which are opened for that. Raises what
        `add_request` would."""
        ...

    async def detokenize(self, token_ids: Sequence[int], client: str) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        ...

    @property
    def lost(self) -> bool:
        """Nothing can be served any more, and no instance that could will be started again. The server ends then."""
        ...

    def record_workload(self, write: Callable[[bytes], None]) -> None:
        """`write` gets the lines of a workload file for requests that come from now on, the last ones while the engine
        closes."""
        ...

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        """`observer` is called on the loop with the Result of every request that ends, failed ones included."""
        ...
