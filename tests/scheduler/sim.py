"""A scheduler driven on a virtual clock by two fake lanes, with a model whose every token depends on the whole context.

The lanes keep real cache memory: a chunk writes what it sees into the slots of its plan, and the next token is a hash
of what the block table reads back. So a block handed out twice, freed too early or listed in the wrong place changes
tokens, and `expected_tokens` (which knows no cache) notices. Like the real language lane they know the last token of
each slot, for plans made before it was read. Every call is followed by `check()`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from zlib import crc32

import numpy as np

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import Delta, Finished, RequestMessage, Tokens
from hydra_engine.core.plans import BlockIds, ImageSlice, LanguagePlan, VisionPlan
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.core.results import LanguageResult, VisionResult
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ErrorInfo, RequestError
from hydra_engine.scheduler.budget import Budgets
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.scheduler.audit import check
from tests.scheduler.observer import step_observer
from tests.virtual_clock import VirtualClock

VOCABULARY = 1000
BROKEN = ErrorInfo("RequestFailed", "injected", code="numerical_error")


@dataclass(frozen=True)
class Img:
    """A picture in a prompt; equal names are equal pictures."""

    tokens: int
    patches: int = 0  # zero: as many as tokens
    name: str = ""
    whole: bool = False


def make_request(
    number: int,
    *parts: int | Img,
    max_new: int = 4,
    eos: Sequence[int] = (),
    source: int | None = None,
    salt: str = "",
    **sampling,
) -> Request:
    """A prompt of `parts`: a number is that much text, an `Img` an image span. Requests with the same `source` have the
    same text at the same places; without one a request has its own."""
    text = number if source is None else source
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Img):
            name = part.name or f"{number}/{len(images)}"
            images.append(
                ImageItem(
                    digest=ImageDigest(blake2b(name.encode(), digest_size=32).digest()),
                    width=1,
                    height=1,
                    num_patches=part.patches or part.tokens,
                    num_tokens=part.tokens,
                    start=len(tokens),
                    grid=(1, 1, part.patches or part.tokens),
                    bidirectional=part.whole,
                    source=len(images),
                )
            )
            tokens += [VOCABULARY] * part.tokens
        else:
            tokens += [crc32(f"{text}:{len(tokens) + i}".encode()) % VOCABULARY for i in range(part)]
    return Request(
        id=RequestId(number),
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(**sampling),
        max_new_tokens=max_new,
        seed=0,
        arrival_s=0.0,
        images=tuple(images),
        eos_token_ids=tuple(eos),
        cache_salt=salt,
    )


def next_turn(number: int, before: Request, said: Sequence[int], more: int, max_new: int = 4) -> Request:
    """The conversation goes on: the prompt before, what was said, and `more` tokens."""
    new = make_request(number, more, max_new=max_new).prompt_token_ids
    tokens = (*before.prompt_token_ids, *said, *new)
    return replace(before, id=RequestId(number), prompt_token_ids=tokens, max_new_tokens=max_new)


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a language plan, be it a decode or a chunk."""

    request_id: RequestId
    seq_slot: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: BlockIds
    num_blocks: int
    sample: bool
    num_generated: int
    is_decode: bool
    images: tuple[ImageSlice, ...] = ()


def rows_of(plan: LanguagePlan) -> list[Row]:
    """Decodes first, as in the result."""
    d = plan.decodes
    columns = (d.request_ids, d.seq_slots, d.token_ids, d.starts, d.num_generated)
    decodes = zip(*(column.tolist() for column in columns), d.block_tables, strict=True)
    rows = [
        Row(RequestId(request_id), seq_slot, (token_id,), start, table, len(table), True, num_generated, True)
        for request_id, seq_slot, token_id, start, num_generated, table in decodes
    ]
    for c in plan.chunks:
        rows.append(
            Row(
                c.request_id, c.seq_slot, c.token_ids, c.start, c.block_ids, c.num_blocks, c.sample, c.num_generated,
                False, c.images,
            )
        )  # fmt: skip
    return rows


