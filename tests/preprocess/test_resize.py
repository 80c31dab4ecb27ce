import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from hydra_engine import _C
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import RESAMPLING, Pixels, Window, describe, resize_into

FEATURES = {"scalar": None, "avx2": "avx2", "avx512": "avx512_vnni"}
LEVELS = [level for level, feature in FEATURES.items() if feature is None or feature in _C.cpu_features()]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.isa()
    _C.force_isa(request.param)
    yield request.param
    _C.force_isa(before)


def noise(width: int, height: int, seed: int) -> Pixels:
    generator = np.random.default_rng(seed)
    if seed % 2:  # only black and white: the largest sums, and overshoot that must be cut off
        return generator.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
    return generator.integers(0, 256, (height, width, 3), np.uint8)


def by_pillow(source: Pixels, size: tuple[int, int], resample: str) -> Pixels:
    return np.asarray(Image.fromarray(source).resize(size, RESAMPLING[resample]))


def resized(source: Pixels, size: tuple[int, int], resample: str, window: Window | None = None) -> Pixels:
    window = window or Window(0, 0, *size)
    out = np.full((window.height + 2, 3 * window.width + 2), 99, np.uint8)
    inner = np.lib.stride_tricks.as_strided(out[1:, 1:], (window.height, window.width, 3), (out.strides[0], 3, 1))
    resize_into(source, size, resample, window, inner)
    frame = (out[0], out[-1], out[:, 0], out[:, -1])
    assert all((edge == 99).all() for edge in frame), "written beside the window"
    return inner.copy()


def check(source: Pixels, size: tuple[int, int], resample: str, window: Window | None = None) -> None:
    expected = by_pillow(source, size, resample)
    if window is not None:
        left, top, width, height = window
        expected = expected[top : top + height, left : left + width]
    found = resized(source, size, resample, window)
    assert np.array_equal(found, expected), (source.shape, size, resample, window)


def test_every_bit_is_pillows(level: str) -> None:
    rng = random.Random(level)
    for step in range(1200):
        largest = 700 if step % 25 == 0 else 90
        sizes = [rng.choice([1, 2, 3, rng.randint(1, 20), rng.randint(1, largest)]) for _ in range(4)]
        source, size = noise(sizes[0], sizes[1], step), (sizes[2], sizes[3])
        left, top = rng.randrange(size[0]), rng.randrange(size[1])
        window = Window(left, top, rng.randint(1, size[0] - left), rng.randint(1, size[1] - top))
        check(source, size, rng.choice(list(RESAMPLING)), rng.choice([None, window]))


@pytest.mark.parametrize("resample", RESAMPLING)
def test_extreme_shapes(level: str, resample: str) -> None:
    shapes = [(1, 1), (1, 300), (300, 1), (2, 900), (900, 2), (64, 64)]
    for number, source in enumerate(shapes):
        for size in (*shapes, (1, 2), (65, 63), (128, 1)):
            check(noise(*source, number), size, resample)


def test_sizes_of_models(level: str) -> None:
    """Photos to the squares of CLIP and of Qwen, with the middle cut out, and to a grid of tiles."""
    for width, height in ((640, 480), (480, 640), (1280, 960)):
        source = noise(width, height, 0)
        check(source, (896, 896), "bicubic", Window(100, 0, 300, 250))
        short = 336 * max(width, height) // min(width, height)
        size = (short, 336) if width > height else (336, short)
        check(source, size, "bicubic", Window((size[0] - 336) // 2, (size[1] - 336) // 2, 336, 336))
        check(source, (672, 672), "bicubic", Window(336, 336, 336, 336))


def test_a_tall_picture_is_shrunk_down_before_across(level: str) -> None:
    """Pillow 13 does so; the other order differs in the last bit. At exactly twice as many rows less it does not."""
    for width, height, size in ((40, 200, (30, 100)), (40, 200, (30, 180)), (40, 200, (30, 181)), (3, 3, (34, 2))):
        for resample in ("bilinear", "bicubic", "lanczos"):
            check(noise(width, height, 2), size, resample)


def test_sources_of_any_layout(level: str) -> None:
    whole = noise(60, 50, 4)
    line = np.lib.stride_tricks.as_strided(whole, (1, 60, 3), (0, 3, 1))
    for source in (whole[::-1], whole[:, ::-1], whole.transpose(1, 0, 2), whole[5:40, 7:50], whole[::2], line):
        expected = by_pillow(np.ascontiguousarray(source), (33, 44), "bicubic")
        assert np.array_equal(resized(source, (33, 44), "bicubic"), expected)


def test_nothing_behind_the_source_is_read() -> None:
    """The source ends where readable memory ends."""
    code = """
import ctypes, mmap, numpy as np
from hydra_engine import _C
from hydra_engine.preprocess.media.images import Window, resize_into
page, pages = mmap.PAGESIZE, 8
memory = mmap.mmap(-1, page * (pages + 1))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * page), page, 0) == 0
bytes_ = np.frombuffer(memory, np.uint8)[: page * pages]
for level in {levels}:
    _C.force_isa(level)
    for width, height in ((1, 1), (1, 9), (2, 70), (7, 5), (33, 3), (100, 100)):
        source = bytes_[-3 * width * height :].reshape(height, width, 3)
        for size in ((1, 1), (50, height), (width, 31), (64, 64), (3, 2)):
            for resample in ("nearest", "box", "bilinear", "bicubic", "lanczos"):
                out = np.empty((size[1], size[0], 3), np.uint8)
                resize_into(source, size, resample, Window(0, 0, *size), out)
"""
    done = subprocess.run([sys.executable, "-c", code.format(levels=LEVELS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.returncode


def test_without_the_extension_pillow_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source, window = noise(61, 47, 6), Window(3, 5, 20, 11)
    for resample in RESAMPLING:
        native = resized(source, (40, 90), resample, window)
        with monkeypatch.context() as patch:
            patch.setattr(images, "_C", None)
            patch.setattr(images, "_PROBLEM", "not built", raising=False)
            assert np.array_equal(resized(source, (40, 90), resample, window), native)
            assert describe() == "Pillow: the native extension cannot be loaded (not built); run `make build`"
    assert describe() == f"native, {_C.isa()}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_width": 0},
        {"height": 0},
        {"width": 1 << 40},
        {"left": -1},
        {"left": 1},
        {"top": 1},
        {"columns": 0},
        {"rows": 9},
        {"source_stride": 29},
        {"out_stride": 23},
        {"filter": 5},
        {"filter": -1},
    ],
)
def test_wrong_numbers_are_refused(wrong: dict[str, int]) -> None:
    source, out = noise(10, 10, 0), np.zeros((8, 8, 3), np.uint8)
    right = {
        "source": source.ctypes.data,
        "source_stride": 30,
        "source_width": 10,
        "source_height": 10,
        "width": 8,
        "height": 8,
        "left": 0,
        "top": 0,
        "columns": 8,
        "rows": 8,
        "out": out.ctypes.data,
        "out_stride": 24,
        "filter": 3,
        "down_first": False,
    }
    _C.resize_rgb(**right)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected"):
        _C.resize_rgb(**(right | wrong))  # type: ignore[arg-type]
