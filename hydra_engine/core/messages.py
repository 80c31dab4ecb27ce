"""What travels between the frontend process and an instance: tagged structs, encoded with msgpack by `cluster/wire.py`.

The first tag of each union is fixed text, so a frame of another version fails to decode instead of being misread.
"""

from __future__ import annotations

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import Request
from hydra_engine.errors import ErrorInfo

WIRE_VERSION = 7


# ---- frontend -> instance


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, or those of its stages that this instance does.

    `stages` are those done here: "EPD" all of them; with P and without D the KV is offered to another instance while
    it is computed, which `HandOver` names when that is asked for (`NeedDecoder`); "D" alone, or `source` given, starts
    with KV pulled from instance `source`. Images in `remote_images` are encoded elsewhere: the instance says when
    (`NeedImages`) and pulls what is offered to it.
    """

    request: Request
    pixels: tuple[PixelPayload, ...] = ()  # of the images that may be encoded here, in prompt order
    stages: str = "EPD"
    remote_images: tuple[int, ...] = ()
    source: str = ""


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Encode images of a request that is at instance `target` and offer the features there.

    `request` has an id of its own, no prompt, and only these images; its image i is image `indices[i]` of request
    `target_request`. Ends with Finished(reason="moved") when everything has been pulled or refused.
    """

    request: Request
    pixels: tuple[PixelPayload, ...]
    target: str
    target_request: RequestId
    indices: tuple[int, ...]


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """A request that decodes here, or is prefilled here for another instance, is to go on at instance `target`, which
    has been told to expect it, and not at one that was named before; ignored where the request is gone."""

    request_id: RequestId
    target: str


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Which stages the instance serves from now on, of those that it was loaded for. Only while it holds nothing."""

    role: str


class ResetCaches(msgspec.Struct, frozen=True, tag=True):
    """Forget reusable KV, reusable image features, or both; what requests hold stays."""

    kv: bool
    images: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The owner has lost interest; unknown ids are ignored. The instance answers with Finished(reason="abort")."""

    request_id: RequestId


class QueryLedger(msgspec.Struct, frozen=True, tag=True):
    query_id: int


class SetFault(msgspec.Struct, frozen=True, tag=True):
    """Arms a named fault point (tests only; refused unless the instance was started with fault points on)."""

    point: str
    action: str
    argument: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more and exit; draining is the frontend's business (it stops submitting and waits)."""


ToInstance = Submit | Encode | Abort | HandOver | SetRole | ResetCaches | QueryLedger | SetFault | Shutdown