def check_chunks(plan: LanguagePlan, requests: Mapping[int, Request], token_budget: int) -> None:
    """Requires that no chunk begins or ends in a bidirectional image, and that only such an image exceeds the
    budget."""
    for row in plan.chunks:
        bounds = (row.start, row.start + len(row.token_ids))
        images = requests[row.request_id].images
        assert not any(i.bidirectional and i.start < b < i.end for i in images for b in bounds), "an image was cut"
    last = rows_of(plan)[-1]
    begins = [i for i in requests[last.request_id].images if i.bidirectional and i.start == last.start]
    spare = begins[0].num_tokens - 1 if begins else 0
    assert plan.num_tokens <= token_budget + spare, "token budget exceeded"
    assert plan.num_tokens - len(last.token_ids) < token_budget, "a row was added to a full step"


def tokens_of(event: Tokens | Delta) -> list[tuple[int, int, int]]:
    """(request, position, token) of each token in an event."""
    if isinstance(event, Delta):
        return [(event.request_id, event.position, event.token_ids[0])]
    return list(zip(event.request_ids, event.positions, event.token_ids, strict=True))


def feature(digest: bytes, row: int) -> int:
    return VOCABULARY + 1 + crc32(digest + row.to_bytes(4, "little"))


def next_token(context: np.ndarray) -> int:
    return crc32(context.astype(np.int64).tobytes()) % VOCABULARY


@cache
def expected_tokens(request: Request) -> list[int]:
    """The answer of the fake model, computed without caches, chunks or schedulers."""
    context = list(request.prompt_token_ids)
    for image in request.images:
        context[image.start : image.end] = [feature(image.digest, row) for row in range(image.num_tokens)]
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops |= set(request.eos_token_ids)
    found: list[int] = []
    while len(found) < request.max_new_tokens:
        found.append(next_token(np.array(context, dtype=np.int64)))
        context.append(found[-1])
        if found[-1] in stops:
            break
    return found


class FakeStates:
    """Recurrent states that are what they have seen, in the slots that the worker's table chooses."""

    def __init__(self, max_num_seqs: int, num_snapshots: int, kv: CacheManager) -> None:
        import torch  # not for tests without states

        from hydra_engine.backend.base import PagedCache, StateCache
        from hydra_engine.worker.language.slot_table import StateTable, part_of

        count = 2 * max_num_seqs + num_snapshots
        self._table = StateTable(StateCache(torch.zeros(count, 1, 1, 1), torch.zeros(count, 1, 1, 1, 1)), max_num_seqs)
        self._part_of = part_of
        self._kv_cache = PagedCache(torch.zeros(kv.pool.num_blocks, 1, 2, kv.block_size, 1, 1))
        self._seen: dict[int, list[int]] = {}

    def begin(self, plan: LanguagePlan, kv: np.ndarray, kv_size: int) -> None:
        """A state in blocks of the KV cache is a hash of what it has seen."""
        self._table.begin(plan, self._kv_cache)
        for chunk in plan.chunks:
            if chunk.imported_state is not None:
                context = kv[_slots(chunk.block_ids, kv_size, 0, chunk.start)]
                for block in chunk.imported_state.tolist():
                    assert kv[block * kv_size] == state_hash(context), "another state has come"
                self._seen[2 * chunk.seq_slot] = context.tolist()

    def advance(self, plan: LanguagePlan, contexts: Sequence[list[int]], computed: Sequence[int]) -> None:
        """Requires that the rows in `computed` read the states of what is before them. `contexts`: of each of these
        rows, with its tokens."""
        plan, _ = self._part_of(plan, [None] * len(plan.chunks), np.array(computed, dtype=np.int64))
        _, starts, reads, writes = self._table.rows(plan).lists()
        assert len(set(writes)) == len(writes) and not set(writes) & set(reads), "a state is overwritten"
        for start, slot, context in zip(starts, reads, contexts, strict=True):
            assert not start or self._seen[slot] == context[:start], "a row reads the state of another prefix"
        self._seen |= dict(zip(writes, contexts, strict=True))
        self._table.advance(plan)


