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
    """A monotone piecewise linear function through (knots[i], seconds[i]), `knots` ascending: constant before the first
    knot, and with the slope of the last piece beyond the last knot; constant with one knot."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]

    def interpolate(self, amount: float) -> float:
        """Seconds at `amount`, which has the unit of the knots."""
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
    of a lane alone, `corun_error` the residuals of steps while both lanes run."""

    rows: Curve  # seconds of a language step by its rows
    per_key_s: float  # per key that a decode reads
    per_pair_s: float  # per (query, key) pair of a chunk
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
        """The surface with the slowdowns of a partition; self for partition 0, and if no partitions were measured.
        Raises IndexError for an unknown one."""
        if not partition or not self.splits:
            return self
        split = self.splits[partition - 1]
        return replace(self, decode_slowdown=split.decode, prefill_slowdown=split.prefill, vision_slowdown=split.vision)

    def language_s(self, load: LanguageLoad) -> float:
        """Seconds of a language step while the vision lane is idle."""
        keys_s = self.per_key_s * load.decode_context + self.per_pair_s * load.prefill_pairs
        samples_s = self.per_decode_s * load.num_decodes + self.per_chunk_s * load.num_chunks
        return self.rows.interpolate(load.num_rows) + keys_s + samples_s

    def vision_s(self, load: VisionLoad) -> float:
        """Seconds of a vision step while the language lane is idle."""
        return self.patches.interpolate(load.num_patches) + self.per_patch_pair_s * load.pairs

    def slowdown(self, load: LanguageLoad) -> float:
        """Factor by which a language step is slower if vision runs beside it all along: the mean of the slowdowns of
        decodes and of chunks, weighted by their seconds without vision."""
        if not load.prefill_tokens:
            return self.decode_slowdown
        decodes = LanguageLoad(load.num_decodes, load.decode_context)
        share = self.language_s(decodes) / self.language_s(load) if load.num_decodes else 0.0
        return share * self.decode_slowdown + (1 - share) * self.prefill_slowdown

    def corun_s(self, load: LanguageLoad, vision_s: float) -> float:
        """Seconds t of a language step beside which the vision lane runs for `vision_s` seconds v, or all along if that
        is longer than the step. Meanwhile the step has 1 / slowdown of its speed, so t = alone + v (1 - 1 / slowdown)
        for v <= t.
        """
        alone, factor = self.language_s(load), self.slowdown(load)
        return min(alone * factor, alone + vision_s * (1 - 1 / factor))
