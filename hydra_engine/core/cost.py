"""The cost model of one machine: fitted functions of measured seconds, for each lane alone and for both together.

A language step costs a monotone piecewise linear function of its rows, plus a price per decode, per key that its
decodes read, per (query, key) pair of its chunks and per chunk. A vision step costs such a function of its patches,
plus a price per pair of patches in one attention. While both lanes run, each is slowed by a factor; on a divided device
the factors depend on the partition. Measured by `profiler/calibrate.py`, evaluated by `scheduler/latency/`. Does not
know requests, limits or the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from hydra_engine.core.plans import LanguageLoad, VisionLoad


@dataclass(frozen=True, slots=True)
class Curve:
    """A monotone piecewise linear function through (knots[i], seconds[i]), `knots` ascending; constant before the first
    knot, and continued beyond the last one with its last slope."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]

    def interpolate(self, amount: float) -> float:
        knots, seconds = self.knots, self.seconds
        if amount <= knots[0] or len(knots) == 1:
            return seconds[0]
        index = bisect_left(knots, amount, 1, len(knots) - 1)
        low, high = knots[index - 1], knots[index]
        share = (amount - low) / (high - low)
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Factors by which steps are slowed while both lanes run, each on its part of a divided device, relative to steps
    that have the whole device."""

    decode: float
    prefill: float
    vision: float


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Costs in seconds. Error bars: `language_error` and `vision_error` bound 90 % of the relative residuals of the fit
    of a lane alone, `corun_error` the same of both lanes together."""

    rows: Curve  # seconds of a language step by its rows
    per_key_s: float
    per_pair_s: float
    per_chunk_s: float
    patches: Curve  # seconds of a vision step by its patches
    per_patch_pair_s: float
    decode_slowdown: float = 1.0  # factor on decodes while the vision lane runs, at least 1
    prefill_slowdown: float = 1.0  # factor on the time that chunks add
    vision_slowdown: float = 1.0  # factor on a vision step while the language lane runs
    language_error: float = 0.0
    vision_error: float = 0.0
    corun_error: float = 0.0
    per_decode_s: float = 0.0  # extra cost of a decode over a token of a chunk: logits and sampling
    splits: tuple[Slowdowns, ...] = ()  # slowdowns of partitions 1, 2, ..; partition 0 is the undivided device

    def for_partition(self, partition: int) -> CostSurface:
        """The surface with the slowdowns of a partition; self for partition 0 or an undivided device."""
        if not partition or not self.splits:
            return self
        split = self.splits[partition - 1]
        return replace(self, decode_slowdown=split.decode, prefill_slowdown=split.prefill, vision_slowdown=split.vision)

    def language_s(self, load: LanguageLoad) -> float:
        """Seconds of a language step with the machine to itself."""
        keys_s = self.per_key_s * load.decode_context + self.per_pair_s * load.prefill_pairs
        samples_s = self.per_decode_s * load.num_decodes + self.per_chunk_s * load.num_chunks
        return self.rows.interpolate(load.num_rows) + keys_s + samples_s

    def vision_s(self, load: VisionLoad) -> float:
        return self.patches.interpolate(load.num_patches) + self.per_patch_pair_s * load.pairs

    def slowdown(self, load: LanguageLoad) -> float:
        """Factor of a language step with vision beside it all along: the factors of decodes and of chunks, weighted by
        their cost alone."""
        if not load.prefill_tokens:
            return self.decode_slowdown
        decodes = LanguageLoad(load.num_decodes, load.decode_context)
        share = self.language_s(decodes) / self.language_s(load) if load.num_decodes else 0.0
        return share * self.decode_slowdown + (1 - share) * self.prefill_slowdown

    def corun_s(self, load: LanguageLoad, vision_s: float) -> float:
        """Seconds of a language step with the vision lane beside it for `vision_s` seconds, or all along if that is
        longer.

        Beside vision it advances at 1 / slowdown of its speed: t = alone + v (1 - 1 / slowdown) for v <= t.
        """
        alone, factor = self.language_s(load), self.slowdown(load)
        return min(alone * factor, alone + vision_s * (1 - 1 / factor))
