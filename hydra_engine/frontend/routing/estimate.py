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

# Cost of a decode where it would run, in seconds: by which it and those there would miss the TPOT limit in all, that it
# takes and adds to the work of others, and of a step with it.
Decode = tuple[float, float, float]

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
    "arriving_tokens",
    "max_num_seqs",
    "kv_tokens",
)


class Estimate:
    """An instance as its load was when this was made. `ahead`: counts decodes that will probably come from other
    instances too, as a choice does that takes effect behind them."""

    __slots__ = (
        "_arriving_s",
        "_base_s",
        "_count",
        "_each_s",
        "_held",
        "_patch_s",
        "_pictures_s",
        "_prompts_s",
        "_pulls_s",
        "_queue_s",
        "_running_s",
        "_seen_s",
        "_share",
        "_step_s",
        "full",
        "late_s",
        "load",
        "stall_s",
        "state",
    )

    def __init__(self, load: InstanceLoad, ahead: bool = False) -> None:
        self.load, self.state, pace, status = load, _state(load), load.pace, load.status
        self._base_s, self._each_s = pace.prefill
        self._queue_s = self._base_s + self._each_s * load.prefill_tokens  # of prompts, whatever comes
        self._prompts_s = self._queue_s if load.prefill_tokens else 0.0
        base_s, self._patch_s = pace.vision
        self._seen_s = base_s + self._patch_s * load.patches
        self._pictures_s = self._seen_s if load.patches else 0.0
        self._count, self._held, later = load.decodes, load.decode_tokens, load.later_decodes
        if ahead:
            self._count += load.expected_decodes
            self._held += load.expected_tokens
            later += load.expected_decodes
        self.full = status is not None and status.kv_used >= NEARLY_FULL
        if not ahead:
            self.full = load.nearly_full or self._room(self._count + 1, self._held) < 1.0
        # Seconds by which each token of a prompt delays the decodes there in all; none within a TPOT limit.
        self.stall_s = load.decodes * self._each_s if pace.limit_s == math.inf else 0.0
        self._step_s, self._share = 0.0, 1.0  # of the decodes there, and the time that they leave
        if self._count:
            self._step_s = step_s = self._decode_s(0, 0)[0]
            self._share = self._left(step_s)
            if later:  # none of them runs while the first prompt of the queue is computed, all at its end
                self._share += 0.5 * (1 - self._share) * later / self._count
        # Half of the step that runs.
        self._running_s = 0.5 * min(self._step_s + self._prompts_s, pace.limit_s)
        # Seconds by which the second token of a decode from another instance comes too late beside prompts here: it
        # waits for half of a full step and for one of its own.
        self.late_s = 0.0
        if ahead and load.expected_decodes:
            full_s, limit_s = self._step_s + pace.chunk_s, pace.limit_s
            copy_s = pace.kv_token_s * load.expected_tokens / load.expected_decodes
            self.late_s = copy_s + 1.5 * (full_s if full_s < limit_s else limit_s) - limit_s
        # Seconds of the copies that come first. Some of those that arrive wait for the step that runs or for their own.
        arriving_s = pace.kv_token_s * load.arriving_tokens - self._running_s - self._step_s
        self._arriving_s = arriving_s if arriving_s > 0.0 else 0.0
        self._pulls_s = self._arriving_s + (pace.kv_token_s * load.expected_tokens if ahead else 0.0)

    def encoded_s(self, patches: int) -> float:
        """Seconds until the instance would have encoded `patches` more."""
        own_s = self._seen_s + self._patch_s * patches
        contested_s = own_s + min(own_s, self._prompts_s)
        return contested_s / min(self._share, VISION_SHARE) if self._step_s else contested_s

    def prefilled_s(self, tokens: int, patches: int) -> float:
        """Seconds until the instance would have encoded `patches` and prefilled `tokens` of a request."""
        prompts_s = self._queue_s + self._each_s * tokens
        if patches:
            return (prompts_s + (self._seen_s + self._patch_s * patches)) / self._share
        pictures_s = self._pictures_s
        return (prompts_s + (pictures_s if pictures_s < prompts_s else prompts_s)) / self._share

    def prefilled_behind_s(self, tokens: int, features_s: float) -> float:
        """Seconds until the instance would have prefilled `tokens` whose features are there in `features_s` seconds."""
        queue_s = self.prefilled_s(tokens, 0)
        behind_s = features_s + (self._base_s + self._each_s * tokens) / self._share
        return behind_s if behind_s > queue_s else queue_s

    def delayed_s(self, tokens: int, first_s: float, left: int) -> float:
        """Seconds by which the decodes that come from other instances will be late in all while a prompt of `tokens` is
        computed here, whose first token comes in `first_s` seconds. Each has `left` tokens to come, as the prompt's own
        decode, and steps that are shorter than the limit make up for its second token."""
        late_s = self.late_s
        if left > 2:
            late_s -= (left - 2) * (self.load.pace.limit_s - self._step_s)
        return self.load.expected_decodes * late_s * self._each_s * tokens / first_s if late_s > 0.0 else 0.0

    def join(self, tokens: int, left: int, coming: float = 0.0) -> Decode:
        """Cost of a decode of `left` tokens if it joins those there with `tokens` tokens. As many prompts as wait now
        will take turns with it, but no more than `coming`: those that come to all instances in its time. Without a TPOT
        limit it delays those that wait now."""
        load, before_s, count = self.load, self._step_s, self._count
        limit_s = load.pace.limit_s
        after_s, turns = self._decode_s(1, tokens)
        own_s, more_s = turns * after_s, after_s - before_s
        late_s, slow_s = 0.0, left * (own_s + count * more_s)
        if limit_s == math.inf and (waits_s := self._prompts_s + self._pictures_s):
            slow_s += waits_s / self._left(after_s) - waits_s / self._share
        if load.prefill_tokens:
            waiting = load.prefill_tokens / tokens
            if waiting > coming:
                waiting = coming
            beside_s, chunk_s = waiting * after_s, load.pace.chunk_s
            if beside_s > chunk_s:
                beside_s = chunk_s
            if beside_s > limit_s - after_s:
                beside_s = limit_s - after_s if limit_s > after_s else 0.0
            slow_s += left * (turns * beside_s + waiting * more_s)
        if own_s > limit_s:
            others_s = max(0.0, after_s - limit_s) - max(0.0, before_s - limit_s)
            late_s = left * (own_s - limit_s + count * others_s)
        return late_s, slow_s, after_s

    def arrive(self, tokens: int, joined: Decode, ready_s: float = 0.0) -> Decode:
        """Cost of a decode that joins and comes from another instance: its second token waits for the copy of its KV,
        which is there in `ready_s` seconds, for the step that runs here, and for a step of its own. By then some of the
        copies that come first are done; those that come together wait for each other."""
        late_s, slow_s, step_s = joined
        pace, first_s = self.load.pace, self._pulls_s
        copy_s = pace.kv_token_s * tokens
        if first_s:
            if first_s < ready_s:
                busy, here_s = first_s / ready_s, self._arriving_s
                together_s = busy * (pace.chunk_s + copy_s) / (1 - busy)
                together_s = together_s if together_s > here_s else here_s
                first_s = together_s if together_s < first_s else first_s
            copy_s += first_s
        running_s = self._running_s
        if ready_s and self._prompts_s:  # by then some of the prompts are computed
            prompts_s = self._prompts_s - ready_s * self._share
            step_here_s = self._step_s + prompts_s if prompts_s > 0.0 else self._step_s
            running_s = 0.5 * (step_here_s if step_here_s < pace.limit_s else pace.limit_s)
        over_s = copy_s + running_s + step_s - pace.limit_s
        return late_s + over_s if over_s > 0.0 else late_s, slow_s + copy_s, step_s

    def _decode_s(self, more: int, tokens: int) -> tuple[float, float]:
        """Seconds of a step of the decodes there and `more` with `tokens` tokens, and in how many of those steps each
        of them gets a token: more than one where they have no room at once."""
        load = self.load
        rows, held = self._count + more, self._held + tokens
        base_s, each_s = load.pace.decode
        keys = held / load.pace.context
        if 0 < load.max_num_seqs < rows or 0 < load.kv_tokens < held:
            share = self._room(rows, held)
            return base_s + each_s * 0.5 * share * (rows + keys), 1 / share
        return base_s + each_s * 0.5 * (rows + keys), 1.0  # half by row, half by key

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


class Estimates:
    """The estimate of each instance, made anew when its load has changed. `ahead`: as for `Estimate`."""

    def __init__(self, *, ahead: bool) -> None:
        self._ahead = ahead
        self._made: dict[str, Estimate] = {}

    def current(self, load: InstanceLoad) -> Estimate:
        made = self._made.get(load.name)
        if made is None or made.load is not load or made.state != _state(load):
            made = self._made[load.name] = Estimate(load, self._ahead)
        return made
