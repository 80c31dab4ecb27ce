"""Sampling of a step's rows, logits -> tokens and log probabilities, as the OpenAI API and vLLM's extras mean it.

Order: log probabilities from the raw logits; logit_bias; repetition penalty (prompt and output), frequency and presence
penalties (output only); masks: allowed_token_ids or the model's own rules, the grammar, and min_tokens on tokens that
would end the request; temperature, top_k (ties with the k-th best stay, as in vLLM), top_p (the lowest id of equals),
min_p; one draw.

A row's token depends on its own logits, its own request and its own counter alone. The random number is a fixed hash of
(seed, number of tokens generated before), and the draw inverts the cumulative distribution in vocabulary order, so the
same request gets the same token whatever else is in the batch.

The ops of the device compute all of it. Rows on the fast path need only filters and a draw; special rows have biases,
penalties, masks or log probabilities. Parameters lie in arrays by sequence slot. A step sends those of its special rows
after its forward: the mask of a grammar needs the previous token on the host, and the device computes while the host
waits for it. Op by op, what the step before sent is used again while it is the same. Tokens of penalised requests are
counted on the device, so counts include tokens that the host has not read. Does not know plans, caches, graphs or
lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Adjustments, Ops, SamplingTensors
from hydra_engine.core.plans import Int64s
from hydra_engine.core.request import Request
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.core.sampling import MAX_LOGPROBS, NO_RULES, SamplingParams, TokenRules
from hydra_engine.errors import ErrorInfo, InvalidRequest
from hydra_engine.worker.boundary import run_guarded

Logits = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]  # [V]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]  # [V]
_Words = npt.NDArray[np.int32]

NO_FAST_PATH = (1 << 63) - 1  # more tokens than anything generates
MAX_NUMBER = float(np.nextafter(np.float32(1), np.float32(0)))  # of a draw
MAX_BIASES = 1 << 14  # that a captured step has room for
WORDS = 6  # of 8 bytes, that a row has in `SpecialColumns`

_MAX_PENDING = 8  # more than are in flight, so that reading the oldest is no wait


class TokenHistory:
    """The tokens of a request's output, in order and counted, and the distinct ones of its prompt, for penalties and
    grammars. Tokens that are still on the device are expected as functions that fetch them. Only for the language
    lane's thread."""

    __slots__ = ("_next_position", "_pending", "is_broken", "output_counts", "output_ids", "prompt_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.is_broken = False  # a row failed: no token follows
        self._pending: deque[tuple[int, Callable[[], int]]] = deque()
        self.prompt_ids: Ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self.output_ids: list[int] = []  # in order
        self.output_counts: dict[int, int] = {}
        self._next_position = len(prompt_token_ids)

    def record(self, start: int, token_ids: Sequence[int]) -> None:
        """Records output tokens at positions [start, start + len) of the text. Positions that were recorded before, or
        belong to the prompt (a step run again, a preempted request that is prefilled again), are skipped."""
        end = start + len(token_ids)
        if end <= self._next_position:
            return
        for token in token_ids[max(self._next_position - start, 0) :]:
            self.output_ids.append(token)
            self.output_counts[token] = self.output_counts.get(token, 0) + 1
        self._next_position = end

    def expect(self, position: int, read: Callable[[], int]) -> None:
        """Announces a token at `position` that is still on the device. `read` waits for it and returns it; a negative
        one means that its row failed. Reads the oldest expected token if there are more than _MAX_PENDING."""
        self._pending.append((position, read))
        if len(self._pending) > _MAX_PENDING:
            self._read_next()

    def resolve(self) -> None:
        """Waits for the expected tokens and records them, up to the first whose row failed, which sets `is_broken`.
        Raises what their `read` raises."""
        while self._pending:
            self._read_next()

    def _read_next(self) -> None:
        """Waits for the oldest expected token. Records it, or sets `is_broken` if its row failed; drops it if that is
        set already."""
        position, read = self._pending[0]
        token = read()
        self._pending.popleft()
        self.is_broken = self.is_broken or token < 0
        if not self.is_broken:
            self.record(position, (token,))


class Constraint(Protocol):
    """A grammar and the position of one request in it."""

    def allowed(self, output_ids: Sequence[int]) -> Mask:
        """Mask, over the tokens that the tokenizer knows, of those that may follow the output; end-of-sequence may if
        the text is complete. May be called again for the same output. Raises HydraError if the output violates the
        grammar."""
        ...

    def prepare(self, output_ids: Sequence[int]) -> None:
        """Computes ahead the result of the next `allowed`, if that is for the same output. Raises what it would."""
        ...

    @property
    def max_mask_s(self) -> float:
        """The longest processor time, in seconds, that a mask of this grammar has taken so far, for any request."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingState:
    """Sampling parameters and state of a request. `history`: None if it has neither penalties nor a grammar."""

    params: SamplingParams
    seed: int
    ending_ids: tuple[int, ...]  # tokens that would end the request: masked while min_tokens is not reached
    history: TokenHistory | None
    constraint: Constraint | None = None
    eos_ids: tuple[int, ...] = ()
    biases: tuple[Ids, Scores] | None = None  # token ids and what is added to their logits
    allowed_ids: Ids | None = None  # None: all
    rules: TokenRules = NO_RULES
    num_last: int = NO_FAST_PATH  # max_new_tokens - 1

    @classmethod
    def from_request(cls, request: Request, constraint: Constraint | None = None) -> SamplingState:
        """The state of a request at its start or resumption. `constraint`: that of its grammar, if it has one."""
        params = request.sampling
        history = TokenHistory(request.prompt_token_ids) if params.needs_history else None
        if history is not None:
            history.record(request.num_prompt, request.generated_token_ids)
        ending = tuple(sorted({*request.eos_token_ids, *params.stop_token_ids}))
        biases = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            biases = np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float64)
        allowed = np.asarray(params.allowed_token_ids, dtype=np.int64) if params.allowed_token_ids else None
        rules = request.rules if allowed is None else NO_RULES
        return cls(
            *(params, request.seed, ending, history, constraint, request.eos_token_ids, biases, allowed, rules),
            num_last=request.max_new_tokens - 1,
        )

    @property
    def fast_path_from(self) -> int:
        """Number of generated tokens from which on the request is on the fast path: filters and a draw alone choose its
        tokens, and nothing but them is returned. NO_FAST_PATH: never."""
        chosen = self.biases is not None or self.allowed_ids is not None or self.history is not None
        if self.params.logprobs is not None or chosen or self.rules.never or self.rules.last:
            return NO_FAST_PATH
        return max(self.params.min_tokens if self.ending_ids else 0, 1 if self.rules.not_first else 0)

    @property
    def may_mask(self) -> bool:
        """True if `allowed_tokens` may be other than None after some number of tokens."""
        rules = self.rules != NO_RULES or (self.ending_ids and self.params.min_tokens)
        return bool(rules) or self.constraint is not None or self.allowed_ids is not None

    def unwanted(self, num_generated: int) -> tuple[int, ...]:
        """Token ids that must not be sampled after `num_generated` tokens, by `min_tokens` and the model's rules."""
        early = self.ending_ids if num_generated < self.params.min_tokens else ()
        return (*early, *self.rules.never, *(self.rules.not_first if num_generated == 0 else ()))

    def forced(self, num_generated: int) -> tuple[int, ...]:
        """Token ids of which one must be sampled after `num_generated` tokens: those that the model's rules demand as
        the last one. Empty if any may be sampled."""
        return self.rules.last if num_generated == self.num_last else ()


def allowed_tokens(state: SamplingState, num_generated: int, size: int) -> Mask | None:
    """The mask [size] of tokens that may be sampled after `num_generated` tokens; None: all. Without a grammar, tokens
    that the model's rules demand as the last one (`forced`) override all else. With one they are not demanded, and
    other rules apply as far as they leave a token (`_in_grammar`). Raises InvalidRequest if no token is left, and the
    errors of the grammar."""
    params = state.params
    if state.constraint is not None:
        return _in_grammar(state, state.constraint, num_generated, size)
    if forced := state.forced(num_generated):
        return _only(forced, size)
    unwanted = state.unwanted(num_generated)
    if state.allowed_ids is None and not unwanted:
        return None
    mask = _any_but(unwanted, size)
    if state.allowed_ids is not None:
        mask &= _only(state.allowed_ids, size)
    if not mask.any():
        name = "min_tokens" if num_generated < params.min_tokens else "allowed_token_ids"
        raise InvalidRequest(f"{name} leaves no token to choose from", param=name)
    return mask


def _in_grammar(state: SamplingState, constraint: Constraint, num_generated: int, size: int) -> Mask:
    """Mask [size] of tokens that the grammar and the other parameters allow. If they leave none, unwanted tokens
    (`min_tokens`, `ignore_eos`, the model's rules) are allowed after all; if `allowed_token_ids` leave none either, the
    end of a complete text is. Raises InvalidRequest if there is no token even so, and the errors of the grammar."""
    params, history = state.params, state.history
    assert history is not None and len(history.output_ids) == num_generated, "a row is sampled without its tokens"
    allowed = constraint.allowed(history.output_ids)
    mask = np.zeros(size, dtype=np.bool_)
    mask[: allowed.size] = allowed[:size]
    ending = mask & _only(state.eos_ids, size)
    if state.allowed_ids is not None:
        mask &= _only(state.allowed_ids, size)
    unwanted = state.unwanted(num_generated)
    if params.ignore_eos and num_generated >= params.min_tokens:
        unwanted += state.eos_ids
    for candidates in (mask & _any_but(unwanted, size), mask, ending):
        if candidates.any():
            return candidates
    if state.allowed_ids is not None:
        raise InvalidRequest("allowed_token_ids leaves no token that the grammar allows", param="allowed_token_ids")
    name = None if params.grammar is None else params.grammar.param
    raise InvalidRequest("no token of this model continues the text as the grammar demands", param=name)


def _only(token_ids: Sequence[int] | Ids, size: int) -> Mask:
    """Mask [size] of these tokens. Ids from `size` on are ignored."""
    mask = np.zeros(size, dtype=np.bool_)
    ids = np.asarray(token_ids, dtype=np.int64)
    mask[ids[ids < size]] = True
    return mask


def _any_but(token_ids: Sequence[int], size: int) -> Mask:
    """Mask [size] of all tokens but these."""
    return ~_only(token_ids, size)


# ---- parameters by sequence slot

_Floats = npt.NDArray[np.floating]
_States = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step
_MASK = (1 << 64) - 1
_MAX_TOP_K = (1 << 31) - 1
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # 0 would mean the largest logit


class SamplingArrays(NamedTuple):
    """`SamplingTensors` of backend/base.py in host memory, [B] each, float32 or float64."""

    temperatures: _Floats
    top_k: npt.NDArray[np.int32]
    top_p: _Floats
    min_p: _Floats
    numbers: _Floats


class SlotSampling:
    """Temperatures, filters and seeds by sequence slot. Rows of slots without a request get a token too, which is not
    used. `dtype` of the floats: float64 where the ops compute with it."""

    def __init__(self, num_seq_slots: int, dtype: type[np.floating] = np.float32) -> None:
        self._dtype = dtype
        self.temperatures: _Floats = np.zeros(num_seq_slots, dtype=dtype)  # 0: the largest logit
        self._top_k: npt.NDArray[np.int32] = np.zeros(num_seq_slots, dtype=np.int32)
        self._top_p: _Floats = np.ones(num_seq_slots, dtype=dtype)
        self._min_p: _Floats = np.zeros(num_seq_slots, dtype=dtype)
        self._states: _States = np.zeros(num_seq_slots, dtype=np.uint64)  # start states of the seeds' generators

    def assign(self, seq_slot: int, state: SamplingState) -> None:
        """Sets the slot's entries to a request's parameters."""
        params = state.params
        self.temperatures[seq_slot] = 0.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[seq_slot] = min(max(params.top_k, 0), _MAX_TOP_K)
        self._top_p[seq_slot] = params.top_p
        self._min_p[seq_slot] = params.min_p
        self._states[seq_slot] = seed_states([state.seed])[0]

    def arrays(self, seq_slots: Int64s, num_generated: Int64s) -> SamplingArrays:
        """Parameters of rows in these slots, and the random number of each row's token, whose counter is
        `num_generated`. Numbers are 0 if all rows are greedy."""
        temperatures = self.temperatures[seq_slots]
        if temperatures.any():
            numbers: _Floats = draw_numbers(self._states[seq_slots], num_generated).astype(self._dtype)
        else:
            numbers = np.zeros(len(seq_slots), dtype=self._dtype)
        return SamplingArrays(
            temperatures, self._top_k[seq_slots], self._top_p[seq_slots], self._min_p[seq_slots], numbers
        )


def seed_states(seeds: Sequence[int]) -> _States:
    """Start states of the seeds' splitmix64 generators. Seeds count modulo 2^64."""
    return _mix64(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))


