"""What steps cost on one machine: a small fitted model of measured seconds, alone and with both lanes busy.

A language step costs a monotone piecewise linear function of its rows, plus a price per decode, per key that its
decodes read, per (query, key) pair of its chunks and per chunk. A vision step costs the same kind of function of its
patches, plus a price per pair of patches that see each other. While both lanes run, each is slowed by a factor, on a
divided device by that of the partition. Measured by `profiler/calibrate.py`, evaluated by `scheduler/budget.py`. Does
not know requests, limits or the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LanguageLoad:
    """What one language step computes."""

    num_decodes: int = 0
    decode_context: int = 0  # keys that the decodes read, all together, and chunks of one token, which cost the same
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0  # (query, key) pairs of larger chunks: for each, n * start + n * (n + 1) / 2
    num_chunks: int = 0  # larger ones

    @property
    def num_rows(self) -> int:
        """Tokens that go through every matrix."""
        return self.num_decodes + self.prefill_tokens


@dataclass(frozen=True, slots=True)
class VisionLoad:
    """What one vision step computes: patches, and pairs of patches that see each other under full attention, which is
    the sum of the squares of the images' patches."""

    num_patches: int = 0
    pairs: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A monotone piecewise linear function through (knots[i], seconds[i]); beyond the last knot its last slope goes on,
    before the first one it is constant. `knots` ascend."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, amount: float) -> float:
        knots, seconds = self.knots, self.seconds
        if amount <= knots[0] or len(knots) == 1:
            return seconds[0]
        index = bisect_left(knots, amount, 1, len(knots) - 1)
        low, high = knots[index - 1], knots[index]
        share = (amount - low) / (high - low)
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """While both lanes run, each on its part of a divided device: factors as those of `CostSurface`, over steps that
    have the whole device."""

    decode: float
    prefill: float
    vision: float


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Seconds. `language_error` and `vision_error` bound 90 % of the relative residuals of the fit; `corun_error` those
    of co-running steps."""

    rows: Curve  # of a language step, by its rows
    per_key_s: float
    per_pair_s: float
    per_chunk_s: float
    patches: Curve  # of a vision step, by its patches
    per_patch_pair_s: float
    decode_slowdown: float = 1.0  # of a step of decodes while the vision lane runs, at least 1
    prefill_slowdown: float = 1.0  # of what chunks add
    vision_slowdown: float = 1.0  # of a vision step while the language lane runs
    language_error: float = 0.0
    vision_error: float = 0.0
    corun_error: float = 0.0
    per_decode_s: float = 0.0  # what a decode costs more than a token of a chunk: its logits and its sampling
    splits: tuple[Slowdowns, ...] = ()  # of the device's partitions from 1 on; partition 0 is the undivided device

    def on(self, partition: int) -> CostSurface:
        """With the slowdowns of a partition, where the device is divided."""
        if not partition or not self.splits:
            return self
        split = self.splits[partition - 1]
        return replace(self, decode_slowdown=split.decode, prefill_slowdown=split.prefill, vision_slowdown=split.vision)

    def language_s(self, load: LanguageLoad) -> float:
        """A step that has the machine to itself."""
        keys_s = self.per_key_s * load.decode_context + self.per_pair_s * load.prefill_pairs
        samples_s = self.per_decode_s * load.num_decodes + self.per_chunk_s * load.num_chunks
        return self.rows.at(load.num_rows) + keys_s + samples_s

    def vision_s(self, load: VisionLoad) -> float:
        return self.patches.at(load.num_patches) + self.per_patch_pair_s * load.pairs

    def slowdown(self, load: LanguageLoad) -> float:
        """Factor of a language step beside which the vision lane runs all along: that of decodes and that of chunks,
        weighted by what they cost alone."""
        if not load.prefill_tokens:
            return self.decode_slowdown
        decodes = LanguageLoad(load.num_decodes, load.decode_context)
        share = self.language_s(decodes) / self.language_s(load) if load.num_decodes else 0.0
        return share * self.decode_slowdown + (1 - share) * self.prefill_slowdown

    def corun_s(self, load: LanguageLoad, vision_s: float) -> float:
        """A language step beside which the vision lane runs for `vision_s` seconds, or all along if that is longer.

        Beside vision it advances at 1 / slowdown of its speed: t = alone + v (1 - 1 / slowdown) for v <= t.
        """
        alone, factor = self.language_s(load), self.slowdown(load)
        return min(alone * factor, alone + vision_s * (1 - 1 / factor))
