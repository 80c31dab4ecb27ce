"""A divided device: which multiprocessors a lane's kernels ran on, as the kernels themselves say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from hydra_engine.backend.cuda import sm_split
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.lanes import priorities
from hydra_engine.backend.cuda.sm_split import SplitDevice
from hydra_engine.backend.device import Lane
from hydra_engine.backend.select import create_backend
from hydra_engine.errors import BackendError, ConfigError

pytestmark = [pytest.mark.cuda, pytest.mark.alone]
NUM_BLOCKS = 4096
LENT = 2  # that all green contexts share on compute capability 9.x once a module with dynamic parallelism was loaded
ROUNDS = 2000


@triton.jit
def _where(out, rounds):  # type: ignore[no-untyped-def]
    """Stores the multiprocessor of each block, after work that keeps it there while others begin."""
    value = tl.program_id(0).to(tl.float32)
    for _ in range(rounds):
        value = value * 0.5 + 1.0
    tl.store(out + tl.program_id(0), smid() + (value < 0.0).to(tl.int32))


def note(out: Tensor) -> None:
    _where[(NUM_BLOCKS,)](out, ROUNDS)


def sms(out: Tensor) -> set[int]:
    return set(out.tolist())


def divided(cuda: torch.device, *counts: int) -> SplitDevice:
    return SplitDevice(cuda, counts, priorities("balanced", torch.cuda.get_device_capability(cuda)))


@pytest.fixture(scope="module")
def split(cuda: torch.device) -> SplitDevice:
    try:
        return divided(cuda, 16, 32)
    except (BackendError, ConfigError) as error:
        pytest.skip(error.message)


@pytest.fixture
def device(cuda: torch.device, split: SplitDevice) -> CudaDevice:
    assert cuda.index is not None
    return CudaDevice(cuda.index, 1, split=split)


@pytest.fixture
def language(device: CudaDevice, split: SplitDevice) -> Iterator[Lane]:
    split.set_partition(1)
    lane = device.lane("language")
    yield lane
    lane.close()


@pytest.fixture
def vision(device: CudaDevice) -> Iterator[Lane]:
    lane = device.lane("vision")
    yield lane
    lane.close()


@pytest.fixture
def noted(cuda: torch.device) -> Callable[[], Tensor]:
    return partial(torch.full, (NUM_BLOCKS,), -1, dtype=torch.int32, device=cuda)


def wait(lane: Lane, job: Callable[[], None]) -> None:
    """Raises what the job raises."""
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        done.set()

    lane.submit(run)
    assert done.wait(60)
    if errors:
        raise errors[0]


def test_there_is_a_partition_for_each_count_and_a_note(device: CudaDevice, split: SplitDevice) -> None:
    assert device.partitions.count == 3
    assert split.note.startswith("multiprocessors while both models run: 16 for tokens")


def test_lanes_on_a_partition_run_on_disjoint_multiprocessors(
    device: CudaDevice, language: Lane, vision: Lane, noted: Callable[[], Tensor], cuda: torch.device
) -> None:
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    for partition, count in ((1, 16), (2, 32)):
        tokens, pictures = noted(), noted()

        def job(out: Tensor, partition: int = partition) -> None:
            with device.partitions.use(partition):
                assert device.partitions.current() == partition
                note(out)
                device.finish()

        for lane, out in ((language, tokens), (vision, pictures)):
            wait(lane, partial(job, out))
        assert len(sms(tokens) & sms(pictures)) <= LENT
        assert count <= len(sms(tokens)) < num_sms // 2
        assert len(sms(tokens)) + len(sms(pictures)) <= num_sms + LENT


def test_parts_of_all_partitions_nest(
    device: CudaDevice, language: Lane, vision: Lane, noted: Callable[[], Tensor]
) -> None:
    """A lane on one partition therefore shares nothing with the other one on a larger one."""
    used: dict[tuple[str, int], set[int]] = {}
    for (name, lane), partition in product((("language", language), ("vision", vision)), (1, 2)):
        out = noted()

        def job(out: Tensor = out, partition: int = partition) -> None:
            with device.partitions.use(partition):
                note(out)
                device.finish()

        wait(lane, job)
        used[name, partition] = sms(out)
    assert len(used["language", 1] - used["language", 2]) <= LENT
    assert len(used["vision", 2] - used["vision", 1]) <= LENT
    assert len(used["language", 1] & used["vision", 2]) <= LENT


@pytest.mark.parametrize("count", [32, 64])
def test_a_spread_part_is_another_one_and_shares_nothing_either(
    cuda: torch.device, split: SplitDevice, noted: Callable[[], Tensor], count: int
) -> None:
    used = []
    for spread in (False, True):
        ((*handles, language_sms, vision_sms),) = sm_split.create_split_streams(cuda, (count,), 0, 0, spread=spread)
        parts = []
        for handle in handles:
            out = noted()
            stream = torch.cuda.ExternalStream(handle, device=cuda)
            stream.wait_stream(torch.cuda.current_stream(cuda))
            with torch.cuda.stream(stream):
                note(out)
            stream.synchronize()
            parts.append(sms(out))
        assert len(parts[0] & parts[1]) <= LENT
        assert count <= language_sms <= len(parts[0]) and vision_sms <= len(parts[1])
        used.append(parts[0])
    together, spread_out = used
    assert abs(len(together) - len(spread_out)) <= LENT < len(spread_out - together)


def test_a_step_that_chose_more_stays_off_what_an_encode_has(
    device: CudaDevice, split: SplitDevice, language: Lane, vision: Lane, noted: Callable[[], Tensor]
) -> None:
    tokens, pictures = noted(), noted()
    begin, launched, places = threading.Event(), threading.Event(), list[int]()

    def encode() -> None:
        note(pictures)
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        launched.set()

    def step() -> None:
        split.set_partition(2)
        places.append(device.partitions.current())
        note(tokens)
        device.finish()

    language.submit(lambda: begin.wait(60))  # type: ignore[arg-type,return-value]
    vision.submit(encode)  # beside a step, so on a part
    assert launched.wait(60)
    begin.set()
    wait(language, step)
    wait(vision, device.finish)
    assert places == [1] and len(sms(tokens) & sms(pictures)) <= LENT


def test_streams_have_the_priorities_of_their_device(cuda: torch.device, split: SplitDevice) -> None:
    """None where kernels begin early, neither those of parts."""
    backend = create_backend(f"cuda:{cuda.index}", torch.float32, threads=1, lane_priority="latency", sm_split=(16, 32))
    wanted = priorities("latency", torch.cuda.get_device_capability(cuda))
    for name in ("language", "vision"):
        lane: Any = backend.device.lane(name)
        assert [stream.priority for stream in lane._track.streams] == [wanted.get(name, 0)] * 3
        lane.close()


def test_the_whole_device_is_used_on_partition_0(
    device: CudaDevice, language: Lane, noted: Callable[[], Tensor], cuda: torch.device
) -> None:
    out = noted()

    def job() -> None:
        assert device.partitions.current() == 0
        note(out)
        device.finish()

    wait(language, job)
    assert len(sms(out)) == torch.cuda.get_device_properties(cuda).multi_processor_count


def test_a_lane_moves_when_the_other_has_work_and_back(device: CudaDevice, language: Lane, vision: Lane) -> None:
    seen: dict[str, list[int]] = {"language": [], "vision": []}
    encode, begun = threading.Event(), threading.Event()

    def encoding() -> None:
        seen["vision"].append(device.partitions.current())
        begun.set()
        assert encode.wait(60)

    wait(language, lambda: seen["language"].append(device.partitions.current()))
    vision.submit(encoding)
    assert begun.wait(60)
    wait(language, lambda: seen["language"].append(device.partitions.current()))
    encode.set()
    wait(vision, lambda: seen["vision"].append(device.partitions.current()))  # a step began since the last encode did
    vision.close()
    wait(language, lambda: seen["language"].append(device.partitions.current()))
    assert seen == {"language": [0, 1, 0], "vision": [1, 1]}


def test_a_graph_keeps_the_partition_of_its_capture(
    device: CudaDevice, language: Lane, noted: Callable[[], Tensor]
) -> None:
    """Other partitions keep their graphs, wherever the lane is now."""
    outs, graphs = [noted() for _ in range(3)], {}

    def capture(partition: int) -> None:
        with device.partitions.use(partition):
            graphs[partition] = device.capture(partial(note, outs[partition]))

    for partition in range(3):
        wait(language, partial(capture, partition))

    def replay(partition: int) -> None:
        outs[partition].fill_(-1)
        with device.partitions.use(partition):
            graphs[partition].replay()
            device.finish()

    used = []
    for partition in (2, 0, 1):
        wait(language, partial(replay, partition))
        assert -1 not in sms(outs[partition])
        used.append(len(sms(outs[partition])))
    at_2, at_0, at_1 = used
    assert at_1 < at_2 < at_0


def test_what_a_lane_launched_before_it_moved_comes_first(
    device: CudaDevice, language: Lane, cuda: torch.device
) -> None:
    """Launches are slow and read what the one before wrote, on another partition."""
    value = torch.zeros(1 << 16, dtype=torch.int64, device=cuda)
    fetches = []

    def job() -> None:
        for turn in range(30):
            with device.partitions.use(turn % 3):
                torch.cuda._sleep(1_000_000)
                value.mul_(2).add_(turn % 3)
        fetches.append(device.fetch((value,)))

    wait(language, job)
    expected = 0
    for turn in range(30):
        expected = 2 * expected + turn % 3
    (got,) = fetches[0].result()
    assert (got == expected).all()


def test_a_job_on_a_partition_begins_behind_what_its_submitter_launched(
    device: CudaDevice, language: Lane, vision: Lane, cuda: torch.device
) -> None:
    value = torch.zeros(1000, device=cuda)
    release = threading.Event()
    vision.submit(lambda: release.wait(60))  # type: ignore[arg-type,return-value]
    seen: list[Tensor] = []
    torch.cuda._sleep(50_000_000)
    value.add_(1)

    def job() -> None:
        assert device.partitions.current() == 1
        seen.append(value.clone())
        device.finish()

    try:
        wait(language, job)
    finally:
        release.set()
    assert bool((seen[0] == 1).all())


def test_results_are_the_same_on_every_partition(device: CudaDevice, language: Lane, cuda: torch.device) -> None:
    x = torch.randn(512, 512, device=cuda)
    results: list[Tensor] = []

    def job() -> None:
        for partition in range(3):
            with device.partitions.use(partition):
                results.append((x @ x).softmax(-1).argmax(-1))
        device.finish()

    wait(language, job)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_closing_a_lane_waits_for_the_partition_it_was_on(device: CudaDevice, cuda: torch.device) -> None:
    lane = device.lane("language")
    ended: list[torch.cuda.Event] = []

    def job() -> None:
        with device.partitions.use(1):
            torch.cuda._sleep(50_000_000)
            ended.append(torch.cuda.Event())
            ended[0].record()

    lane.submit(job)
    lane.close()
    lane.close()
    assert ended[0].query()


def test_a_partition_that_is_not_there_is_refused(device: CudaDevice) -> None:
    with pytest.raises(ValueError, match="partition: expected 0 to 2, got 3"):
        device.partitions.use(3)
    with pytest.raises(ValueError, match="expected 0 outside of the language and the vision lane, got 1"):
        device.partitions.use(1)
    with device.partitions.use(0):
        assert device.partitions.current() == 0


def test_what_leaves_less_than_a_part_is_refused_by_its_name(cuda: torch.device, split: SplitDevice) -> None:
    """A share that leaves less than a part is refused with the setting's name, unless the device makes parts so
    small."""
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    try:
        made = divided(cuda, num_sms - 4)
    except ConfigError as error:
        assert "multiprocessors" in error.message and error.param == "sm_split"
    else:
        assert made.count == 2


def test_more_than_there_is_cannot_be_split_off(cuda: torch.device, split: SplitDevice) -> None:
    for count in (4096, torch.cuda.get_device_properties(cuda).multi_processor_count):
        with pytest.raises(ConfigError, match=r"sm_split: expected 1 to [0-9]+ of the device's [0-9]+ multiproc"):
            divided(cuda, count)
