"""A divided device as far as the host decides it: who shares when, in what order streams wait, what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine import _C
from hydra_engine.backend.cuda import sm_split as cuda_split
from hydra_engine.backend.cuda.sm_split import LANGUAGE, VISION, Sharing, Track, describe_split
from hydra_engine.backend.select import create_backend, resolve_sm_split
from hydra_engine.config import EngineConfig
from hydra_engine.errors import BackendError, ConfigError
from tests.examples import examples


def test_tokens_have_the_whole_device_while_no_picture_is_encoded() -> None:
    sharing = Sharing()
    assert sharing.set_partition(2) == 0 and not sharing._has_work(LANGUAGE)
    sharing.submitted(LANGUAGE)
    assert sharing.begin(LANGUAGE) == 0
    sharing.submitted(VISION)
    sharing.launched(LANGUAGE, lambda: True)
    sharing.submitted(LANGUAGE)
    assert sharing.begin(LANGUAGE) == 2
    sharing.launched(VISION, lambda: True)
    assert sharing.begin(LANGUAGE) == 0


def test_an_encode_has_the_whole_device_while_no_token_is_computed() -> None:
    sharing = Sharing()
    for _ in range(2):
        sharing.submitted(VISION)
        assert sharing.begin(VISION) == 0
        sharing.launched(VISION, lambda: True)
    sharing.submitted(LANGUAGE)
    sharing.submitted(VISION)
    assert sharing.begin(VISION) == 1


def test_an_encode_between_two_steps_shares_the_device_with_the_next_one() -> None:
    sharing = Sharing()
    for lane in (VISION, LANGUAGE):
        sharing.submitted(lane)
        sharing.begin(lane)
        sharing.launched(lane, lambda: True)
    assert sharing.begin(VISION) == 1
    assert sharing.begin(VISION) == 0, "no step since"


def test_an_encode_that_was_launched_and_still_runs_shares_the_device() -> None:
    sharing, done = Sharing(), [False]
    sharing.submitted(LANGUAGE)
    sharing.submitted(VISION)
    assert sharing.begin(VISION) == 1
    sharing.launched(VISION, lambda: done[0])
    assert sharing.begin(LANGUAGE) == 1
    done[0] = True
    assert sharing.set_partition(1) == 0


def test_a_step_beside_an_encode_on_the_whole_device_has_the_whole_device() -> None:
    sharing = Sharing()
    sharing.submitted(VISION)
    assert sharing.begin(VISION) == 0
    sharing.submitted(LANGUAGE)
    assert (sharing.begin(LANGUAGE), sharing.set_partition(2)) == (0, 0)
    sharing.launched(VISION, lambda: True)
    sharing.submitted(VISION)
    assert sharing.begin(VISION) == 2 == sharing.begin(LANGUAGE)


def test_a_step_moves_to_the_partition_that_it_chooses_and_the_next_encode_follows() -> None:
    sharing = Sharing()
    sharing.submitted(LANGUAGE)
    sharing.submitted(VISION)
    assert (sharing.begin(LANGUAGE), sharing.set_partition(3)) == (1, 3)
    assert sharing.begin(VISION) == 3
    assert sharing.set_partition(0) == 0, "vision stays on its part until the encode ends"
    sharing.launched(VISION, lambda: True)
    sharing.submitted(VISION)
    assert sharing.begin(VISION) == 0


def test_a_step_that_chose_more_stays_off_what_the_encode_has() -> None:
    """The next encode is on the larger partition's part, and the step after it follows."""
    sharing, done = Sharing((32, 64)), [False]
    sharing.submitted(LANGUAGE)
    sharing.submitted(VISION)
    assert (sharing.begin(LANGUAGE), sharing.set_partition(1), sharing.begin(VISION)) == (1, 1, 1)
    sharing.launched(VISION, lambda: done[0])
    sharing.submitted(VISION)
    assert sharing.set_partition(2) == 1
    assert sharing.begin(VISION) == 2
    assert sharing.set_partition(2) == 1
    done[0] = True
    assert sharing.set_partition(2) == 2 and sharing.set_partition(1) == 1


def test_an_encode_stays_off_what_a_step_has() -> None:
    """The steps after that one have gone to a smaller part, or to the whole device."""
    for chosen in (1, 0):
        sharing, done = Sharing((32, 64)), [False]
        sharing.submitted(VISION)
        sharing.submitted(LANGUAGE)
        assert (sharing.begin(LANGUAGE), sharing.set_partition(2)) == (1, 2)
        sharing.launched(LANGUAGE, lambda done=done: done[0])  # type: ignore[misc]
        sharing.submitted(LANGUAGE)
        sharing.begin(LANGUAGE)
        assert sharing.set_partition(chosen) == chosen
        assert sharing.begin(VISION) == 2
        sharing.launched(VISION, lambda: True)
        done[0] = True
        sharing.submitted(VISION)
        assert sharing.begin(VISION) == chosen


def test_jobs_that_have_ended_are_forgotten() -> None:
    """Jobs are forgotten where one lane alone has work, too."""
    sharing, asked = Sharing(), list[int]()

    def ended(number: int) -> bool:
        asked.append(number)
        return True

    for number in range(100):
        sharing.submitted(LANGUAGE)
        sharing.begin(LANGUAGE)
        sharing.launched(LANGUAGE, partial(ended, number))
    assert asked == [*range(99)], "each once, when the next one is launched"


