"""Seconds that a request would take on an instance: its queue, its encode and prefill, and its decode beside others.

Reads the loads of `instances.py` and the pace of `pace.py`. An instance with decodes computes prompts and pictures in
the time that their steps leave: within a TPOT limit what the limit leaves, without one the time of a full chunk.
Pictures and prompts of one instance take turns. Decodes for which it has no room take turns too. Before anything is
measured the seconds are right in proportion only.
"""

from __future__ import annotations

import math
from operator import attrgetter

from hydra_engine.frontend.routing.instances import NEARLY_FULL, InstanceLoad

# Share of its time that an instance gives to prompts and pictures at least, however many requests decode there.
LEAST_SHARE = 1 / 64
# Share of its time that an encode gets beside decodes, which never wait for it.
VISION_SHARE = 0.5
# Tokens of an answer whose length is not known: most end before their limit.
ANSWER_TOKENS = 128

# Cost of a decode where it would run, in seconds: by which it and those there would miss the TPOT limit in all, and
# that it takes and adds to the work of others.
Decode = tuple[float, float]

# What an estimate is made from.
_state = attrgetter(
    "pace",
    "status",
    "prefill_tokens",
    "patches",
    "decodes",
    "decode_tokens",
    "later_decodes",
    "expected_decodes",
    "expected_tokens",
    "max_num_seqs",
    "kv_tokens",
)


class Estimate:
    """An instance as its load was when this was made. `ahead`: counts decodes that will probably come from other
    instances too, as a choice does that takes effect behind them."""

    __slots__ = ("_count", "_held", "_pictures_s", "_prompts_s", "_share", "_state", "_step_s", "full", "load")

    def __init__(self, load: InstanceLoad, ahead: bool = False) -> None:
        self.load, self._state, pace = load, _state(load), load.pace
        base_s, each_s = pace.prefill
        self._prompts_s = base_s + each_s * load.prefill_tokens if load.prefill_tokens else 0.0
        base_s, each_s = pace.vision
        self._pictures_s = base_s + each_s * load.patches if load.patches else 0.0
        self._count, self._held, later = load.decodes, load.decode_tokens, load.later_decodes
        if ahead:
            self._count += load.expected_decodes
            self._held += load.expected_tokens
            later += load.expected_decodes
        self.full = load.status is not None and load.status.kv_used >= NEARLY_FULL
        if not ahead:
            self.full = load.nearly_full or self._room(self._count + 1, self._held) < 1.0
        self._step_s, self._share = 0.0, 1.0  # of the decodes there, and the time that they leave
        if self._count:
            self._step_s = step_s = self._decode_s(0, 0)[0]
            self._share = self._left(step_s)
            if later:  # none of them runs while the first prompt of the queue is computed, all at its end
                self._share += 0.5 * (1 - self._share) * later / self._count

    @property
    def is_current(self) -> bool:
        """True if the load is what it was."""
        return bool(_state(self.load) == self._state)

    def encoded_s(self, patches: int) -> float:
        """Seconds until the instance would have encoded `patches` more."""
        own_s = self.load.pace.vision.seconds(self.load.patches + patches)
        contested_s = own_s + min(own_s, self._prompts_s)
        return contested_s / min(self._share, VISION_SHARE) if self._step_s else contested_s

    def prefilled_s(self, tokens: int, patches: int) -> float:
        """Seconds until the instance would have encoded `patches` and prefilled `tokens` of a request."""
        load = self.load
        prompts_s = load.pace.prefill.seconds(load.prefill_tokens + tokens)
        if patches:
            return (prompts_s + load.pace.vision.seconds(load.patches + patches)) / self._share
        return (prompts_s + min(prompts_s, self._pictures_s)) / self._share

    def prefilled_behind_s(self, tokens: int, features_s: float) -> float:
        """Seconds until the instance would have prefilled `tokens` whose features are there in `features_s` seconds."""
        queue_s = self.prefilled_s(tokens, 0)
        return max(features_s + self.load.pace.prefill.seconds(tokens) / self._share, queue_s)

    def stalled_s(self, tokens: int) -> float:
        """Seconds by which the prefill of `tokens` delays the decodes there in all; none within a TPOT limit."""
        pace = self.load.pace
        return self.load.decodes * pace.prefill.each_s * tokens if pace.limit_s == math.inf else 0.0

    def join(self, tokens: int, left: int) -> Decode:
        """Cost of a decode of `left` tokens if it joins those there with `tokens` tokens."""
        before_s, count, limit_s = self._step_s, self._count, self.load.pace.limit_s
        after_s, turns = self._decode_s(1, tokens)
        own_s = turns * after_s
        late_s, slow_s = 0.0, left * (own_s + count * (after_s - before_s))
        if own_s > limit_s:
            others_s = max(0.0, after_s - limit_s) - max(0.0, before_s - limit_s)
            late_s = left * (own_s - limit_s + count * others_s)
        if waits_s := self._prompts_s + self._pictures_s:
            slow_s += waits_s / self._left(after_s) - waits_s / self._share
        return late_s, slow_s

    def arrive(self, tokens: int, joined: Decode) -> Decode:
        """Cost of a decode that joins and comes from another instance: its second token waits for the copy of its KV,
        for the step that runs here, and for a step of its own."""
        late_s, slow_s = joined
        pace, step_s = self.load.pace, self._decode_s(1, tokens)[0]
        running_s = self._step_s + self._prompts_s
        copy_s = pace.kv_token_s * tokens
        if self.load.status is not None and (moved := self.load.status.transfer).pulls:
            copy_s += moved.pulls * moved.pull_s / max(moved.pulled, 1)
        gap_s = copy_s + 0.5 * (running_s if running_s < pace.limit_s else pace.limit_s) + step_s
        return late_s + max(0.0, gap_s - pace.limit_s), slow_s + copy_s

    def _decode_s(self, more: int, tokens: int) -> tuple[float, float]:
        """Seconds of a step of the decodes there and `more` with `tokens` tokens, and in how many of those steps each
        of them gets a token: more than one where they have no room at once."""
        pace, rows = self.load.pace, self._count + more
        held = self._held + tokens
        base_s, each_s = pace.decode
        share = self._room(rows, held)
        # Half by row, half by key.
        return base_s + each_s * 0.5 * share * (rows + held / pace.context), 1 / share

    def _room(self, rows: int, held: int) -> float:
        """Share of `rows` decodes with `held` tokens that run at once."""
        load, share = self.load, 1.0
        if load.max_num_seqs and rows > load.max_num_seqs:
            share = load.max_num_seqs / rows
        if load.kv_tokens and share * held > load.kv_tokens:
            share = load.kv_tokens / held
            if (status := load.status) is not None:  # prompts that share blocks need less
                running = status.num_running + (status.kv_used < NEARLY_FULL)
                share = min(1.0, max(share, running / rows))
        return share

    def _left(self, step_s: float) -> float:
        """Share of the time that is left for prompts and pictures, if decodes take `step_s` seconds a step."""
        pace = self.load.pace
        full_s = step_s + pace.chunk_s
        share = 1 - step_s / (full_s if full_s < pace.limit_s else pace.limit_s)
        return share if share > LEAST_SHARE else LEAST_SHARE
