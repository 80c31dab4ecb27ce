"""The steps to measure, in order: a coarse grid that is enough for a fit, then the rest.

Pure functions from the sizes of one instance to points. Knows neither plans nor lanes nor time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.models.specs.base import ItemPlan, VisionSpec

SHORT_CONTEXT = 32
MIN_CHUNK = 16
_SHAPE_RATIO = 1.9  # of patches between neighbouring shapes at least
_SIDES = (28, 56, 84, 112, 168, 224, 336, 448, 672, 896, 1344, 1792, 2688, 3584, 5376, 7168)  # pixels


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of one instance, which bound the grid. `kv_tokens`: cached tokens that the rows of a measured step may
    touch together. Each row has one of `max_num_seqs` slots."""

    max_num_seqs: int
    token_budget: int
    image_budget: int  # patches
    max_model_len: int
    kv_tokens: int
    block_size: int
    num_image_blocks: int
    image_block_size: int
    num_partitions: int = 1  # of the device, the undivided one included


@dataclass(frozen=True, slots=True)
class LanguagePoint:
    """A language step to measure: `num_decodes` decodes with `context` keys each, their own included, and chunks of
    (tokens, start)."""

    num_decodes: int = 0
    context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def load(self) -> LanguageLoad:
        return LanguageLoad(
            self.num_decodes,
            self.num_decodes * self.context,
            sum(count for count, _ in self.chunks),
            sum(count * start + count * (count + 1) / 2 for count, start in self.chunks),
            len(self.chunks),
        )

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row after the step."""
        return [self.context] * self.num_decodes + [start + count for count, start in self.chunks]

    @property
    def work(self) -> float:
        """A rough measure that grows with the step's time, to estimate steps before they are measured."""
        return self.load.num_rows + sum(self.lengths) / 256


@dataclass(frozen=True, slots=True)
class VisionPoint:
    """A vision step to measure: `count` spans of one shape, cut from pictures of size `source` (width, height)."""

    item: ItemPlan
    source: tuple[int, int]
    count: int = 1

    @property
    def load(self) -> VisionLoad:
        patches = self.item.num_patches
        return VisionLoad(self.count * patches, float(self.count * patches**2))

    @property
    def work(self) -> float:
        return self.load.num_patches + self.load.pairs / 4096


@dataclass(frozen=True, slots=True)
class CorunPoint:
    """Steps of both lanes, repeated side by side on a partition of the device."""

    language: LanguagePoint
    vision: VisionPoint
    partition: int = 0


Point = LanguagePoint | VisionPoint | CorunPoint


@dataclass(frozen=True, slots=True)
class Grid:
    """The points to measure. `coarse` has the ends of every axis, and decodes and a chunk beside vision on every
    partition."""

    coarse: tuple[Point, ...]
    rest: tuple[Point, ...]


