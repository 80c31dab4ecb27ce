"""The grammars of an instance's requests: compiled in a thread of their own, and matched by the sampler within a
step's budget for masks. Clients take fair turns at both.

A request is held until its grammar has been compiled, so no lane waits; compiled grammars are kept for later requests.
A constraint advances to its request's position by the output so far, so steps that are run again, preemptions, replays
and KV of other instances need no state of it. The frontend has refused grammars that compile slowly or not at all; if
one still fails here, it is not its client's fault.

The lane waits for masks, so a step computes them until its budget is used; the mask begun last may exceed it. Rows
without a mask are deferred to a later step. In a step with several clients their masks are computed in fair
turns, and a client whose mask exceeded the budget gets none in the following steps until the excess is paid off; a
single client has a larger budget, since only it waits. A row's token does not depend on the step that computes it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra_engine.core.fairness import FairQueue
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguagePlan
from hydra_engine.core.processes.heap import trim_heap
from hydra_engine.core.request import Request
from hydra_engine.core.results import ReadyResult
from hydra_engine.errors import ErrorInfo, InvalidRequest, Unavailable
from hydra_engine.guidance.guide import GrammarError, Guide, Matcher, TokenMask
from hydra_engine.worker.boundary import run_guarded
from hydra_engine.worker.language.sampler import Constraint, TokenHistory
from hydra_engine.worker.language.slot_table import SlotTable, seq_slots_of

MAX_WAITING = 1 << 14  # grammars; the limit on an instance's requests is lower
MAX_KEPT_BYTES = 32 << 20  # of compiled grammars that no request uses
# Of compiled grammars in use; beyond, the next compilation waits until requests end. A client alone gets half of it,
# each of two a third.
MAX_USED_BYTES = 1 << 30
STEP_BYTES = 4 << 10  # by which a compiled grammar grows with each mask, at most
TRIM_BYTES = 16 << 20  # freed since the heap was trimmed last, when it is trimmed again
MAX_STEPS = 1 << 11  # masks after which a later request gets a new compilation, since the old one has grown

STEP_S = 0.01  # processor time for masks, in a step with several clients
ALONE_S = 0.05  # in a step with a single client: the longest that another client's first request waits for them

_MAX_ROWS = 1 << 20  # more than a step has
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(slots=True, eq=False)
class _Compiled:
    """A compiled grammar, used by requests of one client with one salt."""

    matcher: Matcher  # at the beginning of the text
    client: str
    own_bytes: int
    first: TokenMask  # at the beginning of the text
    max_mask_s: float  # the longest processor time of a mask, for any request
    is_kept: bool = True  # False: a later compilation has replaced it
    num_users: int = 0  # requests
    num_steps: int = 0  # masks of all requests so far

    @property
    def num_bytes(self) -> int:
        """Upper estimate of its present size: as compiled, and what each mask since may have added."""
        return self.own_bytes + STEP_BYTES * self.num_steps


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar to compile, for all requests of one client that wait for it."""

    key: Hashable
    request: Request  # the first one
    is_begun: bool = False
    waiting: dict[RequestId, GrammarConstraint] = field(default_factory=dict)