def test_a_job_that_was_withdrawn_is_no_work() -> None:
    sharing = Sharing()
    sharing.submitted(VISION)
    assert sharing._has_work(VISION)
    sharing.withdrawn(VISION)
    assert not sharing._has_work(VISION)


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.permutations([16, 32, 64, 96]),
    events=st.lists(st.tuples(st.sampled_from(["step", "encode", "end"]), st.integers(0, 4)), max_size=40),
)
def test_parts_of_jobs_that_run_are_never_the_same(sizes: list[int], events: list[tuple[str, int]]) -> None:
    """Draws the partitions that steps choose and the order in which jobs end."""
    sharing = Sharing(sizes)
    running: dict[str, list[list[int]]] = {LANGUAGE: [], VISION: []}  # [partition, 1 once it has ended]

    def parts(lane: str) -> list[int]:
        return [sizes[place - 1] for place, ended in running[lane] if place and not ended]

    for event, number in events:
        if event == "end":
            lane = (LANGUAGE, VISION)[number % 2]
            for job in [job for job in running[lane] if not job[1]][:1]:
                job[1] = 1
            continue
        lane = LANGUAGE if event == "step" else VISION
        sharing.submitted(lane)
        place = sharing.begin(lane)
        if lane == LANGUAGE:
            place = sharing.set_partition(number)
            assert place in (0, number) or parts(VISION), "it is where it chose, unless an encode is in its way"
        running[lane].append(job := [place, 0])
        sharing.launched(lane, lambda job=job: bool(job[1]))  # type: ignore[misc]
        assert max(parts(LANGUAGE), default=0) <= min(parts(VISION), default=132), "a part of the one's lies outside"


class Recording:
    """A stream that notes for whom it waits."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def wait_stream(self, other: "Recording") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


def track() -> tuple[Any, list[str]]:
    log: list[str] = []
    streams: list[Any] = [Recording(name, log) for name in ("whole", "first", "second")]
    return Track(streams, use=lambda stream: log.append(f"use {stream.name}")), log  # type: ignore[attr-defined]


def test_a_lane_that_moves_waits_for_what_it_launched_before() -> None:
    moving, log = track()
    for partition in (0, 1, 1, 2, 0):
        moving.switch_to(partition)
    assert log == [
        *("first waits for whole", "use first"),
        *("second waits for first", "use second"),
        *("whole waits for second", "use whole"),
    ]


def test_a_scope_on_a_partition_is_left_even_when_it_raises() -> None:
    moving, log = track()
    with pytest.raises(KeyError), moving.use(2):
        assert moving.partition == 2
        raise KeyError
    assert moving.partition == 0 and log[-2:] == ["whole waits for second", "use whole"]


def test_the_note_says_how_counts_were_rounded() -> None:
    assert describe_split((32,), [(32, 100)], 132) == (
        "multiprocessors while both models run: 32 for tokens and 100 for pictures; else all for either"
    )
    assert describe_split((32,), [(32, 96)], 132).endswith(
        "else all for either; 4 left over, which the driver leaves out of every part"
    )
    assert describe_split((30, 64), [(32, 100), (64, 68)], 132) == (
        "multiprocessors while both models run: 32 for tokens and 100 for pictures (30 asked for, the device divides "
        "by more); else all for either; with a TPOT limit also 64 for tokens and 68 for pictures, step by step"
    )


def test_counts_are_read_and_bounded() -> None:
    assert all(EngineConfig(sm_split=text).sm_counts == () for text in ("off", " Off ", "auto"))
    assert EngineConfig(sm_split="32, 64").sm_counts == (32, 64)
    for wrong in ("", "0", "-8", "32,", "32;64", "1,2,3,4,5", "99999", "1" * 5000):
        with pytest.raises(ConfigError, match="sm_split must be auto, off or at most 4 numbers") as refused:
            EngineConfig(sm_split=wrong)
        assert refused.value.param == "sm_split"


def test_auto_divides_a_device_into_quarters() -> None:
    assert resolve_sm_split("auto", 132) == "32,64,96" and resolve_sm_split(" 30 ", 132) == " 30 "
    assert resolve_sm_split("auto", 0) == resolve_sm_split("auto", 20) == "off"


def test_a_processor_is_not_divided() -> None:
    with pytest.raises(ConfigError, match="the engine runs on a processor; set sm_split to off") as refused:
        create_backend("cpu", torch.float32, threads=1, sm_split=(32,))
    assert refused.value.param == "sm_split"


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            RuntimeError("the NVIDIA driver has no cuGreenCtxStreamCreate of CUDA 12.5"),
            BackendError,
            "cannot be divided, the NVIDIA driver has no cuGreenCtxStreamCreate of CUDA 12.5; set sm_split to off, or",
        ),
        (
            ValueError("counts: expected 1 to 131 of the device's 132 multiprocessors, got 200 [a < b, x/split.cpp:9]"),
            ConfigError,
            "sm_split: expected 1 to 131 of the device's 132 multiprocessors, got 200$",
        ),
    ],
)
def test_what_the_driver_refuses_is_told_without_places_in_sources(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], said: str
) -> None:
    def refuse(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(_C, "cuda_split_streams", refuse)
    with pytest.raises(kind, match=said):
        cuda_split.create_split_streams(torch.device("cuda", 0), (32,), -1, 0)


@pytest.mark.skipif(_C.cuda_probe()["status"] == "ok", reason="there is a GPU that can be used")
def test_without_a_gpu_the_extension_says_why() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        _C.cuda_split_streams(0, [32], -1, 0)