def make_grid(sizes: Sizes, vision: VisionSpec | None) -> Grid:
    """Builds the grid of one instance. `vision` None: language points only."""
    decodes, plain, behind = _decodes(sizes), _plain_chunks(sizes), _chunks_behind(sizes)
    mixed = _mixed(sizes)
    pictures = [] if vision is None else _pictures(sizes, vision)
    corun: list[CorunPoint] = []
    divided: list[CorunPoint] = []
    if pictures:
        single = [point for point in pictures if point.count == 1]
        middle = single[(len(single) - 1) // 2]
        beside = [
            decodes[len(decodes) // 2],
            plain[len(plain) // 2],
            decodes[0],
            decodes[-1],
            plain[0],
            plain[-1],
            *mixed[::3],
        ]
        corun = [CorunPoint(point, middle) for point in beside]
        parts = range(1, sizes.num_partitions)
        divided = [CorunPoint(point, middle, partition) for partition in parts for point in beside[:2]]
    cheapest = next(point for point in decodes if point.num_decodes == decodes[-1].num_decodes)
    ends = [decodes[0], cheapest, decodes[-1], plain[0], plain[-1], *behind[-1:]]
    coarse: list[Point] = [*ends, *pictures[:1], *corun[:2], *divided, *pictures[-1:]]
    every: list[Point] = [*coarse, *decodes, *plain, *behind, *mixed, *pictures, *corun]
    first = tuple(dict.fromkeys(coarse))
    return Grid(first, tuple(dict.fromkeys(every))[len(first) :])


def powers(first: int, last: int) -> list[int]:
    """Returns [first, 2 * first, .., last], ascending. `first` is at most `last`."""
    amounts = []
    while first < last:
        amounts.append(first)
        first *= 2
    return [*amounts, last]


def _decodes(sizes: Sizes) -> list[LanguagePoint]:
    """Decode points by rows, then by context: short, middle and the longest that the cache holds."""
    points = []
    for rows in powers(1, sizes.max_num_seqs):
        blocks = sizes.kv_tokens // rows // sizes.block_size
        longest = min(sizes.max_model_len, blocks * sizes.block_size)
        if longest < 1:
            break
        short = min(SHORT_CONTEXT, longest)
        middle = round((short * longest) ** 0.5)
        points += [LanguagePoint(rows, context) for context in sorted({short, middle, longest})]
    return points


def _plain_chunks(sizes: Sizes) -> list[LanguagePoint]:
    """Prefill points from position 0: every amount in one chunk, or as many as it needs, and large amounts in two.
    Sorted by work."""
    longest = min(sizes.max_model_len, sizes.kv_tokens)
    least = min(MIN_CHUNK, sizes.token_budget, longest)
    amounts = powers(least, sizes.token_budget)
    points = [LanguagePoint(chunks=_cut(n, longest)) for n in amounts]
    points += [LanguagePoint(chunks=((n // 2, 0),) * 2) for n in amounts[2::2] if n // 2 <= longest]
    fitting = [point for point in dict.fromkeys(points) if _fits(point, sizes)]
    return sorted(fitting, key=lambda point: point.work)


def _chunks_behind(sizes: Sizes) -> list[LanguagePoint]:
    """Prefill points after a cached context: some amounts, each after a middle and after the longest context."""
    points = []
    for count in powers(min(MIN_CHUNK, sizes.token_budget), sizes.token_budget)[::2]:
        last = min(sizes.max_model_len, sizes.kv_tokens) - count
        points += [LanguagePoint(chunks=((count, start),)) for start in (last // 8, last) if start >= SHORT_CONTEXT]
    return [point for point in points if _fits(point, sizes)]


def _mixed(sizes: Sizes) -> list[LanguagePoint]:
    """Chunks beside decodes that hold half of the cache."""
    points = []
    most = sizes.max_num_seqs - 1
    for rows in sorted({min(n, most) for n in (1, 8, most)} - {0}):
        blocks = sizes.kv_tokens // (2 * rows) // sizes.block_size
        context = min(sizes.max_model_len, blocks * sizes.block_size)
        left = sizes.token_budget - rows
        for count in sorted({min(n, left) for n in (64, 256, left)}):
            if count > 0 and context > 0:
                points.append(LanguagePoint(rows, context, _cut(count, sizes.max_model_len)))
    return [point for point in points if _fits(point, sizes)]


def _cut(count: int, longest: int) -> tuple[tuple[int, int], ...]:
    whole, left = divmod(count, longest)
    return ((longest, 0),) * whole + (((left, 0),) if left else ())


def _fits(point: LanguagePoint, sizes: Sizes) -> bool:
    blocks = sum(-(-length // sizes.block_size) for length in point.lengths)
    return len(point.lengths) <= sizes.max_num_seqs and blocks * sizes.block_size <= sizes.kv_tokens


def _pictures(sizes: Sizes, vision: VisionSpec) -> list[VisionPoint]:
    """Vision points, sorted by patches: one span of every shape, and 2, 4, .. spans of the smallest and of a middle
    shape. All fit the image cache."""
    shapes = _shapes(sizes, vision)
    points = [VisionPoint(item, source) for item, source in shapes]
    for item, source in dict.fromkeys([*shapes[:1], *shapes[len(shapes) // 2 :][:1]]):
        held = sizes.num_image_blocks // _image_blocks(item, sizes)
        most = max(1, min(held, sizes.image_budget // item.num_patches))
        points += [VisionPoint(item, source, count) for count in powers(1, most)]
    return sorted(dict.fromkeys(points), key=lambda point: point.load.num_patches)


def _shapes(sizes: Sizes, vision: VisionSpec) -> list[tuple[ItemPlan, tuple[int, int]]]:
    """Spans of square pictures, sorted by patches, from the smallest to the largest shape; those between are at least
    `_SHAPE_RATIO` times the one before."""
    by_patches: dict[int, tuple[ItemPlan, tuple[int, int]]] = {}
    for side in _SIDES:
        for item in vision.plan_image(side, side).items:
            if _image_blocks(item, sizes) <= sizes.num_image_blocks:
                by_patches.setdefault(item.num_patches, (item, (side, side)))
    kept: list[int] = []
    for patches in sorted(by_patches):
        if not kept or patches >= _SHAPE_RATIO * kept[-1]:
            kept.append(patches)
    largest = max(by_patches, default=0)
    if len(kept) > 1:
        kept[-1] = largest
    elif kept and kept[0] < largest:
        kept.append(largest)
    return [by_patches[patches] for patches in kept]


def _image_blocks(item: ItemPlan, sizes: Sizes) -> int:
    return -(-item.num_tokens // sizes.image_block_size)