class Constraints:
    """The grammars of one instance, whose thread calls `constraint_of` and `forget`, which wait for no compilation;
    `deliver` is called in the compiler's thread. A grammar compiled for one client and salt serves no other: the
    latency of the second would reveal the first."""

    def __init__(self, model_dir: Path, deliver: Callable[[ReadyResult], None]) -> None:
        self._tokenizer_file = model_dir / _TOKENIZER_FILE
        self._deliver = deliver
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._guides: dict[tuple[int, ...], Guide] = {}  # by end-of-sequence ids: a single one, the model's
        self._closed = False
        self._lock = threading.Lock()  # of what follows; never held for long
        self._queue: FairQueue[_Job] = FairQueue("grammars", MAX_WAITING)
        self._jobs: dict[Hashable, _Job] = {}  # waiting or in progress
        self._job_of: dict[RequestId, _Job] = {}
        self._kept: OrderedDict[Hashable, _Compiled] = OrderedDict()  # for later requests, the one used last at the end
        self._used: dict[RequestId, tuple[_Compiled, GrammarConstraint]] = {}
        self._freed_bytes = 0

    def constraint_of(self, request: Request) -> GrammarConstraint | None:
        """The constraint of a request; None without a grammar, and for encode jobs, which have no prompt. If its
        grammar is yet to be compiled, a `ReadyResult` of the request follows unless it is forgotten first: either the
        constraint is ready then, or the result has the error. Raises Unavailable if too many grammars wait."""
        grammar = request.sampling.grammar
        if grammar is None or not request.num_prompt:
            return None
        constraint = GrammarConstraint(grammar.param)
        key = request.client, request.cache_salt, request.eos_token_ids, *grammar.language
        with self._lock:
            compiled = self._kept.get(key)
            if compiled is not None and compiled.num_steps < MAX_STEPS:
                self._kept.move_to_end(key)
                self._use(compiled, request.id, constraint)
                return constraint
            job = self._jobs.get(key)
            if job is None:
                job = _Job(key, request)
                self._queue.push(request.client, job)
                self._jobs[key] = job
                self._compiler.submit(self._compile_all)
            job.waiting[request.id] = constraint
            self._job_of[request.id] = job
        return constraint

    def forget(self, request_id: RequestId) -> None:
        """Releases the grammar of an ended request, whether it is in use or waits to be compiled. Ignores requests
        without one."""
        with self._lock:
            job = self._job_of.pop(request_id, None)
            if job is not None:
                del job.waiting[request_id]
                if not job.waiting and not job.is_begun:
                    self._queue.remove(job.request.client, job)
                    del self._jobs[job.key]
            if request_id in self._used:
                compiled, constraint = self._used.pop(request_id)
                constraint.end()
                compiled.num_users -= 1
                if not compiled.num_users and not compiled.is_kept:
                    self._freed_bytes += compiled.num_bytes
                self._trim()
                if len(self._queue) or self._freed_bytes >= TRIM_BYTES:  # perhaps there is room now
                    self._compiler.submit(self._compile_all)

    def close(self) -> None:
        """Stops the compiler's thread without waiting for a compilation in progress."""
        self._closed = True
        self._compiler.shutdown(wait=False, cancel_futures=True)

    # ---- in the compiler's thread

    def _compile_all(self) -> None:
        """Compiles the waiting grammars for which there is memory, then returns freed memory to the system if that is
        TRIM_BYTES or more."""
        while not self._closed and self._compile_next():
            pass
        if self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            trim_heap()

    def _compile_next(self) -> bool:
        """Compiles the next grammar in fair turns of the clients and delivers the results of the requests that wait for
        it. False if none waits whose client may have one more compiled."""
        with self._lock:
            begun = self._queue.pop(self._has_room())
            if begun is None:
                return False
            client, job = begun
            job.is_begun = True
        began_s = time.thread_time()
        outcome = run_guarded("compiling a grammar", partial(self._compile, job.request))
        with self._lock:
            self._queue.end(client, time.thread_time() - began_s)
            del self._jobs[job.key]
            error = outcome if isinstance(outcome, ErrorInfo) else None
            for request_id, constraint in job.waiting.items():
                del self._job_of[request_id]
                if not isinstance(outcome, ErrorInfo):
                    self._use(outcome, request_id, constraint)
            if not isinstance(outcome, ErrorInfo):
                if job.key in self._kept:  # one that reached MAX_STEPS
                    self._kept[job.key].is_kept = False
                self._kept[job.key] = outcome
                self._kept.move_to_end(job.key)
                self._trim()
        for request_id in job.waiting:
            self._deliver(ReadyResult(request_id, error))
        return True

    def _compile(self, request: Request) -> _Compiled:
        """Compiles a request's grammar and the mask at the beginning of the text. Raises Unavailable if the grammar
        cannot be compiled, InvalidRequest if it has no such mask."""
        grammar, eos_token_ids = request.sampling.grammar, request.eos_token_ids
        assert grammar is not None
        try:
            guide = self._guides.get(eos_token_ids)
            if guide is None:
                guide = self._guides[eos_token_ids] = Guide(self._tokenizer_file, eos_token_ids)
            matcher = guide.compile(grammar)
        except GrammarError as error:
            raise Unavailable(f"the grammar was accepted and could not be compiled for the model: {error}") from None
        began_s = time.thread_time()
        try:
            first = matcher.copy().allowed()
        except GrammarError as error:
            raise _not_followed(error, grammar.param) from None
        max_mask_s = time.thread_time() - began_s
        return _Compiled(matcher, request.client, matcher.num_bytes() + first.nbytes, first, max_mask_s)

    # ---- with the lock

    def _use(self, compiled: _Compiled, request_id: RequestId, constraint: GrammarConstraint) -> None:
        """Makes the constraint ready and counts its request as a user of the grammar."""
        compiled.num_users += 1
        self._used[request_id] = compiled, constraint
        constraint.begin(compiled)

    def _has_room(self) -> Callable[[str], bool]:
        """Returns a predicate: True if a client may have one more grammar compiled, i.e. those of its requests take at
        most as much as is free of MAX_USED_BYTES."""
        num_bytes: dict[str, int] = {}
        for compiled in {compiled for compiled, _ in self._used.values()}:
            num_bytes[compiled.client] = num_bytes.get(compiled.client, 0) + compiled.num_bytes
        num_free = MAX_USED_BYTES - sum(num_bytes.values())
        return lambda client: num_bytes.get(client, 0) <= num_free

    def _trim(self) -> None:
        """Frees compiled grammars that no request uses, the least recently used first, down to MAX_KEPT_BYTES."""
        unused = {key: compiled.num_bytes for key, compiled in self._kept.items() if not compiled.num_users}
        num_bytes = sum(unused.values())
        for key, size in unused.items():
            if num_bytes <= MAX_KEPT_BYTES:
                return
            del self._kept[key]
            num_bytes -= size
            self._freed_bytes += size