# ---- instance -> frontend


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of start-up: bytes of weights read, or warm-up steps done."""

    what: str
    done: int
    total: int


class LimitBudget(msgspec.Struct, frozen=True):
    """What the TPOT limit leaves beside a number of decodes, as predicted from the cost surface: prefill tokens or
    seconds of vision, or some of both."""

    num_decodes: int
    step_s: float  # a step of these decodes alone
    token_budget: int
    vision_s: float | None = None  # infinite: vision may run all along; None: no vision lane


class LimitSummary(msgspec.Struct, frozen=True):
    """The latency limits of an instance and what they lead to here. Seconds; 0: no such limit."""

    tpot_limit_s: float = 0.0
    ttft_limit_s: float = 0.0
    source: str = ""  # where the costs come from, for example "measured just now in 9.1 s" or "saved profile"
    budgets: tuple[LimitBudget, ...] = ()  # ascending in num_decodes
    warnings: tuple[str, ...] = ()  # limits that cannot be kept here, each with the best there is


class InstanceSummary(msgspec.Struct, frozen=True):
    """What the start-up summary shows. Sizes in bytes."""

    name: str
    role: str
    model: str
    family: str
    device: str
    dtype: str  # of activations
    backend: str
    deterministic: bool
    threads: int
    weights_bytes: int
    kv_cache_bytes: int
    image_cache_bytes: int
    num_kv_blocks: int
    num_image_blocks: int
    kv_block_size: int
    image_block_size: int
    max_model_len: int
    token_budget: int
    image_budget: int
    load_s: float
    incarnation: int = 0
    weights_dtype: str = ""  # of matrices; "": that of activations
    quantization: str = ""  # of the decoder's matrices
    num_parameters: int = 0  # of the whole model
    vision_weights_bytes: int = 0  # of weights_bytes
    language_weights_bytes: int = 0
    state_bytes: int = 0  # of recurrent states
    device_bytes: int = 0  # of the device's memory, all of it
    activation_bytes: int = 0  # of the largest steps, measured; 0: in host memory, where they are not counted
    graph_bytes: int = 0  # that captured steps took
    num_graphs: int = 0  # of them, those of special rows included
    max_num_seqs: int = 0  # requests that hold KV blocks at once
    one_picture: bool = False  # a request, whatever is configured
    captured_patches: int = 0  # of the largest encode that is replayed; 0: none is
    captured_tokens: int = 0  # of the largest step with prompts that is; 0: none is
    free_bytes: int = 0  # of the device, by all that use it, once everything is there
    ops: tuple[tuple[str, str, str], ...] = ()  # (op, implementation, reason)
    notes: tuple[str, ...] = ()
    limits: LimitSummary = LimitSummary()

    @property
    def cache_bytes(self) -> int:
        return self.kv_cache_bytes + self.image_cache_bytes + self.state_bytes


class Ready(msgspec.Struct, frozen=True, tag=True):
    version: int
    summary: InstanceSummary


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request; `position` counts generated tokens before these, so a gap is detectable. An instance
    sends it where log probabilities were asked for, and `Tokens` elsewhere."""

    request_id: RequestId
    position: int
    token_ids: tuple[int, ...]
    time_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    late: StageSpan | None = None  # the gap before the first one, if that came late


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """One step's new tokens, at most one for each request; entry i of every list belongs together. A stop token is
    among them like any other. `time_s` is the end of the step."""

    request_ids: list[int]
    positions: list[int]  # generated tokens before this one
    token_ids: list[int]
    time_s: float
    late: dict[int, StageSpan] = {}  # by request: the gap before its token, where that came late, and what it went to


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message of this instance about a request: no plan in flight names it, its blocks here are free."""

    request_id: RequestId
    reason: str  # a FinishReason or a Departure
    num_generated: int
    stop_token_id: int | None = None  # the end-of-sequence or stop token that ended it
    error: ErrorInfo | None = None
    spans: tuple[StageSpan, ...] = ()  # times absolute, on the monotonic clock
    num_preemptions: int = 0
    cached_tokens: int = 0
    cached_images: int = 0


class NeedImages(msgspec.Struct, frozen=True, tag=True):
    """Features of these images of a request are needed and are to be encoded elsewhere: none of the caches here has
    them. Sent again for an image whose features were lost after they had been pulled."""

    request_id: RequestId
    indices: tuple[int, ...]


class NeedDecoder(msgspec.Struct, frozen=True, tag=True):
    """The first chunk of a request is about to be computed, whose KV is for another instance: `HandOver` says which.
    May be sent again until that has come."""

    request_id: RequestId


class PeerState(msgspec.Struct, frozen=True, tag=True):
    """Whether blocks can be exchanged with another instance, named with its incarnation."""

    name: str
    incarnation: int
    up: bool
    problem: str = ""


class TransferReport(msgspec.Struct, frozen=True):
    """What an instance has exchanged with others since it started, and what is under way."""

    offers: int = 0  # live: blocks held for others
    staged: int = 0  # pieces of them in host memory, or on their way there
    pulls: int = 0  # offers of others that this instance knows and has not fetched
    offered: int = 0
    acknowledged: int = 0
    withdrawn: int = 0  # taken back before they were fetched
    expired: int = 0  # of these, because the lease was over
    pulled: int = 0
    pulled_bytes: int = 0
    host_bytes: int = 0  # of these, through host memory
    pull_s: float = 0.0
    invalid: int = 0  # copies that were too late, and were thrown away
    ignored: int = 0  # messages about offers that nobody knows


class BudgetReport(msgspec.Struct, frozen=True):
    """What latency limits allow right now, and how well they are kept. Zeros where no limit is set."""

    tpot_limit_s: float = 0.0
    token_budget: int = 0  # prefill tokens that the latest language step could have held
    image_budget: int = 0  # patches of a vision step
    vision_s: float = 0.0  # seconds of vision beside the latest language step; -1: no bound
    correction: float = 1.0  # measured over predicted time that budgets reckon with
    decode_steps: int = 0  # language steps with decodes
    late_steps: int = 0  # of these, longer than the limit, the pause before them included
    stretched_steps: int = 0  # steps made longer than the limit on purpose, for a first token that was nearly due
    full_steps: int = 0  # steps with decodes that were filled up to their budget
    limit_used: float = 0.0  # mean share of the limit that the latest full steps took


class StepReport(msgspec.Struct, frozen=True):
    """A step that runs on a lane, or the latest one. `tokens` of prefill chunks and decodes, or patches."""

    running: bool = False
    since_s: float = 0.0  # monotonic, when it began
    decodes: int = 0
    prefills: int = 0
    images: int = 0
    tokens: int = 0


class StepSpeeds(msgspec.Struct, frozen=True):
    """Seconds that steps take on an instance, by the bit length of their size: rows of a language step with prompts or
    with decodes only, patches of a vision step. Sizes that it has not seen often enough are missing."""

    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}
    vision: dict[int, float] = {}


class StageReport(msgspec.Struct, frozen=True):
    """What a part of a request, or an encode job, waits for on an instance: `stage`, `done` and `of` as in
    `telemetry.trace.LiveRequest`. None of those that decode."""

    request_id: RequestId
    stage: str
    done: int | None = None
    of: int | None = None


class Status(msgspec.Struct, frozen=True, tag=True):
    """Sent a few times a second while busy and once when idle: gauges for metrics, health and the page. The scheduler
    makes it; the fields from `time_s` on are the instance's."""

    num_running: int
    num_waiting: int
    num_encoding: int
    kv_blocks_used: int
    kv_blocks_total: int
    image_blocks_used: int
    image_blocks_total: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    images_encoded: int
    num_handing_over: int = 0  # computed here, not fetched yet
    num_arriving: int = 0  # wait for KV of other instances
    num_decoding: int = 0  # of num_running, those that have their whole prompt
    budget: BudgetReport = BudgetReport()
    speeds: StepSpeeds = StepSpeeds()
    stages: tuple[StageReport, ...] = ()  # of the oldest requests that wait for a token
    time_s: float = 0.0
    progress: int = 0  # grows with every turn of the instance's loop
    language_steps: int = 0
    vision_steps: int = 0
    language_busy_s: float = 0.0
    vision_busy_s: float = 0.0
    language_step: StepReport = StepReport()
    vision_step: StepReport = StepReport()
    transfer: TransferReport = TransferReport()

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that is held, 0 to 1."""
        return self.kv_blocks_used / max(self.kv_blocks_total, 1)

    @property
    def image_cache_used(self) -> float:
        return self.image_blocks_used / max(self.image_blocks_total, 1)


class LedgerReport(msgspec.Struct, frozen=True, tag=True):
    """Answer to QueryLedger: what is held right now; at rest every count but the totals is zero and there are no
    problems. Blocks that nobody holds are free, also while their content can still be reused. The cache makes it; the
    fields from `query_id` on are the instance's."""

    num_requests: int
    kv_blocks_held: int
    kv_blocks_total: int
    image_blocks_held: int
    image_blocks_total: int
    holders: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    state_slots_held: int = 0
    state_slots_total: int = 0
    query_id: int = 0
    pixel_bytes: int = 0
    offers: int = 0
    pulls: int = 0
    staged: int = 0

    @property
    def at_rest(self) -> bool:
        held = self.kv_blocks_held or self.image_blocks_held or self.state_slots_held or self.pixel_bytes
        return not (self.num_requests or held or self.offers or self.pulls or self.staged or self.problems)


class PromptScores(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of prompt tokens that a chunk has computed: `logprobs[i]` is that of the token at `start` + i
    under what comes before it. Chunks may be computed again; equal positions then say the same. Before the first token
    of a request all has been said."""

    request_id: RequestId
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The instance cannot start or cannot go on; it exits after this."""

    error: ErrorInfo
    exit_code: int


RequestMessage = Tokens | Delta | PromptScores | Finished
"""What a scheduler says about requests. Each one that it has accepted ends in one Finished. The messages of one result
come in this order: scores of prompts, all its tokens, then the requests that have ended."""

ToFrontend = RequestMessage | NeedImages | NeedDecoder | Loading | Ready | PeerState | Status | LedgerReport | Failed