class FakeLanes:
    """Lanes that write KV and image caches as arrays of what each slot holds; -1 was never written."""

    def __init__(self, kv: CacheManager, images: CacheManager, states: FakeStates | None = None) -> None:
        self._states = states
        self._kv_size, self._image_size = kv.block_size, images.block_size
        self._kv = np.full(kv.pool.num_blocks * kv.block_size, -1, dtype=np.int64)
        self._images = np.full(images.pool.num_blocks * images.block_size, -1, dtype=np.int64)
        self._owners: dict[int, RequestId] = {}  # who sits where, since its first chunk there
        self._last_tokens: dict[int, int] = {}  # by slot
        self._failed: set[RequestId] = set()

    def encode(self, plan: VisionPlan) -> None:
        for item in plan.items:
            slots = _slots(item.block_ids, self._image_size, 0, item.num_tokens)
            self._images[slots] = [feature(item.digest, row) for row in range(item.num_tokens)]

    def compute(
        self, plan: LanguagePlan, started_s: float, ended_s: float, is_bad: Callable[[Row], bool]
    ) -> LanguageResult:
        """A failed row computes nothing, and neither does what was planned behind it."""
        rows = rows_of(plan)
        seq_slots = [row.seq_slot for row in rows]
        assert len(set(seq_slots)) == len(seq_slots), "two rows in one slot"
        token_ids, failures = [], []
        if self._states is not None:
            self._states.begin(plan, self._kv, self._kv_size)
        for index, row in enumerate(rows):
            if is_bad(row) or row.request_id in self._failed:
                self._failed.add(row.request_id)
                failures.append((index, BROKEN))
                token_ids.append(-1)
            else:
                token_ids.append(self._step(row))
        if self._states is not None:
            failed = {index for index, _ in failures}
            computed = [index for index in range(len(rows)) if index not in failed]
            self._states.advance(plan, [self._context(rows[index]) for index in computed], computed)
            for row, chunk in enumerate(plan.chunks, len(plan.decodes)):
                if chunk.exported_state is not None and row in computed:
                    self._kv[chunk.exported_state * self._kv_size] = state_hash(np.array(self._context(rows[row])))
        found = np.array(token_ids, dtype=np.int64)
        return LanguageResult(plan.step_id, started_s, ended_s, found, failures=tuple(failures))

    def _context(self, row: Row) -> list[int]:
        slots = _slots(row.block_ids, self._kv_size, 0, row.start + len(row.token_ids))
        return self._kv[slots].tolist()

    def _step(self, row: Row) -> int:
        if row.is_decode:
            assert self._owners[row.seq_slot] == row.request_id, "a decode in a slot that its lane does not know"
            behind = row.block_ids[row.start // self._kv_size + 1 :]
            assert not behind[1:].any(), "more blocks behind what the row needs than the next row's"
        self._owners[row.seq_slot] = row.request_id
        known = [self._last_tokens[row.seq_slot] if token_id == -1 else token_id for token_id in row.token_ids]
        seen = np.array(known, dtype=np.int64)
        for part in row.images:
            slots = _slots(part.block_ids, self._image_size, part.offset, part.offset + part.count)
            seen[part.row : part.row + part.count] = self._images[slots]
        assert not (seen == VOCABULARY).any(), "a placeholder was computed without features"
        assert (seen >= 0).all(), "features were read that nobody wrote"
        end = row.start + len(row.token_ids)
        assert end <= row.num_blocks * self._kv_size, "a chunk reaches beyond its blocks"
        self._kv[_slots(row.block_ids, self._kv_size, row.start, end)] = seen
        if not row.sample:
            return -1
        token_id = next_token(self._kv[_slots(row.block_ids, self._kv_size, 0, end)])
        self._last_tokens[row.seq_slot] = token_id
        return token_id


def fake_states(config: SchedulerConfig, num_snapshots: int | None, kv: CacheManager) -> FakeStates | None:
    return None if num_snapshots is None else FakeStates(config.max_running_requests, num_snapshots, kv)


def state_hash(context: np.ndarray) -> int:
    return crc32(b"state" + context.astype(np.int64).tobytes())


def _slots(block_ids: np.ndarray, block_size: int, start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass
class Costs:
    """Seconds of a step."""

    language: Callable[[LanguagePlan], float] = lambda plan: 0.01 + 0.0001 * plan.num_tokens
    vision: Callable[[VisionPlan], float] = lambda plan: 0.02 + 0.0005 * plan.num_patches


@dataclass(eq=False)
class Simulator:
    """`at(...)` schedules what happens; `run()` goes on until nothing is left and fails if the scheduler is stuck.

    With `config.look_ahead` the next language step is asked for when `ahead_at` of the running one is over, and the
    lane goes on with it at once. A result reaches the scheduler `late_s` seconds after its step has ended.
    """

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_blocks: int = 64
    kv_size: int = 4
    image_blocks: int = 64
    image_size: int = 4
    reuse: bool = True
    num_snapshots: int | None = None  # of recurrent states; None: the model has none
    costs: Costs = field(default_factory=Costs)
    budgets: Budgets | None = None
    scheduler_class: type[StageScheduler] = StageScheduler
    ahead_at: float = 0.9
    late_s: float = 0.0
    bad_images: frozenset[tuple[int, int]] = frozenset()
    bad_rows: frozenset[tuple[int, int]] = frozenset()  # (request, how many rows it had before)
    max_steps: int = 20_000

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        kv = CacheManager(self.kv_blocks, self.kv_size)
        images = CacheManager(self.image_blocks, self.image_size)
        self.lanes = FakeLanes(kv, images, fake_states(self.config, self.num_snapshots, kv))
        self.scheduler = self.scheduler_class(
            EPD,
            kv,
            images,
            self.config,
            instance="test",
            reuse=self.reuse,
            num_snapshots=self.num_snapshots,
            budgets=self.budgets,
            observer=step_observer(),
        )
        self.requests: dict[int, Request] = {}
        self.refused: dict[int, RequestError] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.token_times: dict[int, list[float]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.language_plans: list[tuple[float, LanguagePlan]] = []
        self.vision_plans: list[tuple[float, VisionPlan]] = []
        self.steps: list[tuple[float, float, LanguagePlan]] = []  # (start, end, plan) of all that ran
        self.encoded_at: dict[tuple[int, int], float] = {}
        self.num_ahead = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._queued: deque[LanguagePlan] = deque()  # given to the language lane, not begun
        self._language_runs = self._vision_runs = False
        self._rows_seen: dict[int, int] = defaultdict(int)

    # ---- what happens when

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._num_scheduled += 1  # equal times keep their order
        heapq.heappush(self._agenda, (time_s, self._num_scheduled, action))

    def submit(self, request: Request, time_s: float = 0.0) -> None:
        self.at(time_s, lambda: self._submit(request))

    def abort(self, number: int, time_s: float) -> None:
        self.at(time_s, lambda: self._on(self.scheduler.abort(RequestId(number), self.clock.now())))

    def run(self, until_s: float = float("inf")) -> Simulator:
        steps = 0
        while self._agenda and self._agenda[0][0] <= until_s:
            time_s = self._agenda[0][0]
            self.clock.advance(max(0.0, time_s - self.clock.now()))
            while self._agenda and self._agenda[0][0] <= time_s:
                heapq.heappop(self._agenda)[2]()
                self.check()
            self._feed()
            steps += 1
            assert steps <= self.max_steps, "the scheduler works on and on and finishes nothing"
        if not self._agenda:
            assert not self.scheduler.has_work, f"stuck: {self.scheduler.ledger()}"
            assert self.finished.keys() | self.refused.keys() >= self.requests.keys(), "a request was lost"
            assert self.scheduler.ledger().kv_blocks_held == self.scheduler.ledger().image_blocks_held == 0
        return self

    # ---- inside

    def _submit(self, request: Request) -> None:
        self.requests[request.id] = request
        try:
            self.scheduler.add(request, self.clock.now())
        except RequestError as error:
            self.refused[request.id] = error

    def _feed(self) -> None:
        plans = [self._plan_language, self._plan_vision]
        for plan in [self._plan_vision, *plans] if self.scheduler.vision_first else plans:
            plan()
            self.check()

    def _plan_language(self, *, ahead: bool = False) -> None:
        if self._queued or (self._language_runs and not ahead):
            return
        now = self.clock.now()
        live = [s for s in self.scheduler._requests.states.values() if s.ending is None]
        oldest = min(live, key=lambda s: s.order, default=None)
        before = oldest.num_preemptions if oldest else 0
        in_flight = len(self.scheduler._language_steps)
        preempted = self.preemptions()
        plan = self.scheduler.plan_language(now)
        assert oldest is None or oldest.num_preemptions == before, "the oldest request was preempted"
        assert not in_flight or preempted == self.preemptions(), "somebody was preempted while a step runs"
        if plan is None:
            return
        self._check_language(plan)
        self.language_plans.append((now, plan))
        self.num_ahead += in_flight > 0
        self._queued.append(plan)
        if not self._language_runs:
            self._start_language()

    def _check_language(self, plan: LanguagePlan) -> None:
        if self.scheduler_class is StageScheduler:
            check_chunks(plan, self.requests, self.config.max_step_tokens)
        rows = rows_of(plan)
        ids = [row.request_id for row in rows]
        assert len(ids) == len(set(ids)), "a request is in a step twice"
        assert all(row.token_ids for row in rows)
        for row in rows:
            assert row.num_generated < self.requests[row.request_id].max_new_tokens, "a row beyond the last token"
        assert len(self.scheduler._requests.kv.tables) <= self.config.max_running_requests, "too many sequences"

    def _start_language(self) -> None:
        plan, started_s = self._queued.popleft(), self.clock.now()
        self._language_runs = True
        ended_s = started_s + self.costs.language(plan)
        if self.config.look_ahead:
            asked_s = started_s + self.ahead_at * (ended_s - started_s)
            self.at(asked_s, lambda: self._plan_language(ahead=True))
        self.at(ended_s, lambda: self._end_language(plan, started_s, ended_s))

    def _end_language(self, plan: LanguagePlan, started_s: float, ended_s: float) -> None:
        self._language_runs = False
        self.steps.append((started_s, ended_s, plan))

        def is_bad(row: Row) -> bool:
            self._rows_seen[row.request_id] += 1
            return (row.request_id, self._rows_seen[row.request_id] - 1) in self.bad_rows

        result = self.lanes.compute(plan, started_s, ended_s, is_bad)
        self.at(ended_s + self.late_s, lambda: self._on(self.scheduler.on_language(result, self.clock.now())))
        if self._queued:
            self._start_language()

    def _plan_vision(self) -> None:
        now = self.clock.now()
        if not self._vision_runs and (plan := self.scheduler.plan_vision(now)) is not None:
            self._start_vision(plan, now)

    def _start_vision(self, plan: VisionPlan, now: float) -> None:
        budget = self.config.image_budget
        assert plan.num_patches <= budget or len(plan.items) == 1, "image budget exceeded"
        self.vision_plans.append((now, plan))
        self._vision_runs = True
        ended_s = now + self.costs.vision(plan)
        self.at(ended_s, lambda: self._end_vision(plan, now, ended_s))

    def _end_vision(self, plan: VisionPlan, started_s: float, ended_s: float) -> None:
        self._vision_runs = False
        self.lanes.encode(plan)
        errors = []
        for item in plan.items:
            key = (item.request_id, item.image_index)
            self.encoded_at[key] = started_s
            errors.append(BROKEN if key in self.bad_images else None)
        result = VisionResult(plan.step_id, started_s, ended_s, tuple(errors))
        self.at(ended_s + self.late_s, lambda: self._on(self.scheduler.on_vision(result, self.clock.now())))

    def _on(self, events: Sequence[RequestMessage]) -> None:
        for event in events:
            if isinstance(event, Finished):
                assert event.request_id not in self.finished, "a second end of a request"
                assert event.num_generated == len(self.tokens[event.request_id])
                self.finished[event.request_id] = event
                continue
            for request_id, position, token_id in tokens_of(event):
                assert request_id not in self.finished, "a token after the end of a request"
                assert position == len(self.tokens[request_id]), "a token was repeated or skipped"
                self.tokens[request_id].append(token_id)
                self.token_times[request_id].append(self.clock.now())

    def check(self) -> None:
        check(self.scheduler)

    # ---- answers

    def preemptions(self) -> int:
        return self.scheduler.status().num_preemptions

    def assert_all_right(self, numbers: Sequence[int] | None = None) -> None:
        """Requires that requests `numbers` (None: all) ended with the tokens that the model without caches gives."""
        for number in numbers if numbers is not None else list(self.requests):
            assert number in self.finished, f"request {number} did not end"
            assert self.finished[number].error is None
            assert self.tokens[number] == expected_tokens(self.requests[number]), f"request {number}: wrong tokens"


def config(**changes) -> SchedulerConfig:
    """Small budgets, so that steps fill up and chunks end in odd places; without look-ahead unless asked for."""
    return replace(SchedulerConfig(token_budget=16, image_budget=24, max_num_seqs=8, look_ahead=False), **changes)