class GrammarConstraint:
    """The `Constraint` of one request. `begin` makes it ready; from then until `end` only the language lane's thread
    uses it."""

    def __init__(self, param: str) -> None:
        self._matcher: Matcher | None = None
        self._compiled: _Compiled | None = None
        self._param = param
        self._num_accepted = 0
        self._prepared: tuple[int, TokenMask] | None = None  # (output tokens before it, mask)

    def begin(self, compiled: _Compiled) -> None:
        """Makes the constraint ready, with a matcher of its own at the beginning of the text."""
        self._compiled, self._matcher = compiled, compiled.matcher.copy()

    def end(self) -> None:
        """Drops the matcher and the references to the compiled grammar. The constraint must not be used afterwards."""
        self._compiled = self._matcher = self._prepared = None

    @property
    def is_ready(self) -> bool:
        """True from `begin` to `end`."""
        return self._matcher is not None

    @property
    def max_mask_s(self) -> float:
        """The longest processor time, in seconds, of a mask of the compiled grammar, for any request; 0 if it is not
        ready."""
        return 0.0 if self._compiled is None else self._compiled.max_mask_s

    def prepare(self, output_ids: Sequence[int]) -> None:
        """Computes the mask after these tokens and keeps it for the next `allowed`. Raises InvalidRequest if they
        violate the grammar."""
        self._prepared = len(output_ids), self._computed(output_ids)

    def allowed(self, output_ids: Sequence[int]) -> TokenMask:
        """The mask of tokens that may follow `output_ids`, the whole output. Raises InvalidRequest if that violates the
        grammar."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == len(output_ids):
            return prepared[1]
        return self._computed(output_ids)

    def _computed(self, output_ids: Sequence[int]) -> TokenMask:
        """Advances the matcher by the tokens that it has not accepted yet and returns the mask after them. Raises
        InvalidRequest if they violate the grammar."""
        matcher, compiled = self._matcher, self._compiled
        assert matcher is not None and compiled is not None, "a request that is held is sampled for"
        compiled.num_steps += 1
        if not output_ids:
            return compiled.first
        began_s = time.thread_time()
        try:
            if len(output_ids) > self._num_accepted:
                matcher.accept(output_ids[self._num_accepted :])
                self._num_accepted = len(output_ids)
            return matcher.allowed()
        except GrammarError as error:
            raise _not_followed(error, self._param) from None
        finally:
            compiled.max_mask_s = max(compiled.max_mask_s, time.thread_time() - began_s)


def _not_followed(error: GrammarError, param: str) -> InvalidRequest:
    """The error for an output that the grammar cannot continue."""
    return InvalidRequest(f"the grammar cannot be followed any further: {error}", param=param)


@dataclass(slots=True, eq=False)
class _Mask:
    """A row's mask that is to be computed: the row, its client, and the inputs."""

    row: int
    seq_slot: int
    client: str
    constraint: Constraint
    history: TokenHistory

    def prepare(self) -> None:
        """Computes the mask, which the sampler then finds in the constraint. Raises what `Constraint.prepare`
        raises."""
        self.constraint.prepare(self.history.output_ids)