def draw_numbers(states: _States, counters: Int64s) -> _Floats:
    """Numbers in [0, 1), one per (start state, counter) pair: output number `counter` of the generator, with 53 bits,
    rounded to the float32 that devices draw with, still below 1."""
    steps = (counters + 1).astype(np.uint64) * _GOLDEN  # modulo 2^64, as all of this
    bits = _mix64(states + steps) >> np.uint64(11)
    return np.minimum((bits * 2.0**-53).astype(np.float32), np.float32(MAX_NUMBER))


def _mix64(values: _States) -> _States:
    """splitmix64's finaliser: a bijection on 64 bits."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


# ---- special rows

_Column = TypeVar("_Column")
_NO_PENALTY = (1.0, 0.0, 0.0)
_NO_BIASES: tuple[Ids, Scores] = np.empty(0, dtype=np.int64), np.empty(0)
_SHORT = 6  # columns of int32


class SpecialColumns(NamedTuple, Generic[_Column]):
    """Parameters of a step's sampling rows beyond filters, as columns for `Adjustments` and `Ops.score_tokens`: int32
    [B], except `penalties`. They share one array of WORDS * B words of 8 bytes."""

    penalties: _Column  # [B, 3] float64
    bias_begins: _Column
    bias_ends: _Column
    counted: _Column
    increments: _Column  # of the count of the row's new token
    masked: _Column
    num_top: _Column  # top log probabilities beside the token's own; -1: none, nor its own


def special_columns(packed: Any, size: int, int32: Any, float64: Any) -> SpecialColumns[Any]:
    """Views an int64 array or tensor, [WORDS * size], as columns. `int32` and `float64` are dtypes of its library."""
    first = (WORDS - _SHORT // 2) * size
    short = packed[first : WORDS * size].view(int32).reshape(_SHORT, size)
    return SpecialColumns(packed[:first].view(float64).reshape(size, 3), *short)


@lru_cache(maxsize=64)
def _blank(size: int) -> Int64s:
    """Packed columns of `size` rows without special parameters. Shared by calls: read only."""
    packed = np.zeros(WORDS * size, dtype=np.int64)
    columns = special_columns(packed, size, np.int32, np.float64)
    columns.penalties[:] = _NO_PENALTY
    columns.counted[:] = columns.masked[:] = columns.num_top[:] = -1
    return packed


class SpecialArrays(NamedTuple):
    """Host arrays of a step's special rows. B counts all rows of the arrays; those that are not special have no effect.
    `columns` are views of `packed`; either is sent."""

    packed: Int64s  # of `columns`
    bias_ids: _Words
    bias_values: npt.NDArray[np.float64]
    masks: _Words  # [M, ceil(V / 32)]
    columns: SpecialColumns[Any]
    penalises: bool = False  # any row has penalties
    scores: bool = False  # any row has log probabilities
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # (row, why it has no token to choose from)

    @property
    def num_top(self) -> _Words:
        """Number of top log probabilities of each row, [B], as in `SpecialColumns`."""
        num_top: _Words = self.columns.num_top
        return num_top

    @property
    def adjusts(self) -> bool:
        """True if any row is drawn from other logits than the model's: it has penalties, biases or a mask."""
        return self.penalises or len(self.bias_ids) > 0 or len(self.masks) > 0

    @property
    def computes(self) -> bool:
        """True if any row has log probabilities, penalties or biases: numbers computed from logits, which float32 would
        round. Masks alone compute none."""
        return self.scores or self.penalises or len(self.bias_ids) > 0

    @classmethod
    def blank(cls, size: int, vocabulary: int) -> SpecialArrays:
        """Arrays of `size` rows none of which is special."""
        masks = np.empty((0, -(-vocabulary // 32)), dtype=np.int32)
        packed = _blank(size).copy()
        columns = special_columns(packed, size, np.int32, np.float64)
        return cls(packed, np.empty(0, np.int32), np.empty(0, np.float64), masks, columns)


class Recounts(NamedTuple):
    """New token counts of some slots; counts that are not listed become 0."""

    seq_slots: Int64s  # [n]
    places: Int64s  # [m] slot * V + token
    counts: _Words  # [m]


class SlotSpecials:
    """The special parameters of requests (biases, penalties, masks, log probabilities) by sequence slot."""

    def __init__(self, num_seq_slots: int) -> None:
        self._penalties: npt.NDArray[np.float64] = np.ones((num_seq_slots, 3), dtype=np.float64)
        self._penalised: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)
        # The tokens are counted on the device, or there is nothing to count; since `assign`.
        self.counted: npt.NDArray[np.bool_] = np.ones(num_seq_slots, dtype=np.bool_)
        self._num_top: _Words = np.full(num_seq_slots, -1, dtype=np.int32)
        self._num_biases: Int64s = np.zeros(num_seq_slots, dtype=np.int64)
        self._may_mask: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)
        self._states: list[SamplingState | None] = [None] * num_seq_slots  # of biases, masks and histories
        # Arguments, masks by row, and result of the latest call of `arrays`, until `assign`. Arguments name masks by
        # address, so they are kept alive.
        self._latest: tuple[object, dict[int, _Words], SpecialArrays] | None = None
        # Of requests without a grammar, with what it depends on besides the request.
        self._masks: dict[int, tuple[tuple[bool, ...], _Words]] = {}

    def assign(self, seq_slot: int, state: SamplingState) -> None:
        """Sets the slot's entries to a request's parameters. With penalties its tokens are to be recounted."""
        params = state.params
        self._penalties[seq_slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalised[seq_slot] = params.penalises
        self.counted[seq_slot] = not params.penalises
        self._num_top[seq_slot] = -1 if params.logprobs is None else params.logprobs
        self._num_biases[seq_slot] = 0 if state.biases is None else len(state.biases[0])
        self._may_mask[seq_slot] = state.may_mask
        self._states[seq_slot] = state
        self._masks.pop(seq_slot, None)
        self._latest = None

    def num_biases(self, seq_slots: Int64s) -> int:
        """Number of biases of all these slots together."""
        return int(self._num_biases[seq_slots].sum())

    def history(self, seq_slot: int) -> TokenHistory | None:
        """The token history of the slot's request; None without a request, or if it has neither penalties nor a
        grammar."""
        state = self._states[seq_slot]
        return None if state is None else state.history

    def arrays(
        self, rows: Int64s, seq_slots: Int64s, num_generated: Int64s, size: int, vocabulary: int
    ) -> SpecialArrays:
        """Builds host arrays of `size` rows, or returns the latest ones, which must not be changed, if they are equal.
        `rows`: indices of the special ones among them, to which `seq_slots` and `num_generated` belong. Waits for the
        last token of requests with a grammar. A row whose mask cannot be made is in `failures`. Raises BackendError if
        the device failed."""
        masks: dict[int, _Words] = {}  # by row
        failures: list[tuple[int, ErrorInfo]] = []
        for index in self._may_mask[seq_slots].nonzero()[0].tolist():
            row, seq_slot, count = int(rows[index]), int(seq_slots[index]), int(num_generated[index])
            mask = run_guarded("sampling", partial(self._mask, seq_slot, count, vocabulary))
            if isinstance(mask, ErrorInfo):
                failures.append((row, mask))
            elif mask is not None:
                masks[row] = mask
        given = rows.tobytes(), seq_slots.tobytes(), size, vocabulary, *((row, id(masks[row])) for row in masks)
        if self._latest is not None and self._latest[0] == given and not failures:
            return self._latest[2]
        packed = _blank(size).copy()
        columns: SpecialColumns[Any] = special_columns(packed, size, np.int32, np.float64)
        penalised = self._penalised[seq_slots]
        columns.penalties[rows] = self._penalties[seq_slots]
        columns.counted[rows] = np.where(penalised, seq_slots, -1)
        columns.increments[rows] = 2 * penalised
        columns.num_top[rows] = np.minimum(self._num_top[seq_slots], vocabulary)
        columns.masked[[*masks]] = range(len(masks))
        columns.bias_ends[rows] = self._num_biases[seq_slots].cumsum()
        columns.bias_begins[rows] = columns.bias_ends[rows] - self._num_biases[seq_slots]
        biases = [state.biases for seq_slot in seq_slots.tolist() if (state := self._states[seq_slot]) and state.biases]
        ids, values = zip(_NO_BIASES, *biases, strict=True)
        special = SpecialArrays(
            packed,
            np.concatenate(ids, dtype=np.int32),
            np.concatenate(values),
            np.stack([*masks.values()]) if masks else np.empty((0, -(-vocabulary // 32)), dtype=np.int32),
            columns,
            bool(penalised.any()),
            bool((columns.num_top >= 0).any()),
            tuple(failures),
        )
        self._latest = None if failures else (given, masks, special)
        return special

    def _mask(self, seq_slot: int, num_generated: int, vocabulary: int) -> _Words | None:
        """The mask of allowed tokens as bits, [ceil(V / 32)]; None: all are allowed, or the request has a grammar and
        an earlier row of it failed. With a grammar, waits for the request's tokens, and raises BackendError if the
        device failed; other masks are computed again only if other rules apply. Raises what `allowed_tokens` raises."""
        state = self._states[seq_slot]
        assert state is not None
        if state.constraint is not None:
            assert state.history is not None
            state.history.resolve()
            if state.history.is_broken:
                return None
            mask = allowed_tokens(state, num_generated, vocabulary)
            return None if mask is None else _bits(mask)
        phase = num_generated < state.params.min_tokens, num_generated == 0, num_generated == state.num_last
        kept = self._masks.get(seq_slot)
        if kept is not None and kept[0] == phase:
            return kept[1]
        mask = allowed_tokens(state, num_generated, vocabulary)
        if mask is None:
            return None
        self._masks[seq_slot] = phase, _bits(mask)
        return self._masks[seq_slot][1]

    def recounts(self, seq_slots: Int64s, vocabulary: int) -> Recounts | None:
        """Counts prompt and output tokens, as in `SlotTable.counts`, of the slots whose requests have penalties; None
        if there are none. Waits for tokens that are still on the device."""
        penalised = seq_slots[self._penalised[seq_slots]]
        if not penalised.size:
            return None
        places, counts = [], []
        for seq_slot in penalised.tolist():
            history = self.history(seq_slot)
            assert history is not None
            history.resolve()
            held = np.zeros(vocabulary, dtype=np.int32)
            held[history.prompt_ids[history.prompt_ids < vocabulary]] = 1  # image placeholders may lie beyond
            output = np.array([*history.output_counts.items()], dtype=np.int64).reshape(-1, 2)
            held[output[:, 0]] += 2 * output[:, 1].astype(np.int32)
            tokens = held.nonzero()[0]
            places.append(seq_slot * vocabulary + tokens)
            counts.append(held[tokens])
        return Recounts(penalised, np.concatenate(places), np.concatenate(counts))


def _bits(mask: npt.NDArray[np.bool_]) -> _Words:
    """The mask [V] as bits of int32 words, [ceil(V / 32)], the lowest bit first."""
    packed = np.zeros(-(-len(mask) // 32) * 4, dtype=np.uint8)
    bits = np.packbits(mask, bitorder="little")
    packed[: len(bits)] = bits
    return packed.view("<i4")


class SpecialTensors(NamedTuple):
    """`SpecialArrays` on the device."""

    columns: SpecialColumns[Tensor]
    bias_ids: Tensor
    bias_values: Tensor
    masks: Tensor

    @classmethod
    def from_packed(
        cls, packed: Tensor, size: int, bias_ids: Tensor, bias_values: Tensor, masks: Tensor
    ) -> SpecialTensors:
        """The tensors of `size` rows, whose columns are views of `packed`, int64 [WORDS * size]."""
        return cls(special_columns(packed, size, torch.int32, torch.float64), bias_ids, bias_values, masks)


class SampledRows(NamedTuple):
    """The result of `sample_special`, on the device."""

    tokens: Tensor  # [B] int64
    finite: Tensor  # [B] bool
    numbers: Tensor  # [B, 3 + MAX_LOGPROBS] float32 and
    places: Tensor  # [B, 1 + MAX_LOGPROBS] int32, as `Ops.score_tokens` has them


def sample_special(
    ops: Ops, logits: Tensor, sampling: SamplingTensors, special: SpecialTensors, counts: Tensor
) -> SampledRows:
    """Samples all rows of logits [B, V] with their adjustments, and scores the tokens by the logits as given. `counts`
    [slots, V] as in `Adjustments`, by sequence slot; they are not changed. Computes with the dtype of `sampling`."""
    logits = logits.to(sampling.temperatures.dtype)
    tokens, finite = ops.sample(adjust_special(ops, logits, special, counts), sampling)
    return SampledRows(tokens, finite, *ops.score_tokens(logits, tokens, special.columns.num_top, MAX_LOGPROBS))


def adjust_special(ops: Ops, logits: Tensor, special: SpecialTensors, counts: Tensor) -> Tensor:
    """Returns logits [B, V] with the biases, penalties and masks of special rows, as a new tensor
    (`Ops.adjust_logits`)."""
    columns = special.columns
    return ops.adjust_logits(
        logits,
        Adjustments(
            columns.bias_begins,
            columns.bias_ends,
            special.bias_ids,
            special.bias_values,
            columns.penalties,
            columns.counted,
            counts,
            columns.masked,
            special.masks,
        ),
    )


def logprobs_of(token: int, num_top: int, numbers: npt.NDArray[np.float32], places: _Words) -> TokenLogprobs:
    """Log probabilities of one row from `Ops.score_tokens`: numbers [3 + MAX_LOGPROBS], places [1 + MAX_LOGPROBS].
    `num_top` is at most the vocabulary."""
    chosen, largest, total, *best = numbers[: 3 + num_top].tolist()
    rank, *ids = places[: 1 + num_top].tolist()
    log_total = largest + float(np.log(total))
    top = tuple((token_id, value - log_total) for token_id, value in zip(ids, best, strict=True))
    return TokenLogprobs(token, chosen - log_total, rank, top)


# ---- log probabilities of prompt tokens


def finite_rows(logits: Logits) -> npt.NDArray[np.bool_]:
    """True for rows of [B, V] whose values are all finite, [B]."""
    finite: npt.NDArray[np.bool_] = np.isfinite(logits.max(axis=-1)) & np.isfinite(logits.min(axis=-1))
    return finite


def token_logprobs(raw: Scores, token: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of `token` and of the `num_top` best tokens by raw logits [V], before any adjustment. Rank and
    top list order tokens by (logprob descending, id ascending)."""
    largest = raw.max()
    log_total = largest + np.log(np.exp(raw - largest).sum())
    value = raw[token]
    rank = 1 + int(np.count_nonzero(raw > value)) + int(np.count_nonzero(raw[:token] == value))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, raw.size)
        threshold = np.partition(raw, raw.size - num_top)[raw.size - num_top]
        candidates = np.flatnonzero(raw >= threshold)
        best = candidates[np.lexsort((candidates, -raw[candidates]))][:num_top]
        top = tuple((int(i), float(raw[i] - log_total)) for i in best)
    return TokenLogprobs(token, float(value - log_total), rank, top)
