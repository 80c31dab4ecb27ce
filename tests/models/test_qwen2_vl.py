"""Qwen2-VL and Qwen2.5-VL beyond what every family shares: windows, order of patches, formulas, names of weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import Role
from hydra_engine.models.build import build_model
from hydra_engine.models.layers.vision import Grid, sizes_of
from hydra_engine.models.qwen_vl.model import cut_windows, patch_places
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.families.base import Pair, clip, picture, words
from tests.models.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL, inputs
from tools.miniatures.base import BOS_ID

CASES = {case.family: case for case in (QWEN2_VL, QWEN2_5_VL)}
GRIDS: list[Grid] = [(1, 2, 2), (1, 10, 6), (1, 2, 24), (1, 12, 12), (1, 14, 4)]


@pytest.mark.parametrize("merge", [1, 2])
def test_patches_stand_block_by_block(merge: int) -> None:
    expected = [
        (row * merge + inner_row, column * merge + inner_column)
        for _, rows, columns in GRIDS
        for row in range(rows // merge)
        for column in range(columns // merge)
        for inner_row in range(merge)
        for inner_column in range(merge)
    ]
    places = np.concatenate([patch_places(rows, columns, merge) for _, rows, columns in GRIDS], axis=1)
    assert [tuple(place) for place in places.T.tolist()] == expected
    assert sizes_of(GRIDS) == [4, 60, 48, 144, 56]


@pytest.mark.parametrize("side", [1, 2, 3, 4, 100])
def test_windows_cover_every_picture_from_its_upper_left_corner(side: int) -> None:
    order: list[int] = []
    sizes = []
    first = 0
    for _, rows, columns in GRIDS:
        height, width = rows // 2, columns // 2
        for top, left in itertools.product(range(0, height, side), range(0, width, side)):
            inside = [
                first + row * width + column
                for row in range(top, min(top + side, height))
                for column in range(left, min(left + side, width))
            ]
            order += inside
            sizes.append(4 * len(inside))
        first += height * width
    windows = cut_windows(GRIDS, 2, side)
    assert windows.order.tolist() == order
    assert windows.sizes.tolist() == sizes


@pytest.mark.parametrize("family", CASES)
def test_a_span_has_the_same_features_in_every_batch(
    family: str, checkpoint: CheckpointFactory, backend: Backend
) -> None:
    """Bits are equal: pictures of all sizes and the frames of a video, alone, together, and in another order."""
    pair = Pair(CASES[family], "plain", checkpoint(f"{family}-batch", family), backend)
    media = [*(picture(size) for size in (*CASES[family].sizes, *CASES[family].extreme)), clip((50, 40), 5, 1.0)]
    spans = pair.spans(media)
    assert len(spans) == 8
    together = [pair.driver.features(slots) for slots in pair.driver.encode(spans)]
    backwards = [pair.driver.features(slots) for slots in pair.driver.encode(spans[::-1])][::-1]
    for span, rows, other in zip(spans, together, backwards, strict=True):
        (slots,) = pair.driver.encode([span])
        assert torch.equal(pair.driver.features(slots), rows) and torch.equal(other, rows)


@pytest.mark.parametrize("family", CASES)
def test_a_picture_is_a_video_of_two_equal_frames(family: str, checkpoint: CheckpointFactory) -> None:
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    pair = Pair(CASES[family], "plain", checkpoint(f"{family}-batch", family), backend)
    (span,) = pair.spans([picture((40, 32))])
    twice = span._replace(pixels=span.pixels.expand(2, -1, -1, -1).contiguous())
    one, two = pair.driver.encode([span, twice])
    assert torch.equal(pair.driver.features(one), pair.driver.features(two))


@pytest.mark.parametrize(
    ("family", "variant"), [(case.family, variant) for case in CASES.values() for variant in case.variants]
)
def test_parameter_counts(family: str, variant: str, checkpoint: CheckpointFactory) -> None:
    directory = checkpoint(f"{family}-{variant}", family, **CASES[family].variants[variant])
    spec = load_spec(directory)
    assert spec.vision is not None
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(directory))
    tower = sum(p.numel() for p in model.model.visual.parameters())
    assert spec.vision.num_parameters() == tower
    assert spec.language.num_parameters() == sum(p.numel() for p in model.parameters()) - tower
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops
    for role, expected in (("E", tower), ("D", spec.language.num_parameters())):
        slots = build_model(spec, ops, torch.float32, Role.parse(role)).slots
        assert sum(torch.Size(slot.shape).numel() for slot in slots.values() if not slot.optional) == expected


@pytest.mark.parametrize("family", CASES)
def test_flops_are_those_that_torch_counts(family: str, checkpoint: CheckpointFactory) -> None:
    directory = checkpoint(f"{family}-batch", family)
    vision = load_spec(directory).vision
    assert vision is not None
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    values = inputs(directory, [picture((48, 48))])  # two by two whole windows in Qwen2.5-VL
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        model.get_image_features(values["pixel_values"], values["image_grid_thw"])
    (item,) = vision.plan_image(48, 48).items
    assert vision.flops(item.num_patches) == counted.get_total_flops()


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_in_memory_and_as_published(
    family: str, tied: bool, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """`save_pretrained` writes the published names; other tools write those that transformers 5 has in memory."""
    source = checkpoint(f"{family}-names-{tied}", family, tie_word_embeddings=tied)
    published = load_file(source / "model.safetensors")
    assert {name.split(".")[0] for name in published} == {"visual", "model"} | (set() if tied else {"lm_head"})
    renamed = {}
    for name, tensor in published.items():
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model."):
            name = name.replace("model.", "model.language_model.", 1)
        renamed[name] = tensor
    for file in source.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(renamed, tmp_path / "model.safetensors")
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    ids = [BOS_ID, *words(3, 9)]
    first, second = (
        driver.run(driver.request(ids), []) for driver in (Driver(source, backend), Driver(tmp_path, backend))
    )
    assert torch.equal(first, second)
