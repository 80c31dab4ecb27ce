import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hydra_engine.models.specs.base import ItemPlan, MediaPlan, PreprocessSpec, View
from hydra_engine.preprocess.media.images import num_bytes, render
from hydra_engine.preprocess.media.opening import content_of_file, content_of_image, payloads_of, plan_digest

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SPEC = PreprocessSpec("bicubic", 1 / 255, MEAN, STD, "test")
Picture = Callable[..., Image.Image]


def cropped(width: int, height: int, shortest: int, crop_width: int, crop_height: int) -> View:
    """The middle of the picture after its shorter side became `shortest`."""
    short, long = min(width, height), max(width, height)
    other = int(shortest * long / short)
    resized = (shortest, other) if width <= height else (other, shortest)
    corner = (-((resized[0] - crop_width) // 2), -((resized[1] - crop_height) // 2))
    return View(resized, (crop_width, crop_height), corner, (crop_width, crop_height))


def item(width: int, height: int, count: int = 1) -> ItemPlan:
    return ItemPlan(width, height, count, 1, 1, (1, 1, 1))


def array(view: View, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(view.num_tiles, view.tile[1], view.tile[0], 3)


def sizes() -> list[tuple[int, int]]:
    rng = random.Random(7)
    special = [(1, 1), (1, 7), (7, 1), (2, 3), (27, 28), (31, 639), (84, 84), (83, 85), (85, 83), (1, 150), (640, 480)]
    return special + [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(30)]


@pytest.mark.parametrize(("shortest", "crop_width", "crop_height"), [(84, 84, 84), (56, 84, 70), (30, 21, 63)])
def test_a_crop_of_the_middle_equals_that_of_transformers(
    picture: Picture, shortest: int, crop_width: int, crop_height: int
) -> None:
    """The second and third crop are larger than the resized picture: zeros around it."""
    oracle = CLIPImageProcessorPil(
        size={"shortest_edge": shortest}, crop_size={"height": crop_height, "width": crop_width}
    )
    for width, height in sizes():
        image = picture(width, height, seed=width)
        view = cropped(width, height, shortest, crop_width, crop_height)
        plain = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        mine = array(view, render([image], [view], "bicubic"))[0]
        assert np.array_equal(mine.transpose(2, 0, 1), plain), (width, height)


@pytest.mark.parametrize("resample", ["bilinear", "lanczos", "nearest", "box"])
def test_other_filters_are_those_of_transformers(picture: Picture, resample: str) -> None:
    oracle = CLIPImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        resample=getattr(Image.Resampling, resample.upper()),
    )
    image, view = picture(61, 47), cropped(61, 47, 28, 28, 28)
    plain = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
    assert np.array_equal(array(view, render([image], [view], resample))[0].transpose(2, 0, 1), plain)


def test_a_stretched_picture_equals_that_of_transformers(picture: Picture) -> None:
    oracle = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 1 << 30})
    for width, height in ((100, 60), (61, 47), (300, 200)):
        image = picture(width, height)
        made = oracle(image, do_rescale=False, do_normalize=False, return_tensors="np")
        _, rows, columns = made["image_grid_thw"][0]
        view = View.whole(int(columns) * 14, int(rows) * 14)
        # Patches come in squares of 2 x 2, each [channel, frame, 14, 14]; both frames are the picture.
        patches = made["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[..., 0, :, :]
        plain = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)
        assert np.array_equal(array(view, render([image], [view], "bicubic"))[0], plain)


def test_views_are_cut_into_tiles_row_by_row(picture: Picture) -> None:
    image = picture(50, 40)
    views = [View.whole(20, 30), View((50, 24), (60, 40), (4, 9), (20, 20))]
    canvas = Image.new("RGB", (60, 40))
    canvas.paste(image.resize((50, 24), Image.Resampling.BICUBIC), (4, 9))
    tiles = [canvas.crop((x, y, x + 20, y + 20)) for y in (0, 20) for x in (0, 20, 40)]
    expected = [image.resize((20, 30), Image.Resampling.BICUBIC), *tiles]
    data = render([image], views, "bicubic")
    assert data == b"".join(tile.tobytes() for tile in expected) and num_bytes(views) == len(data)


def test_a_canvas_may_lie_anywhere_on_the_picture_or_beside_it(picture: Picture) -> None:
    image = picture(30, 20)
    resized = image.resize((24, 16), Image.Resampling.BICUBIC)
    for left, top in itertools.product((-30, -24, -23, -5, 0, 3, 11, 12), (-16, -15, -1, 0, 2, 14, 15)):
        canvas = Image.new("RGB", (12, 15))
        canvas.paste(resized, (left, top))
        view = View((24, 16), (12, 15), (left, top), (12, 15))
        assert render([image], [view], "bicubic") == canvas.tobytes(), (left, top)


