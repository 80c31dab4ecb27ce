"""The grid holds nothing that the instance cannot run, and its first part is enough for a fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.models.specs.base import MediaPlan
from hydra_engine.profiler.grid import CorunPoint, LanguagePoint, Point, Sizes, VisionPoint, make_grid, powers
from tests.profiler.fakes import SIZES, SquareVision


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    block_size = draw(st.sampled_from([1, 4, 16]))
    return Sizes(
        max_num_seqs=draw(st.integers(1, 300)),
        token_budget=draw(st.integers(1, 4096)),
        image_budget=draw(st.integers(0, 5000)),
        max_model_len=draw(st.integers(2, 40_000)),
        kv_tokens=block_size * draw(st.integers(2, 5000)),
        block_size=block_size,
        num_image_blocks=draw(st.integers(1, 100)),
        image_block_size=draw(st.sampled_from([4, 64])),
    )


def parts(points: tuple[Point, ...]) -> tuple[list[LanguagePoint], list[VisionPoint]]:
    language = [p.language if isinstance(p, CorunPoint) else p for p in points if not isinstance(p, VisionPoint)]
    vision = [p.vision if isinstance(p, CorunPoint) else p for p in points if not isinstance(p, LanguagePoint)]
    return language, vision


@given(sizes())
def test_every_point_fits_the_instance(sizes: Sizes) -> None:
    grid = make_grid(sizes, SquareVision())
    language, vision = parts(grid.coarse + grid.rest)
    for point in language:
        assert len(point.lengths) <= sizes.max_num_seqs
        assert all(0 < length <= sizes.max_model_len for length in point.lengths)
        assert sum(-(-length // sizes.block_size) for length in point.lengths) * sizes.block_size <= sizes.kv_tokens
        assert all(count > 0 <= start for count, start in point.chunks)
        assert not point.chunks or point.load.num_rows <= sizes.token_budget
    for step in vision:
        blocks = step.count * -(-step.item.num_tokens // sizes.image_block_size)
        assert blocks <= sizes.num_image_blocks
        assert step.count == 1 or step.load.num_patches <= sizes.image_budget


@given(sizes())
def test_points_are_many_kinds_and_each_comes_once(sizes: Sizes) -> None:
    grid = make_grid(sizes, SquareVision())
    every = grid.coarse + grid.rest
    assert len(set(every)) == len(every)
    language, vision = parts(grid.coarse)
    assert any(point.num_decodes for point in language) and any(point.chunks for point in language) and vision


def test_the_smallest_and_the_largest_shape_are_measured_even_if_they_are_alike() -> None:
    class TwoShapes(SquareVision):
        def plan_image(self, width: int, height: int) -> MediaPlan:
            side = 4 * 28 if width < 448 else 5 * 28
            return super().plan_image(side, side)

    grid = make_grid(SIZES, TwoShapes())
    _, vision = parts(grid.coarse + grid.rest)
    assert {step.item.num_patches for step in vision} == {16, 25}


def test_the_ends_of_every_axis_come_first() -> None:
    grid = make_grid(SIZES, SquareVision())
    language, vision = parts(grid.coarse)
    everything, every_vision = parts(grid.coarse + grid.rest)
    for measure in ("num_decodes", "decode_context", "prefill_tokens", "prefill_pairs"):
        most = max(getattr(p.load, measure) for p in everything)
        assert max(getattr(p.load, measure) for p in language) >= 0.9 * most, measure
    assert max(p.load.num_patches for p in vision) == max(p.load.num_patches for p in every_vision) == 1024
    assert min(p.load.num_patches for p in vision) == 1
    corun = [p for p in grid.coarse if isinstance(p, CorunPoint)]
    assert [bool(p.language.num_decodes) for p in corun] == [True, False]


def test_axes_of_a_usual_instance() -> None:
    language, vision = parts(make_grid(SIZES, SquareVision()).rest + make_grid(SIZES, SquareVision()).coarse)
    assert {p.num_decodes for p in language if not p.chunks} == {1, 2, 4, 8, 16}
    assert {p.chunks for p in language if p.num_decodes == 0 and len(p.chunks) == 1 and not p.chunks[0][1]} == {
        ((n, 0),) for n in (16, 32, 64, 128, 256)
    }
    assert any(p.chunks and p.chunks[0][1] > 1000 for p in language)
    assert any(p.num_decodes and p.chunks for p in language)
    assert any(p.count > 1 for p in vision) and len({p.item for p in vision}) >= 5


def test_without_a_tower_only_language_is_measured() -> None:
    grid = make_grid(SIZES, None)
    assert all(isinstance(point, LanguagePoint) for point in grid.coarse + grid.rest)


def test_powers() -> None:
    assert powers(1, 10) == [1, 2, 4, 8, 10] and powers(16, 16) == [16] and powers(1, 8) == [1, 2, 4, 8]
