"""The reports of an instance about itself: its facts at the start, its status a few times a second, what it holds."""

from __future__ import annotations

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.units import size

# ---- at its start


class LimitBudget(msgspec.Struct, frozen=True):
    """The work that fits into a step beside `num_decodes` decodes within the TPOT limit, as the cost surface predicts:
    `token_budget` tokens of prefill, or `vision_s` seconds of vision, or less of both."""

    num_decodes: int
    step_s: float  # seconds of a step of these decodes alone
    token_budget: int  # prefill tokens while no vision runs
    vision_s: float | None = None  # without prefill; infinite: for the whole step; None: no vision lane


class LimitSummary(msgspec.Struct, frozen=True):
    """The latency limits of an instance in seconds (0: no limit), and the budgets that the TPOT limit leaves; without a
    TPOT limit there are none."""

    tpot_limit_s: float = 0.0
    ttft_limit_s: float = 0.0
    source: str = ""  # origin of the costs, for example "measured just now in 9.1 s" or "saved profile"
    budgets: tuple[LimitBudget, ...] = ()  # ascending in num_decodes
    warnings: tuple[str, ...] = ()  # limits that cannot be kept here, each with the best possible latency


class BlockFormat(msgspec.Struct, frozen=True, tag=True):
    """Reports what the blocks of the instance will hold, before its weights are read: instances on different nodes need
    the same to exchange blocks. Sizes in tokens, and in rows of features."""

    dtype: str
    kv_block_size: int
    image_block_size: int