def test_every_view_names_its_source(picture: Picture) -> None:
    frames = [picture(30, 20, seed=seed) for seed in range(3)]
    views = [View.whole(16, 16, source) for source in (2, 0, 0, 1)]
    one_by_one = [render([frames[view.source]], [View.whole(16, 16)], "bilinear") for view in views]
    assert render(frames, views, "bilinear") == b"".join(one_by_one)


def test_a_source_that_is_missing_is_a_fault_of_ours(picture: Picture) -> None:
    """Memory for pixels is shared by many requests: nothing may stay there unwritten."""
    for sources, view in (([], View.whole(8, 8)), ([picture(9, 9)], View.whole(8, 8, 1))):
        with pytest.raises(IndexError):
            render(sources, [view], "bicubic")


# ---- payloads


def test_every_item_gets_its_pictures(picture: Picture) -> None:
    views = (View.whole(6, 4), View((12, 8), (12, 8), (0, 0), (6, 4)), View.whole(8, 8))
    plan = MediaPlan(views, ("<row>", item(6, 4, 3), "\n", item(6, 4, 2), item(8, 8)))
    image = picture(20, 10)
    data = render([image], views, "bicubic")
    made = payloads_of(render([image], plan.views, SPEC.resample), b"c" * 32, plan, SPEC)
    assert made == payloads_of(data, b"c" * 32, plan, SPEC)
    assert [(p.width, p.height, p.count) for p in made] == [(6, 4, 3), (6, 4, 2), (8, 8, 1)]
    assert b"".join(p.data for p in made) == data
    assert [len(p.data) for p in made] == [p.count * p.width * p.height * 3 for p in made]
    assert len({p.digest for p in made}) == 3


def test_pixels_of_a_single_item_are_not_copied() -> None:
    data = bytes(12)
    (payload,) = payloads_of(data, b"", MediaPlan((View.whole(2, 2),), (item(2, 2),)), SPEC)
    assert payload.data is data


def test_data_of_another_size_is_a_fault_of_ours() -> None:
    plan = MediaPlan((View.whole(2, 2),), (item(2, 2),))
    for data in (bytes(11), bytes(13), b""):
        with pytest.raises(AssertionError):
            payloads_of(data, b"", plan, SPEC)


def digest_of(content: bytes = b"c" * 32, plan: MediaPlan | None = None, spec: PreprocessSpec = SPEC) -> bytes:
    plan = plan or MediaPlan((View.whole(2, 6),), (item(2, 6),))
    return payloads_of(bytes(num_bytes(plan.views)), content, plan, spec)[0].digest


def test_the_digest_follows_from_source_views_and_identity() -> None:
    base = View((2, 6), (2, 6), (0, 0), (2, 6))
    others = [
        base._replace(resize=(3, 6)),
        base._replace(resize=(2, 7)),
        base._replace(corner=(-1, 0)),
        base._replace(corner=(0, 1)),
        base._replace(source=1),
    ]
    digests = [digest_of(plan=MediaPlan((view,), (item(2, 6),))) for view in (base, *others)]
    digests += [digest_of(b"d" * 32), digest_of(spec=replace(SPEC, identity="test2"))]
    digests += [digest_of(spec=replace(SPEC, resample="box"))]
    digests += [digest_of(plan=MediaPlan((base,), (item(2, 3, 2),)))]
    digests += [digest_of(plan=MediaPlan((base,), (item(2, 6)._replace(grid=(1, 2, 3)),)))]
    assert len(set(digests)) == len(digests)
    assert digests[0] == digest_of() and len(digests[0]) == 32


def test_parts_of_a_digest_cannot_run_together() -> None:
    plan = (View.whole(2, 6),)
    pairs = [("clip", b"1x"), ("clip1", b"x"), ("cli", b"p1x")]
    assert len({plan_digest(content, plan, replace(SPEC, identity=name)) for name, content in pairs}) == 3


def test_content_names_files_and_pictures(picture: Picture) -> None:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"file", b"abc"))
    assert content_of_file(b"abc") == hashlib.blake2b(framed, digest_size=32).digest()
    image = picture(12, 8)
    flat, grey = Image.frombytes("RGB", (8, 12), image.tobytes()), Image.frombytes("L", (36, 8), image.tobytes())
    contents = [content_of_file(image.tobytes()), *map(content_of_image, (image, flat, grey))]
    assert len(set(contents)) == 4 and content_of_image(image.copy()) == contents[1]
