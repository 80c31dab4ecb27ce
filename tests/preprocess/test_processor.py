"""Children of a model's own processor: more of them where pictures wait, each the end of one picture at most."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from hydra_engine.core.ids import ImageDigest
from hydra_engine.errors import CheckpointError, EngineClosed, HydraError, InvalidImage
from hydra_engine.models.specs.base import ProcessorSpec
from hydra_engine.preprocess.sandbox.processor import ImageProcessor, ProcessedPicture

pytestmark = pytest.mark.slow  # processes
WAITS, ENDS = (1, 1), (2, 2)  # sizes of pictures: it waits for a file, it ends its process
TOKENS = 6  # of a picture


class Expansion:
    prefix, suffix, token_ids = "", "", list(range(TOKENS))

    def __init__(self, grid: tuple[int, int]) -> None:
        self.grid = grid
        self.arrays: dict[str, npt.NDArray[Any]] = {"pid": np.array([os.getpid()])}

    def num_patches(self, _patch_size: int) -> int:
        return 1


class Processor:
    """A processor in the child. `inputs` of its spec: the file that it waits for, and its grid."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self._gate, *grid = spec.inputs
        self._grid = (int(grid[0]), int(grid[1]))
        if not Path(spec.model_dir).exists():
            raise CheckpointError("there is no model")

    def expand(self, image: Image.Image) -> Expansion:
        if image.size == ENDS:
            os.abort()
        while image.size == WAITS and not os.path.exists(self._gate):
            time.sleep(0.01)
        return Expansion(self._grid)


Make = Callable[..., ImageProcessor]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def make(tmp_path: Path, gate: Path) -> Iterator[Make]:
    made: list[ImageProcessor] = []

    def processor(max_children: int, *, multimodal: bool = False, grid: Sequence[int] = (0, 0)) -> ImageProcessor:
        spec = ProcessorSpec(
            *(str(tmp_path), "", "", 0, 0),
            bidirectional=False,
            inputs=(str(gate), *map(str, grid)),
            patch_size=1,
            trust_remote_code=False,
            loader=f"{__name__}:Processor",
            multimodal=multimodal,
        )
        made.append(ImageProcessor(spec, max_children))
        return made[-1]

    yield processor
    for one in made:
        one.close()


def send(pool: ThreadPoolExecutor, processor: ImageProcessor, size: tuple[int, int]) -> Future[ProcessedPicture]:
    return pool.submit(processor.process, ImageDigest(bytes(32)), size, bytes(3 * size[0] * size[1]))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def pid_of(picture: ProcessedPicture) -> int:
    return int(np.frombuffer(picture.data[8 * TOKENS :], np.int64)[0])


def test_children_are_started_where_pictures_wait_and_no_more_than_allowed(make: Make, gate: Path) -> None:
    processor = make(2)
    processor.warm_up()
    with ThreadPoolExecutor() as pool:
        alone = [send(pool, processor, (3, 3)).result() for _ in range(3)]
        assert {pid_of(picture) for picture in alone} == set(processor._host.pids()), "one is enough for them"
        tasks = [send(pool, processor, WAITS) for _ in range(4)]
        until(lambda: [child._has_started for child in processor._host._children] == [True, True])
        until(lambda: not processor._host._idle)
        assert not any(task.done() for task in tasks)
        gate.touch()
        assert {pid_of(task.result()) for task in tasks} == set(processor._host.pids())
        assert len(processor._host.pids()) == 2
    pids = processor._host.pids()
    processor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_picture_that_ends_its_child_ends_no_other(make: Make, gate: Path) -> None:
    processor = make(2)
    with ThreadPoolExecutor() as pool:
        waiting = send(pool, processor, WAITS)
        until(lambda: len(processor._host.pids()) == 1)
        with pytest.raises(InvalidImage, match="the model's processor failed on it"):
            send(pool, processor, ENDS).result()
        assert not waiting.done()
        gate.touch()
        assert pid_of(waiting.result()) in processor._host.pids()
        assert send(pool, processor, (3, 3)).result().num_tokens == TOKENS


def test_a_child_that_cannot_start_leaves_pictures_to_the_others(make: Make, gate: Path, tmp_path: Path) -> None:
    processor = make(2)
    processor.warm_up()
    with ThreadPoolExecutor() as pool:
        tmp_path.rename(tmp_path.with_name("elsewhere"))
        tasks = [send(pool, processor, WAITS) for _ in range(2)]
        until(lambda: processor._left == 0)
        until(lambda: processor._left == 1)
        tmp_path.with_name("elsewhere").rename(tmp_path)
        gate.touch()
        assert len({pid_of(task.result()) for task in tasks}) == 1


def test_the_end_ends_what_starts_and_what_waits(make: Make) -> None:
    processor = make(3)
    processor.warm_up()
    with ThreadPoolExecutor() as pool:
        tasks = [send(pool, processor, WAITS) for _ in range(3)]
        until(lambda: len(processor._host.pids()) >= 2)
        processor.close()
        for task in tasks:
            with pytest.raises(HydraError) as caught:
                task.result(30)
            assert isinstance(caught.value, EngineClosed)
    until(lambda: processor._host.pids() == [])  # a thread that started one more notices its end


@pytest.mark.parametrize(
    ("multimodal", "grid", "right"),
    [
        (True, (2, 3), True),
        (False, (0, 0), True),
        (True, (2, 2), False),
        (True, (-2, -3), False),
        (False, (2, 3), False),
    ],
)
def test_a_grid_has_the_tokens_of_the_picture(make: Make, multimodal: bool, grid: tuple[int, int], right: bool) -> None:
    processor = make(1, multimodal=multimodal, grid=grid)
    with ThreadPoolExecutor() as pool:
        task = send(pool, processor, (3, 3))
        if not right:
            with pytest.raises(InvalidImage, match="the model's processor failed on it"):
                task.result()
            return
        (item,) = task.result().plan().items
        assert (item.rows, item.columns, item.num_tokens) == (*grid, TOKENS)