class MaskTurns:
    """The budget of a step's processor time for grammar masks. Chooses the rows to defer.

    `expected_only`: the device is asynchronous, so the sampler computes masks while a step's forward runs, and they
    delay nothing. Then masks are computed ahead only if they are expected to exceed the budget. `clock`: processor
    seconds of the calling thread. Only for the language lane's thread.
    """

    def __init__(
        self, slot_table: SlotTable, *, expected_only: bool, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._slot_table = slot_table
        self._expected_only = expected_only
        self._clock = clock
        self._queue: FairQueue[_Mask] = FairQueue("masks", _MAX_ROWS)
        self._owed_s: dict[str, float] = {}  # by client: excess over budgets that is to be paid off
        self._deferred_since: dict[int, int] = {}  # by slot: the call of `choose` that deferred its row first
        self._step = 0

    def deferred(self, plan: LanguagePlan, failed_rows: Collection[int]) -> list[int]:
        """Defers rows of `SlotTable.deferrable` for whose masks the step's budget does not suffice. Returns them with
        the rows planned after an earlier deferral, ascending, without `failed_rows`. The masks of the other deferrable
        rows are computed now or, with `expected_only`, possibly left to the sampler. Call it after
        `SlotTable.begin_step`."""
        table = self._slot_table
        rows = [row for row in table.deferrable(plan) if row not in failed_rows]
        if not rows:
            return []
        behind = [row for row in table.after_deferred(plan) if row not in failed_rows]
        left = self.choose(plan, [row for row in rows if row not in behind])
        table.defer(plan, left)
        return sorted([*behind, *left])

    def choose(self, plan: LanguagePlan, rows: Sequence[int]) -> list[int]:
        """Computes masks of these rows, of each client the longest deferred first, until the budget is used; returns
        the rows that are left without one. With `expected_only`, computes none and returns none if all are expected to
        fit. Skips rows whose request failed. Each call pays off STEP_S of the time by which a client's masks exceeded
        earlier budgets."""
        self._step += 1
        self._owed_s = {client: owed_s - STEP_S for client, owed_s in self._owed_s.items() if owed_s > STEP_S}
        is_alone = len({request.client for request in self._slot_table.requests(plan)}) == 1
        masks = [
            self._mask(row, seq_slot) for row, seq_slot in zip(rows, seq_slots_of(plan)[rows].tolist(), strict=True)
        ]
        max_s = ALONE_S if is_alone else STEP_S
        if self._expected_only and sum(mask.constraint.max_mask_s for mask in masks) <= max_s:
            return []
        for mask in masks:
            mask.history.resolve()
        masks = [mask for mask in sorted(masks, key=self._since) if not mask.history.is_broken]
        left = self._left_alone(masks) if is_alone else self._left_by_turns(masks)
        since = {mask.seq_slot: self._since(mask) for mask in left}
        for mask in masks:
            self._deferred_since.pop(mask.seq_slot, None)
        self._deferred_since |= since
        return [mask.row for mask in left]

    def _left_alone(self, masks: list[_Mask]) -> list[_Mask]:
        """Computes masks in order until ALONE_S is used, and returns the others: a step with a single client."""
        left_s = ALONE_S
        for index, mask in enumerate(masks):
            if left_s <= 0:
                return masks[index:]
            left_s -= self._prepare(mask)
        return []

    def _left_by_turns(self, masks: list[_Mask]) -> list[_Mask]:
        """Computes masks in fair turns of the clients until STEP_S is used, and returns the others. A client whose mask
        exceeds the budget gets no turn until the excess has been paid off by later steps."""
        for mask in masks:
            self._queue.push(mask.client, mask)
        left, left_s = dict.fromkeys(masks), STEP_S
        while left_s > 0 and (begun := self._queue.pop(lambda client: client not in self._owed_s)) is not None:
            client, mask = begun
            used_s = self._prepare(mask)
            self._queue.end(client, used_s)
            del left[mask]
            left_s -= used_s
            if left_s < 0:
                self._owed_s[client] = -left_s
        for mask in left:
            self._queue.remove(mask.client, mask)
        return list(left)

    def _prepare(self, mask: _Mask) -> float:
        """Computes the mask and returns the processor seconds that it took. Drops its error, logged as `run_guarded`
        does: it is raised again when the row is sampled."""
        began_s = self._clock()
        run_guarded("a mask", mask.prepare)
        return self._clock() - began_s

    def _mask(self, row: int, seq_slot: int) -> _Mask:
        """The row's mask that is to be computed. Asserts that its request has a grammar."""
        state, request = self._slot_table.sampling_state(seq_slot), self._slot_table.request(seq_slot)
        assert state.constraint is not None and state.history is not None
        return _Mask(row, seq_slot, request.client, state.constraint, state.history)

    def _since(self, mask: _Mask) -> int:
        """Number of the call of `choose` since which the row has been deferred; the present one if it is not."""
        return self._deferred_since.get(mask.seq_slot, self._step)
