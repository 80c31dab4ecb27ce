"""Pixel budgets: every family keeps to them and below its own maxima, and another resolution is another picture."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.options import SpecOptions
from hydra_engine.core.prompting import AS_CONFIGURED, LOW_DETAIL_PIXELS, PixelBudget
from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.qwen_vl.geometry_spec import PixelLimits, budgeted_size, max_image_tokens
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.calls import asked
from tests.preprocess.in_process import preprocessor_of
from tools.miniatures import make_tiny

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
TILED = ("llava_next", "internvl", "minicpmv", "minicpmv4_6")
FAMILIES = ("llava", *TILED, *QWEN)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_tiny(family, made[family], seed=1)
        return made[family]

    return of


def vision_of(path: Path, **options: Any) -> VisionSpec:
    vision = load_spec(path, SpecOptions(**options)).vision
    assert vision is not None
    return vision


def cases(seed: int) -> Iterator[tuple[int, int, PixelBudget]]:
    rng = random.Random(seed)

    def amount() -> int | None:
        return None if rng.random() < 0.3 else int(2 ** rng.uniform(0, 24))

    for _ in range(400):
        low, high = sorted((amount() or 1, amount() or 1 << 24))
        budget = PixelBudget(low if rng.random() < 0.5 else None, high if rng.random() < 0.7 else None)
        yield int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13)), budget


@pytest.mark.parametrize("family", FAMILIES)
def test_no_budget_makes_more_of_a_picture_than_the_maxima_say(directory: Any, family: str) -> None:
    """Caches and budgets of the scheduler reckon with these maxima."""
    vision = vision_of(directory(family))
    num_checked = 0
    for width, height, budget in cases(seed=5):
        try:
            default = vision.plan_image(width, height)
        except InvalidImage:
            with pytest.raises(InvalidImage):
                vision.plan_image(width, height, budget)
            continue
        num_checked += 1
        plan = vision.plan_image(width, height, budget)
        assert plan.num_tokens <= vision.max_tokens_per_image and plan.num_patches <= vision.max_patches_per_image
        assert all(0 < item.num_tokens <= vision.max_tokens_per_item for item in plan.items)
        assert vision.plan_image(width, height, AS_CONFIGURED) == default
        fewest = vision.plan_image(width, height, PixelBudget(max_pixels=1))
        assert fewest.num_patches <= default.num_patches
        if family == "llava":
            assert plan == default
    assert num_checked > 300


@pytest.mark.parametrize("family", (*TILED, *QWEN))
def test_a_smaller_budget_makes_less_of_a_large_picture(directory: Any, family: str) -> None:
    vision = vision_of(directory(family))
    patches = [vision.plan_image(900, 900, PixelBudget(max_pixels=1 << n)).num_patches for n in range(24, 0, -1)]
    assert patches == sorted(patches, reverse=True) and patches[0] > patches[-1]
    assert patches[0] == vision.plan_image(900, 900).num_patches


@pytest.mark.parametrize("family", (*TILED, *QWEN))
def test_a_larger_minimum_makes_more_of_a_small_picture(directory: Any, family: str) -> None:
    vision = vision_of(directory(family))
    tokens = [vision.plan_image(20, 20, PixelBudget(min_pixels=1 << n)).num_tokens for n in range(1, 24)]
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0]


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("limits", [(256, 2000), (256, 1024), (1000, 3000)])
def test_a_budget_is_what_the_same_setting_of_the_server_is(
    directory: Any, family: str, limits: tuple[int, int]
) -> None:
    """A picture that only just grows over its maximum by rounding is what they may differ in."""
    low, high = limits
    server = vision_of(directory(family), min_pixels=low, max_pixels=high)
    vision = vision_of(directory(family))
    for width, height in ((300, 200), (64, 64), (33, 900), (20, 31), (17, 16)):
        assert vision.plan_image(width, height, PixelBudget(low, high)) == server.plan_image(width, height)


def test_qwen_pictures_stay_below_what_a_request_asks_for() -> None:
    """Published limits: blocks of 28 pixels, at least 56 x 56 pixels, low detail."""
    limits = PixelLimits(56 * 56, 1280 * 28 * 28)
    low = AS_CONFIGURED.for_detail("low")
    for width, height in ((4000, 3000), (512, 512), (600, 450), (300, 2000)):
        wide, high = budgeted_size(width, height, 28, limits, low)
        assert wide * high <= LOW_DETAIL_PIXELS and wide % 28 == high % 28 == 0
        assert 0.85 < (wide / high) / (width / height) < 1.2
    assert budgeted_size(300, 200, 28, limits, low) == budgeted_size(300, 200, 28, limits, AS_CONFIGURED)
    # Enlarged to exactly the maximum, both sides rounded up, it would have more.
    exact = PixelBudget(1_000_000, 1_000_000)
    for width, height in ((300, 200), (31, 17), (1000, 1001)):
        wide, high = budgeted_size(width, height, 28, limits, exact)
        assert wide * high <= 1_000_000 and wide * high // 784 <= max_image_tokens(28, limits)
    assert budgeted_size(4000, 3000, 28, limits, PixelBudget(max_pixels=1)) == (28, 28)


def test_tiled_families_show_one_view_at_low_detail(directory: Any) -> None:
    """Published sizes: tiles of 448 or 336 pixels."""
    from hydra_engine.models.internvl.spec import arrangements_of
    from hydra_engine.models.llava_next.spec import PINPOINTS
    from hydra_engine.models.minicpmv.slicing_spec import Slicing
    from hydra_engine.models.specs.vision import within_budget

    low = AS_CONFIGURED.for_detail("low")
    assert within_budget(arrangements_of(1, 12), low, 448 * 448) == [(1, 1)]
    assert within_budget(PINPOINTS, low) == [(672, 336), (336, 672)]
    assert within_budget(PINPOINTS, PixelBudget(min_pixels=1 << 30)) == [(672, 672)]
    assert Slicing(448, 28, 9).with_budget(low).grid(2000, 2000) is None
    assert Slicing(448, 28, 9).with_budget(PixelBudget(min_pixels=4 * 448 * 448)).grid(100, 100) == (2, 2)


@asynccontextmanager
async def preprocessor_at(path: Path) -> Any:
    preprocessor = preprocessor_of(load_spec(path), load_tokenizer(path), MediaConfig(), max_model_len=512)
    try:
        yield preprocessor
    finally:
        await preprocessor.close()


def message(data: bytes, *details: str | None) -> list[dict[str, Any]]:
    more = ({} if detail is None else {"detail": detail} for detail in details)
    return [{"role": "user", "content": [{"type": "image", "image": data, **one} for one in more]}]


@pytest.mark.quick("llava", "qwen3_vl")
@pytest.mark.parametrize("family", ("llava", "internvl", "qwen2_vl", "qwen3_vl"))
async def test_another_resolution_is_another_picture(
    directory: Any, family: str, encoded: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low detail is made smaller here, because miniatures are below it anyway."""
    monkeypatch.setattr("hydra_engine.core.prompting.LOW_DETAIL_PIXELS", 1024)
    data = encoded()
    async with preprocessor_at(directory(family)) as preprocessor:
        pictures = message(data, None, "auto", "high", "low")
        prepared = await preprocessor.prepare(RequestId(1), asked(messages=pictures, max_tokens=1))
        by_picture: list[set[bytes]] = [set() for _ in range(4)]
        tokens = [0] * 4
        for image in prepared.request.images:
            by_picture[image.source].add(image.digest)
            tokens[image.source] += image.num_tokens
        assert by_picture[0] == by_picture[1] == by_picture[2] and tokens[0] == tokens[1] == tokens[2]
        if family == "llava":
            assert by_picture[3] == by_picture[0] and tokens[3] == tokens[0]
        else:
            assert not by_picture[3] & by_picture[0] and tokens[3] < tokens[0]
        spans = {(image.start, image.num_tokens) for image in prepared.request.images}
        placeholder = preprocessor._spec.image_token_id
        assert prepared.request.prompt_token_ids.count(placeholder) == sum(count for _, count in spans) == sum(tokens)
        budget = PixelBudget(max_pixels=1024)
        call = asked(messages=message(data, None), max_tokens=1, pixels=budget)
        small = await preprocessor.prepare(RequestId(2), call)
        assert {image.digest for image in small.request.images} == by_picture[3]
        call = asked("x", images=Image.open(io.BytesIO(data)), max_tokens=1, pixels=budget)
        again = await preprocessor.prepare(RequestId(3), call)
        assert again.request.num_image_tokens == tokens[3]


def test_budgets_are_checked() -> None:
    for wrong in ({"min_pixels": 0}, {"max_pixels": 1 << 40}, {"max_pixels": True}, {"max_pixels": 1.5}):
        with pytest.raises(InvalidRequest) as caught:
            PixelBudget(**wrong)  # type: ignore[arg-type]
        assert caught.value.param in wrong
    with pytest.raises(InvalidRequest, match="exceed"):
        PixelBudget(2, 1)
