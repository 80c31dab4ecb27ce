"""The timeline of a request: what it waited for and when its stages ran, for the user and for operators.

Consecutive decode steps are one span; a gap that a reader would notice splits it and is recorded with its cause. While
a request decodes, its open span and its gaps are in the arrays of `DecodeTimes`. A timeline has at most `MAX_SPANS`
spans however long the request runs. Reads no clock; times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median

import numpy as np
import numpy.typing as npt

from hydra_engine.core.outputs import DelayCause, StageSpan

Seconds = npt.NDArray[np.float64]

MAX_SPANS = 200
MIN_WAIT_S = 0.001  # shorter waits are not recorded: they are the latency between scheduler and lane
_MAX_NAMED = 3  # causes that a sentence names
_MIN_NAMED = 0.1  # share of the delay from which a cause is named
_UNITS = {"prefill": "tokens", "encode": "patches"}
_WORDS = {"step": "slow step", "cpu": "between steps", "decode": "the decode step itself", "lost": "instance lost"}
_WAITS = frozenset({"encode_wait", "prefill_wait", "decode_wait", "preempted"})


def is_late(
    gap_s: Seconds | np.float64, tpot_limit_s: Seconds | np.float64 | None, unlimited_s: float
) -> npt.NDArray[np.bool_]:
    """Mask of the gaps that are late: longer than the request's TPOT limit or, if that is infinite (`tpot_limit_s`
    None: for all), than `unlimited_s` (`StepTimes.gap_s`). The single definition of a late token."""
    limits = unlimited_s if tpot_limit_s is None else np.where(tpot_limit_s < math.inf, tpot_limit_s, unlimited_s)
    return gap_s > limits


class Timeline:
    """The timeline of one request: its spans, and what it waits for.

    `cause`: what the request waits for on the language lane; the planner sets it, the next chunk resets it. `last_s`:
    end of its latest language step. `first_token_s`, `last_token_s`: times of its first and latest token (0.0: none
    yet); `late_gaps`: number of late gaps between its tokens. While the request is in the table of decodes, `last_s`
    and these three are kept there and out of date here. `tpot_limit_s`: its TPOT limit, infinite without one.
    """

    __slots__ = (
        "_encode_since_s",
        "_instance",
        "_prefill_since_s",
        "_spans",
        "_wait_stage",
        "cause",
        "first_token_s",
        "last_s",
        "last_token_s",
        "late_gaps",
        "tpot_limit_s",
    )

    def __init__(
        self, instance: str, now: float, has_images: bool, *, prefills: bool = True, tpot_limit_s: float = math.inf
    ) -> None:
        """Starts the waits of a request at `now`: for an encode if it `has_images`, and for a language step unless it
        is an encode job (`prefills` False)."""
        self._instance = instance
        self._spans: list[StageSpan] = []
        self._encode_since_s = now if has_images else None
        self._prefill_since_s: float | None = now if prefills else None
        self._wait_stage = "prefill_wait"
        self.cause = "images" if has_images else "queue"
        self.first_token_s = 0.0
        self.last_s = now
        self.last_token_s = 0.0
        self.late_gaps = 0
        self.tpot_limit_s = tpot_limit_s

    def start_encode_wait(self, now: float) -> None:
        """Starts a wait for an encode, unless one is open."""
        if self._encode_since_s is None:
            self._encode_since_s = now

    def add_encode(self, started_s: float, ended_s: float, *, batch: int, patches: int, more: bool) -> None:
        """Records a vision step with `patches` of the request, and the wait before it unless shorter than `MIN_WAIT_S`.
        `batch`: requests in the step. `more`: images of this one still wait for an encode, so the next wait starts."""
        if self._encode_since_s is not None and started_s - self._encode_since_s >= MIN_WAIT_S:
            self._add("encode_wait", self._encode_since_s, started_s, lane="vision", cause="queue")
        self._add("encode", started_s, ended_s, lane="vision", batch=batch, tokens=patches)
        self._encode_since_s = ended_s if more else None

    def end_encode_wait(self, now: float) -> None:
        """Ends the wait for an encode, if one is open, without an encode, and records it unless shorter than
        `MIN_WAIT_S`: the last image was encoded for another request or is loaded, or its KV is cached."""
        if self._encode_since_s is not None and now - self._encode_since_s >= MIN_WAIT_S:
            self._add("encode_wait", self._encode_since_s, now, lane="vision", cause="shared")
        self._encode_since_s = None

    def add_cache_hit(self, now: float, tokens: int) -> None:
        self._add("cached", now, now, tokens=tokens)

    def start_wait(self, cause: str, now: float) -> None:
        """Ends the open wait for a language step and starts one with another cause. No effect if none is open, or if it
        has not begun before `now`."""
        if self._prefill_since_s is not None and now > self._prefill_since_s:
            self._end_wait(now)
            self._prefill_since_s, self.cause = now, cause

    def add_prefill(self, started_s: float, ended_s: float, *, batch: int, tokens: int, more: bool) -> None:
        """Records a prefill chunk, and the wait before it unless shorter than `MIN_WAIT_S`. `batch`: rows of its step.
        `more`: it was not the last one, so the next wait starts."""
        if self._prefill_since_s is None:
            self._prefill_since_s = self.last_s
        self._end_wait(started_s)
        self._add("prefill", started_s, ended_s, batch=batch, tokens=tokens)
        self.last_s = ended_s
        self._prefill_since_s = ended_s if more else None
        self._wait_stage, self.cause = "prefill_wait", "queue"

    def add_decode(self, since_s: float, until_s: float, *, tokens: int, batch: int) -> None:
        """Records consecutive decode steps without a late gap, drops an open wait. `batch`: mean number of rows."""
        self._prefill_since_s = None
        self._add("decode", since_s, until_s, batch=batch, tokens=tokens)

    def add_prefill_token(self, ended_s: float, unlimited_s: float) -> float | None:
        """Records the time of the token that the last chunk sampled. Returns the time of the token before if this one
        is late. `unlimited_s`: see `is_late`."""
        before_s, self.last_token_s = self.last_token_s, ended_s
        if not self.first_token_s:
            self.first_token_s = ended_s
        elif is_late(np.float64(ended_s - before_s), np.float64(self.tpot_limit_s), unlimited_s):
            self.late_gaps += 1
            return before_s
        return None

    def gap(self, since_s: float, until_s: float, causes: Sequence[DelayCause]) -> StageSpan:
        """Records the wait before a late token and returns its span. The decode span before it is closed already."""
        return self._add("decode_wait", since_s, until_s, cause=describe_causes(causes), blame=causes)

    def add_transfer(self, stage: str, since_s: float, until_s: float, tokens: int, cause: str | None = None) -> None:
        """Records a copy of `tokens` tokens to or from this instance (pull_features, pull_kv), or how long they were
        offered (offered_features, offered_kv). `cause`: why an offer was not fetched."""
        self._add(stage, since_s, until_s, lane="transfer", tokens=tokens, cause=cause)

    def start_preemption(self) -> None:
        """Starts a wait for KV blocks after a preemption: from the end of the latest language step, or in place of the
        open wait, with its start."""
        if self._prefill_since_s is None:
            self._prefill_since_s = self.last_s
        self._wait_stage, self.cause = "preempted", "kv blocks"

    def close(self, now: float) -> tuple[StageSpan, ...]:
        """Records the open waits unless shorter than `MIN_WAIT_S`; returns all spans in order of start, in monotonic
        seconds. The request must have left the table of decodes, which adds its decode span."""
        if self._encode_since_s is not None and now - self._encode_since_s >= MIN_WAIT_S:
            self._add("encode_wait", self._encode_since_s, now, lane="vision", cause="queue")
        self._end_wait(now)
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, span.end_s)))

    def _end_wait(self, end_s: float) -> None:
        """Records the open wait for a language step, unless it is shorter than `MIN_WAIT_S`; the caller sets what is
        open next."""
        since_s = self._prefill_since_s
        if since_s is not None and end_s - since_s >= MIN_WAIT_S:
            self._add(self._wait_stage, since_s, end_s, cause=self.cause)

    def _add(
        self,
        stage: str,
        start_s: float,
        end_s: float,
        *,
        lane: str = "language",
        batch: int = 0,
        tokens: int = 0,
        cause: str | None = None,
        blame: Sequence[DelayCause] = (),
    ) -> StageSpan:
        """Appends a span and returns it; shortens a full timeline first."""
        if len(self._spans) >= MAX_SPANS:
            self._spans = compact(self._spans)
        span = StageSpan(stage, start_s, end_s, self._instance, lane, batch, tokens, cause, tuple(blame))
        self._spans.append(span)
        return span


def compact(spans: list[StageSpan]) -> list[StageSpan]:
    """Returns the same timeline in fewer spans, at most 3/4 of `MAX_SPANS`: drops the shorter half of the waits and
    merges neighbours of one stage on a lane. If that is not enough (a request preempted very often), the earliest spans
    are dropped."""
    waits = [span.end_s - span.start_s for span in spans if span.stage in _WAITS]
    limit = median(waits) if waits else 0.0
    kept = [span for span in spans if span.stage not in _WAITS or span.end_s - span.start_s > limit]
    found = []
    for _, lane in groupby(sorted(kept, key=lambda s: (s.lane, s.start_s)), key=lambda s: s.lane):
        for _, run in groupby(lane, key=lambda s: s.stage):
            found.append(_joined(list(run)))
    return sorted(found, key=lambda span: span.start_s)[-(MAX_SPANS * 3 // 4) :]


def _joined(run: list[StageSpan]) -> StageSpan:
    """Merges consecutive spans of one stage into one: from the first start to the last end, with the sum of the tokens,
    the largest batch, and the cause and blame of the longest span."""
    first, last = run[0], run[-1]
    longest = max(run, key=lambda span: span.end_s - span.start_s)
    return StageSpan(
        stage=first.stage,
        start_s=first.start_s,
        end_s=last.end_s,
        instance=first.instance,
        lane=first.lane,
        batch=max(span.batch for span in run),
        tokens=sum(span.tokens for span in run),
        cause=longest.cause,
        blame=longest.blame,
    )


def anonymise(causes: Sequence[DelayCause]) -> tuple[DelayCause, ...]:
    """Sums the causes by kind, without requests and amounts; the largest sum first."""
    seconds: dict[str, float] = {}
    for cause in causes:
        seconds[cause.kind] = seconds.get(cause.kind, 0.0) + cause.seconds
    return tuple(DelayCause(kind, total_s) for kind, total_s in sorted(seconds.items(), key=lambda kind: -kind[1]))


def describe_causes(causes: Sequence[DelayCause]) -> str:
    """Describes the first causes (the largest come first) that are at least a tenth of the delay, at most three:
    "prefill of request 12 (384 tokens), encode of request 9 (1152 patches)"."""
    min_s = _MIN_NAMED * sum(cause.seconds for cause in causes)
    return ", ".join(_words(cause) for cause in causes[:_MAX_NAMED] if cause.seconds >= min_s)


def _words(cause: DelayCause) -> str:
    """Describes one cause, such as "encode of request 9 (1152 patches)"."""
    if cause.kind not in _UNITS:
        return _WORDS.get(cause.kind, cause.kind)
    whose = "other requests" if cause.request is None else f"request {cause.request}"
    size = f" ({cause.amount} {_UNITS[cause.kind]})" if cause.amount else ""
    return f"{cause.kind} of {whose}{size}"