class InstanceSummary(msgspec.Struct, frozen=True):
    """The facts about an instance that the start-up summary shows."""

    name: str
    role: str
    model: str
    family: str
    device: str
    dtype: str  # dtype of activations
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
    load_s: float  # seconds of the start
    incarnation: int = 0
    weights_dtype: str = ""  # dtype of matrices; "": `dtype`
    quantization: str = ""  # method of the decoder's matrices
    num_parameters: int = 0  # parameters of the whole model
    vision_weights_bytes: int = 0  # part of weights_bytes
    language_weights_bytes: int = 0
    state_bytes: int = 0  # recurrent states
    device_bytes: int = 0  # total memory of the device
    activation_bytes: int = 0  # activations of the largest steps, measured; in host memory of mixtures, estimated
    graph_bytes: int = 0  # memory of captured graphs
    num_graphs: int = 0  # captured; a language step has a second one with biases, penalties, masks, log probabilities
    max_num_seqs: int = 0  # requests that hold KV blocks at once
    one_picture: bool = False  # True: the model takes one picture per request, whatever is configured
    captured_patches: int = 0  # patches of the largest captured encode; 0: none
    captured_tokens: int = 0  # tokens of the largest captured step with prompts; 0: none
    free_bytes: int = 0  # device memory that no process uses after the start
    ops: tuple[tuple[str, str, str], ...] = ()  # (op, implementation, reason)
    notes: tuple[str, ...] = ()
    limits: LimitSummary = LimitSummary()

    def __str__(self) -> str:
        caches = f"KV cache {size(self.kv_cache_bytes)} ({self.num_kv_blocks * self.kv_block_size} tokens)"
        images = f"image cache {size(self.image_cache_bytes)} ({self.num_image_blocks * self.image_block_size} rows)"
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''} per lane"
        return (
            f"{self.name}: {self.model} ({self.family}), role {self.role}, {self.device}, {self.dtype}, {threads}\n"
            f"memory: weights {size(self.weights_bytes)}, {caches}, {images}\nlimits: {self.max_model_len} "
            f"tokens a request, {self.max_num_seqs} requests at once, {self.token_budget} tokens a language step, "
            f"{self.image_budget} patches a vision step\nloaded in {self.load_s:.1f} s"
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, the image cache and the recurrent states."""
        return self.kv_cache_bytes + self.image_cache_bytes + self.state_bytes


# ---- while it runs


class BudgetReport(msgspec.Struct, frozen=True):
    """The present budgets and how well latency limits are kept. Without limits `late_steps`, `stretched_steps` and
    `limit_used` are 0. Counts are totals since the start."""

    tpot_limit_s: float = 0.0  # the instance's limit in seconds, 0: none; requests may have their own
    token_budget: int = 0  # prefill tokens that the latest language step could have held
    image_budget: int = 0  # patches of a vision step
    vision_s: float = 0.0  # seconds of vision beside the latest language step; -1: no bound
    correction: float = 1.0  # factor of measured to predicted time that budgets assume
    decode_steps: int = 0  # language steps with decodes
    late_steps: int = 0  # part of `decode_steps`: longer than the limit, including the pause before the step
    stretched_steps: int = 0  # steps longer than the limit on purpose, for a first token close to its deadline
    full_steps: int = 0  # part of `decode_steps`: used up their budget; with limits, only steps planned to meet one
    limit_used: float = 0.0  # mean share of the limit that the latest full steps took


class StepReport(msgspec.Struct, frozen=True):
    """The running step of a lane, or its latest one; zeros before the first. `tokens`: tokens of prefill chunks and
    decodes, or patches of a vision step."""

    running: bool = False
    since_s: float = 0.0  # its start, on the monotonic clock
    decodes: int = 0
    prefills: int = 0
    images: int = 0
    tokens: int = 0


class StepSpeeds(msgspec.Struct, frozen=True):
    """Moving means of the seconds of an instance's steps by the bit length of their size: rows of a language step,
    patches of a vision step. Language steps count only if no vision ran beside them. Sizes with too few steps are
    missing."""

    prefill: dict[int, float] = {}  # language steps with chunks of prompts
    decode: dict[int, float] = {}  # language steps of decodes only
    vision: dict[int, float] = {}


class StageReport(msgspec.Struct, frozen=True):
    """The present stage of a request, or of an `Encode`, on an instance. `stage`: "queue", "encode", "prefill",
    "transfer" or "decode", in reports that the frontend makes also "lost". `done` of `of`: pictures and videos with
    features while it waits for images, computed tokens in prefill; else None. Instances make none in phase DECODING."""

    request_id: RequestId
    stage: str
    done: int | None = None
    of: int | None = None


class TransferReport(msgspec.Struct, frozen=True):
    """Counts of an instance's transfers to and from its peers: live ones now, and totals since its start."""

    offers: int = 0  # live offers, whose blocks are held for others
    staged: int = 0  # pieces of offers in host memory, or being copied there
    pulls: int = 0  # offers of others that this instance has not fetched yet
    offered: int = 0
    acknowledged: int = 0  # offers whose target has fetched them, or refused them
    withdrawn: int = 0  # offers withdrawn before they were fetched
    expired: int = 0  # part of `withdrawn`: the lease had expired
    pulled: int = 0  # offers of others that were fetched
    pulled_bytes: int = 0
    host_bytes: int = 0  # part of `pulled_bytes`: through host memory
    pull_s: float = 0.0  # sum of the durations of copies, which may overlap
    kv_s: float = 0.0  # part of `pull_s`: of KV, the rest is of features
    kv_tokens: int = 0  # whose KV was pulled, in whole blocks
    feature_tokens: int = 0  # image tokens whose features were pulled, in whole blocks
    invalid: int = 0  # offers of others that had ended, or had wrong bytes, when they were copied: discarded
    ignored: int = 0  # messages about unknown offers


class Status(msgspec.Struct, frozen=True, tag=True):
    """The gauges of an instance, and its totals since its start, for metrics, health and the status page. Sent a few
    times a second, and at once when the last work has ended. The scheduler fills the fields before `time_s`, the
    instance the rest."""

    num_running: int  # requests that prefill or decode
    num_waiting: int  # requests that wait for a start or for their grammar
    num_encoding: int  # requests that wait for images, and encode jobs
    kv_blocks_used: int
    kv_blocks_total: int
    image_blocks_used: int
    image_blocks_total: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    images_encoded: int
    num_handing_over: int = 0  # computed here, not fetched yet
    num_arriving: int = 0  # requests that wait for KV of other instances
    num_decoding: int = 0  # part of num_running: requests in phase `decoding`
    budget: BudgetReport = BudgetReport()
    speeds: StepSpeeds = StepSpeeds()
    stages: tuple[StageReport, ...] = ()  # of requests before phase `decoding`, the first 100 to arrive here
    time_s: float = 0.0
    progress: int = 0  # number of iterations of the instance's loop
    language_steps: int = 0
    vision_steps: int = 0
    language_busy_s: float = 0.0
    vision_busy_s: float = 0.0
    language_step: StepReport = StepReport()
    vision_step: StepReport = StepReport()
    transfer: TransferReport = TransferReport()
    clock_error_s: float = 0.0  # of its times, against the frontend's clock

    def __str__(self) -> str:
        return (
            f"{self.num_running} running, {self.num_waiting} waiting, {self.num_encoding} encoding; KV cache "
            f"{self.kv_used:.0%} used, image cache {self.image_cache_used:.0%}; since the start {self.prompt_tokens} "
            f"tokens of prompts, {self.generation_tokens} generated, {self.images_encoded} pictures encoded, "
            f"{self.num_preemptions} preemptions"
        )

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that is held, 0 to 1."""
        return self.kv_blocks_used / max(self.kv_blocks_total, 1)

    @property
    def image_cache_used(self) -> float:
        """Share of the image cache that is held, 0 to 1."""
        return self.image_blocks_used / max(self.image_blocks_total, 1)


class LedgerReport(msgspec.Struct, frozen=True, tag=True):
    """The answer to QueryLedger: blocks, slots, offers and pixels that are held right now. Blocks that neither a
    request nor an encode in flight holds count as free, also while their content can be reused. The scheduler fills the
    fields before `query_id`, the instance the rest."""

    num_requests: int  # requests on the instance
    kv_blocks_held: int
    kv_blocks_total: int
    image_blocks_held: int
    image_blocks_total: int
    holders: tuple[str, ...] = ()  # lines for a reader, at most a fixed number of them
    problems: tuple[str, ...] = ()  # contradictions that the checks of the caches found
    state_slots_held: int = 0  # sequence slots and state snapshots of requests; with their total 0 without such states
    state_slots_total: int = 0
    query_id: int = 0
    pixel_bytes: int = 0  # pixels that came with requests
    offers: int = 0  # this and the next two as in TransferReport
    pulls: int = 0
    staged: int = 0

    @property
    def at_rest(self) -> bool:
        """True if no request is there, nothing is held, and the checks found no problem."""
        held = self.kv_blocks_held or self.image_blocks_held or self.state_slots_held or self.pixel_bytes
        return not (self.num_requests or held or self.offers or self.pulls or self.staged or self.problems)
